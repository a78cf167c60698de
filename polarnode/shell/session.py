"""One rollout, phase by phase: INIT, READY, RUN, POST, teardown.

Each phase has its own clock, and what ends one phase never ends the next: a harness out of time goes on to POST with every turn it made, and
a trainer's cancel reaches all but POST. Nothing leaves `run_recorded` but a bug: a bad session is data. Rule for whoever edits this file: the
last act is the synchronous `publish`, so that there is no moment in which a finished rollout can be lost.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from pathlib import Path
from typing import Literal

import trio
from attrs import define, evolve, field

from polarnode.errors import PolarnodeError, RuntimeFault
from polarnode.merge.trajectory import Result, assemble
from polarnode.ports import Endpoint, HarnessOrder
from polarnode.records import Outcome, Timing, Trajectory, Verdict
from polarnode.shell import workspace
from polarnode.shell.live import LiveSession
from polarnode.shell.orders import House, SessionOrder
from polarnode.shell.podman import PodmanRuntime
from polarnode.tasks import RuntimeSpec

logger = logging.getLogger(__name__)

INIT_ATTEMPTS = 2  # a container that fails twice in a row fails for a reason that a third would meet again
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
        """End the session with what it has: a run goes on to its traces, a waiting one is over."""
        self.cancelled = True
        if self._stoppable is not None:
            self._stoppable.cancel()

    async def run_recorded(self) -> None:
        """The whole rollout. Whatever happened is published; only a bug of ours is logged as an error besides."""
        try:
            result = await self._result()
        except PolarnodeError as error:
            result = Result(outcome=_fault(error))
        except Exception as error:  # the isolation edge of trio.md P7: one session's bug never cancels its siblings
            logger.exception("session %s met a bug", self.order.identity.session_id)
            result = Result(outcome=Outcome(status="error", boundary="node", reason=f"{type(error).__name__}: {error}"))
        await self.live.close()
        self._publish(result)

    def _publish(self, result: Result) -> None:
        timed = evolve(result, timing=self._timing, metrics={**result.metrics, **self.live.metrics()})
        trajectory = assemble(self.order.identity, self.order.spec, self.live.lineages.turns, timed, allowed_imports=self.house.allowed_imports)
        self.house.publish(trajectory)
        self._enter("ended", trajectory)

    def _enter(self, phase: Phase, trajectory: Trajectory | None = None) -> None:
        self.phase = phase
        self.on_phase(self, trajectory)

    async def _result(self) -> Result:
        result: Result | None = None
        with self._stoppable_scope() as scope:
            await self.house.ensure_image(self.runtime_spec().image)
            async with self.house.stages.live.slot(priority=self.order.spec.priority):
                result = await self._attempts(scope)
        return result or Result(outcome=self._stopped())

    def _stopped(self) -> Outcome:
        if self.cancelled:
            return Outcome(status="cancelled", reason=f"cancelled in {self.phase}")
        return Outcome(status="timeout", clock="init", reason=f"not ready after {self.order.spec.budgets.init_s} s")

    # ── INIT and READY ────────────────────────────────────────────────────────

    async def _attempts(self, scope: trio.CancelScope) -> Result:
        ended = await self._in_runtime(scope)
        for _ in range(INIT_ATTEMPTS - 1):
            if not isinstance(ended, RuntimeFault) or self.phase != "init":
                break
            logger.warning("session %s: its runtime failed, trying a fresh one: %s", self.order.identity.session_id, ended)
            ended = await self._in_runtime(scope)
        return Result(outcome=_fault(ended)) if isinstance(ended, PolarnodeError) else ended

    async def _in_runtime(self, scope: trio.CancelScope) -> Result | PolarnodeError:
        """One runtime from start to removal. Errors come out as values: raised, the nurseries on the way would wrap them in groups."""
        async with AsyncExitStack() as init_slot:
            await init_slot.enter_async_context(self.house.stages.init.slot(priority=self.order.spec.priority))
            started = trio.current_time()
            scope.deadline = min(scope.deadline, started + self.order.spec.budgets.init_s)
            try:
                async with self._open_runtime() as runtime:
                    return await self._inside(runtime, scope, init_slot, started)
            except RuntimeFault as fault:
                return fault

    async def _inside(self, runtime: PodmanRuntime, scope: trio.CancelScope, init_slot: AsyncExitStack, started: float) -> Result | PolarnodeError:
        try:
            async with self.house.serve_door(self.order.identity.session_id, runtime.door):
                outcome = await self._prepared_and_run(runtime, scope, init_slot, started)
            return outcome if isinstance(outcome, PolarnodeError) else await self._post(runtime, outcome)
        except PolarnodeError as error:
            return error

    async def _prepared_and_run(
        self, runtime: PodmanRuntime, scope: trio.CancelScope, init_slot: AsyncExitStack, started: float
    ) -> Outcome | PolarnodeError:
        try:
            await workspace.prepare(runtime, self.order.spec.runtime)
            await init_slot.aclose()
            scope.deadline = math.inf
            self._timing = evolve(self._timing, init_s=trio.current_time() - started)
            return await self._ready_and_run(runtime)
        except PolarnodeError as error:
            return error

    def _open_runtime(self) -> AbstractAsyncContextManager[PodmanRuntime]:
        budgets = self.order.spec.budgets
        lifetime = budgets.init_s + budgets.run_s + 2 * budgets.post_s + TEARDOWN_S
        return self.house.runtimes.open(self.runtime_spec(), session_id=self.order.identity.session_id, lifetime_s=lifetime)

    def runtime_spec(self) -> RuntimeSpec:
        """The task's runtime, with the harness's own image where the task left the choice."""
        spec = self.order.spec.runtime
        return evolve(spec, image=self.order.harness.image) if spec.image == "agent" else spec

    async def _ready_and_run(self, runtime: PodmanRuntime) -> Outcome:
        self._enter("ready")
        waiting = trio.current_time()
        async with self.house.stages.run.slot(priority=self.order.spec.priority):
            self._enter("run")
            started = trio.current_time()
            outcome = await self._run(runtime)
        self._timing = evolve(self._timing, ready_s=started - waiting, run_s=trio.current_time() - started)
        return outcome

    # ── RUN ───────────────────────────────────────────────────────────────────

    async def _run(self, runtime: PodmanRuntime) -> Outcome:
        launch = self.order.harness.launch(self._harness_order(runtime))
        log = self.house.log_dir / f"{self.order.identity.session_id}.log"
        exit_code: int | None = None
        with self._stoppable_scope() as clock:
            clock.deadline = trio.current_time() + self.order.spec.budgets.run_s
            self.live.on_spent = lambda: _soon(clock)
            await runtime.put(launch.files)
            exit_code = await runtime.run_logged(launch.argv, env=launch.env, log=log, limit=LOG_LIMIT)
        await self.live.close()
        return self._outcome(exit_code, _tail(log))

    def _harness_order(self, runtime: PodmanRuntime) -> HarnessOrder:
        spec = self.order.spec
        endpoint = Endpoint(base_url=runtime.base_url, key=self.live.key, context_length=self.house.context_length, model=self.order.identity.model)
        return HarnessOrder(
            instruction=spec.instruction,
            endpoint=endpoint,
            workdir=runtime.workdir,
            home=runtime.home,
            model_name=spec.harness.model_name,
            settings=spec.harness.settings,
            env={**spec.runtime.env, **spec.harness.env},
            command=spec.harness.command,
        )

    def _outcome(self, exit_code: int | None, log_tail: str | None) -> Outcome:
        budgets = self.order.spec.budgets
        if self.cancelled:
            return Outcome(status="cancelled", exit_code=exit_code, reason="cancelled in run", log_tail=log_tail)
        if self.live.spent_clock is not None:
            return Outcome(status="timeout", clock=self.live.spent_clock, exit_code=exit_code, reason="its budget is spent", log_tail=log_tail)
        if exit_code is None:
            return Outcome(status="timeout", clock="run", reason=f"the harness ran {budgets.run_s} s and was ended", log_tail=log_tail)
        if exit_code == 0:
            return Outcome(status="completed", exit_code=0)
        return Outcome(status="failed", exit_code=exit_code, reason=f"the harness ended with exit code {exit_code}", log_tail=log_tail)

    # ── POST ──────────────────────────────────────────────────────────────────

    async def _post(self, runtime: PodmanRuntime, outcome: Outcome) -> Result:
        if self.cancelled:
            return Result(outcome=outcome)
        self._enter("post")
        async with self.house.stages.post.slot(priority=self.order.spec.priority):
            started = trio.current_time()
            with trio.CancelScope(deadline=started + self.order.spec.budgets.post_s, shield=True) as clock:
                result = await self._evaluated(runtime, outcome)
            self._timing = evolve(self._timing, post_s=trio.current_time() - started)
        if clock.cancelled_caught:
            reason = f"the evaluator ran {self.order.spec.budgets.post_s} s and was ended"
            return Result(outcome=evolve(outcome, status="error", clock="post", boundary="evaluator", reason=reason))
        return result

    async def _evaluated(self, runtime: PodmanRuntime, outcome: Outcome) -> Result:
        try:
            await runtime.end_processes()
            verdict = await self._verdict(runtime, outcome)
        except PolarnodeError as error:
            return Result(outcome=evolve(outcome, status="error", boundary=error.boundary, reason=str(error)))
        except Exception as error:  # an evaluator named by import path is the user's code, and its bug is this session's data
            return Result(outcome=evolve(outcome, status="error", boundary="evaluator", reason=f"{type(error).__name__}: {error}"))
        return Result(outcome=outcome, verdict=verdict)

    async def _verdict(self, runtime: PodmanRuntime, outcome: Outcome) -> Verdict:
        spec = self.order.spec
        async with AsyncExitStack() as stack:
            judged = runtime
            if spec.evaluator.fresh_runtime:
                judged = await stack.enter_async_context(self._open_runtime())
                await workspace.copy(runtime, judged)
            await workspace.prepare_evaluation(judged, spec.runtime)
            finished = workspace.finished(judged, outcome, self.live.lineages.turns, spec)
            return workspace.checked(await self.order.evaluator.evaluate(finished))

    @contextmanager
    def _stoppable_scope(self) -> Iterator[trio.CancelScope]:
        """A scope `cancel` reaches for as long as it is the innermost."""
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
    """The end of a harness's log, read at once: it is bounded and on local disk."""
    try:
        text = log.read_bytes()[-4 * LOG_TAIL :].decode("utf-8", "replace")
    except OSError:
        return None
    return text[-LOG_TAIL:] or None
