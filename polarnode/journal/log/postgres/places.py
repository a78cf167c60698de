"""Tasks and their places: submit, claim, finish, put back, cancel.

Each function is one statement, or a few of which each may be repeated. Changes that must happen together are
one function of the database (`migrations/0002_functions.sql`), so a process that is stopped between two
statements holds no lock.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final, cast

from attrs import evolve
from psycopg import errors
from psycopg.types.json import Jsonb

from polarnode.core.codec.json import dump_json, plain, read_json, structure
from polarnode.core.codec.tasks import task_json
from polarnode.core.errors import Conflict, JournalError
from polarnode.core.task import CAPTURE_HARNESS, TaskSpec
from polarnode.core.trajectory import Outcome
from polarnode.groups.group import SessionFacts, make_member
from polarnode.journal.log.endings import ending_bodies
from polarnode.journal.log.port import (
    Claim,
    ClaimOffer,
    EndedSession,
    EndingCause,
    FinishAnswer,
    fork_parent_id,
)
from polarnode.journal.log.postgres.connection import Database
from polarnode.journal.log.rules import check_names, ending_cause
from polarnode.merge.trajectory import Identity

logger = logging.getLogger(__name__)

MAX_BODY_TRIES: Final = 3  # attempts to write a body: another packing of it may be there once, and not again
# About so many bytes of a body are written in one statement, so that a sign of life waits for the disk no
# longer.
MAX_STATEMENT_BYTES: Final = 4 << 20

# ── submit ────────────────────────────────────────────────────────────────────

INSERT_TASK: Final = """
WITH task AS (
    INSERT INTO tasks (task_id, group_id, idempotency_key, submitted, spec, priority, requires, image,
        adapter, by_caller, max_retries, early_stop_min, callback_url, callback_kinds)
    VALUES (%(task)s, %(group)s, %(key)s, %(submitted)s, %(spec)s, %(priority)s, %(requires)s, %(image)s,
        %(adapter)s, %(by_caller)s, %(retries)s, %(early_stop_min)s, %(url)s, %(kinds)s)
    RETURNING task_id, priority, number
), samples AS (
    SELECT task_id, priority, number, session_id, (nth - 1)::integer AS place
    FROM task, unnest(%(sessions)s::text[]) WITH ORDINALITY AS given (session_id, nth)
), began AS (
    INSERT INTO sessions (session_id, task_id, place) SELECT session_id, task_id, place FROM samples
), queued AS (
    INSERT INTO places (task_id, place, priority, number, session_id)
    SELECT task_id, place, priority, number, session_id FROM samples
)
SELECT pg_notify('polarnode', 'places')"""


def submit(
    db: Database,
    spec: TaskSpec,
    *,
    task_id: str,
    session_ids: tuple[str, ...],
    idempotency_key: str | None,
    callback_kinds: tuple[str, ...],
    submitted: float,
    model: str = "",
) -> str:
    """Write a task and return its id. Where a task with this key exists, its id is returned instead."""
    check_names(spec, task_id, session_ids, idempotency_key)
    values = {
        "task": task_id,
        "group": spec.group_id or task_id,
        "key": idempotency_key,
        "submitted": submitted,
        "spec": dump_json(task_json(spec)),
        "priority": spec.priority,
        "requires": Jsonb({**({"model": model} if model else {}), **spec.requires}),
        "image": spec.runtime.image,
        "adapter": spec.adapter,
        "by_caller": spec.harness.name == CAPTURE_HARNESS,
        "retries": spec.budgets.retries,
        "early_stop_min": spec.group.early_stop_min,
        "url": spec.callback_url,
        "kinds": list(callback_kinds),
        "sessions": list(session_ids),
    }
    try:
        db.execute(INSERT_TASK, values)
        return task_id
    except errors.UniqueViolation:
        row = db.execute(
            "SELECT task_id, idempotency_key, spec FROM tasks"
            " WHERE idempotency_key = %(key)s OR task_id = %(task)s"
            " ORDER BY idempotency_key = %(key)s DESC NULLS LAST LIMIT 1",
            values,
        ).fetchone()
        same_key = (
            row is not None and idempotency_key is not None and row["idempotency_key"] == idempotency_key
        )
        # Without a key, a repetition after a lost answer is recognised by the whole spec.
        same_task = row is not None and row["task_id"] == task_id and bytes(row["spec"]) == values["spec"]
        if row is not None and (same_key or same_task):
            return str(row["task_id"])
        raise Conflict(f"task {task_id} exists with another spec: choose another task_id") from None


# ── claim ─────────────────────────────────────────────────────────────────────

# {chosen} are the places that are taken, and %(incarnation)s takes them.
TAKE_PLACES: Final = """
WITH chosen AS ({chosen}), taken AS (
    UPDATE places SET state = 'running', incarnation = %(incarnation)s, attempt = places.attempt + 1,
        session_id = CASE WHEN places.attempt < 0 THEN places.session_id ELSE new_session_id() END
    FROM chosen WHERE places.task_id = chosen.task_id AND places.place = chosen.place
    RETURNING places.*, chosen.session_id AS before
), began AS (
    INSERT INTO sessions (session_id, task_id, place, attempt, incarnation)
    SELECT session_id, task_id, place, attempt, incarnation FROM taken
    ON CONFLICT (session_id) DO UPDATE SET incarnation = EXCLUDED.incarnation, attempt = EXCLUDED.attempt
), replaced AS (
    UPDATE sessions SET retried_as = taken.session_id FROM taken
    WHERE sessions.session_id = taken.before AND taken.before <> taken.session_id
)
SELECT taken.*, spec, submitted, idempotency_key, cancelled, enough
FROM taken JOIN tasks USING (task_id) ORDER BY taken.priority DESC, taken.number, place"""

# The candidates are places of tasks that run here, and the first %(window)s of the queue in its order, for
# which an index gives no more rows than are asked for. Looking through a queue of 100,000 places took two
# seconds, and a join in place of the query in brackets would let the planner do that. Rows that another claim
# has locked are skipped, so that nodes never wait for each other. A node that was declared lost claims
# nothing, because its places would be put back at once.
SELECT_QUEUED: Final = """
WITH mine AS (
    SELECT DISTINCT task_id FROM places WHERE state = 'running' AND incarnation = %(incarnation)s
), first AS (
    SELECT p.task_id, p.place FROM places p
    WHERE NOT %(begun_only)s AND p.state = 'queued' AND NOT p.spent
        AND (SELECT {fits} FROM tasks t WHERE t.task_id = p.task_id) AND {current}
    ORDER BY p.priority DESC, p.number, p.place LIMIT %(window)s
), candidates AS (
    SELECT task_id, place FROM first
    UNION SELECT task_id, place FROM mine JOIN places USING (task_id) WHERE state = 'queued' AND NOT spent
)
SELECT p.task_id, p.place, p.session_id
FROM candidates JOIN places p USING (task_id, place) JOIN tasks t USING (task_id)
WHERE p.state = 'queued' AND NOT p.spent AND {fits}
    AND EXISTS (SELECT 1 FROM nodes WHERE incarnation = %(incarnation)s AND state = 'alive')
