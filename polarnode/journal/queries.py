"""Reads of the journal, and a cache of recently encoded events.

The reads are plain functions of a read connection, each within one snapshot; `JournalReader.query` runs them
in threads.
A page of events is bounded in bytes, because one trajectory may be tens of megabytes as JSON. A reader whose
filters match nothing must still advance. Events never change, so cached bytes stay valid.
"""

import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, Final, get_args

from attrs import define, evolve, field

from polarnode.core.codec.json import dump_json, read_json, structure
from polarnode.core.codec.packing import unpack_trajectory, unpack_turn
from polarnode.core.conversation import Json
from polarnode.core.errors import Unreadable
from polarnode.core.status import SessionRecord
from polarnode.core.task import HarnessSpec, TaskSpec
from polarnode.core.trajectory import Damaged, Outcome, Trajectory, Turn, Verdict
from polarnode.groups.group import SessionFacts, group_json, judged
from polarnode.journal.damage import (
    Damage,
    decode_boundary,
    encode_trajectory,
    is_corrupt,
    note_damage,
    page_boundary,
    verify_checksum,
)
from polarnode.journal.schema import FORKED_FROM_COLUMN, read_forked_from, read_snapshot
from polarnode.journal.values import (
    PRUNED_BODY,
    EventFilters,
    EventKind,
    EventPage,
    StoredEvent,
    TaskRecord,
    TrajectoryEncoder,
    UnfinishedSession,
    unreadable_event,
)
from polarnode.merge.trajectory import Identity, Result, assemble, requested_fork

# ── cache ────────────────────────────────────────────────────────────

# The cache holds a few seconds of a busy node, which is how far readers that keep up are apart, or a few of
# its longest sessions.
CACHE_BYTES = 64 << 20


