"""Events that the receiver of a task's callback has not accepted yet.

An event becomes pending in the transaction that writes it, so that a crash of the node cannot separate the
two: code that inserts an event must call `add_pending`. The row is deleted when the receiver accepts the
event, or when retention prunes it, which is counted. Events of one task are in the order of their numbers.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Final

from attrs import frozen

from polarnode.core.codec.json import dump_json

EVENT_FORMAT: Final = "event"  # the `callback_format` that sends each event as the stream has it
EVENT_KINDS: Final = ("trajectory", "group", "task")  # the kinds of events that this format sends
EXPIRED_META_ROW: Final = "callbacks_expired"  # the row of `meta` that counts them


@frozen(kw_only=True)
class CallbackTarget:
    """The URL that a task's events are sent to, and the kinds of events that are."""

    url: str
    kinds: tuple[str, ...]


@frozen(kw_only=True)
class CallbackCounts:
    """The numbers of events that are `pending`, and that were pruned before their receivers accepted them."""

    pending: int
    expired: int


# ── inside the transaction of an event ────────────────────────────────────────


def remember_callback(db: sqlite3.Connection, task_id: str, target: CallbackTarget | None) -> None:
    """Store where a task's events go. This is written in the transaction of the task."""
    if target is not None:
        db.execute(
            "INSERT OR IGNORE INTO callback_urls VALUES (?, ?, ?)",
            (task_id, target.url, ",".join(target.kinds)),
        )


def add_pending(db: sqlite3.Connection, kind: str, task_id: str) -> None:
    """Make the event that was inserted last pending, if its task's callback is sent events of this kind. A
    `task` event is the last one of its task, so the callback is forgotten with it.
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


def expire_callbacks(db: sqlite3.Connection, seq: int) -> None:
    """Drop the pending events up to `seq`, which retention prunes, and count them. The count is never
    reset.
    """
    lost = db.execute("DELETE FROM callbacks WHERE seq <= ?", (seq,)).rowcount
    if lost:
        db.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
            (EXPIRED_META_ROW, lost),
        )


def delete_callback(db: sqlite3.Connection, *, seq: int) -> None:
    """Delete the pending row of an event that its receiver accepted."""
    db.execute("DELETE FROM callbacks WHERE seq = ?", (seq,))


# ── reads ─────────────────────────────────────────────────────────────────────

# The oldest pending event of each task, with a limit for each URL. Events in `leased` are being sent, or wait
# to be sent again.
SELECT_HEADS: Final = """
WITH heads AS (
    SELECT min(seq) AS seq, task_id, url FROM callbacks
    WHERE url NOT IN (SELECT room.key FROM json_each(:rooms) AS room WHERE room.value < 1)
    GROUP BY url, task_id
), free AS (
    SELECT seq, task_id, url, row_number() OVER (PARTITION BY url ORDER BY seq) AS number
    FROM heads WHERE seq NOT IN (SELECT value FROM json_each(:leased))
)
SELECT free.seq, free.task_id, free.url, events.key FROM free JOIN events USING (seq)
WHERE number <= coalesce((SELECT room.value FROM json_each(:rooms) AS room WHERE room.key = free.url), :each)
ORDER BY free.seq LIMIT :limit"""


def oldest_pending(
    db: sqlite3.Connection, limit: int, each: int, rooms: Mapping[str, int], leased: Sequence[int]
) -> list[tuple[int, str, str, str]]:
    """The oldest pending event of each task and URL, oldest first: its number, task, URL and key. `rooms`
    limits the events of each URL that it names, and `each` those of any other.
    """
    values = {
        "limit": limit,
        "each": each,
        "rooms": dump_json(dict(rooms)).decode(),
        "leased": dump_json(list(leased)).decode(),
    }
    return db.execute(SELECT_HEADS, values).fetchall()


def count_callbacks(db: sqlite3.Connection) -> CallbackCounts:
    """Count the pending events, and those that retention pruned while they were pending."""
    (pending,) = db.execute("SELECT count(*) FROM callbacks").fetchone()
    row = db.execute("SELECT value FROM meta WHERE name = ?", (EXPIRED_META_ROW,)).fetchone()
    return CallbackCounts(pending=pending, expired=0 if row is None else int(row[0]))
