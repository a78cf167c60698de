"""Limits on what a node keeps on disk and in memory: log files of bounded size, the node's log, which
rotates, tables that keep only their latest entries, folders and files that no other user can read, and freed
memory that is returned to the system.

A bounded log keeps its beginning, which says how a program was started, and its end, which says why it ended.
The second half of the file is a ring until the log is closed; then the ring is put in order, with one line
that says how much is missing. Everything is on disk as soon as it is written, so the log of a killed node can
be read too.
"""

import ctypes
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import trio
from attrs import define, field

logger = logging.getLogger(__name__)

# ── private files ─────────────────────────────────────────────────────────────

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
# The names of the files and folders in a state folder begin with one of these.
STATE_NAMES: Final = ("journal.sqlite", "node.log", "images.log", "engine-", "sessions", "adapters", "tls.")


def open_private(path: str, flags: int) -> int:
    """An opener for `open(opener=…)`: only the user can read a file that it makes, whatever the umask is."""
    return os.open(path, flags, FILE_MODE)


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a private file that replaces `path` when the block ends; if the block raises, `path` stays as it
    was. Nothing is synced. Raises OSError.
    """
    half = path.with_name(f"{path.name}.half")
    try:
        with open(half, "wb", opener=open_private) as file:
            yield file
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its user can read. If it is the state folder of an earlier release, other
    users' rights are taken from it and from the files in it. A folder that holds anything else, or belongs to
    another user, is left as it is, with a warning. Raises OSError.
    """
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    found = list(folder.iterdir())
    # Everything in the folder `sessions` is ours: its logs and artifacts are named by the ids of sessions.
    ours = [each for each in found if folder.name == "sessions" or each.name.startswith(STATE_NAMES)]
    for each in ours:
        _remove_rights(each)
    if len(ours) == len(found) and _remove_rights(folder):
        return
    if folder.stat().st_mode & 0o077:
        logger.warning(
            "%s can be entered by other users: the files that this node makes in it are private, others may"
            " not be; give the node a folder of its own, or run chmod 700",
            folder,
        )


def _remove_rights(path: Path) -> bool:
    """Take other users' rights from a file or folder. Returns False if it is a link, shared, or another
    user's.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & stat.S_ISVTX:
        return False
    if found.st_mode & 0o077:
        path.chmod(stat.S_IMODE(found.st_mode) & 0o700)
    return True


# ── the node's log ────────────────────────────────────────────────────────────

LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
LOG_BYTES: Final = 16 << 20  # bytes of one file: some days of a busy node; an editor can still open it
MAX_OLD_LOGS: Final = 4  # older files that are kept beside it: 80 MiB in all
# At most this many lines of one kind are written in a minute. What a session can cause (refused connections,
# broken callbacks) then takes at most 16 MB a day, and 64 sessions that are lost at once are still named one
# by one.
LINES: Final = 100
LINE_WINDOW_S: Final = 60.0
KINDS: Final = 1000  # kinds of lines that are counted at once; the code has some hundred


class _PrivateLog(RotatingFileHandler):
    def _open(self) -> TextIOWrapper:  # type: ignore[type-arg, unused-ignore]
        return open(self.baseFilename, "a", encoding="utf-8", errors="replace", opener=open_private)


@define(eq=False)
class LineLimit:
    """A filter of log records that lets at most LINES of a kind pass in LINE_WINDOW_S seconds. The kind is
    the text before its values are put in. The next line after that time says how many were left out. Records
    with `unlimited` always pass.
    """

    _counts: dict[tuple[str, int, str], tuple[float, int]] = field(factory=dict, init=False)

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "unlimited", False):
            return True
        kind = (record.name, record.levelno, str(record.msg))
        began, count = self._counts.get(kind, (record.created, 0))
        if record.created >= began + LINE_WINDOW_S:
            if count > LINES:
                record.msg, record.args = (
                    f"{record.getMessage()} ({count - LINES} more of these lines were left out)",
                    (),
                )
            began, count = record.created, 0
        remember(self._counts, kind, (began, count + 1), most=KINDS)
        return count < LINES


def open_node_log(state: Path) -> None:
    """Make the state folder, and log to `node.log` in it. Raises OSError."""
    make_private_folder(state)
    handler = _PrivateLog(state / "node.log", maxBytes=LOG_BYTES, backupCount=MAX_OLD_LOGS)
    handler.addFilter(LineLimit())
    logging.basicConfig(handlers=[handler], level=logging.INFO, format=LOG_FORMAT)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # at INFO it logs every request


# ── bounded logs ──────────────────────────────────────────────────────────────


@define(eq=False)
class BoundedLog:
    """A log in an open file: at most `limit` bytes and one line, whatever is written."""

    sink: BinaryIO
    limit: int
    written: int = field(default=0, init=False)

    @property
    def head(self) -> int:
        return self.limit // 2

    @property
    def ring(self) -> int:
        return self.limit - self.head

    def write(self, piece: bytes) -> None:
        """Append to the log; when the ring is full, its oldest bytes are overwritten."""
        while piece:
            place, room = self._place()
            self.sink.seek(place)
            self.sink.write(piece[:room])
            self.written += min(room, len(piece))
            piece = piece[room:]
        self.sink.flush()

    def _place(self) -> tuple[int, int]:
        """The position of the next byte, and how many bytes can be written there in one piece."""
        if self.written < self.head:
            return self.written, self.head - self.written
        within = (self.written - self.head) % self.ring
        return self.head + within, self.ring - within

    def finish(self) -> None:
        """Put the ring in order, and write how many bytes are missing."""
        missing = self.written - self.limit
        if missing <= 0:
            return
        self.sink.seek(self.head)
        ring = self.sink.read(self.ring)
        cut = (self.written - self.head) % self.ring
        self.sink.seek(self.head)
        self.sink.write(b"\n... %d bytes left out ...\n" % missing + ring[cut:] + ring[:cut])
        self.sink.flush()


@contextmanager
def open_bounded_log(path: Path, limit: int) -> Iterator[BoundedLog]:
    """Open a new log of at most `limit` bytes; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w+b", opener=open_private) as sink:
        log = BoundedLog(sink, limit)
        try:
            yield log
        finally:
            log.finish()


# ── tables ────────────────────────────────────────────────────────────────────

K = TypeVar("K")
V = TypeVar("V")


def remember(kept: dict[K, V], name: K, value: V, *, most: int) -> None:
    """Store a value as the latest entry of a table. If the table then has more than `most`, the oldest go."""
    kept.pop(name, None)
    kept[name] = value
    while len(kept) > most:
        del kept[next(iter(kept))]


_TRIM_LIMITER: Final = trio.CapacityLimiter(1)
# Only glibc has this function. Another C library returns free memory by itself, or has no call for it.
_MALLOC_TRIM: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)


async def trim_memory() -> None:
    """Return free memory to the system, in a thread. It takes milliseconds for each gigabyte of heap.

    glibc keeps the memory that was freed below the top of each thread's arena: after one prompt of 10 MB a
    node kept 0.8 GB. With fewer arenas (MALLOC_ARENA_MAX) glibc keeps less, but it still never returns it.
    """
    if _MALLOC_TRIM is not None:
        await trio.to_thread.run_sync(_MALLOC_TRIM, 0, limiter=_TRIM_LIMITER)
