"""The log in PostgreSQL. Each method of the port runs a function of a connection in a thread.

A node has three connections: the writer's (claims, bodies, finishing), the reader's (pages and queries) and
the watcher's, which gives signs of life and listens, so that no body of 100 MB delays a sign. While the log
is away every call raises LogAway. Nothing is kept here to be written later, because only the node knows what
it still has.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar, Concatenate, Final, ParamSpec, TypeVar

import psycopg
import trio
from attrs import define, field

from polarnode.core.conversation import Json
from polarnode.core.cursors import Cursor
from polarnode.core.status import Consumer, EvaluationStatus, RewardEvent, SessionRecord
from polarnode.core.task import EvaluationSpec, ForkSpec, TaskSpec
from polarnode.core.trajectory import Trajectory, Turn
from polarnode.core.weights import PauseMode
from polarnode.groups.group import SessionFacts
from polarnode.journal.forks import EarlierAttempt, ForkParent
from polarnode.journal.held import KEEP_ACKNOWLEDGED_S
from polarnode.journal.log.news import NewsCounter
from polarnode.journal.log.port import (
    NO_URL_LIMITS,
    Claim,
    ClaimOffer,
    EndedSession,
    EndingCause,
    FinishAnswer,
    JoinedNode,
    LeasedCallback,
    LogPage,
    LogStatus,
    LogUnavailable,
    LogWeights,
    NodeFacts,
    NodeRow,
    TransferKind,
)
from polarnode.journal.log.postgres import (
    callbacks,
    evaluations,
    events,
    membership,
    places,
    queries,
    weights,
)
from polarnode.journal.log.postgres.connection import Database, LogConnection, check_dsn
from polarnode.journal.log.postgres.migrations import prepare_tables
from polarnode.journal.log.watching import SilenceWatch
from polarnode.journal.pending_callbacks import EVENT_KINDS, CallbackCounts
from polarnode.journal.queries import ByteCache
from polarnode.journal.values import (
    EventFilters,
    RetentionLimits,
    TaskRecord,
    TrajectoryEncoder,
    json_encoder,
)
from polarnode.merge.trajectory import Identity

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

SIGN_INTERVAL_S: Final = 1.0  # between signs of life
# Between looks at what no notification announces, such as the places that a dead node left to others, and the
# queue's length. With 64 nodes one of them looks every 80 ms.
POLL_INTERVAL_S: Final = 5.0
LISTEN_TIMEOUT_S: Final = (
    0.25  # one wait for notifications: a due sign, and closing, may be late by this much
)
# Open places are counted up to this number: no node takes tasks beyond it, and counting takes some
# milliseconds.
MAX_COUNTED_PLACES: Final = 50_000
# Between two looks at the bytes of all events. One takes some ten milliseconds for 100,000 events.
MEASURE_INTERVAL_S: Final = 60.0
# After this long without an answer to the watcher, which asks every second, the log counts as away: a server
# that hangs gives no error.
SILENT_SERVER_S: Final = 5.0
RETRY_DELAY_S: Final = 0.5  # between attempts to reach a log that is away
PRUNE_S: Final = 10.0  # between looks at what retention may delete: one takes a millisecond
# Between looks while it deletes, so that a finish that waits for the writer comes in between.
PRUNE_PAUSE_S: Final = 0.1
# Events younger than this are spared. A node sends results younger than half of it again to a new primary. A
# task that is unknown there must have been lost and not pruned, or all of it would run again.
MIN_EVENT_AGE_S: Final = 2 * KEEP_ACKNOWLEDGED_S
SWEEP_INTERVAL_S: Final = 3600.0  # between looks at what a node that died may have left


@define(eq=False)
class PostgresLog:
    """The port `Log`. Created by `open_postgres_log`."""

    _writer: LogConnection
    _reader: LogConnection
    _watcher: LogConnection
    _retention: RetentionLimits = field(factory=RetentionLimits)
    _event_cache: ByteCache = field(factory=ByteCache)
    _news: NewsCounter = field(factory=NewsCounter)
    place_news: int = field(default=0, init=False)
    weight_news: int = field(default=0, init=False)
    event_news: int = field(default=0, init=False)
    open_places: int = field(default=0, init=False)
    callbacks_pending: bool = field(default=False, init=False)
    log_status: LogStatus = field(factory=LogStatus, init=False)
    _measured_at: float = field(default=0.0, init=False)  # when the bytes in `standing` were read
    _answered_at: float | None = field(default=None, init=False)  # when the watcher last had an answer
    _open_streams: Counter[str] = field(factory=Counter, init=False)  # streams open here, by consumer
    _changed_consumers: set[str] = field(
        factory=set, init=False
    )  # consumers with changed streams since the last sign
    incarnation: int | None = field(default=None, init=False)
    shared: ClassVar[bool] = True
    lost: bool = field(default=False, init=False)  # this incarnation was declared lost, or replaced
    least_load: float | None = field(default=None, init=False)
    _load: float | None = field(default=None, init=False)
    _silence_watch: SilenceWatch = field(factory=SilenceWatch, init=False)
    _listening_on: Database | None = field(default=None, init=False)  # the connection that sent LISTEN
    _polled_at: float = field(default=float("-inf"), init=False)  # when places were counted last
    _swept_at: float = field(default=float("-inf"), init=False)

    async def _write(
        self, call: Callable[Concatenate[Database, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._writer.run(call, *args, **kwargs)

    async def _read(
        self, call: Callable[Concatenate[Database, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._reader.run(call, *args, **kwargs)

    async def unavailable_reason(self) -> str | None:
        await trio.lowlevel.checkpoint()
        # The watcher asks every second. The other connections notice that the server is back when they are
        # used.
        away = self._watcher.unavailable_reason
        silent = 0.0 if self._answered_at is None else time.monotonic() - self._answered_at
        if away is None and silent > SILENT_SERVER_S:
            return f"it has not answered for {silent:.0f} seconds"
        return away

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
        def write(db: Database) -> TaskRecord:
            found = places.submit(
                db,
                spec,
                task_id=task_id,
                session_ids=session_ids,
                idempotency_key=idempotency_key,
                callback_kinds=callback_kinds,
                submitted=submitted,
                model=model,
            )
            record = queries.task(db, found)
            assert record is not None
            return record

        return await self._write(write)

    async def claim(self, offer: ClaimOffer) -> tuple[Claim, ...]:
        return await self._write(places.claim, offer)

    async def claim_endings(self, incarnation: int, limit: int) -> tuple[Claim, ...]:
        return await self._write(places.claim_endings, incarnation, limit)

    async def take_place(self, task_id: str, sample_index: int, incarnation: int) -> Claim | None:
        return await self._write(places.take_place, task_id, sample_index, incarnation)

    async def claims(self, incarnation: int) -> tuple[Claim, ...]:
        return await self._write(places.claims, incarnation)

    async def record_session(self, identity: Identity) -> None:
        await self._write(places.record_session, identity, self.incarnation)

    async def finish_claim(self, claim: Claim, ended: EndedSession) -> FinishAnswer:
        answer = await self._write(places.finish_claim, claim, ended)
        if claim.spec.callback_url is not None:
            self.callbacks_pending = True  # at once; the watcher would see it within a second
        return answer

    async def put_back(
        self, claim: Claim, ended: EndedSession | None = None, *, counts: bool = True, keep: bool = False
    ) -> Claim | None:
        return await self._write(places.put_back, claim, ended, counts=counts, keep=keep)

    async def publish_session(self, ended: EndedSession, incarnation: int) -> FinishAnswer:
        return await self._write(places.publish_session, ended, incarnation)

    async def cancel(self, task_id: str, at: float) -> bool:
        return await self._write(places.cancel, task_id, at)

    async def sessions_to_stop(self, incarnation: int) -> Mapping[str, EndingCause]:
        return await self._read(places.sessions_to_stop, incarnation)

    # ── nodes ─────────────────────────────────────────────────────────────────

    def set_load(self, load: float | None) -> None:
        self._load = load

    async def join(self, facts: NodeFacts) -> JoinedNode:
        joined = await self._write(membership.join, facts)
        self.incarnation, self.lost = joined.incarnation, False
        self._changed_consumers |= set(self._open_streams)
        return joined

    async def renew_certificate(self, incarnation: int, certificate: str) -> None:
        await self._write(membership.renew_certificate, incarnation, certificate)

    async def give_sign(self, incarnation: int, report: Mapping[str, Json] | None = None) -> bool:
        return (await self._send_sign(incarnation, report)).signed

    async def _send_sign(
        self, incarnation: int | None, report: Mapping[str, Json] | None
    ) -> membership.SignAnswer:
        """Give a sign of life, with which the log learns which consumers read here."""
        attended, self._changed_consumers = self._changed_consumers, set()
        reading = dict(self._open_streams) if attended else None
        try:
            beat = await self._watcher.run(membership.give_sign, incarnation, report, reading, self._load)
            if attended:
                await self._watcher.run(events.note_consumers_seen, tuple(attended), time.time())
        except LogUnavailable:
            self._changed_consumers |= attended
            raise
        return beat

    async def read_signs(self) -> Mapping[int, int]:
        return await self._watcher.run(membership.read_signs)

    async def declare_lost(self, incarnation: int, sign: int) -> bool:
        return await self._watcher.run(membership.declare_lost, incarnation, sign)

    async def put_back_lost(self) -> int:
        return await self._watcher.run(places.put_back_lost)

    async def leave(self, incarnation: int) -> None:
        await self._write(membership.leave, incarnation)

    async def nodes(self, *, every: bool = False) -> tuple[NodeRow, ...]:
        return await self._read(membership.nodes, every=every)

    async def node_of(self, session_id: str) -> NodeRow | None:
        return await self._read(membership.node_of, session_id)

    async def watch_nodes(self) -> None:
        """Give this node's signs, listen, and put back what silent nodes hold, until cancelled."""
        signed, opened = (
            -SIGN_INTERVAL_S,
            0,
        )  # a new connection has missed notifications, so all kinds count as news
        while True:
            try:
                asked = time.monotonic()
                if asked - signed >= SIGN_INTERVAL_S:
                    signed = asked
                    await self._watch_once()
                told = await self._watcher.run(self._wait_notifications, LISTEN_TIMEOUT_S)
                if self._watcher.times_opened != opened:
                    opened, told = self._watcher.times_opened, told | {"places", "weights", "events"}
                self._announce(told)
            except LogUnavailable:
                self._announce({"away"})  # those who wait for news look again, and learn that the log is away
                await trio.sleep(RETRY_DELAY_S)

    def _announce(self, told: Collection[str]) -> None:
        """Wake those who wait for news of these kinds."""
        # News of weights counts too: a new version may let this node claim again.
        self.place_news += not {"places", "orders", "weights", "away"}.isdisjoint(told)
        self.weight_news += "weights" in told
        self.event_news += not {"events", "away"}.isdisjoint(told)
        if told:
            self._news.announce()

    def _wait_notifications(self, db: Database, seconds: float) -> set[str]:
        """Wait for notifications, and return their kinds."""
        if db is not self._listening_on:
            db.execute("LISTEN polarnode")
            self._listening_on = db
        return {each.payload for each in db.notifies(timeout=seconds, stop_after=1)}

    async def _watch_once(self) -> None:
        """Give one sign, and look once at the signs of others."""
        incarnation, asked, opened = self.incarnation, time.monotonic(), self._watcher.times_opened
        beat = await self._send_sign(incarnation, None)
        self.callbacks_pending, self._answered_at = beat.callbacks_pending, time.monotonic()
        others = (load for other, load in beat.loads.items() if other != incarnation)
        self.least_load = min(others, default=None)
        if incarnation is not None and not beat.signed and incarnation == self.incarnation:
            self.lost = True
            self._announce({"places"})
        expired = False
        for other, sign in self._silence_watch.find_silent(beat.signs, asked=asked, now=time.monotonic()):
            # Only the connection that read the signs may declare a node lost: another one may be to another
            # server, on which nobody could give a sign yet.
            if self._watcher.times_opened != opened:
                break
            if other != incarnation and await self.declare_lost(other, sign):
                logger.warning("node incarnation %d gave no sign of life for its lease: it is lost", other)
                expired = True
        # The node that declares another lost puts back its places at once. The others would do so later, if
        # it died in between.
        if expired or asked - self._polled_at >= POLL_INTERVAL_S:
            await self.put_back_lost()
            self.open_places = await self._watcher.run(places.count_open, MAX_COUNTED_PLACES)
            await self.update_status()
            self._polled_at = asked

    async def update_status(self) -> None:
        """Read the state of the log."""
        now = time.time()
        weigh = now - self._measured_at >= MEASURE_INTERVAL_S
        found = await self._watcher.run(
            events.read_log_status, now - self._retention.silence_s, self.log_status, weigh=weigh
        )
        self.log_status = found
        if weigh:
            self._measured_at = now
            self._changed_consumers |= set(
                self._open_streams
            )  # consumers that read for days count as seen too

    # ── events and consumers ──────────────────────────────────────────────────

    async def log_name(self) -> str:
        return await self._write(events.log_name)

    async def mark_restored(self) -> str:
        return await self._write(events.mark_restored)

    async def events(
        self,
        after: Cursor,
        *,
        filters: EventFilters | None = None,
        encoder: TrajectoryEncoder | None = None,
        limit: int = 64,
    ) -> LogPage:
        return await self._read(
            events.events,
            after,
            limit,
            filters or EventFilters(),
            encoder or json_encoder(),
            self._event_cache,
        )

    async def last_cursor(self) -> Cursor:
        return await self._read(events.last_cursor)

    async def consumer_cursor(self, consumer: str) -> Cursor:
        return await self._read(events.consumer_cursor, consumer)

    async def ensure_consumer(self, consumer: str, begin: Cursor, *, now: float) -> Cursor:
        return await self._write(events.ensure_consumer, consumer, begin, now, self._retention.silence_s)

    async def acknowledge(self, consumer: str, cursor: Cursor, *, now: float) -> Cursor:
        return await self._write(events.acknowledge, consumer, cursor, now, self._retention.silence_s)

    def track_stream(self, consumer: str, change: int) -> None:
        self._open_streams[consumer] += change
        self._open_streams += Counter()  # drops those at 0
        self._changed_consumers.add(consumer)

    async def forget_consumer(self, consumer: str) -> bool:
        return await self._write(events.forget_consumer, consumer)

    async def consumers(self) -> tuple[Consumer, ...]:
        return await self._read(events.consumers, time.time() - self._retention.silence_s)

    async def prune(
        self, retention: RetentionLimits, *, now: float, limit: int = 256, young: float = math.inf
    ) -> int:
        if time.monotonic() - self._swept_at >= SWEEP_INTERVAL_S:
            self._swept_at = time.monotonic()
            await self._write(events.sweep_leftovers)
        return await self._write(events.prune, retention, now, limit, young)

    async def run_retention(self) -> None:
        """Delete what retention no longer keeps, until cancelled. All nodes do this, one at a time."""
        while True:
            pruned = 0
            try:
                now = time.time()
                pruned = await self.prune(self._retention, now=now, young=now - MIN_EVENT_AGE_S)
            except LogUnavailable:
                pass  # the watcher reports this
            except psycopg.Error:
                logger.exception("the log could not be pruned: it grows until that is mended")
            await trio.sleep(PRUNE_PAUSE_S if pruned else PRUNE_S)

    @property
    def news(self) -> int:
        return self._news.count

    async def wait_news(self, seen: int, seconds: float) -> None:
        await self._news.wait(seen, seconds)

    # ── weights ───────────────────────────────────────────────────────────────

    async def add_weights(
        self, version: str, body: Json, *, model: str = "", shared: bool = False, at: float
    ) -> None:
        await self._write(weights.add_weights, version, body, model=model, shared=shared, at=at)

    async def add_weight_holder(self, version: str, incarnation: int, *, model: str = "") -> None:
        await self._write(weights.add_weight_holder, version, incarnation, model=model)

    async def make_current(self, version: str, *, model: str = "", holders: int = 2) -> bool:
        return await self._write(weights.make_current, version, model=model, holders=holders)

    async def change_weights(self, version: str, body: Json, *, model: str = "") -> None:
        await self._write(weights.change_weights, version, body, model=model)

    async def report_serving(self, incarnation: int, versions: Mapping[str, str]) -> None:
        await self._write(weights.report_serving, incarnation, versions)

    async def add_transfer(self, kind: TransferKind, name: str, body: Json, *, model: str = "") -> None:
        await self._write(weights.add_transfer, kind, name, body, model=model)

    async def read_transfer(self, kind: TransferKind, name: str, *, model: str = "") -> Json:
        return await self._read(weights.read_transfer, kind, name, model=model)

    async def end_transfer(self, kind: TransferKind, name: str, *, model: str = "") -> None:
        await self._write(weights.end_transfer, kind, name, model=model)

    async def hold_generation(self, mode: PauseMode | None, *, model: str = "") -> None:
        await self._write(weights.hold_generation, mode, model=model)

    async def generation_hold(self, *, model: str = "", follows: bool = False) -> PauseMode | None:
        return await self._read(weights.generation_hold, model=model, follows=follows)

    async def stale_nodes(self) -> tuple[NodeRow, ...]:
        return await self._read(weights.stale_nodes)

    async def weights_of(self, version: str, *, model: str = "") -> LogWeights | None:
        return await self._read(weights.weights_of, version, model=model)

    async def weights(
        self, *, model: str = "", adapters: bool = False, latest: bool = False, limit: int | None = None
    ) -> tuple[LogWeights, ...]:
        return await self._read(weights.weights, model=model, adapters=adapters, latest=latest, limit=limit)

    # ── callbacks ─────────────────────────────────────────────────────────────

    async def lease_callbacks(
        self, limit: int, *, seconds: float, each: int | None = None, rooms: Mapping[str, int] = NO_URL_LIMITS
    ) -> tuple[LeasedCallback, ...]:
        return await self._write(callbacks.lease_callbacks, limit, seconds=seconds, each=each, rooms=rooms)

    async def accept_callback(self, callback: LeasedCallback) -> bool:
        return await self._write(callbacks.accept_callback, callback)

    async def retry_callback(self, callback: LeasedCallback, *, after_s: float) -> None:
        await self._write(callbacks.retry_callback, callback, after_s)

    async def count_callbacks(self) -> CallbackCounts:
        return await self._read(callbacks.count_callbacks)

    # ── what the API asks ─────────────────────────────────────────────────────

    async def task(self, task_id: str) -> TaskRecord | None:
        return await self._read(queries.task, task_id)

    async def task_of_key(self, idempotency_key: str) -> TaskRecord | None:
        return await self._read(queries.task_of_key, idempotency_key)

    async def latest_run(self, name: str) -> TaskRecord | None:
        return await self._read(queries.latest_run, name)

    async def tasks(self, *, limit: int = 100, before: str | None = None) -> tuple[TaskRecord, ...]:
        return await self._read(queries.tasks, limit, before)

    async def session(self, session_id: str) -> SessionRecord | None:
        return await self._read(queries.session, session_id)

    async def trajectory(self, session_id: str) -> Trajectory | None:
        return await self._read(events.trajectory, session_id)

    async def turns(self, session_id: str) -> tuple[Turn, ...]:
        found = await self.trajectory(session_id)
        return () if found is None else found.turns

    async def forks(self, session_id: str, limit: int) -> tuple[SessionRecord, ...]:
        return await self._read(queries.forks, session_id, limit)

    async def fork_parent(self, fork: ForkSpec) -> ForkParent | None:
        return await self._read(queries.fork_parent, fork)

    async def earlier_attempts(self, place: Identity) -> tuple[EarlierAttempt, ...]:
        return await self._read(queries.earlier_attempts, place)

    async def finished_places(self, task_id: str) -> tuple[SessionFacts, ...]:
        return tuple(facts for facts, _ in await self._read(places.read_facts, task_id))

    async def finished_groups(
        self, limit: int, *, until: float | None = None, state: str | None = None, task_id: str | None = None
    ) -> tuple[Mapping[str, Json], ...]:
        return await self._read(queries.finished_groups, limit, until, state, task_id)

    # ── evaluations ───────────────────────────────────────────────────────────

    async def placed_sessions(self, task_id: str | None, group_id: str | None) -> tuple[str, ...]:
        return await self._read(evaluations.placed_sessions, task_id, group_id)

    async def session_ends(self, session_ids: Sequence[str]) -> Mapping[str, bool]:
        return await self._read(evaluations.session_ends, session_ids)

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
        return await self._write(
            evaluations.submit_evaluation,
            spec,
            sessions,
            evaluation_id=evaluation_id,
            idempotency_key=idempotency_key,
            incarnation=incarnation,
            now=now,
        )

    async def write_reward(self, given: RewardEvent) -> bool:
        return await self._write(evaluations.write_reward, given)

    async def refuse_evaluation(self, evaluation_id: str, session_id: str, why: str) -> None:
        await self._write(evaluations.refuse_evaluation, evaluation_id, session_id, why)

    async def evaluation(
        self, evaluation_id: str | None, idempotency_key: str | None = None
    ) -> EvaluationStatus | None:
        return await self._read(evaluations.evaluation, evaluation_id, idempotency_key)

    async def pending_evaluations(self, incarnation: int) -> tuple[EvaluationStatus, ...]:
        return await self._write(evaluations.pending_evaluations, incarnation)


@asynccontextmanager
async def open_postgres_log(
    dsn: str, *, name: str = "node", retention: RetentionLimits | None = None, watch: bool = True
) -> AsyncIterator[PostgresLog]:
    """Open the log of a fleet. With `watch` it gives signs of life, watches other nodes, and prunes. Raises
    LogAway where it cannot be reached, and ConfigError where its tables are of another version.
    """
    check_dsn(dsn)
    connections = [LogConnection(dsn, f"{name} {part}") for part in ("writer", "reader", "watcher")]
    writer, reader, watcher = connections
    log = PostgresLog(writer, reader, watcher, retention=retention or RetentionLimits())
    try:
        await connections[0].run(prepare_tables)
        await log.log_name()
        async with trio.open_nursery() as nursery:
            if watch:
                nursery.start_soon(log.watch_nodes)
                nursery.start_soon(log.run_retention)
            try:
                yield log
            finally:
                nursery.cancel_scope.cancel()
    finally:
        for each in connections:
            each.close_now()
