"""What is written: entries for the writer's queue, each a function of its connection inside a transaction.

An entry may be applied twice after a failed or partly retried commit, so each is idempotent and keeps no
state. Values are packed when they are enqueued, so that a value that cannot be packed fails at its source.
The `group` and `task` events of a task are built from the tables in the transaction of its last trajectory,
so that a crash of the node cannot separate them.
"""

import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final

from attrs import fields, frozen

from polarnode.core.codec.json import dump_json, plain, read_json, structure
from polarnode.core.codec.packing import pack_turn
from polarnode.core.codec.tasks import task_json
from polarnode.core.conversation import Json
from polarnode.core.errors import Unreadable
from polarnode.core.status import EvaluatedSession, EvaluationStatus, RewardEvent
from polarnode.core.task import EvaluationSpec, TaskSpec
from polarnode.core.trajectory import Outcome, Turn
from polarnode.journal import pending_callbacks, queries
from polarnode.journal.damage import Damage, check, checksum, decoding, note
from polarnode.journal.queries import ending
from polarnode.journal.values import TaskRecord
from polarnode.merge.trajectory import Identity

# ── the end of a task ────────────────────────────────────────────────────────────


OPEN = "SELECT 1 FROM sessions WHERE task_id = ? AND retried_as IS NULL AND outcome IS NULL LIMIT 1"


