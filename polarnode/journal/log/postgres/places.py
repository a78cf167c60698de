"""Tasks and their places: submit, claim, finish, put back, cancel.

Each function is one statement of the connection, or a few of which each may be made again. What must be
whole is a function of the database (`migrations/0002_functions.sql`): a process that is stopped between two
statements then holds nothing.
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
from polarnode.core.task import CAPTURE, TaskSpec
from polarnode.core.trajectory import Outcome
from polarnode.groups.group import Facts, member_of
from polarnode.journal.log.endings import task_ending
from polarnode.journal.log.port import (
    Claim,
    Ended,
    EndingCause,
    FinishAnswer,
    Offer,
    fork_parent_id,
)
from polarnode.journal.log.postgres.connection import Database
from polarnode.journal.log.rules import check_names, ending_cause
from polarnode.merge.trajectory import Identity

logger = logging.getLogger(__name__)

BODY_TRIES: Final = 3  # of writing a body: another packing of it may be there once, and not again
PART_BYTES: Final = 4 << 20  # of a body in one statement: a sign of life on the same disk waits no longer

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
    """Write a task. Gives its id: that of the task of this key, where there is one."""
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
        "by_caller": spec.harness.name == CAPTURE,
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
        # without a key, who sends the same again after a lost answer is told by the whole of what it sent
        same_task = row is not None and row["task_id"] == task_id and bytes(row["spec"]) == values["spec"]
        if row is not None and (same_key or same_task):
            return str(row["task_id"])
        raise Conflict(f"task {task_id} exists with another spec: choose another task_id") from None


# ── claim ─────────────────────────────────────────────────────────────────────

# {chosen} are the places that are taken; %(incarnation)s takes them.
TAKE: Final = """
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

# What may be chosen: places of tasks that run here, and the first %(window)s of the queue, in its order, of
# which an index gives no more rows than are asked for. To look through a queue of 100,000 places took two
# seconds, and a join in place of the query in brackets lets the planner do so. Rows that are locked by
# another claim are passed over, so that nodes never wait for each other. A node that was declared lost claims
# nothing: what it would take would be put back at once.
QUEUED: Final = """
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

FITS: Final = """t.cancelled IS NULL AND NOT t.enough AND NOT t.by_caller AND t.requires <@ %(labels)s
    AND NOT EXISTS (SELECT 1 FROM weights w WHERE w.current AND w.model = %(model)s
        AND w.adapter IN ('', t.adapter) AND w.version IS DISTINCT FROM %(serving)s ->> w.adapter)
    AND NOT p.task_id || '/' || p.place = ANY (%(avoided)s)"""
# of the base, whatever the task: asked once, so that a stale node looks through no queue
CURRENT: Final = """NOT EXISTS (SELECT 1 FROM weights w WHERE w.current AND w.model = %(model)s
        AND w.adapter = '' AND w.version IS DISTINCT FROM %(serving)s ->> w.adapter)"""

# Of the tasks that are to end only those are looked at that have not ended, and of each (OFFSET 0) its own
# places: neither table is read.
TO_END: Final = """
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

# Places of the queue that a claim looks at: as many as 64 nodes take at once, and an image is preferred
# among them
WINDOW: Final = 512

NAMED: Final = """
SELECT task_id, place, session_id FROM places
WHERE task_id = %(task)s AND place = %(place)s AND state = 'queued'
    AND EXISTS (SELECT 1 FROM nodes WHERE incarnation = %(incarnation)s AND state = 'alive')
FOR UPDATE"""

CLAIM: Final = TAKE.format(chosen=QUEUED.format(fits=FITS, current=CURRENT))
CLAIM_ENDINGS: Final = TAKE.format(chosen=TO_END)
TAKE_NAMED: Final = TAKE.format(chosen=NAMED)

HELD: Final = """
SELECT places.*, spec, submitted, idempotency_key, cancelled, enough FROM places JOIN tasks USING (task_id)
WHERE state = 'running' AND incarnation = %s ORDER BY places.number, place"""


