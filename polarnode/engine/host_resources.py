"""What an engine host holds on the machine: temporary folder, shared memory, socket pair, lifeline pipe, log
file.

SGLang ends its own helpers with SIGKILL, so they never clean up. Every host therefore gets a tag of its own,
which is in the name of its folder and of everything it puts into /dev/shm. The node holds a lock in the
folder. A folder whose lock is free belongs to a node that was killed, and is swept.

Only the node may hold the lifeline's write end. Descriptors are made non-inheritable (PEP 446), and only the
host's own two are passed on. When the node dies, however it dies, the kernel closes the write end and the
host ends itself.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from attrs import define, frozen

from polarnode.core.errors import EngineError
from polarnode.engine.diagnosis import TAIL
from polarnode.support.bounded import open_private

PREFIX = "polarnode-engine-"
SHARED_MEMORY = Path("/dev/shm")
# Characters of a scratch path: SGLang puts sockets in it, and the kernel takes 107 for a socket's whole path.
LONGEST = 70
MIN_STALE_AGE_S = 60.0  # seconds: the lock of a folder this young may not be taken yet


@frozen
class ScratchFolder:
    """A host's own temporary folder. `tag` names everything it shares in memory."""

    tag: str
    path: Path


@contextmanager
def open_scratch() -> Iterator[ScratchFolder]:
    """A fresh folder under the temporary folder, locked while the block lasts. Afterwards nothing of the host
    is left on disk or in memory.
    """
    tag = f"pn{uuid4().hex[:12]}"
    scratch = ScratchFolder(tag, Path(tempfile.gettempdir()) / f"{PREFIX}{tag}")
    if len(str(scratch.path)) > LONGEST:
        raise EngineError(
            f"TMPDIR={tempfile.gettempdir()} is too long for the engine's sockets: set a shorter one",
            retryable=False,
        )
    scratch.path.mkdir(mode=0o700)
    lock = os.open(scratch.path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield scratch
    finally:
        os.close(lock)
        _remove(scratch.path)


def sweep() -> int:
    """Remove what hosts of killed nodes left, and return how many folders that were. Those of other users and
    of living nodes are not touched.
    """
    return sum(_remove_stale(path) for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))


def _remove_stale(path: Path) -> bool:
    with contextlib.suppress(OSError):  # it is another user's, or gone meanwhile
        if time.time() - path.stat().st_mtime > MIN_STALE_AGE_S and not _locked(path / "lock"):
            _remove(path)
            return True
    return False


def _locked(path: Path) -> bool:
    """Whether a living node holds the folder. A folder without a lock file was being removed when its host
    was killed.
    """
    try:
        lock = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _remove(path: Path) -> None:
    tag = path.name.removeprefix(PREFIX)
    for shared in SHARED_MEMORY.glob(f"*{tag}*"):
        with contextlib.suppress(OSError):  # it is another user's of the same name, or gone meanwhile
            shared.unlink()
    shutil.rmtree(path, ignore_errors=True)


@define(eq=False)
class HostWires:
    """The connections to one host. `ours` is non-blocking and ours. `host` and `lifeline` are the host's
    until `close_host_ends`, and `_held` is the lifeline's write end.
    """

    ours: socket.socket
    _host: socket.socket
    _lifeline: int
    _held: int

    def theirs(self) -> tuple[int, ...]:
        return (self._host.fileno(), self._lifeline)

    def arguments(self) -> list[str]:
        return ["--fd", str(self._host.fileno()), "--lifeline-fd", str(self._lifeline)]

    def close_host_ends(self) -> None:
        """Close our copies of the host's ends, once the host runs. Otherwise its death would not close the
        socket.
        """
        self._host.close()
        self._lifeline = _close(self._lifeline)

    def cut(self) -> None:
        """Close the lifeline, so that the host ends its session immediately."""
        self._held = _close(self._held)

    def close(self) -> None:
        self.cut()
        self.close_host_ends()
        self.ours.close()


@contextmanager
def open_wires() -> Iterator[HostWires]:
    """Fresh wires for one process. All of our ends are closed with the block."""
    ours, host = socket.socketpair()
    ours.setblocking(False)
    lifeline, held = os.pipe()
    with closing(HostWires(ours, host, lifeline, held)) as wires:
        yield wires


@contextmanager
def open_log(path: Path) -> Iterator[BinaryIO]:
    """A fresh log for the host to write. The one before is kept as `.log.1`, so that a crash can still be
    read after the restart.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        path.replace(path.with_suffix(".log.1"))
    with open(path, "wb", opener=open_private) as log:
        yield log


def log_tail(path: Path) -> str:
    """The last TAIL bytes of a log, as text. It is empty when there is no log."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def _close(descriptor: int) -> int:
    if descriptor >= 0:
        os.close(descriptor)
    return -1
