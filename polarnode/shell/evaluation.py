"""POST: what a harness left behind is judged, on a clock of its own.

An evaluator may be anybody's code. The rule for whoever edits it: whatever it returns, raises or hangs in becomes this session's outcome, and
its turns are not touched. Nothing here is shielded: a trainer's cancel does not reach it, and a node that is left by force does not wait for it.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import trio
from attrs import evolve

from polarnode.errors import PolarnodeError, RuntimeFault
from polarnode.merge.trajectory import Result
from polarnode.records import Outcome, Turn, Verdict
from polarnode.shell import workspace
from polarnode.shell.orders import SessionOrder
from polarnode.shell.podman import PodmanRuntime

logger = logging.getLogger(__name__)

OpenRuntime = Callable[[], AbstractAsyncContextManager[PodmanRuntime]]


async def evaluated(order: SessionOrder, runtime: PodmanRuntime, outcome: Outcome, turns: tuple[Turn, ...], open_fresh: OpenRuntime) -> Result:
    """The session's result with its verdict, or with what kept its evaluator from one."""
    verdict: Verdict | None = None
    try:
        with trio.CancelScope(deadline=trio.current_time() + order.spec.budgets.post_s):
            verdict = await _verdict(order, runtime, outcome, turns, open_fresh)
    except PolarnodeError as error:
        return _failed(outcome, error.boundary, str(error))
    except (Exception, SystemExit) as error:  # the user's code, named by import path: its bug is this session's data, its exit not the node's
        return _failed(outcome, "evaluator", f"{type(error).__name__}: {error}")
    if verdict is None:
        return _failed(evolve(outcome, clock="post"), "evaluator", f"the evaluator ran {order.spec.budgets.post_s:g} s and was ended")
    return Result(outcome=outcome, verdict=verdict)


def _failed(outcome: Outcome, boundary: str, reason: str) -> Result:
    """How the run ended stays readable beside it: its exit code, its clock, its log."""
    return Result(outcome=evolve(outcome, status="error", boundary=boundary, reason=reason))


async def _verdict(order: SessionOrder, runtime: PodmanRuntime, outcome: Outcome, turns: tuple[Turn, ...], open_fresh: OpenRuntime) -> Verdict:
    spec = order.spec
    await runtime.end_processes()
    async with AsyncExitStack() as stack:
        judged = await _fresh(order, runtime, open_fresh, stack) if spec.evaluator.fresh_runtime else runtime
        await workspace.prepare_evaluation(judged, spec.runtime)
        return workspace.checked(await order.evaluator.evaluate(workspace.finished(judged, outcome, turns, spec)))


async def _fresh(order: SessionOrder, runtime: PodmanRuntime, open_fresh: OpenRuntime, stack: AsyncExitStack) -> PodmanRuntime:
    """A clean runtime, prepared as the harness's own was, in whose workdir lies what the harness left."""
    try:
        clean = await stack.enter_async_context(open_fresh())
    except RuntimeFault as fault:  # a whole rollout hangs on it: one more is tried, as in INIT
        logger.warning("session %s: its evaluator's runtime failed, trying a fresh one: %s", order.identity.session_id, fault)
        clean = await stack.enter_async_context(open_fresh())
    await workspace.prepare(clean, order.spec.runtime)
    await workspace.copy(runtime, clean)
    return clean
