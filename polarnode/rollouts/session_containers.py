"""A session's containers: opened with the task's workspace, and connected to the hosts that it may reach.

The evaluator's own container is prefetched while the harness runs, in a slot of INIT that no session needs.
Invariants: a failing step of the task is distinct from a failing runtime, which is retried; the harness, the
task's steps and its evaluator reach the same hosts and no others; an evaluator whose prefetched runtime was
not begun makes its own instead of waiting; leaving the block removes a runtime that was made.
"""

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from posixpath import normpath
from typing import NoReturn, cast

import trio
from attrs import define, evolve, field, frozen

from polarnode.containers.egress.proxy import NodeEgress
from polarnode.containers.files import WORKDIR, artifacts_path, is_kept_whole, workspace_path
from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import AbsentRuntimes, NodeRuntimes
from polarnode.core import codec
from polarnode.core.codec.limits import DEPTH, exceeds_depth, value_fault
from polarnode.core.conversation import Json
from polarnode.core.errors import EvaluatorError, PolarnodeError, Refused, RuntimeFault, boundary
from polarnode.core.ports import Clock, Ended, Judge, Runtime
from polarnode.core.task import PrepareStep, RuntimeSpec, TaskSpec
from polarnode.core.trajectory import Outcome, Turn, Verdict
from polarnode.evaluators.contract import Finished, checked_rewards, finite, stderr_tail
from polarnode.rollouts.run_clock import MAX_HELD_S
from polarnode.rollouts.services import SessionOrder
from polarnode.support.concurrency import PrioritySemaphore

# ── workspace ────────────────────────────────────────────────────────────


async def prepare(runtime: PodmanRuntime, spec: RuntimeSpec) -> None:
    """Place the task's files and run its prepare steps. A failing step raises Refused with the end of its
    output, because it would fail again.
    """
    for file in spec.files:
        await runtime.place(
            {codec.in_workdir(file.path, runtime.workdir): codec.file_bytes(file)}, mode=file.mode
        )
    for index, step in enumerate(spec.prepare):
        failure = await _step(runtime, step, spec)
        if failure is not None:
            raise Refused(failure, path=f"$.runtime.prepare[{index}]")


async def prepare_evaluation(runtime: Runtime, spec: RuntimeSpec) -> None:
    """Run the steps that only an evaluator needs, such as a test suite that the harness must not see. A
    failing step raises EvaluatorError.
    """
    for step in spec.eval_prepare:
        failure = await _step(runtime, step, spec)
        if failure is not None:
            raise EvaluatorError(failure)


def finished(
    runtime: Runtime,
    work: Runtime,
    clock: Clock,
    judge: Callable[[str], Judge],
    outcome: Outcome,
    turns: tuple[Turn, ...],
    spec: TaskSpec,
) -> Finished:
    """The session as its evaluator sees it. `work` is the harness's runtime."""
    return Finished(
        runtime=runtime,
        left=work,
        clock=clock,
        judge=judge,
        outcome=outcome,
        turns=turns,
        instruction=spec.instruction,
        config=spec.evaluator.config,
        metadata=spec.metadata,
        brought={normpath(codec.in_workdir(each.path, runtime.workdir)): each for each in spec.runtime.files},
    )


def checked(verdict: object, turns: Sequence[Turn] = ()) -> Verdict:
    """Validate a verdict, which may come from user code. Its rewards must be finite and of existing turns and
    lineages, and its metrics must be JSON.

    Metrics that are too deep or too large are replaced, and never cost the reward (`_kept_metrics`).
    """
    if not isinstance(verdict, Verdict):
        raise EvaluatorError(
            f"the evaluator returned {type(verdict).__name__}: return a polarnode.core.trajectory.Verdict"
        )
    reward = finite(verdict.reward, "its reward")
    lineages, of_turns = checked_rewards(verdict, turns)
    return Verdict(
        reward=reward,
        metrics=_kept_metrics(verdict.metrics),
        lineage_rewards=lineages,
        turn_rewards=of_turns,
    )


MAX_REFUSED_CHARS = 65_536  # characters kept of refused metrics, as many as a reward file can hold


NOT_JSON_REASON = "the evaluator's metrics are not JSON"


