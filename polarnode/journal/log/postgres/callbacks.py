"""Callbacks: events that a receiver has not accepted, each leased to one node at a time.

A lease is for who sends and not for what is sent: a node that dies in between leaves an event that another
sends again, so a receiver may get one twice, with the same key. The server's clock ends a lease; wrong by a
minute it sends twice or late, and loses nothing.
"""

from collections.abc import Mapping
from typing import Final

from psycopg.types.json import Jsonb

from polarnode.journal.log.port import LeasedCallback
from polarnode.journal.log.postgres.connection import Database
from polarnode.journal.pending_callbacks import CallbackCounts

# the oldest of each task alone: the events of a task are sent in their order
LEASE: Final = """
WITH heads AS (
    SELECT c.position, row_number() OVER (PARTITION BY c.url ORDER BY c.position) AS number
    FROM callbacks c
    WHERE c.leased_until < clock_timestamp()
        AND coalesce((%(rooms)s ->> c.url)::bigint, %(each)s) > 0
        AND NOT EXISTS (SELECT 1 FROM callbacks before WHERE before.url = c.url AND before.task_id = c.task_id
            AND before.position < c.position)
), free AS (
    SELECT c.position FROM heads JOIN callbacks c USING (position)
    WHERE c.leased_until < clock_timestamp()  -- again: another node may have leased it meanwhile
        AND number <= coalesce((%(rooms)s ->> c.url)::bigint, %(each)s)
    ORDER BY c.position LIMIT %(limit)s FOR UPDATE OF c SKIP LOCKED
)
UPDATE callbacks SET leased_until = clock_timestamp() + make_interval(secs => %(seconds)s), lease = lease + 1
FROM free JOIN events USING (position) WHERE callbacks.position = free.position
RETURNING callbacks.position, key, callbacks.task_id, url, lease"""


def lease_callbacks(
    db: Database, limit: int, *, seconds: float, each: int | None, rooms: Mapping[str, int]
) -> tuple[LeasedCallback, ...]:
    values = {
        "limit": limit,
        "seconds": seconds,
        "each": limit if each is None else each,
        "rooms": Jsonb(dict(rooms)),
    }
    rows = db.execute(LEASE, values).fetchall()
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


def callback_counts(db: Database) -> CallbackCounts:
    row = db.execute(
        "SELECT (SELECT count(*) FROM callbacks) AS pending, callbacks_expired AS expired FROM log"
    ).fetchone()
    assert row is not None
    return CallbackCounts(**row)
