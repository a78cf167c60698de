"""The outcome of a run, and POST: the evaluator scores what the harness left, under its own time budget.

The first cause of an end counts. Invariant: a fault of the machine is never reported as the agent's, because
the former is retried and a trainer learns from the latter. An evaluator may be user code. Whatever it returns
or raises, or a hang, becomes this session's outcome and leaves its turns unchanged. No process of the agent
runs beside it. Nothing here is shielded: a trainer's cancel does not reach POST, and a node that is forced to
stop does not wait for POST.
"""

import logging
from array import array
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from os import SEEK_END
from pathlib import Path
from uuid import uuid4

import trio
from attrs import evolve, frozen

from polarnode.containers.runtime import PodmanRuntime
from polarnode.core.codec.json import plain
from polarnode.core.conversation import Json
from polarnode.core.errors import (
    ContentFault,
    EngineError,
    EvaluatorError,
    PolarnodeError,
    Refused,
    RuntimeFault,
)
from polarnode.core.ports import Judge, RowScores, Runtime, ScoreOrder, TimedProgram, TimedResult, Work
from polarnode.core.task import Budgets
from polarnode.core.trajectory import Clock, Outcome, Trajectory, Turn, Verdict
from polarnode.engine.scoring import ScoringEngines, score_all
from polarnode.evaluators.contract import Finished, KeptWork
from polarnode.harnesses.harness import exit_outcome
from polarnode.merge.token_extras import add_teacher_logprobs, row_to_score, unscored
from polarnode.merge.trajectory import Result
from polarnode.rollouts import session_containers
from polarnode.rollouts.services import SessionOrder
from polarnode.rollouts.session_containers import Containers, Gone, PrefetchedRuntime

# ── the outcome of a run ──────────────────────────────────────────────────────

LOG_TAIL_CHARS = 2000  # characters of a harness's log shown in the outcome, enough for the end of a traceback


@frozen(kw_only=True)
class Ending:
    """The facts when a harness's run is over. `ended` is its exit code, the failure that replaced it, or None
    when its time ran out. `cancelled` is the cause, if it was cancelled.

    `because` says why the node ended all processes in its container. `for_room` says that the machine was
    full, rather than the session over its own limit. `oom_kills` is how many of its programs the kernel
    killed for lack of memory.
    """

    ended: int | PolarnodeError | None
    cancelled: str | None = None
    spent_clock: Clock | None = None
    because: str | None = None
    for_room: bool = False
    oom_kills: int = 0
    turns: tuple[Turn, ...] = ()
    log_tail: str | None = None


def run_outcome(order: SessionOrder, ending: Ending) -> Outcome:
    """The outcome of a run."""
    exit_code = ending.ended if isinstance(ending.ended, int) else None
    if ending.cancelled is not None:
        return Outcome(
            status="cancelled",
            exit_code=exit_code,
            reason=f"{ending.cancelled} in run",
            log_tail=ending.log_tail,
        )
    if ending.because is not None and ending.for_room:
        return evolve(fault_outcome(RuntimeFault(ending.because)), log_tail=ending.log_tail)
    if ending.because is not None:
        return Outcome(status="failed", exit_code=exit_code, reason=ending.because, log_tail=ending.log_tail)
    # The kernel killed the container's first process too, but the agent caused that.
    if isinstance(ending.ended, RuntimeFault) and (
        ending.oom_kills or isinstance(ending.ended, ContentFault)
    ):
        return _note_memory_kills(
            Outcome(status="failed", reason=str(ending.ended), log_tail=ending.log_tail),
            order,
            ending.oom_kills,
        )
    if isinstance(ending.ended, PolarnodeError):
        return evolve(fault_outcome(ending.ended), log_tail=ending.log_tail)
    if ending.spent_clock is not None:
        return Outcome(
            status="timeout",
            clock=ending.spent_clock,
            exit_code=exit_code,
            reason=spent_reason(ending.spent_clock, order.spec.budgets),
            log_tail=ending.log_tail,
        )
    if exit_code is None:
        reason = f"the harness ran {order.spec.budgets.run_s:g} s (budgets.run_s) and was ended"
        return Outcome(status="timeout", clock="run", reason=reason, log_tail=ending.log_tail)
    judged = exit_outcome(order.harness, exit_code, ending.turns)
    log_tail = None if judged == Outcome(status="completed", exit_code=0) else ending.log_tail
    return evolve(_note_memory_kills(judged, order, ending.oom_kills), log_tail=log_tail)


def spent_reason(clock: Clock, budgets: Budgets) -> str:
    """Why a run ended in which a call was refused because of a budget."""
    if clock == "turns":
        return f"its budget is spent: max_turns = {budgets.max_turns}"
    if clock == "tokens":
        return f"its budget is spent: max_tokens = {budgets.max_tokens}"
    most = budgets.max_repeats
    return f"it looped: {most} turns in a row did the same and got the same, or met the same error"


