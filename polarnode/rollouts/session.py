"""One rollout, phase by phase: INIT, READY, RUN, POST, teardown.

Each phase has its own time budget, and the end of one phase never ends the next: a harness that ran out of
time enters POST with all its turns, and a trainer's cancel reaches every phase except POST. Invariant: `run`
always returns a result, because a failed session is data, and a bug in one session must not reach another.
"""

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from pathlib import Path
from socket import socket
from typing import Literal

import trio
from attrs import define, evolve, field, frozen

from polarnode.containers.runtime import PodmanRuntime
from polarnode.core.errors import PolarnodeError, RuntimeFault
from polarnode.core.ports import Endpoint, Judge, Launch
from polarnode.core.status import Phase
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Outcome, Timing
from polarnode.gateway.live_sessions import LiveSession
from polarnode.groups.fork_policy import ForkPlace, fork_place
from polarnode.groups.group import EARLY_STOP_REASON, SessionFacts
from polarnode.merge.lineage import DropsThinking
from polarnode.merge.trajectory import Identity, Result
from polarnode.rollouts.evaluation import Ending, evaluated, fault_outcome, run_outcome, tail
from polarnode.rollouts.forks import (
    ForkElsewhere,
    ForkParents,
    Resumption,
    begin_replay,
    find_continuation,
    find_state,
    with_state,
)
from polarnode.rollouts.freezer import ContainerFreezer
from polarnode.rollouts.lifecycle import CancelCause, bug_outcome
from polarnode.rollouts.run_clock import RunClock
from polarnode.rollouts.services import (
    CachePlaces,
    SessionJournal,
    SessionOrder,
    StageSlots,
    harness_order,
)
from polarnode.rollouts.session_containers import (
    Containers,
    NodeContainers,
    PrefetchedRuntime,
    open_prefetched_runtime,
)
from polarnode.rollouts.snapshots import (
    NodeSnapshots,
    SessionSnapshots,
    open_frozen,
    open_restored,
    open_snapshots,
)
from polarnode.support.concurrency import Place, PrioritySemaphore

logger = logging.getLogger(__name__)

INIT_ATTEMPTS = 2  # after two failures in a row a third container would fail for the same reason
# The seconds that a harness has to exit by itself after its budget is spent, because mini retries a refusal
# for minutes.
SPENT_GRACE_S = 10.0
MAX_HARNESS_LOG_BYTES = (
    4 << 20
)  # bytes of a harness's output kept; a runaway print loop must not fill the disk


@frozen(kw_only=True)
class SessionServices:
    """What a session in a container uses of its node."""

    journal: SessionJournal
    stages: StageSlots
    # A session may begin with the turns of another one, and with a snapshot of it.
    parents: ForkParents
    snapshots: NodeSnapshots
    drops_thinking: DropsThinking  # whether the model's template leaves out earlier thinking
    # `serve_endpoint` serves the model endpoint of a session on the socket of its container.
    containers: NodeContainers
    serve_endpoint: Callable[[str, socket], AbstractAsyncContextManager[object]]
    context_length: int
    # The freezer may stop a container while its session's calls are held for a place in the engine's cache.
    places: CachePlaces
    freezer: ContainerFreezer
    judge: Callable[[str], Judge]  # finds a judge of the node's config by name, or raises EvaluatorError


