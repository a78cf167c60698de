"""What is written: each entry a function that is given the writer's connection inside a transaction.

The rules for whoever edits it. An entry may be applied twice, after a commit that failed or was only partly retried: each is idempotent, and
keeps nothing of its own. Values are packed when they are enqueued, so that a value that can not be packed fails where it was made.
"""

import sqlite3
from collections.abc import Callable
from functools import partial

from attrs import frozen

from polarnode.merge.trajectory import Identity
from polarnode.records import Outcome, Trajectory, Turn
from polarnode.shell.journal import outgoing
from polarnode.shell.journal.ends import end_task
from polarnode.tasks import TaskSpec
from polarnode.wire import dump_json, pack_trajectory, pack_turn, plain, task_json

ROW_BYTES = 256  # what a row costs beside its blob: ids, numbers, two index entries


@frozen
class Entry:
    """One thing to write; `size` is about the bytes it holds in memory until then."""

    size: int
    apply: Callable[[sqlite3.Connection], None]


# ── tasks and sessions ────────────────────────────────────────────────────────


def task_entry(spec: TaskSpec, *, task_id: str, session_ids: tuple[str, ...], idempotency_key: str | None, now: float) -> Entry:
    body = dump_json(task_json(spec))
    group_id = spec.group_id or task_id
    row = (task_id, group_id, idempotency_key, now, body)
    apply = partial(_insert_task, row=row, session_ids=session_ids, wanted=outgoing.wanted_of(spec))
    return Entry(ROW_BYTES * (1 + len(session_ids)) + len(body), apply)


def _insert_task(db: sqlite3.Connection, *, row: tuple[object, ...], session_ids: tuple[str, ...], wanted: outgoing.Wanted | None) -> None:
    db.execute("INSERT OR IGNORE INTO tasks (task_id, group_id, idempotency_key, submitted, spec) VALUES (?, ?, ?, ?, ?)", row)
    outgoing.remember_callback(db, str(row[0]), wanted)
    for index, session_id in enumerate(session_ids):
        _insert_session(db, session_id=session_id, task_id=str(row[0]), sample_index=index)


def _insert_session(db: sqlite3.Connection, *, session_id: str, task_id: str, sample_index: int, attempt: int = 0) -> None:
    life = "(SELECT value FROM meta WHERE name = 'life')"
    db.execute(
        f"INSERT OR IGNORE INTO sessions (session_id, task_id, sample_index, attempt, life) VALUES (?, ?, ?, ?, {life})",
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
    """What the tables need of a trajectory, and its bytes."""

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
    """In one entry, so that no death of the node lies between a session that has lost its place and the one that holds it now."""
    published, began = _published(trajectory, now), session_entry(successor)
    return Entry(2 * ROW_BYTES + len(published.body) + began.size, partial(_replace, it=published, begin=began.apply))


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
    """Write a session's trajectory. The first one stands, for its event may have been read; False for a later one."""
    _insert_session(db, session_id=it.session_id, task_id=it.task_id, sample_index=it.sample_index, attempt=it.attempt)
    row = (dump_json(plain(it.outcome)), it.reward, it.trainable, it.staleness, it.now, it.retried_as, it.session_id)
    over = "outcome = ?, reward = ?, trainable = ?, staleness = ?, finished = ?, retried_as = ?"
    changed = db.execute(f"UPDATE sessions SET {over} WHERE session_id = ? AND outcome IS NULL", row)
    if changed.rowcount == 0:
        return False
    db.execute("INSERT INTO trajectories (session_id, body) VALUES (?, ?)", (it.session_id, it.body))
    event = (it.kind, f"{it.kind}:{it.session_id}", it.task_id, it.group_id, it.session_id, it.outcome.status, it.reward, it.now)
    db.execute("INSERT INTO events (kind, key, task_id, group_id, session_id, outcome, reward, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", event)
    outgoing.owe(db, it.kind, it.task_id)
    return True
