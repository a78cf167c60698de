"""What a node keeps is bounded and its own: a log file that keeps its beginning and its end, the node's log,
which rotates, a table that keeps its latest entries, folders and files that no other user reads, and free
memory that is given back.

A log's beginning says how a program was started and its end why it ended. The second half of the file is a
ring until it is closed; then it is put in order, with one line that says how much is missing. Everything is
on disk as soon as it is written, so the log of a killed node can be read too.
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
# what a state folder holds, by the beginning of its name
STATE_NAMES: Final = ("journal.sqlite", "node.log", "images.log", "engine-", "sessions", "adapters", "tls.")


def private_opener(path: str, flags: int) -> int:
    """For `open(opener=…)`: a file that is made is its user's alone, whatever the umask."""
    return os.open(path, flags, FILE_MODE)


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A private file to write, in place of `path` once the block is left; where an error leaves it, `path` is
    as it was. Nothing is synced. Raises OSError.
    """
    half = path.with_name(f"{path.name}.half")
    try:
        with open(half, "wb", opener=private_opener) as file:
            yield file
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def private_folder(folder: Path) -> None:
    """Make a folder that its user alone reads. A state folder of an earlier release is tightened, with the
    files in it; a folder that holds anything else, or is another user's, is left as it is, with a warning.
    Raises OSError.
    """
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    found = list(folder.iterdir())
    # a session's log and artifacts are named by its id
    ours = [each for each in found if folder.name == "sessions" or each.name.startswith(STATE_NAMES)]
    for each in ours:
        _tighten(each)
    if len(ours) == len(found) and _tighten(folder):
        return
    if folder.stat().st_mode & 0o077:
        logger.warning(
            "%s can be entered by other users: the files that this node makes in it are private, others may"
            " not be; give the node a folder of its own, or run chmod 700",
            folder,
        )


def _tighten(path: Path) -> bool:
    """Take other users' rights from a file or folder; False where it is another user's, or shared."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & stat.S_ISVTX:
        return False
    if found.st_mode & 0o077:
        path.chmod(stat.S_IMODE(found.st_mode) & 0o700)
    return True


# ── the node's log ────────────────────────────────────────────────────────────

LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
LOG_BYTES: Final = 16 << 20  # of one file: some days of a busy node, and an editor still opens it
LOG_FILES: Final = 4  # that are kept besides it: 80 MiB in all
# Lines of one kind a minute: what a session can cause (refused connections, broken callbacks) is then at most
# 16 MB a day, and 64 sessions that are lost at once are still named one by one.
LINES: Final = 100
PER_S: Final = 60.0
KINDS: Final = 1000  # that are counted at once; there are some hundred in the code


class _PrivateLog(RotatingFileHandler):
    def _open(self) -> TextIOWrapper:  # type: ignore[type-arg, unused-ignore]
        return open(self.baseFilename, "a", encoding="utf-8", errors="replace", opener=private_opener)


@define(eq=False)
class LineLimit:
    """A filter of log records: at most LINES of a kind (the text before its values are put in) in PER_S. The
    next line after that says how many were left out. Records with `unlimited` pass.
    """

    _counts: dict[tuple[str, int, str], tuple[float, int]] = field(factory=dict, init=False)

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "unlimited", False):
            return True
        kind = (record.name, record.levelno, str(record.msg))
        began, count = self._counts.get(kind, (record.created, 0))
        if record.created >= began + PER_S:
            if count > LINES:
                record.msg, record.args = (
                    f"{record.getMessage()} ({count - LINES} more of these lines were left out)",
                    (),
                )
            began, count = record.created, 0
        remember(self._counts, kind, (began, count + 1), most=KINDS)
        return count < LINES


def open_node_log(state: Path) -> None:
    """Log to `node.log` in a state folder, which is made. Raises OSError."""
    private_folder(state)
    handler = _PrivateLog(state / "node.log", maxBytes=LOG_BYTES, backupCount=LOG_FILES)
    handler.addFilter(LineLimit())
    logging.basicConfig(handlers=[handler], level=logging.INFO, format=LOG_FORMAT)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # else it logs every request


# ── bounded logs ──────────────────────────────────────────────────────────────


@define(eq=False)
class BoundedLog:
    """Writes at most `limit` bytes (and one line) to an open file."""

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
        """Append, over the oldest bytes of the ring when it is full."""
        while piece:
            place, room = self._place()
            self.sink.seek(place)
            self.sink.write(piece[:room])
            self.written += min(room, len(piece))
            piece = piece[room:]
        self.sink.flush()

    def _place(self) -> tuple[int, int]:
        """Where the next byte goes, and how many may follow it there."""
        if self.written < self.head:
            return self.written, self.head - self.written
        within = (self.written - self.head) % self.ring
        return self.head + within, self.ring - within

    def finish(self) -> None:
        """Put the ring in order."""
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
    """A new log of at most `limit` bytes; its folder is made when it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w+b", opener=private_opener) as sink:
        log = BoundedLog(sink, limit)
        try:
            yield log
        finally:
            log.finish()


# ── tables ────────────────────────────────────────────────────────────────────

K = TypeVar("K")
V = TypeVar("V")


def remember(kept: dict[K, V], name: K, value: V, *, most: int) -> None:
    """Store a value as the latest entry of a table; with more than `most` entries the oldest is dropped."""
    kept.pop(name, None)
    kept[name] = value
    while len(kept) > most:
        del kept[next(iter(kept))]


_GIVING_BACK: Final = trio.CapacityLimiter(1)
# glibc's; another C library gives free memory back by itself, or has no word for it
_TRIM: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)


async def give_back_memory() -> None:
    """Return free memory to the system, in a thread: milliseconds for each gigabyte of heap.

    glibc keeps what was freed below the top of each thread's arena: after one prompt of 10 MB a node kept
    0.8 GB. Limits on arenas from outside (MALLOC_ARENA_MAX) keep less, but never give it back.
    """
    if _TRIM is not None:
        await trio.to_thread.run_sync(_TRIM, 0, limiter=_GIVING_BACK)
