"""The log of a node alone: its journal, with the places of unfinished tasks beside it in memory.

One process at a time has a journal open, so what PostgreSQL needs claims, fences and leases in tables for is
decided here in the same step that enqueues the entry, and nothing comes between. What a restart must find is
in the journal: a session without an outcome is one that ran.
"""

import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Final

import trio
from attrs import define, field

from polarnode.core.codec.json import dump_json, plain
from polarnode.core.codec.packing import unpack_turn
from polarnode.core.codec.tasks import task_json
from polarnode.core.conversation import Json
from polarnode.core.cursors import Cursor
from polarnode.core.errors import Conflict
from polarnode.core.status import Consumer, EvaluationStatus, RewardEvent, SessionRecord
from polarnode.core.task import CAPTURE, EvaluationSpec, ForkSpec, TaskSpec
from polarnode.core.trajectory import Trajectory, Turn
from polarnode.core.weights import PauseMode
from polarnode.groups.group import Facts, member_of
from polarnode.journal import entries, pending_callbacks, queries, retention
from polarnode.journal.entries import (
    ROW_BYTES,
    Entry,
    PublishedSession,
    WeightsRow,
    adapter_of,
    is_deleted,
)
from polarnode.journal.finished_groups import finished_groups
from polarnode.journal.forks import EarlierAttempt, ForkParent
from polarnode.journal.journal import Journal
from polarnode.journal.log.news import News
from polarnode.journal.log.place_table import PlaceTable
from polarnode.journal.log.port import (
    FILLED,
    NO_ROOMS,
    Claim,
    Ended,
    EndingCause,
    FinishAnswer,
    Joined,
    LeasedCallback,
    LogGap,
    LogPage,
    LogStanding,
    LogWeights,
    NodeFacts,
    NodeRow,
    Offer,
    TransferKind,
)
from polarnode.journal.log.rules import check_names, gap_of
from polarnode.journal.pending_callbacks import EVENT_KINDS, CallbackCounts
from polarnode.journal.retention import Moment
from polarnode.journal.schema import snapshot
from polarnode.journal.values import AwaitedConsumers, Filters, Retention, TaskRecord, TrajectoryEncoder
from polarnode.merge.trajectory import Identity
from polarnode.support.ids import new_id

Connection = sqlite3.Connection
NOT_OURS: Final = "a node alone has no other nodes: start it with --log postgresql://… to be one of many"


