"""The node's runtimes: a warm one where one of the shape stands ready, else a fresh one; used once, then removed.

A warm runtime is started and has its door, and nothing of any task is in it. The pool keeps as many of each shape as were asked for with
`want`, replaces those that grew old or died, and gives up its place to sessions: it starts one at a time.
"""

import logging
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from attrs import define, field, frozen

from polarnode.errors import RuntimeFault
from polarnode.shell.podman.container import Shape, shape_of
from polarnode.shell.podman.recipes import Recipes
from polarnode.shell.podman.runtime import REMOVE_S, PodmanRuntime
from polarnode.shell.podman.starter import Starter
from polarnode.tasks import RuntimeSpec

WARM_LIMIT = 64  # warm runtimes of all shapes: about 64 MB
WARM_AGE_S = 1800.0  # seconds a warm one waits before it is replaced; its dead-man switch runs from its start
WARM_LIFETIME_S = 4 * 3600.0  # seconds of lifetime for shapes nobody opened yet
LOOK_S = 30.0  # seconds between looks for the old and the dead while nothing else happens
RETRY_S = 5.0  # seconds before a start that failed is tried again: its cause is rarely gone at once
WARM_SESSION = "warm"  # what stands on the session label of a runtime that was started before its session

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class RuntimesStatistics:
    """`live` are with sessions now, `warm` stand ready; the others count since the node started."""

    live: int
    warm: int
    started: int
    served_warm: int
    failed: int
    swept: int
    service_restarts: int


@define(eq=False)
class Demand:
    """What is wanted of one shape, and the longest lifetime its sessions asked for."""

    count: int = 0
    lifetime_s: float = 0.0
    retry_at: float = -math.inf  # not before then, after a start that failed
    ready: "deque[PodmanRuntime]" = field(factory=deque)

    def usable(self, runtime: PodmanRuntime, lifetime_s: float) -> bool:
        """Whether a warm one lives and will outlive a session."""
        return runtime.alive and runtime.expires - trio.current_time() >= lifetime_s


@define(eq=False, kw_only=True)
class Pool:
    """Warm runtimes by shape. `run` fills it; `take` empties it."""

    starter: Starter
    recipes: Recipes
    started: int = field(default=0, init=False)
    served_warm: int = field(default=0, init=False)
    failed: int = field(default=0, init=False)
    live: int = field(default=0, init=False)
    _demands: dict[Shape, Demand] = field(factory=dict, init=False)
    _changed: trio.Event = field(factory=trio.Event, init=False)

    @property
    def warm(self) -> int:
        return sum(len(demand.ready) for demand in self._demands.values())

    def want(self, spec: RuntimeSpec, count: int) -> None:
        """Keep `count` warm ones of this shape from now on; 0 lets them go."""
        self._demand(self._shape(spec)).count = max(0, count)
        self._changed.set()

    @asynccontextmanager
    async def open(self, spec: RuntimeSpec, *, session_id: str, lifetime_s: float) -> AsyncIterator[PodmanRuntime]:
        """A runtime for one session, removed when the block is left."""
        runtime = await self._take(self._shape(spec), session_id, lifetime_s)
        self.live += 1
        try:
            yield runtime
        finally:
            self.live -= 1
            with trio.move_on_after(2 * REMOVE_S, shield=True):  # more than its own bound
                await runtime.close()

    async def run(self, ready: trio.Event) -> None:
        """Fill and renew until cancelled; then let go of what is warm."""
        ready.set()
        try:
            while True:
                self._changed = trio.Event()
                await self._renew()
                if not await self._fill_one():
                    with trio.move_on_at(self._next_look()):
                        await self._changed.wait()
        finally:
            with trio.move_on_after(2 * REMOVE_S, shield=True):  # more than their own bound: they are removed side by side
                await self._empty()

    async def _take(self, shape: Shape, session_id: str, lifetime_s: float) -> PodmanRuntime:
        demand = self._demand(shape)
        demand.lifetime_s = max(demand.lifetime_s, lifetime_s)
        ready = next((runtime for runtime in demand.ready if demand.usable(runtime, lifetime_s)), None)
        if ready is None:
            return await self._start(shape, session_id, lifetime_s)
        demand.ready.remove(ready)
        self.served_warm += 1
        self._changed.set()
        return ready

    async def _start(self, shape: Shape, session_id: str, lifetime_s: float) -> PodmanRuntime:
        try:
            runtime = await self.starter.start(shape, session_id=session_id, lifetime_s=lifetime_s)
        except RuntimeFault:
            self.failed += 1
            raise
        self.started += 1
        return runtime

    async def _fill_one(self) -> bool:
        """Start one that is missing; whether there may be more to do."""
        now = trio.current_time()
        missing = [(shape, demand) for shape, demand in self._demands.items() if len(demand.ready) < demand.count and demand.retry_at <= now]
        if not missing or self.warm >= WARM_LIMIT:
            return False
        shape, demand = min(missing, key=lambda each: len(each[1].ready))
        lifetime_s = (demand.lifetime_s or WARM_LIFETIME_S) + WARM_AGE_S
        try:
            demand.ready.append(await self._start(shape, WARM_SESSION, lifetime_s))
            demand.retry_at = -math.inf
        except RuntimeFault as fault:
            if demand.retry_at == -math.inf:  # said once: an image that is still being built fails every few seconds
                _log.warning("no warm runtime of %s yet, tried again every %.0f s: %s", shape.image, RETRY_S, fault)
            demand.retry_at = trio.current_time() + RETRY_S
        return True

    def _next_look(self) -> float:
        """When there may be something to do if nobody says so before: a start that failed, one that is too old."""
        retries = [demand.retry_at for demand in self._demands.values() if len(demand.ready) < demand.count and demand.retry_at > -math.inf]
        return min([trio.current_time() + LOOK_S, *retries])

    async def _renew(self) -> None:
        """Remove the warm ones that are too many, too old for the next session, or dead; forget shapes nobody wants."""
        for shape, demand in list(self._demands.items()):
            for runtime in self._stale(demand):
                demand.ready.remove(runtime)
                await runtime.close()
            if not demand.count and not demand.ready:
                self._demands.pop(shape, None)

    def _stale(self, demand: Demand) -> list[PodmanRuntime]:
        worn = [runtime for runtime in demand.ready if not demand.usable(runtime, demand.lifetime_s)]
        fine = [runtime for runtime in demand.ready if runtime not in worn]
        return worn + fine[demand.count :]

    async def _empty(self) -> None:
        async with trio.open_nursery() as nursery:
            for demand in self._demands.values():
                while demand.ready:
                    nursery.start_soon(demand.ready.popleft().close)

    def _demand(self, shape: Shape) -> Demand:
        return self._demands.setdefault(shape, Demand())

    def _shape(self, spec: RuntimeSpec) -> Shape:
        return shape_of(spec, self.recipes.image(spec.image))
