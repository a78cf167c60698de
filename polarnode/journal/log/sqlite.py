"""The log in SQLite, for a node alone: the tables of the journal, with places and nodes beside them.

Every call is one transaction of the only connection that writes, so what PostgreSQL needs fences and
functions for is a few lines here. The rules are the same: a node alone is a fleet of one.
"""

import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import trio
from attrs import define, field

from polarnode.core.codec.json import dump_json, plain, read_json, structure
from polarnode.core.codec.packing import unpack_turn
from polarnode.core.codec.tasks import task_json
from polarnode.core.conversation import Json
from polarnode.core.errors import Conflict, Refused
from polarnode.core.status import Consumer, EvaluationStatus, RewardEvent, SessionRecord
from polarnode.core.task import EvaluationSpec, TaskSpec
from polarnode.core.trajectory import Trajectory, Turn
from polarnode.groups.group import Facts, member_of
from polarnode.journal import entries, forks, pending_callbacks, queries, retention
from polarnode.journal.damage import checksum
from polarnode.journal.forks import EarlierAttempt
from polarnode.journal.log.port import (
    Claim,
    Cursor,
    Ended,
    EndingCause,
    FinishAnswer,
    Joined,
    LeasedCallback,
    LogGap,
    LogPage,
    LogWeights,
    NodeFacts,
    NodeRow,
    Offer,
)
from polarnode.journal.log.rules import check_names, ending_cause, gap_of
from polarnode.journal.pending_callbacks import EVENT_KINDS
from polarnode.journal.queries import Recent
from polarnode.journal.retention import MOST, Moment
from polarnode.journal.schema import prepare, transaction
from polarnode.journal.values import Filters, Retention, TaskRecord, TrajectoryEncoder, json_encoder
from polarnode.merge.trajectory import Identity

P = ParamSpec("P")
T = TypeVar("T")
Connection = sqlite3.Connection

# What comes to the journal's tables. It becomes the step to the next version of `journal/schema.py`.
TABLES: Final = """
CREATE TABLE IF NOT EXISTS places (
    task_id TEXT NOT NULL,
    place INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'queued',
    session_id TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT -1,
    retries INTEGER NOT NULL DEFAULT 0,
    spent INTEGER NOT NULL DEFAULT 0,
    incarnation INTEGER,
    PRIMARY KEY (task_id, place)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS places_open ON places (state, incarnation) WHERE state != 'over';
CREATE TABLE IF NOT EXISTS claimable (
    task_id TEXT PRIMARY KEY,
    priority INTEGER NOT NULL,
    requires TEXT NOT NULL,
    image TEXT NOT NULL,
    adapter TEXT NOT NULL,
    max_retries INTEGER NOT NULL,
    early_stop_min INTEGER,
    usable INTEGER NOT NULL DEFAULT 0,
    enough INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS nodes (
    incarnation INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    facts TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'alive',
    sign INTEGER NOT NULL DEFAULT 0,
    serving TEXT NOT NULL DEFAULT '{}',
    report TEXT NOT NULL DEFAULT '{}'
);
CREATE TABLE IF NOT EXISTS session_nodes (
    session_id TEXT PRIMARY KEY,
    incarnation INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS streams (consumer TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS log_weights (
    version TEXT PRIMARY KEY,
    adapter TEXT NOT NULL,
    shared INTEGER NOT NULL,
    current INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS weight_holders (
    version TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    PRIMARY KEY (version, incarnation)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS leases (seq INTEGER PRIMARY KEY, until REAL NOT NULL, lease INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS identities (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    identity TEXT NOT NULL UNIQUE,
    after INTEGER NOT NULL
)"""


def _one(db: Connection, query: str, *values: object) -> Any:
    """The first column of the first row, or None."""
    row = db.execute(query, values).fetchone()
    return None if row is None else row[0]


def _object(text: str) -> dict[str, Json]:
    found = read_json(text.encode())
    return found if isinstance(found, dict) else {}


def _new_session_id() -> str:
    return secrets.token_hex(8)


# ── tasks and places ──────────────────────────────────────────────────────────


