"""What is written: entries for the writer's queue, each a function of its connection inside a transaction.

An entry may be applied twice after a failed or partly retried commit, so each is idempotent and keeps no
state. Values are packed when they are enqueued, so that a value that cannot be packed fails at its source.
The `group` and `task` events of a task are built from the tables in the transaction of its last trajectory,
so that a crash of the node cannot separate them.
"""

import sqlite3
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from attrs import evolve, field, frozen

from polarnode.core.codec.json import dump_json, plain, read_json, structure
from polarnode.core.codec.packing import pack_trajectory, pack_turn
from polarnode.core.codec.tasks import task_json
from polarnode.core.conversation import Json
from polarnode.core.task import GroupSpec, TaskSpec
from polarnode.core.trajectory import Outcome, Trajectory, Turn
from polarnode.groups.group import Facts, group_json, judged
from polarnode.journal import pending_callbacks, queries
from polarnode.journal.values import TaskRecord
from polarnode.merge.trajectory import Identity

# ── the end of a task ────────────────────────────────────────────────────────────

OPEN = "SELECT 1 FROM sessions WHERE task_id = ? AND retried_as IS NULL AND outcome IS NULL LIMIT 1"
OVER = """
SELECT session_id, sample_index, outcome, reward, trainable, staleness
FROM sessions WHERE task_id = ? AND retried_as IS NULL AND outcome IS NOT NULL ORDER BY sample_index"""


def places_over(db: sqlite3.Connection, task_id: str) -> tuple[Facts, ...]:
    """The finished sessions that hold the task's places, in order of sample_index: the facts by which a group
    is judged, at its end and before.
    """
    return tuple(_facts(*row) for row in db.execute(OVER, (task_id,)).fetchall())


def _facts(
    session_id: str,
    sample_index: int,
    outcome: bytes,
    reward: float | None,
    trainable: int | None,
    staleness: int | None,
) -> Facts:
    return Facts(
        session_id=session_id,
        sample_index=sample_index,
        outcome=evolve(structure(read_json(outcome), Outcome), log_tail=None),
        reward=reward,
        trainable_tokens=trainable,
        staleness=staleness,
    )


def end_task(db: sqlite3.Connection, task_id: str, now: float) -> None:
    """Write the group's and the task's events if that was the last of the task's places."""
    task = db.execute("SELECT group_id, submitted, spec FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    if task is None or db.execute(OPEN, (task_id,)).fetchone() is not None:
        return
    group_id, submitted, spec = task
    group = judged(_group_spec(spec), places_over(db, task_id), task_id=task_id, group_id=group_id)
    statuses = [member.status for member in group.members]
    counts: dict[str, Json] = {status: statuses.count(status) for status in dict.fromkeys(statuses)}
    times: dict[str, Json] = {"submitted": submitted, "finished": now}
    _insert(db, "group", group_json(group), now)
    _insert(db, "task", {"task_id": task_id, "group_id": group_id, "counts": counts, **times}, now)


@frozen(kw_only=True)
class _OfGroup:
    """The part of a task's spec used here. A spec from before `group` existed has the defaults."""

    group: GroupSpec = field(factory=GroupSpec)


def _group_spec(spec: bytes) -> GroupSpec:
    return structure(read_json(spec), _OfGroup).group


def _insert(db: sqlite3.Connection, kind: str, body: dict[str, Json], now: float) -> None:
    row = (kind, f"{kind}:{body['task_id']}", body["task_id"], body["group_id"], dump_json(body), now)
    db.execute("INSERT INTO events (kind, key, task_id, group_id, body, at) VALUES (?, ?, ?, ?, ?, ?)", row)
    pending_callbacks.add_pending(db, kind, str(body["task_id"]))


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
    row = (task_id, group_id, idempotency_key, now, body)
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
        "INSERT OR IGNORE INTO tasks (task_id, group_id, idempotency_key, submitted, spec) VALUES (?, ?, ?,"
        " ?, ?)",
        row,
    )
    pending_callbacks.remember_callback(db, str(row[0]), target)
    for index, session_id in enumerate(session_ids):
        _insert_session(db, session_id=session_id, task_id=str(row[0]), sample_index=index)


def _insert_session(
    db: sqlite3.Connection, *, session_id: str, task_id: str, sample_index: int, attempt: int = 0
) -> None:
    life = "(SELECT value FROM meta WHERE name = 'life')"
    db.execute(
        "INSERT OR IGNORE INTO sessions (session_id, task_id, sample_index, attempt, life) VALUES (?, ?, ?,"
        f" ?, {life})",
        (session_id, task_id, sample_index, attempt),
    )


def cancel_entry(task_id: str, *, now: float) -> Entry:
    return Entry(ROW_BYTES, partial(_cancel_task, row=(now, task_id)))


def _cancel_task(db: sqlite3.Connection, *, row: tuple[object, ...]) -> None:
    db.execute("UPDATE tasks SET cancelled = ? WHERE task_id = ? AND cancelled IS NULL", row)


def session_entry(identity: Identity) -> Entry:
    body = dump_json(plain(identity))
    return Entry(ROW_BYTES + len(body), partial(_start_session, identity=identity, body=body))