ORDER BY p.priority DESC, (p.task_id IN (SELECT task_id FROM mine)) DESC, t.image = ANY (%(images)s) DESC,
    p.number, p.place
LIMIT %(room)s FOR UPDATE OF p SKIP LOCKED"""

TASK_FITS: Final = """t.cancelled IS NULL AND NOT t.enough AND NOT t.by_caller AND t.requires <@ %(labels)s
    AND NOT EXISTS (SELECT 1 FROM weights w WHERE w.current AND w.model = %(model)s
        AND w.adapter IN ('', t.adapter) AND w.version IS DISTINCT FROM %(serving)s ->> w.adapter)
    AND NOT p.task_id || '/' || p.place = ANY (%(avoided)s)"""
# Whether the node serves the current version of the base, whatever the task. It is asked once, so that a
# stale node looks through no queue.
SERVES_CURRENT: Final = """NOT EXISTS (SELECT 1 FROM weights w WHERE w.current AND w.model = %(model)s
        AND w.adapter = '' AND w.version IS DISTINCT FROM %(serving)s ->> w.adapter)"""

# Looks only at tasks which are to end and have not ended, and at the places of each of them (OFFSET 0), so
# that neither table is read whole.
SELECT_TO_END: Final = """
WITH candidates AS (
    SELECT task_id, place FROM places WHERE state = 'queued' AND spent
    UNION SELECT task_id, place FROM tasks, LATERAL (
            SELECT place FROM places WHERE places.task_id = tasks.task_id AND state = 'queued' OFFSET 0) q
        WHERE (cancelled IS NOT NULL OR enough) AND NOT finished
    LIMIT 4 * %(room)s
)
SELECT p.task_id, p.place, p.session_id
FROM candidates JOIN places p USING (task_id, place) JOIN tasks t USING (task_id)
WHERE p.state = 'queued' AND (p.spent OR t.cancelled IS NOT NULL OR t.enough)
    AND EXISTS (SELECT 1 FROM nodes WHERE incarnation = %(incarnation)s AND state = 'alive')
