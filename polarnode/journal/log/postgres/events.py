"""Events by position, the consumers that read them, and retention.

A cursor names the log that it was read from. A promoted standby and a restored backup are other logs. Where a
reader has events of the old log from beyond the point where the new one begins, it gets a gap that names the
old log, and is never served in silence.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from attrs import evolve

from polarnode.core.codec.packing import unpack_trajectory, unpack_turn
from polarnode.core.cursors import Cursor
from polarnode.core.errors import Refused, Unreadable
from polarnode.core.status import Consumer
from polarnode.core.trajectory import Trajectory
from polarnode.journal.damage import decode_boundary, encode_trajectory
from polarnode.journal.log.port import LogGap, LogPage, LogStatus
from polarnode.journal.log.postgres.connection import Database
from polarnode.journal.log.rules import compute_gap
from polarnode.journal.queries import PAGE_BYTES, ByteCache
from polarnode.journal.retention import MAX_CONSUMERS
from polarnode.journal.values import (
    PRUNED_BODY,
    EventFilters,
    EventPage,
    RetentionLimits,
    StoredEvent,
    TrajectoryEncoder,
    unreadable_event,
)

# ── identity ──────────────────────────────────────────────────────────────────


def log_name(db: Database) -> str:
    """The name of the log. A standby that was just promoted records its new name in this call."""
    return _query_text(db, "SELECT settle_identity() AS found")


def mark_restored(db: Database) -> str:
    return _query_text(db, "SELECT mark_restored() AS found")


def _query_text(db: Database, query: str) -> str:
    row = db.execute(query.encode()).fetchone()
    assert row is not None
    return str(row["found"])


# ── reading ───────────────────────────────────────────────────────────────────

# One statement, so that all of it is of one moment. `next` is the position after which the log got the name
# that follows the cursor's. It is NULL for the current name, and for a name that the log never had.
SELECT_LOG_POSITION: Final = """
SELECT position, pruned, current_identity() AS identity,
    EXISTS (SELECT 1 FROM identities WHERE identity = %(log)s) AS known,
    (SELECT min(after) FROM identities
        WHERE number > (SELECT number FROM identities WHERE identity = %(log)s)) AS next