def submit(
    db: Connection,
    spec: TaskSpec,
    *,
    task_id: str,
    session_ids: tuple[str, ...],
    idempotency_key: str | None,
    callback_kinds: tuple[str, ...],
    submitted: float,
) -> TaskRecord:
    check_names(spec, task_id, session_ids, idempotency_key)
    found = None if idempotency_key is None else queries.task_of_key(db, idempotency_key)
    if found is not None:
        return found
    found = queries.task(db, task_id)
    if found is not None:
        if dump_json(task_json(found.spec)) == dump_json(task_json(spec)):
            return found
        raise Conflict(f"task {task_id} exists with another spec: choose another task_id")
    with transaction(db):
        entries.task_entry(
            spec,
            task_id=task_id,
            session_ids=session_ids,
            idempotency_key=idempotency_key,
            now=submitted,
            callback_kinds=callback_kinds,
        ).apply(db)
        db.execute(
            "INSERT INTO claimable (task_id, priority, requires, image, adapter, max_retries, early_stop_min)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                task_id,
                spec.priority,
                dump_json(dict(spec.requires)).decode(),
                spec.runtime.image,
                spec.adapter,
                spec.budgets.retries,
                spec.group.early_stop_min,
            ),
        )
        db.executemany(
            "INSERT INTO places (task_id, place, session_id) VALUES (?, ?, ?)",
            [(task_id, place, session_id) for place, session_id in enumerate(session_ids)],
        )
    record = queries.task(db, task_id)
    assert record is not None
    return record


PLACE: Final = """
SELECT p.task_id, p.place, p.session_id, p.attempt, p.incarnation, p.retries, p.spent, t.cancelled, c.enough,
    t.spec, t.submitted, t.idempotency_key, c.priority, c.requires, c.image, c.adapter, t.number, p.state
FROM places p JOIN tasks t USING (task_id) JOIN claimable c USING (task_id) """
_RUN: Final = "p.state = 'queued' AND NOT p.spent AND t.cancelled IS NULL AND NOT c.enough"
_END: Final = "p.state = 'queued' AND (p.spent OR t.cancelled IS NOT NULL OR c.enough)"


def _places(db: Connection, where: str, *values: object) -> list[dict[str, Any]]:
    found = db.execute(PLACE + "WHERE " + where + " ORDER BY t.number, p.place", values)
    names = [each[0] for each in found.description]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def _alive(db: Connection, incarnation: int) -> bool:
    return _one(db, "SELECT 1 FROM nodes WHERE incarnation = ? AND state = 'alive'", incarnation) is not None


def claim(db: Connection, offer: Offer) -> tuple[Claim, ...]:
    with transaction(db):
        if offer.room < 1 or not _alive(db, offer.incarnation):
            return ()
        current = dict(db.execute("SELECT adapter, version FROM log_weights WHERE current").fetchall())
        mine = {
            task_id
            for (task_id,) in db.execute(
                "SELECT task_id FROM places WHERE state = 'running' AND incarnation = ?", (offer.incarnation,)
            )
        }

        def fits(row: Mapping[str, Any]) -> bool:
            required: dict[str, str] = structure(read_json(row["requires"].encode()), dict[str, str])
            versions = [adapter for adapter in ("", row["adapter"]) if adapter in current]
            return required.items() <= offer.labels.items() and all(
                offer.serving.get(adapter) == current[adapter] for adapter in versions
            )

        rows = sorted(
            filter(fits, _places(db, _RUN)),
            key=lambda row: (
                -row["priority"],
                row["task_id"] not in mine,
                row["image"] not in offer.images,
                row["number"],
                row["place"],
            ),
        )
        return tuple(_take(db, row, offer.incarnation) for row in rows[: offer.room])


def claim_endings(db: Connection, incarnation: int, limit: int) -> tuple[Claim, ...]:
    with transaction(db):
        rows = _places(db, _END)[:limit] if _alive(db, incarnation) else []
        return tuple(_take(db, row, incarnation) for row in rows)


def _take(db: Connection, row: dict[str, Any], incarnation: int) -> Claim:
    attempt = row["attempt"] + 1
    db.execute(
        "UPDATE places SET state = 'running', incarnation = ?, attempt = ? WHERE task_id = ? AND place = ?",
        (incarnation, attempt, row["task_id"], row["place"]),
    )
    db.execute("INSERT OR REPLACE INTO session_nodes VALUES (?, ?)", (row["session_id"], incarnation))
    return _claim({**row, "attempt": attempt, "incarnation": incarnation})


def claims(db: Connection, incarnation: int) -> tuple[Claim, ...]:
    return tuple(map(_claim, _places(db, "p.state = 'running' AND p.incarnation = ?", incarnation)))


def _claim(row: Mapping[str, Any]) -> Claim:
    return Claim(
        task_id=row["task_id"],
        sample_index=row["place"],
        session_id=row["session_id"],
        attempt=row["attempt"],
        incarnation=row["incarnation"],
        retries=row["retries"],
        spec=structure(read_json(row["spec"]), TaskSpec),
        submitted=row["submitted"],
        idempotency_key=row["idempotency_key"],
        ending=_ending(row),
    )