ORDER BY p.number, p.place LIMIT %(room)s FOR UPDATE OF p SKIP LOCKED"""

# The number of places of the queue that a claim looks at: as many as 64 nodes take at once. Among them,
# images that are here are preferred.
CLAIM_WINDOW: Final = 512

SELECT_NAMED: Final = """
SELECT task_id, place, session_id FROM places
WHERE task_id = %(task)s AND place = %(place)s AND state = 'queued'
    AND EXISTS (SELECT 1 FROM nodes WHERE incarnation = %(incarnation)s AND state = 'alive')
FOR UPDATE"""

CLAIM_QUEUED: Final = TAKE_PLACES.format(chosen=SELECT_QUEUED.format(fits=TASK_FITS, current=SERVES_CURRENT))
CLAIM_ENDINGS: Final = TAKE_PLACES.format(chosen=SELECT_TO_END)
TAKE_NAMED: Final = TAKE_PLACES.format(chosen=SELECT_NAMED)

SELECT_HELD: Final = """
SELECT places.*, spec, submitted, idempotency_key, cancelled, enough FROM places JOIN tasks USING (task_id)
WHERE state = 'running' AND incarnation = %s ORDER BY places.number, place"""


def claim(db: Database, offer: ClaimOffer) -> tuple[Claim, ...]:
    values = {
        "incarnation": offer.incarnation,
        "room": offer.room,
        "begun_only": offer.begun_only,
        "window": CLAIM_WINDOW + offer.room,
        "labels": Jsonb(dict(offer.labels)),
        "model": offer.labels.get("model", ""),
        "images": list(offer.images),
        "avoided": [f"{task_id}/{place}" for task_id, place in offer.avoided],
        "serving": Jsonb(dict(offer.serving)),
    }
    return () if offer.room < 1 else tuple(map(read_claim, db.execute(CLAIM_QUEUED, values).fetchall()))


def claim_endings(db: Database, incarnation: int, limit: int) -> tuple[Claim, ...]:
    values = {"incarnation": incarnation, "room": limit}
    return tuple(map(read_claim, db.execute(CLAIM_ENDINGS, values).fetchall()))


def take_place(db: Database, task_id: str, sample_index: int, incarnation: int) -> Claim | None:
    values = {"task": task_id, "place": sample_index, "incarnation": incarnation}
    return next(map(read_claim, db.execute(TAKE_NAMED, values).fetchall()), None)


# Uses the index of each sort of place. Places that are over, which are most, are not read.
COUNT_OPEN: Final = """
SELECT count(*) AS count FROM (
    (SELECT 1 FROM places WHERE state = 'running' LIMIT %(limit)s)
    UNION ALL (SELECT 1 FROM places WHERE state = 'queued' AND spent LIMIT %(limit)s)
    UNION ALL (SELECT 1 FROM places WHERE state = 'queued' AND NOT spent LIMIT %(limit)s)
    LIMIT %(limit)s
) AS open"""


def count_open(db: Database, limit: int) -> int:
    """Count the places that are not over, up to `limit`."""
    row = db.execute(COUNT_OPEN, {"limit": limit}).fetchone()
    return 0 if row is None else int(row["count"])


def claims(db: Database, incarnation: int) -> tuple[Claim, ...]:
    return tuple(map(read_claim, db.execute(SELECT_HELD, (incarnation,)).fetchall()))


def read_claim(row: Mapping[str, Any]) -> Claim:
    return Claim(
        task_id=row["task_id"],
        sample_index=row["place"],
        session_id=row["session_id"],
        attempt=row["attempt"],
        incarnation=row["incarnation"],
        retries=row["retries"],
        spec=structure(read_json(bytes(row["spec"])), TaskSpec),
        submitted=row["submitted"],
        idempotency_key=row["idempotency_key"],
        ending=_ending_cause(row),
    )


def _ending_cause(row: Mapping[str, Any]) -> EndingCause | None:
    return ending_cause(
        cancelled=row["cancelled"] is not None, enough=bool(row["enough"]), spent=bool(row["spent"])
    )


def record_session(db: Database, identity: Identity, incarnation: int | None) -> None:
    db.execute(
        "INSERT INTO sessions (session_id, task_id, place, attempt, incarnation, identity, forked_from)"
        " VALUES (%(session)s, %(task)s, %(place)s, %(attempt)s, %(incarnation)s, %(identity)s, %(parent)s)"
        " ON CONFLICT (session_id) DO UPDATE SET identity = EXCLUDED.identity,"
        " forked_from = EXCLUDED.forked_from"
        " WHERE sessions.outcome IS NULL",
        {
            "session": identity.session_id,
            "task": identity.task_id,
            "place": identity.sample_index,
            "attempt": identity.attempt,
            "incarnation": incarnation,
            "identity": dump_json(plain(identity)),
            "parent": fork_parent_id(identity.forked_from),
        },
    )


# ── the end of a session ──────────────────────────────────────────────────────


def put_body(db: Database, ended: EndedSession, incarnation: int) -> None:
    """Write the parts of a body that are not there yet, some megabytes in each statement."""
    session_id = ended.identity.session_id
    have = {
        row["part"]
        for row in db.execute(
            "SELECT part FROM bodies WHERE session_id = %s AND written_by = %s", (session_id, incarnation)
        )
    }
    batch: list[tuple[int, bytes]] = []
    size = 0
    for part in enumerate(ended.parts):
        if part[0] in have:
            continue
        batch.append(part)
        size += len(part[1])
        if size >= MAX_STATEMENT_BYTES:
            _put_parts(db, session_id, incarnation, batch)
            batch, size = [], 0
    _put_parts(db, session_id, incarnation, batch)


def _put_parts(db: Database, session_id: str, incarnation: int, batch: list[tuple[int, bytes]]) -> None:
    if batch:
        db.execute(
            "INSERT INTO bodies (session_id, written_by, part, data)"
            " SELECT %s, %s, part, data FROM unnest(%b::integer[], %b::bytea[]) AS given (part, data)"
            " ON CONFLICT DO NOTHING",
            (session_id, incarnation, [number for number, _ in batch], [data for _, data in batch]),
        )


def drop_body(db: Database, session_id: str, incarnation: int) -> None:
    """Delete the parts of a body that no event has. They are of another packing of the same session."""
    db.execute(
        "DELETE FROM bodies WHERE session_id = %(session)s AND written_by = %(writer)s AND NOT EXISTS ("
        "SELECT 1 FROM sessions WHERE session_id = %(session)s AND written_by = %(writer)s)",
        {"session": session_id, "writer": incarnation},
    )


FINISH_PLACE: Final = """SELECT finish_place(%(task)s, %(place)s, %(session)s, %(attempt)s, %(incarnation)s,
    %(outcome)b, %(status)s, %(reward)s::double precision, %(trainable)s, %(staleness)s::integer, %(turns)s,
    %(sampled)s::bigint, %(identity)b, %(parent)s::text, %(at)s, %(usable)s, %(parts)s, %(bytes)s::bigint,
    %(group_event)b::bytea, %(task_event)b::bytea) AS answer"""

PUBLISH_SESSION: Final = """SELECT publish_session(%(kind)s, %(task)s, %(group)s, %(place)s, %(attempt)s,
    %(session)s, %(incarnation)s, %(outcome)b, %(status)s, %(reward)s::double precision, %(trainable)s,
    %(staleness)s::integer, %(turns)s, %(sampled)s::bigint, %(identity)b, %(parent)s::text, %(at)s, %(parts)s,
    %(bytes)s::bigint) AS answer"""


def finish_claim(db: Database, claimed: Claim, ended: EndedSession) -> FinishAnswer:
    """Fill a place. The body is written first, and then one short statement finishes the place."""
    spec = claimed.spec
    values = _session_values(ended, claimed.incarnation)
    values |= {"usable": make_member(spec.group, ended.facts).usable, "group_event": None, "task_event": None}
    put_body(db, ended, claimed.incarnation)
    bodies = 1
    while True:
        answer = _call_function(db, FINISH_PLACE, values)
        if answer == "again":
            # This is the task's last place. The others no longer change, so the next call can bring the
            # events.
            values |= _ending_events(db, claimed, ended)
        elif answer == "body":
            bodies = _put_body_again(db, ended, claimed.incarnation, bodies)
        else:
            return cast(FinishAnswer, answer)


def publish_session(
    db: Database, ended: EndedSession, incarnation: int, *, kind: str | None = None
) -> FinishAnswer:
    put_body(db, ended, incarnation)
    # A session that has a task and fills no place is an attempt. A capture without a task is a trajectory.
    task = db.execute("SELECT 1 FROM tasks WHERE task_id = %s", (ended.identity.task_id,)).fetchone()
    values = _session_values(ended, incarnation) | {
        "kind": kind or ("trajectory" if task is None else "attempt")
    }
    bodies = 1
    while (answer := _call_function(db, PUBLISH_SESSION, values)) == "body":
        bodies = _put_body_again(db, ended, incarnation, bodies)
    return cast(FinishAnswer, answer)


def _put_body_again(db: Database, ended: EndedSession, incarnation: int, before: int) -> int:
    """Write a body again after parts of another packing were found. Returns how often it was written now."""
    session_id = ended.identity.session_id
    if before == MAX_BODY_TRIES:
        raise JournalError(f"the body of session {session_id} is not whole in the log after it was written")
    logger.warning("the body of session %s is written again", session_id)
    drop_body(db, session_id, incarnation)
    put_body(db, ended, incarnation)
    return before + 1


def _call_function(db: Database, statement: str, values: Mapping[str, Any]) -> str:
    row = db.execute(statement, values).fetchone()
    assert row is not None
    return str(row["answer"])


def _session_values(ended: EndedSession, incarnation: int) -> dict[str, Any]:
    identity = ended.identity
    return {
        "task": identity.task_id,
        "group": identity.group_id,
        "place": identity.sample_index,
        "session": identity.session_id,
        "attempt": identity.attempt,
        "incarnation": incarnation,
        "outcome": dump_json(plain(ended.outcome)),
        "status": ended.outcome.status,
        "reward": ended.reward,
        "trainable": ended.trainable,
        "staleness": ended.staleness,
        "turns": ended.turns,
        "sampled": ended.sampled,
        "identity": dump_json(plain(identity)),
        "parent": fork_parent_id(identity.forked_from),
        "at": ended.finished,
        "parts": len(ended.parts),
        "bytes": ended.size,
    }


def _ending_events(db: Database, claimed: Claim, ended: EndedSession) -> dict[str, bytes]:
    others = [
        (facts, finished)
        for facts, finished in read_facts(db, claimed.task_id)
        if facts.sample_index != claimed.sample_index
    ]
    bodies = ending_bodies(
        claimed.spec,
        (*(facts for facts, _ in others), ended.facts),
        task_id=claimed.task_id,
        submitted=claimed.submitted,
        finished=max([ended.finished, *(finished for _, finished in others)]),
    )
    return {"group_event": dump_json(bodies["group"]), "task_event": dump_json(bodies["task"])}


def read_facts(db: Database, task_id: str) -> list[tuple[SessionFacts, float]]:
    """The facts by which a group is judged, of the task's places that are over, and when each ended."""
    rows = db.execute(
        "SELECT sessions.* FROM places JOIN sessions USING (session_id)"
        " WHERE places.task_id = %s AND state = 'over' ORDER BY places.place",
        (task_id,),
    )
    return [
        (
            SessionFacts(
                session_id=row["session_id"],
                sample_index=row["place"],
                outcome=evolve(read_outcome(row["outcome"]), log_tail=None),
                reward=row["reward"],
                trainable_tokens=row["trainable"],
                staleness=row["staleness"],
            ),
            row["finished"],
        )
        for row in rows
    ]


