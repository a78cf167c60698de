"""The reads of the API: tasks, sessions, runs of one name, forks, earlier attempts and finished groups."""

from collections.abc import Mapping
from typing import Any, Final

from polarnode.core.codec.json import plain, read_json, structure
from polarnode.core.codec.limits import COUNT
from polarnode.core.codec.packing import unpack_turn
from polarnode.core.conversation import Json
from polarnode.core.errors import Unreadable
from polarnode.core.status import SessionRecord
from polarnode.core.task import ForkSpec, TaskSpec
from polarnode.core.trajectory import Damaged, Turn
from polarnode.journal.damage import decode_boundary
from polarnode.journal.entries import RUN_SEPARATOR
from polarnode.journal.finished_groups import MAX_SCANNED_GROUPS, describe_group, has_forks
from polarnode.journal.forks import EarlierAttempt, ForkParent
from polarnode.journal.log.postgres.connection import Database
from polarnode.journal.log.postgres.places import read_outcome
from polarnode.journal.values import TaskRecord
from polarnode.merge.trajectory import Identity

SELECT_TASK: Final = "SELECT task_id, group_id, idempotency_key, submitted, spec, cancelled FROM tasks "


def task(db: Database, task_id: str) -> TaskRecord | None:
    return _first_task(db, "WHERE task_id = %s", task_id)


def task_of_key(db: Database, idempotency_key: str) -> TaskRecord | None:
    return _first_task(db, "WHERE idempotency_key = %s", idempotency_key)


def latest_run(db: Database, name: str) -> TaskRecord | None:
    # The names are compared as bytes, not in the order of a language, so that every name with a number lies
    # between the two.
    return _first_task(
        db,
        'WHERE task_id = %s OR (task_id COLLATE "C" > %s AND task_id COLLATE "C" < %s)'
        " ORDER BY number DESC LIMIT 1",
        name,
        name + RUN_SEPARATOR,
        name + RUN_SEPARATOR[:-1] + ".",
    )


def _first_task(db: Database, where: str, *values: object) -> TaskRecord | None:
    row = db.execute((SELECT_TASK + where).encode(), values).fetchone()
    return None if row is None else _read_task(db, row)


def tasks(db: Database, limit: int, before: str | None) -> tuple[TaskRecord, ...]:
    rows = db.execute(
        (
            SELECT_TASK + "WHERE %(before)s::text IS NULL"
            " OR number < (SELECT number FROM tasks WHERE task_id = %(before)s)"
            " ORDER BY number DESC LIMIT %(limit)s"
        ).encode(),
        {"before": before, "limit": limit},
    ).fetchall()
    return tuple(_read_task(db, row) for row in rows)


def _read_task(db: Database, row: Mapping[str, Any]) -> TaskRecord:
    sessions = db.execute(
        "SELECT sessions.* FROM places JOIN sessions USING (session_id)"
        " WHERE places.task_id = %s ORDER BY places.place",
        (row["task_id"],),
    )
    return TaskRecord(
        task_id=row["task_id"],
        group_id=row["group_id"],
        spec=structure(read_json(bytes(row["spec"])), TaskSpec),
        idempotency_key=row["idempotency_key"],
        submitted=row["submitted"],
        sessions=tuple(map(read_session, sessions)),
        cancelled=row["cancelled"],
    )


def session(db: Database, session_id: str) -> SessionRecord | None:
    row = db.execute("SELECT * FROM sessions WHERE session_id = %s", (session_id,)).fetchone()
    return None if row is None else read_session(row)


def read_session(row: Mapping[str, Any]) -> SessionRecord:
    known = read_identity(row)
    return SessionRecord(
        session_id=row["session_id"],
        task_id=row["task_id"],
        sample_index=row["place"],
        outcome=None if row["outcome"] is None else read_outcome(row["outcome"]),
        reward=row["reward"],
        turns=row["turns"],
        sampled_tokens=row["sampled"],
        finished=row["finished"],
        attempt=row["attempt"],
        retried_as=row["retried_as"],
        forked_from=None if known is None else known.forked_from,
    )


def read_identity(row: Mapping[str, Any]) -> Identity | None:
    return None if row["identity"] is None else structure(read_json(bytes(row["identity"])), Identity)