FROM log"""


def find_gap(db: Database, asked: Cursor) -> tuple[LogGap | None, str, int, int, int]:
    """What a reader at this cursor misses, the log's name, the position to go on from, the last position that
    retention deleted, and the last position of all.
    """
    row = db.execute(SELECT_LOG_POSITION, {"log": asked.log}).fetchone()
    assert row is not None
    name, last, pruned = row["identity"], row["position"], row["pruned"]
    # A current name that is not recorded yet has no event of its own.
    lost_after = last if row["next"] is None and asked.log != name else row["next"]
    gap = compute_gap(
        asked, log=name, last=last, pruned=pruned, known=bool(row["known"]), lost_after=lost_after
    )
    return gap, name, asked.position if gap is None else gap.position, pruned, last


SELECT_EVENT: Final = (
    "SELECT position, kind, key, task_id, group_id, session_id, outcome, reward, at, body FROM events"
    " WHERE position > %(after)s AND position <= %(last)s"
)


def events(
    db: Database,
    asked: Cursor,
    limit: int,
    filters: EventFilters,
    encoder: TrajectoryEncoder,
    recent: ByteCache,
) -> LogPage:
    """Up to `limit` events after a cursor, fewer where they are large, but at least one if there is one."""
    gap, name, after, pruned, last = find_gap(db, asked)
    clauses = [" AND kind = ANY (%(kinds)s)"]
    values: dict[str, Any] = {"after": after, "last": last, "limit": limit, "kinds": list(filters.kinds)}
    for clause, value in (
        (" AND task_id = %(task_id)s", filters.task_id),
        (" AND group_id = %(group_id)s", filters.group_id),
        (" AND (outcome IS NULL OR outcome = %(outcome)s)", filters.outcome),
        (" AND (outcome IS NULL OR reward >= %(min_reward)s)", filters.min_reward),
    ):
        if value is not None:
            clauses.append(clause)
    values |= {
        "task_id": filters.task_id,
        "group_id": filters.group_id,
        "outcome": filters.outcome,
        "min_reward": filters.min_reward,
    }
    query = SELECT_EVENT + "".join(clauses) + " ORDER BY position LIMIT %(limit)s"
    rows = db.execute(query.encode(), values).fetchall()
    if after < last and (not rows or rows[0]["position"] > after + 1):
        # The missing events did not match, or were deleted since `find_gap`. The latter needs a gap: look
        # again.
        row = db.execute("SELECT pruned FROM log").fetchone()
        if row is not None and row["pruned"] > max(after, pruned):
            return events(db, asked, limit, filters, encoder, recent)
    seen = max(after, last) if len(rows) < limit else rows[-1]["position"]
    found: list[StoredEvent] = []
    size = 0
    for row in rows:
        found.append(_read_event(db, encoder, recent, name, row))
        size += len(found[-1].body)
        if size > PAGE_BYTES and len(found) < len(rows):
            seen = found[-1].seq
            break
    page = EventPage(events=tuple(found), seen=seen, first_seq=pruned + 1, last_seq=last)
    return LogPage(log=name, page=page, gap=gap)


def _read_event(
    db: Database, encoder: TrajectoryEncoder, recent: ByteCache, name: str, row: dict[str, Any]
) -> StoredEvent:
    position, encode = row["position"], encoder.encode
    try:
        if row["body"] is not None:
            body = bytes(row["body"])
        elif encode is None:
            body = b""
        else:
            body = recent.get(
                (name, position, encoder.name), lambda: _trajectory_body(db, encode, row["session_id"])
            )
        return StoredEvent(seq=position, kind=row["kind"], key=row["key"], body=body)
    except Unreadable as error:
        return unreadable_event(tuple(row.values()), str(error))


def _trajectory_body(db: Database, encode: Callable[[Trajectory], bytes], session_id: str) -> bytes:
    whole = trajectory(db, session_id)
    return PRUNED_BODY if whole is None else encode_trajectory(encode, whole)


SELECT_BODY: Final = (
    "SELECT part, data, retried_as FROM bodies JOIN sessions USING (session_id, written_by)"
    " WHERE session_id = %s AND outcome IS NOT NULL ORDER BY part"
)


def trajectory(db: Database, session_id: str) -> Trajectory | None:
    """The trajectory of a session that is over, with its turns. Raises Unreadable."""
    rows = db.execute(SELECT_BODY, (session_id,), binary=True).fetchall()
    if not rows or rows[0]["part"] != 0:
        return None
    with decode_boundary():
        turns = [unpack_turn(bytes(row["data"])) for row in rows[1:]]
        whole = unpack_trajectory(bytes(rows[0]["data"]), turns)
        # Which session has its place now became known after it was packed.
        return evolve(whole, retried_as=rows[0]["retried_as"])


# ── consumers ─────────────────────────────────────────────────────────────────

# Moves a position forward only, and never beyond the last event. `_common` limits the position of another
# log.
INSERT_POSITION: Final = """
INSERT INTO consumers (name, position, moved, heard)
SELECT %(name)s, least(%(position)s, log.position), %(now)s, %(now)s FROM log
ON CONFLICT (name) DO UPDATE SET position = greatest(consumers.position, EXCLUDED.position),
    moved = CASE WHEN EXCLUDED.position > consumers.position THEN EXCLUDED.moved ELSE consumers.moved END,
    heard = EXCLUDED.heard