@define(eq=False)
class ByteCache:
    """A cache of bytes by key, bounded in bytes, which drops the least recently used first.

    Sixteen readers of one stream need the same bytes. Several threads may use the cache: one waits for the
    bytes that another makes, and no two wait for each other.
    """

    limit: int = CACHE_BYTES
    cached_bytes: int = field(default=0, init=False)
    _cached: OrderedDict[Hashable, bytes] = field(factory=OrderedDict, init=False)
    _locks_by_key: dict[Hashable, threading.Lock] = field(factory=dict, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def get(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """The bytes of `key`. Where they are not cached `make` makes them, for one caller at a time."""
        with self._lock:
            if (found := self._look_up(key)) is not None:
                return found
            making = self._locks_by_key.setdefault(key, threading.Lock())
        with making:
            try:
                return self._get_or_make(key, make)
            finally:
                with self._lock:
                    self._locks_by_key.pop(
                        key, None
                    )  # threads that wait for this lock keep a reference to it

    def _get_or_make(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        with self._lock:
            if (found := self._look_up(key)) is not None:
                return found
        made = make()
        with self._lock:
            self._store(key, made)
        return made

    def _look_up(self, key: Hashable) -> bytes | None:
        found = self._cached.get(key)
        if found is not None:
            self._cached.move_to_end(key)
        return found

    def _store(self, key: Hashable, value: bytes) -> None:
        """Keep a value, unless it is larger than half of the cache and would push out what others read."""
        if len(value) > self.limit // 2 or key in self._cached:
            return
        self._cached[key] = value
        self.cached_bytes += len(value)
        while self.cached_bytes > self.limit:
            _, dropped = self._cached.popitem(last=False)
            self.cached_bytes -= len(dropped)


# ── reads ────────────────────────────────────────────────────────────

# Most bytes of JSON in a page, besides one trajectory: a slow stream may hold them in memory. A page costs
# 0.2 ms, and its JSON 5 ms.
PAGE_BYTES = 1 << 20

SELECT_TASK = "SELECT task_id, group_id, idempotency_key, submitted, spec, checksum, cancelled FROM tasks "
SELECT_SESSION = f"""
SELECT session_id, task_id, sample_index, attempt, outcome, reward, trainable, staleness, finished,
    retried_as, outcome_checksum,
    (SELECT count(*) FROM turns WHERE turns.session_id = sessions.session_id),
    (SELECT coalesce(sum(sampled), 0) FROM turns WHERE turns.session_id = sessions.session_id AND turn >=
        coalesce(json_extract({FORKED_FROM_COLUMN}, '$.got'), 0)),
    {FORKED_FROM_COLUMN}
FROM sessions """


# ── tasks and sessions ────────────────────────────────────────────────────────


def task(db: sqlite3.Connection, task_id: str) -> TaskRecord | None:
    with read_snapshot(db):
        row = db.execute(SELECT_TASK + "WHERE task_id = ?", (task_id,)).fetchone()
        return None if row is None else _read_task(db, row)


def recorded_task(db: sqlite3.Connection, task_id: str) -> TaskRecord:
    """A task that is known to exist, read within the caller's snapshot."""
    return _read_task(db, db.execute(SELECT_TASK + "WHERE task_id = ?", (task_id,)).fetchone())


def task_of_key(db: sqlite3.Connection, idempotency_key: str) -> TaskRecord | None:
    """The first task that was submitted with this idempotency key."""
    with read_snapshot(db):
        row = db.execute(
            SELECT_TASK + "WHERE idempotency_key = ? ORDER BY number LIMIT 1", (idempotency_key,)
        ).fetchone()
        return None if row is None else _read_task(db, row)


def tasks(db: sqlite3.Connection, limit: int = 100, before: str | None = None) -> tuple[TaskRecord, ...]:
    """Tasks, newest first. `before` is the last task_id of the previous page."""
    older = "WHERE ?1 IS NULL OR number < (SELECT number FROM tasks WHERE task_id = ?1) "
    with read_snapshot(db):
        rows = db.execute(SELECT_TASK + older + "ORDER BY number DESC LIMIT ?2", (before, limit)).fetchall()
        return tuple(_read_task(db, row) for row in rows)


def session(db: sqlite3.Connection, session_id: str) -> SessionRecord | None:
    row = db.execute(SELECT_SESSION + "WHERE session_id = ?", (session_id,)).fetchone()
    return None if row is None else read_session(db, row)


def _read_task(db: sqlite3.Connection, row: Sequence[Any]) -> TaskRecord:
    task_id, group_id, key, submitted, _, _, cancelled = row
    spec, damaged = _read_spec(db, row)
    sessions = db.execute(
        SELECT_SESSION + "WHERE task_id = ? AND retried_as IS NULL ORDER BY sample_index", (task_id,)
    ).fetchall()
    return TaskRecord(
        task_id=task_id,
        group_id=group_id,
        idempotency_key=key,
        submitted=submitted,
        spec=spec or UNKNOWN_TASK,
        sessions=tuple(read_session(db, one) for one in sessions),
        cancelled=cancelled,
        damaged=damaged,
    )


# the spec that stands for that of a damaged row
UNKNOWN_TASK: Final = TaskSpec(instruction="", harness=HarnessSpec(name="unknown"))


def _read_spec(db: sqlite3.Connection, row: Sequence[Any]) -> tuple[TaskSpec | None, str | None]:
    """The spec in a row of TASK, or None and why it cannot be read."""
    task_id, group_id, key, submitted, body, expected, _ = row
    try:
        verify_checksum(expected, task_id, group_id, key, submitted, body)
        with decode_boundary():
            # `read_task` is not used: what was accepted once stays readable when a later version refuses it.
            return structure(read_json(body), TaskSpec), None
    except Unreadable as error:
        note_damage(db, Damage(table="tasks", row=str(task_id), reason=str(error)))
        return None, str(error)


def _read_outcome(db: sqlite3.Connection, row: Sequence[Any]) -> tuple[Outcome, float | None]:
    """The outcome and the reward in a row of SESSION whose session is over. A damaged row gives an error
    without a reward.
    """
    session_id, outcome, reward, expected = row[0], row[4], row[5], row[10]
    try:
        # trainable, staleness, finished, retried_as
        verify_checksum(expected, session_id, outcome, reward, *row[6:10])
        with decode_boundary():
            return structure(read_json(outcome), Outcome), reward
    except Unreadable as error:
        note_damage(db, Damage(table="sessions", row=session_id, session_id=session_id, reason=str(error)))
        reason = f"the outcome of the session is lost: its row in the journal is damaged ({error})"
        return Outcome(status="error", boundary="journal", reason=reason), None


def read_session(db: sqlite3.Connection, row: Sequence[Any]) -> SessionRecord:
    session_id, task_id, sample_index, attempt, body, *_, finished, retried_as, _, count, sampled, fork = row
    outcome, reward = (None, None) if body is None else _read_outcome(db, row)
    return SessionRecord(
        session_id=session_id,
        task_id=task_id,
        sample_index=sample_index,
        outcome=outcome,
        reward=reward,
        turns=count,
        sampled_tokens=sampled,
        finished=finished,
        attempt=attempt,
        retried_as=retried_as,
        forked_from=read_forked_from(fork),
    )


# ── turns and trajectories ────────────────────────────────────────────────────

SELECT_TURNS = "SELECT turn, sampled, body, checksum FROM turns WHERE session_id = ?"
MAX_TURN_NUMBER: Final = 1 << 31  # more than any session has


def turns(db: sqlite3.Connection, session_id: str) -> tuple[Turn, ...]:
    """The turns of a session that can be read."""
    return readable_turns(db, session_id)[0]


def readable_turns(
    db: sqlite3.Connection, session_id: str, *, before: int = MAX_TURN_NUMBER
) -> tuple[tuple[Turn, ...], tuple[Damaged, ...]]:
    """The turns of a session with numbers below `before` that can be read, and the names of the others."""
    found: list[Turn] = []
    damaged: list[Damaged] = []
    for number, read in _turn_rows(db, session_id, before):
        try:
            with page_boundary():
                sampled, body, expected = read()
            verify_checksum(expected, session_id, number, sampled, body)
            with decode_boundary():
                found.append(unpack_turn(body))
        except Unreadable as error:
            row = f"{session_id}/{number}"
            note_damage(db, Damage(table="turns", row=row, session_id=session_id, reason=str(error)))
            damaged.append(Damaged(part=f"turns[{number}]", reason=str(error)))
    return tuple(found), tuple(damaged)


Row = Sequence[Any]


def _turn_rows(
    db: sqlite3.Connection, session_id: str, before: int
) -> Iterator[tuple[int, Callable[[], Row]]]:
    """The numbers of the turns, each with a function that gives its row. One query reads all rows up to a
    damaged page. From there on the numbers come from an index, and each row has a query of its own.
    """
    last = -1
    try:
        for number, *rest in db.execute(SELECT_TURNS + " AND turn < ? ORDER BY turn", (session_id, before)):
            last = number
            yield number, partial(tuple, rest)
        return
    except sqlite3.Error as error:
        if not is_corrupt(error):
            raise
    query = "SELECT turn FROM turns WHERE session_id = ? AND turn > ? AND turn < ? ORDER BY turn"
    for (number,) in db.execute(query, (session_id, last, before)).fetchall():
        yield number, partial(_turn_row, db, session_id, number)


def _turn_row(db: sqlite3.Connection, session_id: str, number: int) -> Row:
    return tuple(db.execute(SELECT_TURNS + " AND turn = ?", (session_id, number)).fetchone()[1:])


def trajectory(db: sqlite3.Connection, session_id: str) -> Trajectory | None:
    """A session's trajectory with all its turns. None when the session is unknown, pruned or not over."""
    with read_snapshot(db):
        return _read_trajectory(db, session_id)


def _read_trajectory(db: sqlite3.Connection, session_id: str) -> Trajectory | None:
    """A trajectory without what is damaged. Where the row of a turn is damaged, the other turns remain; where
    the trajectory's own row is damaged, it is built again from its turns.
    """
    query = (
        "SELECT body, trajectories.checksum, retried_as"
        " FROM trajectories LEFT JOIN sessions USING (session_id) WHERE session_id = ?"
    )
    found: tuple[tuple[Turn, ...], tuple[Damaged, ...]] | None = None
    try:
        with page_boundary():
            row = db.execute(query, (session_id,)).fetchone()
        if row is None:
            return None
        found = readable_turns(db, session_id)
        verify_checksum(row[1], session_id, row[0])
        with decode_boundary():
            whole = unpack_trajectory(row[0], found[0], damaged=found[1])
            # Which session has its place now became known after it was packed.
            return whole if row[2] is None else evolve(whole, retried_as=row[2])
    except Unreadable as error:
        note_damage(
            db, Damage(table="trajectories", row=session_id, session_id=session_id, reason=str(error))
        )
        return _rebuild_trajectory(db, session_id, *(found or readable_turns(db, session_id)), error)


def _rebuild_trajectory(
    db: sqlite3.Connection,
    session_id: str,
    kept: tuple[Turn, ...],
    damaged: tuple[Damaged, ...],
    error: Unreadable,
) -> Trajectory | None:
    """Build the trajectory of a session from its turns and its outcome."""
    row = db.execute(SELECT_SESSION + "WHERE session_id = ?", (session_id,)).fetchone()
    if row is None or row[4] is None:
        return None
    session = _read_unfinished(db, *row[:3], *_identity_row(db, session_id))
    outcome, reward = _read_outcome(db, row)
    reason = f"{error}; it was built again from its turns, without metrics, timing and rewards of its parts"
    whole = assemble(
        session.identity,
        session.spec or UNKNOWN_TASK,
        kept,
        Result(
            outcome=outcome, verdict=None if reward is None else Verdict(reward=reward), retried_as=row[9]
        ),
        damaged=(Damaged(part="trajectory", reason=reason), *session.damaged, *damaged),
    )
    return evolve(whole, staleness=row[7])


def check_session(db: sqlite3.Connection, session_id: str) -> tuple[Turn, ...]:
    """Read everything of a session, so that its damaged rows are noted. Returns its turns."""
    with read_snapshot(db):
        row = db.execute(SELECT_SESSION + "WHERE session_id = ?", (session_id,)).fetchone()
        if row is not None:
            read_session(db, row)
            _read_unfinished(db, *row[:3], *_identity_row(db, session_id))
        whole = _read_trajectory(db, session_id)
        return turns(db, session_id) if whole is None else whole.turns


SELECT_IDENTITY = "SELECT attempt, identity, identity_checksum FROM sessions WHERE session_id = ?"


def _identity_row(db: sqlite3.Connection, session_id: str) -> Row:
    found: Row = db.execute(SELECT_IDENTITY, (session_id,)).fetchone()
    return found


SELECT_SESSION_IDENTITY = (
    "SELECT session_id, task_id, sample_index, attempt, identity, identity_checksum FROM sessions WHERE "
)


def identity_of(db: sqlite3.Connection, session_id: str) -> Identity | None:
    """The identity of a session. None where its row or that of its task is damaged."""
    row = db.execute(SELECT_SESSION_IDENTITY + "session_id = ?", (session_id,)).fetchone()
    found = None if row is None else _read_unfinished(db, *row)
    return None if found is None or found.damaged else found.identity


def unfinished_sessions(db: sqlite3.Connection) -> tuple[UnfinishedSession, ...]:
    """Sessions of earlier runs of the node that have no trajectory, in the order in which they were
    submitted. The caller publishes one for each, so that it ends `interrupted`.
    """
    earlier = "outcome IS NULL AND life < (SELECT value FROM meta WHERE name = 'life') ORDER BY rowid"
    with read_snapshot(db):
        found = tuple(
            _read_unfinished(db, *row) for row in db.execute(SELECT_SESSION_IDENTITY + earlier).fetchall()
        )
        return tuple(_with_turns(db, each) for each in found)


def _with_turns(db: sqlite3.Connection, session: UnfinishedSession) -> UnfinishedSession:
    found, damaged = readable_turns(db, session.identity.session_id)
    return evolve(session, turns=found, damaged=(*session.damaged, *damaged))


def _read_unfinished(
    db: sqlite3.Connection,
    session_id: str,
    task_id: str,
    sample_index: int,
    attempt: int,
    body: bytes | None,
    expected: int | None,
) -> UnfinishedSession:
    """A session without its turns. Where its identity is damaged, the columns of its row stand in for it."""
    row = db.execute(SELECT_TASK + "WHERE task_id = ?", (task_id,)).fetchone()
    spec, lost = (None, None) if row is None else _read_spec(db, row)
    damaged: tuple[Damaged, ...] = () if lost is None else (Damaged(part="task", reason=lost),)
    identity: Identity | None = None
    try:
        verify_checksum(expected, session_id, task_id, sample_index, attempt, body)
        if body is not None:  # it is None where the session only waited in the queue
            with decode_boundary():
                identity = structure(read_json(body), Identity)
    except Unreadable as error:
        note_damage(db, Damage(table="sessions", row=session_id, session_id=session_id, reason=str(error)))
        damaged += (Damaged(part="identity", reason=str(error)),)
    return UnfinishedSession(
        identity=identity
        or Identity(
            session_id=session_id,
            task_id=task_id,
            group_id=task_id if row is None else row[1],
            sample_index=sample_index,
            harness="" if spec is None else spec.harness.name,
            harness_version=None,
            model="",
            node="",
            attempt=attempt,
            forked_from=requested_fork(spec),
        ),
        spec=spec,
        turns=(),
        cancelled=row is not None and row[6] is not None,
        began=body is not None,
        damaged=damaged,
    )


# ── the end of a task ─────────────────────────────────────────────────────────


def finished_places(db: sqlite3.Connection, task_id: str) -> tuple[SessionFacts, ...]:
    """The finished sessions that hold the task's places, in order of sample_index, as the facts by which a
    group is judged, at its end and before.
    """
    over = "WHERE task_id = ? AND retried_as IS NULL AND outcome IS NOT NULL ORDER BY sample_index"
    return tuple(_read_facts(db, row) for row in db.execute(SELECT_SESSION + over, (task_id,)).fetchall())


def _read_facts(db: sqlite3.Connection, row: Row) -> SessionFacts:
    outcome, reward = _read_outcome(db, row)
    return SessionFacts(
        session_id=row[0],
        sample_index=row[2],
        outcome=evolve(outcome, log_tail=None),
        reward=reward,
        trainable_tokens=row[6],
        staleness=row[7],
    )


def ending_bodies(db: sqlite3.Connection, task_id: str, finished: float) -> dict[str, dict[str, Json]]:
    """The bodies of the `group` and `task` events of a task whose places are over; none for an unknown task.

    A task whose row is damaged is judged by the defaults. The bytes depend on the places alone. `finished` is
    used for journals that did not record when a place ended.
    """
    row = db.execute(SELECT_TASK + "WHERE task_id = ?", (task_id,)).fetchone()
    if row is None:
        return {}
    spec, _ = _read_spec(db, row)
    group_id = row[1]
    group = judged(
        (spec or UNKNOWN_TASK).group, finished_places(db, task_id), task_id=task_id, group_id=group_id
    )
    statuses = [member.status for member in group.members]
    counts: dict[str, Json] = {status: statuses.count(status) for status in dict.fromkeys(statuses)}
    last = "SELECT max(finished) FROM sessions WHERE task_id = ? AND retried_as IS NULL"
    (ended,) = db.execute(last, (task_id,)).fetchone()
    times: dict[str, Json] = {"submitted": row[3], "finished": finished if ended is None else ended}
    return {
        "group": group_json(group),
        "task": {"task_id": task_id, "group_id": group_id, "counts": counts, **times},
    }


# ── events ────────────────────────────────────────────────────────────────────


def events(
    db: sqlite3.Connection,
    after: int,
    limit: int,
    filters: EventFilters,
    encoder: TrajectoryEncoder,
    recent: ByteCache,
) -> EventPage:
    """Up to `limit` events after `after`, fewer where they are large, but at least one if there is one.
    `recent` caches their bodies.
    """
    with read_snapshot(db):
        (last,) = db.execute(
            "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'events'"
        ).fetchone()
        (pruned,) = db.execute("SELECT value FROM meta WHERE name = 'pruned'").fetchone()
        rows, seen = _event_rows(db, after, limit, last, filters)
        found: list[StoredEvent] = []
        size = 0
        for row in rows:
            found.append(_read_event(db, encoder, recent, row))
            size += len(found[-1].body)
            if size > PAGE_BYTES:
                break
    if len(found) < len(rows):
        seen = found[-1].seq
    return EventPage(events=tuple(found), seen=seen, first_seq=pruned + 1, last_seq=last)


SELECT_EVENT = (
    "SELECT seq, kind, key, task_id, group_id, session_id, outcome, reward, at, body, checksum FROM events"
)


def _event_rows(
    db: sqlite3.Connection, after: int, limit: int, last: int, filters: EventFilters
) -> tuple[list[Row], int]:
    """The next rows of events, and how far a reader is after all of them."""
    where, values = _filter_clauses(filters)
    try:
        rows: list[Row] = db.execute(
            f"{SELECT_EVENT} WHERE seq > ? {where} ORDER BY seq LIMIT ?", (after, *values, limit)
        ).fetchall()
        return rows, max(after, last) if len(rows) < limit else rows[-1][0]
    except sqlite3.Error as error:
        if not is_corrupt(error):
            raise
    upto = min(last, after + limit)
    one_by_one = (_one_event_row(db, seq, where, values) for seq in range(after + 1, upto + 1))
    return [row for row in one_by_one if row is not None], max(after, upto)


def _one_event_row(db: sqlite3.Connection, seq: int, where: str, values: list[object]) -> Row | None:
    """A row of EVENT. Where its page is damaged, the row has only its number and the reason."""
    try:
        with page_boundary():
            found: Row | None = db.execute(f"{SELECT_EVENT} WHERE seq = ? {where}", (seq, *values)).fetchone()
            return found
    except Unreadable as error:
        return (seq, *(None,) * 9, str(error))


def _filter_clauses(filters: EventFilters) -> tuple[str, list[object]]:
    clauses: list[tuple[str, object]] = [
        ("task_id = ?", filters.task_id),
        ("group_id = ?", filters.group_id),
        ("(outcome IS NULL OR outcome = ?)", filters.outcome),  # groups and tasks have no outcome
        ("(outcome IS NULL OR reward >= ?)", filters.min_reward),
    ]
    used = [(clause, value) for clause, value in clauses if value is not None]
    kinds = ", ".join("?" * len(filters.kinds))
    where = " ".join(f"AND {clause}" for clause, _ in used)
    # A row of an unknown kind is damaged. Every reader gets it, because any may have asked for its real kind.
    known = ", ".join(f"'{kind}'" for kind in get_args(EventKind))
    return f"{where} AND (kind IN ({kinds}) OR kind NOT IN ({known}))", [
        *(value for _, value in used),
        *filters.kinds,
    ]


def _read_event(
    db: sqlite3.Connection, encoder: TrajectoryEncoder, recent: ByteCache, row: Row
) -> StoredEvent:
    """Read an event. A trajectory is stored packed and is encoded here; a group or task is stored as JSON. An
    event that cannot be read becomes one that says so.
    """
    seq, kind, key, task_id, _, session_id, _, _, at, body, _ = row
    try:
        if not _verify_event(db, row):
            body = _rebuild_body(db, kind, task_id, at)
        if body is None:
            encode = encoder.encode
            body = (
                b""
                if encode is None
                else recent.get((seq, encoder.name), lambda: _trajectory_body(db, encode, session_id or ""))
            )
        return StoredEvent(seq=seq, kind=kind, key=key, body=body)
    except Unreadable as error:
        note_damage(db, Damage(table="events", row=str(seq), session_id=session_id, reason=str(error)))
        return unreadable_event(row, str(error))


def _verify_event(db: sqlite3.Connection, row: Row) -> bool:
    """Whether the row is as it was written. False where only its body is damaged, or what filters and
    retention use: the event can still be given then. Raises Unreadable where it is not known which event it
    is.
    """
    seq, kind, key, task_id, group_id, session_id, outcome, reward, at, body, expected = row
    if kind is None:
        raise Unreadable(expected)  # its page is damaged, and `expected` is the reason
    try:
        verify_checksum(expected, kind, key, task_id, group_id, session_id, outcome, reward, at, body)
        if expected is None and body is not None:
            with decode_boundary():
                read_json(body)
        return True
    except Unreadable as error:
        if kind not in get_args(EventKind) or key != f"{kind}:{session_id or task_id}":
            raise
        query = "SELECT 1 FROM sessions WHERE task_id = ?1 AND ?2 IN (session_id, '') LIMIT 1"
        if db.execute(query, (task_id, session_id or "")).fetchone() is None:
            raise
        note_damage(db, Damage(table="events", row=str(seq), session_id=session_id, reason=str(error)))
        return False


def _rebuild_body(db: sqlite3.Connection, kind: EventKind, task_id: str, at: Any) -> bytes | None:
    """The body of an event whose own is damaged. The body of a group or task is made again from the
    tables.
    """
    if kind in ("trajectory", "attempt"):
        return None
    found = ending_bodies(db, task_id, at if isinstance(at, float) else 0.0)
    if not found:
        raise Unreadable("its body is damaged, and its task is no longer in the journal")
    return dump_json(found[kind])


def _trajectory_body(db: sqlite3.Connection, encode: Callable[[Trajectory], bytes], session_id: str) -> bytes:
    whole = _read_trajectory(db, session_id)
    return PRUNED_BODY if whole is None else encode_trajectory(encode, whole)
