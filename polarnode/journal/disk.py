"""Sentences that say why the journal's disk takes nothing, and how to mend it.

SQLite distinguishes only a full disk. It reports a used-up quota, a failing disk and a read-only disk alike
as "disk I/O error". So this module writes a test file beside the journal: its error has the system's own
number.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

# by the system's error number: what is wrong with the disk, and what to do about it
_DISK_FAULTS: Final = {
    errno.ENOSPC: ("is full", "make room on its disk"),
    errno.EDQUOT: ("has used up its quota", "make room, or raise the quota of its disk"),
    errno.EROFS: ("is read-only", "make it writable again"),
    errno.EIO: ("fails", "look at the disk and at the kernel's log"),
    errno.EACCES: ("may not be written to by this user", "give the node's user its folder back"),
    errno.EPERM: ("may not be written to by this user", "give the node's user its folder back"),
    errno.ENOENT: ("is gone", "mount it again"),
}
_TEST_BLOCK: Final = b"\0" * 4096  # one block: a disk without room for it has none for a page of SQLite


def disk_error_sentence(error: OSError, folder: Path) -> str:
    """Say what is wrong with a disk that answers with this error, and what mends it."""
    what, remedy = _DISK_FAULTS.get(error.errno or 0, (f"refuses ({error.strerror or error})", "look at it"))
    return f"the journal's disk {what} ({folder}): {remedy}"


def probe_disk(folder: Path) -> str | None:
    """Write a block to find out whether the disk of a folder takes data. Returns why it does not, or None."""
    tried = folder / f".tried-{os.getpid()}"
    try:
        with tried.open("wb") as file:
            file.write(_TEST_BLOCK)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return disk_error_sentence(error, folder)
    finally:
        with suppress(OSError):
            tried.unlink()
    return None
