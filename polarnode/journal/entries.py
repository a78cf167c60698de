"""Entries for the writer's queue. Each is a function that writes through the writer's connection, inside a
transaction.

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
from polarnode.journal.damage import Damage, checksum, decode_boundary, note_damage, verify_checksum
from polarnode.journal.queries import ending_bodies
from polarnode.journal.values import TaskRecord
from polarnode.merge.trajectory import Identity

# ── the end of a task ────────────────────────────────────────────────────────────


SELECT_OPEN_PLACE = (
    "SELECT 1 FROM sessions WHERE task_id = ? AND retried_as IS NULL AND outcome IS NULL LIMIT 1"
)


def end_task(db: sqlite3.Connection, task_id: str, now: float) -> None:
    """Write the `group` and `task` events of a task if all of its places are over."""
    task = db.execute("SELECT 1 FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    if task is None or db.execute(SELECT_OPEN_PLACE, (task_id,)).fetchone() is not None:
        return
    for kind, body in ending_bodies(db, task_id, now).items():
        _insert_task_event(db, kind, body, now)


def _insert_task_event(db: sqlite3.Connection, kind: str, body: dict[str, Json], now: float) -> None:
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
class JournalEntry:
    """One thing to write. `size` is about how many bytes it holds in memory until it is written."""

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
) -> JournalEntry:
    """Write a task and its sessions. Events of `callback_kinds` go to the task's callback, if it has one."""
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
    return JournalEntry(ROW_BYTES * (1 + len(session_ids)) + len(body), apply)


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
    """Insert the row of a session, without an outcome. A row that exists stays as it is."""
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


def cancel_entry(task_id: str, *, now: float) -> JournalEntry:
    return JournalEntry(ROW_BYTES, partial(_cancel_task, row=(now, task_id)))


def _cancel_task(db: sqlite3.Connection, *, row: tuple[object, ...]) -> None:
    db.execute("UPDATE tasks SET cancelled = ? WHERE task_id = ? AND cancelled IS NULL", row)


def session_entry(identity: Identity) -> JournalEntry:
    body = dump_json(plain(identity))
    return JournalEntry(ROW_BYTES + len(body), partial(start_session, identity=identity, body=body))


def start_session(db: sqlite3.Connection, *, identity: Identity, body: bytes) -> None:
    whose = {"session_id": identity.session_id, "task_id": identity.task_id}
    insert_session(db, **whose, sample_index=identity.sample_index, attempt=identity.attempt)
    row = (identity.session_id, identity.task_id, identity.sample_index, identity.attempt, body)
    db.execute(
        "UPDATE sessions SET attempt = ?, identity = ?, identity_checksum = ? WHERE session_id = ?",
        (*row[3:], checksum(*row), identity.session_id),
    )


# ── turns and trajectories ────────────────────────────────────────────────────


def turn_entry(turn: Turn) -> JournalEntry:
    body = pack_turn(turn)
    row = (turn.session_id, turn.index, len(turn.sampled), body)
    return JournalEntry(ROW_BYTES + len(body), partial(insert_turn, row=row))


def insert_turn(db: sqlite3.Connection, *, row: tuple[str, int, int, bytes]) -> None:
    # The checksum is computed here, in the writer's thread, because turns may be megabytes and are enqueued
    # on the event loop.
    db.execute(
        "INSERT OR REPLACE INTO turns (session_id, turn, sampled, body, checksum) VALUES (?, ?, ?, ?, ?)",
        (*row, checksum(*row)),
    )