def _start_session(db: sqlite3.Connection, *, identity: Identity, body: bytes) -> None:
    whose = {"session_id": identity.session_id, "task_id": identity.task_id}
    _insert_session(db, **whose, sample_index=identity.sample_index, attempt=identity.attempt)
    db.execute("UPDATE sessions SET identity = ? WHERE session_id = ?", (body, identity.session_id))


# ── turns and trajectories ────────────────────────────────────────────────────


def turn_entry(turn: Turn) -> Entry:
    row = (turn.session_id, turn.index, len(turn.sampled), pack_turn(turn))
    return Entry(ROW_BYTES + len(row[3]), partial(_insert_turn, row=row))


def _insert_turn(db: sqlite3.Connection, *, row: tuple[object, ...]) -> None:
    db.execute("INSERT OR REPLACE INTO turns (session_id, turn, sampled, body) VALUES (?, ?, ?, ?)", row)


@frozen(kw_only=True)
class _Published:
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


def trajectory_entry(trajectory: Trajectory, *, now: float) -> Entry:
    published = _published(trajectory, now)
    return Entry(2 * ROW_BYTES + len(published.body), partial(_publish, it=published))


def replaced_entry(trajectory: Trajectory, successor: Identity, *, now: float) -> Entry:
    """A session that lost its place and the one that holds it now. They are one entry, so that a crash of the
    node cannot separate them.
    """
    published, began = _published(trajectory, now), session_entry(successor)
    return Entry(
        2 * ROW_BYTES + len(published.body) + began.size, partial(_replace, it=published, begin=began.apply)
    )


def _published(trajectory: Trajectory, now: float) -> _Published:
    return _Published(
        session_id=trajectory.session_id,
        task_id=trajectory.task_id,
        group_id=trajectory.group_id,
        sample_index=trajectory.sample_index,
        attempt=trajectory.attempt,
        outcome=trajectory.outcome,
        reward=trajectory.reward,
        trainable=trajectory.trainable_tokens,
        staleness=trajectory.staleness,
        body=pack_trajectory(trajectory),
        now=now,
        retried_as=trajectory.retried_as,
    )


def _publish(db: sqlite3.Connection, *, it: _Published) -> None:
    if _is_first(db, it):
        end_task(db, it.task_id, it.now)


def _replace(db: sqlite3.Connection, *, it: _Published, begin: Callable[[sqlite3.Connection], None]) -> None:
    if _is_first(db, it):
        begin(db)


def _is_first(db: sqlite3.Connection, it: _Published) -> bool:
    """Write a session's trajectory. Only the first is kept, because its event may have been read. False for a
    later one.
    """
    _insert_session(
        db, session_id=it.session_id, task_id=it.task_id, sample_index=it.sample_index, attempt=it.attempt
    )
    row = (
        dump_json(plain(it.outcome)),
        it.reward,
        it.trainable,
        it.staleness,
        it.now,
        it.retried_as,
        it.session_id,
    )
    over = "outcome = ?, reward = ?, trainable = ?, staleness = ?, finished = ?, retried_as = ?"
    changed = db.execute(f"UPDATE sessions SET {over} WHERE session_id = ? AND outcome IS NULL", row)
    if changed.rowcount == 0:
        return False
    db.execute("INSERT INTO trajectories (session_id, body) VALUES (?, ?)", (it.session_id, it.body))
    event = (
        it.kind,
        f"{it.kind}:{it.session_id}",
        it.task_id,
        it.group_id,
        it.session_id,
        it.outcome.status,
        it.reward,
        it.now,
    )
    db.execute(
        "INSERT INTO events (kind, key, task_id, group_id, session_id, outcome, reward, at) VALUES (?, ?, ?,"
        " ?, ?, ?, ?, ?)",
        event,
    )
    pending_callbacks.add_pending(db, it.kind, it.task_id)
    return True


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

COLUMNS = "SELECT version, at, body FROM weights "


@frozen(kw_only=True)
class WeightsRow:
    """One version of the weights, served since `at` (seconds since the epoch)."""

    version: str
    at: float
    body: Json


def weights_entry(version: str, body: Mapping[str, Json], *, now: float) -> Entry:
    row = (version, now, dump_json(dict(body)))
    return Entry(ROW_BYTES + len(row[2]), partial(_insert_weights, row=row))


def _insert_weights(db: sqlite3.Connection, *, row: tuple[str, float, bytes]) -> None:
    if db.execute("SELECT 1 FROM weights WHERE version = ?", row[:1]).fetchone() is None:
        db.execute("INSERT INTO weights (version, at, body) VALUES (?, ?, ?)", row)


def weights(db: sqlite3.Connection, limit: int) -> tuple[WeightsRow, ...]:
    """Newest first."""
    return tuple(_row(*row) for row in db.execute(COLUMNS + "ORDER BY number DESC LIMIT ?", (limit,)))


def weights_of(db: sqlite3.Connection, version: str) -> WeightsRow | None:
    row = db.execute(COLUMNS + "WHERE version = ?", (version,)).fetchone()
    return None if row is None else _row(*row)


def _row(version: str, at: float, body: bytes) -> WeightsRow:
    return WeightsRow(version=version, at=at, body=read_json(body))
