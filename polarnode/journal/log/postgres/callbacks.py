"""Callbacks: events that a receiver has not accepted, each leased to one node at a time.

A lease is for who sends and not for what is sent: a node that dies in between leaves an event that another
sends again, so a receiver may get one twice, with the same key. The server's clock ends a lease; wrong by a
minute it sends twice or late, and loses nothing.
"""

from typing import Final

from polarnode.journal.log.port import LeasedCallback
from polarnode.journal.log.postgres.connection import Database

# the oldest of each task alone: the events of a task are sent in their order
LEASE: Final = """
WITH free AS (
    SELECT position FROM callbacks c
    WHERE leased_until < clock_timestamp()
        AND NOT EXISTS (SELECT 1 FROM callbacks before WHERE before.url = c.url AND before.task_id = c.task_id
            AND before.position < c.position)
    ORDER BY position LIMIT %(limit)s FOR UPDATE SKIP LOCKED
)
UPDATE callbacks SET leased_until = clock_timestamp() + make_interval(secs => %(seconds)s), lease = lease + 1
FROM free JOIN events USING (position) WHERE callbacks.position = free.position
RETURNING callbacks.position, key, callbacks.task_id, url, lease"""


def lease_callbacks(db: Database, limit: int, seconds: float) -> tuple[LeasedCallback, ...]:
    rows = db.execute(LEASE, {"limit": limit, "seconds": seconds}).fetchall()
    return tuple(sorted((LeasedCallback(**row) for row in rows), key=lambda each: each.position))


def callback_taken(db: Database, callback: LeasedCallback) -> bool:
    found = db.execute(
        "DELETE FROM callbacks WHERE position = %s AND lease = %s", (callback.position, callback.lease)
    )
    return found.rowcount > 0


def callback_failed(db: Database, callback: LeasedCallback, after_s: float) -> None:
    db.execute(
        "UPDATE callbacks SET leased_until = clock_timestamp() + make_interval(secs => %s)"
        " WHERE position = %s AND lease = %s",
        (after_s, callback.position, callback.lease),
    )


def callback_count(db: Database) -> int:
    row = db.execute("SELECT count(*) AS count FROM callbacks").fetchone()
    return 0 if row is None else int(row["count"])
