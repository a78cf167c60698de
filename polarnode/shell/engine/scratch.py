"""What an engine host leaves behind, and who removes it: its temporary folder, its semaphores, its shared memory.

SGLang ends its own helpers with SIGKILL, so they never clean up. Every host therefore gets a tag of its own, which is in the name of its
folder and of all it puts into /dev/shm. The node holds a lock in the folder; a folder whose lock is free belongs to a node that was killed.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from attrs import frozen

from polarnode.errors import EngineError

PREFIX = "polarnode-engine-"
SHARED_MEMORY = Path("/dev/shm")
LONGEST = 70  # characters of a scratch path: SGLang puts sockets in it, and the kernel takes 107 for a socket's whole path
YOUNG = 60.0  # seconds: a folder this young may be in the making, its lock not yet taken


@frozen
class Scratch:
    """A host's own temporary folder; `tag` names all it shares in memory."""

    tag: str
    path: Path


@contextmanager
def open_scratch() -> Iterator[Scratch]:
    """A fresh folder under the temporary folder, locked while the block lasts; afterwards nothing of the host is left on disk or in memory."""
    tag = f"pn{uuid4().hex[:12]}"
    scratch = Scratch(tag, Path(tempfile.gettempdir()) / f"{PREFIX}{tag}")
    if len(str(scratch.path)) > LONGEST:
        raise EngineError(f"TMPDIR={tempfile.gettempdir()} is too long for the engine's sockets: set a shorter one", retryable=False)
    scratch.path.mkdir(mode=0o700)
    lock = os.open(scratch.path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield scratch
    finally:
        os.close(lock)
        _remove(scratch.path)


def sweep() -> int:
    """Remove what hosts of killed nodes left; returns how many folders. Other users' and living nodes' are not touched."""
    return sum(_remove_stale(path) for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))


def _remove_stale(path: Path) -> bool:
    with contextlib.suppress(OSError):  # another user's, or gone meanwhile
        if time.time() - path.stat().st_mtime > YOUNG and not _locked(path / "lock"):
            _remove(path)
            return True
    return False


def _locked(path: Path) -> bool:
    """Whether a living node holds it; a folder without a lock was being removed when its host was killed."""
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
        with contextlib.suppress(OSError):  # another user's by the same name, or gone meanwhile
            shared.unlink()
    shutil.rmtree(path, ignore_errors=True)
