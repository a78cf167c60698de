"""Reads of the journal: plain functions of a read connection, each within one snapshot, which `Journal` runs
in threads; and a cache of recently encoded events.

A page of events is bounded in bytes, because one trajectory may be tens of megabytes as JSON. A reader whose
filters match nothing must still advance. Events never change, so cached bytes stay valid.
"""

import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from attrs import define, field

from polarnode.core.codec.json import read_json, structure
from polarnode.core.codec.packing import unpack_trajectory, unpack_turn
from polarnode.core.status import SessionRecord
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Outcome, Trajectory, Turn
from polarnode.journal.schema import snapshot
from polarnode.journal.values import (
    PRUNED,
    EventPage,
    Filters,
    StoredEvent,
    TaskRecord,
    TrajectoryEncoder,
    UnfinishedSession,
)
from polarnode.merge.roles import reclassify_roles
from polarnode.merge.trajectory import Identity

# ── cache ────────────────────────────────────────────────────────────

# a few seconds of a busy node, which is how far readers that keep up are apart; or a few of its longest
# sessions
KEPT_BYTES = 64 << 20


@define(eq=False)
class Recent:
    """A cache of bytes by key, bounded in bytes, which drops the least recently used first.

    Sixteen readers of one stream need the same bytes. Threads may call it at once: one waits for what
    another makes, and no two wait for each other.
    """

    limit: int = KEPT_BYTES
    held: int = field(default=0, init=False)
    _kept: OrderedDict[Hashable, bytes] = field(factory=OrderedDict, init=False)
    _making: dict[Hashable, threading.Lock] = field(factory=dict, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def get(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """The bytes of `key`, made by `make` where they are not cached; one caller at a time makes them."""
        with self._lock:
            if (found := self._found(key)) is not None:
                return found
            making = self._making.setdefault(key, threading.Lock())
        with making:
            try:
                return self._found_or_made(key, make)
            finally:
                with self._lock:
                    self._making.pop(key, None)  # threads that wait on this lock hold a reference

    def _found_or_made(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        with self._lock:
            if (found := self._found(key)) is not None:
                return found
        made = make()
        with self._lock:
            self._keep(key, made)
        return made

    def _found(self, key: Hashable) -> bytes | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def _keep(self, key: Hashable, value: bytes) -> None:
        """Keep a value, unless it is larger than half of the cache: it would push out what others read."""
        if len(value) > self.limit // 2 or key in self._kept:
            return
        self._kept[key] = value
        self.held += len(value)
        while self.held > self.limit:
            _, dropped = self._kept.popitem(last=False)
            self.held -= len(dropped)


# ── reads ────────────────────────────────────────────────────────────

# of JSON a page: what one slow stream may hold in memory, beside one trajectory; a page costs 0.2 ms, its
# JSON 5
PAGE_BYTES = 1 << 20

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
        row = db.execute(
            TASK + "WHERE idempotency_key = ? ORDER BY number LIMIT 1", (idempotency_key,)
        ).fetchone()
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
    sessions = db.execute(
        SESSION + "WHERE task_id = ? AND retried_as IS NULL ORDER BY sample_index", (task_id,)
    ).fetchall()
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
    session_id, task_id, sample_index, attempt, retried_as, outcome, reward, finished, turn_count, sampled = (
        row
    )
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
    return None if row is None else unpack_trajectory(row[0], reclassify_roles(turns(db, session_id)))


def unfinished(db: sqlite3.Connection) -> tuple[UnfinishedSession, ...]:
    """Sessions of earlier runs without a trajectory, in the order they were submitted."""
    query = (
        "SELECT session_id, task_id, sample_index, identity FROM sessions WHERE outcome IS NULL AND life <"
        " (SELECT value FROM meta WHERE name = 'life') ORDER BY rowid"
    )
    with snapshot(db):
        return tuple(_unfinished(db, *row) for row in db.execute(query).fetchall())


def _unfinished(
    db: sqlite3.Connection, session_id: str, task_id: str, sample_index: int, identity: bytes | None
) -> UnfinishedSession:
    row = db.execute("SELECT spec, group_id, cancelled FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    spec = None if row is None else _spec(row[0])
    if identity is not None:
        found = structure(read_json(identity), Identity)
    else:  # killed between taking the task and naming its sessions
        found = Identity(
            session_id=session_id,
            task_id=task_id,
            group_id=task_id if row is None else row[1],
            sample_index=sample_index,
            harness="" if spec is None else spec.harness.name,
            harness_version=None,
            model="",
            node="",
        )
    return UnfinishedSession(
        identity=found,
        spec=spec,
        turns=turns(db, session_id),
        cancelled=row is not None and row[2] is not None,
    )


# ── events ────────────────────────────────────────────────────────────────────


def events(
    db: sqlite3.Connection,
    after: int,
    limit: int,
    filters: Filters,
    encoder: TrajectoryEncoder,
    recent: Recent,
) -> EventPage:
    """Up to `limit` events after `after`, fewer when they are large; at least one when there is one. `recent`
    caches their bodies.
    """
    where, values = _where(filters)
    with snapshot(db):
        (last,) = db.execute(
            "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'events'"
        ).fetchone()
        (pruned,) = db.execute("SELECT value FROM meta WHERE name = 'pruned'").fetchone()
        rows = db.execute(
            f"SELECT seq, kind, key, session_id, body FROM events WHERE seq > ? {where} ORDER BY seq LIMIT ?",
            (after, *values, limit),
        ).fetchall()
        found: list[StoredEvent] = []
        size = 0
        for row in rows:
            found.append(_event(db, encoder, recent, *row))
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
    used = [(clause, value) for clause, value in clauses if value is not None]
    kinds = ", ".join("?" * len(filters.kinds))
    where = " ".join(f"AND {clause}" for clause, _ in used)
    return f"{where} AND kind IN ({kinds})", [*(value for _, value in used), *filters.kinds]


def _event(
    db: sqlite3.Connection,
    encoder: TrajectoryEncoder,
    recent: Recent,
    seq: int,
    kind: Any,
    key: str,
    session_id: str | None,
    body: bytes | None,
) -> StoredEvent:
    """A trajectory is stored packed and encoded when it is read; a group or task is stored as JSON."""
    if body is None:
        encode = encoder.encode
        body = (
            b""
            if encode is None
            else recent.get((seq, encoder.name), lambda: _trajectory_body(db, encode, session_id or ""))
        )
    return StoredEvent(seq=seq, kind=kind, key=key, body=body)


def _trajectory_body(db: sqlite3.Connection, encode: Callable[[Trajectory], bytes], session_id: str) -> bytes:
    whole = _trajectory(db, session_id)
    return PRUNED if whole is None else encode(whole)
