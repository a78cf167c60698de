"""Containers that Podman has forgotten and the kernel has not: a node that is killed between a container's `init` and its note of that.

Its conmon and its first process, which waits to be let run, then live on, and Podman, for which that container never began, removes no more than
its own record. They are found by their conmon. The rule for whoever edits it: processes are read before Podman is asked, because a container is
in its records from before its conmon begins until after its first process has ended; what it does not know then, nobody will ever end but us.
"""

import logging
import os
import signal
import subprocess
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import trio
from attrs import frozen

PROGRAM = b"conmon"
CLEAR_S = 20.0  # seconds for the OCI runtime to clear what it knows of one: 0.05 quiet; one that hangs must not keep a node from starting

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class Conmon:
    """The process that watches over one container."""

    pid: int
    container: str


@frozen(kw_only=True)
class Forgotten:
    """Those of one store. `storage` is its graph root, below which the bundles of its containers are and of no other Podman's."""

    storage: Path
    oci_runtime: Path

    def conmons(self) -> tuple[Conmon, ...]:
        """Every conmon of this store whose container runs, or is about to. One that is done waits for Podman to clean up, and needs no help."""
        found = (self._read(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
        return tuple(conmon for conmon in found if conmon is not None)

    def _read(self, pid: int) -> Conmon | None:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it ended while we looked
            return None
        if os.path.basename(words[0]) != PROGRAM or not {b"-c", b"-u", b"-b"} <= set(words):
            return None
        container, unit, bundle = (os.fsdecode(words[words.index(word) + 1]) for word in (b"-c", b"-u", b"-b"))
        of_container = unit == container  # an exec has one too, which ends a minute after its container
        if not of_container or not Path(bundle).is_relative_to(self.storage) or all(map(_cleans_up, _children(pid))):
            return None
        return Conmon(pid=pid, container=container)

    async def end(self, conmons: Collection[Conmon]) -> None:
        """End those that still run with all they watch over, and clear what the OCI runtime remembers. Never raises."""
        still = [conmon for conmon in conmons if self._read(conmon.pid) == conmon]  # one that was just being removed has ended meanwhile
        for conmon in still:
            for pid in (conmon.pid, *_below(conmon.pid)):  # read before the first is killed: orphans have no parent to be found by
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for container in {conmon.container for conmon in still}:
            await self._clear(container)
            _log.warning("container %s, which podman had forgotten, was ended", container[:12])

    async def _clear(self, container: str) -> None:
        with trio.move_on_after(CLEAR_S), suppress(OSError):  # one that it does not know either is cleared already
            await trio.run_process(
                [self.oci_runtime, "delete", "--force", container], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )


def _below(pid: int) -> list[int]:
    """Every process that descends from one."""
    return [each for child in _children(pid) for each in (child, *_below(child))]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def _cleans_up(pid: int) -> bool:
    """Whether a conmon's child is what it starts when its container has ended, or has ended itself."""
    try:
        return os.path.basename(Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]) in (b"podman", b"")
    except OSError:
        return True
