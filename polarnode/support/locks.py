"""Locks of files between processes, by flock: the kernel gives one back however its holder dies.

Invariant: a look at a lock takes it for an instant, shared, so that two looks do not see each other. Whoever
takes a lock for good therefore tries for a moment.
"""

import fcntl
import os
import time
from pathlib import Path
from typing import IO, Final

RETRY_S: Final = 0.02  # between tries: a look at a lock lasts microseconds


def take_lock(path: Path, *, wait_s: float = 0.0) -> IO[str] | None:
    """The file, made if need be and private, locked until it is closed; None where another process holds it
    for `wait_s` seconds. Blocks. Raises OSError.
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


def lock_held(path: Path) -> bool:
    """Whether a process holds the lock of a file. False where there is no file that can be read."""
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
