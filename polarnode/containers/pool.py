"""The pool of warm runtimes. A session gets a warm runtime of its shape if one is ready, else a fresh one.

A runtime is used once and then removed. A warm runtime is started and has its model endpoint, and nothing of
any session is in it; its image may be a copy of a prepared workspace. The number of warm runtimes of a shape
depends on how many sessions wait and how fast they take runtimes: by Little's law `rate * start_s` are
starting at any time, and because takes come in bursts, the square root of that is added (the square-root rule
of staffing). The number never exceeds that of the waiting sessions. Invariant: the pool starts containers in
the background, and leaves most of Podman's calls to the sessions.

`RuntimeDemand` reports to the pool how many containers are about to be taken. Tasks that need the same
container with the same workspace share the warm ones, so they are counted together. A session whose
evaluator has a container of its own needs two: the second one while its harness runs. Invariant: the count
that was expected for a session is taken back exactly once, whatever becomes of the session, so that all
counts end at zero.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import trio
from attrs import define, evolve, field, frozen

from polarnode.containers.container import Shape, shape_of
from polarnode.containers.prepared import Workspace, workspace_of
from polarnode.containers.recipes import ImageRecipes
from polarnode.containers.runtime import REMOVE_S, PodmanRuntime
from polarnode.containers.starting import RuntimeStarter
from polarnode.core.errors import RuntimeFault
from polarnode.core.task import RuntimeSpec

# ── how many ──────────────────────────────────────────────────────────────────

# Takes are counted over this many seconds: longer than a start takes on the busiest machine seen, shorter
# than a group's runs.
RATE_WINDOW_S = 30.0
# The weight of each new start's time in the mean. A start takes 0.1 s on a quiet machine and 3 s on a busy
# one, so the last few starts matter most.
SMOOTHING_FACTOR = 0.3
ASSUMED_START_S = 0.5  # seconds a start is assumed to take before one was measured


@define(eq=False)
class TakeRate:
    """The recent rate at which runtimes of one shape were taken, as an exponentially decaying count."""

    _value: float = 0.0
    _counted_at: float = -math.inf

    def count(self, now: float) -> None:
        """Record that one was taken, warm or not."""
        self._value = self._faded_count(now) + 1.0
        self._counted_at = now

    def rate(self, now: float) -> float:
        """Takes a second."""
        return self._faded_count(now) / RATE_WINDOW_S

    def _faded_count(self, now: float) -> float:
        return self._value * math.exp((self._counted_at - now) / RATE_WINDOW_S)


@define(eq=False)
class StartDurations:
    """The mean duration of starts over all shapes, because it depends on the machine's load, not on the
    image.
    """

    mean_s: float = ASSUMED_START_S
    _seen: bool = False

    def took(self, seconds: float) -> None:
        """Record the duration of a start, in seconds."""
        self.mean_s = (
            (1 - SMOOTHING_FACTOR) * self.mean_s + SMOOTHING_FACTOR * seconds if self._seen else seconds
        )
        self._seen = True


def enough(*, waiting: int, rate: float, start_s: float, most: int) -> int:
    """The number of warm runtimes to keep: none while no session waits, one if any waits, more if they are
    taken faster than they start.
    """
    under_way = rate * start_s
    return min(waiting, most, max(1, math.ceil(under_way + math.sqrt(under_way))))


# ── the pool ──────────────────────────────────────────────────────────────────

MAX_WARM = 64  # warm runtimes of all shapes: about 64 MB
WARM_AGE_S = 1800.0  # seconds a warm one waits before it is replaced; its dead-man switch runs from its start
# Seconds of lifetime for shapes that were never opened. With the usual budgets a session needs less than
# seven hours.
WARM_LIFETIME_S = 8 * 3600.0
LOOK_S = 30.0  # seconds between checks for old and dead runtimes while nothing else happens
RETRY_S = 5.0  # seconds before a failed start is tried again: its cause is rarely gone at once
WARM_SESSION = "warm"  # value of the session label of a runtime that was started before its session
# The pool makes at most one in this many of the concurrent calls to Podman, and starts nothing while a
# session waits for its own start.
SHARE = 3

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class RuntimesStatistics:
    """Counts of runtimes. Sessions now have `live` runtimes, `frozen` of which are stopped; `warm` ones are
    ready, and `prepared` workspaces are kept as images. The other counts are since the node started.

    `reused` runtimes began with their workspace in them, from `copied` images or from existing ones.
    """

    live: int
    warm: int
    started: int
    served_warm: int
    failed: int
    swept: int
    service_restarts: int
    frozen: int = 0
    prepared: int = 0
    copied: int = 0
    reused: int = 0


@frozen(kw_only=True)
class PrewarmRequest:
    """The announcement that `count` sessions will take a runtime of the shape. `workspace` is the workspace
    that they need prepared, if a copy of it would do.
    """

    shape: Shape
    workspace: Workspace | None
    count: int


@define(eq=False)
class Shelf:
    """The warm runtimes of one shape, and the expected demand for them."""

    waiting: int = 0
    starting: int = 0
    lifetime_s: float = 0.0  # the longest its sessions needed
    retry_at: float = -math.inf  # no start before this time, after a start that failed
    awaited: int = 0  # sessions that wait for a runtime that is being started
    starting_lifetime_s: float = 0.0  # the lifetime of the runtimes that are being started
    settled: trio.Event = field(factory=trio.Event)  # set when one of them is started, or failed
    takes: TakeRate = field(factory=TakeRate)
    ready: "deque[PodmanRuntime]" = field(factory=deque)

    def usable(self, runtime: PodmanRuntime, lifetime_s: float) -> bool:
        """Whether a warm runtime is alive and will outlive a session."""
        return runtime.alive and runtime.expires - trio.current_time() >= lifetime_s

    def pop(self, lifetime_s: float) -> PodmanRuntime | None:
        """Take a warm runtime for a session; None if there is none."""
        ready = next((runtime for runtime in self.ready if self.usable(runtime, lifetime_s)), None)
        if ready is not None:
            self.ready.remove(ready)
        return ready

    def coming(self, lifetime_s: float) -> bool:
        """Whether a runtime is being started that no other session waits for."""
        return self.starting > self.awaited and self.starting_lifetime_s >= lifetime_s + WARM_AGE_S


@define(eq=False, kw_only=True)
class Pool:
    """Warm runtimes by shape. `run` fills the pool; `take` empties it. `expected` gives the image that
    sessions of a workspace will start from.
    """

    starter: RuntimeStarter
    recipes: ImageRecipes
    most: int
    expected: Callable[[Workspace, int], tuple[str | None, int]]
    started: int = field(default=0, init=False)
    served_warm: int = field(default=0, init=False)
    failed: int = field(default=0, init=False)
    live: int = field(default=0, init=False)
    # True under backpressure: nothing is started in advance.
    held: bool = field(default=False, init=False)
    _cold: int = field(default=0, init=False)  # sessions that wait for a start of their own
    _present: set[str] = field(factory=set, init=False)  # images that were in the store
    _starts: StartDurations = field(factory=StartDurations, init=False)
    _requests: dict[tuple[Shape, Workspace | None], PrewarmRequest] = field(factory=dict, init=False)
    _warm_by_shape: dict[Shape, Shelf] = field(factory=dict, init=False)
    _changed: trio.Event = field(factory=trio.Event, init=False)

    @property
    def warm(self) -> int:
        return sum(len(shelf.ready) for shelf in self._warm_by_shape.values())

    def shape(self, spec: RuntimeSpec) -> Shape:
        """The shape a task needs, with Podman's name of its image."""
        return shape_of(spec, self.recipes.image(spec.image))

    def prewarm(self, request: PrewarmRequest) -> None:
        """Set the number of expected sessions; 0 releases the warm runtimes."""
        self._requests.pop((request.shape, request.workspace), None)
        if request.count > 0:
            self._requests[request.shape, request.workspace] = request
        self.look()

    def look(self) -> None:
        """Wake the pool, because a copy was made or the machine has capacity again."""
        self._changed.set()

    async def take(self, shape: Shape, *, session_id: str, lifetime_s: float) -> PodmanRuntime:
        """Take a runtime for one session, a warm one if one is ready. The caller wraps it in
        `lend_runtime`.
        """
        shelf = self._warm_of(shape)
        shelf.lifetime_s = max(shelf.lifetime_s, lifetime_s)
        shelf.takes.count(trio.current_time())
        ready = shelf.pop(lifetime_s)
        while ready is None and shelf.coming(lifetime_s):
            await self._wait_settled(shelf)
            ready = shelf.pop(lifetime_s)
        self._changed.set()
        if ready is None:
            return await self._start_cold(shape, session_id, lifetime_s)
        self.served_warm += 1
        return ready

    @asynccontextmanager
    async def lend_runtime(self, runtime: PodmanRuntime) -> AsyncIterator[PodmanRuntime]:
        """Hand the runtime to a session for the block, then remove it."""
        self.live += 1
        try:
            yield runtime
        finally:
            self.live -= 1
            with trio.move_on_after(2 * REMOVE_S, shield=True):  # more than the limit of `close` itself
                await runtime.close()

    async def run(self, ready: trio.Event) -> None:
        """Fill and renew until cancelled; then remove the warm runtimes."""
        ready.set()
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    self._changed = trio.Event()
                    self._renew(nursery)
                    self._fill(nursery)
                    with trio.move_on_at(self._next_check()):
                        await self._changed.wait()
        finally:
            # This is more than the limit of each `close`; the runtimes are removed concurrently.
            with trio.move_on_after(2 * REMOVE_S, shield=True):
                await self._close_warm()

    # ── starting ──────────────────────────────────────────────────────────────

    async def _wait_settled(self, shelf: Shelf) -> None:
        """Wait for a runtime that is starting, because it is ready sooner than one that is started now."""
        shelf.awaited += 1
        try:
            await shelf.settled.wait()
        finally:
            shelf.awaited -= 1

    async def _start_cold(self, shape: Shape, session_id: str, lifetime_s: float) -> PodmanRuntime:
        self._cold += 1
        try:
            return await self._start(shape, session_id, lifetime_s)
        finally:
            self._cold -= 1
            self._changed.set()

    async def _start(self, shape: Shape, session_id: str, lifetime_s: float) -> PodmanRuntime:
        began = trio.current_time()
        try:
            runtime = await self.starter.start(shape, session_id=session_id, lifetime_s=lifetime_s)
        except RuntimeFault:
            self.failed += 1
            raise
        self.started += 1
        self._starts.took(trio.current_time() - began)
        return runtime

    def _fill(self, nursery: trio.Nursery) -> None:
        """Start the missing runtimes, as many at once as the sessions leave capacity for."""
        missing = [(shape, shelf) for shape, shelf in self._warm_by_shape.items() if self._missing(shelf)]
        for shape, shelf in sorted(missing, key=lambda each: len(each[1].ready)):
            while self._missing(shelf) and self._room():
                shelf.starting += 1
                shelf.starting_lifetime_s = (shelf.lifetime_s or WARM_LIFETIME_S) + WARM_AGE_S
                nursery.start_soon(self._start_warm, shape, shelf)

    def _missing(self, shelf: Shelf) -> bool:
        now = trio.current_time()
        kept = enough(
            waiting=shelf.waiting, rate=shelf.takes.rate(now), start_s=self._starts.mean_s, most=self.most
        )
        return len(shelf.ready) + shelf.starting < kept and shelf.retry_at <= now

    def _room(self) -> bool:
        starting = sum(shelf.starting for shelf in self._warm_by_shape.values())
        at_once = 0 if self._cold else max(1, self.starter.client.calls // SHARE)
        return starting < at_once and self.warm + starting < MAX_WARM and not self.held

    async def _start_warm(self, shape: Shape, shelf: Shelf) -> None:
        try:
            if not await self._is_present(shape.image):
                shelf.retry_at = trio.current_time() + RETRY_S
                return
            shelf.ready.append(await self._start(shape, WARM_SESSION, shelf.starting_lifetime_s))
            shelf.retry_at = -math.inf
        except RuntimeFault as fault:
            self._present.discard(shape.image)
            if shelf.retry_at == -math.inf:
                _log.warning(
                    "no warm runtime of %s yet, tried again every %.0f s: %s", shape.image, RETRY_S, fault
                )
            shelf.retry_at = trio.current_time() + RETRY_S
        finally:
            shelf.starting -= 1
            shelf.settled.set()
            shelf.settled = trio.Event()
            self._changed.set()

    async def _is_present(self, image: str) -> bool:
        """Whether an image exists. An image that is still being built is waited for, and is no failure."""
        if image not in self._present and await self.starter.client.has_image(image):
            self._present.add(image)
        return image in self._present

    def _next_check(self) -> float:
        """When to check again without a wake-up: at the next try of a failed start, or after LOOK_S."""
        retries = [
            shelf.retry_at
            for shelf in self._warm_by_shape.values()
            if shelf.waiting and shelf.retry_at > trio.current_time()
        ]
        return min([trio.current_time() + LOOK_S, *retries])

    # ── renewing ──────────────────────────────────────────────────────────────

    def _renew(self, nursery: trio.Nursery) -> None:
        """Remove warm runtimes that are surplus, too old for the next session, or dead; forget unused
        shapes.
        """
        self._count()
        for shape, shelf in list(self._warm_by_shape.items()):
            for runtime in self._stale_runtimes(shelf):
                shelf.ready.remove(runtime)
                nursery.start_soon(runtime.close)
            if not (shelf.waiting or shelf.ready or shelf.starting):
                del self._warm_by_shape[shape]

    def _count(self) -> None:
        """Count how many sessions wait for each shape, by the current state of their workspaces."""
        for shelf in self._warm_by_shape.values():
            shelf.waiting = 0
        for request in self._requests.values():
            shape, count = request.shape, request.count
            if request.workspace is not None:
                copy, count = self.expected(request.workspace, request.count)
                shape = evolve(shape, image=copy) if copy else shape
            self._warm_of(shape).waiting += count

    def _stale_runtimes(self, shelf: Shelf) -> list[PodmanRuntime]:
        worn = [runtime for runtime in shelf.ready if not shelf.usable(runtime, shelf.lifetime_s)]
        fine = [runtime for runtime in shelf.ready if runtime not in worn]
        return worn + fine[min(shelf.waiting, self.most) :]

    async def _close_warm(self) -> None:
        async with trio.open_nursery() as nursery:
            for shelf in self._warm_by_shape.values():
                while shelf.ready:
                    nursery.start_soon(shelf.ready.popleft().close)

    def _warm_of(self, shape: Shape) -> Shelf:
        return self._warm_by_shape.setdefault(shape, Shelf())


# ── demand ────────────────────────────────────────────────────────────────────

Kind = tuple[Shape, Workspace | None]


@define(eq=False)
class RuntimeDemand:
    """Counts the containers that sessions have yet to take. `prewarm` is the pool's method; it is asked for
    at most `warm` runtimes of each kind.
    """

    prewarm: Callable[[RuntimeSpec, int], None]
    warm: int
    # by session: how many containers it has yet to get
    _waiting: dict[str, tuple[RuntimeSpec, int]] = field(factory=dict, init=False)
    _coming: "Counter[Kind]" = field(factory=Counter, init=False)
    _requested: dict[Kind, int] = field(factory=dict, init=False)

    def expect(self, session_ids: Iterable[str], spec: RuntimeSpec, *, each: int = 1) -> None:
        """Record that these sessions will need `each` containers each."""
        for session_id in session_ids:
            self._waiting[session_id] = spec, each
            self._coming[_kind(spec)] += each
        self._update(spec)

    def served(self, session_id: str, *, left: int = 0) -> None:
        """Record that this session will need at most `left` more containers. A repeated call changes
        nothing.
        """
        spec, waiting = self._waiting.pop(session_id, (None, 0))
        if spec is None:
            return
        left = min(left, waiting)
        if left:
            self._waiting[session_id] = spec, left
        self._coming[_kind(spec)] -= waiting - left
        self._update(spec)

    def _update(self, spec: RuntimeSpec) -> None:
        kind = _kind(spec)
        count = min(self.warm, self._coming[kind])
        if self._requested.get(kind, 0) != count:
            self.prewarm(spec, count)
        self._requested[kind] = count
        if not self._coming[kind]:
            del self._requested[kind], self._coming[kind]


def _kind(spec: RuntimeSpec) -> Kind:
    return shape_of(spec, spec.image), workspace_of(spec, spec.image)
