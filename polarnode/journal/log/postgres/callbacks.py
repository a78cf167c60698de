"""Callbacks: events that a receiver has not accepted, each leased to one node at a time.

A lease decides which node sends an event, and does not promise that it is sent once: when a node dies after
sending, another one sends the event again, with the same key. The server's clock ends a lease. Where that
clock is wrong by a minute, events are sent twice or late, and none is lost.
"""

from collections.abc import Mapping
from typing import Final

from psycopg.types.json import Jsonb

from polarnode.journal.log.port import LeasedCallback
from polarnode.journal.log.postgres.connection import Database
from polarnode.journal.pending_callbacks import CallbackCounts

# Leases only the oldest event of each task, because the events of a task are sent in their order. The query
# steps through the index by URL and by task, so that the backlog of a receiver that is down slows only its
# own events: each node looks some times a second.
LEASE_CALLBACKS: Final = """
WITH RECURSIVE urls AS (
    (SELECT url FROM callbacks ORDER BY url LIMIT 1)
    UNION ALL
    SELECT (SELECT c.url FROM callbacks c WHERE c.url > urls.url ORDER BY c.url LIMIT 1) FROM urls
    WHERE url IS NOT NULL
), wanted AS (
    SELECT url, room
    FROM urls CROSS JOIN LATERAL (SELECT coalesce((%(rooms)s ->> url)::bigint, %(each)s) AS room) rooms
    WHERE room > 0
), oldest AS (
    SELECT wanted.*, first.* FROM wanted CROSS JOIN LATERAL (
        SELECT task_id, position, leased_until FROM callbacks c WHERE c.url = wanted.url
        ORDER BY task_id, position LIMIT 1) first
    UNION ALL
    SELECT oldest.url, oldest.room, next.* FROM oldest CROSS JOIN LATERAL (
        SELECT task_id, position, leased_until FROM callbacks c
        WHERE c.url = oldest.url AND c.task_id > oldest.task_id ORDER BY task_id, position LIMIT 1) next
), heads AS (
    SELECT position, room, row_number() OVER (PARTITION BY url ORDER BY position) AS number
    FROM oldest WHERE leased_until < clock_timestamp()
), free AS (
    SELECT c.position FROM heads JOIN callbacks c USING (position)
    WHERE c.leased_until < clock_timestamp()  -- again: another node may have leased it meanwhile
        AND number <= room
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
    rows = db.execute(LEASE_CALLBACKS, values).fetchall()
    return tuple(sorted((LeasedCallback(**row) for row in rows), key=lambda each: each.position))


def accept_callback(db: Database, callback: LeasedCallback) -> bool:
    found = db.execute(
        "DELETE FROM callbacks WHERE position = %s AND lease = %s", (callback.position, callback.lease)
    )
    return found.rowcount > 0


def retry_callback(db: Database, callback: LeasedCallback, after_s: float) -> None:
    db.execute(
        "UPDATE callbacks SET leased_until = clock_timestamp() + make_interval(secs => %s)"
        " WHERE position = %s AND lease = %s",
        (after_s, callback.position, callback.lease),
    )


def count_callbacks(db: Database) -> CallbackCounts:
    row = db.execute(
        "SELECT (SELECT count(*) FROM callbacks) AS pending, callbacks_expired AS expired FROM log"
    ).fetchone()
    assert row is not None
    return CallbackCounts(**row)
