"""What is owed to tasks' callbacks: which events, to which URL, until each was taken.

The rules for whoever edits it. `owe` runs in the transaction that writes the event, so that no death of the
node lies between the two; whoever inserts an event calls it. A row goes when its event was taken, or,
counted, with its event when the retention ends. The order of a task is that of its events' numbers.
"""

import sqlite3
from collections.abc import Collection, Mapping
from typing import Any, Final

from attrs import frozen

from polarnode.core.task import CallbackFormat, TaskSpec

# What each format is told of: every event of the task's group; its end, with all results; each session's end.
KINDS: Final[Mapping[CallbackFormat, tuple[str, ...]]] = {
    "event": ("trajectory", "group", "task"),
    "polar_task": ("task",),
    "polar_session": ("trajectory",),
}
EXPIRED: Final = "callbacks_expired"  # in `meta`
# tasks that one query passes over: SQLite takes 32 766 values, and a URL with so many that failed is dead
MOST_SKIPPED: Final = 500


@frozen(kw_only=True)
class Wanted:
    """A task's callback, as it was submitted."""

    url: str
    kinds: tuple[str, ...]


@frozen(kw_only=True)
class Owed:
    """The oldest event of a task that its callback has not taken."""

    seq: int
    task_id: str
    url: str


def wanted_of(spec: TaskSpec) -> Wanted | None:
    """What a task wants to be told of; None for nothing."""
    return (
        None
        if spec.callback_url is None
        else Wanted(url=spec.callback_url, kinds=KINDS[spec.callback_format])
    )


# ── inside the transaction of an event ────────────────────────────────────────


def remember_callback(db: sqlite3.Connection, task_id: str, wanted: Wanted | None) -> None:
    """Where a task's events go; written with the task."""
    if wanted is not None:
        db.execute(
            "INSERT OR IGNORE INTO callback_urls VALUES (?, ?, ?)",
            (task_id, wanted.url, ",".join(wanted.kinds)),
        )


def owe(db: sqlite3.Connection, kind: str, task_id: str) -> None:
    """The event that was inserted just now is owed to its task's callback, if that wants it. The task's own
    is its last.
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
    """Events up to this one go with the retention, and are owed to nobody any more; how many were is counted
    for as long as the journal lives.
    """
    lost = db.execute("DELETE FROM callbacks WHERE seq <= ?", (seq,)).rowcount
    if lost:
        db.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
            (EXPIRED, lost),
        )


def taken(db: sqlite3.Connection, *, seq: int) -> None:
    """A callback took an event."""
    db.execute("DELETE FROM callbacks WHERE seq = ?", (seq,))


# ── what is still owed ────────────────────────────────────────────────────────


def urls(db: sqlite3.Connection, most: int, but: Collection[str] = ()) -> tuple[str, ...]:
    """URLs to which something is owed, those whose oldest event is oldest first, without some."""
    marks, skipped = _skipped(but)
    rows = db.execute(
        f"SELECT url FROM callbacks WHERE url NOT IN ({marks}) GROUP BY url ORDER BY min(seq) LIMIT ?",
        (*skipped, most),
    )
    return tuple(url for (url,) in rows)


def heads(db: sqlite3.Connection, url: str, most: int, but: Collection[str] = ()) -> tuple[Owed, ...]:
    """The oldest event of each task that is owed to a URL, oldest first, without some tasks."""
    marks, skipped = _skipped(but)
    query = (
        f"SELECT min(seq), task_id FROM callbacks WHERE url = ? AND task_id NOT IN ({marks}) GROUP BY task_id"
        " ORDER BY min(seq) LIMIT ?"
    )
    return tuple(
        Owed(seq=seq, task_id=task_id, url=url) for seq, task_id in db.execute(query, (url, *skipped, most))
    )


def count(db: sqlite3.Connection) -> int:
    """Events that are owed."""
    return int(db.execute("SELECT count(*) FROM callbacks").fetchone()[0])


def expired(db: sqlite3.Connection) -> int:
    """Events that went with the retention while they were owed."""
    row = db.execute("SELECT value FROM meta WHERE name = ?", (EXPIRED,)).fetchone()
    return 0 if row is None else int(row[0])


def _skipped(but: Collection[str]) -> tuple[str, tuple[Any, ...]]:
    some = tuple(but)[:MOST_SKIPPED]
    return ", ".join("?" * len(some)), some
