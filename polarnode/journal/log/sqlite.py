"""The log of a node alone: its journal, with the places of unfinished tasks beside it in memory.

PostgreSQL needs tables for claims, fences and leases. Here one process at a time has the journal open, so all
that is decided in the same step that enqueues the entry, and nothing comes between. What a restart must find
is in the journal: a session with an identity and without an outcome is one that ran.
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
from polarnode.core.task import CAPTURE_HARNESS, EvaluationSpec, ForkSpec, TaskSpec
from polarnode.core.trajectory import Trajectory, Turn
from polarnode.core.weights import PauseMode
from polarnode.groups.group import SessionFacts, make_member
from polarnode.journal import entries, forks, pending_callbacks, queries, retention
from polarnode.journal.entries import (
    ROW_BYTES,
    JournalEntry,
    PublishedSession,
    WeightsRow,
    adapter_of,
    is_deleted,
)
from polarnode.journal.finished_groups import finished_groups
from polarnode.journal.forks import EarlierAttempt, ForkParent
from polarnode.journal.journal import Journal
from polarnode.journal.log.news import NewsCounter
from polarnode.journal.log.place_table import PlaceTable
from polarnode.journal.log.port import (
    FILLED_ANSWERS,
    NO_URL_LIMITS,
    Claim,
    ClaimOffer,
    EndedSession,
    EndingCause,
    FinishAnswer,
    JoinedNode,
    LeasedCallback,
    LogGap,
    LogPage,
    LogStatus,
    LogWeights,
    NodeFacts,
    NodeRow,
    TransferKind,
)
from polarnode.journal.log.rules import check_names, compute_gap
from polarnode.journal.pending_callbacks import EVENT_KINDS, CallbackCounts
from polarnode.journal.retention import PruneInputs
from polarnode.journal.schema import read_snapshot
from polarnode.journal.values import (
    AwaitedConsumers,
    EventFilters,
    RetentionLimits,
    TaskRecord,
    TrajectoryEncoder,
)
from polarnode.merge.trajectory import Identity
from polarnode.support.ids import new_id

Connection = sqlite3.Connection
NO_OTHER_NODES: Final = (
    "a node alone has no other nodes: start it with --log postgresql://… to be one of many"
)


@define(eq=False)
class SqliteLog:
    """The port `Log` for a node alone, whose incarnation is the only one that is alive. `join` must come
    before any claim.
    """

    journal: Journal
    _place_table: PlaceTable = field(factory=PlaceTable, init=False)
    _facts: NodeFacts | None = field(default=None, init=False)  # None before it joins and after it leaves
    _sign_count: int = field(default=0, init=False)
    _report: Mapping[str, Json] = field(factory=dict, init=False)
    _serving: Mapping[str, str] = field(factory=dict, init=False)
    _current: dict[str, str] = field(factory=dict, init=False)  # the current version, by adapter
    _held_versions: set[str] = field(factory=set, init=False)  # versions whose files the node has
    place_news: int = field(default=0, init=False)
    _weight_news: int = field(default=0, init=False)
    _adapter_by_version: dict[str, str] = field(
        factory=dict, init=False
    )  # the adapter of each version that was added
    _shared_versions: set[str] = field(
        factory=set, init=False
    )  # versions in a storage that outlives the node
    _leases: dict[int, tuple[float, int]] = field(factory=dict, init=False)  # by event: end and number
    # True at first, because it is not known yet what an earlier run of the process left.
    callbacks_pending: bool = field(default=True, init=False)
    _ends_in_progress: int = field(
        default=0, init=False
    )  # ends of sessions that are being written, whose events will be pending
    _ends_written: int = field(default=0, init=False)  # such ends that were written
    _restores: list[int] | None = field(default=None, init=False)  # cached: nobody else has the journal open

    @property
    def _news(self) -> NewsCounter:
        return self.journal.commits.news

    shared: ClassVar[bool] = False
    lost: ClassVar[bool] = False  # no other node watches, and a second process on this journal does not start
    least_load: ClassVar[float | None] = None

    def set_load(self, load: float | None) -> None:
        """Do nothing: there is no other node."""

    @property
    def open_places(self) -> int:
        return self._place_table.open_places

    def _announce_places(self) -> None:
        self.place_news += 1
        self._news.announce()

    async def unavailable_reason(self) -> str | None:
        await trio.lowlevel.checkpoint()
        return self.journal.health.damage

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
        # An id that the caller did not choose is new. Open tasks are known without a look at the disk.
        named = idempotency_key is not None or spec.task_id is not None
        while named or self._place_table.has_task(task_id, idempotency_key):
            known = await self.journal.reader.query(_known_task, task_id, idempotency_key)
            if known is not None:
                of_key = idempotency_key is not None and known.idempotency_key == idempotency_key
                if of_key or dump_json(task_json(known.spec)) == dump_json(task_json(spec)):
                    return known
                raise Conflict(f"task {task_id} exists with another spec: choose another task_id")
            if not self._place_table.has_task(task_id, idempotency_key):
                break
            await self.journal.writer.flush()  # another call was first, and its task is being written
        self._place_table.submit(
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
        self._announce_places()
        await self.journal.writer.commit(entry)
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

    async def claim(self, offer: ClaimOffer) -> tuple[Claim, ...]:
        await trio.lowlevel.checkpoint()
        return self._place_table.claim(offer, self._current) if self._is_alive(offer.incarnation) else ()

    async def claim_endings(self, incarnation: int, limit: int) -> tuple[Claim, ...]:
        await trio.lowlevel.checkpoint()
        return self._place_table.claim_endings(limit) if self._is_alive(incarnation) else ()

    async def take_place(self, task_id: str, sample_index: int, incarnation: int) -> Claim | None:
        await trio.lowlevel.checkpoint()
        return self._place_table.take_place(task_id, sample_index) if self._is_alive(incarnation) else None

    async def claims(self, incarnation: int) -> tuple[Claim, ...]:
        await trio.lowlevel.checkpoint()
        return self._place_table.claims() if self._is_alive(incarnation) else ()

    async def record_session(self, identity: Identity) -> None:
        await self.journal.writer.commit(entries.session_entry(identity))

    async def finish_claim(self, claim: Claim, ended: EndedSession) -> FinishAnswer:
        answer = self._place_table.finish_claim(
            claim, usable=make_member(claim.spec.group, ended.facts).usable
        )
        if answer in FILLED_ANSWERS:
            self._announce_places()
            with self._note_pending_callbacks(claim):
                await self.journal.writer.commit(end_entry(ended))
            return answer
        if answer is None:  # the place is over, or was never here
            await self.journal.writer.flush()
            session = await self.session(ended.identity.session_id)
            if session is not None and session.outcome is not None:
                return "already" if session.retried_as is None else "another"
            return "unknown" if await self.task(claim.task_id) is None else "another"
        await trio.lowlevel.checkpoint()
        return answer

    async def put_back(
        self, claim: Claim, ended: EndedSession | None = None, *, counts: bool = True, keep: bool = False
    ) -> Claim | None:
        fresh = new_id()
        was_held, kept = self._place_table.put_back(claim, fresh, counts=counts, keep=keep)
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
            entry = JournalEntry(2 * ROW_BYTES, apply)
        else:
            entry = attempt_entry(ended, fresh, begin)
        self._announce_places()
        await self.journal.writer.commit(entry)
        return kept

    async def publish_session(self, ended: EndedSession, incarnation: int) -> FinishAnswer:
        await self.journal.writer.flush()
        session = await self.session(ended.identity.session_id)
        if session is not None and session.outcome is not None:
            return "already"
        await self.journal.writer.commit(end_entry(ended))
        self._ends_written += 1
        self.callbacks_pending = True  # its task may have a callback
        self._news.announce()
        return "now"

    async def cancel(self, task_id: str, at: float) -> bool:
        found = self._place_table.cancel(task_id)
        if found:
            self._announce_places()
            await self.journal.writer.commit(entries.cancel_entry(task_id, now=at))
        return found

    async def sessions_to_stop(self, incarnation: int) -> Mapping[str, EndingCause]:
        await trio.lowlevel.checkpoint()
        return self._place_table.sessions_to_stop() if self._is_alive(incarnation) else {}

    # ── the node ──────────────────────────────────────────────────────────────

    def _is_alive(self, incarnation: int) -> bool:
        return self._facts is not None and incarnation == self._place_table.incarnation

    async def join(self, facts: NodeFacts) -> JoinedNode:
        if self._place_table.incarnation == 0:
            await self.journal.writer.flush()
            for task in await self.journal.reader.query(_unfinished_tasks):
                self._place_table.add_unfinished(**task)
        self._place_table.incarnation += 1
        self._facts, self._sign_count = facts, 0
        return JoinedNode(incarnation=self._place_table.incarnation, inherited=self._place_table.claims())

    async def give_sign(self, incarnation: int, report: Mapping[str, Json] | None = None) -> bool:
        await trio.lowlevel.checkpoint()
        if not self._is_alive(incarnation):
            return False
        self._sign_count += 1
        self._report = self._report if report is None else report
        return True

    async def read_signs(self) -> Mapping[int, int]:
        await trio.lowlevel.checkpoint()
        return {} if self._facts is None else {self._place_table.incarnation: self._sign_count}

    async def declare_lost(self, incarnation: int, sign: int) -> bool:
        """Raise NotImplementedError: nobody watches a node alone."""
        raise NotImplementedError(NO_OTHER_NODES)

    async def put_back_lost(self) -> int:
        await trio.lowlevel.checkpoint()
        return 0

    async def leave(self, incarnation: int) -> None:
        await trio.lowlevel.checkpoint()
        if self._is_alive(incarnation):
            self._facts = None

    async def nodes(self, *, every: bool = False) -> tuple[NodeRow, ...]:
        await trio.lowlevel.checkpoint()
        if self._facts is None:
            return ()
        return (
            NodeRow(
                incarnation=self._place_table.incarnation,
                facts=self._facts,
                state="alive",
                sign=self._sign_count,
                running=len(self._place_table.claims()),
                serving=self._serving,
                report=self._report,
            ),
        )

    async def node_of(self, session_id: str) -> NodeRow | None:
        known = await self.session(session_id)
        return None if known is None else next(iter(await self.nodes()), None)

    # ── events and consumers ──────────────────────────────────────────────────

    async def log_name(self) -> str:
        return _log_names(self.journal.id, await self._known_restores())[-1]

    async def _known_restores(self) -> list[int]:
        if self._restores is None:
            self._restores = await self.journal.reader.query(_read_restores)
        return self._restores

    async def mark_restored(self) -> str:
        await self.journal.writer.commit(JournalEntry(ROW_BYTES, _mark_restored))
        self._restores = None
        return await self.log_name()

    async def events(
        self,
        after: Cursor,
        *,
        filters: EventFilters | None = None,
        encoder: TrajectoryEncoder | None = None,
        limit: int = 64,
    ) -> LogPage:
        restores = await self._known_restores()
        position, gap = after.position, None
        while True:
            page = await self.journal.reader.events(position, filters=filters, encoder=encoder, limit=limit)
            gap = _find_gap(self.journal.id, restores, after, last=page.last_seq, pruned=page.first_seq - 1)
            if gap is None or gap.position == position:
                return LogPage(log=_log_names(self.journal.id, restores)[-1], page=page, gap=gap)
            position = gap.position

    @property
    def log_status(self) -> LogStatus:
        found = self.journal.commits.progress
        return LogStatus(
            log=_log_names(self.journal.id, self._restores or [])[-1],
            position=found.last_seq,
            pruned=found.first_seq - 1,
            acknowledged=found.acknowledged_seq,
            consumers={name: each.seq for name, each in found.consumers.items()},
            unacknowledged_bytes=found.estimate_bytes(found.events_after(found.acknowledged_seq)),
            oldest_unacknowledged=found.oldest_unacknowledged,
        )

    async def last_cursor(self) -> Cursor:
        return Cursor(position=self.journal.commits.progress.last_seq, log=await self.log_name())

    async def consumer_cursor(self, consumer: str) -> Cursor:
        await trio.lowlevel.checkpoint()
        return Cursor(position=self.journal.consumers.position(consumer), log=await self.log_name())

    async def ensure_consumer(self, consumer: str, begin: Cursor, *, now: float) -> Cursor:
        if consumer in self.journal.commits.progress.consumers:
            return await self.consumer_cursor(consumer)
        return await self.acknowledge(consumer, begin, now=now)

    async def acknowledge(self, consumer: str, cursor: Cursor, *, now: float) -> Cursor:
        wanted, name = cursor.position, await self.log_name()
        if cursor.log not in ("", name):
            restores, found = await self._known_restores(), self.journal.commits.progress
            gap = _find_gap(
                self.journal.id, restores, cursor, last=found.last_seq, pruned=found.first_seq - 1
            )
            wanted = wanted if gap is None else min(wanted, gap.position)
        position = await self.journal.consumers.acknowledge(consumer, wanted, now=now)
        return Cursor(position=position, log=name)

    def track_stream(self, consumer: str, change: int) -> None:
        self.journal.consumers.track_stream(consumer, change)

    async def forget_consumer(self, consumer: str) -> bool:
        return await self.journal.consumers.forget(consumer)

    async def consumers(self) -> tuple[Consumer, ...]:
        await self.journal.writer.flush()
        return self.journal.consumers.describe()

    async def prune(self, retention: RetentionLimits, *, now: float, limit: int = 256) -> int:
        before = self.journal.commits.progress.first_seq
        apply = partial(
            _prune_events, kept=retention, now=now, limit=limit, present=self.journal.consumers.connected
        )
        await self.journal.writer.commit(JournalEntry(ROW_BYTES, apply))
        return self.journal.commits.progress.first_seq - before

    @property
    def news(self) -> int:
        return self._news.count

    async def wait_news(self, seen: int, seconds: float) -> None:
        await self._news.wait(seen, seconds)

    @property
    def event_news(self) -> int:
        return self.journal.commits.progress.last_seq

    # ── weights ───────────────────────────────────────────────────────────────

    async def add_weights(
        self, version: str, body: Json, *, model: str = "", shared: bool = False, at: float
    ) -> None:
        value = body if isinstance(body, dict) else {"value": body}
        if shared:
            self._shared_versions.add(version)
        self._adapter_by_version[version] = adapter_of(body)
        self._announce_weights()
        await self.journal.writer.commit(entries.weights_entry(version, value, now=at))

    async def add_weight_holder(self, version: str, incarnation: int, *, model: str = "") -> None:
        self._held_versions.add(version)
        await trio.lowlevel.checkpoint()

    async def make_current(self, version: str, *, model: str = "", holders: int = 1) -> bool:
        if version not in self._adapter_by_version:  # it may be of an earlier run
            row = await self.journal.reader.query(entries.weight_row, version)
            if row is None:
                return False
            self._adapter_by_version[version] = row.adapter
        if version not in self._shared_versions and version not in self._held_versions:
            return False
        self._current[self._adapter_by_version[version]] = version
        self._announce_weights()
        return True

    async def change_weights(self, version: str, body: Json, *, model: str = "") -> None:
        value = body if isinstance(body, dict) else {"value": body}
        if is_deleted(body) and self._current.get(adapter_of(body)) == version:
            del self._current[adapter_of(body)]
        self._announce_weights()
        await self.journal.writer.commit(entries.weights_changed_entry(version, value))

    async def report_serving(self, incarnation: int, versions: Mapping[str, str]) -> None:
        self._serving = dict(versions)
        self._announce_weights()
        await trio.lowlevel.checkpoint()

    async def renew_certificate(self, incarnation: int, certificate: str) -> None:
        """Do nothing: there is no other node."""

    async def add_transfer(self, kind: TransferKind, name: str, body: Json, *, model: str = "") -> None:
        """Do nothing: there is no other node."""

    async def read_transfer(self, kind: TransferKind, name: str, *, model: str = "") -> Json:
        return None

    async def end_transfer(self, kind: TransferKind, name: str, *, model: str = "") -> None:
        """Do nothing: there is no transfer."""

    async def hold_generation(self, mode: PauseMode | None, *, model: str = "") -> None:
        """Do nothing: there is no other node."""

    async def generation_hold(self, *, model: str = "", follows: bool = False) -> PauseMode | None:
        return None

    async def stale_nodes(self) -> tuple[NodeRow, ...]:
        current = self._current.get("")
        stale = current is not None and self._serving.get("", current) != current
        return await self.nodes() if stale else ()

    async def weights_of(self, version: str, *, model: str = "") -> LogWeights | None:
        row = await self.journal.reader.query(entries.weight_row, version)
        return None if row is None else self._log_weights(row)

    async def weights(
        self, *, model: str = "", adapters: bool = False, latest: bool = False, limit: int | None = None
    ) -> tuple[LogWeights, ...]:
        most = None if adapters else 1 if latest else limit
        rows = await self.journal.reader.query(entries.weight_rows, most, adapters=adapters)
        if latest:  # the version that a node alone recorded last is the current one
            newest: dict[str, WeightsRow] = {}
            for row in rows:
                newest.setdefault(row.adapter, row)
            rows = tuple(newest.values())
        return tuple(map(self._log_weights, rows[:limit]))

    @property
    def weight_news(self) -> int:
        return self._weight_news

    def _announce_weights(self) -> None:
        self._weight_news += 1
        self._news.announce()

    def _log_weights(self, row: WeightsRow) -> LogWeights:
        holds = row.version in self._held_versions and self._facts is not None
        return LogWeights(
            version=row.version,
            adapter=row.adapter,
            at=row.at,
            body=row.body,
            shared=row.version in self._shared_versions,
            current=self._current.get(row.adapter) == row.version,
            counted=True,  # a node alone records only versions that it serves
            holders=(self._place_table.incarnation,) if holds else (),
        )

    # ── callbacks ─────────────────────────────────────────────────────────────

    async def lease_callbacks(
        self, limit: int, *, seconds: float, each: int | None = None, rooms: Mapping[str, int] = NO_URL_LIMITS
    ) -> tuple[LeasedCallback, ...]:
        now, before = trio.current_time(), self._ends_written
        leased = [seq for seq, (until, _) in self._leases.items() if until > now]
        rows = await self.journal.reader.query(
            pending_callbacks.oldest_pending, limit, limit if each is None else each, rooms, leased
        )
        found: list[LeasedCallback] = []
        for seq, task_id, url, key in rows:
            until, lease = self._leases.get(seq, (now, 0))
            if until <= now:  # no other call has leased it meanwhile
                self._leases[seq] = (now + seconds, lease + 1)
                found.append(LeasedCallback(position=seq, key=key, task_id=task_id, url=url, lease=lease + 1))
        if not rows and not (await self.count_callbacks()).pending:
            self.callbacks_pending = bool(self._ends_in_progress) or before != self._ends_written
        return tuple(found)

    @contextmanager
    def _note_pending_callbacks(self, claim: Claim) -> Iterator[None]:
        """Note that callbacks may be pending while the block writes the end of a session."""
        if claim.spec.callback_url is None:
            yield
            return
        self.callbacks_pending = True
        self._ends_in_progress += 1
        try:
            yield
        finally:
            self._ends_in_progress -= 1
            self._ends_written += 1

    async def accept_callback(self, callback: LeasedCallback) -> bool:
        if self._leases.get(callback.position, (0.0, 0))[1] != callback.lease:
            return False
        # The lease has no end, so that nobody else leases the event while its row is still there.
        self._leases[callback.position] = (math.inf, callback.lease)
        apply = partial(pending_callbacks.delete_callback, seq=callback.position)
        await self.journal.writer.commit(JournalEntry(ROW_BYTES, apply))
        self._leases.pop(callback.position, None)
        return True

    async def retry_callback(self, callback: LeasedCallback, *, after_s: float) -> None:
        await trio.lowlevel.checkpoint()
        if self._leases.get(callback.position, (0.0, 0))[1] == callback.lease:
            self._leases[callback.position] = (trio.current_time() + after_s, callback.lease)

    async def count_callbacks(self) -> CallbackCounts:
        return await self.journal.reader.query(pending_callbacks.count_callbacks)

    # ── what the API asks ─────────────────────────────────────────────────────

    async def task(self, task_id: str) -> TaskRecord | None:
        return await self.journal.reader.query(queries.task, task_id)

    async def task_of_key(self, idempotency_key: str) -> TaskRecord | None:
        return await self.journal.reader.query(queries.task_of_key, idempotency_key)

    async def latest_run(self, name: str) -> TaskRecord | None:
        return await self.journal.reader.query(entries.latest_run, name)

    async def tasks(self, *, limit: int = 100, before: str | None = None) -> tuple[TaskRecord, ...]:
        return await self.journal.reader.query(queries.tasks, limit, before)

    async def session(self, session_id: str) -> SessionRecord | None:
        return await self.journal.reader.query(queries.session, session_id)

    async def trajectory(self, session_id: str) -> Trajectory | None:
        return await self.journal.reader.query(queries.trajectory, session_id)

    async def turns(self, session_id: str) -> tuple[Turn, ...]:
        return await self.journal.reader.query(queries.turns, session_id)

    async def forks(self, session_id: str, limit: int) -> tuple[SessionRecord, ...]:
        return await self.journal.reader.query(forks.forks, session_id, limit)

    async def fork_parent(self, fork: ForkSpec) -> ForkParent | None:
        await self.journal.writer.flush()  # the parent may be live, or have just ended
        return await self.journal.reader.query(forks.fork_parent, fork.session, fork.turn)

    async def earlier_attempts(self, place: Identity) -> tuple[EarlierAttempt, ...]:
        await self.journal.writer.flush()  # the session that was lost may have just ended
        return await self.journal.reader.query(forks.earlier_attempts, place)

    async def finished_places(self, task_id: str) -> tuple[SessionFacts, ...]:
        return await self.journal.reader.query(queries.finished_places, task_id)

    async def finished_groups(
        self, limit: int, *, until: float | None = None, state: str | None = None, task_id: str | None = None
    ) -> tuple[Mapping[str, Json], ...]:
        return tuple(await self.journal.reader.query(finished_groups, limit, until, state, task_id))

    # ── evaluations ───────────────────────────────────────────────────────────

    async def placed_sessions(self, task_id: str | None, group_id: str | None) -> tuple[str, ...]:
        return await self.journal.reader.query(entries.placed_sessions, task_id, group_id)

    async def session_ends(self, session_ids: Sequence[str]) -> Mapping[str, bool]:
        return await self.journal.reader.query(entries.session_ends, session_ids)

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
        await self.journal.writer.commit(
            entries.evaluation_entry(
                spec, sessions, evaluation_id=evaluation_id, idempotency_key=idempotency_key, now=now
            )
        )
        found = await self.evaluation(evaluation_id)
        assert found is not None
        return found

    async def write_reward(self, given: RewardEvent) -> bool:
        key = (given.evaluation_id, given.session_id)
        before = await self.journal.reader.query(_reward_number, *key)
        await self.journal.writer.commit(entries.reward_entry(given))
        self._news.announce()
        return before is None and await self.journal.reader.query(_reward_number, *key) is not None

    async def refuse_evaluation(self, evaluation_id: str, session_id: str, why: str) -> None:
        await self.journal.writer.commit(entries.refusal_entry(evaluation_id, session_id, why))

    async def evaluation(
        self, evaluation_id: str | None, idempotency_key: str | None = None
    ) -> EvaluationStatus | None:
        return await self.journal.reader.query(entries.evaluation, evaluation_id, idempotency_key)

    async def pending_evaluations(self, incarnation: int) -> tuple[EvaluationStatus, ...]:
        return await self.journal.reader.query(entries.pending_evaluations)


# ── entries and reads ─────────────────────────────────────────────────────────


def end_entry(ended: EndedSession) -> JournalEntry:
    """Write the event of a session that is over, and with its task's last session also the group's and the
    task's. Only the first end of a session is kept.
    """
    return _entry_with_session(ended, partial(entries.publish_session, it=_published_session(ended)))


def attempt_entry(ended: EndedSession, successor: str, begin: Callable[[Connection], None]) -> JournalEntry:
    """Write the event of a session that lost its place to `successor`, whose row `begin` writes. Both are one
    entry, so that a crash of the node cannot separate them.
    """
    return _entry_with_session(
        ended, partial(entries.replace_session, it=_published_session(ended, successor), begin=begin)
    )


def _entry_with_session(ended: EndedSession, apply: Callable[[Connection], None]) -> JournalEntry:
    """An entry that first writes what `ended` carries and the journal may lack, and then calls `apply`. It
    may lack the identity of a session that never began here, and the turns of one that ran elsewhere.
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

    return JournalEntry(2 * ROW_BYTES + ended.size, write)