def _kept_metrics(metrics: Mapping[str, Json]) -> dict[str, Json]:
    """The metrics as they are stored. A metric that could not be written in every event is replaced by
    `refused`, the reason, and `text`, its JSON, so that a reward is not lost because of a metric beside it.
    """
    kept: dict[str, Json] = {}
    with boundary(EvaluatorError, NOT_JSON_REASON):
        items = dict(metrics).items()
    for name, value in items:
        kept |= _kept_metric(name, value)
    fault = value_fault(kept, "$.metrics")
    return kept if fault is None else _refused(kept, fault)


def _kept_metric(name: str, value: Json) -> dict[str, Json]:
    """One metric as JSON. Raises EvaluatorError for a value that JSON cannot express."""
    fault = value_fault({name: value}, "$.metrics") if exceeds_depth(value, DEPTH - 1) else None
    if fault is not None:
        return {name: _refused(value, fault)}
    with boundary(EvaluatorError, NOT_JSON_REASON):
        found = cast(dict[str, Json], codec.read_json(codec.dump_json({name: value})))
    fault = value_fault(found, "$.metrics")
    return found if fault is None else {name: _refused(value, fault)}


def _refused(value: Json, fault: Refused) -> dict[str, Json]:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = codec.dump_json(value).decode()
    return {"refused": str(fault), "text": text[:MAX_REFUSED_CHARS]}


async def _step(runtime: Runtime, step: PrepareStep, spec: RuntimeSpec) -> str | None:
    """Run a step. Returns None, or how it failed."""
    ended = await runtime.run(step.argv, user=step.user, env=spec.env)
    if ended.exit_code == 0:
        return None
    return (
        f"prepare step {' '.join(step.argv)!r} ended with exit code {ended.exit_code}:"
        f" {stderr_tail(ended.stderr or ended.stdout)}"
    )


# ── prefetched runtime ────────────────────────────────────────────────────────

LAST = -1  # the priority of its slot; that of a session is 0 to 100

logger = logging.getLogger(__name__)


@define(eq=False, kw_only=True)
class PrefetchedRuntime:
    """A runtime made in the background. `begin` starts making it, `take` hands it over."""

    open: Callable[[], AbstractAsyncContextManager[PodmanRuntime]]
    stage: PrioritySemaphore
    budget_s: float
    on_settled: Callable[[], None]  # is called once, when the runtime is made or will not be made
    _may_begin: trio.Event = field(factory=trio.Event, init=False)
    _waiting: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _begun: bool = field(default=False, init=False)
    _settled: trio.Event = field(factory=trio.Event, init=False)
    _runtime: PodmanRuntime | None = field(default=None, init=False)

    def begin(self) -> None:
        """Make it as soon as a slot is free that no session needs."""
        self._may_begin.set()

    async def take(self) -> PodmanRuntime | None:
        """Hand over the runtime, once; None if it was not begun, failed, or has ended since."""
        if not self._begun:
            self._waiting.cancel()
        await self._settled.wait()
        taken, self._runtime = self._runtime, None
        return taken if taken is not None and taken.alive else None

    async def run(self) -> None:
        """Make the runtime, and hold it until cancelled."""
        async with AsyncExitStack() as stack:
            try:
                self._runtime = await self._made(stack)
            except PolarnodeError as error:
                logger.warning("a prefetched runtime failed: %s", error)
            self._settled.set()
            self.on_settled()
            await trio.sleep_forever()

    async def _made(self, stack: AsyncExitStack) -> PodmanRuntime | None:
        with self._waiting:
            await self._may_begin.wait()
            async with self.stage.slot(priority=LAST):
                self._begun = True
                with trio.move_on_after(self.budget_s):
                    return await stack.enter_async_context(self.open())
        return None


@asynccontextmanager
async def open_prefetched_runtime(
    open_runtime: Callable[[], AbstractAsyncContextManager[PodmanRuntime]],
    stage: PrioritySemaphore,
    *,
    budget_s: float,
    on_settled: Callable[[], None],
) -> AsyncIterator[PrefetchedRuntime]:
    """Make a runtime in the background of the block. An error of the block is raised as itself, not in an
    exception group.
    """
    prefetched = PrefetchedRuntime(open=open_runtime, stage=stage, budget_s=budget_s, on_settled=on_settled)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefetched.run)
            yield prefetched
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        sole = _sole_error(group)
        if sole is None:
            raise
        raise sole from group