def _ending(row: Mapping[str, Any]) -> EndingCause | None:
    return ending_cause(
        cancelled=row["cancelled"] is not None, enough=bool(row["enough"]), spent=bool(row["spent"])
    )


def finish(db: Connection, claimed: Claim, ended: Ended) -> FinishAnswer:
    session_id, task_id, place = ended.identity.session_id, claimed.task_id, claimed.sample_index
    with transaction(db):
        rows = _places(db, "p.task_id = ? AND p.place = ?", task_id, place)
        if not rows:
            return "unknown"
        held = rows[0]
        if held["state"] == "over":
            return "already" if held["session_id"] == session_id else "another"
        # its place was put back, and the next attempt has not begun
        before = _one(
            db,
            "SELECT retried_as FROM sessions WHERE session_id = ? AND outcome IS NULL"
            " AND retried_as IS NOT NULL",
            session_id,
        )
        running = held["state"] == "running"
        mine = held["session_id"] == session_id
        if running and not (mine and held["incarnation"] == claimed.incarnation):
            return "another"
        if not running and not (mine or before == held["session_id"] or held["attempt"] < claimed.attempt):
            return "another"
        if _one(db, "SELECT outcome FROM sessions WHERE session_id = ?", session_id) is not None:
            return "another"
        db.execute(
            "UPDATE places SET state = 'over', session_id = ?, attempt = ?, incarnation = ?"
            " WHERE task_id = ? AND place = ?",
            (session_id, claimed.attempt, claimed.incarnation, task_id, place),
        )
        if not mine:
            db.execute("DELETE FROM sessions WHERE session_id = ? AND outcome IS NULL", (held["session_id"],))
        _end_session(db, ended, "trajectory")
        if member_of(claimed.spec.group, ended.facts).usable:
            db.execute(
                "UPDATE claimable SET usable = usable + 1,"
                " enough = enough OR coalesce(usable + 1 >= early_stop_min, 0) WHERE task_id = ?",
                (task_id,),
            )
        if _one(db, "SELECT 1 FROM places WHERE task_id = ? AND state != 'over'", task_id) is None:
            for kind, body in queries.ending(db, task_id, ended.finished).items():
                entries._insert(db, kind, body, ended.finished)
        return "now"


def _end_session(db: Connection, ended: Ended, kind: str, retried_as: str | None = None) -> None:
    """Write a session's turns, trajectory and event."""
    identity = ended.identity
    entries._start_session(db, identity=identity, body=dump_json(plain(identity)))
    for part in ended.parts[1:]:
        turn = unpack_turn(part)
        row = (identity.session_id, turn.index, len(turn.sampled), part)
        entries._insert_turn(db, row=row)
    outcome = dump_json(plain(ended.outcome))
    row_over = (outcome, ended.reward, ended.trainable, ended.staleness, ended.finished, retried_as)
    db.execute(
        "UPDATE sessions SET outcome = ?, reward = ?, trainable = ?, staleness = ?, finished = ?,"
        " retried_as = ?,"
        " outcome_checksum = ? WHERE session_id = ?",
        (*row_over, checksum(identity.session_id, *row_over), identity.session_id),
    )
    db.execute(
        "INSERT OR REPLACE INTO trajectories (session_id, body, checksum) VALUES (?, ?, ?)",
        (identity.session_id, ended.parts[0], checksum(identity.session_id, ended.parts[0])),
    )
    entries._insert_event(
        db,
        kind=kind,
        key=f"{kind}:{identity.session_id}",
        task_id=identity.task_id,
        group_id=identity.group_id,
        session_id=identity.session_id,
        outcome=ended.outcome.status,
        reward=ended.reward,
        at=ended.finished,
    )


def publish(db: Connection, ended: Ended) -> FinishAnswer:
    session_id, task_id = ended.identity.session_id, ended.identity.task_id
    with transaction(db):
        known = db.execute(
            "SELECT outcome, retried_as FROM sessions WHERE session_id = ?", (session_id,)
        ).fetchone()
        if known is not None and known[0] is not None:
            return "already"
        attempt = _one(db, "SELECT 1 FROM tasks WHERE task_id = ?", task_id) is not None
        after = None if known is None else known[1]
        _end_session(db, ended, "attempt" if attempt else "trajectory", after)
        return "now"