def end_task(db: sqlite3.Connection, task_id: str, now: float) -> None:
    """Write the group's and the task's events if that was the last of the task's places."""
    task = db.execute("SELECT 1 FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    if task is None or db.execute(OPEN, (task_id,)).fetchone() is not None:
        return
    for kind, body in ending(db, task_id, now).items():
        _insert(db, kind, body, now)


def _insert(db: sqlite3.Connection, kind: str, body: dict[str, Json], now: float) -> None:
    _insert_event(
        db,
        kind=kind,
        key=f"{kind}:{body['task_id']}",
        task_id=str(body["task_id"]),
        group_id=str(body["group_id"]),
        body=dump_json(body),
        at=now,
    )


def _insert_event(
    db: sqlite3.Connection,
    *,
    kind: str,
    key: str,
    task_id: str,
    group_id: str,
    session_id: str | None = None,
    outcome: str | None = None,
    reward: float | None = None,
    at: float,
    body: bytes | None = None,
) -> int | None:
    row = (kind, key, task_id, group_id, session_id, outcome, reward, at, body)
    seq = db.execute(
        "INSERT INTO events (kind, key, task_id, group_id, session_id, outcome, reward, at, body, checksum)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*row, checksum(*row)),
    ).lastrowid
    pending_callbacks.add_pending(db, kind, task_id)
    return seq


# ── the entry ────────────────────────────────────────────────────────────

ROW_BYTES = 256  # bytes of a row besides its blob: ids, numbers, two index entries


@frozen
class Entry:
    """One thing to write; `size` is about the bytes it holds in memory until then."""

    size: int
    apply: Callable[[sqlite3.Connection], None]


# ── tasks and sessions ────────────────────────────────────────────────────────


def task_entry(
    spec: TaskSpec,
    *,
    task_id: str,
    session_ids: tuple[str, ...],
    idempotency_key: str | None,
    now: float,
    callback_kinds: tuple[str, ...] = pending_callbacks.EVENT_KINDS,
) -> Entry:
    """A task and its sessions. Events of `callback_kinds` go to its callback, where it has one."""
    body = dump_json(task_json(spec))
    group_id = spec.group_id or task_id
    columns = (task_id, group_id, idempotency_key, now, body)
    row = (*columns, checksum(*columns))
    target = (
        None
        if spec.callback_url is None
        else pending_callbacks.CallbackTarget(url=spec.callback_url, kinds=callback_kinds)
    )
    apply = partial(_insert_task, row=row, session_ids=session_ids, target=target)
    return Entry(ROW_BYTES * (1 + len(session_ids)) + len(body), apply)


def _insert_task(
    db: sqlite3.Connection,
    *,
    row: tuple[object, ...],
    session_ids: tuple[str, ...],
    target: pending_callbacks.CallbackTarget | None,
) -> None:
    db.execute(
        "INSERT OR IGNORE INTO tasks (task_id, group_id, idempotency_key, submitted, spec, checksum) VALUES"
        " (?, ?, ?, ?, ?, ?)",
        row,
    )
    pending_callbacks.remember_callback(db, str(row[0]), target)
    for index, session_id in enumerate(session_ids):
        insert_session(db, session_id=session_id, task_id=str(row[0]), sample_index=index)


def insert_session(
    db: sqlite3.Connection, *, session_id: str, task_id: str, sample_index: int, attempt: int = 0
) -> None:
    """The row of a session without an outcome, unless it has one."""
    life = "(SELECT value FROM meta WHERE name = 'life')"
    db.execute(
        "INSERT OR IGNORE INTO sessions (session_id, task_id, sample_index, attempt, identity_checksum, life)"
        f" VALUES (?, ?, ?, ?, ?, {life})",
        (
            session_id,
            task_id,
            sample_index,
            attempt,
            checksum(session_id, task_id, sample_index, attempt, None),
        ),
    )


def cancel_entry(task_id: str, *, now: float) -> Entry:
    return Entry(ROW_BYTES, partial(_cancel_task, row=(now, task_id)))


def _cancel_task(db: sqlite3.Connection, *, row: tuple[object, ...]) -> None:
    db.execute("UPDATE tasks SET cancelled = ? WHERE task_id = ? AND cancelled IS NULL", row)


def session_entry(identity: Identity) -> Entry:
    body = dump_json(plain(identity))
    return Entry(ROW_BYTES + len(body), partial(start_session, identity=identity, body=body))


def start_session(db: sqlite3.Connection, *, identity: Identity, body: bytes) -> None:
    whose = {"session_id": identity.session_id, "task_id": identity.task_id}
    insert_session(db, **whose, sample_index=identity.sample_index, attempt=identity.attempt)
    row = (identity.session_id, identity.task_id, identity.sample_index, identity.attempt, body)
    db.execute(
        "UPDATE sessions SET attempt = ?, identity = ?, identity_checksum = ? WHERE session_id = ?",
        (*row[3:], checksum(*row), identity.session_id),
    )


# ── turns and trajectories ────────────────────────────────────────────────────


def turn_entry(turn: Turn) -> Entry:
    body = pack_turn(turn)
    row = (turn.session_id, turn.index, len(turn.sampled), body)
    return Entry(ROW_BYTES + len(body), partial(insert_turn, row=row))


def insert_turn(db: sqlite3.Connection, *, row: tuple[str, int, int, bytes]) -> None:
    # summed here, in the writer's thread: turns are enqueued on the event loop, and may be megabytes
    db.execute(
        "INSERT OR REPLACE INTO turns (session_id, turn, sampled, body, checksum) VALUES (?, ?, ?, ?, ?)",
        (*row, checksum(*row)),
    )


@frozen(kw_only=True)
class PublishedSession:
    """The fields of a trajectory that the tables hold, and its bytes."""

    session_id: str
    task_id: str
    group_id: str
    sample_index: int
    attempt: int
    outcome: Outcome
    reward: float | None
    trainable: int
    staleness: int | None
    body: bytes
    now: float
    retried_as: str | None = None

    @property
    def kind(self) -> str:
        """A replaced session's trajectory is no part of its group."""
        return "trajectory" if self.retried_as is None else "attempt"


def publish_session(db: sqlite3.Connection, *, it: PublishedSession) -> None:
    if publish_once(db, it):
        end_task(db, it.task_id, it.now)


def replace_session(
    db: sqlite3.Connection, *, it: PublishedSession, begin: Callable[[sqlite3.Connection], None]
) -> None:
    if publish_once(db, it):
        begin(db)


def publish_once(db: sqlite3.Connection, it: PublishedSession) -> bool:
    """Write a session's trajectory. Only the first is kept, because its event may have been read. False for a
    later one.
    """
    insert_session(
        db, session_id=it.session_id, task_id=it.task_id, sample_index=it.sample_index, attempt=it.attempt
    )
    row = (dump_json(plain(it.outcome)), it.reward, it.trainable, it.staleness, it.now, it.retried_as)
    over = "outcome = ?, reward = ?, trainable = ?, staleness = ?, finished = ?, retried_as = ?"
    changed = db.execute(
        f"UPDATE sessions SET {over}, outcome_checksum = ? WHERE session_id = ? AND outcome IS NULL",
        (*row, checksum(it.session_id, *row), it.session_id),
    )
    if changed.rowcount == 0:
        return False
    db.execute(
        "INSERT INTO trajectories (session_id, body, checksum) VALUES (?, ?, ?)",
        (it.session_id, it.body, checksum(it.session_id, it.body)),
    )
    _insert_event(
        db,
        kind=it.kind,
        key=f"{it.kind}:{it.session_id}",
        task_id=it.task_id,
        group_id=it.group_id,
        session_id=it.session_id,
        outcome=it.outcome.status,
        reward=it.reward,
        at=it.now,
    )
    return True


# ── evaluations of finished sessions ──────────────────────────────────────────────

EVALUATION = "SELECT evaluation_id, idempotency_key, submitted, body, checksum FROM evaluations "
# a row of `evaluated` whose session has neither a reward event nor a reason why it gets none
PENDING = "n IS NULL AND error IS NULL"


def evaluation_entry(
    spec: EvaluationSpec,
    sessions: Mapping[str, str | None],
    *,
    evaluation_id: str,
    idempotency_key: str | None,
    now: float,
) -> Entry:
    """An evaluation of `sessions`; by each one's id, why it is refused, or None."""
    columns = (evaluation_id, idempotency_key, now, dump_json(plain(spec)))
    rows = [(evaluation_id, session_id, why) for session_id, why in sessions.items()]
    apply = partial(_insert_evaluation, row=(*columns, checksum(*columns)), rows=rows)
    return Entry(ROW_BYTES * (1 + len(rows)) + len(columns[3]), apply)


def _insert_evaluation(
    db: sqlite3.Connection, *, row: tuple[object, ...], rows: list[tuple[str, str, str | None]]
) -> None:
    db.execute(
        "INSERT OR IGNORE INTO evaluations (evaluation_id, idempotency_key, submitted, body, checksum) VALUES"
        " (?, ?, ?, ?, ?)",
        row,
    )
    db.executemany(
        "INSERT OR IGNORE INTO evaluated (evaluation_id, session_id, error) VALUES (?, ?, ?)", rows
    )


def reward_entry(given: RewardEvent) -> Entry:
    """The `reward` event of an evaluated session, once for each evaluation. Its number is given here."""
    body: dict[str, Json] = plain(given)
    return Entry(2 * ROW_BYTES + len(dump_json(body)), partial(_insert_reward, given=given, body=body))


def _insert_reward(db: sqlite3.Connection, *, given: RewardEvent, body: dict[str, Json]) -> None:
    whose = (given.evaluation_id, given.session_id)
    pending = f"SELECT 1 FROM evaluated WHERE evaluation_id = ? AND session_id = ? AND {PENDING}"
    if db.execute(pending, whose).fetchone() is None:
        return
    kept = "SELECT 1 FROM trajectories WHERE session_id = ?"
    if db.execute(kept, whose[1:]).fetchone() is None:
        # its numbers may be pruned with its events, and no key is given twice
        _refuse(db, whose=whose, why=f"session {given.session_id} was pruned while it was evaluated")
        return
    last = "SELECT coalesce(max(n), 0) FROM evaluated WHERE session_id = ?"
    n = int(db.execute(last, whose[1:]).fetchone()[0]) + 1
    seq = _insert_event(
        db,
        kind="reward",
        key=f"reward:{given.session_id}:{n}",
        task_id=given.task_id,
        group_id=given.group_id,
        session_id=given.session_id,
        reward=given.reward,
        at=given.given,
        body=dump_json({**body, "n": n}),
    )
    db.execute(
        "UPDATE evaluated SET n = ?, seq = ?, reward = ?, error = ? WHERE evaluation_id = ? AND"
        " session_id = ?",
        (n, seq, given.reward, given.error, *whose),
    )


def refusal_entry(evaluation_id: str, session_id: str, why: str) -> Entry:
    """A session of an evaluation that gets no event."""
    return Entry(ROW_BYTES + len(why), partial(_refuse, whose=(evaluation_id, session_id), why=why))


def _refuse(db: sqlite3.Connection, *, whose: tuple[str, str], why: str) -> None:
    db.execute(
        f"UPDATE evaluated SET error = ? WHERE evaluation_id = ? AND session_id = ? AND {PENDING}",
        (why, *whose),
    )


def forget_evaluation(db: sqlite3.Connection, session_id: str | None, seq: int) -> None:
    """Forget an evaluation with its last `reward` event, once none of its sessions is pending."""
    whose = db.execute(
        "SELECT evaluation_id FROM evaluated WHERE session_id = ? AND seq = ?", (session_id, seq)
    ).fetchone()
    left = f"SELECT 1 FROM evaluated WHERE evaluation_id = ? AND (seq > ? OR {PENDING})"
    if whose is None or db.execute(left, (*whose, seq)).fetchone() is not None:
        return
    for table in ("evaluations", "evaluated"):
        db.execute(f"DELETE FROM {table} WHERE evaluation_id = ?", whose)


def evaluation(
    db: sqlite3.Connection, evaluation_id: str | None, idempotency_key: str | None = None
) -> EvaluationStatus | None:
    """The evaluation of this id, or of this key."""
    where = "WHERE evaluation_id = ? OR idempotency_key = ?"
    row = db.execute(EVALUATION + where, (evaluation_id, idempotency_key)).fetchone()
    return None if row is None else _evaluation(db, *row)


def pending_evaluations(db: sqlite3.Connection) -> tuple[EvaluationStatus, ...]:
    """Those with a pending session, oldest first."""
    pending = (
        f"WHERE evaluation_id IN (SELECT evaluation_id FROM evaluated WHERE {PENDING}) ORDER BY submitted"
    )
    return tuple(_evaluation(db, *row) for row in db.execute(EVALUATION + pending).fetchall())


def standing(db: sqlite3.Connection, session_ids: Sequence[str]) -> dict[str, bool]:
    """Whether each of these sessions is over; without those that are not in the journal."""
    query = "SELECT session_id, outcome IS NOT NULL FROM sessions WHERE session_id = ?"
    found = (db.execute(query, (session_id,)).fetchone() for session_id in session_ids)
    return {row[0]: bool(row[1]) for row in found if row is not None}


def places_of(db: sqlite3.Connection, task_id: str | None, group_id: str | None) -> tuple[str, ...]:
    """The sessions that hold the places of a task or of a group's tasks."""
    column, name = ("group_id", group_id) if task_id is None else ("task_id", task_id)
    rows = db.execute(
        f"SELECT session_id FROM sessions JOIN tasks USING (task_id) WHERE retried_as IS NULL AND"
        f" tasks.{column} = ? ORDER BY number, sample_index",
        (name,),
    )
    return tuple(session_id for (session_id,) in rows)


EVALUATED = """
SELECT session_id, CASE WHEN error IS NULL THEN CASE WHEN n IS NULL THEN 'pending' ELSE 'evaluated' END
    ELSE CASE WHEN n IS NULL THEN 'refused' ELSE 'failed' END END,
    n, sessions.reward, evaluated.reward, error
FROM evaluated LEFT JOIN sessions USING (session_id) WHERE evaluation_id = ? ORDER BY evaluated.rowid"""


def _evaluation(
    db: sqlite3.Connection, name: str, key: str | None, submitted: float, body: bytes, expected: int | None
) -> EvaluationStatus:
    spec: EvaluationSpec | None = None
    try:
        check(expected, name, key, submitted, body)
        with decoding():
            spec = structure(read_json(body), EvaluationSpec)
    except Unreadable as error:
        note(db, Damage(table="evaluations", row=name, reason=str(error)))
    columns = [each.name for each in fields(EvaluatedSession)]
    rows = db.execute(EVALUATED, (name,)).fetchall()
    sessions = tuple(EvaluatedSession(**dict(zip(columns, row, strict=True))) for row in rows)
    counts = Counter[str](each.state for each in sessions)
    return EvaluationStatus(
        evaluation_id=name,
        submitted=submitted,
        spec=spec,
        finished=not counts["pending"],
        counts=counts,
        sessions=sessions,
    )


# ── runs of one name ────────────────────────────────────────────────────────────

RUN: Final = ":run-"  # stands between the name and the number of a task that is not the first
_AFTER: Final = ":run."  # '.' follows '-': every name with a number lies between the two


def latest_run(db: sqlite3.Connection, name: str) -> TaskRecord | None:
    """The task of this name, or the last of its later runs. Earlier runs may be pruned, so the numbers may
    begin anywhere.
    """
    query = (
        "SELECT task_id FROM tasks WHERE task_id = ? OR (task_id > ? AND task_id < ?) ORDER BY number DESC"
        " LIMIT 1"
    )
    row = db.execute(query, (name, name + RUN, name + _AFTER)).fetchone()
    return None if row is None else queries.task(db, row[0])


# ── weights ────────────────────────────────────────────────────────────

COLUMNS = "SELECT number, version, at, body, checksum FROM weights "


def adapter_of(body: Json) -> str:
    """The adapter that a version of the weights is of, by its body; empty for the base."""
    match body:
        case {"source": {"kind": "adapter", "adapter": str(name)}}:
            return name
    return ""


def is_deleted(body: Json) -> bool:
    """Whether the adapter that a version is of was deleted, by its body."""
    match body:
        case {"source": {"deleted": _}}:
            return True
    return False


@frozen(kw_only=True)
class WeightsRow:
    """One version of the weights, served since `at` (seconds since the epoch)."""

    version: str
    at: float
    body: Json

    @property
    def adapter(self) -> str:
        """The name of the adapter that it is a version of; empty for the base."""
        return adapter_of(self.body)


def weights_entry(version: str, body: Mapping[str, Json], *, now: float) -> Entry:
    columns = (version, now, dump_json(dict(body)))
    row = (*columns, checksum(*columns))
    return Entry(ROW_BYTES + len(columns[2]), partial(_insert_weights, row=row))


def _insert_weights(db: sqlite3.Connection, *, row: tuple[object, ...]) -> None:
    if db.execute("SELECT 1 FROM weights WHERE version = ?", row[:1]).fetchone() is None:
        db.execute("INSERT INTO weights (version, at, body, checksum) VALUES (?, ?, ?, ?)", row)


def weights_changed_entry(version: str, body: Mapping[str, Json]) -> Entry:
    """What else became of a version."""
    packed = dump_json(dict(body))
    return Entry(ROW_BYTES + len(packed), partial(_change_weights, version=version, body=packed))


def _change_weights(db: sqlite3.Connection, *, version: str, body: bytes) -> None:
    for (at,) in db.execute("SELECT at FROM weights WHERE version = ?", (version,)).fetchall():
        row = (body, checksum(version, at, body), version)
        db.execute("UPDATE weights SET body = ?, checksum = ? WHERE version = ?", row)


def weights(db: sqlite3.Connection, limit: int | None, *, adapters: bool = False) -> tuple[WeightsRow, ...]:
    """Those of the base, or those of adapters, newest first, without damaged rows."""
    rows = (_row(db, *row) for row in db.execute(COLUMNS + "ORDER BY number DESC"))
    found = (row for row in rows if row is not None and (row.adapter != "") is adapters)
    return tuple(islice(found, limit))


def weights_of(db: sqlite3.Connection, version: str) -> WeightsRow | None:
    row = db.execute(COLUMNS + "WHERE version = ?", (version,)).fetchone()
    return None if row is None else _row(db, *row)


def _row(
    db: sqlite3.Connection, number: int, version: str, at: float, body: bytes, expected: int | None
) -> WeightsRow | None:
    try:
        check(expected, version, at, body)
        with decoding():
            return WeightsRow(version=version, at=at, body=read_json(body))
    except Unreadable as error:
        note(db, Damage(table="weights", row=str(number), reason=str(error)))
        return None
