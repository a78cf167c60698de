"""Locks of files between processes, by flock: the kernel frees a lock however its holder dies.

Invariant: a process that only checks a lock holds it for an instant, as a shared lock, so that two checks do
not disturb each other. A process that wants to take the lock should therefore try for a moment (`wait_s`).
"""

import fcntl
import os
import time
from pathlib import Path
from typing import IO, Final

RETRY_S: Final = 0.02  # between tries: a check of a lock lasts microseconds


def take_lock(path: Path, *, wait_s: float = 0.0) -> IO[str] | None:
    """Lock a file until it is closed, and return it; a missing file is made, for its user alone. Returns None
    if another process still holds the lock after `wait_s` seconds. Blocks. Raises OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    file = open(descriptor, "r+", encoding="utf-8")  # noqa: SIM115 - it is the lock
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= until:
                file.close()
                return None
            time.sleep(RETRY_S)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file. False if there is no file that can be read."""
    try:
        file = path.open("rb")
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
