"""Why the journal's disk takes nothing, and what mends it, in words.

SQLite tells a full disk alone; a quota that is used up, a disk that fails and one that was made read-only are
"disk I/O error" to it. So a file beside the journal is tried, whose error has the system's own number.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

# how a disk that refuses is called, and what to do about it
_REFUSALS: Final = {
    errno.ENOSPC: ("is full", "make room on its disk"),
    errno.EDQUOT: ("has used up its quota", "make room, or raise the quota of its disk"),
    errno.EROFS: ("is read-only", "make it writable again"),
    errno.EIO: ("fails", "look at the disk and at the kernel's log"),
    errno.EACCES: ("may not be written to by this user", "give the node's user its folder back"),
    errno.EPERM: ("may not be written to by this user", "give the node's user its folder back"),
    errno.ENOENT: ("is gone", "mount it again"),
}
_TRIED: Final = b"\0" * 4096  # a block: what has no room for it has none for a page of SQLite


def refusal_of(error: OSError, folder: Path) -> str:
    """What a disk that answers with this error is, and what mends it."""
    what, remedy = _REFUSALS.get(error.errno or 0, (f"refuses ({error.strerror or error})", "look at it"))
    return f"the journal's disk {what} ({folder}): {remedy}"


def refusal(folder: Path) -> str | None:
    """Why the disk of a folder takes nothing now; None where it does. Writes a block."""
    tried = folder / f".tried-{os.getpid()}"
    try:
        with tried.open("wb") as file:
            file.write(_TRIED)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return refusal_of(error, folder)
    finally:
        with suppress(OSError):
            tried.unlink()
    return None
