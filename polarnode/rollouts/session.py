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
from typing import Literal

import trio
from attrs import define, evolve, field

from polarnode.containers.runtime import PodmanRuntime
from polarnode.core.errors import PolarnodeError, RuntimeFault
from polarnode.core.ports import Endpoint, Launch
from polarnode.core.status import Phase
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Outcome, Timing
from polarnode.gateway.live_sessions import LiveSession
from polarnode.groups.fork_policy import ForkPlace, fork_place
from polarnode.groups.group import EARLY_STOP, Facts
from polarnode.merge.trajectory import Identity, Result
from polarnode.rollouts.continuing import find_continuation
from polarnode.rollouts.evaluation import Ending, evaluated, fault_outcome, run_outcome, tail
from polarnode.rollouts.fork_nodes import ForkElsewhere
from polarnode.rollouts.forks import begin_fork
from polarnode.rollouts.lifecycle import CancelCause, bug_outcome
from polarnode.rollouts.resuming import Resumption, begin_resume
from polarnode.rollouts.run_clock import RunClock
from polarnode.rollouts.services import NodeServices, SessionOrder, harness_order
from polarnode.rollouts.session_containers import Containers, PrefetchedRuntime, open_prefetched_runtime
from polarnode.rollouts.snapshots import SessionSnapshots, open_frozen, open_restored, open_snapshots
from polarnode.rollouts.trees import with_state
from polarnode.support.concurrency import Place, PrioritySemaphore

logger = logging.getLogger(__name__)

INIT_ATTEMPTS = 2  # after two failures in a row a third container would fail for the same reason
# seconds for a harness to exit by itself after its budget is spent: mini retries a refusal for minutes
SPENT_GRACE = 10.0
LOG_LIMIT = 4 << 20  # bytes of a harness's output kept; a runaway print loop must not fill the disk


