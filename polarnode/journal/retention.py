"""Consumers' positions, and the pruning of what they have all acknowledged.

A consumer is a reader with a name. Only the consumer itself moves its position, and only forward; the move is
on disk before the request is answered. A consumer that was not seen for too long keeps its position but no
longer holds back pruning. Time in which no node ran does not count, and a consumer with an open stream counts
as seen.

Pruning deletes the oldest events first, a whole session at a time, and never a session that still runs.
Events are deleted in the order of their numbers, so that the rest has no holes. The last pruned number is
kept in `meta.pruned`, because a reader that asks for it must get a gap. Only the limit
`RetentionLimits.everything` deletes events that a consumer or a task's callback still needs.
"""

import sqlite3
from collections.abc import Mapping
from functools import partial
from itertools import takewhile

from attrs import frozen

from polarnode.journal import pending_callbacks
from polarnode.journal.entries import ROW_BYTES, JournalEntry, forget_evaluation
from polarnode.journal.values import AwaitedConsumers, ConsumerPosition, RetentionLimits

# ── consumers ────────────────────────────────────────────────────────────

# Most consumers of a journal. They are read at every commit, in 3 us each. A script that makes a new name for
# each run must notice.
MAX_CONSUMERS = 200


def read_positions(db: sqlite3.Connection) -> dict[str, ConsumerPosition]:
    """All positions, by consumer."""
    rows = db.execute("SELECT consumer, seq, moved, heard FROM positions ORDER BY consumer")
    return {
        name: ConsumerPosition(seq=seq, moved=moved, last_seen=last_seen)
        for name, seq, moved, last_seen in rows
    }


def acknowledged_seq(consumers: Mapping[str, ConsumerPosition], waiting: AwaitedConsumers) -> int:
    """The last event that is acknowledged by all consumers that the journal waits for. Where it waits for
    none, all consumers count.
    """
    held = [position.seq for name, position in consumers.items() if waiting.awaits(name, position)]
    return min(held or [position.seq for position in consumers.values()], default=0)


def longest_unseen(consumers: Mapping[str, ConsumerPosition], waiting: AwaitedConsumers) -> str | None:
    """The consumer that was not seen for longest, among those that the journal does not wait for."""
    unseen = [
        (position.last_seen, name)
        for name, position in consumers.items()
        if not waiting.awaits(name, position)
    ]
    return min(unseen)[1] if unseen else None


# ── consumers' entries ───────────────────────────────────────────────────────────


def acknowledge_entry(consumer: str, seq: int, *, now: float) -> JournalEntry:
    return JournalEntry(ROW_BYTES, partial(_move_position, consumer=consumer, seq=seq, now=now))


def _move_position(db: sqlite3.Connection, *, consumer: str, seq: int, now: float) -> None:
    """Move a position forward only, and never beyond the last event, because a position from the future would
    skip events that are yet to come.
    """
    capped = "min(?2, (SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'events'))"
    db.execute(
        f"INSERT INTO positions (consumer, seq, moved, heard) VALUES (?1, {capped}, ?3, ?3) ON CONFLICT"
        " (consumer) DO UPDATE SET moved = CASE WHEN excluded.seq > seq THEN excluded.moved ELSE moved END,"
        " seq = max(seq, excluded.seq), heard = excluded.heard",
        (consumer, seq, now),
    )


def seen_entry(consumer: str, *, now: float) -> JournalEntry:
    """Record that a consumer was seen. A consumer that was deleted meanwhile is not created again."""
    return JournalEntry(
        ROW_BYTES,
        partial(_execute, sql="UPDATE positions SET heard = ? WHERE consumer = ?", row=(now, consumer)),
    )


def forget_entry(consumer: str) -> JournalEntry:
    return JournalEntry(
        ROW_BYTES, partial(_execute, sql="DELETE FROM positions WHERE consumer = ?", row=(consumer,))
    )


def _execute(db: sqlite3.Connection, *, sql: str, row: tuple[object, ...]) -> None:
    db.execute(sql, row)


# ── pruning ────────────────────────────────────────────────────────────

# Events that a commit prunes besides as many as it adds. They take some milliseconds, so that turns do not
# wait for the pruning.
MAX_PRUNED_EVENTS = 64
# Seconds between two marks of what all consumers had acknowledged. Retention by age is exact to a minute, and
# 72 hours make 4320 rows.
MARK_INTERVAL_S = 60.0

# Whether the callback of an event's task has pending events, or may yet get some: a callback at the task's
# end sends all of its sessions.
HAS_PENDING_CALLBACKS = """EXISTS (SELECT 1 FROM callbacks WHERE callbacks.task_id = events.task_id)
    OR EXISTS (SELECT 1 FROM callback_urls WHERE callback_urls.task_id = events.task_id)"""
EventRow = tuple[int, str, str, str | None]


@frozen(kw_only=True)
class PruneInputs:
    """The inputs of pruning, besides the tables."""

    now: float
    acknowledged: int  # the last event that all consumers have acknowledged
    disk_short: bool = False  # disk is short: events kept only to be read again go before tasks are refused
    new_entries: int = 0  # entries of this commit, each of at most three events: pruning keeps up with them