@define(eq=False)
class SqliteLog:
    """The port `Log`, for the only incarnation that is alive. `join` comes before any claim."""

    journal: Journal
    _places: PlaceTable = field(factory=PlaceTable, init=False)
    _facts: NodeFacts | None = field(default=None, init=False)  # of the incarnation; None before and after it
    _sign: int = field(default=0, init=False)
    _report: Mapping[str, Json] = field(factory=dict, init=False)
    _serving: Mapping[str, str] = field(factory=dict, init=False)
    _current: dict[str, str] = field(factory=dict, init=False)  # the version that counts, by adapter
    _held: set[str] = field(factory=set, init=False)  # versions whose files the node has
    place_news: int = field(default=0, init=False)
    _weight_news: int = field(default=0, init=False)
    _added: dict[str, str] = field(factory=dict, init=False)  # the adapter of each version that was added
    _shared: set[str] = field(factory=set, init=False)  # versions in a storage that outlives it
    _leases: dict[int, tuple[float, int]] = field(factory=dict, init=False)  # by event: until when, and which
    # what an earlier run of the process left is not known before the first look
    callbacks_pending: bool = field(default=True, init=False)
    _becoming: int = field(
        default=0, init=False
    )  # ends on their way to the disk, whose events will be pending
    _became: int = field(default=0, init=False)  # and those that are there
    _restores: list[int] | None = field(default=None, init=False)  # nobody else has the journal open

    @property
    def _news(self) -> News:
        return self.journal.news

    shared: ClassVar[bool] = False
    lost: ClassVar[bool] = False  # nobody else watches, and a second process of its journal does not start
    least_load: ClassVar[float | None] = None

    def tell_load(self, load: float | None) -> None:
        """There is nobody to tell."""

    @property
    def open_places(self) -> int:
        return self._places.open_places

    def _tell_places(self) -> None:
        self.place_news += 1
        self._news.tell()

    async def reachable(self) -> str | None:
        await trio.lowlevel.checkpoint()
        return self.journal.damage

    # ── tasks and places ──────────────────────────────────────────────────────

    async def submit(
        self,
        spec: TaskSpec,
        *,
        task_id: str,
        session_ids: tuple[str, ...],
        idempotency_key: str | None = None,
        callback_kinds: tuple[str, ...] = EVENT_KINDS,
        submitted: float,
        model: str = "",
    ) -> TaskRecord:
        check_names(spec, task_id, session_ids, idempotency_key)
        # an id that nobody chose is a new one, and what is open is known without a look at the disk
        named = idempotency_key is not None or spec.task_id is not None
        while named or self._places.has(task_id, idempotency_key):
            known = await self.journal.query(_known_task, task_id, idempotency_key)
            if known is not None:
                of_key = idempotency_key is not None and known.idempotency_key == idempotency_key
                if of_key or dump_json(task_json(known.spec)) == dump_json(task_json(spec)):
                    return known
                raise Conflict(f"task {task_id} exists with another spec: choose another task_id")
            if not self._places.has(task_id, idempotency_key):
                break
            await self.journal.flushed()  # another call was first, and its task is on its way to the disk
        self._places.submit(
            spec,
            task_id=task_id,
            session_ids=session_ids,
            idempotency_key=idempotency_key,
            submitted=submitted,
        )
        entry = entries.task_entry(
            spec,
            task_id=task_id,
            session_ids=session_ids,
            idempotency_key=idempotency_key,
            now=submitted,
            callback_kinds=callback_kinds,
        )
        self._tell_places()
        await self.journal.commit(entry)
        return TaskRecord(
            task_id=task_id,
            group_id=spec.group_id or task_id,
            spec=spec,
            idempotency_key=idempotency_key,
            submitted=submitted,
            sessions=tuple(
                SessionRecord(session_id=session_id, task_id=task_id, sample_index=index)
                for index, session_id in enumerate(session_ids)
            ),
        )

    async def claim(self, offer: Offer) -> tuple[Claim, ...]:
        await trio.lowlevel.checkpoint()
        return self._places.claim(offer, self._current) if self._lives(offer.incarnation) else ()

    async def claim_endings(self, incarnation: int, limit: int) -> tuple[Claim, ...]:
        await trio.lowlevel.checkpoint()
        return self._places.claim_endings(limit) if self._lives(incarnation) else ()

    async def take_place(self, task_id: str, sample_index: int, incarnation: int) -> Claim | None:
        await trio.lowlevel.checkpoint()
        return self._places.take(task_id, sample_index) if self._lives(incarnation) else None

    async def claims(self, incarnation: int) -> tuple[Claim, ...]:
        await trio.lowlevel.checkpoint()
        return self._places.claims() if self._lives(incarnation) else ()

    async def session_started(self, identity: Identity) -> None:
        await self.journal.commit(entries.session_entry(identity))

    async def finish(self, claim: Claim, ended: Ended) -> FinishAnswer:
        answer = self._places.finish(claim, usable=member_of(claim.spec.group, ended.facts).usable)
        if answer in FILLED:
            self._tell_places()
            with self._noted_callbacks(claim):
                await self.journal.commit(end_entry(ended))
            return answer
        if answer is None:  # the place is over, or was never here
            await self.journal.flushed()
            session = await self.journal.session(ended.identity.session_id)
            if session is not None and session.outcome is not None:
                return "already" if session.retried_as is None else "another"
            return "unknown" if await self.journal.task(claim.task_id) is None else "another"
        await trio.lowlevel.checkpoint()
        return answer

    async def put_back(
        self, claim: Claim, ended: Ended | None = None, *, counts: bool = True, keep: bool = False
    ) -> Claim | None:
        fresh = new_id()
        was_held, kept = self._places.put_back(claim, fresh, counts=counts, keep=keep)
        if not was_held:
            await trio.lowlevel.checkpoint()
            return None
        begin = partial(
            entries.insert_session,
            session_id=fresh,
            task_id=claim.task_id,
            sample_index=claim.sample_index,
            attempt=claim.attempt + 1,
        )
        if ended is None:
            apply = partial(_forget_and_begin, session_id=claim.session_id, begin=begin)
            entry = Entry(2 * ROW_BYTES, apply)
        else:
            entry = attempt_entry(ended, fresh, begin)
        self._tell_places()
        await self.journal.commit(entry)
        return kept

    async def publish(self, ended: Ended, incarnation: int) -> FinishAnswer:
        await self.journal.flushed()
        session = await self.journal.session(ended.identity.session_id)
        if session is not None and session.outcome is not None:
            return "already"
        await self.journal.commit(end_entry(ended))
        self._became += 1
        self.callbacks_pending = True  # its task may have a callback
        self._news.tell()
        return "now"

    async def cancel(self, task_id: str, at: float) -> bool:
        found = self._places.cancel(task_id)
        if found:
            self._tell_places()
            await self.journal.commit(entries.cancel_entry(task_id, now=at))
        return found

    async def to_stop(self, incarnation: int) -> Mapping[str, EndingCause]:
        await trio.lowlevel.checkpoint()
        return self._places.to_stop() if self._lives(incarnation) else {}

    # ── the node ──────────────────────────────────────────────────────────────

    def _lives(self, incarnation: int) -> bool:
        return self._facts is not None and incarnation == self._places.incarnation

    async def join(self, facts: NodeFacts) -> Joined:
        if self._places.incarnation == 0:
            await self.journal.flushed()
            for task in await self.journal.query(_unfinished_tasks):
                self._places.inherit(**task)
        self._places.incarnation += 1
        self._facts, self._sign = facts, 0
        return Joined(incarnation=self._places.incarnation, inherited=self._places.claims())

    async def sign(self, incarnation: int, report: Mapping[str, Json] | None = None) -> bool:
        await trio.lowlevel.checkpoint()
        if not self._lives(incarnation):
            return False
        self._sign += 1
        self._report = self._report if report is None else report
        return True

    async def signs(self) -> Mapping[int, int]:
        await trio.lowlevel.checkpoint()
        return {} if self._facts is None else {self._places.incarnation: self._sign}

    async def expire(self, incarnation: int, sign: int) -> bool:
        """Nobody watches a node alone."""
        raise NotImplementedError(NOT_OURS)

    async def put_back_lost(self) -> int:
        await trio.lowlevel.checkpoint()
        return 0

    async def leave(self, incarnation: int) -> None:
        await trio.lowlevel.checkpoint()
        if self._lives(incarnation):
            self._facts = None

    async def nodes(self, *, every: bool = False) -> tuple[NodeRow, ...]:
        await trio.lowlevel.checkpoint()
        if self._facts is None:
            return ()
        return (
            NodeRow(
                incarnation=self._places.incarnation,
                facts=self._facts,
                state="alive",
                sign=self._sign,
                running=len(self._places.claims()),
                serving=self._serving,
                report=self._report,
            ),
        )

    async def node_of(self, session_id: str) -> NodeRow | None:
        known = await self.session(session_id)
        return None if known is None else next(iter(await self.nodes()), None)

    # ── events and consumers ──────────────────────────────────────────────────

    async def identity(self) -> str:
        return _names(self.journal.id, await self._known_restores())[-1]

    async def _known_restores(self) -> list[int]:
        if self._restores is None:
            self._restores = await self.journal.query(_restores)
        return self._restores

    async def mark_restored(self) -> str:
        await self.journal.commit(Entry(ROW_BYTES, _mark_restored))
        self._restores = None
        return await self.identity()

    async def events(
        self,
        after: Cursor,
        *,
        filters: Filters | None = None,
        encoder: TrajectoryEncoder | None = None,
        limit: int = 64,
    ) -> LogPage:
        restores = await self._known_restores()
        position, gap = after.position, None
        while True:
            page = await self.journal.events(position, filters=filters, encoder=encoder, limit=limit)
            gap = _find_gap(self.journal.id, restores, after, last=page.last_seq, pruned=page.first_seq - 1)
            if gap is None or gap.position == position:
                return LogPage(log=_names(self.journal.id, restores)[-1], page=page, gap=gap)
            position = gap.position

    @property
    def standing(self) -> LogStanding:
        found = self.journal.progress
        return LogStanding(
            log=_names(self.journal.id, self._restores or [])[-1],
            position=found.last_seq,
            pruned=found.first_seq - 1,
            acknowledged=found.acknowledged_seq,
            consumers={name: each.seq for name, each in found.consumers.items()},
            unacknowledged_bytes=found.about_bytes(found.behind(found.acknowledged_seq)),
            oldest_unacknowledged=found.oldest_unacknowledged,
        )

    async def end(self) -> Cursor:
        return Cursor(position=self.journal.last_seq, log=await self.identity())

    async def position(self, consumer: str) -> Cursor:
        return Cursor(position=await self.journal.position(consumer), log=await self.identity())

    async def meet(self, consumer: str, begin: Cursor, *, now: float) -> Cursor:
        if consumer in self.journal.progress.consumers:
            return await self.position(consumer)
        return await self.acknowledge(consumer, begin, now=now)

    async def acknowledge(self, consumer: str, cursor: Cursor, *, now: float) -> Cursor:
        wanted, name = cursor.position, await self.identity()
        if cursor.log not in ("", name):
            restores, found = await self._known_restores(), self.journal.progress
            gap = _find_gap(
                self.journal.id, restores, cursor, last=found.last_seq, pruned=found.first_seq - 1
            )
            wanted = wanted if gap is None else min(wanted, gap.position)
        position = await self.journal.acknowledge(consumer, wanted, now=now)
        return Cursor(position=position, log=name)

    def attend(self, consumer: str, change: int) -> None:
        self.journal.attend(consumer, change)

    async def forget(self, consumer: str) -> bool:
        return await self.journal.forget(consumer)

    async def consumers(self) -> tuple[Consumer, ...]:
        await self.journal.flushed()
        return self.journal.consumers()

    async def prune(self, retention: Retention, *, now: float, limit: int = 256) -> int:
        before = self.journal.first_seq
        apply = partial(_prune, kept=retention, now=now, limit=limit, present=self.journal.present)
        await self.journal.commit(Entry(ROW_BYTES, apply))
        return self.journal.first_seq - before

    @property
    def news(self) -> int:
        return self._news.count

    async def wait_news(self, seen: int, seconds: float) -> None:
        await self._news.wait(seen, seconds)

    @property
    def event_news(self) -> int:
        return self.journal.last_seq

    # ── weights ───────────────────────────────────────────────────────────────

    async def add_weights(
        self, version: str, body: Json, *, model: str = "", shared: bool = False, at: float
    ) -> None:
        value = body if isinstance(body, dict) else {"value": body}
        if shared:
            self._shared.add(version)
        self._added[version] = adapter_of(body)
        self._tell_of_weights()
        await self.journal.commit(entries.weights_entry(version, value, now=at))

    async def hold_weights(self, version: str, incarnation: int, *, model: str = "") -> None:
        self._held.add(version)
        await trio.lowlevel.checkpoint()

    async def serve_weights(self, version: str, *, model: str = "", holders: int = 1) -> bool:
        if version not in self._added:  # by an earlier run
            row = await self.journal.weights_of(version)
            if row is None:
                return False
            self._added[version] = row.adapter
        if version not in self._shared and version not in self._held:
            return False
        self._current[self._added[version]] = version
        self._tell_of_weights()
        return True

    async def change_weights(self, version: str, body: Json, *, model: str = "") -> None:
        value = body if isinstance(body, dict) else {"value": body}
        if is_deleted(body) and self._current.get(adapter_of(body)) == version:
            del self._current[adapter_of(body)]
        self._tell_of_weights()
        await self.journal.commit(entries.weights_changed_entry(version, value))

    async def serving(self, incarnation: int, versions: Mapping[str, str]) -> None:
        self._serving = dict(versions)
        self._tell_of_weights()
        await trio.lowlevel.checkpoint()

    async def renew_certificate(self, incarnation: int, certificate: str) -> None:
        """There is nobody to tell."""

    async def add_transfer(self, kind: TransferKind, name: str, body: Json, *, model: str = "") -> None:
        """There is nobody to tell."""

    async def transfer(self, kind: TransferKind, name: str, *, model: str = "") -> Json:
        return None

    async def end_transfer(self, kind: TransferKind, name: str, *, model: str = "") -> None:
        """There is none."""

    async def hold(self, mode: PauseMode | None, *, model: str = "") -> None:
        """There is nobody to tell."""

    async def held(self, *, model: str = "", follows: bool = False) -> PauseMode | None:
        return None

    async def stale_nodes(self) -> tuple[NodeRow, ...]:
        current = self._current.get("")
        stale = current is not None and self._serving.get("", current) != current
        return await self.nodes() if stale else ()

    async def weights_of(self, version: str, *, model: str = "") -> LogWeights | None:
        row = await self.journal.weights_of(version)
        return None if row is None else self._weights(row)

    async def weights(
        self, *, model: str = "", adapters: bool = False, latest: bool = False, limit: int | None = None
    ) -> tuple[LogWeights, ...]:
        rows = await (self.journal.adapters() if adapters else self.journal.weights(1 if latest else limit))
        if latest:  # what a node alone wrote down last is the current one
            newest: dict[str, WeightsRow] = {}
            for row in rows:
                newest.setdefault(row.adapter, row)
            rows = tuple(newest.values())
        return tuple(map(self._weights, rows[:limit]))

    @property
    def weight_news(self) -> int:
        return self._weight_news

    def _tell_of_weights(self) -> None:
        self._weight_news += 1
        self._news.tell()

    def _weights(self, row: WeightsRow) -> LogWeights:
        holds = row.version in self._held and self._facts is not None
        return LogWeights(
            version=row.version,
            adapter=row.adapter,
            at=row.at,
            body=row.body,
            shared=row.version in self._shared,
            current=self._current.get(row.adapter) == row.version,
            counted=True,  # a node alone writes down what it serves
            holders=(self._places.incarnation,) if holds else (),
        )

    # ── callbacks ─────────────────────────────────────────────────────────────

    async def lease_callbacks(
        self, limit: int, *, seconds: float, each: int | None = None, rooms: Mapping[str, int] = NO_ROOMS
    ) -> tuple[LeasedCallback, ...]:
        now, before = trio.current_time(), self._became
        leased = [seq for seq, (until, _) in self._leases.items() if until > now]
        rows = await self.journal.query(
            pending_callbacks.heads, limit, limit if each is None else each, rooms, leased
        )
        found: list[LeasedCallback] = []
        for seq, task_id, url, key in rows:
            until, lease = self._leases.get(seq, (now, 0))
            if until <= now:  # no other call was faster
                self._leases[seq] = (now + seconds, lease + 1)
                found.append(LeasedCallback(position=seq, key=key, task_id=task_id, url=url, lease=lease + 1))
        if not rows and not (await self.callback_counts()).pending:
            self.callbacks_pending = bool(self._becoming) or before != self._became
        return tuple(found)

    @contextmanager
    def _noted_callbacks(self, claim: Claim) -> Iterator[None]:
        """Around the write of an end, whose events may be pending from some moment of it on."""
        if claim.spec.callback_url is None:
            yield
            return
        self.callbacks_pending = True
        self._becoming += 1
        try:
            yield
        finally:
            self._becoming -= 1
            self._became += 1

    async def callback_taken(self, callback: LeasedCallback) -> bool:
        if self._leases.get(callback.position, (0.0, 0))[1] != callback.lease:
            return False
        # nobody else leases it while its row is still there
        self._leases[callback.position] = (math.inf, callback.lease)
        apply = partial(pending_callbacks.taken, seq=callback.position)
        await self.journal.commit(Entry(ROW_BYTES, apply))
        self._leases.pop(callback.position, None)
        return True

    async def callback_failed(self, callback: LeasedCallback, *, after_s: float) -> None:
        await trio.lowlevel.checkpoint()
        if self._leases.get(callback.position, (0.0, 0))[1] == callback.lease:
            self._leases[callback.position] = (trio.current_time() + after_s, callback.lease)

    async def callback_counts(self) -> CallbackCounts:
        return await self.journal.query(pending_callbacks.counts)

    # ── what the API asks ─────────────────────────────────────────────────────

    async def task(self, task_id: str) -> TaskRecord | None:
        return await self.journal.task(task_id)

    async def task_of_key(self, idempotency_key: str) -> TaskRecord | None:
        return await self.journal.task_of_key(idempotency_key)

    async def latest_run(self, name: str) -> TaskRecord | None:
        return await self.journal.latest_run(name)

    async def tasks(self, *, limit: int = 100, before: str | None = None) -> tuple[TaskRecord, ...]:
        return await self.journal.tasks(limit=limit, before=before)

    async def session(self, session_id: str) -> SessionRecord | None:
        return await self.journal.session(session_id)

    async def trajectory(self, session_id: str) -> Trajectory | None:
        return await self.journal.trajectory(session_id)

    async def turns(self, session_id: str) -> tuple[Turn, ...]:
        return await self.journal.turns(session_id)

    async def forks(self, session_id: str, limit: int) -> tuple[SessionRecord, ...]:
        return await self.journal.forks(session_id, limit)

    async def fork_parent(self, fork: ForkSpec) -> ForkParent | None:
        return await self.journal.fork_parent(fork)

    async def earlier_attempts(self, place: Identity) -> tuple[EarlierAttempt, ...]:
        return await self.journal.earlier_attempts(place)

    async def places_over(self, task_id: str) -> tuple[Facts, ...]:
        return await self.journal.places_over(task_id)

    async def finished_groups(
        self, limit: int, *, until: float | None = None, state: str | None = None, task_id: str | None = None
    ) -> tuple[Mapping[str, Json], ...]:
        return tuple(await self.journal.query(finished_groups, limit, until, state, task_id))

    # ── evaluations ───────────────────────────────────────────────────────────

    async def places_of(self, task_id: str | None, group_id: str | None) -> tuple[str, ...]:
        return await self.journal.query(entries.places_of, task_id, group_id)

    async def session_ends(self, session_ids: Sequence[str]) -> Mapping[str, bool]:
        return await self.journal.query(entries.standing, session_ids)

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
        if idempotency_key is not None:
            known = await self.evaluation(None, idempotency_key)
            if known is not None:
                return known
        await self.journal.commit(
            entries.evaluation_entry(
                spec, sessions, evaluation_id=evaluation_id, idempotency_key=idempotency_key, now=now
            )
        )
        found = await self.evaluation(evaluation_id)
        assert found is not None
        return found

    async def reward(self, given: RewardEvent) -> bool:
        key = (given.evaluation_id, given.session_id)
        before = await self.journal.query(_reward_number, *key)
        await self.journal.commit(entries.reward_entry(given))
        self._news.tell()
        return before is None and await self.journal.query(_reward_number, *key) is not None

    async def refuse_evaluation(self, evaluation_id: str, session_id: str, why: str) -> None:
        await self.journal.commit(entries.refusal_entry(evaluation_id, session_id, why))

    async def evaluation(
        self, evaluation_id: str | None, idempotency_key: str | None = None
    ) -> EvaluationStatus | None:
        return await self.journal.query(entries.evaluation, evaluation_id, idempotency_key)

    async def pending_evaluations(self, incarnation: int) -> tuple[EvaluationStatus, ...]:
        return await self.journal.query(entries.pending_evaluations)