@define(eq=False)
class Session:
    """A session in its own container. `phase` is its current phase. `cancel` ends any phase except POST.
    A `SessionDriver`.
    """

    order: SessionOrder
    live: LiveSession
    services: NodeServices
    delay_s: float  # before it begins
    # waits until the session in a place of a task is over
    place_over: "Callable[[str, int], Awaitable[Facts | None]]"
    # called at each new phase, and when the evaluator's container is made or will not be made
    on_phase: "Callable[[Session], None]"
    # called last, when its trajectory could not be published
    on_unpublished: "Callable[[Session], None]"
    phase: Phase = field(default="init", init=False)
    began: float = field(factory=trio.current_time, init=False)
    phase_began: float = field(init=False)
    cancelled: CancelCause | None = field(default=None, init=False)
    _stoppable: trio.CancelScope | None = field(default=None, init=False)
    elsewhere: bool = field(default=False, init=False)  # it did not begin: another node has what it needs
    _timing: Timing = field(factory=Timing, init=False)
    _clock: RunClock = field(factory=RunClock, init=False)
    _evaluator_served: bool = field(default=False, init=False)  # its runtime is made, or failed
    _containers: Containers = field(init=False)
    _snapshots: SessionSnapshots | None = field(default=None, init=False)
    _resumption: Resumption | None = field(default=None, init=False)  # of a fork by resume

    @phase_began.default
    def _make_phase_began(self) -> float:
        return self.began

    @_containers.default
    def _make_containers(self) -> Containers:
        return Containers(self.order, self.services)

    @property
    def identity(self) -> Identity:
        return self.order.identity

    @property
    def task(self) -> TaskSpec:
        return self.order.spec

    @property
    def to_come(self) -> int:
        """How many more containers it needs."""
        evaluators = int(
            self.order.fresh and not self._evaluator_served and self.phase in ("init", "ready", "run")
        )
        return evaluators + int(self.phase == "init")

    def cancel(self, cause: CancelCause) -> None:
        """End the session; it keeps its turns. A run ends and its traces are built; a waiting session is
        over; one whose run is over is evaluated as usual.

        The first cause counts.
        """
        self.cancelled = self.cancelled or cause
        if self._stoppable is not None:
            self._stoppable.cancel()

    async def run(self) -> Result:
        """Run all phases. A bug of the node is logged and becomes this session's outcome; it does not reach
        siblings.
        """
        try:
            with self._stoppable_scope():
                await trio.sleep(self.delay_s)
            result = await self._result()
        except ForkElsewhere as error:
            self.elsewhere = True
            result = Result(outcome=Outcome(status="interrupted", boundary=error.boundary, reason=str(error)))
        except PolarnodeError as error:
            result = Result(outcome=fault_outcome(error))
        except Exception as error:
            # the isolation edge of trio.md P7: one session's bug never cancels its siblings
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

    async def _result(self) -> Result:
        result: Result | None = None
        with self._stoppable_scope() as scope:
            place = fork_place(self.task, self.identity.sample_index)
            if place is not None and self.task.fork is None:
                without = await self._take_state(place)
                if without is not None:
                    return Result(outcome=without)
            await self._begin()
            await self.services.ensure_image(self.order.runtime.image)
            async with self._slot(self.services.stages.live):
                result = await self._attempts(scope)
        return result or Result(outcome=self._stopped())

    async def _take_state(self, place: ForkPlace) -> Outcome | None:
        """Wait for the root of a fork of a tree, and take its state; the outcome where there is none."""
        root = await self.place_over(self.identity.task_id, place.root)
        found = await with_state(self.order, self.services, place, root)
        if isinstance(found, Outcome):
            # of an attempt before it
            self.order = evolve(self.order, identity=evolve(self.identity, forked_from=None))
            return found
        self.order = found
        self.services.journal.session_started(self.identity)
        return None

    async def _begin(self) -> None:
        """Begin where the attempt before it was lost, or where its task says."""
        found, fork = await find_continuation(self.order, self.services), self.task.fork
        if found is not None:
            self.order = evolve(self.order, identity=found.identity)
            self.services.journal.session_started(found.identity)
            self._resumption = await found.begin(self.services, self.live)
            self._clock.before_s = found.state.snapshot.run_s
            return
        if fork is not None:
            await self.services.insist_here(fork)
        if fork is not None and fork.by != "replay":
            self._resumption = await begin_resume(self.order, self.services, self.live, fork)
        elif fork is not None:
            parent = await self.services.fork_parent(fork)
            begin_fork(self.live, self.task, parent, self._sampled_anew)

    def _sampled_anew(self, got: int, differs: str | None) -> None:
        """Note in the journal how many turns were inherited, before the first other one is recorded."""
        identity = self.order.identity
        if identity.forked_from is not None:
            fork = evolve(identity.forked_from, got=got, differs=differs)
            self.order = evolve(self.order, identity=evolve(identity, forked_from=fork))
            self.services.journal.session_started(self.order.identity)

    def _stopped(self) -> Outcome:
        if self.cancelled is not None:
            return Outcome(status="cancelled", reason=f"{_reason(self.cancelled)} in {self.phase}")
        return Outcome(
            status="timeout", clock="init", reason=f"not ready after {self.order.spec.budgets.init_s:g} s"
        )

    # ── INIT and READY ────────────────────────────────────────────────────────

    async def _attempts(self, scope: trio.CancelScope) -> Result:
        ended = await self._in_runtime(scope)
        for _ in range(INIT_ATTEMPTS - 1):
            if not isinstance(ended, RuntimeFault) or self.phase not in ("init", "ready"):
                break
            logger.warning(
                "session %s: its runtime failed, trying a fresh one: %s",
                self.identity.session_id,
                ended,
            )
            self._enter("init")
            ended = await self._in_runtime(scope)
        return Result(outcome=fault_outcome(ended)) if isinstance(ended, PolarnodeError) else ended

    async def _in_runtime(self, scope: trio.CancelScope) -> Result | PolarnodeError:
        """Use one runtime from start to removal. Errors are returned as values: nurseries would wrap raised
        ones in exception groups.
        """
        async with AsyncExitStack() as init:
            await self._enter_init(init, scope)
            expires = trio.current_time() + self._containers.lifetime_s()
            try:
                async with self._opened() as runtime, self._evaluators_runtime() as prefetched:
                    return await self._inside(runtime, init, expires, prefetched)
            except PolarnodeError as error:
                return error

    def _opened(self) -> AbstractAsyncContextManager[PodmanRuntime]:
        if self._resumption is None:
            return self._containers.open()
        if self._resumption.frozen is not None:
            return open_frozen(self._containers, self._resumption.snapshot)
        return open_restored(self._containers, self._resumption.snapshot)

    async def _enter_init(self, init: AsyncExitStack, scope: trio.CancelScope) -> None:
        """Take a slot of INIT, but not while a sibling prepares the same workspace."""
        await init.enter_async_context(self._init_stage(scope))
        while self._containers.preparing():
            await init.aclose()
            await self._containers.wait_prepared()
            await init.enter_async_context(self._init_stage(scope))

    @asynccontextmanager
    async def _init_stage(self, scope: trio.CancelScope) -> AsyncIterator[None]:
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

    def _evaluators_runtime(self) -> AbstractAsyncContextManager[PrefetchedRuntime | None]:
        if not self.order.fresh:
            return nullcontext()

        def settled() -> None:
            self._evaluator_served = True
            self.on_phase(self)

        return open_prefetched_runtime(
            self._containers.open,
            self.services.stages.init,
            budget_s=self.order.spec.budgets.init_s,
            on_settled=settled,
        )

    async def _inside(
        self,
        runtime: PodmanRuntime,
        init: AsyncExitStack,
        expires: float,
        prefetched: PrefetchedRuntime | None,
    ) -> Result | PolarnodeError:
        try:
            launch = await self._furnished(runtime)
            async with self.services.serve_endpoint(self.identity.session_id, runtime.endpoint):
                await init.aclose()
                ran = await self._ready_and_run(runtime, launch, expires, prefetched)
        except PolarnodeError as error:
            return error
        return ran if isinstance(ran, PolarnodeError) else await self._post(runtime, ran, prefetched)

    async def _furnished(self, runtime: PodmanRuntime) -> Launch | None:
        """Put what the harness needs into the container, and seal all but its workspace. None where the
        harness is in there already, frozen.
        """
        if self._resumption is not None and self._resumption.frozen is not None:
            return None
        endpoint = Endpoint(
            base_url=runtime.base_url,
            key=self.live.key,
            context_length=self.services.context_length,
            model=self.identity.model,
        )
        order = harness_order(self.order.spec, endpoint, workdir=runtime.workdir, home=runtime.home)
        resumption = self._resumption
        launch = self.order.harness.launch(order) if resumption is None else resumption.launch(order)
        await runtime.place(launch.files)
        await runtime.seal(self.order.runtime)
        return launch

    async def _ready_and_run(
        self,
        runtime: PodmanRuntime,
        launch: Launch | None,
        expires: float,
        prefetched: PrefetchedRuntime | None,
    ) -> Outcome | PolarnodeError:
        self._enter("ready")
        async with AsyncExitStack() as run:
            with self._timed("ready_s"):
                await run.enter_async_context(self._slot(self.services.stages.run, place=self))
            if not runtime.alive or trio.current_time() + self._containers.needed_s() > expires:
                return RuntimeFault(
                    "the container ended, or grew too old for a whole run, while its session waited for a"
                    " place to run"
                )
            self._enter("run")
            if prefetched is not None:
                prefetched.begin()
            with self._timed("run_s"):
                return await self._run(runtime, launch)

    # ── RUN and POST ──────────────────────────────────────────────────────────

    async def _run(self, runtime: PodmanRuntime, launch: Launch | None) -> Outcome:
        log = self.services.log_dir / f"{self.identity.session_id}.log"
        ended: int | PolarnodeError | None = None
        with self._stoppable_scope() as clock:
            self._clock.begin(clock, self.order.spec.budgets.run_s)
            self.live.on_spent = lambda: _soon(clock)
            ended = await self._harness_ended(runtime, launch, log)
        cause = self.cancelled  # from here on a cancel has no effect: the run is over
        await self.live.close()
        if self._snapshots is not None:
            self._containers.metrics["snapshots"] = await self._snapshots.close()
        if self.live.resumed is not None and not isinstance(ended, PolarnodeError):
            ended = self.live.resumed.fault() or ended
        ending = Ending(
            ended=ended,
            cancelled=None if cause is None else _reason(cause),
            spent_clock=self.live.spent_clock,
            because=runtime.ended_because,
            for_room=runtime.ended_for_room,
            oom_kills=self._containers.note_kills(runtime),
            turns=self.live.lineages.turns,
            log_tail=tail(log),
        )
        return run_outcome(self.order, ending)

    async def _harness_ended(
        self, runtime: PodmanRuntime, launch: Launch | None, log: Path
    ) -> int | PolarnodeError:
        """The harness's exit code, or the failure as a value: it fails the run, but the turns are kept."""
        try:
            async with self._containers.reaching(runtime) as reach:
                if self.order.spec.snapshot_at.wanted:
                    self._snapshots = await self._open_snapshots(runtime)
                with self.services.freezer.follow(self.identity.session_id, runtime):
                    return await self._followed(runtime, launch, reach.env, log)
        except PolarnodeError as error:
            return error

    async def _open_snapshots(self, runtime: PodmanRuntime) -> SessionSnapshots:
        # a fork's first snapshot is its parent's, and not its own
        begun = None if self._resumption is None else self._resumption.snapshot
        own = begun if begun is not None and begun.session_id == self.identity.session_id else None
        return await open_snapshots(
            self.order,
            self.services,
            self.live,
            runtime,
            credit=self._credit_held,
            spent=lambda: self._clock.spent_s,
            begun_with=own,
        )

    async def _followed(
        self, runtime: PodmanRuntime, launch: Launch | None, reach: Mapping[str, str], log: Path
    ) -> int:
        """Run the harness, or let the frozen one go on, and return its exit code. One that may be frozen
        itself runs below the container's first process.
        """
        frozen = None if self._resumption is None else self._resumption.frozen
        if launch is None and frozen is not None:
            self._can_freeze(frozen.number)
            return await runtime.follow_copy(frozen, log=log, limit=LOG_LIMIT)
        assert launch is not None
        env = {**reach, **launch.env}
        if not self.order.spec.snapshot_at.freeze:
            return await runtime.run_logged(
                launch.argv, env=env, log=log, limit=LOG_LIMIT, stdin=launch.stdin
            )
        number = await runtime.start_below(launch.argv, env=env, stdin=launch.stdin)
        self._can_freeze(number)
        return await runtime.follow_below(number, log=log, limit=LOG_LIMIT)

    def _can_freeze(self, number: int) -> None:
        if self._snapshots is not None:
            self._snapshots.number = number

    async def _post(
        self, runtime: PodmanRuntime, outcome: Outcome, prefetched: PrefetchedRuntime | None
    ) -> Result:
        if outcome.status in ("cancelled", "error"):
            return Result(outcome=outcome)
        self._enter("post")
        try:
            # end them now, before POST has a slot: processes that a harness left running slow down other
            # sessions
            await runtime.end_processes()
        except RuntimeFault as fault:
            return Result(outcome=evolve(outcome, status="error", boundary=fault.boundary, reason=str(fault)))
        async with self._slot(self.services.stages.post):
            with self._timed("post_s"):
                return await evaluated(
                    self._containers, runtime, outcome, self.live.lineages.turns, prefetched
                )

    # ── scopes, slots and times ────────────────────────────────────────────────

    # ── its place in the engine's cache ───────────────────────────────────────

    def take(self) -> str | None:
        """Take its place in the cache of an engine; why there is none, else None."""
        identity, order = self.identity, self.order
        return self.services.places.begin_session(
            identity.session_id, order.harness.name, identity.group_id, self._credit
        )

    def give_back(self) -> None:
        """Give the place back."""
        self.services.places.end_session(self.identity.session_id)

    def _credit(self, seconds: float) -> None:
        """Move the end of RUN, while its calls are held for its place. Its container may be frozen
        meanwhile.
        """
        self.services.freezer.held(self.identity.session_id, seconds > 0)
        self._credit_held(seconds)

    def _credit_held(self, seconds: float) -> None:
        """Move the end of RUN by what a call is held."""
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
            self._stoppable = scope
            if self.cancelled is not None:
                scope.cancel()
            try:
                yield scope
            finally:
                self._stoppable = None


def _reason(cause: CancelCause) -> str:
    """The cause as an outcome's reason. A trainer's cancel and a node's stop read the same."""
    return EARLY_STOP if cause == EARLY_STOP else "cancelled"


def _soon(clock: trio.CancelScope) -> None:
    """Give a harness SPENT_GRACE seconds to exit after its budget of turns or tokens is spent; its calls are
    refused meanwhile.
    """
    clock.deadline = min(clock.deadline, trio.current_time() + SPENT_GRACE)
