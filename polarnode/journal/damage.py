"""Checksums of the journal's rows, and the rows that turn out to be damaged.

A checksum is CRC-32 over every column that is written once. A damaged row is found by it and named, so that
it does not become training data, and no other row is lost with it. CRC-32 finds every damage of up to 32
neighbouring bits and misses one in four billion others. It runs at 1 GB/s and takes 5 bytes a row. It does
not protect against a person who can write the file, because such a person can write checksums too. Rows of
journals before version 5 have no checksum and are unverified: computing them would read and rewrite up to 64
GiB at one start. Damage in them is still found when a row cannot be decoded.
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

ColumnValue = str | int | float | bytes | None


def checksum(*parts: ColumnValue) -> int:
    """Compute the CRC-32 of a row's columns, each with its kind and length. A row has the same checksum
    before it is written and after SQLite has read it.
    """
    crc = 0
    for part in parts:
        data = _column_bytes(part)
        crc = zlib.crc32(data, zlib.crc32(b"%d:" % len(data), crc))
    return crc


def _column_bytes(part: ColumnValue) -> bytes:
    match part:
        case bytes():
            return b"b" + part if len(part) < 1024 else part  # the prefix would copy a long body
        case str():
            return b"s" + part.encode(errors="surrogatepass")
        case None:
            return b""
    # SQLite reads 1 back from a REAL column as 1.0, -0.0 as 0.0 and NaN as NULL.
    return b"" if part != part else b"n%r" % (float(part) + 0.0)


def verify_checksum(expected: int | None, *parts: ColumnValue) -> None:
    """Compare a row with its checksum. `expected` is None for a row without one. Raises Unreadable."""
    if expected is not None and checksum(*parts) != expected:
        raise Unreadable("its checksum does not match: the row was changed after it was written")


@contextmanager
def decode_boundary() -> Iterator[None]:
    """Turn any error in the block, which decodes the bytes of a row, into Unreadable. MemoryError passes,
    because it says nothing about the row.
    """
    try:
        yield
    except (Unreadable, MemoryError):
        raise
    except Exception as error:
        raise Unreadable(f"it cannot be decoded ({error_sentence(error)})") from error


def error_sentence(error: Exception) -> str:
    """Describe an error in words that are never empty."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# SQLite met a page whose structure is damaged. Other errors (a full disk, a lock) say nothing about a row.
_CORRUPT_CODES: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_corrupt(error: sqlite3.Error) -> bool:
    """Whether SQLite met a damaged page."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT_CODES


@contextmanager
def page_boundary() -> Iterator[None]:
    """Turn a damaged page that the block meets into Unreadable. Other errors of SQLite pass."""
    try:
        yield
    except sqlite3.Error as error:
        if not is_corrupt(error):
            raise
        raise Unreadable(f"a page of the journal's file is damaged ({error})") from error


# ── damaged rows ────────────────────────────────────────────────────────────

# At most this many rows are remembered, 200 bytes each. A journal with more damage needs `polarnode check`,
# not a longer list.
MAX_DAMAGED_ROWS: Final = 1000


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
class DamageRecorder:
    """The damaged rows that were met since the journal was opened. It may be used from several threads."""

    _known: dict[tuple[str, str], Damage] = field(factory=dict, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def add_damage(self, damage: Damage) -> None:
        """Remember a row, and log it the first time."""
        with self._lock:
            key = (damage.table, damage.row)
            if key in self._known or len(self._known) >= MAX_DAMAGED_ROWS:
                return
            self._known[key] = damage
        logger.error("the journal goes on without %s", damage, extra={"unlimited": True})

    def damaged_rows(self) -> tuple[Damage, ...]:
        """The rows met so far, oldest first, at most MOST."""
        with self._lock:
            return tuple(self._known.values())


class JournalConnection(sqlite3.Connection):
    """A connection that remembers the damaged rows it met. It reads texts with damaged bytes all the same."""

    damages: DamageRecorder


def note_damage(db: sqlite3.Connection, damage: Damage) -> None:
    """Remember a damaged row in the journal that `db` belongs to."""
    if isinstance(db, JournalConnection):
        db.damages.add_damage(damage)


# ── trajectories that cannot be encoded ────────────────────────────────────────────────────────────


def encode_trajectory(encode: Callable[[Trajectory], bytes], trajectory: Trajectory) -> bytes:
    """Encode a trajectory. Raises Unreadable when this fails."""
    try:
        return encode(trajectory)
    except (Unreadable, MemoryError):
        raise
    except Exception as error:
        raise Unreadable(f"the trajectory cannot be written ({error_sentence(error)})") from error