def _sole_error(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """The only error of a group; None if it holds several errors or another group."""
    found = group.exceptions[0]
    return found if len(group.exceptions) == 1 and not isinstance(found, BaseExceptionGroup) else None


# ── containers of a session ───────────────────────────────────────────────────

# The seconds of a container's lifetime for waiting in READY, several whole run budgets. After a longer wait a
# fresh container replaces it.
READY_WAIT_S = 6 * 3600.0
TEARDOWN_MARGIN_S = 60.0  # seconds that a container's dead-man switch allows beyond all budgets


@frozen(kw_only=True)
class NodeContainers:
    """Where the sessions of a node get their containers. `folder` has the logs of sessions, and what is
    copied out of their containers.
    """

    runtimes: NodeRuntimes | AbsentRuntimes
    ensure_image: Callable[[str], Awaitable[None]]  # builds the image of a recipe if it is missing
    folder: Path
    egress: NodeEgress = field(factory=NodeEgress)  # hosts tasks may reach


@define(eq=False)
class Containers:
    """The containers of one session. `metrics` are added to its trajectory's metrics."""

    order: SessionOrder
    node: NodeContainers
    metrics: dict[str, Json] = field(factory=dict, init=False)

    def open(self) -> AbstractAsyncContextManager[PodmanRuntime]:
        """Open a container with the task's workspace in it. Raises RuntimeFault if none starts, and Refused
        if a step of the task fails.
        """
        shared = self.order.spec.num_samples > 1 or self.order.fresh
        return self.node.runtimes.open_prepared(
            self.order.runtime,
            session_id=self.order.identity.session_id,
            lifetime_s=self.lifetime_s(),
            prepare=self._prepare,
            shared=shared,
        )

    def is_preparing(self) -> bool:
        """Whether a sibling is preparing the same workspace, so that waiting for it is quicker."""
        return self.node.runtimes.is_preparing(self.order.runtime)

    async def wait_prepared(self) -> None:
        """Wait until no sibling is preparing it."""
        await self.node.runtimes.wait_prepared(self.order.runtime)

    def lifetime_s(self) -> float:
        """The seconds after which the dead-man switch ends a container that nothing else removed."""
        return self.order.spec.budgets.init_s + READY_WAIT_S + self.min_lifetime_s()

    def min_lifetime_s(self) -> float:
        """The seconds of lifetime that a container must have left when its run begins."""
        budgets = self.order.spec.budgets
        return budgets.run_s + MAX_HELD_S + 2 * budgets.post_s + TEARDOWN_MARGIN_S

    async def _prepare(self, runtime: PodmanRuntime) -> None:
        async with self.reaching(runtime) as reach:
            try:
                await prepare(runtime, reach.extend_env(self.order.runtime))
            except Refused as refused:
                raise _add_end_reason(runtime, refused) from refused

    @asynccontextmanager
    async def reaching(self, *named: "PodmanRuntime | Gone") -> AsyncIterator["HostAccess"]:
        """Let programs in these containers reach the hosts that the task requests and the node allows, while
        the block runs.
        """
        runtimes = [each for each in dict.fromkeys(named) if not isinstance(each, Gone)]
        if not self.order.runtime.egress or not runtimes:
            yield HostAccess()
            return
        async with AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(
                    self.node.egress.open(each.network, self.order.runtime.egress)
                )
                for each in runtimes
            ]
            try:
                yield HostAccess(env=dict(opened[0].env))
            finally:
                self.metrics["egress"] = _added(
                    self.metrics.get("egress"), [each.figures() for each in opened]
                )

    async def keep(self, runtime: "PodmanRuntime | Gone") -> None:
        """Copy the artifacts and the workspace out of the container, as the task requests. A failed copy is
        reported in the metrics and does not affect the verdict. An incomplete workspace is of no use, and is
        removed.
        """
        if isinstance(runtime, Gone):
            return
        folder, session_id = self.node.folder, self.order.identity.session_id
        if artifacts := self.order.runtime.artifacts:
            self.metrics["artifacts"] = await _kept(runtime, artifacts, artifacts_path(folder, session_id))
        if self.order.runtime.keep_workspace:
            to = workspace_path(folder, session_id)
            self.metrics["workspace"] = kept = await _kept(runtime, (WORKDIR,), to)
            if not is_kept_whole(kept):
                await trio.Path(to).unlink(missing_ok=True)

    def record_kills(self, runtime: PodmanRuntime) -> int:
        """Record how many of the harness's programs the kernel killed for lack of memory."""
        if kills := runtime.oom_kills():
            self.metrics["oom_kills"] = kills
        return kills


