"""Evaluations: scores that are given to finished sessions, each as a `reward` event."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from polarnode.core.codec.json import dump_json, plain, read_json, structure
from polarnode.core.conversation import Json
from polarnode.core.status import EvaluatedSession, EvaluationStatus, RewardEvent
from polarnode.core.task import EvaluationSpec
from polarnode.journal.log.postgres.connection import Database


def placed_sessions(db: Database, task_id: str | None, group_id: str | None) -> tuple[str, ...]:
    rows = db.execute(
        "SELECT session_id FROM places JOIN tasks USING (task_id)"
        " WHERE CASE WHEN %(task)s::text IS NULL THEN group_id = %(group)s::text ELSE task_id = %(task)s END"
        " ORDER BY tasks.number, place",
        {"task": task_id, "group": group_id},
    )
    return tuple(row["session_id"] for row in rows)


def session_ends(db: Database, session_ids: Sequence[str]) -> dict[str, bool]:
    rows = db.execute(
        "SELECT session_id, outcome IS NOT NULL AS over FROM sessions WHERE session_id = ANY (%s)",
        (list(session_ids),),
    )
    return {row["session_id"]: row["over"] for row in rows}


INSERT_EVALUATION: Final = """
WITH given AS (
    INSERT INTO evaluations (evaluation_id, idempotency_key, submitted, spec, incarnation)
    VALUES (%(id)s, %(key)s, %(now)s, %(spec)s, %(incarnation)s) ON CONFLICT DO NOTHING
    RETURNING evaluation_id
)
INSERT INTO evaluated (evaluation_id, session_id, error)
SELECT evaluation_id, session_id, error FROM given, unnest(%(sessions)s::text[], %(errors)s::text[])
    WITH ORDINALITY AS each (session_id, error, number) ORDER BY number"""


def submit_evaluation(
    db: Database,
    spec: EvaluationSpec,
    sessions: Mapping[str, str | None],
    *,
    evaluation_id: str,
    idempotency_key: str | None,
    incarnation: int,
    now: float,
) -> EvaluationStatus:
    db.execute(
        INSERT_EVALUATION,
        {
            "id": evaluation_id,
            "key": idempotency_key,
            "now": now,
            "spec": dump_json(plain(spec)),
            "incarnation": incarnation,
            "sessions": list(sessions),
            "errors": list(sessions.values()),
        },
    )
    found = evaluation(db, None if idempotency_key is not None else evaluation_id, idempotency_key)
    assert found is not None
    return found


def write_reward(db: Database, given: RewardEvent) -> bool:
    body: dict[str, Json] = plain(given)
    body.pop("n", None)
    row = db.execute(
        "SELECT write_reward(%s, %s, %s, %s, %s::double precision, %s::text, %s, %b) AS written",
        (
            given.evaluation_id,
            given.session_id,
            given.task_id,
            given.group_id,
            given.reward,
            given.error,
            given.given,
            dump_json(body)[:-1] + b',"n":',
        ),
    ).fetchone()
    return row is not None and bool(row["written"])


def refuse_evaluation(db: Database, evaluation_id: str, session_id: str, why: str) -> None:
    db.execute(
        "UPDATE evaluated SET error = %s"
        " WHERE evaluation_id = %s AND session_id = %s AND n IS NULL AND error IS NULL",
        (why, evaluation_id, session_id),
    )


def evaluation(
    db: Database, evaluation_id: str | None, idempotency_key: str | None
) -> EvaluationStatus | None:
    row = db.execute(
        "SELECT evaluation_id, submitted, spec FROM evaluations"
        " WHERE evaluation_id = %s::text OR idempotency_key = %s::text",
        (evaluation_id, idempotency_key),
    ).fetchone()
    return None if row is None else _read_evaluation(db, row)


def pending_evaluations(db: Database, incarnation: int) -> tuple[EvaluationStatus, ...]:
    """The pending evaluations of this node, and those of nodes that are gone, which are this node's from now
    on.
    """
    rows = db.execute(
        "UPDATE evaluations SET incarnation = %(mine)s WHERE evaluation_id IN ("
        "SELECT evaluation_id FROM evaluated WHERE n IS NULL AND error IS NULL)"
        " AND (incarnation = %(mine)s OR NOT EXISTS (SELECT 1 FROM nodes"
        " WHERE nodes.incarnation = evaluations.incarnation AND state = 'alive'))"
        " RETURNING evaluation_id, submitted, spec",
        {"mine": incarnation},
    ).fetchall()
    return tuple(_read_evaluation(db, row) for row in sorted(rows, key=lambda row: row["submitted"]))


SELECT_EVALUATED: Final = """
SELECT session_id,
    CASE WHEN evaluated.error IS NULL THEN CASE WHEN n IS NULL THEN 'pending' ELSE 'evaluated' END
    ELSE CASE WHEN n IS NULL THEN 'refused' ELSE 'failed' END END AS state,
    n, sessions.reward AS first_reward, evaluated.reward, evaluated.error
FROM evaluated LEFT JOIN sessions USING (session_id) WHERE evaluation_id = %s ORDER BY evaluated.number"""


def _read_evaluation(db: Database, row: Mapping[str, Any]) -> EvaluationStatus:
    rows = db.execute(SELECT_EVALUATED, (row["evaluation_id"],)).fetchall()
    sessions = tuple(EvaluatedSession(**each) for each in rows)
    counts = Counter[str](each.state for each in sessions)
    return EvaluationStatus(
        evaluation_id=row["evaluation_id"],
        submitted=row["submitted"],
        spec=structure(read_json(bytes(row["spec"])), EvaluationSpec),
        finished=not counts["pending"],
        counts=counts,
        sessions=sessions,
    )