def stored_bytes(db: sqlite3.Connection) -> int:
    """The bytes of the pages in use. The file may be larger: its free pages are reused before it grows."""
    return page_bytes(db)[0]


def page_bytes(db: sqlite3.Connection) -> tuple[int, int]:
    """`stored_bytes`, and the bytes of the file's free pages, which are reused before it grows."""
    pages, free, size = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size, free * size


def prune(db: sqlite3.Connection, retention: RetentionLimits, moment: PruneInputs) -> bool:
    """Delete some of the oldest events if too much is stored, inside the caller's transaction. Returns
    whether any was deleted.
    """
    _mark_acknowledged(db, moment)
    rows, enough = _prunable_events(db, retention, moment, MAX_PRUNED_EVENTS + 3 * moment.new_entries)
    for seq, kind, task_id, session_id in rows:
        _delete_event_rows(db, kind, task_id, session_id)
        if kind == "reward":
            forget_evaluation(db, session_id, seq)
        pending_callbacks.expire_callbacks(db, seq)
        for table in ("events", "marks"):
            db.execute(f"DELETE FROM {table} WHERE seq <= ?", (seq,))
        db.execute("UPDATE meta SET value = ? WHERE name = 'pruned'", (seq,))
        if stored_bytes(db) <= enough:
            break
    return bool(rows)


def _mark_acknowledged(db: sqlite3.Connection, moment: PruneInputs) -> None:
    """Remember what all consumers have acknowledged by now. Marks beyond that go: a new consumer has not."""
    db.execute("DELETE FROM marks WHERE seq > ?", (moment.acknowledged,))
    last = db.execute("SELECT seq, at FROM marks ORDER BY seq DESC LIMIT 1").fetchone()
    (pruned,) = db.execute("SELECT value FROM meta WHERE name = 'pruned'").fetchone()
    if moment.acknowledged > pruned and (
        last is None or (moment.acknowledged > last[0] and moment.now >= last[1] + MARK_INTERVAL_S)
    ):
        db.execute("INSERT INTO marks VALUES (?, ?)", (moment.acknowledged, moment.now))


def _prunable_events(
    db: sqlite3.Connection, retention: RetentionLimits, moment: PruneInputs, most: int
) -> tuple[list[EventRow], int]:
    """The oldest events that may be deleted now, and the stored bytes at which pruning may stop."""
    stored = stored_bytes(db)
    if stored > retention.everything:
        return (
            list(
                db.execute("SELECT seq, kind, task_id, session_id FROM events ORDER BY seq LIMIT ?", (most,))
            ),
            retention.everything,
        )
    large = stored > retention.acknowledged
    upto = moment.acknowledged if large or moment.disk_short else _last_aged_event(db, retention, moment)
    rows = db.execute(
        f"SELECT seq, kind, task_id, session_id, {HAS_PENDING_CALLBACKS} FROM events WHERE seq <= ? ORDER"
        " BY seq LIMIT ?",
        (upto, most),
    )
    return [row[:4] for row in takewhile(lambda row: not row[4], rows)], (
        retention.acknowledged if large and not moment.disk_short else 0
    )


def _last_aged_event(db: sqlite3.Connection, retention: RetentionLimits, moment: PruneInputs) -> int:
    """The last event that all consumers had acknowledged `acknowledged_s` ago; 0 for none."""
    # Only the oldest mark is looked at. The later ones are younger, and are looked at when this one is gone.
    (oldest,) = db.execute("SELECT coalesce(min(seq), 0) FROM marks").fetchone()
    aged = db.execute(
        "SELECT 1 FROM marks WHERE seq = ? AND at <= ?", (oldest, moment.now - retention.acknowledged_s)
    ).fetchone()
    return 0 if aged is None else min(int(oldest), moment.acknowledged)


def _delete_event_rows(db: sqlite3.Connection, kind: str, task_id: str, session_id: str | None) -> None:
    if kind in ("trajectory", "attempt"):
        db.execute("DELETE FROM turns WHERE session_id = ?", (session_id,))
        db.execute("DELETE FROM trajectories WHERE session_id = ?", (session_id,))
        # A session without a task (a capture) has no later event that could delete its row.
        db.execute(
            "DELETE FROM sessions WHERE session_id = ? AND NOT EXISTS (SELECT 1 FROM tasks WHERE task_id"
            " = ?)",
            (session_id, task_id),
        )
    if kind == "task":  # the last event of its task: all its trajectories were deleted before it
        db.execute("DELETE FROM sessions WHERE task_id = ?", (task_id,))
        db.execute("DELETE FROM tasks WHERE task_id = ?", (task_id,))


def event_time(db: sqlite3.Connection, seq: int) -> float | None:
    """The time of the first event from `seq` on. None where there is none, or where it is older than the
    recording of times.
    """
    found = db.execute("SELECT at FROM events WHERE seq >= ? ORDER BY seq LIMIT 1", (seq,)).fetchone()
    return (found[0] or None) if found else None
