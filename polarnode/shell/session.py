"""One rollout, phase by phase: INIT, READY, RUN, POST, teardown.

Each phase has its own clock, and what ends one phase never ends the next: a harness out of time goes on to POST with every turn it made, and
a trainer's cancel reaches all but POST. Nothing leaves `run_recorded`: a bad session is data, and a bug in one is no other's. Rule for whoever
edits this file: the last act is the synchronous `publish`, so that there is no moment in which a finished rollout can be lost.
"""

import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from os import SEEK_END
from pathlib import Path
from typing import Literal

import trio
from attrs import define, evolve, field

from polarnode.errors import PolarnodeError, RuntimeFault
from polarnode.harnesses.exits import exit_outcome
from polarnode.merge.trajectory import Result, assemble, without_traces
from polarnode.ports import Endpoint
from polarnode.records import Outcome, Timing, Trajectory
from polarnode.shell import workspace
from polarnode.shell.evaluation import evaluated
from polarnode.shell.gates import Gate
from polarnode.shell.live import LiveSession
from polarnode.shell.orders import House, SessionOrder, harness_order
from polarnode.shell.podman import PodmanRuntime

logger = logging.getLogger(__name__)

INIT_ATTEMPTS = 2  # a container that fails twice in a row fails for a reason that a third would meet again
READY_S = 6 * 3600.0  # of a container's life for waiting in READY: several whole run budgets; one that waited longer gives way to a fresh one
SPENT_GRACE = 10.0  # seconds a harness has to end by itself once its budget is refused: mini retries a refusal for minutes
LOG_LIMIT = 4 << 20  # bytes of a harness's output kept; a runaway print loop must not fill the disk
LOG_TAIL = 2000  # characters of it shown in the outcome: a traceback's end
TEARDOWN_S = 60.0  # what the dead-man switch of a container is given beyond all budgets

Phase = Literal["init", "ready", "run", "post", "ended"]