# ── entries and reads ─────────────────────────────────────────────────────────


def end_entry(ended: Ended) -> Entry:
    """A session is over: its event, and with its task's last session also the group's and the task's. Only
    the first end of a session is kept.
    """
    return _entry(ended, partial(entries.publish_session, it=_published(ended)))


def attempt_entry(ended: Ended, successor: str, begin: Callable[[Connection], None]) -> Entry:
    """A session lost its place to `successor`, whose row `begin` writes. They are one entry, so that a crash
    of the node cannot separate them.
    """
    return _entry(ended, partial(entries.replace_session, it=_published(ended, successor), begin=begin))


def _entry(ended: Ended, apply: Callable[[Connection], None]) -> Entry:
    """`apply` after what `ended` carries and the journal may lack: the identity of a session that never began
    here, and turns of one that ran elsewhere.
    """

    def write(db: Connection) -> None:
        for body in ended.parts[1:]:
            turn = unpack_turn(body)
            entries.insert_turn(db, row=(turn.session_id, turn.index, len(turn.sampled), body))
        began = "SELECT 1 FROM sessions WHERE session_id = ? AND identity IS NOT NULL"
        if db.execute(began, (ended.identity.session_id,)).fetchone() is None:
            body = dump_json(plain(ended.identity))
            entries.start_session(db, identity=ended.identity, body=body)
        apply(db)

    return Entry(2 * ROW_BYTES + ended.size, write)