def _known_task(db: Connection, task_id: str, idempotency_key: str | None) -> TaskRecord | None:
    """The task with this key, or else with this id."""
    of_key = None if idempotency_key is None else queries.task_of_key(db, idempotency_key)
    return of_key or queries.task(db, task_id)


def _published_session(ended: EndedSession, retried_as: str | None = None) -> PublishedSession:
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
    """Delete a session that left no trajectory, and begin the one that has its place now."""
    db.execute("DELETE FROM turns WHERE session_id = ?", (session_id,))
    db.execute("DELETE FROM sessions WHERE session_id = ? AND outcome IS NULL", (session_id,))
    begin(db)


def _unfinished_tasks(db: Connection) -> list[dict[str, Any]]:
    """The tasks of earlier runs of the process with places that are not over, oldest first, in the form that
    `PlaceTable.add_unfinished` takes.
    """
    open_places = (
        "SELECT DISTINCT task_id FROM sessions WHERE outcome IS NULL AND retried_as IS NULL"
        " AND life < (SELECT value FROM meta WHERE name = 'life')"
    )
    found: list[dict[str, Any]] = []
    with read_snapshot(db):
        ids = db.execute(f"SELECT task_id FROM tasks WHERE task_id IN ({open_places}) ORDER BY number")
        for (task_id,) in ids.fetchall():
            record = queries.recorded_task(db, task_id)
            facts = queries.finished_places(db, task_id)
            began = {
                session_id
                for (session_id,) in db.execute(
                    "SELECT session_id FROM sessions WHERE task_id = ? AND identity IS NOT NULL", (task_id,)
                )
            }
            # Nobody comes back to take the places of captures, because those who opened them lost their
            # sessions. So they count as begun.
            lost = record.spec.harness.name == CAPTURE_HARNESS
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
                "usable": sum(make_member(record.spec.group, each).usable for each in facts),
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