@frozen(kw_only=True)
class PublishedSession:
    """The fields of a trajectory that have columns of their own, and its packed bytes."""

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
        """The kind of the event: an `attempt` is the trajectory of a replaced session, outside its group."""
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
    """Write a session's trajectory. Only the first one is kept, because its event may have been read already.
    Returns False for a later one.
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

SELECT_EVALUATION = "SELECT evaluation_id, idempotency_key, submitted, body, checksum FROM evaluations "
# holds for a row of `evaluated` whose session has neither a reward event nor a reason why it gets none
IS_PENDING = "n IS NULL AND error IS NULL"


def evaluation_entry(
    spec: EvaluationSpec,
    sessions: Mapping[str, str | None],
    *,
    evaluation_id: str,
    idempotency_key: str | None,
    now: float,
) -> JournalEntry:
    """Write an evaluation. `sessions` maps the id of each session to why it is refused, or to None."""
    columns = (evaluation_id, idempotency_key, now, dump_json(plain(spec)))
    rows = [(evaluation_id, session_id, why) for session_id, why in sessions.items()]
    apply = partial(_insert_evaluation, row=(*columns, checksum(*columns)), rows=rows)
    return JournalEntry(ROW_BYTES * (1 + len(rows)) + len(columns[3]), apply)


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


def reward_entry(given: RewardEvent) -> JournalEntry:
    """Write the `reward` event of an evaluated session, once for each evaluation. The entry numbers it."""
    body: dict[str, Json] = plain(given)
    return JournalEntry(2 * ROW_BYTES + len(dump_json(body)), partial(_insert_reward, given=given, body=body))


def _insert_reward(db: sqlite3.Connection, *, given: RewardEvent, body: dict[str, Json]) -> None:
    whose = (given.evaluation_id, given.session_id)
    pending = f"SELECT 1 FROM evaluated WHERE evaluation_id = ? AND session_id = ? AND {IS_PENDING}"
    if db.execute(pending, whose).fetchone() is None:
        return
    kept = "SELECT 1 FROM trajectories WHERE session_id = ?"
    if db.execute(kept, whose[1:]).fetchone() is None:
        # The session's earlier reward events may be pruned, and with them the numbers that keys must not
        # repeat.
        _write_refusal(db, whose=whose, why=f"session {given.session_id} was pruned while it was evaluated")
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


def refusal_entry(evaluation_id: str, session_id: str, why: str) -> JournalEntry:
    """Record why a session of an evaluation gets no event."""
    return JournalEntry(
        ROW_BYTES + len(why), partial(_write_refusal, whose=(evaluation_id, session_id), why=why)
    )


def _write_refusal(db: sqlite3.Connection, *, whose: tuple[str, str], why: str) -> None:
    db.execute(
        f"UPDATE evaluated SET error = ? WHERE evaluation_id = ? AND session_id = ? AND {IS_PENDING}",
        (why, *whose),
    )


def forget_evaluation(db: sqlite3.Connection, session_id: str | None, seq: int) -> None:
    """Delete an evaluation when its last `reward` event is pruned and none of its sessions is pending."""
    whose = db.execute(
        "SELECT evaluation_id FROM evaluated WHERE session_id = ? AND seq = ?", (session_id, seq)
    ).fetchone()
    left = f"SELECT 1 FROM evaluated WHERE evaluation_id = ? AND (seq > ? OR {IS_PENDING})"
    if whose is None or db.execute(left, (*whose, seq)).fetchone() is not None:
        return
    for table in ("evaluations", "evaluated"):
        db.execute(f"DELETE FROM {table} WHERE evaluation_id = ?", whose)


def evaluation(
    db: sqlite3.Connection, evaluation_id: str | None, idempotency_key: str | None = None
) -> EvaluationStatus | None:
    """The evaluation with this id, or with this key."""
    where = "WHERE evaluation_id = ? OR idempotency_key = ?"
    row = db.execute(SELECT_EVALUATION + where, (evaluation_id, idempotency_key)).fetchone()
    return None if row is None else _read_evaluation(db, *row)


def pending_evaluations(db: sqlite3.Connection) -> tuple[EvaluationStatus, ...]:
    """The evaluations with a pending session, oldest first."""
    pending = (
        f"WHERE evaluation_id IN (SELECT evaluation_id FROM evaluated WHERE {IS_PENDING}) ORDER BY submitted"
    )
    return tuple(_read_evaluation(db, *row) for row in db.execute(SELECT_EVALUATION + pending).fetchall())


def session_ends(db: sqlite3.Connection, session_ids: Sequence[str]) -> dict[str, bool]:
    """Map each session to whether it is over. Sessions that are not in the journal are left out."""
    query = "SELECT session_id, outcome IS NOT NULL FROM sessions WHERE session_id = ?"
    found = (db.execute(query, (session_id,)).fetchone() for session_id in session_ids)
    return {row[0]: bool(row[1]) for row in found if row is not None}


def placed_sessions(db: sqlite3.Connection, task_id: str | None, group_id: str | None) -> tuple[str, ...]:
    """The ids of the sessions that hold the places of a task, or of all tasks of a group."""
    column, name = ("group_id", group_id) if task_id is None else ("task_id", task_id)
    rows = db.execute(
        f"SELECT session_id FROM sessions JOIN tasks USING (task_id) WHERE retried_as IS NULL AND"
        f" tasks.{column} = ? ORDER BY number, sample_index",
        (name,),
    )
    return tuple(session_id for (session_id,) in rows)


SELECT_EVALUATED = """
SELECT session_id, CASE WHEN error IS NULL THEN CASE WHEN n IS NULL THEN 'pending' ELSE 'evaluated' END
    ELSE CASE WHEN n IS NULL THEN 'refused' ELSE 'failed' END END,
    n, sessions.reward, evaluated.reward, error
