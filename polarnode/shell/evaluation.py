"""POST: what a harness left behind is judged, on a clock of its own.

An evaluator may be anybody's code. The rules for whoever edits it: whatever it returns, raises or hangs in becomes this session's outcome, and
its turns are not touched; and it never runs beside a process of the agent's. Nothing here is shielded: a trainer's cancel does not reach it, and
a node that is left by force does not wait for it.
"""

import logging
from contextlib import AsyncExitStack
from functools import partial

import trio
from attrs import evolve

from polarnode.errors import EvaluatorError, PolarnodeError, RuntimeFault
from polarnode.evaluators.evaluator import Finished
from polarnode.merge.trajectory import Result
from polarnode.records import Outcome, Turn, Verdict
from polarnode.shell import workspace
from polarnode.shell.beforehand import Beforehand
from polarnode.shell.containers import Containers
from polarnode.shell.podman import PodmanRuntime

logger = logging.getLogger(__name__)


async def evaluated(
    containers: Containers, runtime: PodmanRuntime, outcome: Outcome, turns: tuple[Turn, ...], beforehand: Beforehand | None = None
) -> Result:
    """The session's result with its verdict, or with what kept its evaluator from one. `beforehand` made the evaluator's runtime, if it has one."""
    post_s = containers.order.spec.budgets.post_s
    judged: Verdict | PolarnodeError | None = None
    try:
        with trio.CancelScope(deadline=trio.current_time() + post_s):
            judged = await _judged(containers, runtime, outcome, turns, beforehand)
    except PolarnodeError as error:
        judged = error
    if judged is None:
        return _failed(evolve(outcome, clock="post"), "evaluator", f"the evaluator ran {post_s:g} s and was ended")
    if isinstance(judged, PolarnodeError):
        return _failed(outcome, judged.boundary, str(judged))
    return Result(outcome=outcome, verdict=judged)


def _failed(outcome: Outcome, boundary: str, reason: str) -> Result:
    """How the run ended stays readable beside it: its exit code, its clock, its log."""
    return Result(outcome=evolve(outcome, status="error", boundary=boundary, reason=reason))


async def _judged(
    containers: Containers, runtime: PodmanRuntime, outcome: Outcome, turns: tuple[Turn, ...], beforehand: Beforehand | None
) -> Verdict | PolarnodeError:
    order, spec = containers.order, containers.order.spec
    await runtime.end_processes()
    await containers.keep_artifacts(runtime)
    await runtime.unseal()
    async with AsyncExitStack() as stack:
        judged = await _fresh(containers, runtime, beforehand, stack) if order.fresh else runtime
        reach = await stack.enter_async_context(containers.reaching(*((judged,) if judged is runtime else (judged, runtime))))
        prepare = partial(workspace.prepare_evaluation, judged, reach.told(spec.runtime))
        there, left = reach.through(judged), reach.through(runtime)
        finished = workspace.finished(there, left, containers.house.judge, outcome, turns, spec)
        if order.fresh and not order.evaluator.copies:  # its tests come after the agent's work, which the evaluator itself puts there
            return await _asked(containers, evolve(finished, prepare=prepare), judged)
        await prepare()
        return await _asked(containers, finished, judged)


async def _asked(containers: Containers, finished: Finished, runtime: PodmanRuntime) -> Verdict | PolarnodeError:
    """What the evaluator says; nothing, where the node ended what ran in its runtime meanwhile: what it says then is worth nothing."""
    before = runtime.ended_because
    said = await _said(containers, finished)
    return said if runtime.ended_because == before else EvaluatorError(f"the evaluator was ended: {runtime.ended_because}")


async def _said(containers: Containers, finished: Finished) -> Verdict | PolarnodeError:
    """What it says, whoever wrote it: as a value, because nurseries on the way out would wrap an error in groups."""
    try:
        return workspace.checked(await containers.order.evaluator.evaluate(finished), finished.turns)
    except PolarnodeError as error:
        return error
    except (Exception, SystemExit) as error:  # the user's code, named by import path: its bug is this session's data, its exit not the node's
        return EvaluatorError(f"{type(error).__name__}: {error}")


async def _fresh(containers: Containers, runtime: PodmanRuntime, beforehand: Beforehand | None, stack: AsyncExitStack) -> PodmanRuntime:
    """A clean runtime, prepared as the harness's own was; in its workdir lies what the harness left, unless the evaluator takes what it wants."""
    clean = await beforehand.take() if beforehand is not None else None
    if clean is None:
        clean = await _opened(containers, stack)
    if containers.order.evaluator.copies:
        await runtime.copy_workdir(clean)
    return clean


async def _opened(containers: Containers, stack: AsyncExitStack) -> PodmanRuntime:
    try:
        return await stack.enter_async_context(containers.open())
    except RuntimeFault as fault:  # a whole rollout hangs on it: one more is tried, as in INIT
        logger.warning("session %s: its evaluator's runtime failed, trying a fresh one: %s", containers.order.identity.session_id, fault)
        return await stack.enter_async_context(containers.open())
