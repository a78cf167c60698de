"""Consumers: readers with a name, each with a position that only moves forward, and which of them the journal
waits for.

The rules for whoever edits it. A position is moved by its consumer alone, on disk before it is answered. One
that is not heard of for too long keeps its position but holds nothing back any more; time in which no node
ran is nobody's silence, and an open stream is never silent.

What is forgotten when the journal grows beyond its retention: oldest first, a whole session at a time, never
one that still runs.

The rules for whoever edits it. A number that was pruned is remembered (`meta.pruned`), because a reader who
asks for it must hear of the gap. Events go in the order of their numbers, so that what is kept has no holes.
Only the last limit takes what somebody still wants: a consumer, or a task's callback.
"""

import sqlite3
from collections.abc import Mapping
from functools import partial
from itertools import takewhile

from attrs import frozen

from polarnode.journal import pending_callbacks
from polarnode.journal.entries import ROW_BYTES, Entry
from polarnode.journal.values import Position, Retention, Waiting

# ── consumers ────────────────────────────────────────────────────────────

# consumers known at once: they are read at every commit, 3 us each, and a script that makes a name a run must
# hear of it
MOST = 200


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
    """Forward only, and never beyond what there is: a position from the future would skip events that are yet
    to come.
    """
    capped = "min(?2, (SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'events'))"
    db.execute(
        f"INSERT INTO positions (consumer, seq, moved, heard) VALUES (?1, {capped}, ?3, ?3) ON CONFLICT"
        " (consumer) DO UPDATE SET moved = CASE WHEN excluded.seq > seq THEN excluded.moved ELSE moved END,"
        " seq = max(seq, excluded.seq), heard = excluded.heard",
        (consumer, seq, now),
    )


def heard_entry(consumer: str, *, now: float) -> Entry:
    """A consumer that was forgotten meanwhile is not made known by it."""
    return Entry(
        ROW_BYTES, partial(_run, sql="UPDATE positions SET heard = ? WHERE consumer = ?", row=(now, consumer))
    )


def forget_entry(consumer: str) -> Entry:
    return Entry(ROW_BYTES, partial(_run, sql="DELETE FROM positions WHERE consumer = ?", row=(consumer,)))


def _run(db: sqlite3.Connection, *, sql: str, row: tuple[object, ...]) -> None:
    db.execute(sql, row)


# ── pruning ────────────────────────────────────────────────────────────

# events a commit besides as many as came with it: some milliseconds of deleting, so that turns do not wait
# behind it
PRUNED_AT_ONCE = 64
# between two marks of what all had acknowledged: retention by age is exact to a minute, and 72 hours are 4320
# rows
MARK_S = 60.0

# Whether a task's callback is, or may yet be, told of an event: one that is told when its task ends is told
# of all its sessions.
OWED = """EXISTS (SELECT 1 FROM callbacks WHERE callbacks.task_id = events.task_id)
    OR EXISTS (SELECT 1 FROM callback_urls WHERE callback_urls.task_id = events.task_id)"""
Row = tuple[int, str, str, str | None]


@frozen(kw_only=True)
class Moment:
    """What pruning goes by, besides the tables."""

    now: float
    acknowledged: int  # the last event that all consumers have acknowledged
    short: bool = False  # the disk is: what is only kept to be read again goes before new tasks are refused
    came: int = 0  # entries of this commit, each at most three events: pruning keeps up with them


def stored_bytes(db: sqlite3.Connection) -> int:
    """Bytes of pages in use; the file may be larger, its free pages are written again first."""
    return _pages(db)[0]


def free_bytes(db: sqlite3.Connection) -> int:
    """Bytes of pages of the file that will be written again before it grows."""
    return _pages(db)[1]


def _pages(db: sqlite3.Connection) -> tuple[int, int]:
    pages, free, size = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size, free * size