def put_back(
    db: Connection, claimed: Claim, ended: Ended | None, *, counts: bool, keep: bool
) -> Claim | None:
    with transaction(db):
        rows = _places(
            db, "p.task_id = ? AND p.place = ? AND p.state = 'running'", claimed.task_id, claimed.sample_index
        )
        held = rows[0] if rows else {}
        if (held.get("session_id"), held.get("incarnation")) != (claimed.session_id, claimed.incarnation):
            return None
        fresh = _queue(db, held, counts=counts)
        if ended is not None:
            _end_session(db, ended, "attempt", fresh)
        (row,) = _places(db, "p.task_id = ? AND p.place = ?", claimed.task_id, claimed.sample_index)
        return _take(db, row, claimed.incarnation) if keep and _ending(row) is None else None


def _queue(db: Connection, held: Mapping[str, Any], *, counts: bool) -> str:
    """Queue a place for another session, whose id is given."""
    fresh = _new_session_id()
    allowed = _one(db, "SELECT max_retries FROM claimable WHERE task_id = ?", held["task_id"])
    db.execute(
        "UPDATE places SET state = 'queued', incarnation = NULL, session_id = ?, spent = spent OR ?,"
        " retries = retries + ? WHERE task_id = ? AND place = ?",
        (fresh, counts and held["retries"] >= allowed, counts, held["task_id"], held["place"]),
    )
    entries.insert_session(
        db, session_id=fresh, task_id=held["task_id"], sample_index=held["place"], attempt=held["attempt"] + 1
    )
    db.execute("UPDATE sessions SET retried_as = ? WHERE session_id = ?", (fresh, held["session_id"]))
    return fresh


def put_back_lost(db: Connection) -> int:
    with transaction(db):
        lost = (
            "p.state = 'running' AND p.incarnation IN (SELECT incarnation FROM nodes WHERE state != 'alive')"
        )
        rows = _places(db, lost)
        for row in rows:
            _queue(db, row, counts=True)
        return len(rows)


def cancel(db: Connection, task_id: str, at: float) -> bool:
    with transaction(db):
        if _one(db, "SELECT 1 FROM places WHERE task_id = ? AND state != 'over'", task_id) is None:
            return False
        entries.cancel_entry(task_id, now=at).apply(db)
        return True


def to_stop(db: Connection, incarnation: int) -> dict[str, EndingCause]:
    rows = _places(db, "p.state = 'running' AND p.incarnation = ?", incarnation)
    found = {row["session_id"]: _ending({**row, "spent": 0}) for row in rows}
    return {session_id: cause for session_id, cause in found.items() if cause is not None}


# ── nodes ─────────────────────────────────────────────────────────────────────


def join(db: Connection, facts: NodeFacts) -> Joined:
    with transaction(db):
        body = dump_json(plain(facts)).decode()
        incarnation = db.execute(
            "INSERT INTO nodes (name, facts) VALUES (?, ?)", (facts.name, body)
        ).lastrowid
        assert incarnation is not None
        older = "SELECT incarnation FROM nodes WHERE name = ? AND incarnation < ?"
        db.execute(
            f"UPDATE places SET incarnation = ? WHERE state = 'running' AND incarnation IN ({older})",
            (incarnation, facts.name, incarnation),
        )
        db.execute(
            "UPDATE nodes SET state = 'replaced' WHERE state IN ('alive', 'lost')"
            f" AND incarnation IN ({older})",
            (facts.name, incarnation),
        )
    return Joined(incarnation=incarnation, inherited=claims(db, incarnation))


NODE: Final = """SELECT incarnation, facts, state, sign, serving, report,
    (SELECT count(*) FROM places WHERE places.incarnation = nodes.incarnation AND places.state = 'running')
FROM nodes """


def _nodes(db: Connection, where: str, *values: object) -> tuple[NodeRow, ...]:
    return tuple(
        NodeRow(
            incarnation=incarnation,
            facts=structure(read_json(facts.encode()), NodeFacts),
            state=state,
            sign=sign,
            serving=structure(read_json(serving.encode()), dict[str, str]),
            report=_object(report),
            running=running,
        )
        for incarnation, facts, state, sign, serving, report, running in db.execute(
            NODE + where + " ORDER BY name, incarnation", values
        ).fetchall()
    )


# ── events ────────────────────────────────────────────────────────────────────


def identity(db: Connection) -> str:
    found = _one(db, "SELECT identity FROM identities ORDER BY number DESC LIMIT 1")
    if found is None:
        found = str(_one(db, "SELECT value FROM meta WHERE name = 'journal'"))
        db.execute("INSERT INTO identities (identity, after) VALUES (?, 0)", (found,))
    return str(found)