def claim(db: Database, offer: Offer) -> tuple[Claim, ...]:
    values = {
        "incarnation": offer.incarnation,
        "room": offer.room,
        "begun_only": offer.begun_only,
        "window": WINDOW + offer.room,
        "labels": Jsonb(dict(offer.labels)),
        "model": offer.labels.get("model", ""),
        "images": list(offer.images),
        "avoided": [f"{task_id}/{place}" for task_id, place in offer.avoided],
        "serving": Jsonb(dict(offer.serving)),
    }
    return () if offer.room < 1 else tuple(map(read_claim, db.execute(CLAIM, values).fetchall()))


def claim_endings(db: Database, incarnation: int, limit: int) -> tuple[Claim, ...]:
    values = {"incarnation": incarnation, "room": limit}
    return tuple(map(read_claim, db.execute(CLAIM_ENDINGS, values).fetchall()))


def take_place(db: Database, task_id: str, sample_index: int, incarnation: int) -> Claim | None:
    values = {"task": task_id, "place": sample_index, "incarnation": incarnation}
    return next(map(read_claim, db.execute(TAKE_NAMED, values).fetchall()), None)


# by the index of each sort of place: those that are over, which are most, are not read
COUNT_OPEN: Final = """
SELECT count(*) AS count FROM (
    (SELECT 1 FROM places WHERE state = 'running' LIMIT %(limit)s)
    UNION ALL (SELECT 1 FROM places WHERE state = 'queued' AND spent LIMIT %(limit)s)
    UNION ALL (SELECT 1 FROM places WHERE state = 'queued' AND NOT spent LIMIT %(limit)s)
    LIMIT %(limit)s
) AS open"""


def count_open(db: Database, limit: int) -> int:
    """The places that are not over, at most so many."""
    row = db.execute(COUNT_OPEN, {"limit": limit}).fetchone()
    return 0 if row is None else int(row["count"])


def claims(db: Database, incarnation: int) -> tuple[Claim, ...]:
    return tuple(map(read_claim, db.execute(HELD, (incarnation,)).fetchall()))


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
        ending=_ending(row),
    )


def _ending(row: Mapping[str, Any]) -> EndingCause | None:
    return ending_cause(
        cancelled=row["cancelled"] is not None, enough=bool(row["enough"]), spent=bool(row["spent"])
    )


def session_started(db: Database, identity: Identity, incarnation: int | None) -> None:
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


def put_body(db: Database, ended: Ended, incarnation: int) -> None:
    """Write the parts of a body that are not there, some megabytes in each statement."""
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
        if size >= PART_BYTES:
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
    """Delete what is there of a body that no event has: parts of another packing of the same session."""
    db.execute(
        "DELETE FROM bodies WHERE session_id = %(session)s AND written_by = %(writer)s AND NOT EXISTS ("
        "SELECT 1 FROM sessions WHERE session_id = %(session)s AND written_by = %(writer)s)",
        {"session": session_id, "writer": incarnation},
    )


FINISH: Final = """SELECT finish_place(%(task)s, %(place)s, %(session)s, %(attempt)s, %(incarnation)s,
    %(outcome)b, %(status)s, %(reward)s::double precision, %(trainable)s, %(staleness)s::integer, %(turns)s,
    %(sampled)s::bigint, %(identity)b, %(parent)s::text, %(at)s, %(usable)s, %(parts)s, %(bytes)s::bigint,
    %(group_event)b::bytea, %(task_event)b::bytea) AS answer"""

PUBLISH: Final = """SELECT publish_session(%(kind)s, %(task)s, %(group)s, %(place)s, %(attempt)s, %(session)s,
    %(incarnation)s, %(outcome)b, %(status)s, %(reward)s::double precision, %(trainable)s,
    %(staleness)s::integer, %(turns)s, %(sampled)s::bigint, %(identity)b, %(parent)s::text, %(at)s, %(parts)s,
    %(bytes)s::bigint) AS answer"""


def finish(db: Database, claimed: Claim, ended: Ended) -> FinishAnswer:
    """Fill a place: the body first, then one short statement."""
    spec = claimed.spec
    values = _values(ended, claimed.incarnation)
    values |= {"usable": member_of(spec.group, ended.facts).usable, "group_event": None, "task_event": None}
    put_body(db, ended, claimed.incarnation)
    bodies = 1
    while True:
        answer = _answer(db, FINISH, values)
        if answer == "again":
            # the last place: the others stand, so the events can be made before the next call
            values |= _last_events(db, claimed, ended)
        elif answer == "body":
            bodies = _put_body_again(db, ended, claimed.incarnation, bodies)
        else:
            return cast(FinishAnswer, answer)


