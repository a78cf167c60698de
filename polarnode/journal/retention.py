"""Consumers' positions, and the pruning of what they have all acknowledged.

A consumer is a reader with a name; only it moves its position, forward, and the move is on disk before it is
answered. A consumer that is not seen for too long keeps its position but no longer holds back pruning. Time
in which no node ran does not count, and a consumer with an open stream counts as seen.

Pruning takes the oldest events first, a whole session at a time, and never one that still runs. Events go in
the order of their numbers, so that what is kept has no holes, and the last pruned number is remembered
(`meta.pruned`), because a reader that asks for it must get a gap. Only the limit on everything takes events
that a consumer or a task's callback still needs.
"""

import sqlite3
from collections.abc import Mapping
from functools import partial
from itertools import takewhile

from attrs import frozen

from polarnode.journal import pending_callbacks
from polarnode.journal.entries import ROW_BYTES, Entry, forget_evaluation
from polarnode.journal.values import AwaitedConsumers, ConsumerPosition, Retention

# ── consumers ────────────────────────────────────────────────────────────

# consumers at once: they are read at every commit, 3 us each, and a script that makes a new name for each run
# must notice
MOST = 200


def positions(db: sqlite3.Connection) -> dict[str, ConsumerPosition]:
    """All positions, by consumer."""
    rows = db.execute("SELECT consumer, seq, moved, heard FROM positions ORDER BY consumer")
    return {
        name: ConsumerPosition(seq=seq, moved=moved, last_seen=last_seen)
        for name, seq, moved, last_seen in rows
    }


def acknowledged_seq(consumers: Mapping[str, ConsumerPosition], waiting: AwaitedConsumers) -> int:
    """The last event that all consumers that are waited for have acknowledged; where none is waited for, all
    consumers.
    """
    held = [position.seq for name, position in consumers.items() if waiting.holds(name, position)]
    return min(held or [position.seq for position in consumers.values()], default=0)


def longest_unseen(consumers: Mapping[str, ConsumerPosition], waiting: AwaitedConsumers) -> str | None:
    """Of the consumers that are not waited for, the one that was not seen for longest."""
    unseen = [
        (position.last_seen, name)
        for name, position in consumers.items()
        if not waiting.holds(name, position)
    ]
    return min(unseen)[1] if unseen else None


# ── consumers' entries ───────────────────────────────────────────────────────────


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


def seen_entry(consumer: str, *, now: float) -> Entry:
    """Record that the consumer was seen. It does not create a consumer that was deleted meanwhile."""
    return Entry(
        ROW_BYTES, partial(_run, sql="UPDATE positions SET heard = ? WHERE consumer = ?", row=(now, consumer))
    )


def forget_entry(consumer: str) -> Entry:
    return Entry(ROW_BYTES, partial(_run, sql="DELETE FROM positions WHERE consumer = ?", row=(consumer,)))


def _run(db: sqlite3.Connection, *, sql: str, row: tuple[object, ...]) -> None:
    db.execute(sql, row)


# ── pruning ────────────────────────────────────────────────────────────

# events a commit besides as many as came with it: some milliseconds of deleting, so that turns do not wait
# for it
PRUNED_AT_ONCE = 64
# between two marks of what all had acknowledged: retention by age is exact to a minute, and 72 hours are 4320
# rows
MARK_S = 60.0

# Whether a task's callback has pending events, or may yet get some: a callback at the task's end sends all
# its sessions.
PENDING = """EXISTS (SELECT 1 FROM callbacks WHERE callbacks.task_id = events.task_id)
    OR EXISTS (SELECT 1 FROM callback_urls WHERE callback_urls.task_id = events.task_id)"""
Row = tuple[int, str, str, str | None]


@frozen(kw_only=True)
class Moment:
    """The inputs of pruning, besides the tables."""

    now: float
    acknowledged: int  # the last event that all consumers have acknowledged
    short: bool = False  # of disk: events kept only to be read again go before tasks are refused
    came: int = 0  # entries of this commit, each at most three events: pruning keeps up with them


def stored_bytes(db: sqlite3.Connection) -> int:
    """Bytes of pages in use. The file may be larger; its free pages are reused first."""
    return page_bytes(db)[0]


def page_bytes(db: sqlite3.Connection) -> tuple[int, int]:
    """`stored_bytes`, and bytes of the file's free pages, which are reused before it grows."""
    pages, free, size = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size, free * size


def prune(db: sqlite3.Connection, retention: Retention, moment: Moment) -> bool:
    """Delete some of the oldest events if there is too much, inside the caller's transaction. True if any was
    deleted.
    """
    _mark(db, moment)
    rows, enough = _droppable(db, retention, moment, PRUNED_AT_ONCE + 3 * moment.came)
    for seq, kind, task_id, session_id in rows:
        _forget(db, kind, task_id, session_id)
        if kind == "reward":
            forget_evaluation(db, session_id, seq)
        pending_callbacks.expire(db, seq)
        for table in ("events", "marks"):
            db.execute(f"DELETE FROM {table} WHERE seq <= ?", (seq,))
        db.execute("UPDATE meta SET value = ? WHERE name = 'pruned'", (seq,))
        if stored_bytes(db) <= enough:
            break
    return bool(rows)


def _mark(db: sqlite3.Connection, moment: Moment) -> None:
    """Remember what all have acknowledged by now. What a new consumer has not is no longer acknowledged."""
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
    """The oldest events that may go now, and the stored bytes at which pruning may stop."""
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
        f"SELECT seq, kind, task_id, session_id, {PENDING} FROM events WHERE seq <= ? ORDER BY seq LIMIT ?",
        (upto, most),
    )
    return [row[:4] for row in takewhile(lambda row: not row[4], rows)], (
        retention.acknowledged if large and not moment.short else 0
    )


def _aged(db: sqlite3.Connection, retention: Retention, moment: Moment) -> int:
    """The last event that all had acknowledged `acknowledged_s` ago; 0 for none."""
    # later marks are younger, and are looked at when this one is gone
    (oldest,) = db.execute("SELECT coalesce(min(seq), 0) FROM marks").fetchone()
    aged = db.execute(
        "SELECT 1 FROM marks WHERE seq = ? AND at <= ?", (oldest, moment.now - retention.acknowledged_s)
    ).fetchone()
    return 0 if aged is None else min(int(oldest), moment.acknowledged)


def _forget(db: sqlite3.Connection, kind: str, task_id: str, session_id: str | None) -> None:
    if kind in ("trajectory", "attempt"):
        db.execute("DELETE FROM turns WHERE session_id = ?", (session_id,))
        db.execute("DELETE FROM trajectories WHERE session_id = ?", (session_id,))
        # A session without a task (a capture) has no later event.
        db.execute(
            "DELETE FROM sessions WHERE session_id = ? AND NOT EXISTS (SELECT 1 FROM tasks WHERE task_id"
            " = ?)",
            (session_id, task_id),
        )
    if kind == "task":  # the last event of its task: all its trajectories went before it
        db.execute("DELETE FROM sessions WHERE task_id = ?", (task_id,))
        db.execute("DELETE FROM tasks WHERE task_id = ?", (task_id,))


def came_at(db: sqlite3.Connection, seq: int) -> float | None:
    """When the first event from `seq` on came; None where there is none, or it came before times were
    recorded.
    """
    found = db.execute("SELECT at FROM events WHERE seq >= ? ORDER BY seq LIMIT 1", (seq,)).fetchone()
    return (found[0] or None) if found else None
