"""What is asked of the journal: plain functions of a read connection, each within one snapshot, run in a thread by `Journal`.

The rule for whoever edits it: a page is bounded in bytes, because one trajectory may be tens of megabytes as JSON; and a reader whose
filters pass over everything must still move on.
"""

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from polarnode.merge.roles import recast
from polarnode.merge.trajectory import Identity
from polarnode.records import Outcome, Trajectory, Turn
from polarnode.shell.journal.recent import Recent
from polarnode.shell.journal.schema import snapshot
from polarnode.shell.journal.values import GONE, EventPage, Filters, SessionRecord, StoredEvent, TaskRecord, Telling, UnfinishedSession
from polarnode.tasks import TaskSpec
from polarnode.wire import read_json, structure, unpack_trajectory, unpack_turn

PAGE_BYTES = 1 << 20  # of JSON a page: what one slow stream may hold in memory, beside one trajectory; a page costs 0.2 ms, its JSON 5

TASK = "SELECT task_id, group_id, idempotency_key, submitted, cancelled, spec FROM tasks "
SESSION = """
SELECT session_id, task_id, sample_index, attempt, retried_as, outcome, reward, finished,
    (SELECT count(*) FROM turns WHERE turns.session_id = sessions.session_id),
    (SELECT coalesce(sum(sampled), 0) FROM turns WHERE turns.session_id = sessions.session_id)
FROM sessions """


# ── tasks and sessions ────────────────────────────────────────────────────────


def task(db: sqlite3.Connection, task_id: str) -> TaskRecord | None:
    with snapshot(db):
        row = db.execute(TASK + "WHERE task_id = ?", (task_id,)).fetchone()
        return None if row is None else _task(db, row)


def task_of_key(db: sqlite3.Connection, idempotency_key: str) -> TaskRecord | None:
    with snapshot(db):
        row = db.execute(TASK + "WHERE idempotency_key = ? ORDER BY number LIMIT 1", (idempotency_key,)).fetchone()
        return None if row is None else _task(db, row)


def tasks(db: sqlite3.Connection, limit: int, before: str | None) -> tuple[TaskRecord, ...]:
    """Newest first; `before` is the last task of the page before."""
    older = "WHERE ?1 IS NULL OR number < (SELECT number FROM tasks WHERE task_id = ?1) "
    with snapshot(db):
        rows = db.execute(TASK + older + "ORDER BY number DESC LIMIT ?2", (before, limit)).fetchall()
        return tuple(_task(db, row) for row in rows)


def session(db: sqlite3.Connection, session_id: str) -> SessionRecord | None:
    row = db.execute(SESSION + "WHERE session_id = ?", (session_id,)).fetchone()
    return None if row is None else _session(row)


def _task(db: sqlite3.Connection, row: Sequence[Any]) -> TaskRecord:
    task_id, group_id, key, submitted, cancelled, spec = row
    sessions = db.execute(SESSION + "WHERE task_id = ? AND retried_as IS NULL ORDER BY sample_index", (task_id,)).fetchall()
    return TaskRecord(
        task_id=task_id,
        group_id=group_id,
        idempotency_key=key,
        submitted=submitted,
        spec=_spec(spec),
        sessions=tuple(_session(one) for one in sessions),
        cancelled=cancelled,
    )


def _spec(body: bytes) -> TaskSpec:
    # Not `read_task`: what was accepted once stays readable when a later version refuses it.
    return structure(read_json(body), TaskSpec)


def _session(row: Sequence[Any]) -> SessionRecord:
    session_id, task_id, sample_index, attempt, retried_as, outcome, reward, finished, turn_count, sampled = row
    return SessionRecord(
        session_id=session_id,
        task_id=task_id,
        sample_index=sample_index,
        outcome=None if outcome is None else structure(read_json(outcome), Outcome),
        reward=reward,
        turns=turn_count,
        sampled_tokens=sampled,
        finished=finished,
        attempt=attempt,
        retried_as=retried_as,
    )


# ── turns and trajectories ────────────────────────────────────────────────────


def turns(db: sqlite3.Connection, session_id: str) -> tuple[Turn, ...]:
    rows = db.execute("SELECT body FROM turns WHERE session_id = ? ORDER BY turn", (session_id,))
    return tuple(unpack_turn(body) for (body,) in rows)