def prune(db: sqlite3.Connection, retention: Retention, moment: Moment) -> bool:
    """Drop some of the oldest events when there is too much, inside the caller's transaction. True when
    something went.
    """
    _mark(db, moment)
    rows, enough = _droppable(db, retention, moment, PRUNED_AT_ONCE + 3 * moment.came)
    for seq, kind, task_id, session_id in rows:
        _forget(db, kind, task_id, session_id)
        pending_callbacks.expire(db, seq)
        for table in ("events", "marks"):
            db.execute(f"DELETE FROM {table} WHERE seq <= ?", (seq,))
        db.execute("UPDATE meta SET value = ? WHERE name = 'pruned'", (seq,))
        if stored_bytes(db) <= enough:
            break
    return bool(rows)


def _mark(db: sqlite3.Connection, moment: Moment) -> None:
    """Remember what all have acknowledged by now; what a new consumer has not is acknowledged no more."""
    db.execute("DELETE FROM marks WHERE seq > ?", (moment.acknowledged,))
    last = db.execute("SELECT seq, at FROM marks ORDER BY seq DESC LIMIT 1").fetchone()
    (pruned,) = db.execute("SELECT value FROM meta WHERE name = 'pruned'").fetchone()
    if moment.acknowledged > pruned and (
        last is None or (moment.acknowledged > last[0] and moment.now >= last[1] + MARK_S)
    ):
        db.execute("INSERT INTO marks VALUES (?, ?)", (moment.acknowledged, moment.now))


def _droppable(
    db: sqlite3.Connection, retention: Retention, moment: Moment, most: int
) -> tuple[list[Row], int]:
    """The oldest events that may go now, and with how many bytes stored it is enough."""
    stored = stored_bytes(db)
    if stored > retention.everything:
        return (
            list(
                db.execute("SELECT seq, kind, task_id, session_id FROM events ORDER BY seq LIMIT ?", (most,))
            ),
            retention.everything,
        )
    large = stored > retention.acknowledged
    upto = moment.acknowledged if large or moment.short else _aged(db, retention, moment)
    rows = db.execute(
        f"SELECT seq, kind, task_id, session_id, {OWED} FROM events WHERE seq <= ? ORDER BY seq LIMIT ?",
        (upto, most),
    )
    return [row[:4] for row in takewhile(lambda row: not row[4], rows)], (
        retention.acknowledged if large and not moment.short else 0
    )


def _aged(db: sqlite3.Connection, retention: Retention, moment: Moment) -> int:
    """Up to which event all had been acknowledged so long ago; 0 for none."""
    # those behind it are younger, and get their turn when it is gone
    (oldest,) = db.execute("SELECT coalesce(min(seq), 0) FROM marks").fetchone()
    aged = db.execute(
        "SELECT 1 FROM marks WHERE seq = ? AND at <= ?", (oldest, moment.now - retention.acknowledged_s)
    ).fetchone()
    return 0 if aged is None else min(int(oldest), moment.acknowledged)


def _forget(db: sqlite3.Connection, kind: str, task_id: str, session_id: str | None) -> None:
    if kind in ("trajectory", "attempt"):
        db.execute("DELETE FROM turns WHERE session_id = ?", (session_id,))
        db.execute("DELETE FROM trajectories WHERE session_id = ?", (session_id,))
        # A session without a task (a capture) has no event behind this one.
        db.execute(
            "DELETE FROM sessions WHERE session_id = ? AND NOT EXISTS (SELECT 1 FROM tasks WHERE task_id"
            " = ?)",
            (session_id, task_id),
        )
    if kind == "task":  # the last event of its task: all its trajectories went before it
        db.execute("DELETE FROM sessions WHERE task_id = ?", (task_id,))
        db.execute("DELETE FROM tasks WHERE task_id = ?", (task_id,))


def came_at(db: sqlite3.Connection, seq: int) -> float | None:
    """When the first event from `seq` on came; None where there is none, or it came before that was written
    down.
    """
    found = db.execute("SELECT at FROM events WHERE seq >= ? ORDER BY seq LIMIT 1", (seq,)).fetchone()
    return (found[0] or None) if found else None
