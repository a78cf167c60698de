"""CRIU on this machine: whether it can freeze sessions, what it is told, and what it says when it fails.

CRIU writes the memory, descriptors and namespaces of all processes of a container into files, and makes the
processes again of them (https://criu.org). The container runtime calls it; what that does not pass on is in a
configuration file, which the container names in an annotation and which is written when it is needed.
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

ANNOTATION = "org.criu.config"
# Debian 12's 3.17 does not start on Linux 6.18 (vDSO), and 4.1 fails at the first TCP socket (SO_PASSCRED)
OLDEST = (4, 2)
CHECK_S = 20.0  # seconds for `criu --version` and `criu check`: 0.1 quiet
INSTALL = "apt-get install criu where the distribution has 4.2, else tools/criu.sh"
# seconds that a dump may take: 1 s seen with 300 MB. A call is held 10 s for it, and CRIU itself gives up
# after 10 s of collecting processes, but hangs at one that it cannot stop
DUMP_S = 12.0
GHOST_BYTES = 64 << 20  # of a file that is open and has no name any more; CRIU's own limit is 1 MiB
SHOWN = 200  # characters of one error of CRIU's


async def freezing_obstacle(
    criu: Path | None, *, oci_runtime: Path | None, freezes: bool, overlay: bool, root: bool
) -> str | None:
    """Why sessions cannot be frozen on this machine, with the remedy; None where they can. `overlay`: layers
    are native overlay's. `root`: the node is root of the machine, not of a user namespace.
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
    if (int(found[1]), int(found[2])) < OLDEST:
        return (
            f"criu is {found[1]}.{found[2]}, and {OLDEST[0]}.{OLDEST[1]} is the oldest that works: {INSTALL}"
        )
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
    """The first error in a log of CRIU's, without its place in the source."""
    # it warns as of an error that it may not raise its own limit of files, and goes on
    lines = [line for line in log.splitlines() if "Error (" in line and "RLIMIT_NOFILE for self" not in line]
    found = re.search(r"Error \([^)]*\):\s*(.*)", lines[0]) if lines else None
    return found[1][:SHOWN] if found else None


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["it printed nothing"])[-1][:SHOWN]


@define(eq=False, kw_only=True)
class Criu:
    """What is called to freeze and restore the containers of one store. `configs`: the folder of their
    configuration files.
    """

    oci_runtime: Path
    environment: Mapping[str, str]
    configs: Path

    def config(self, container: str) -> Path:
        """The configuration file that a container names."""
        return self.configs / f"{container}.conf"

    def configure_dump(self, container: str, places: Sequence[str]) -> None:
        """Write the options of a dump. Watches on files are looked up below `places`, because overlay has no
        handles for them. Connections are left out: a copy finds them closed.
        """
        scanned = (f"irmap-scan-path={place}" for place in places)
        self._write_config(
            container, ("tcp-close", "force-irmap", *scanned, "file-locks", f"ghost-limit={GHOST_BYTES}")
        )

    def configure_restore(self, container: str) -> None:
        """Write the options of a restore: stopped, so that nothing runs before its endpoint listens. Mounts
        in the older way, because the first process is a file that is mounted.
        """
        self._write_config(container, ("tcp-close", "mntns-compat-mode", "leave-stopped"))

    def forget(self, container: str) -> None:
        """Remove a container's configuration file."""
        self.config(container).unlink(missing_ok=True)

    def _write_config(self, container: str, lines: Sequence[str]) -> None:
        self.configs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.config(container).write_text("\n".join((*lines, "verbosity=2", "")))

    async def dump(self, container: str, images: Path, work: Path) -> None:
        """Write the processes of a container, by its id, to `images`, and leave them as they are. Not
        cancellable: CRIU puts code into the processes, and has to take it out again. After DUMP_S it is
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
            why = error_in(work / "dump.log")
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
    """What a dump failed of: CRIU's own first error, or that one of the two programs was killed."""
    output = done.stdout.decode(errors="replace")
    if done.returncode < 0:
        return f"the container runtime was ended by signal {-done.returncode}"
    # what the runtime says where CRIU is gone: the connection between them ended
    if (why := error_in(log)) is None and output.rstrip().endswith('EOF"'):
        return "it ended in the middle, as where it is killed"
    return why or _last_line(output)


def error_in(log: Path) -> str | None:
    """The first error in a log file; None where there is none."""
    try:
        return first_error(log.read_text(errors="replace"))
    except OSError:
        return None
