"""Checksums of the journal's rows, and the rows that turn out to be damaged.

A checksum is CRC-32 over every column that is written once, so that a damaged row costs itself alone and is
named instead of becoming training data. CRC-32 finds each damage of up to 32 neighbouring bits and misses
one in four billion others; it takes 1 GB/s and 5 bytes a row. It does not protect against a person who can
write the file: such a person can write checksums too. Rows of journals before version 5 have none and are
unverified (computing them would read and rewrite up to 64 GiB at one start); what cannot be decoded is found
in them all the same.
"""

import logging
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from attrs import define, field, frozen

from polarnode.core.errors import Unreadable
from polarnode.core.trajectory import Trajectory

logger = logging.getLogger(__name__)

# ── checksums ────────────────────────────────────────────────────────────

Part = str | int | float | bytes | None


def checksum(*parts: Part) -> int:
    """CRC-32 of the columns of a row, each with its kind and length. Equal for what SQLite gives back."""
    crc = 0
    for part in parts:
        data = _bytes(part)
        crc = zlib.crc32(data, zlib.crc32(b"%d:" % len(data), crc))
    return crc


def _bytes(part: Part) -> bytes:
    match part:
        case bytes():
            return b"b" + part if len(part) < 1024 else part  # a long body is not copied for its kind
        case str():
            return b"s" + part.encode(errors="surrogatepass")
        case None:
            return b""
    # a REAL column gives 1 back as 1.0, -0.0 as 0.0 and NaN as NULL
    return b"" if part != part else b"n%r" % (float(part) + 0.0)


def check(expected: int | None, *parts: Part) -> None:
    """Compare a row with its checksum; None is a row without one. Raises Unreadable."""
    if expected is not None and checksum(*parts) != expected:
        raise Unreadable("its checksum does not match: the row was changed after it was written")


@contextmanager
def decoding() -> Iterator[None]:
    """Decoding the bytes of a row: whatever fails becomes Unreadable. Memory that runs out says nothing about
    the row.
    """
    try:
        yield
    except (Unreadable, MemoryError):
        raise
    except Exception as error:
        raise Unreadable(f"it cannot be decoded ({sentence_of(error)})") from error


def sentence_of(error: Exception) -> str:
    """What an error says, never empty."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# a page of the file whose structure is damaged; other errors (a full disk, a lock) say nothing about a row
_CORRUPT: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_corrupt(error: sqlite3.Error) -> bool:
    """Whether SQLite met a damaged page."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT


@contextmanager
def reading_pages() -> Iterator[None]:
    """Reading one row: a damaged page becomes Unreadable, other errors of SQLite pass."""
    try:
        yield
    except sqlite3.Error as error:
        if not is_corrupt(error):
            raise
        raise Unreadable(f"a page of the journal's file is damaged ({error})") from error


# ── damaged rows ────────────────────────────────────────────────────────────

# rows that are remembered, 200 bytes each; a journal with more needs `polarnode check`, not a longer list
MOST: Final = 1000


@frozen(kw_only=True)
class Damage:
    """A row that cannot be read as it was written. `row` is its key in the table."""

    table: str
    row: str
    session_id: str | None = None
    reason: str

    def __str__(self) -> str:
        whose = "" if self.session_id in (None, self.row) else f" of session {self.session_id}"
        return f"row {self.row} of table {self.table}{whose}: {self.reason}"


@define(eq=False)
class Damages:
    """The damaged rows that were met since the journal was opened. Threads may call it at once."""

    _known: dict[tuple[str, str], Damage] = field(factory=dict, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def note(self, damage: Damage) -> None:
        """Remember a row, and log it the first time."""
        with self._lock:
            key = (damage.table, damage.row)
            if key in self._known or len(self._known) >= MOST:
                return
            self._known[key] = damage
        logger.error("the journal goes on without %s", damage, extra={"unlimited": True})

    def rows(self) -> tuple[Damage, ...]:
        """The rows met so far, oldest first, at most MOST."""
        with self._lock:
            return tuple(self._known.values())


class JournalConnection(sqlite3.Connection):
    """A connection that remembers the damaged rows it met. Texts with damaged bytes are read all the same."""

    damages: Damages


def note(db: sqlite3.Connection, damage: Damage) -> None:
    """Remember a damaged row in the journal that `db` belongs to."""
    if isinstance(db, JournalConnection):
        db.damages.note(damage)


# ── trajectories that cannot be encoded ────────────────────────────────────────────────────────────


def encoded(encode: Callable[[Trajectory], bytes], trajectory: Trajectory) -> bytes:
    """Encode a trajectory. Raises Unreadable when it cannot be."""
    try:
        return encode(trajectory)
    except (Unreadable, MemoryError):
        raise
    except Exception as error:
        raise Unreadable(f"the trajectory cannot be written ({sentence_of(error)})") from error