def _known_task(db: Connection, task_id: str, idempotency_key: str | None) -> TaskRecord | None:
    """The task of this key, or else of this id."""
    of_key = None if idempotency_key is None else queries.task_of_key(db, idempotency_key)
    return of_key or queries.task(db, task_id)


def _published(ended: Ended, retried_as: str | None = None) -> PublishedSession:
    identity = ended.identity
    return PublishedSession(
        session_id=identity.session_id,
        task_id=identity.task_id,
        group_id=identity.group_id,
        sample_index=identity.sample_index,
        attempt=identity.attempt,
        outcome=ended.outcome,
        reward=ended.reward,
        trainable=ended.trainable,
        staleness=ended.staleness,
        body=ended.parts[0],
        now=ended.finished,
        retried_as=retried_as,
    )


def _forget_and_begin(db: Connection, *, session_id: str, begin: Any) -> None:
    """Delete a session that left nothing, and begin the one that has its place now."""
    db.execute("DELETE FROM turns WHERE session_id = ?", (session_id,))
    db.execute("DELETE FROM sessions WHERE session_id = ? AND outcome IS NULL", (session_id,))
    begin(db)


def _unfinished_tasks(db: Connection) -> list[dict[str, Any]]:
    """The tasks of an earlier run of the process that have places which are not over, oldest first, as
    `PlaceTable.inherit` takes them.
    """
    open_places = (
        "SELECT DISTINCT task_id FROM sessions WHERE outcome IS NULL AND retried_as IS NULL"
        " AND life < (SELECT value FROM meta WHERE name = 'life')"
    )
    found: list[dict[str, Any]] = []
    with snapshot(db):
        ids = db.execute(f"SELECT task_id FROM tasks WHERE task_id IN ({open_places}) ORDER BY number")
        for (task_id,) in ids.fetchall():
            record = queries.recorded_task(db, task_id)
            facts = queries.places_over(db, task_id)
            began = {
                session_id
                for (session_id,) in db.execute(
                    "SELECT session_id FROM sessions WHERE task_id = ? AND identity IS NOT NULL", (task_id,)
                )
            }
            # nobody comes back to take the places of captures: those who opened them lost their sessions
            lost = record.spec.harness.name == CAPTURE
            sessions = {
                each.sample_index: (each.session_id, each.attempt, lost or each.session_id in began)
                for each in record.sessions
                if each.outcome is None
            }
            task = {
                "spec": record.spec,
                "task_id": task_id,
                "idempotency_key": record.idempotency_key,
                "submitted": record.submitted,
                "sessions": sessions,
                "usable": sum(member_of(record.spec.group, each).usable for each in facts),
                "cancelled": record.cancelled is not None,
                "readable": record.damaged is None,
            }
            found.append(task)
    return found