def mark_restored(db: Connection) -> str:
    before = identity(db)
    name, _, number = before.partition("-")
    fresh = f"{name}-{int(number or 0) + 1}"
    db.execute("INSERT INTO identities (identity, after) VALUES (?, ?)", (fresh, _last(db)))
    return fresh


def _last(db: Connection) -> int:
    return int(_one(db, "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'events'") or 0)


def find_gap(db: Connection, asked: Cursor) -> LogGap | None:
    name, last = identity(db), _last(db)
    pruned = int(_one(db, "SELECT value FROM meta WHERE name = 'pruned'"))
    number = _one(db, "SELECT number FROM identities WHERE identity = ?", asked.log)
    lost_after = (
        None if number is None else _one(db, "SELECT min(after) FROM identities WHERE number > ?", number)
    )
    known = number is not None
    return gap_of(asked, log=name, last=last, pruned=pruned, known=known, lost_after=lost_after)


def read_events(
    db: Connection, asked: Cursor, limit: int, filters: Filters, encoder: TrajectoryEncoder, recent: Recent
) -> LogPage:
    gap = find_gap(db, asked)
    after = asked.position if gap is None else gap.position
    page = queries.events(db, after, limit, filters, encoder, recent)
    return LogPage(log=identity(db), page=page, gap=gap)


def acknowledge(db: Connection, name: str, cursor: Cursor, now: float, silence_s: float) -> Cursor:
    with transaction(db):
        if _one(db, "SELECT 1 FROM positions WHERE consumer = ?", name) is None:
            _make_room(db, now - silence_s)
        gap = find_gap(db, cursor)
        seq = cursor.position if gap is None else min(cursor.position, gap.position)
        retention.acknowledge_entry(name, seq, now=now).apply(db)
        position = int(_one(db, "SELECT seq FROM positions WHERE consumer = ?", name))
        return Cursor(position=position, log=identity(db))


def _make_room(db: Connection, since: float) -> None:
    if _one(db, "SELECT count(*) FROM positions") < MOST:
        return
    unseen = _one(
        db,
        "SELECT consumer FROM positions LEFT JOIN streams USING (consumer)"
        " WHERE coalesce(count, 0) = 0 AND heard <= ? ORDER BY heard LIMIT 1",
        since,
    )
    if unseen is None:
        raise Refused(
            f"there are {MOST} consumers: DELETE /v1/consumers/{{name}} those that do not come back",
            path="$.consumer",
        )
    db.execute("DELETE FROM positions WHERE consumer = ?", (unseen,))


def read_consumers(db: Connection, since: float) -> tuple[Consumer, ...]:
    pruned, last = int(_one(db, "SELECT value FROM meta WHERE name = 'pruned'")), _last(db)
    return tuple(
        Consumer(
            consumer=name,
            position=seq,
            behind_events=last - max(seq, pruned),
            missed=max(0, pruned - seq),
            moved=moved,
            last_seen=heard,
            connected=count,
            holds=count > 0 or heard > since,
        )
        for name, seq, moved, heard, count in db.execute(
            "SELECT consumer, seq, moved, heard, coalesce(count, 0) FROM positions"
            " LEFT JOIN streams USING (consumer) ORDER BY consumer"
        ).fetchall()
    )