FROM evaluated LEFT JOIN sessions USING (session_id) WHERE evaluation_id = ? ORDER BY evaluated.rowid"""


def _read_evaluation(
    db: sqlite3.Connection, name: str, key: str | None, submitted: float, body: bytes, expected: int | None
) -> EvaluationStatus:
    spec: EvaluationSpec | None = None
    try:
        verify_checksum(expected, name, key, submitted, body)
        with decode_boundary():
            spec = structure(read_json(body), EvaluationSpec)
    except Unreadable as error:
        note_damage(db, Damage(table="evaluations", row=name, reason=str(error)))
    columns = [each.name for each in fields(EvaluatedSession)]
    rows = db.execute(SELECT_EVALUATED, (name,)).fetchall()
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

RUN_SEPARATOR: Final = ":run-"  # between the name and the number of a task that is not the first of this name
_AFTER_RUNS: Final = ":run."  # '.' comes after '-', so every name with a number lies between the two


def latest_run(db: sqlite3.Connection, name: str) -> TaskRecord | None:
    """The last task that was submitted under this name. Later tasks of one name have numbers
    (`RUN_SEPARATOR`), which may begin anywhere, because earlier ones may be pruned.
    """
    query = (
        "SELECT task_id FROM tasks WHERE task_id = ? OR (task_id > ? AND task_id < ?) ORDER BY number DESC"
        " LIMIT 1"
    )
    row = db.execute(query, (name, name + RUN_SEPARATOR, name + _AFTER_RUNS)).fetchone()
    return None if row is None else queries.task(db, row[0])


# ── weights ────────────────────────────────────────────────────────────

SELECT_WEIGHTS = "SELECT number, version, at, body, checksum FROM weights "


def adapter_of(body: Json) -> str:
    """The name of the adapter in the body of a version of the weights; empty for the base model."""
    match body:
        case {"source": {"kind": "adapter", "adapter": str(name)}}:
            return name
    return ""


def is_deleted(body: Json) -> bool:
    """Whether the body of a version says that its adapter was deleted."""
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
        """The name of the adapter that this is a version of; empty for the base model."""
        return adapter_of(self.body)


def weights_entry(version: str, body: Mapping[str, Json], *, now: float) -> JournalEntry:
    columns = (version, now, dump_json(dict(body)))
    row = (*columns, checksum(*columns))
    return JournalEntry(ROW_BYTES + len(columns[2]), partial(_insert_weights, row=row))


def _insert_weights(db: sqlite3.Connection, *, row: tuple[object, ...]) -> None:
    if db.execute("SELECT 1 FROM weights WHERE version = ?", row[:1]).fetchone() is None:
        db.execute("INSERT INTO weights (version, at, body, checksum) VALUES (?, ?, ?, ?)", row)


def weights_changed_entry(version: str, body: Mapping[str, Json]) -> JournalEntry:
    """Replace the body of a version, for example when its adapter was deleted."""
    packed = dump_json(dict(body))
    return JournalEntry(ROW_BYTES + len(packed), partial(_change_weights, version=version, body=packed))


def _change_weights(db: sqlite3.Connection, *, version: str, body: bytes) -> None:
    for (at,) in db.execute("SELECT at FROM weights WHERE version = ?", (version,)).fetchall():
        row = (body, checksum(version, at, body), version)
        db.execute("UPDATE weights SET body = ?, checksum = ? WHERE version = ?", row)


def weight_rows(
    db: sqlite3.Connection, limit: int | None, *, adapters: bool = False
) -> tuple[WeightsRow, ...]:
    """The versions of the base model, or those of adapters, newest first and without damaged rows."""
    rows = (_read_weight_row(db, *row) for row in db.execute(SELECT_WEIGHTS + "ORDER BY number DESC"))
    found = (row for row in rows if row is not None and (row.adapter != "") is adapters)
    return tuple(islice(found, limit))


def weight_row(db: sqlite3.Connection, version: str) -> WeightsRow | None:
    row = db.execute(SELECT_WEIGHTS + "WHERE version = ?", (version,)).fetchone()
    return None if row is None else _read_weight_row(db, *row)


def _read_weight_row(
    db: sqlite3.Connection, number: int, version: str, at: float, body: bytes, expected: int | None
) -> WeightsRow | None:
    try:
        verify_checksum(expected, version, at, body)
        with decode_boundary():
            return WeightsRow(version=version, at=at, body=read_json(body))
    except Unreadable as error:
        note_damage(db, Damage(table="weights", row=str(number), reason=str(error)))
        return None