@define(eq=False)
class Session:
    """A session on its way. `phase` is where it is; `cancel` ends what can be ended and leaves POST alone."""

    order: SessionOrder
    live: LiveSession
    house: House
    on_phase: "Callable[[Session, Trajectory | None], None]"  # told of each new phase, and of the trajectory at the end
    phase: Phase = field(default="init", init=False)
    cancelled: bool = field(default=False, init=False)
    _stoppable: trio.CancelScope | None = field(default=None, init=False)
    _timing: Timing = field(factory=Timing, init=False)

    def cancel(self) -> None:
        """End the session with what it has: a run goes on to its traces, a waiting one is over, one whose run is over is judged as ever."""
        self.cancelled = True
        if self._stoppable is not None:
            self._stoppable.cancel()

    async def run_recorded(self) -> None:
        """The whole rollout. Whatever happened is published; a bug of ours is logged besides, and reaches no sibling."""
        try:
            result = await self._result()
        except PolarnodeError as error:
            result = Result(outcome=_fault(error))
        except Exception as error:  # the isolation edge of trio.md P7: one session's bug never cancels its siblings
            result = self._bug(error)
        await self.live.close()
        try:
            self._publish(result)
        except Exception as error:  # the same edge: what can not be built or packed costs its traces, not the record
            self._hand_over(without_traces(self.order.identity, self.order.spec, self.live.lineages.turns, self._bug(error)))

    def _bug(self, error: Exception) -> Result:
        logger.exception("session %s met a bug", self.order.identity.session_id)
        return Result(outcome=Outcome(status="error", boundary="node", reason=f"{type(error).__name__}: {error}"), timing=self._timing)

    def _publish(self, result: Result) -> None:
        timed = evolve(result, timing=self._timing, metrics={**result.metrics, **self.live.metrics()})
        turns, allowed = self.live.lineages.turns, self.house.allowed_imports
        self._hand_over(assemble(self.order.identity, self.order.spec, turns, timed, allowed_imports=allowed))

    def _hand_over(self, trajectory: Trajectory) -> None:
        self.house.publish(trajectory)
        self._enter("ended", trajectory)

    def _enter(self, phase: Phase, trajectory: Trajectory | None = None) -> None:
        self.phase = phase
        self.on_phase(self, trajectory)

    async def _result(self) -> Result:
        result: Result | None = None
        with self._stoppable_scope() as scope:
            await self.house.ensure_image(self.order.runtime.image)
            async with self._slot(self.house.stages.live):
                result = await self._attempts(scope)
        return result or Result(outcome=self._stopped())

    def _stopped(self) -> Outcome:
        if self.cancelled:
            return Outcome(status="cancelled", reason=f"cancelled in {self.phase}")
        return Outcome(status="timeout", clock="init", reason=f"not ready after {self.order.spec.budgets.init_s:g} s")

    # ── INIT and READY ────────────────────────────────────────────────────────

    async def _attempts(self, scope: trio.CancelScope) -> Result:
        ended = await self._in_runtime(scope)
        for _ in range(INIT_ATTEMPTS - 1):
            if not isinstance(ended, RuntimeFault) or self.phase not in ("init", "ready"):
                break
            logger.warning("session %s: its runtime failed, trying a fresh one: %s", self.order.identity.session_id, ended)
            self._enter("init")
            ended = await self._in_runtime(scope)
        return Result(outcome=_fault(ended)) if isinstance(ended, PolarnodeError) else ended

    async def _in_runtime(self, scope: trio.CancelScope) -> Result | PolarnodeError:
        """One runtime from start to removal. Errors come out as values: raised, the nurseries on the way would wrap them in groups."""
        async with AsyncExitStack() as init:
            await init.enter_async_context(self._init_stage(scope))
            expires = trio.current_time() + self._lifetime_s()
            try:
                async with self._open_runtime() as runtime:
                    return await self._inside(runtime, init, expires)
            except RuntimeFault as fault:
                return fault

    @asynccontextmanager
    async def _init_stage(self, scope: trio.CancelScope) -> AsyncIterator[None]:
        """A place in INIT with its budget running: one budget for all attempts; waiting for the place is free."""
        async with self._slot(self.house.stages.init):
            scope.deadline = trio.current_time() + self.order.spec.budgets.init_s - self._timing.init_s
            try:
                with self._timed("init_s"):
                    yield
            finally:
                scope.deadline = math.inf

    async def _inside(self, runtime: PodmanRuntime, init: AsyncExitStack, expires: float) -> Result | PolarnodeError:
        try:
            async with self.house.serve_door(self.order.identity.session_id, runtime.door):
                ran = await self._prepared_and_run(runtime, init, expires)
        except PolarnodeError as error:
            return error
        return ran if isinstance(ran, PolarnodeError) else await self._post(runtime, ran)

    async def _prepared_and_run(self, runtime: PodmanRuntime, init: AsyncExitStack, expires: float) -> Outcome | PolarnodeError:
        try:
            await workspace.prepare(runtime, self.order.runtime)
            await init.aclose()
            return await self._ready_and_run(runtime, expires)
        except PolarnodeError as error:
            return error

    def _open_runtime(self) -> AbstractAsyncContextManager[PodmanRuntime]:
        return self.house.runtimes.open(self.order.runtime, session_id=self.order.identity.session_id, lifetime_s=self._lifetime_s())

    def _lifetime_s(self) -> float:
        return self.order.spec.budgets.init_s + READY_S + self._needed_s()

    def _needed_s(self) -> float:
        """What a container must still live for when its run begins."""
        return self.order.spec.budgets.run_s + 2 * self.order.spec.budgets.post_s + TEARDOWN_S

    async def _ready_and_run(self, runtime: PodmanRuntime, expires: float) -> Outcome:
        self._enter("ready")
        async with AsyncExitStack() as run:
            with self._timed("ready_s"):
                await run.enter_async_context(self._slot(self.house.stages.run))
            if not runtime.alive or trio.current_time() + self._needed_s() > expires:
                raise RuntimeFault("the container ended, or grew too old for a whole run, while its session waited for a place to run")
            self._enter("run")
            with self._timed("run_s"):
                return await self._run(runtime)

    # ── RUN and POST ──────────────────────────────────────────────────────────

    async def _run(self, runtime: PodmanRuntime) -> Outcome:
        log = self.house.log_dir / f"{self.order.identity.session_id}.log"
        ended: int | PolarnodeError | None = None
        with self._stoppable_scope() as clock:
            clock.deadline = trio.current_time() + self.order.spec.budgets.run_s
            self.live.on_spent = lambda: _soon(clock)
            ended = await self._harness_ended(runtime, log)
        await self.live.close()
        return self._outcome(ended, _tail(log))

    async def _harness_ended(self, runtime: PodmanRuntime, log: Path) -> int | PolarnodeError:
        """The harness's exit code. What fails meanwhile fails the run and not its turns, so it is a value."""
        endpoint = Endpoint(base_url=runtime.base_url, key=self.live.key, context_length=self.house.context_length, model=self.order.identity.model)
        try:
            launch = self.order.harness.launch(harness_order(self.order.spec, endpoint, workdir=runtime.workdir, home=runtime.home))
            await runtime.put(launch.files)
            return await runtime.run_logged(launch.argv, env=launch.env, log=log, limit=LOG_LIMIT, stdin=launch.stdin)
        except PolarnodeError as error:
            return error

    def _outcome(self, ended: int | PolarnodeError | None, log_tail: str | None) -> Outcome:
        exit_code = ended if isinstance(ended, int) else None
        if self.cancelled:
            return Outcome(status="cancelled", exit_code=exit_code, reason="cancelled in run", log_tail=log_tail)
        if isinstance(ended, PolarnodeError):
            return evolve(_fault(ended), log_tail=log_tail)
        if self.live.spent_clock is not None:
            return Outcome(status="timeout", clock=self.live.spent_clock, exit_code=exit_code, reason="its budget is spent", log_tail=log_tail)
        if exit_code is None:
            reason = f"the harness ran {self.order.spec.budgets.run_s:g} s and was ended"
            return Outcome(status="timeout", clock="run", reason=reason, log_tail=log_tail)
        judged = exit_outcome(self.order.harness, exit_code, self.live.lineages.turns)
        return evolve(judged, log_tail=None if judged == Outcome(status="completed", exit_code=0) else log_tail)

    async def _post(self, runtime: PodmanRuntime, outcome: Outcome) -> Result:
        if outcome.status in ("cancelled", "error"):
            return Result(outcome=outcome)
        self._enter("post")
        async with self._slot(self.house.stages.post):
            with self._timed("post_s"):
                return await evaluated(self.order, runtime, outcome, self.live.lineages.turns, self._open_runtime)

    # ── its scopes, places and times ──────────────────────────────────────────

    def _slot(self, stage: Gate) -> AbstractAsyncContextManager[None]:
        return stage.slot(priority=self.order.spec.priority)

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
        """A scope `cancel` reaches until it is left, or another one is entered in it: then it reaches neither when that is left."""
        with trio.CancelScope() as scope:
            self._stoppable = scope
            if self.cancelled:
                scope.cancel()
            try:
                yield scope
            finally:
                self._stoppable = None


def _soon(clock: trio.CancelScope) -> None:
    """A harness whose budget of turns or tokens is spent is refused; one that does not end for it is ended."""
    clock.deadline = min(clock.deadline, trio.current_time() + SPENT_GRACE)


def _fault(error: PolarnodeError) -> Outcome:
    return Outcome(status="error", boundary=error.boundary, reason=str(error))


def _tail(log: Path) -> str | None:
    """The end of a harness's log, read at once: it is small and on local disk."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, SEEK_END) - 4 * LOG_TAIL))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    return text[-LOG_TAIL:] or None