def _reward_number(db: Connection, evaluation_id: str, session_id: str) -> int | None:
    """The number of the reward that an evaluation gave a session."""
    row = db.execute(
        "SELECT n FROM evaluated WHERE evaluation_id = ? AND session_id = ?", (evaluation_id, session_id)
    ).fetchone()
    return None if row is None else row[0]


# Each restore is a row of `meta` whose value is the last event there was then.
RESTORED: Final = "restored:"


def _restores(db: Connection) -> list[int]:
    """After which event the journal was restored, for each time, the first first."""
    rows = db.execute("SELECT name, value FROM meta WHERE name GLOB ?", (RESTORED + "*",)).fetchall()
    found = {int(name.removeprefix(RESTORED)): int(value) for name, value in rows}
    return [found[number] for number in sorted(found)]


def _names(journal: str, restores: Sequence[int]) -> list[str]:
    """What the journal was called, the name of today last."""
    return [journal, *(f"{journal}-{number}" for number in range(1, len(restores) + 1))]


def _last(db: Connection) -> int:
    row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
    return 0 if row is None else int(row[0])


def journal_names(db: Connection, journal: str) -> tuple[int, list[tuple[str, int]]]:
    """The journal's last event, and the names that it had, each with the event after which it had it."""
    restores = _restores(db)
    names = [journal, *(f"{journal}-{number}" for number in range(1, len(restores) + 1))]
    return _last(db), list(zip(names, [0, *restores], strict=True))


def _mark_restored(db: Connection) -> None:
    db.execute("INSERT INTO meta VALUES (?, ?)", (f"{RESTORED}{len(_restores(db)) + 1}", _last(db)))


def _find_gap(
    journal: str, restores: Sequence[int], asked: Cursor, *, last: int, pruned: int
) -> LogGap | None:
    names = _names(journal, restores)
    known = asked.log in names
    lost_after = min(restores[names.index(asked.log) :], default=None) if known else None
    return gap_of(asked, log=names[-1], last=last, pruned=pruned, known=known, lost_after=lost_after)


def _prune(db: Connection, *, kept: Retention, now: float, limit: int, present: frozenset[str]) -> None:
    waiting = AwaitedConsumers(since=now - kept.silence_s, present=present)
    acknowledged = retention.acknowledged_seq(retention.positions(db), waiting)
    retention.prune(db, kept, Moment(now=now, acknowledged=acknowledged, came=limit // 3))