RETURNING position"""


def acknowledge(db: Database, name: str, cursor: Cursor, now: float, silence_s: float) -> Cursor:
    if not _is_known(db, name):
        _make_room(db, now - silence_s)
    position, log = _common_position(db, cursor)
    row = db.execute(INSERT_POSITION, {"name": name, "position": position, "now": now}).fetchone()
    assert row is not None
    return Cursor(position=row["position"], log=log)


def ensure_consumer(db: Database, name: str, begin: Cursor, now: float, silence_s: float) -> Cursor:
    """The position of a consumer, which is created at `begin` where it is new."""
    if not _is_known(db, name):
        _make_room(db, now - silence_s)
        db.execute(
            "INSERT INTO consumers (name, position, moved, heard)"
            " SELECT %(name)s, least(%(position)s, log.position), %(now)s, %(now)s FROM log"
            " ON CONFLICT (name) DO NOTHING",
            {"name": name, "position": _common_position(db, begin)[0], "now": now},
        )
    return consumer_cursor(db, name)


def _is_known(db: Database, name: str) -> bool:
    return db.execute("SELECT 1 FROM consumers WHERE name = %s", (name,)).fetchone() is not None


def _common_position(db: Database, cursor: Cursor) -> tuple[int, str]:
    """The position of a cursor, limited to the history that this log shares with the cursor's, and this log's
    name.
    """
    gap, name, after, _, _ = find_gap(db, cursor)
    foreign = gap is not None and cursor.log not in ("", name)
    return (min(cursor.position, after) if foreign else cursor.position), name


# whether a node that is alive has a stream of the consumer open
IS_READ: Final = (
    "EXISTS (SELECT 1 FROM nodes WHERE nodes.state = 'alive' AND jsonb_exists(reading, consumers.name))"
)


def _make_room(db: Database, since: float) -> None:
    """Make room for a new consumer where there are MOST, by deleting the one that was not seen for longest.
    Raises Refused where all of them are waited for.
    """
    row = db.execute(
        (
            "SELECT count(*) AS count, (SELECT name FROM consumers"
            f" WHERE heard <= %s AND NOT {IS_READ} ORDER BY heard LIMIT 1) AS unseen FROM consumers"
        ).encode(),
        (since,),
    ).fetchone()
    assert row is not None
    if row["count"] < MAX_CONSUMERS:
        return
    if row["unseen"] is None:
        raise Refused(
            f"there are {MAX_CONSUMERS} consumers: DELETE /v1/consumers/{{name}} those that do not come back",
            path="$.consumer",
        )
    db.execute("DELETE FROM consumers WHERE name = %s", (row["unseen"],))


def last_cursor(db: Database) -> Cursor:
    """The cursor of the last event."""
    row = db.execute("SELECT position, current_identity() AS log FROM log").fetchone()
    assert row is not None
    return Cursor(position=row["position"], log=row["log"])


def consumer_cursor(db: Database, name: str) -> Cursor:
    row = db.execute(
        "SELECT coalesce((SELECT position FROM consumers WHERE name = %s), 0) AS position,"
        " current_identity() AS log",
        (name,),
    ).fetchone()
    assert row is not None
    return Cursor(position=row["position"], log=row["log"])


def note_consumers_seen(db: Database, names: Sequence[str], now: float) -> None:
    """Note that consumers read now, or have just stopped."""
    db.execute("UPDATE consumers SET heard = %s WHERE name = ANY (%s)", (now, list(names)))


def forget_consumer(db: Database, name: str) -> bool:
    return db.execute("DELETE FROM consumers WHERE name = %s", (name,)).rowcount > 0


SELECT_CONSUMERS: Final = """
SELECT consumers.*, log.pruned,
    (SELECT coalesce(sum((reading ->> consumers.name)::integer), 0) FROM nodes WHERE state = 'alive')
    AS streams,
    log.position - greatest(consumers.position, log.pruned) AS behind,
    (SELECT coalesce(sum(bytes), 0) FROM events WHERE position > consumers.position) AS behind_bytes
FROM consumers, log ORDER BY name"""


def consumers(db: Database, since: float) -> tuple[Consumer, ...]:
    return tuple(
        Consumer(
            consumer=row["name"],
            position=row["position"],
            behind_events=row["behind"],
            behind_bytes=int(row["behind_bytes"]),
            missed=max(0, row["pruned"] - row["position"]),
            moved=row["moved"],
            last_seen=row["heard"],
            connected=row["streams"],
            holds=row["streams"] > 0 or row["heard"] > since,
        )
        for row in db.execute(SELECT_CONSUMERS)
    )


# The position up to which all consumers that are waited for have read. Where none is waited for, all count.
ACKNOWLEDGED_POSITION: Final = f"""
coalesce((SELECT min(position) FROM consumers WHERE heard > %(since)s OR {IS_READ}),
    (SELECT min(position) FROM consumers), 0)"""

SELECT_LOG_STATUS: Final = f"""
SELECT log.position, log.pruned, current_identity() AS identity, {ACKNOWLEDGED_POSITION} AS acknowledged,
    coalesce((SELECT jsonb_object_agg(name, position) FROM consumers), '{{}}') AS consumers
