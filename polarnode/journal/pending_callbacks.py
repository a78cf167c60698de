"""Events that the receiver of a task's callback has not accepted yet.

An event becomes pending in the transaction that writes it, so that a crash of the node cannot separate the
two: code that inserts an event must call `add_pending`. The row is deleted when the receiver accepts the
event, or when retention prunes it, which is counted. Events of one task are in the order of their numbers.
"""

import sqlite3
from collections.abc import Collection
from typing import Any, Final

from attrs import frozen

EVENT_FORMAT: Final = "event"  # the `callback_format` that sends each event as the stream has it
EVENT_KINDS: Final = ("trajectory", "group", "task")  # and the kinds of events it sends
EXPIRED: Final = "callbacks_expired"  # in `meta`
# tasks that one query passes over: SQLite takes 32 766 values, and a URL with so many that failed is dead
MOST_SKIPPED: Final = 500


@frozen(kw_only=True)
class CallbackTarget:
    """Where a task's events go, and the kinds of them that do."""

    url: str
    kinds: tuple[str, ...]


@frozen(kw_only=True)
class PendingCallback:
    """The oldest pending event of a task."""

    seq: int
    task_id: str
    url: str


# ── inside the transaction of an event ────────────────────────────────────────


def remember_callback(db: sqlite3.Connection, task_id: str, target: CallbackTarget | None) -> None:
    """Store where a task's events go; written with the task."""
    if target is not None:
        db.execute(
            "INSERT OR IGNORE INTO callback_urls VALUES (?, ?, ?)",
            (task_id, target.url, ",".join(target.kinds)),
        )


def add_pending(db: sqlite3.Connection, kind: str, task_id: str) -> None:
    """Make the event that was inserted last pending, if its task's callback is sent this kind. A `task` event
    is its task's last.
    """
    row = db.execute("SELECT url, kinds FROM callback_urls WHERE task_id = ?", (task_id,)).fetchone()
    if row is None:
        return
    if kind in row[1].split(","):
        db.execute(
            "INSERT INTO callbacks (seq, task_id, url) VALUES (last_insert_rowid(), ?, ?)", (task_id, row[0])
        )
    if kind == "task":
        db.execute("DELETE FROM callback_urls WHERE task_id = ?", (task_id,))


def expire(db: sqlite3.Connection, seq: int) -> None:
    """Drop pending events up to `seq`, which retention prunes. They are counted for as long as the journal
    lives.
    """
    lost = db.execute("DELETE FROM callbacks WHERE seq <= ?", (seq,)).rowcount
    if lost:
        db.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
            (EXPIRED, lost),
        )


def taken(db: sqlite3.Connection, *, seq: int) -> None:
    """Delete the row of an event that its receiver accepted."""
    db.execute("DELETE FROM callbacks WHERE seq = ?", (seq,))


# ── reads ─────────────────────────────────────────────────────────────────────


def urls(db: sqlite3.Connection, most: int, skipped: Collection[str] = ()) -> tuple[str, ...]:
    """URLs with pending events, those whose oldest event is oldest first, without those `skipped`."""
    marks, values = _placeholders(skipped)
    rows = db.execute(
        f"SELECT url FROM callbacks WHERE url NOT IN ({marks}) GROUP BY url ORDER BY min(seq) LIMIT ?",
        (*values, most),
    )
    return tuple(url for (url,) in rows)


def heads(
    db: sqlite3.Connection, url: str, most: int, skipped: Collection[str] = ()
) -> tuple[PendingCallback, ...]:
    """The oldest pending event of each task of a URL, oldest first, without the tasks `skipped` (of which the
    first MOST_SKIPPED count).
    """
    marks, values = _placeholders(skipped)
    query = (
        f"SELECT min(seq), task_id FROM callbacks WHERE url = ? AND task_id NOT IN ({marks}) GROUP BY task_id"
        " ORDER BY min(seq) LIMIT ?"
    )
    return tuple(
        PendingCallback(seq=seq, task_id=task_id, url=url)
        for seq, task_id in db.execute(query, (url, *values, most))
    )


def count(db: sqlite3.Connection) -> int:
    """Pending events."""
    return int(db.execute("SELECT count(*) FROM callbacks").fetchone()[0])


def expired(db: sqlite3.Connection) -> int:
    """Events that retention pruned while they were pending."""
    row = db.execute("SELECT value FROM meta WHERE name = ?", (EXPIRED,)).fetchone()
    return 0 if row is None else int(row[0])


def _placeholders(skipped: Collection[str]) -> tuple[str, tuple[Any, ...]]:
    values = tuple(skipped)[:MOST_SKIPPED]
    return ", ".join("?" * len(values)), values
