"""A session's containers: opened with the task's workspace in them, given what they may reach of the world, cleared of what the harness left.

The rule for whoever edits it: the harness, the task's steps and its evaluator reach the same names, and none of them reaches more.
"""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

from attrs import define, evolve, field, frozen

from polarnode.conversation import Json
from polarnode.errors import Refused, RuntimeFault
from polarnode.ports import Ended, Runtime
from polarnode.shell import workspace
from polarnode.shell.orders import House, SessionOrder
from polarnode.shell.podman import PodmanRuntime
from polarnode.shell.podman.artifacts import artifacts_path
from polarnode.tasks import RuntimeSpec

READY_S = 6 * 3600.0  # of a container's life for waiting in READY: several whole run budgets; one that waited longer gives way to a fresh one
TEARDOWN_S = 60.0  # what the dead-man switch of a container is given beyond all budgets

logger = logging.getLogger(__name__)


@define(eq=False)
class Containers:
    """What one session has made for it. `metrics` is what its containers tell of it."""

    order: SessionOrder
    house: House
    metrics: dict[str, Json] = field(factory=dict, init=False)

    def open(self) -> AbstractAsyncContextManager[PodmanRuntime]:
        """A container with the task's workspace in it. Raises RuntimeFault when none starts, Refused when a step of the task fails."""
        shared = self.order.spec.num_samples > 1 or self.order.fresh
        return self.house.runtimes.open_prepared(
            self.order.runtime,
            session_id=self.order.identity.session_id,
            lifetime_s=self.lifetime_s(),
            prepare=self._prepare,
            shared=shared,
        )

    def preparing(self) -> bool:
        """Whether a sibling just prepares the same, so that to wait for it is quicker."""
        return self.house.runtimes.preparing(self.order.runtime)

    async def wait_prepared(self) -> None:
        """Wait until no sibling does."""
        await self.house.runtimes.wait_prepared(self.order.runtime)

    def lifetime_s(self) -> float:
        """When the dead-man switch ends a container that everybody forgot."""
        return self.order.spec.budgets.init_s + READY_S + self.needed_s()

    def needed_s(self) -> float:
        """What a container must still live for when its run begins."""
        return self.order.spec.budgets.run_s + 2 * self.order.spec.budgets.post_s + TEARDOWN_S

    async def _prepare(self, runtime: PodmanRuntime) -> None:
        async with self.reaching(runtime) as reach:
            try:
                await workspace.prepare(runtime, reach.told(self.order.runtime))
            except Refused as refused:
                raise _because(runtime, refused) from refused

    @asynccontextmanager
    async def reaching(self, *runtimes: PodmanRuntime) -> AsyncIterator["Reach"]:
        """While the block lasts, programs in these containers reach what the task asked for and the node allows."""
        if not self.order.runtime.egress:
            yield Reach()
            return
        async with AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(self.house.egress.open(each.network, self.order.runtime.egress)) for each in runtimes]
            try:
                yield Reach(env=dict(opened[0].env))
            finally:
                self.metrics["egress"] = _added(self.metrics.get("egress"), [each.figures() for each in opened])

    async def keep_artifacts(self, runtime: PodmanRuntime) -> None:
        """Keep what the task wants kept of what a harness left. What can not be kept costs no verdict, and is said."""
        if not self.order.runtime.artifacts:
            return
        to = artifacts_path(self.house.log_dir, self.order.identity.session_id)
        self.metrics["artifacts"] = await _kept(runtime, self.order.runtime.artifacts, to)

    def note_kills(self, runtime: PodmanRuntime) -> int:
        """How many of the harness's programs the kernel ended for want of memory."""
        if kills := runtime.oom_kills():
            self.metrics["oom_kills"] = kills
        return kills


def _because(runtime: PodmanRuntime, refused: Refused) -> Refused:
    """A step that the node ended says more than its exit code does."""
    return Refused(f"{refused} ({runtime.ended_because})", path=refused.path) if runtime.ended_because else refused


async def _kept(runtime: PodmanRuntime, paths: Sequence[str], to: Path) -> dict[str, Json]:
    try:
        return (await runtime.collect(paths, to)).metrics()
    except RuntimeFault as fault:
        logger.warning("%s", fault)
        return {"failed": str(fault)}


def _added(before: Json, figures: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Counts of several proxies as one: numbers and tables of numbers are added up, anything else is the last one's."""
    total: dict[str, Json] = dict(before) if isinstance(before, dict) else {}
    for told in figures:
        for name, value in told.items():
            total[name] = _sum(total.get(name), value)
    return total


def _sum(one: Json, other: Json) -> Json:
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _sum(one.get(name), other.get(name)) for name in {**one, **other}}
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one + other
    return one if other is None else other


@frozen(kw_only=True)
class Reach:
    """What programs in a container are told so that they reach what they may."""

    env: Mapping[str, str] = field(factory=dict)

    def told(self, spec: RuntimeSpec) -> RuntimeSpec:
        """The task's runtime as its steps see it: what the task itself says counts more."""
        return evolve(spec, env={**self.env, **spec.env}) if self.env else spec

    def through(self, runtime: PodmanRuntime) -> Runtime:
        """The runtime as an evaluator uses it."""
        return _Reaching(runtime=runtime, told=self.env) if self.env else runtime


@frozen(kw_only=True)
class _Reaching:
    """A runtime whose programs are told more than they are given."""

    runtime: Runtime
    told: Mapping[str, str]

    @property
    def id(self) -> str:
        return self.runtime.id

    @property
    def workdir(self) -> str:
        return self.runtime.workdir

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, user: str | None = None, workdir: str | None = None, stdin: bytes = b""
    ) -> Ended:
        return await self.runtime.run(argv, env={**self.told, **(env or {})}, user=user, workdir=workdir, stdin=stdin)

    async def put(self, files: Mapping[str, bytes], *, user: str | None = None, mode: int = 0o644) -> None:
        await self.runtime.put(files, user=user, mode=mode)

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        return await self.runtime.read(path, limit=limit)

    async def end_processes(self) -> None:
        await self.runtime.end_processes()
