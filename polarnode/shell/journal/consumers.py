"""Consumers: readers with a name, each with a position that only moves forward, and which of them the journal waits for.

The rules for whoever edits it. A position is moved by its consumer alone, on disk before it is answered. One that is not heard of for too long
keeps its position but holds nothing back any more; time in which no node ran is nobody's silence, and an open stream is never silent.
"""

import sqlite3
from collections.abc import Mapping
from functools import partial

from polarnode.shell.journal.entries import ROW_BYTES, Entry
from polarnode.shell.journal.values import Position, Waiting

MOST = 200  # consumers known at once: they are read at every commit, 3 us each, and a script that makes a name a run must hear of it


def positions(db: sqlite3.Connection) -> dict[str, Position]:
    """All of them, by name."""
    rows = db.execute("SELECT consumer, seq, moved, heard FROM positions ORDER BY consumer")
    return {name: Position(seq=seq, moved=moved, heard=heard) for name, seq, moved, heard in rows}


def acknowledged_seq(known: Mapping[str, Position], waiting: Waiting) -> int:
    """The last event that all have acknowledged who are waited for; where nobody is, all there are."""
    held = [position.seq for name, position in known.items() if waiting.holds(name, position)]
    return min(held or [position.seq for position in known.values()], default=0)


def longest_silent(known: Mapping[str, Position], waiting: Waiting) -> str | None:
    """Of those that nobody waits for, the one that was not heard of for longest."""
    silent = [(position.heard, name) for name, position in known.items() if not waiting.holds(name, position)]
    return min(silent)[1] if silent else None


# ── what is written ───────────────────────────────────────────────────────────


def acknowledge_entry(consumer: str, seq: int, *, now: float) -> Entry:
    return Entry(ROW_BYTES, partial(_acknowledge, consumer=consumer, seq=seq, now=now))


def _acknowledge(db: sqlite3.Connection, *, consumer: str, seq: int, now: float) -> None:
    """Forward only, and never beyond what there is: a position from the future would skip events that are yet to come."""
    capped = "min(?2, (SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'events'))"
    db.execute(
        f"INSERT INTO positions (consumer, seq, moved, heard) VALUES (?1, {capped}, ?3, ?3) ON CONFLICT (consumer) DO UPDATE SET "
        "moved = CASE WHEN excluded.seq > seq THEN excluded.moved ELSE moved END, seq = max(seq, excluded.seq), heard = excluded.heard",
        (consumer, seq, now),
    )


def heard_entry(consumer: str, *, now: float) -> Entry:
    """A consumer that was forgotten meanwhile is not made known by it."""
    return Entry(ROW_BYTES, partial(_run, sql="UPDATE positions SET heard = ? WHERE consumer = ?", row=(now, consumer)))


def forget_entry(consumer: str) -> Entry:
    return Entry(ROW_BYTES, partial(_run, sql="DELETE FROM positions WHERE consumer = ?", row=(consumer,)))


def _run(db: sqlite3.Connection, *, sql: str, row: tuple[object, ...]) -> None:
    db.execute(sql, row)