def publish(db: Database, ended: Ended, incarnation: int, *, kind: str | None = None) -> FinishAnswer:
    put_body(db, ended, incarnation)
    # a session of a task that fills no place is an attempt; a capture's trajectory is a trajectory
    task = db.execute("SELECT 1 FROM tasks WHERE task_id = %s", (ended.identity.task_id,)).fetchone()
    values = _values(ended, incarnation) | {"kind": kind or ("trajectory" if task is None else "attempt")}
    bodies = 1
    while (answer := _answer(db, PUBLISH, values)) == "body":
        bodies = _put_body_again(db, ended, incarnation, bodies)
    return cast(FinishAnswer, answer)


def _put_body_again(db: Database, ended: Ended, incarnation: int, before: int) -> int:
    """Write a body anew of which other parts were there; how often it was written now."""
    session_id = ended.identity.session_id
    if before == BODY_TRIES:
        raise JournalError(f"the body of session {session_id} is not whole in the log after it was written")
    logger.warning("the body of session %s is written again", session_id)
    drop_body(db, session_id, incarnation)
    put_body(db, ended, incarnation)
    return before + 1


def _answer(db: Database, statement: str, values: Mapping[str, Any]) -> str:
    row = db.execute(statement, values).fetchone()
    assert row is not None
    return str(row["answer"])


def _values(ended: Ended, incarnation: int) -> dict[str, Any]:
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


def _last_events(db: Database, claimed: Claim, ended: Ended) -> dict[str, bytes]:
    others = [
        (facts, finished)
        for facts, finished in read_facts(db, claimed.task_id)
        if facts.sample_index != claimed.sample_index
    ]
    bodies = task_ending(
        claimed.spec,
        (*(facts for facts, _ in others), ended.facts),
        task_id=claimed.task_id,
        submitted=claimed.submitted,
        finished=max([ended.finished, *(finished for _, finished in others)]),
    )
    return {"group_event": dump_json(bodies["group"]), "task_event": dump_json(bodies["task"])}


def read_facts(db: Database, task_id: str) -> list[tuple[Facts, float]]:
    """What a group is judged by, of the task's places that are over, and when each ended."""
    rows = db.execute(
        "SELECT sessions.* FROM places JOIN sessions USING (session_id)"
        " WHERE places.task_id = %s AND state = 'over' ORDER BY places.place",
        (task_id,),
    )
    return [
        (
            Facts(
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


def put_back(db: Database, claimed: Claim, ended: Ended | None, *, counts: bool, keep: bool) -> Claim | None:
    """Give a place back. What was lost is published first: killed in between, the node is silent, and its
    place is put back by others.
    """
    if ended is not None:
        publish(db, ended, claimed.incarnation, kind="attempt")
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


# Whoever watches puts back what is held by incarnations that are not alive; two watchers at once share the
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

CANCEL: Final = """
WITH cancelled AS (
    UPDATE tasks SET cancelled = %(at)s WHERE task_id = %(task)s AND cancelled IS NULL RETURNING task_id
)
SELECT pg_notify('polarnode', 'orders') FROM cancelled"""

OPEN: Final = "SELECT 1 FROM places WHERE task_id = %s AND state <> 'over' LIMIT 1"

TO_STOP: Final = """
SELECT session_id, spent, cancelled, enough FROM places JOIN tasks USING (task_id)
WHERE state = 'running' AND incarnation = %s AND (cancelled IS NOT NULL OR enough)"""


def cancel(db: Database, task_id: str, at: float) -> bool:
    if db.execute(OPEN, (task_id,)).fetchone() is None:
        return False
    db.execute(CANCEL, {"task": task_id, "at": at})
    return True


def to_stop(db: Database, incarnation: int) -> dict[str, EndingCause]:
    found = {row["session_id"]: _ending(row) for row in db.execute(TO_STOP, (incarnation,))}
    return {session_id: cause for session_id, cause in found.items() if cause is not None}