def read_outcome(body: bytes) -> Outcome:
    return structure(read_json(bytes(body)), Outcome)


# ── places that are given back ────────────────────────────────────────────────

PUT_BACK: Final = """SELECT put_back_place(%(task)s, %(place)s, %(session)s, %(incarnation)s, %(counts)s,
    %(keep)s) AS session_id"""


def put_back(
    db: Database, claimed: Claim, ended: EndedSession | None, *, counts: bool, keep: bool
) -> Claim | None:
    """Give a place back. The lost session is published first: if the node is killed in between, it becomes
    silent and others put its place back.
    """
    if ended is not None:
        publish_session(db, ended, claimed.incarnation, kind="attempt")
    values = {
        "task": claimed.task_id,
        "place": claimed.sample_index,
        "session": claimed.session_id,
        "incarnation": claimed.incarnation,
        "counts": counts,
        "keep": keep,
    }
    row = db.execute(PUT_BACK, values).fetchone()
    if row is None or not row["session_id"]:
        return None
    return evolve(
        claimed,
        session_id=row["session_id"],
        attempt=claimed.attempt + 1,
        retries=claimed.retries + counts,
        ending=None,
    )


# Puts back the places of incarnations that are not alive. Any watcher may run this, and two at once share the
# rows.
PUT_BACK_LOST: Final = """
WITH held AS (
    SELECT p.task_id, p.place, t.max_retries
    FROM places p JOIN tasks t USING (task_id) JOIN nodes n USING (incarnation)
    WHERE p.state = 'running' AND n.state <> 'alive'
    FOR UPDATE OF p SKIP LOCKED
), queued AS (
    UPDATE places SET state = 'queued', incarnation = NULL, spent = spent OR retries >= held.max_retries,
        retries = retries + 1
    FROM held WHERE places.task_id = held.task_id AND places.place = held.place
    RETURNING 1
)
SELECT count(*) AS count,
    CASE WHEN count(*) > 0 THEN pg_notify('polarnode', 'places') END AS told FROM queued"""