def fault_outcome(error: PolarnodeError) -> Outcome:
    """The outcome of a session that an error of the node ended."""
    return Outcome(status="error", boundary=error.boundary, reason=str(error))


def _note_memory_kills(outcome: Outcome, order: SessionOrder, kills: int) -> Outcome:
    if not kills or outcome.status == "completed":
        return outcome
    reason = (
        f"the kernel ended {kills} of its programs: its {order.runtime.memory_mb} MiB of memory were spent"
    )
    return evolve(outcome, reason=f"{outcome.reason}; {reason}" if outcome.reason else reason)


def tail(log: Path) -> str | None:
    """The end of a harness's log. Read synchronously: the read is small and on local disk."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, SEEK_END) - 4 * LOG_TAIL_CHARS))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    return text[-LOG_TAIL_CHARS:] or None


# ── programs under the node's clock ───────────────────────────────────────────

# The seconds between two looks for a request. A program in a container takes 0.1 s to start, a look 0.1 ms.
PAUSE_S = 0.03


@frozen
class NodeClock:
    """`ports.Clock` on Trio's."""

    async def run(self, runtime: Runtime, program: TimedProgram) -> TimedResult:
        """Run a program until it ends or its time is over, then end every process in its runtime."""
        began, ended = trio.current_time(), None
        with trio.move_on_after(program.within_s):
            ended = await runtime.run(
                program.argv, env=program.env, user=program.user, stdin=program.stdin, keep=program.keep
            )
        await runtime.end_processes()
        return TimedResult(ended=ended, seconds=trio.current_time() - began)

    async def beside(
        self, work: Callable[[], Awaitable[Work]], attend: Callable[[], Awaitable[bool]]
    ) -> Work:
        """Return the result of `work`, and call `attend` again and again meanwhile."""
        done: list[Work] = []
        failed: list[PolarnodeError] = []

        async def kept() -> None:
            while True:
                if not await attend():
                    await trio.sleep(PAUSE_S)

        async def worked() -> None:
            done.append(await work())

        # Errors are kept as values, because a nursery would wrap them in a group.
        async def first(task: Callable[[], Awaitable[None]]) -> None:
            try:
                await task()
            except PolarnodeError as error:
                failed.append(error)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first, kept)
            nursery.start_soon(first, worked)
        if failed:
            raise failed[0]
        return done[0]


# ── POST ──────────────────────────────────────────────────────────────────────

logger = logging.getLogger(__name__)


async def evaluated(
    containers: Containers,
    judge: Callable[[str], Judge],
    runtime: PodmanRuntime | Gone,
    outcome: Outcome,
    turns: tuple[Turn, ...],
    prefetched: PrefetchedRuntime | None = None,
    kept: KeptWork | None = None,
) -> Result:
    """The session's result with its verdict, or with the evaluator's failure. `judge` finds a judge by name.
    `prefetched` makes the evaluator's own runtime, if it needs one. `kept` says what `runtime` holds of a
    session that is evaluated again.
    """
    post_s = containers.order.spec.budgets.post_s
    judged: Verdict | PolarnodeError | None = None
    try:
        with trio.CancelScope(deadline=trio.current_time() + post_s):
            judged = await _judged(containers, judge, runtime, outcome, turns, prefetched, kept)
    except PolarnodeError as error:
        judged = error
    if isinstance(judged, ContentFault):  # What the run left would also stop another attempt at evaluating.
        judged = EvaluatorError(str(judged))
    if judged is None:
        return _failed(
            outcome,
            "evaluator",
            f"the evaluator ran {post_s:g} s (budgets.post_s) and was ended",
            clock="post",
        )
    if isinstance(judged, PolarnodeError):
        return _failed(outcome, judged.boundary, str(judged))
    return Result(outcome=outcome, verdict=judged)


def _failed(outcome: Outcome, boundary: str, reason: str, clock: Clock | None = None) -> Result:
    """The outcome of a failed evaluation. It keeps the run's exit code, clock and log; the run's own outcome
    is in the metrics, for a later evaluation.
    """
    ran: dict[str, Json] = plain(evolve(outcome, log_tail=None))
    failed = evolve(outcome, status="error", boundary=boundary, reason=reason, clock=clock or outcome.clock)
    return Result(outcome=failed, metrics={"run_outcome": ran})


async def _judged(
    containers: Containers,
    judge: Callable[[str], Judge],
    runtime: PodmanRuntime | Gone,
    outcome: Outcome,
    turns: tuple[Turn, ...],
    prefetched: PrefetchedRuntime | None,
    kept: KeptWork | None,
) -> Verdict | PolarnodeError:
    order, spec = containers.order, containers.order.spec
    await runtime.end_processes()
    await containers.keep(runtime)
    await runtime.unseal()
    async with AsyncExitStack() as stack:
        judged = await _fresh(containers, runtime, prefetched, stack) if order.fresh else runtime
        reach = await stack.enter_async_context(containers.reaching(judged, runtime))
        prepare = partial(session_containers.prepare_evaluation, judged, reach.extend_env(spec.runtime))
        work = reach.through(runtime)
        finished = session_containers.finished(
            reach.through(judged), work, NodeClock(), judge, outcome, turns, spec
        )
        finished = evolve(finished, kept=kept)
        # The tests are added after the agent's work, which this evaluator copies in itself.
        if order.fresh and not order.evaluator.copies:
            return await _evaluate(containers, evolve(finished, prepare=prepare), judged)
        await prepare()
        return await _evaluate(containers, finished, judged)


