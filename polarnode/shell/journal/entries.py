"""What is written: each entry a function that is given the writer's connection inside a transaction.

The rules for whoever edits it. An entry may be applied twice, after a commit that failed or was only partly retried: each is idempotent, and
keeps nothing of its own. Values are packed when they are enqueued, so that a value that can not be packed fails where it was made.
"""

import sqlite3
from collections.abc import Callable
from functools import partial

from attrs import frozen

from polarnode.conversation import Json
from polarnode.merge.trajectory import Identity
from polarnode.records import Outcome, Trajectory, Turn
from polarnode.tasks import TaskSpec
from polarnode.wire import dump_json, pack_trajectory, pack_turn, plain, read_json, structure, task_json

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
    return Entry(ROW_BYTES * (1 + len(session_ids)) + len(body), partial(_insert_task, row=row, session_ids=session_ids))


def _insert_task(db: sqlite3.Connection, *, row: tuple[object, ...], session_ids: tuple[str, ...]) -> None:
    db.execute("INSERT OR IGNORE INTO tasks (task_id, group_id, idempotency_key, submitted, spec) VALUES (?, ?, ?, ?, ?)", row)
    for index, session_id in enumerate(session_ids):
        _insert_session(db, session_id=session_id, task_id=str(row[0]), sample_index=index)


def _insert_session(db: sqlite3.Connection, *, session_id: str, task_id: str, sample_index: int) -> None:
    db.execute(
        "INSERT OR IGNORE INTO sessions (session_id, task_id, sample_index, life) VALUES (?, ?, ?, (SELECT value FROM meta WHERE name = 'life'))",
        (session_id, task_id, sample_index),
    )


def session_entry(identity: Identity) -> Entry:
    body = dump_json(plain(identity))
    return Entry(ROW_BYTES + len(body), partial(_start_session, identity=identity, body=body))


def _start_session(db: sqlite3.Connection, *, identity: Identity, body: bytes) -> None:
    _insert_session(db, session_id=identity.session_id, task_id=identity.task_id, sample_index=identity.sample_index)
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
    outcome: Outcome
    reward: float | None
    body: bytes
    now: float


def trajectory_entry(trajectory: Trajectory, *, now: float) -> Entry:
    published = _Published(
        session_id=trajectory.session_id,
        task_id=trajectory.task_id,
        group_id=trajectory.group_id,
        sample_index=trajectory.sample_index,
        outcome=trajectory.outcome,
        reward=trajectory.reward,
        body=pack_trajectory(trajectory),
        now=now,
    )
    return Entry(2 * ROW_BYTES + len(published.body), partial(_publish, it=published))


def _publish(db: sqlite3.Connection, *, it: _Published) -> None:
    """The first trajectory of a session stands: its event may have been read."""
    _insert_session(db, session_id=it.session_id, task_id=it.task_id, sample_index=it.sample_index)
    outcome = dump_json(plain(it.outcome))
    row = (outcome, it.reward, it.now, it.session_id)
    changed = db.execute("UPDATE sessions SET outcome = ?, reward = ?, finished = ? WHERE session_id = ? AND outcome IS NULL", row)
    if changed.rowcount == 0:
        return
    db.execute("INSERT INTO trajectories (session_id, body) VALUES (?, ?)", (it.session_id, it.body))
    event = ("trajectory", f"trajectory:{it.session_id}", it.task_id, it.group_id, it.session_id, it.outcome.status, it.reward)
    db.execute("INSERT INTO events (kind, key, task_id, group_id, session_id, outcome, reward) VALUES (?, ?, ?, ?, ?, ?, ?)", event)
    _end_task(db, it)


def _end_task(db: sqlite3.Connection, it: _Published) -> None:
    """The group's and the task's events, when that was the last of its sessions."""
    task = db.execute("SELECT group_id, submitted FROM tasks WHERE task_id = ?", (it.task_id,)).fetchone()
    sessions = db.execute(
        "SELECT session_id, sample_index, outcome, reward FROM sessions WHERE task_id = ? ORDER BY sample_index", (it.task_id,)
    ).fetchall()
    if task is None or any(outcome is None for _, _, outcome, _ in sessions):
        return
    listed: list[Json] = [_session_json(*row) for row in sessions]
    whose: dict[str, Json] = {"task_id": it.task_id, "group_id": task[0]}
    rewards: list[Json] = [reward for *_, reward in sessions]
    _insert_end(db, "group", whose | {"sessions": listed, "rewards": rewards})
    _insert_end(db, "task", whose | {"counts": _counts(sessions), "submitted": task[1], "finished": it.now})


def _session_json(session_id: str, sample_index: int, outcome: bytes, reward: float | None) -> Json:
    return {"session_id": session_id, "sample_index": sample_index, "status": _status(outcome), "reward": reward}


def _counts(sessions: list[tuple[str, int, bytes, float | None]]) -> dict[str, Json]:
    statuses = [_status(outcome) for _, _, outcome, _ in sessions]
    return {status: statuses.count(status) for status in dict.fromkeys(statuses)}


def _status(outcome: bytes) -> str:
    return structure(read_json(outcome), Outcome).status


def _insert_end(db: sqlite3.Connection, kind: str, body: dict[str, Json]) -> None:
    row = (kind, f"{kind}:{body['task_id']}", body["task_id"], body["group_id"], dump_json(body))
    db.execute("INSERT INTO events (kind, key, task_id, group_id, body) VALUES (?, ?, ?, ?, ?)", row)


# ── consumers ─────────────────────────────────────────────────────────────────


def acknowledge_entry(consumer: str, seq: int) -> Entry:
    return Entry(ROW_BYTES, partial(_acknowledge, consumer=consumer, seq=seq))


def _acknowledge(db: sqlite3.Connection, *, consumer: str, seq: int) -> None:
    """Forward only, and never beyond what there is: a position from the future would skip events that are yet to come."""
    capped = "min(?, (SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'events'))"
    db.execute(
        f"INSERT INTO positions VALUES (?, {capped}) ON CONFLICT (consumer) DO UPDATE SET seq = max(seq, excluded.seq)",
        (consumer, seq),
    )