def put_back_lost(db: Database) -> int:
    row = db.execute(PUT_BACK_LOST).fetchone()
    return 0 if row is None else int(row["count"])


# ── cancels and early stops ───────────────────────────────────────────────────

CANCEL_TASK: Final = """
WITH cancelled AS (
    UPDATE tasks SET cancelled = %(at)s WHERE task_id = %(task)s AND cancelled IS NULL RETURNING task_id
)
SELECT pg_notify('polarnode', 'orders') FROM cancelled"""

SELECT_OPEN_PLACE: Final = "SELECT 1 FROM places WHERE task_id = %s AND state <> 'over' LIMIT 1"

SELECT_TO_STOP: Final = """
SELECT session_id, spent, cancelled, enough FROM places JOIN tasks USING (task_id)
WHERE state = 'running' AND incarnation = %s AND (cancelled IS NOT NULL OR enough)"""


def cancel(db: Database, task_id: str, at: float) -> bool:
    if db.execute(SELECT_OPEN_PLACE, (task_id,)).fetchone() is None:
        return False
    db.execute(CANCEL_TASK, {"task": task_id, "at": at})
    return True


def sessions_to_stop(db: Database, incarnation: int) -> dict[str, EndingCause]:
    found = {row["session_id"]: _ending_cause(row) for row in db.execute(SELECT_TO_STOP, (incarnation,))}
    return {session_id: cause for session_id, cause in found.items() if cause is not None}
