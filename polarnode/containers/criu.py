"""CRIU on this machine: whether it can freeze sessions, its options, and its errors.

CRIU writes the memory, descriptors and namespaces of all processes of a container into files, and restores
the processes from them (https://criu.org). The container runtime calls it. Options that the container runtime
does not pass on are in a configuration file, which the container names in an annotation, and which is written
when it is needed.
"""

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import trio
from attrs import define

from polarnode.core.errors import RuntimeFault

CONFIG_ANNOTATION = "org.criu.config"
# Debian 12's 3.17 does not start on Linux 6.18 (vDSO), and 4.1 fails at the first TCP socket (SO_PASSCRED)
OLDEST_VERSION = (4, 2)
CHECK_S = 20.0  # seconds for `criu --version` and `criu check`: 0.1 quiet
INSTALL = "apt-get install criu where the distribution has 4.2, else tools/criu.sh"
# The most seconds of a dump. One of 300 MB took 1 s. A model call is held 10 s for it. CRIU itself gives up
# after 10 s of collecting processes, but hangs at a process that it cannot stop.
DUMP_S = 12.0
MAX_GHOST_BYTES = (
    64 << 20
)  # the most bytes of an open file that has no name any more; CRIU's own limit is 1 MiB
SHOWN = 200  # characters of one error of CRIU's


async def freezing_obstacle(
    criu: Path | None, *, oci_runtime: Path | None, freezes: bool, overlay: bool, root: bool
) -> str | None:
    """Why sessions cannot be frozen on this machine, with the remedy; None if they can. `overlay`: layers are
    those of native overlay. `root`: the node is root of the machine, not of a user namespace.
    """
    if criu is None:
        return f"criu is not installed: {INSTALL}"
    if not root:
        return "criu needs root of the machine, and this node is not"
    if oci_runtime is None or oci_runtime.name != "runc":
        return "containers must be run by runc: apt-get install runc, with cgroups v1 or hybrid"
    if not freezes:
        return "no freezer stops a container while it is copied: mount the freezer controller, or use v2"
    if not overlay:
        return "containers have no layer of their own to copy: podman_dir must be on native overlay"
    return await _version(criu) or await _checked(criu)


async def _version(criu: Path) -> str | None:
    code, output = await _asked(criu, "--version")
    found = re.search(r"Version: (\d+)\.(\d+)", output)
    if code or found is None:
        return f"{criu} --version fails: {_last_line(output)}"
    if (int(found[1]), int(found[2])) < OLDEST_VERSION:
        oldest = f"{OLDEST_VERSION[0]}.{OLDEST_VERSION[1]}"
        return f"criu is {found[1]}.{found[2]}, and {oldest} is the oldest that works: {INSTALL}"
    return None


async def _checked(criu: Path) -> str | None:
    code, output = await _asked(criu, "check")
    return f"criu check: {first_error(output) or _last_line(output)}" if code else None


async def _asked(criu: Path, *argv: str) -> tuple[int, str]:
    with trio.move_on_after(CHECK_S):
        try:
            done = await trio.run_process(
                [criu, *argv], capture_stdout=True, stderr=subprocess.STDOUT, check=False
            )
        except OSError as error:
            return 1, str(error)
        return done.returncode, done.stdout.decode(errors="replace")
    return 1, f"it does not answer in {CHECK_S:.0f} s"


def first_error(log: str) -> str | None:
    """The first error in a log of CRIU's, without its position in CRIU's source."""
    # CRIU logs an error if it may not raise its own limit of files, and continues.
    lines = [line for line in log.splitlines() if "Error (" in line and "RLIMIT_NOFILE for self" not in line]
    found = re.search(r"Error \([^)]*\):\s*(.*)", lines[0]) if lines else None
    return found[1][:SHOWN] if found else None


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["it printed nothing"])[-1][:SHOWN]


@define(eq=False, kw_only=True)
class Criu:
    """Calls CRIU to freeze and restore the containers of one store. `configs`: the folder of their
    configuration files.
    """

    oci_runtime: Path
    environment: Mapping[str, str]
    configs: Path

    def config(self, container: str) -> Path:
        """The configuration file that a container names."""
        return self.configs / f"{container}.conf"

    def configure_dump(self, container: str, places: Sequence[str]) -> None:
        """Write the options of a dump. Watched files are looked up below `places`, because overlay has no
        handles for them. Connections are left out, so a copy finds them closed.
        """
        scanned = (f"irmap-scan-path={place}" for place in places)
        self._write_config(
            container, ("tcp-close", "force-irmap", *scanned, "file-locks", f"ghost-limit={MAX_GHOST_BYTES}")
        )

    def configure_restore(self, container: str) -> None:
        """Write the options of a restore. Processes are left stopped, so that nothing runs before the
        endpoint listens. The older way of mounting is used, because the first process is a file that is
        mounted.
        """
        self._write_config(container, ("tcp-close", "mntns-compat-mode", "leave-stopped"))

    def forget(self, container: str) -> None:
        """Remove a container's configuration file."""
        self.config(container).unlink(missing_ok=True)

    def _write_config(self, container: str, lines: Sequence[str]) -> None:
        self.configs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.config(container).write_text("\n".join((*lines, "verbosity=2", "")))

    async def dump(self, container: str, images: Path, work: Path) -> None:
        """Write the processes of a container, by its id, to `images`, and let them run on. A dump cannot be
        cancelled, because CRIU puts code into the processes and has to remove it again. After DUMP_S it is
        killed. Raises RuntimeFault with its first error.
        """
        argv = [
            *(str(self.oci_runtime), "checkpoint", "--leave-running"),
            *("--image-path", str(images), "--work-path", str(work), container),
        ]
        with trio.move_on_after(DUMP_S, shield=True) as scope:
            done = await trio.run_process(
                argv,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_stdout=True,
                stderr=subprocess.STDOUT,
                check=False,
                start_new_session=True,  # a group that is killed with what it has started
                deliver_cancel=_kill_group,
            )
        if scope.cancelled_caught:
            why = logged_error(work / "dump.log")
            raise RuntimeFault(
                f"criu was not done after {DUMP_S:.0f} s and was killed{f': {why}' if why else ''}"
            )
        if done.returncode:
            raise RuntimeFault(f"criu cannot write it: {_why_not(done, work / 'dump.log')}")


async def _kill_group(process: trio.Process) -> None:
    await trio.lowlevel.checkpoint()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _why_not(done: "subprocess.CompletedProcess[bytes]", log: Path) -> str:
    """Why a dump failed: CRIU's own first error, or that one of the two programs was killed."""
    output = done.stdout.decode(errors="replace")
    if done.returncode < 0:
        return f"the container runtime was ended by signal {-done.returncode}"
    # The container runtime says this if CRIU is gone, because the connection between them has ended.
    if (why := logged_error(log)) is None and output.rstrip().endswith('EOF"'):
        return "it ended in the middle, as where it is killed"
    return why or _last_line(output)


def logged_error(log: Path) -> str | None:
    """The first error in a log file; None where there is none."""
    try:
        return first_error(log.read_text(errors="replace"))
    except OSError:
        return None