def _add_end_reason(runtime: PodmanRuntime, refused: Refused) -> Refused:
    """The refusal, with the reason why the node ended the step, which the exit code does not show."""
    return (
        Refused(f"{refused} ({runtime.ended_because})", path=refused.path)
        if runtime.ended_because
        else refused
    )


async def _kept(runtime: PodmanRuntime, paths: Sequence[str], to: Path) -> dict[str, Json]:
    try:
        return (await runtime.collect(paths, to)).metrics()
    except RuntimeFault as fault:
        logger.warning("%s", fault)
        return {"failed": str(fault)}


def _added(before: Json, figures: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Sum the counts of several proxies. Numbers and tables of numbers are added up; of other values the last
    one is kept.
    """
    total: dict[str, Json] = dict(before) if isinstance(before, dict) else {}
    for counts in figures:
        for name, value in counts.items():
            total[name] = _sum_values(total.get(name), value)
    return total


def _sum_values(one: Json, other: Json) -> Json:
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _sum_values(one.get(name), other.get(name)) for name in {**one, **other}}
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one + other
    return one if other is None else other


@frozen(kw_only=True)
class HostAccess:
    """The environment with which programs in a container reach their hosts."""

    env: Mapping[str, str] = field(factory=dict)

    def extend_env(self, spec: RuntimeSpec) -> RuntimeSpec:
        """The task's runtime with this environment; the task's own variables override it."""
        return evolve(spec, env={**self.env, **spec.env}) if self.env else spec

    def through(self, runtime: "PodmanRuntime | Gone") -> Runtime:
        """The runtime as an evaluator uses it."""
        return _HostAccessRuntime(runtime=runtime, added_env=self.env) if self.env else runtime


@frozen(kw_only=True)
class Gone:
    """Stands in for the container of a session that is over and whose workspace was not kept. It serves
    evaluators that read turns alone. Any use of it raises the reason.
    """

    why: str
    workdir: str
    id: str = "gone"
    ended_because: str | None = None
    ended_for_room: bool = False

    async def run(self, argv: Sequence[str], **_: object) -> Ended:
        return await self._missing()

    async def put(self, files: Mapping[str, bytes], **_: object) -> None:
        await self._missing()

    async def read(self, path: str, **_: object) -> bytes | None:
        return await self._missing()

    async def copy_workdir(self, target: PodmanRuntime) -> None:
        await self._missing()

    async def end_processes(self) -> None:
        await trio.lowlevel.checkpoint()

    async def unseal(self) -> None:
        await trio.lowlevel.checkpoint()

    async def _missing(self) -> NoReturn:
        await trio.lowlevel.checkpoint()
        raise EvaluatorError(self.why)


@frozen(kw_only=True)
class _HostAccessRuntime:
    """A runtime that adds to the environment of its programs."""

    runtime: Runtime
    added_env: Mapping[str, str]

    @property
    def id(self) -> str:
        return self.runtime.id

    @property
    def workdir(self) -> str:
        return self.runtime.workdir

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
        stdin: bytes = b"",
        keep: int | None = None,
    ) -> Ended:
        return await self.runtime.run(
            argv, env={**self.added_env, **(env or {})}, user=user, workdir=workdir, stdin=stdin, keep=keep
        )

    async def put(self, files: Mapping[str, bytes], *, user: str | None = None, mode: int = 0o644) -> None:
        await self.runtime.put(files, user=user, mode=mode)

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        return await self.runtime.read(path, limit=limit)

    async def end_processes(self) -> None:
        await self.runtime.end_processes()