# The prefix of rows of `meta`: each restore has one, whose value is the last event that there was then.
RESTORED_PREFIX: Final = "restored:"


def _read_restores(db: Connection) -> list[int]:
    """The last event at each time that the journal was restored, the first time first."""
    rows = db.execute("SELECT name, value FROM meta WHERE name GLOB ?", (RESTORED_PREFIX + "*",)).fetchall()
    found = {int(name.removeprefix(RESTORED_PREFIX)): int(value) for name, value in rows}
    return [found[number] for number in sorted(found)]


def _log_names(journal: str, restores: Sequence[int]) -> list[str]:
    """The names that the log of the journal has had, the current one last."""
    return [journal, *(f"{journal}-{number}" for number in range(1, len(restores) + 1))]


def _last_event(db: Connection) -> int:
    row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
    return 0 if row is None else int(row[0])


def journal_names(db: Connection, journal: str) -> tuple[int, list[tuple[str, int]]]:
    """The journal's last event, and the names that its log has had, each with the event after which it
    began.
    """
    restores = _read_restores(db)
    names = [journal, *(f"{journal}-{number}" for number in range(1, len(restores) + 1))]
    return _last_event(db), list(zip(names, [0, *restores], strict=True))


def _mark_restored(db: Connection) -> None:
    db.execute(
        "INSERT INTO meta VALUES (?, ?)", (f"{RESTORED_PREFIX}{len(_read_restores(db)) + 1}", _last_event(db))
    )


def _find_gap(
    journal: str, restores: Sequence[int], asked: Cursor, *, last: int, pruned: int
) -> LogGap | None:
    names = _log_names(journal, restores)
    known = asked.log in names
    lost_after = min(restores[names.index(asked.log) :], default=None) if known else None
    return compute_gap(asked, log=names[-1], last=last, pruned=pruned, known=known, lost_after=lost_after)


def _prune_events(
    db: Connection, *, kept: RetentionLimits, now: float, limit: int, present: frozenset[str]
) -> None:
    waiting = AwaitedConsumers(since=now - kept.silence_s, connected=present)
    acknowledged = retention.acknowledged_seq(retention.read_positions(db), waiting)
    retention.prune(db, kept, PruneInputs(now=now, acknowledged=acknowledged, new_entries=limit // 3))