def trajectory(db: sqlite3.Connection, session_id: str) -> Trajectory | None:
    with snapshot(db):
        return _trajectory(db, session_id)


def _trajectory(db: sqlite3.Connection, session_id: str) -> Trajectory | None:
    row = db.execute("SELECT body FROM trajectories WHERE session_id = ?", (session_id,)).fetchone()
    return None if row is None else unpack_trajectory(row[0], recast(turns(db, session_id)))


def unfinished(db: sqlite3.Connection) -> tuple[UnfinishedSession, ...]:
    """Sessions of earlier lives without a trajectory, in the order they were taken."""
    asked = "SELECT session_id, task_id, sample_index, identity FROM sessions WHERE outcome IS NULL AND life < (SELECT value FROM meta WHERE name = 'life') ORDER BY rowid"
    with snapshot(db):
        return tuple(_unfinished(db, *row) for row in db.execute(asked).fetchall())


def _unfinished(db: sqlite3.Connection, session_id: str, task_id: str, sample_index: int, identity: bytes | None) -> UnfinishedSession:
    row = db.execute("SELECT spec, group_id, cancelled FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    spec = None if row is None else _spec(row[0])
    if identity is not None:
        who = structure(read_json(identity), Identity)
    else:  # killed between taking the task and naming its sessions
        who = Identity(
            session_id=session_id,
            task_id=task_id,
            group_id=task_id if row is None else row[1],
            sample_index=sample_index,
            harness="" if spec is None else spec.harness.name,
            harness_version=None,
            model="",
            node="",
        )
    return UnfinishedSession(identity=who, spec=spec, turns=turns(db, session_id), cancelled=row is not None and row[2] is not None)


# ── events ────────────────────────────────────────────────────────────────────


def events(db: sqlite3.Connection, after: int, limit: int, filters: Filters, telling: Telling, recent: Recent) -> EventPage:
    """Up to `limit` events after `after`, fewer when they are large; at least one when there is one. `recent` has what was just made."""
    where, values = _where(filters)
    with snapshot(db):
        (last,) = db.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'events'").fetchone()
        (pruned,) = db.execute("SELECT value FROM meta WHERE name = 'pruned'").fetchone()
        rows = db.execute(
            f"SELECT seq, kind, key, session_id, body FROM events WHERE seq > ? {where} ORDER BY seq LIMIT ?", (after, *values, limit)
        ).fetchall()
        found: list[StoredEvent] = []
        size = 0
        for row in rows:
            found.append(_event(db, telling, recent, *row))
            size += len(found[-1].body)
            if size > PAGE_BYTES:
                break
    whole = len(found) == len(rows) < limit
    seen = max(after, last) if whole else found[-1].seq
    return EventPage(events=tuple(found), seen=seen, first_seq=pruned + 1, last_seq=last)


def _where(filters: Filters) -> tuple[str, list[object]]:
    clauses: list[tuple[str, object]] = [
        ("task_id = ?", filters.task_id),
        ("group_id = ?", filters.group_id),
        ("(outcome IS NULL OR outcome = ?)", filters.outcome),  # groups and tasks have none
        ("(outcome IS NULL OR reward >= ?)", filters.min_reward),
    ]
    said = [(clause, value) for clause, value in clauses if value is not None]
    kinds = ", ".join("?" * len(filters.kinds))
    where = " ".join(f"AND {clause}" for clause, _ in said)
    return f"{where} AND kind IN ({kinds})", [*(value for _, value in said), *filters.kinds]


def _event(
    db: sqlite3.Connection, telling: Telling, recent: Recent, seq: int, kind: Any, key: str, session_id: str | None, body: bytes | None
) -> StoredEvent:
    """A trajectory is stored packed and told when it is read; a group or task is stored as JSON."""
    if body is None:
        write = telling.write
        body = b"" if write is None else recent.get((seq, telling.name), lambda: _trajectory_body(db, write, session_id or ""))
    return StoredEvent(seq=seq, kind=kind, key=key, body=body)


def _trajectory_body(db: sqlite3.Connection, write: Callable[[Trajectory], bytes], session_id: str) -> bytes:
    whole = _trajectory(db, session_id)
    return GONE if whole is None else write(whole)