async def _evaluate(
    containers: Containers, finished: Finished, runtime: PodmanRuntime | Gone
) -> Verdict | PolarnodeError:
    """The evaluator's verdict, or its error as a value: nurseries would wrap a raised error in exception
    groups.
    """
    before = runtime.ended_because
    verdict: Verdict | PolarnodeError
    try:
        found = await containers.order.evaluator.evaluate(finished)
        verdict = session_containers.checked(found, finished.turns)
    except PolarnodeError as error:
        verdict = error
    except (Exception, SystemExit) as error:
        # The evaluator may be user code, named by import path. Its bug is this session's data, and its
        # SystemExit must not end the node.
        verdict = EvaluatorError(f"{type(error).__name__}: {error}")
    if containers.order.evaluator.only_programs and not runtime.ended_for_room:
        return verdict
    # The node ended the processes in the evaluator's runtime meanwhile, so the verdict is not valid.
    if runtime.ended_because != before:
        return EvaluatorError(f"the evaluator was ended: {runtime.ended_because}")
    return verdict


async def _fresh(
    containers: Containers,
    runtime: PodmanRuntime | Gone,
    prefetched: PrefetchedRuntime | None,
    stack: AsyncExitStack,
) -> PodmanRuntime:
    """A clean runtime, prepared like the harness's own. Its workdir holds a copy of what the harness left,
    unless the evaluator copies what it needs itself.
    """
    clean = await prefetched.take() if prefetched is not None else None
    if clean is None:
        clean = await open_with_retry(containers, stack)
    if containers.order.evaluator.copies:
        await runtime.copy_workdir(clean)
    return clean


async def open_with_retry(containers: Containers, stack: AsyncExitStack) -> PodmanRuntime:
    """A clean runtime, prepared like the harness's own; a second one if the first does not start."""
    try:
        return await stack.enter_async_context(containers.open())
    except RuntimeFault as fault:  # A whole rollout depends on it, so it is tried once more, as in INIT.
        logger.warning(
            "session %s: its evaluator's runtime failed, trying a fresh one: %s",
            containers.order.identity.session_id,
            fault,
        )
        return await stack.enter_async_context(containers.open())


# ── a teacher's logprobs ──────────────────────────────────────────────────────


async def taught(
    trajectory: Trajectory, teacher: str, scoring: ScoringEngines, scope: trio.CancelScope
) -> Trajectory:
    """The trajectory with its teacher's logprobs in each trace that has trained tokens, or with the reason
    why they are missing, because no failure of a teacher fails a session. `scope` bounds the time, and
    cancelling it ends the scoring.
    """
    began, turns = trio.current_time(), {turn.index: turn for turn in trajectory.turns}
    orders: dict[int, ScoreOrder] = {}
    found: dict[int, RowScores | PolarnodeError] = {}
    try:
        scoring.require_engine(teacher, "$.carry.teacher")
    except Refused as refused:  # The task is from an earlier run of the node, with other settings.
        return unscored(trajectory, str(refused))
    for place, trace in enumerate(trajectory.traces):
        if 1 in trace.loss_mask:
            try:
                row, start = row_to_score(trace, turns)
                orders[place] = ScoreOrder(request_id=uuid4().hex, row=row, start=start)
            except Refused as refused:
                found[place] = refused
    with scope:
        await score_all(scoring.engines[teacher], orders, found)
    why = "its node was stopped before its teacher had scored it"
    if trio.current_time() >= scope.deadline:
        why = "its teacher had not scored it when budgets.post_s was over"
    why = next((str(each) for each in found.values() if isinstance(each, EngineError)), why)
    traces, versions = list(trajectory.traces), dict[str, None]()
    for place in (*orders, *(place for place in found if place not in orders)):
        scores, begin = found.get(place), 0
        scored: array[float] | str = str(scores) if isinstance(scores, Refused) else why
        if isinstance(scores, RowScores):
            begin, scored = orders[place].start - traces[place].offset, scores.logprobs
            versions[scores.version] = None
        traces[place] = add_teacher_logprobs(traces[place], begin, scored)
    metrics: dict[str, Json] = {"name": teacher, "versions": list(versions)}
    metrics["seconds"] = round(trio.current_time() - began, 3)
    return evolve(trajectory, traces=tuple(traces), metrics={**trajectory.metrics, "teacher": metrics})
