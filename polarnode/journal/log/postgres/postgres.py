"""The log in PostgreSQL: the port's methods, each a function of a connection that runs in a thread.

Three connections a node: the writer's (claims, bodies, finishing), the reader's (pages and queries) and the
watcher's, which gives signs of life and listens, so that no body of 100 MB holds up a sign. While the log
is away every call raises LogAway; nothing is kept here to be written later, because only the node knows
what it still has.
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
from polarnode.groups.group import Facts
from polarnode.journal.forks import EarlierAttempt, ForkParent
from polarnode.journal.held import KEPT_S
from polarnode.journal.log.news import News
from polarnode.journal.log.port import (
    NO_ROOMS,
    Claim,
    Ended,
    EndingCause,
    FinishAnswer,
    Joined,
    LeasedCallback,
    LogAway,
    LogPage,
    LogStanding,
    LogWeights,
    NodeFacts,
    NodeRow,
    Offer,
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
from polarnode.journal.log.postgres.connection import Connection, Database, check_dsn
from polarnode.journal.log.postgres.migrations import prepare_tables
from polarnode.journal.log.watching import SilenceWatch
from polarnode.journal.pending_callbacks import EVENT_KINDS, CallbackCounts
from polarnode.journal.queries import Recent
from polarnode.journal.values import (
    Filters,
    Retention,
    TaskRecord,
    TrajectoryEncoder,
    json_encoder,
)
from polarnode.merge.trajectory import Identity

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

SIGN_S: Final = 1.0  # between signs of life
# Between looks at what nobody notifies, such as places that a node which died left to others, and the queue's
# length: with 64 nodes some is looked at each 80 ms.
LOOK_S: Final = 5.0
LISTEN_S: Final = 0.25  # one wait for notifications: so long may a sign that is due be late, and closing take
# open places that are counted: no node takes tasks beyond it, and counting takes some milliseconds
COUNTED_PLACES: Final = 50_000
# between two looks at the bytes of all events: some ten milliseconds of 100,000
WEIGH_S: Final = 60.0
# without an answer to the watcher, which asks every second: a server that hangs says nothing
SILENT_S: Final = 5.0
RETRY_S: Final = 0.5  # between attempts to reach a log that is away
PRUNE_S: Final = 10.0  # between looks at what retention may delete: one takes a millisecond
PRUNED_S: Final = 0.1  # and while it deletes: a finish that waits for the writer comes in between
# A node tells a new primary again what is younger than half of it, and a task that is unknown there: it must
# have been lost, and not pruned, or all of it would run again.
SPARED_S: Final = 2 * KEPT_S
SWEEP_S: Final = 3600.0  # between looks at what a node that died may have left


@define(eq=False)
class PostgresLog:
    """The port `Log`. Created by `open_postgres_log`."""

    _writer: Connection
    _reader: Connection
    _watcher: Connection
    _retention: Retention = field(factory=Retention)
    _recent: Recent = field(factory=Recent)
    _news: News = field(factory=News)
    place_news: int = field(default=0, init=False)
    weight_news: int = field(default=0, init=False)
    event_news: int = field(default=0, init=False)
    open_places: int = field(default=0, init=False)
    callbacks_pending: bool = field(default=False, init=False)
    standing: LogStanding = field(factory=LogStanding, init=False)
    _weighed: float = field(default=0.0, init=False)  # when the bytes in it were read
    _answered: float | None = field(default=None, init=False)  # when the watcher last had an answer
    _reading: Counter[str] = field(factory=Counter, init=False)  # streams open here, by consumer
    _attended: set[str] = field(factory=set, init=False)  # whose streams changed since the last sign
    incarnation: int | None = field(default=None, init=False)
    shared: ClassVar[bool] = True
    lost: bool = field(default=False, init=False)  # this incarnation was declared lost, or replaced
    least_load: float | None = field(default=None, init=False)
    _load: float | None = field(default=None, init=False)
    _watch: SilenceWatch = field(factory=SilenceWatch, init=False)
    _listening: Database | None = field(default=None, init=False)  # which told the server so
    _looked: float = field(default=float("-inf"), init=False)  # when places were counted last
    _swept: float = field(default=float("-inf"), init=False)

    async def _write(
        self, call: Callable[Concatenate[Database, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._writer.run(call, *args, **kwargs)

    async def _read(
        self, call: Callable[Concatenate[Database, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._reader.run(call, *args, **kwargs)

    async def reachable(self) -> str | None:
        await trio.lowlevel.checkpoint()
        # the watcher asks every second; the others notice that the server is back when they are used
        away = self._watcher.away
        silent = 0.0 if self._answered is None else time.monotonic() - self._answered
        if away is None and silent > SILENT_S:
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

    async def claim(self, offer: Offer) -> tuple[Claim, ...]:
        return await self._write(places.claim, offer)

    async def claim_endings(self, incarnation: int, limit: int) -> tuple[Claim, ...]:
        return await self._write(places.claim_endings, incarnation, limit)

    async def take_place(self, task_id: str, sample_index: int, incarnation: int) -> Claim | None:
        return await self._write(places.take_place, task_id, sample_index, incarnation)

    async def claims(self, incarnation: int) -> tuple[Claim, ...]:
        return await self._write(places.claims, incarnation)

    async def session_started(self, identity: Identity) -> None:
        await self._write(places.session_started, identity, self.incarnation)

    async def finish(self, claim: Claim, ended: Ended) -> FinishAnswer:
        answer = await self._write(places.finish, claim, ended)
        if claim.spec.callback_url is not None:
            self.callbacks_pending = True  # the watcher would see it within a second
        return answer

    async def put_back(
        self, claim: Claim, ended: Ended | None = None, *, counts: bool = True, keep: bool = False
    ) -> Claim | None:
        return await self._write(places.put_back, claim, ended, counts=counts, keep=keep)

    async def publish(self, ended: Ended, incarnation: int) -> FinishAnswer:
        return await self._write(places.publish, ended, incarnation)

    async def cancel(self, task_id: str, at: float) -> bool:
        return await self._write(places.cancel, task_id, at)

    async def to_stop(self, incarnation: int) -> Mapping[str, EndingCause]:
        return await self._read(places.to_stop, incarnation)

    # ── nodes ─────────────────────────────────────────────────────────────────

    def tell_load(self, load: float | None) -> None:
        self._load = load

    async def join(self, facts: NodeFacts) -> Joined:
        joined = await self._write(membership.join, facts)
        self.incarnation, self.lost = joined.incarnation, False
        self._attended |= set(self._reading)
        return joined

    async def renew_certificate(self, incarnation: int, certificate: str) -> None:
        await self._write(membership.renew_certificate, incarnation, certificate)

    async def sign(self, incarnation: int, report: Mapping[str, Json] | None = None) -> bool:
        return (await self._sign(incarnation, report)).signed

    async def _sign(self, incarnation: int | None, report: Mapping[str, Json] | None) -> membership.Beat:
        """A sign of life; with it the log learns who reads here."""
        attended, self._attended = self._attended, set()
        reading = dict(self._reading) if attended else None
        try:
            beat = await self._watcher.run(membership.beat, incarnation, report, reading, self._load)
            if attended:
                await self._watcher.run(events.heard, tuple(attended), time.time())
        except LogAway:
            self._attended |= attended
            raise
        return beat

    async def signs(self) -> Mapping[int, int]:
        return await self._watcher.run(membership.signs)

    async def expire(self, incarnation: int, sign: int) -> bool:
        return await self._watcher.run(membership.expire, incarnation, sign)

    async def put_back_lost(self) -> int:
        return await self._watcher.run(places.put_back_lost)

    async def leave(self, incarnation: int) -> None:
        await self._write(membership.leave, incarnation)

    async def nodes(self, *, every: bool = False) -> tuple[NodeRow, ...]:
        return await self._read(membership.nodes, every=every)

    async def node_of(self, session_id: str) -> NodeRow | None:
        return await self._read(membership.node_of, session_id)

    async def watch(self) -> None:
        """Give this node's signs, listen, and put back what silent nodes hold; until it is cancelled."""
        signed, opened = -SIGN_S, 0  # what another connection would have told is not known
        while True:
            try:
                asked = time.monotonic()
                if asked - signed >= SIGN_S:
                    signed = asked
                    await self._beat()
                told = await self._watcher.run(self._listen, LISTEN_S)
                if self._watcher.opened != opened:
                    opened, told = self._watcher.opened, told | {"places", "weights", "events"}
                self._tell(told)
            except LogAway:
                self._tell({"away"})  # who waits for news looks again, and learns that the log is away
                await trio.sleep(RETRY_S)

    def _tell(self, told: Collection[str]) -> None:
        """Wake who waits for news of these kinds."""
        # a new version may let this node claim again
        self.place_news += not {"places", "orders", "weights", "away"}.isdisjoint(told)
        self.weight_news += "weights" in told
        self.event_news += not {"events", "away"}.isdisjoint(told)
        if told:
            self._news.tell()

    def _listen(self, db: Database, seconds: float) -> set[str]:
        """Wait for notifications, and give what they are of."""
        if db is not self._listening:
            db.execute("LISTEN polarnode")
            self._listening = db
        return {each.payload for each in db.notifies(timeout=seconds, stop_after=1)}

    async def _beat(self) -> None:
        """One sign, and one look at the signs of others."""
        incarnation, asked, opened = self.incarnation, time.monotonic(), self._watcher.opened
        beat = await self._sign(incarnation, None)
        self.callbacks_pending, self._answered = beat.callbacks_pending, time.monotonic()
        others = (load for other, load in beat.loads.items() if other != incarnation)
        self.least_load = min(others, default=None)
        if incarnation is not None and not beat.signed and incarnation == self.incarnation:
            self.lost = True
            self._tell({"places"})
        expired = False
        for other, sign in self._watch.read(beat.signs, asked=asked, now=time.monotonic()):
            # through the connection that the signs were read with: another one may be to another server, on
            # which nobody could sign yet
            if self._watcher.opened != opened:
                break
            if other != incarnation and await self.expire(other, sign):
                logger.warning("node incarnation %d gave no sign of life for its lease: it is lost", other)
                expired = True
        # who declares a node lost puts back its places at once; the others would, if it died in between
        if expired or asked - self._looked >= LOOK_S:
            await self.put_back_lost()
            self.open_places = await self._watcher.run(places.count_open, COUNTED_PLACES)
            await self.look()
            self._looked = asked

    async def look(self) -> None:
        """Read how the log stands."""
        now = time.time()
        weigh = now - self._weighed >= WEIGH_S
        found = await self._watcher.run(
            events.standing, now - self._retention.silence_s, self.standing, weigh=weigh
        )
        self.standing = found
        if weigh:
            self._weighed = now
            self._attended |= set(self._reading)  # who reads for days is heard too

    # ── events and consumers ──────────────────────────────────────────────────

    async def identity(self) -> str:
        return await self._write(events.identity)

    async def mark_restored(self) -> str:
        return await self._write(events.mark_restored)

    async def events(
        self,
        after: Cursor,
        *,
        filters: Filters | None = None,
        encoder: TrajectoryEncoder | None = None,
        limit: int = 64,
    ) -> LogPage:
        return await self._read(
            events.events, after, limit, filters or Filters(), encoder or json_encoder(), self._recent
        )

    async def end(self) -> Cursor:
        return await self._read(events.end)

    async def position(self, consumer: str) -> Cursor:
        return await self._read(events.position, consumer)

    async def meet(self, consumer: str, begin: Cursor, *, now: float) -> Cursor:
        return await self._write(events.meet, consumer, begin, now, self._retention.silence_s)

    async def acknowledge(self, consumer: str, cursor: Cursor, *, now: float) -> Cursor:
        return await self._write(events.acknowledge, consumer, cursor, now, self._retention.silence_s)

    def attend(self, consumer: str, change: int) -> None:
        self._reading[consumer] += change
        self._reading += Counter()  # drops those at 0
        self._attended.add(consumer)

    async def forget(self, consumer: str) -> bool:
        return await self._write(events.forget, consumer)

    async def consumers(self) -> tuple[Consumer, ...]:
        return await self._read(events.consumers, time.time() - self._retention.silence_s)

    async def prune(
        self, retention: Retention, *, now: float, limit: int = 256, young: float = math.inf
    ) -> int:
        if time.monotonic() - self._swept >= SWEEP_S:
            self._swept = time.monotonic()
            await self._write(events.sweep)
        return await self._write(events.prune, retention, now, limit, young)

    async def retain(self) -> None:
        """Delete what retention no longer keeps, until it is cancelled. All nodes do, one at a time."""
        while True:
            pruned = 0
            try:
                now = time.time()
                pruned = await self.prune(self._retention, now=now, young=now - SPARED_S)
            except LogAway:
                pass  # the watcher says so
            except psycopg.Error:
                logger.exception("the log could not be pruned: it grows until that is mended")
            await trio.sleep(PRUNED_S if pruned else PRUNE_S)

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

    async def hold_weights(self, version: str, incarnation: int, *, model: str = "") -> None:
        await self._write(weights.hold_weights, version, incarnation, model=model)

    async def serve_weights(self, version: str, *, model: str = "", holders: int = 2) -> bool:
        return await self._write(weights.serve_weights, version, model=model, holders=holders)

    async def change_weights(self, version: str, body: Json, *, model: str = "") -> None:
        await self._write(weights.change_weights, version, body, model=model)

    async def serving(self, incarnation: int, versions: Mapping[str, str]) -> None:
        await self._write(weights.serving, incarnation, versions)

    async def add_transfer(self, kind: TransferKind, name: str, body: Json, *, model: str = "") -> None:
        await self._write(weights.add_transfer, kind, name, body, model=model)

    async def transfer(self, kind: TransferKind, name: str, *, model: str = "") -> Json:
        return await self._read(weights.transfer, kind, name, model=model)

    async def end_transfer(self, kind: TransferKind, name: str, *, model: str = "") -> None:
        await self._write(weights.end_transfer, kind, name, model=model)

    async def hold(self, mode: PauseMode | None, *, model: str = "") -> None:
        await self._write(weights.hold, mode, model=model)

    async def held(self, *, model: str = "", follows: bool = False) -> PauseMode | None:
        return await self._read(weights.held, model=model, follows=follows)

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
        self, limit: int, *, seconds: float, each: int | None = None, rooms: Mapping[str, int] = NO_ROOMS
    ) -> tuple[LeasedCallback, ...]:
        return await self._write(callbacks.lease_callbacks, limit, seconds=seconds, each=each, rooms=rooms)

    async def callback_taken(self, callback: LeasedCallback) -> bool:
        return await self._write(callbacks.callback_taken, callback)

    async def callback_failed(self, callback: LeasedCallback, *, after_s: float) -> None:
        await self._write(callbacks.callback_failed, callback, after_s)

    async def callback_counts(self) -> CallbackCounts:
        return await self._read(callbacks.callback_counts)

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

    async def places_over(self, task_id: str) -> tuple[Facts, ...]:
        return tuple(facts for facts, _ in await self._read(places.read_facts, task_id))

    async def finished_groups(
        self, limit: int, *, until: float | None = None, state: str | None = None, task_id: str | None = None
    ) -> tuple[Mapping[str, Json], ...]:
        return await self._read(queries.finished_groups, limit, until, state, task_id)

    # ── evaluations ───────────────────────────────────────────────────────────

    async def places_of(self, task_id: str | None, group_id: str | None) -> tuple[str, ...]:
        return await self._read(evaluations.places_of, task_id, group_id)

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

    async def reward(self, given: RewardEvent) -> bool:
        return await self._write(evaluations.reward, given)

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
    dsn: str, *, name: str = "node", retention: Retention | None = None, watch: bool = True
) -> AsyncIterator[PostgresLog]:
    """Open the log of a fleet; with `watch` it gives signs of life and watches others. Raises LogAway where
    it cannot be reached, and ConfigError where its tables are of another version.
    """
    check_dsn(dsn)
    connections = [Connection(dsn, f"{name} {part}") for part in ("writer", "reader", "watcher")]
    writer, reader, watcher = connections
    log = PostgresLog(writer, reader, watcher, retention=retention or Retention())
    try:
        await connections[0].run(prepare_tables)
        await log.identity()
        async with trio.open_nursery() as nursery:
            if watch:
                nursery.start_soon(log.watch)
                nursery.start_soon(log.retain)
            try:
                yield log
            finally:
                nursery.cancel_scope.cancel()
    finally:
        for each in connections:
            each.close_now()