def prune(db: Connection, kept: Retention, now: float, limit: int) -> int:
    with transaction(db):
        acknowledged = _one(
            db,
            "SELECT min(seq) FROM positions LEFT JOIN streams USING (consumer)"
            " WHERE coalesce(count, 0) > 0 OR heard > ?",
            now - kept.silence_s,
        )
        if acknowledged is None:
            acknowledged = _last(db) if _one(db, "SELECT 1 FROM positions") else 0
        before = int(_one(db, "SELECT value FROM meta WHERE name = 'pruned'"))
        retention.prune(db, kept, Moment(now=now, acknowledged=acknowledged, came=limit // 3))
        after = int(_one(db, "SELECT value FROM meta WHERE name = 'pruned'"))
        for table in ("places", "claimable"):
            db.execute(f"DELETE FROM {table} WHERE task_id NOT IN (SELECT task_id FROM tasks)")
        return after - before


# ── weights and callbacks ─────────────────────────────────────────────────────

ALIVE: Final = (
    "SELECT incarnation FROM weight_holders JOIN nodes USING (incarnation)"
    " WHERE version = ? AND state = 'alive'"
    " ORDER BY incarnation"
)


def add_weights(db: Connection, version: str, body: Json, adapter: str, shared: bool, at: float) -> None:
    with transaction(db):
        if _one(db, "SELECT 1 FROM weights WHERE version = ?", version) is None:
            entries.weights_entry(version, body if isinstance(body, dict) else {"value": body}, now=at).apply(
                db
            )
        db.execute(
            "INSERT OR IGNORE INTO log_weights (version, adapter, shared) VALUES (?, ?, ?)",
            (version, adapter, shared),
        )


def serve_weights(db: Connection, version: str, holders: int) -> bool:
    with transaction(db):
        row = db.execute("SELECT adapter, shared FROM log_weights WHERE version = ?", (version,)).fetchone()
        if row is None or not (row[1] or len(db.execute(ALIVE, (version,)).fetchall()) >= holders):
            return False
        db.execute("UPDATE log_weights SET current = version = ? WHERE adapter = ?", (version, row[0]))
        return True


def read_weights(db: Connection, adapters: bool, limit: int | None) -> tuple[LogWeights, ...]:
    rows = db.execute(
        "SELECT version, adapter, at, body, shared, current FROM log_weights JOIN weights USING (version)"
        " WHERE (adapter != '') = ? ORDER BY number DESC LIMIT ?",
        (adapters, -1 if limit is None else limit),
    ).fetchall()
    return tuple(
        LogWeights(
            version=version,
            adapter=adapter,
            at=at,
            body=read_json(body),
            shared=bool(shared),
            current=bool(current),
            holders=tuple(each for (each,) in db.execute(ALIVE, (version,))),
        )
        for version, adapter, at, body, shared, current in rows
    )


LEASABLE: Final = """
SELECT min(callbacks.seq), callbacks.task_id, url, coalesce(until, 0), coalesce(lease, 0), key
FROM callbacks JOIN events USING (seq) LEFT JOIN leases USING (seq)
GROUP BY url, callbacks.task_id ORDER BY 1"""


def lease_callbacks(db: Connection, limit: int, seconds: float, now: float) -> tuple[LeasedCallback, ...]:
    with transaction(db):
        rows = [row for row in db.execute(LEASABLE).fetchall() if row[3] <= now][:limit]
        for seq, _, _, _, lease, _ in rows:
            db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?)", (seq, now + seconds, lease + 1))
        return tuple(
            LeasedCallback(position=seq, key=key, task_id=task_id, url=url, lease=lease + 1)
            for seq, task_id, url, _, lease, key in rows
        )


def callback_taken(db: Connection, callback: LeasedCallback) -> bool:
    with transaction(db):
        if _one(db, "SELECT lease FROM leases WHERE seq = ?", callback.position) != callback.lease:
            return False
        pending_callbacks.taken(db, seq=callback.position)
        db.execute("DELETE FROM leases WHERE seq = ?", (callback.position,))
        return True


# ── the log ───────────────────────────────────────────────────────────────────


@define(eq=False)
class SqliteLog:
    """The port `Log`. Created by `open_sqlite_log`."""

    _db: Connection
    _retention: Retention = field(factory=Retention)
    _recent: Recent = field(factory=Recent)
    _news: trio.Event = field(factory=trio.Event)
    _limiter: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(1))

    async def _run(
        self, call: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await trio.to_thread.run_sync(lambda: call(self._db, *args, **kwargs), limiter=self._limiter)

    async def _write(
        self, call: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        found = await self._run(call, *args, **kwargs)
        news, self._news = self._news, trio.Event()
        news.set()
        return found

    async def _execute(self, query: str, *values: object) -> int:
        return await self._run(lambda db: db.execute(query, values).rowcount)

    async def reachable(self) -> str | None:
        await trio.lowlevel.checkpoint()
        return None

    async def submit(
        self,
        spec: TaskSpec,
        *,
        task_id: str,
        session_ids: tuple[str, ...],
        idempotency_key: str | None = None,
        callback_kinds: tuple[str, ...] = EVENT_KINDS,
        submitted: float,
    ) -> TaskRecord:
        return await self._write(
            submit,
            spec,
            task_id=task_id,
            session_ids=session_ids,
            idempotency_key=idempotency_key,
            callback_kinds=callback_kinds,
            submitted=submitted,
        )

    async def claim(self, offer: Offer) -> tuple[Claim, ...]:
        return await self._run(claim, offer)

    async def claim_endings(self, incarnation: int, limit: int) -> tuple[Claim, ...]:
        return await self._run(claim_endings, incarnation, limit)

    async def claims(self, incarnation: int) -> tuple[Claim, ...]:
        return await self._run(claims, incarnation)

    async def session_started(self, identity: Identity) -> None:
        await self._run(entries.session_entry(identity).apply)

    async def finish(self, claim: Claim, ended: Ended) -> FinishAnswer:
        return await self._write(finish, claim, ended)

    async def put_back(
        self, claim: Claim, ended: Ended | None = None, *, counts: bool = True, keep: bool = False
    ) -> Claim | None:
        return await self._write(put_back, claim, ended, counts=counts, keep=keep)

    async def publish(self, ended: Ended, incarnation: int) -> FinishAnswer:
        return await self._write(publish, ended)

    async def cancel(self, task_id: str, at: float) -> bool:
        return await self._write(cancel, task_id, at)

    async def to_stop(self, incarnation: int) -> Mapping[str, EndingCause]:
        return await self._run(to_stop, incarnation)

    async def join(self, facts: NodeFacts) -> Joined:
        return await self._run(join, facts)

    async def sign(self, incarnation: int, report: Mapping[str, Json] | None = None) -> bool:
        body = None if report is None else dump_json(dict(report)).decode()
        query = (
            "UPDATE nodes SET sign = sign + 1, report = coalesce(?, report)"
            " WHERE incarnation = ? AND state = 'alive'"
        )
        return await self._execute(query, body, incarnation) > 0

    async def signs(self) -> Mapping[int, int]:
        return await self._run(
            lambda db: dict(
                db.execute("SELECT incarnation, sign FROM nodes WHERE state = 'alive'").fetchall()
            )
        )

    async def expire(self, incarnation: int, sign: int) -> bool:
        query = "UPDATE nodes SET state = 'lost' WHERE incarnation = ? AND state = 'alive' AND sign = ?"
        return await self._execute(query, incarnation, sign) > 0

    async def put_back_lost(self) -> int:
        return await self._write(put_back_lost)

    async def leave(self, incarnation: int) -> None:
        await self._execute(
            "UPDATE nodes SET state = 'left' WHERE incarnation = ? AND state = 'alive'", incarnation
        )

    async def nodes(self, *, every: bool = False) -> tuple[NodeRow, ...]:
        return await self._run(_nodes, "" if every else "WHERE state = 'alive'")

    async def node_of(self, session_id: str) -> NodeRow | None:
        where = "WHERE incarnation = (SELECT incarnation FROM session_nodes WHERE session_id = ?)"
        return next(iter(await self._run(_nodes, where, session_id)), None)

    async def identity(self) -> str:
        return await self._run(identity)

    async def mark_restored(self) -> str:
        return await self._run(mark_restored)

    async def events(
        self,
        after: Cursor,
        *,
        filters: Filters | None = None,
        encoder: TrajectoryEncoder | None = None,
        limit: int = 64,
    ) -> LogPage:
        return await self._run(
            read_events, after, limit, filters or Filters(), encoder or json_encoder(), self._recent
        )

    async def position(self, consumer: str) -> Cursor:
        query = "SELECT seq FROM positions WHERE consumer = ?"
        return await self._run(
            lambda db: Cursor(position=int(_one(db, query, consumer) or 0), log=identity(db))
        )

    async def acknowledge(self, consumer: str, cursor: Cursor, *, now: float) -> Cursor:
        return await self._run(acknowledge, consumer, cursor, now, self._retention.silence_s)

    async def attend(self, consumer: str, change: int, *, now: float) -> None:
        await self._run(retention.seen_entry(consumer, now=now).apply)
        await self._execute(
            "INSERT INTO streams VALUES (?1, max(0, ?2))"
            " ON CONFLICT DO UPDATE SET count = max(0, count + ?2)",
            consumer,
            change,
        )

    async def forget(self, consumer: str) -> bool:
        return await self._execute("DELETE FROM positions WHERE consumer = ?", consumer) > 0

    async def consumers(self) -> tuple[Consumer, ...]:
        return await self._run(read_consumers, time.time() - self._retention.silence_s)

    async def prune(self, retention: Retention, *, now: float, limit: int = 256) -> int:
        return await self._run(prune, retention, now, limit)

    async def wait_news(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self._news.wait()
        await trio.lowlevel.checkpoint()

    async def add_weights(
        self, version: str, body: Json, *, adapter: str = "", shared: bool = False, at: float
    ) -> None:
        await self._run(add_weights, version, body, adapter, shared, at)

    async def hold_weights(self, version: str, incarnation: int) -> None:
        await self._execute("INSERT OR IGNORE INTO weight_holders VALUES (?, ?)", version, incarnation)

    async def serve_weights(self, version: str, *, holders: int = 2) -> bool:
        return await self._write(serve_weights, version, holders)

    async def change_weights(self, version: str, body: Json) -> None:
        value = body if isinstance(body, dict) else {"value": body}
        await self._run(entries.weights_changed_entry(version, value).apply)

    async def serving(self, incarnation: int, versions: Mapping[str, str]) -> None:
        body = dump_json(dict(versions)).decode()
        await self._execute("UPDATE nodes SET serving = ? WHERE incarnation = ?", body, incarnation)

    async def stale_nodes(self) -> tuple[NodeRow, ...]:
        current = await self._run(_one, "SELECT version FROM log_weights WHERE current AND adapter = ''")
        alive = await self.nodes()
        return tuple(each for each in alive if current is not None and each.serving.get("") != current)

    async def weights(self, *, adapters: bool = False, limit: int | None = None) -> tuple[LogWeights, ...]:
        return await self._run(read_weights, adapters, limit)

    async def lease_callbacks(self, limit: int, *, seconds: float) -> tuple[LeasedCallback, ...]:
        return await self._run(lease_callbacks, limit, seconds, time.time())

    async def callback_taken(self, callback: LeasedCallback) -> bool:
        return await self._run(callback_taken, callback)

    async def callback_failed(self, callback: LeasedCallback, *, after_s: float) -> None:
        query = "UPDATE leases SET until = ? WHERE seq = ? AND lease = ?"
        await self._execute(query, time.time() + after_s, callback.position, callback.lease)

    async def callback_count(self) -> int:
        return await self._run(pending_callbacks.count)

    async def task(self, task_id: str) -> TaskRecord | None:
        return await self._run(queries.task, task_id)

    async def task_of_key(self, idempotency_key: str) -> TaskRecord | None:
        return await self._run(queries.task_of_key, idempotency_key)

    async def latest_run(self, name: str) -> TaskRecord | None:
        return await self._run(entries.latest_run, name)

    async def tasks(self, *, limit: int = 100, before: str | None = None) -> tuple[TaskRecord, ...]:
        return await self._run(queries.tasks, limit, before)

    async def session(self, session_id: str) -> SessionRecord | None:
        return await self._run(queries.session, session_id)

    async def trajectory(self, session_id: str) -> Trajectory | None:
        return await self._run(queries.trajectory, session_id)

    async def turns(self, session_id: str) -> tuple[Turn, ...]:
        return await self._run(queries.turns, session_id)

    async def forks(self, session_id: str, limit: int) -> tuple[SessionRecord, ...]:
        return await self._run(forks.forks, session_id, limit)

    async def earlier_attempts(self, place: Identity) -> tuple[EarlierAttempt, ...]:
        return await self._run(forks.earlier_attempts, place)

    async def places_over(self, task_id: str) -> tuple[Facts, ...]:
        return await self._run(queries.places_over, task_id)

    async def submit_evaluation(
        self,
        spec: EvaluationSpec,
        sessions: Mapping[str, str | None],
        *,
        evaluation_id: str,
        idempotency_key: str | None,
        incarnation: int,
        now: float,
    ) -> EvaluationStatus:
        def write(db: Connection) -> EvaluationStatus:
            known = None if idempotency_key is None else entries.evaluation(db, None, idempotency_key)
            if known is not None:
                return known
            entry = entries.evaluation_entry(
                spec, sessions, evaluation_id=evaluation_id, idempotency_key=idempotency_key, now=now
            )
            with transaction(db):
                entry.apply(db)
            found = entries.evaluation(db, evaluation_id)
            assert found is not None
            return found

        return await self._write(write)

    async def reward(self, given: RewardEvent) -> bool:
        def write(db: Connection) -> bool:
            with transaction(db):
                before = _last(db)
                entries.reward_entry(given).apply(db)
                return _last(db) > before

        return await self._write(write)

    async def refuse_evaluation(self, evaluation_id: str, session_id: str, why: str) -> None:
        await self._run(entries.refusal_entry(evaluation_id, session_id, why).apply)

    async def evaluation(
        self, evaluation_id: str | None, idempotency_key: str | None = None
    ) -> EvaluationStatus | None:
        return await self._run(entries.evaluation, evaluation_id, idempotency_key)

    async def pending_evaluations(self, incarnation: int) -> tuple[EvaluationStatus, ...]:
        return await self._run(entries.pending_evaluations)


@asynccontextmanager
async def open_sqlite_log(path: Path, *, retention: Retention | None = None) -> AsyncIterator[SqliteLog]:
    """Open the log of a node alone, in a journal that no other process has open."""
    db = await trio.to_thread.run_sync(prepare, path)
    try:
        for statement in TABLES.split(";\n"):
            db.execute(statement)
        yield SqliteLog(db, retention or Retention())
    finally:
        with suppress(sqlite3.Error):
            db.close()