def forks(db: Database, session_id: str, limit: int) -> tuple[SessionRecord, ...]:
    rows = db.execute(
        "SELECT * FROM sessions WHERE forked_from = %s AND retried_as IS NULL ORDER BY number LIMIT %s",
        (session_id, limit),
    )
    return tuple(map(read_session, rows))


SELECT_TURNS: Final = (
    "SELECT part, data FROM bodies JOIN sessions USING (session_id, written_by)"
    " WHERE session_id = %s AND outcome IS NOT NULL AND part BETWEEN 1 AND %s ORDER BY part"
)


def fork_parent(db: Database, fork: ForkSpec) -> ForkParent | None:
    found = session(db, fork.session)
    if found is None:
        return None
    its_task = task(db, found.task_id)
    turns: list[Turn] = []
    damaged: list[Damaged] = []
    upto = min(fork.turn + 1, COUNT)  # part 0 is the trajectory
    for row in db.execute(SELECT_TURNS, (fork.session, upto), binary=True).fetchall():
        try:
            with decode_boundary():
                turns.append(unpack_turn(bytes(row["data"])))
        except Unreadable as error:
            if row["part"] <= fork.turn:
                damaged.append(Damaged(part=f"turns[{row['part'] - 1}]", reason=str(error)))
    return ForkParent(
        spec=None if its_task is None else its_task.spec,
        turns=tuple(each for each in turns if each.index < fork.turn),
        damaged=tuple(damaged),
        count=found.turns,
        next=next((each for each in turns if each.index == fork.turn), None),
    )


def earlier_attempts(db: Database, place: Identity) -> tuple[EarlierAttempt, ...]:
    found: list[EarlierAttempt] = []
    for row in db.execute(
        "SELECT * FROM sessions WHERE task_id = %s AND place = %s AND attempt < %s ORDER BY attempt DESC",
        (place.task_id, place.sample_index, place.attempt),
    ):
        known = read_identity(row)
        if known is None:
            break
        outcome = None if row["outcome"] is None else read_outcome(row["outcome"])
        found.append(EarlierAttempt(identity=known, outcome=outcome, count=row["turns"]))
    return tuple(found)


SELECT_GROUPS: Final = """
SELECT events.position, events.at, events.task_id, events.body, tasks.submitted, tasks.spec
FROM events LEFT JOIN tasks USING (task_id)
WHERE kind = 'group' AND (%(until)s::double precision IS NULL OR at <= %(until)s)
    AND (%(task_id)s::text IS NULL OR events.task_id = %(task_id)s)
    AND (%(below)s::bigint IS NULL OR position < %(below)s)
ORDER BY position DESC LIMIT %(limit)s"""


def finished_groups(
    db: Database, limit: int, until: float | None, state: str | None, task_id: str | None
) -> tuple[dict[str, Json], ...]:
    found: list[dict[str, Json]] = []
    below, seen = None, 0
    while seen < (MAX_SCANNED_GROUPS if state is not None else limit):
        values = {"until": until, "task_id": task_id, "below": below, "limit": limit}
        rows = db.execute(SELECT_GROUPS, values).fetchall()
        for row in rows:
            group = _read_group(db, row)
            if group is not None and state in (None, group["state"]):
                found.append(group)
            if len(found) == limit:
                return tuple(found)
        if len(rows) < limit:
            break
        below, seen = rows[-1]["position"], seen + len(rows)
    return tuple(found)


def _read_group(db: Database, row: Mapping[str, Any]) -> dict[str, Json] | None:
    try:
        with decode_boundary():
            group: Any = read_json(bytes(row["body"]))
            task: Any = {} if row["spec"] is None else read_json(bytes(row["spec"]))
    except Unreadable:
        return None
    forks = None
    if has_forks(task):
        rows = db.execute("SELECT * FROM sessions WHERE task_id = %s", (row["task_id"],))
        known = {each["session_id"]: read_identity(each) for each in rows}
        forks = {name: plain(each.forked_from) for name, each in known.items() if each is not None}
    return describe_group(group, task, forks, ended=row["at"], submitted=row["submitted"])