FROM log"""


def read_log_status(db: Database, since: float, before: LogStatus, *, weigh: bool) -> LogStatus:
    """Read the state of the log. With `weigh` its unacknowledged bytes are read too, which looks at every
    event.
    """
    row = db.execute(SELECT_LOG_STATUS.encode(), {"since": since}).fetchone()
    assert row is not None
    found = evolve(
        before,
        log=row["identity"],
        position=row["position"],
        pruned=row["pruned"],
        acknowledged=row["acknowledged"],
        consumers=row["consumers"],
    )
    after = {"after": found.acknowledged}
    oldest = db.execute(
        "SELECT at FROM events WHERE position > %(after)s ORDER BY position LIMIT 1", after
    ).fetchone()
    found = evolve(found, oldest_unacknowledged=None if oldest is None else oldest["at"])
    if not weigh:
        return found
    weight = db.execute(
        "SELECT coalesce(sum(bytes), 0) AS bytes FROM events WHERE position > %(after)s", after
    ).fetchone()
    assert weight is not None
    return evolve(found, unacknowledged_bytes=int(weight["bytes"]))


# ── retention ─────────────────────────────────────────────────────────────────

# Seconds between two marks of what all consumers had acknowledged: retention by age is exact to a minute.
MARK_INTERVAL_S: Final = 60.0
# A body without an event belongs to a session that finishes now, or to one whose node died between two
# statements. Older ones are deleted.
UNFINISHED_BODY_S: Final = 3600.0
SWEEP_WINDOW_S: Final = UNFINISHED_BODY_S + 7200.0

SELECT_PRUNE_INPUTS: Final = f"""
SELECT log.pruned, log.stored, {ACKNOWLEDGED_POSITION} AS acknowledged FROM log"""

# The oldest events up to %(upto)s, before the first one that is young or that a callback still waits for.
SELECT_PRUNABLE: Final = """
WITH oldest AS (
    SELECT position, bytes, task_id, at FROM events WHERE position <= %(upto)s
    ORDER BY position LIMIT %(limit)s
), waiting AS (
    SELECT min(position) AS position FROM oldest WHERE NOT %(all)s AND (at >= %(young)s OR
        (SELECT true FROM callbacks WHERE callbacks.task_id = oldest.task_id LIMIT 1)
        OR (SELECT true FROM tasks WHERE tasks.task_id = oldest.task_id AND callback_url IS NOT NULL
            AND EXISTS (SELECT 1 FROM places WHERE places.task_id = oldest.task_id AND state <> 'over')))
)
SELECT oldest.position, bytes FROM oldest, waiting
WHERE oldest.position < coalesce(waiting.position, 9223372036854775807) ORDER BY oldest.position"""


def prune(db: Database, retention: RetentionLimits, now: float, limit: int, young: float = math.inf) -> int:
    """Delete some of the oldest events that may go. Any node may call this; one at a time deletes. Events
    after `young`, in seconds since the epoch, are deleted only where `RetentionLimits.everything` is
    exceeded.
    """
    row = db.execute(SELECT_PRUNE_INPUTS.encode(), {"since": now - retention.silence_s}).fetchone()
    assert row is not None
    acknowledged, stored = row["acknowledged"], int(row["stored"])
    upto, enough = acknowledged, retention.acknowledged
    too_much = stored > retention.everything
    if too_much:
        upto, enough = 1 << 62, retention.everything
    elif stored <= retention.acknowledged:
        upto, enough = (
            min(acknowledged, _last_aged_event(db, retention, acknowledged, row["pruned"], now)),
            -1,
        )
    last, count = 0, 0
    for event in db.execute(
        SELECT_PRUNABLE, {"upto": upto, "all": too_much, "limit": limit, "young": young}
    ).fetchall():
        if stored <= enough:
            break
        stored -= event["bytes"]
        last, count = event["position"], count + 1
    if not count:
        return 0
    forgotten = db.execute("SELECT forget_events(%s, %s) AS done", (last, row["pruned"])).fetchone()
    return count if forgotten is not None and forgotten["done"] else 0


def _last_aged_event(
    db: Database, retention: RetentionLimits, acknowledged: int, pruned: int, now: float
) -> int:
    """The last event that all consumers had acknowledged `acknowledged_s` ago."""
    db.execute("DELETE FROM marks WHERE position > %s OR position <= %s", (acknowledged, pruned))
    if acknowledged > pruned:
        db.execute(
            "INSERT INTO marks SELECT %(position)s, %(now)s WHERE NOT EXISTS ("
            "SELECT 1 FROM marks WHERE position = %(position)s OR at > %(now)s - %(every)s)"
            " ON CONFLICT DO NOTHING",
            {"position": acknowledged, "now": now, "every": MARK_INTERVAL_S},
        )
    row = db.execute(
        "SELECT coalesce(max(position), 0) AS position FROM marks WHERE at <= %s",
        (now - retention.acknowledged_s,),
    ).fetchone()
    assert row is not None
    return int(row["position"])


# Looks only at bodies of two hours, because nodes look each hour and a body that has an event keeps it. The
# query uses now(), because an index is not searched by clock_timestamp().
DELETE_UNFINISHED: Final = """
DELETE FROM bodies WHERE (session_id, written_by) IN (
    SELECT session_id, written_by FROM bodies b
    WHERE part = 0 AND at < now() - make_interval(secs => %(after)s)
        AND at > now() - make_interval(secs => %(upto)s)
        AND NOT EXISTS (
            SELECT 1 FROM sessions s WHERE s.session_id = b.session_id AND s.written_by = b.written_by)
        AND NOT EXISTS (
            SELECT 1 FROM sessions s JOIN places p USING (task_id, place)
            WHERE s.session_id = b.session_id AND p.session_id = b.session_id AND p.state <> 'over'))"""
# Deletes nodes that are gone, and their rows in `weight_holders`.
DELETE_GONE_NODES: Final = """
WITH gone AS (
    DELETE FROM nodes WHERE state <> 'alive' AND signed < now() - interval '1 day'
        AND NOT EXISTS (
            SELECT 1 FROM places WHERE places.incarnation = nodes.incarnation AND places.state = 'running')
    RETURNING incarnation
)
DELETE FROM weight_holders USING gone WHERE weight_holders.incarnation = gone.incarnation"""

# forget_events deletes an evaluation with the last of its events. An evaluation has none whose sessions were
# all refused, or became so after their events were deleted. It is kept for a week, because the client that
# asked for it looks at it, or sends it again, in hours.
DELETE_REFUSED: Final = """
DELETE FROM evaluations e WHERE submitted < extract(epoch FROM now() - interval '7 days')
    AND NOT EXISTS (SELECT 1 FROM evaluated WHERE evaluated.evaluation_id = e.evaluation_id
        AND (position > (SELECT pruned FROM log) OR (n IS NULL AND error IS NULL)))"""

# Versions that are kept of a model's base, and of all its adapters together: more than are read for the
# staleness of tokens.
VERSIONS_KEPT: Final = 10_000
# Never deletes the current version, nor the last one of an adapter: nodes that start ask for them.
DELETE_OLD_VERSIONS: Final = """
DELETE FROM weights WHERE number IN (
    SELECT number FROM (
        SELECT number, current,
            row_number() OVER (PARTITION BY model, adapter <> '' ORDER BY number DESC) AS nth,
            row_number() OVER (PARTITION BY model, adapter ORDER BY number DESC) AS nth_of_name
        FROM weights) w
    WHERE nth > %s AND nth_of_name > 1 AND NOT current)"""


def sweep_leftovers(db: Database) -> None:
    """Delete bodies that nobody finished, incarnations that are gone and to which nothing refers, evaluations
    without events, and versions of weights that were replaced long ago.
    """
    values = {"after": UNFINISHED_BODY_S, "upto": SWEEP_WINDOW_S}
    db.execute(DELETE_UNFINISHED, values)
    db.execute(DELETE_GONE_NODES)
    db.execute(DELETE_REFUSED)
    db.execute(DELETE_OLD_VERSIONS, (VERSIONS_KEPT,))