@define(eq=False)
class Session:
    """A session in its own container, as a `SessionDriver`. `phase` is its current phase. `cancel` ends any
    phase except POST.
    """

    order: SessionOrder
    live: LiveSession
    services: SessionServices
    delay_s: float  # how long it waits before it begins
    # This function waits until the session in a place of a task is over.
    place_over: "Callable[[str, int], Awaitable[SessionFacts | None]]"
    # This is called at each new phase, and when the evaluator's container is made or will not be made.
    on_phase: "Callable[[Session], None]"
    # This is called last, if its trajectory could not be published.
    on_unpublished: "Callable[[Session], None]"
    phase: Phase = field(default="init", init=False)
    began: float = field(factory=trio.current_time, init=False)
    phase_began: float = field(init=False)
    cancelled: CancelCause | None = field(default=None, init=False)
    _cancel_scope: trio.CancelScope | None = field(default=None, init=False)
    elsewhere: bool = field(default=False, init=False)  # whether another node has what it needs
    _timing: Timing = field(factory=Timing, init=False)
    _clock: RunClock = field(factory=RunClock, init=False)
    _evaluator_settled: bool = field(default=False, init=False)  # whether its runtime was made or failed
    _containers: Containers = field(init=False)
    _snapshots: SessionSnapshots | None = field(default=None, init=False)
    _resumption: Resumption | None = field(default=None, init=False)  # set if it begins in a snapshot

    @phase_began.default
    def _make_phase_began(self) -> float:
        return self.began

    @_containers.default
    def _make_containers(self) -> Containers:
        return Containers(self.order, self.services.containers)

    @property
    def identity(self) -> Identity:
        return self.order.identity

    @property
    def task(self) -> TaskSpec:
        return self.order.spec

    @property
    def remaining_containers(self) -> int:
        """How many more containers it needs."""
        evaluators = int(
            self.order.fresh and not self._evaluator_settled and self.phase in ("init", "ready", "run")
        )
        return evaluators + int(self.phase == "init")

    def cancel(self, cause: CancelCause) -> None:
        """End the session; it keeps its turns. A run is ended and its traces are built. A session that waits
        is over at once. A session whose run is over is evaluated as usual.

        The first cause counts.
        """
        self.cancelled = self.cancelled or cause
        if self._cancel_scope is not None:
            self._cancel_scope.cancel()

    async def run(self) -> Result:
        """Run all phases. A bug of the node is logged and becomes this session's outcome; it does not reach
        siblings.
        """
        try:
            with self._stoppable_scope():
                await trio.sleep(self.delay_s)
            result = await self._run_phases()
        except ForkElsewhere as error:
            self.elsewhere = True
            result = Result(outcome=Outcome(status="interrupted", boundary=error.boundary, reason=str(error)))
        except PolarnodeError as error:
            result = Result(outcome=fault_outcome(error))
        except Exception as error:
            # This is the isolation edge: one session's bug never cancels its siblings.
            result = Result(outcome=bug_outcome(self.identity, error))
        await self.live.close()
        metrics = {**result.metrics, **self._containers.metrics, **self.live.metrics()}
        return evolve(result, timing=self._timing, metrics=metrics)

    def closed(self, *, failed: bool) -> None:
        """The registry no longer holds it."""
        self._enter("ended")
        if failed:
            self.on_unpublished(self)

    def _enter(self, phase: Phase) -> None:
        self.phase, self.phase_began = phase, trio.current_time()
        self.on_phase(self)

    async def _run_phases(self) -> Result:
        """Begin the session, and run it in a container: in a second one if the first fails before RUN."""
        result: Result | None = None
        with self._stoppable_scope() as scope:
            place = fork_place(self.task, self.identity.sample_index)
            if place is not None and self.task.fork is None:
                no_state = await self._take_root_state(place)
                if no_state is not None:
                    return Result(outcome=no_state)
            await self._begin_history()
            await self.services.containers.ensure_image(self.order.runtime.image)
            async with self._slot(self.services.stages.live):
                for attempt in range(1, INIT_ATTEMPTS + 1):
                    ended = await self._run_in_container(scope)
                    may_try_again = isinstance(ended, RuntimeFault) and self.phase in ("init", "ready")
                    if not may_try_again or attempt == INIT_ATTEMPTS:
                        break
                    logger.warning(
                        "session %s: its runtime failed, trying a fresh one: %s",
                        self.identity.session_id,
                        ended,
                    )
                    self._enter("init")
                result = Result(outcome=fault_outcome(ended)) if isinstance(ended, PolarnodeError) else ended
        return result or Result(outcome=self._stopped_outcome())

    # ── where it begins ───────────────────────────────────────────────────────

    async def _take_root_state(self, place: ForkPlace) -> Outcome | None:
        """Wait for the root of a tree of forks, and take its state. Returns an outcome if it has none."""
        root = await self.place_over(self.identity.task_id, place.root)
        snapshots, parents = self.services.snapshots, self.services.parents
        order = await with_state(self.order, snapshots, parents, place, root)
        if isinstance(order, Outcome):
            # What an earlier attempt noted as its parent is not this one's.
            self.order = evolve(self.order, identity=evolve(self.identity, forked_from=None))
            return order
        self.order = order
        self.services.journal.record_session(self.identity)
        return None

    async def _begin_history(self) -> None:
        """Give the session the turns it begins with: those of the attempt before it, which was lost, or those
        of its parent if it is a fork. Most sessions begin with none.
        """
        snapshots, parents = self.services.snapshots, self.services.parents
        drops_thinking = self.services.drops_thinking
        continuation, fork = await find_continuation(self.order, snapshots, parents), self.task.fork
        if continuation is not None:
            self.order = evolve(self.order, identity=continuation.identity)
            self.services.journal.record_session(continuation.identity)
            self._resumption = await continuation.begin(self.live, drops_thinking, snapshots)
            self._clock.before_s = continuation.state.snapshot.run_s
            return
        if fork is None:
            return
        await parents.require_here(fork)
        if fork.by == "replay":
            begin_replay(self.live, self.task, await parents.parent(fork), self._note_inherited)
        else:
            state = await find_state(self.order, snapshots, parents, fork)
            inherited = max((turn.index + 1 for turn in state.turns), default=0)
            self._resumption = state.begin(self.live, drops_thinking, inherited=inherited)

    def _note_inherited(self, got: int, differs: str | None) -> None:
        """Note in the journal how many turns were inherited, before the first own turn is recorded."""
        identity = self.order.identity
        if identity.forked_from is not None:
            fork = evolve(identity.forked_from, got=got, differs=differs)
            self.order = evolve(self.order, identity=evolve(identity, forked_from=fork))
            self.services.journal.record_session(self.order.identity)

    def _stopped_outcome(self) -> Outcome:
        """The outcome of a session whose scope was cancelled before its run was over."""
        if self.cancelled is not None:
            return Outcome(status="cancelled", reason=f"{_reason(self.cancelled)} in {self.phase}")
        return Outcome(
            status="timeout", clock="init", reason=f"not ready after {self.order.spec.budgets.init_s:g} s"
        )

    # ── INIT to teardown, in one container ────────────────────────────────────

    async def _run_in_container(self, scope: trio.CancelScope) -> Result | PolarnodeError:
        """Run INIT, READY, RUN and POST in one container, which is removed at the end. Errors are returned as
        values: nurseries would wrap raised ones in exception groups.
        """
        async with AsyncExitStack() as init:
            # INIT: start the container and put the harness into it, in a slot of INIT. The budget of INIT is
            # the deadline of `scope` while the slot is held. A sibling that prepares the same workspace is
            # waited for without one.
            await init.enter_async_context(self._init_slot(scope))
            while self._containers.is_preparing():
                await init.aclose()
                await self._containers.wait_prepared()
                await init.enter_async_context(self._init_slot(scope))
            expires = trio.current_time() + self._containers.lifetime_s()
            try:
                async with self._open_runtime() as runtime, self._open_evaluator_runtime() as prefetched:
                    try:
                        launch = await self._furnish(runtime)
                        async with self.services.serve_endpoint(self.identity.session_id, runtime.endpoint):
                            await init.aclose()

                            # READY: wait for a slot of RUN.
                            self._enter("ready")
                            async with AsyncExitStack() as run:
                                with self._timed("ready_s"):
                                    slot = self._slot(self.services.stages.run, place=self)
                                    await run.enter_async_context(slot)
                                needed_until = trio.current_time() + self._containers.min_lifetime_s()
                                if not runtime.alive or needed_until > expires:
                                    return RuntimeFault(
                                        "the container ended, or grew too old for a whole run, while its"
                                        " session waited for a place to run"
                                    )

                                # RUN: from here on the session keeps its turns, whatever ends it.
                                self._enter("run")
                                if prefetched is not None:
                                    prefetched.begin()
                                with self._timed("run_s"):
                                    outcome = await self._run_harness(runtime, launch)
                    except PolarnodeError as error:
                        return error
                    # POST: the endpoint is closed and the slot of RUN is free.
                    return await self._evaluate(runtime, outcome, prefetched)
            except PolarnodeError as error:
                return error

    @asynccontextmanager
    async def _init_slot(self, scope: trio.CancelScope) -> AsyncIterator[None]:
        """Hold a slot of INIT while its budget runs: one budget for all attempts. Waiting for the slot does
        not count.
        """
        async with self._slot(self.services.stages.init):
            scope.deadline = trio.current_time() + self.order.spec.budgets.init_s - self._timing.init_s
            try:
                with self._timed("init_s"):
                    yield
            finally:
                scope.deadline = math.inf

    def _open_runtime(self) -> AbstractAsyncContextManager[PodmanRuntime]:
        """The session's container: a new one, or one that goes on from a snapshot."""
        if self._resumption is None:
            return self._containers.open()
        if self._resumption.frozen is not None:
            return open_frozen(self._containers, self._resumption.snapshot)
        return open_restored(self._containers, self._resumption.snapshot)

    def _open_evaluator_runtime(self) -> AbstractAsyncContextManager[PrefetchedRuntime | None]:
        """The evaluator's own container, made while the harness runs, if the task asks for one."""
        if not self.order.fresh:
            return nullcontext()

        def settled() -> None:
            self._evaluator_settled = True
            self.on_phase(self)

        return open_prefetched_runtime(
            self._containers.open,
            self.services.stages.init,
            budget_s=self.order.spec.budgets.init_s,
            on_settled=settled,
        )

    async def _furnish(self, runtime: PodmanRuntime) -> Launch | None:
        """Put what the harness needs into the container, and seal everything but its workspace. Returns None
        if the container holds a frozen harness, which is already started.
        """
        resumption = self._resumption
        if resumption is not None and resumption.frozen is not None:
            return None
        endpoint = Endpoint(
            base_url=runtime.base_url,
            key=self.live.key,
            context_length=self.services.context_length,
            model=self.identity.model,
        )
        order = harness_order(self.order.spec, endpoint, workdir=runtime.workdir, home=runtime.home)
        launch = self.order.harness.launch(order) if resumption is None else resumption.launch(order)
        await runtime.place(launch.files)
        await runtime.seal(self.order.runtime)
        return launch

    # ── RUN ───────────────────────────────────────────────────────────────────

    async def _run_harness(self, runtime: PodmanRuntime, launch: Launch | None) -> Outcome:
        """Run the harness until it exits, its time or budget is spent, or it is cancelled. Whatever ends it,
        its turns are kept, and so a failure is a value too.
        """
        log = self.services.containers.folder / f"{self.identity.session_id}.log"
        ended: int | PolarnodeError | None = None
        with self._stoppable_scope() as clock:
            self._clock.begin(clock, self.order.spec.budgets.run_s)
            self.live.budget.on_spent = lambda: _end_soon(clock)
            try:
                async with self._containers.reaching(runtime) as reach:
                    if self.order.spec.snapshot_at.wanted:
                        self._snapshots = await self._open_snapshots(runtime)
                    with self.services.freezer.follow(self.identity.session_id, runtime):
                        exit_code = await self._follow_harness(runtime, launch, reach.env, log)
                ended = exit_code
            except PolarnodeError as error:
                ended = error
        cause = self.cancelled  # From here on a cancel has no effect, because the run is over.
        await self.live.close()
        if self._snapshots is not None:
            self._containers.metrics["snapshots"] = await self._snapshots.close()
        resumed = self.live.inherited.resumed
        if resumed is not None and not isinstance(ended, PolarnodeError):
            ended = resumed.fault() or ended
        ending = Ending(
            ended=ended,
            cancelled=None if cause is None else _reason(cause),
            spent_clock=self.live.budget.spent_clock,
            because=runtime.ended_because,
            for_room=runtime.ended_for_room,
            oom_kills=self._containers.record_kills(runtime),
            turns=self.live.lineages.turns,
            log_tail=tail(log),
        )
        return run_outcome(self.order, ending)

    async def _follow_harness(
        self, runtime: PodmanRuntime, launch: Launch | None, reach: Mapping[str, str], log: Path
    ) -> int:
        """Run the harness, or let the frozen one go on, and return its exit code. A harness that may be
        frozen runs below the container's first process.
        """
        frozen = None if self._resumption is None else self._resumption.frozen
        if launch is None and frozen is not None:
            self._allow_freezing(frozen.number)
            return await runtime.follow_copy(frozen, log=log, limit=MAX_HARNESS_LOG_BYTES)
        assert launch is not None
        env = {**reach, **launch.env}
        if not self.order.spec.snapshot_at.freeze:
            return await runtime.run_logged(
                launch.argv, env=env, log=log, limit=MAX_HARNESS_LOG_BYTES, stdin=launch.stdin
            )
        number = await runtime.start_detached(launch.argv, env=env, stdin=launch.stdin)
        self._allow_freezing(number)
        return await runtime.follow_detached(number, log=log, limit=MAX_HARNESS_LOG_BYTES)

    def _allow_freezing(self, number: int) -> None:
        if self._snapshots is not None:
            self._snapshots.number = number

    async def _open_snapshots(self, runtime: PodmanRuntime) -> SessionSnapshots:
        # The first snapshot of a fork belongs to its parent.
        begun = None if self._resumption is None else self._resumption.snapshot
        own = begun if begun is not None and begun.session_id == self.identity.session_id else None
        return await open_snapshots(
            self.order,
            self.services.snapshots,
            self.live,
            runtime,
            credit=self._extend_run,
            spent=lambda: self._clock.spent_s,
            begun_with=own,
        )

    # ── POST ──────────────────────────────────────────────────────────────────

    async def _evaluate(
        self, runtime: PodmanRuntime, outcome: Outcome, prefetched: PrefetchedRuntime | None
    ) -> Result:
        """Evaluate what the harness left, unless its run was cancelled or failed."""
        if outcome.status in ("cancelled", "error"):
            return Result(outcome=outcome)
        self._enter("post")
        try:
            # They end before POST has a slot: processes that a harness left running slow down other sessions.
            await runtime.end_processes()
        except RuntimeFault as fault:
            return Result(outcome=evolve(outcome, status="error", boundary=fault.boundary, reason=str(fault)))
        async with self._slot(self.services.stages.post):
            with self._timed("post_s"):
                judge, turns = self.services.judge, self.live.lineages.turns
                return await evaluated(self._containers, judge, runtime, outcome, turns, prefetched)

    # ── its place in the engine's cache ───────────────────────────────────────

    def take(self) -> str | None:
        """Take a place in the cache of an engine. Returns None, or the reason that there is no place."""
        identity, order = self.identity, self.order
        return self.services.places.begin_session(
            identity.session_id, order.harness.name, identity.group_id, self._credit_cache_wait
        )

    def give_back(self) -> None:
        """Give the place back."""
        self.services.places.end_session(self.identity.session_id)

    def _credit_cache_wait(self, seconds: float) -> None:
        """Move the end of RUN while the session's calls are held for its place in the cache. Its container
        may be frozen meanwhile.
        """
        self.services.freezer.held(self.identity.session_id, seconds > 0)
        self._extend_run(seconds)

    def _extend_run(self, seconds: float) -> None:
        """Move the end of RUN by the time that a call is held."""
        self._clock.credit(seconds)
        self._timing = evolve(self._timing, held_s=self._clock.held_s)

    def _slot(
        self, stage: PrioritySemaphore, place: Place | None = None
    ) -> AbstractAsyncContextManager[None]:
        return stage.slot(priority=self.order.spec.priority, cohort=self.order.cohort, place=place)

    @contextmanager
    def _timed(self, phase: Literal["init_s", "ready_s", "run_s", "post_s"]) -> Iterator[None]:
        started = trio.current_time()
        try:
            yield
        finally:
            spent: float = getattr(self._timing, phase) + trio.current_time() - started
            self._timing = evolve(self._timing, **{phase: spent})

    @contextmanager
    def _stoppable_scope(self) -> Iterator[trio.CancelScope]:
        """A scope that `cancel` reaches until it is left. If another one is entered within it, `cancel`
        reaches neither after the inner one is left.
        """
        with trio.CancelScope() as scope:
            self._cancel_scope = scope
            if self.cancelled is not None:
                scope.cancel()
            try:
                yield scope
            finally:
                self._cancel_scope = None


def _reason(cause: CancelCause) -> str:
    """The cause as an outcome's reason. A trainer's cancel and a node's stop read the same."""
    return EARLY_STOP_REASON if cause == EARLY_STOP_REASON else "cancelled"


def _end_soon(clock: trio.CancelScope) -> None:
    """Give a harness SPENT_GRACE_S seconds to exit after its budget of turns or tokens is spent; its calls
    are refused meanwhile.
    """
    clock.deadline = min(clock.deadline, trio.current_time() + SPENT_GRACE_S)
