"""The node's runtimes: a warm one where one of the shape is ready, else a fresh one; used once, then removed.

A warm runtime is started and has its model endpoint, and nothing of any session is in it; its image may be a
copy of a prepared workspace. How many of a shape are kept follows from how many sessions wait and how fast
they take them: by Little's law `rate * start_s` are starting at any time, and because takes come in bursts,
the root of that is added (the square-root rule of staffing). The count is never more than may be taken.
Invariant: the pool starts containers in the background, and leaves most of Podman's calls to the sessions.

`Demand` reports to the pool how many containers are about to be taken. Tasks that need the same container
with the same workspace share the warm ones, so they are counted together. A session whose evaluator has a
container of its own needs two: the second while its harness runs. Invariant: what was expected of a session
is taken back exactly once, whatever becomes of it, so that all numbers end at zero.
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
from polarnode.containers.recipes import Recipes
from polarnode.containers.runtime import REMOVE_S, PodmanRuntime
from polarnode.containers.starting import Starter
from polarnode.core.errors import RuntimeFault
from polarnode.core.task import RuntimeSpec

# ── how many ──────────────────────────────────────────────────────────────────

# seconds over which takes are counted: longer than a start takes on the busiest machine seen, shorter than a
# group's runs
WINDOW_S = 30.0
# of each new start's time in the mean: a start is 0.1 s quiet and 3 s on a busy machine, and it is the last
# few that tell
SMOOTH = 0.3
FIRST_START_S = 0.5  # seconds a start is assumed to take before one was measured


@define(eq=False)
class TakeRate:
    """The recent rate at which runtimes of one shape were taken, as an exponentially decaying count."""

    _value: float = 0.0
    _counted_at: float = -math.inf

    def count(self, now: float) -> None:
        """Record that one was taken, warm or not."""
        self._value = self._faded(now) + 1.0
        self._counted_at = now

    def rate(self, now: float) -> float:
        """Takes a second."""
        return self._faded(now) / WINDOW_S

    def _faded(self, now: float) -> float:
        return self._value * math.exp((self._counted_at - now) / WINDOW_S)


@define(eq=False)
class StartDurations:
    """The mean duration of starts over all shapes: it depends on the machine's load, not on the image."""

    mean_s: float = FIRST_START_S
    _seen: bool = False

    def took(self, seconds: float) -> None:
        """Record the duration of a start, in seconds."""
        self.mean_s = (1 - SMOOTH) * self.mean_s + SMOOTH * seconds if self._seen else seconds
        self._seen = True


def enough(*, waiting: int, rate: float, start_s: float, most: int) -> int:
    """The number of warm runtimes to keep: none while no session waits, one if any waits, more if they are
    taken faster than they start.
    """
    under_way = rate * start_s
    return min(waiting, most, max(1, math.ceil(under_way + math.sqrt(under_way))))


# ── the pool ──────────────────────────────────────────────────────────────────

WARM_LIMIT = 64  # warm runtimes of all shapes: about 64 MB
WARM_AGE_S = 1800.0  # seconds a warm one waits before it is replaced; its dead-man switch runs from its start
# seconds of lifetime for shapes that were never opened: with the usual budgets a session needs less than
# seven hours
WARM_LIFETIME_S = 8 * 3600.0
LOOK_S = 30.0  # seconds between looks for the old and the dead while nothing else happens
RETRY_S = 5.0  # seconds before a start that failed is tried again: its cause is rarely gone at once
WARM_SESSION = "warm"  # value of the session label of a runtime that was started before its session
# the pool makes at most one in this many concurrent calls to Podman, and starts nothing while a session waits
# for its own start
SHARE = 3

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class RuntimesStatistics:
    """`live` are with sessions now, `frozen` of them are stopped, `warm` are ready, `prepared` workspaces are
    kept as images; the others count since the node started.

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
    """`count` sessions will take a runtime of the shape. `workspace` is what they need prepared, where a copy
    of it would do.
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
    retry_at: float = -math.inf  # not before then, after a start that failed
    awaited: int = 0  # sessions that wait for one that is being started
    started_for: float = 0.0  # the lifetime of those being started
    settled: trio.Event = field(factory=trio.Event)  # set when one of them is started, or failed
    takes: TakeRate = field(factory=TakeRate)
    ready: "deque[PodmanRuntime]" = field(factory=deque)

    def usable(self, runtime: PodmanRuntime, lifetime_s: float) -> bool:
        """Whether a warm one is alive and will outlive a session."""
        return runtime.alive and runtime.expires - trio.current_time() >= lifetime_s

    def pop(self, lifetime_s: float) -> PodmanRuntime | None:
        """Take a warm one for a session, if there is one."""
        ready = next((runtime for runtime in self.ready if self.usable(runtime, lifetime_s)), None)
        if ready is not None:
            self.ready.remove(ready)
        return ready

    def coming(self, lifetime_s: float) -> bool:
        """Whether one is being started that no other session waits for."""
        return self.starting > self.awaited and self.started_for >= lifetime_s + WARM_AGE_S


@define(eq=False, kw_only=True)
class Pool:
    """Warm runtimes by shape. `run` fills it; `take` empties it. `expected` gives the image that sessions of
    a workspace will start from.
    """

    starter: Starter
    recipes: Recipes
    most: int
    expected: Callable[[Workspace, int], tuple[str | None, int]]
    started: int = field(default=0, init=False)
    served_warm: int = field(default=0, init=False)
    failed: int = field(default=0, init=False)
    live: int = field(default=0, init=False)
    # under backpressure nothing is started in advance
    held: bool = field(default=False, init=False)
    _cold: int = field(default=0, init=False)  # sessions that wait for a start of their own
    _present: set[str] = field(factory=set, init=False)  # images that were in the store
    _starts: StartDurations = field(factory=StartDurations, init=False)
    _requests: dict[tuple[Shape, Workspace | None], PrewarmRequest] = field(factory=dict, init=False)
    _shelves: dict[Shape, Shelf] = field(factory=dict, init=False)
    _changed: trio.Event = field(factory=trio.Event, init=False)

    @property
    def warm(self) -> int:
        return sum(len(shelf.ready) for shelf in self._shelves.values())

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
        """Wake the pool: a copy was made, or the machine has capacity again."""
        self._changed.set()

    async def take(self, shape: Shape, *, session_id: str, lifetime_s: float) -> PodmanRuntime:
        """A runtime for one session, warm where one is ready. The caller wraps it in `lent`."""
        shelf = self._shelf(shape)
        shelf.lifetime_s = max(shelf.lifetime_s, lifetime_s)
        shelf.takes.count(trio.current_time())
        ready = shelf.pop(lifetime_s)
        while ready is None and shelf.coming(lifetime_s):
            await self._wait_settled(shelf)
            ready = shelf.pop(lifetime_s)
        self._changed.set()
        if ready is None:
            return await self._started_cold(shape, session_id, lifetime_s)
        self.served_warm += 1
        return ready

    @asynccontextmanager
    async def lent(self, runtime: PodmanRuntime) -> AsyncIterator[PodmanRuntime]:
        """Hand the runtime to a session for the block, then remove it."""
        self.live += 1
        try:
            yield runtime
        finally:
            self.live -= 1
            with trio.move_on_after(2 * REMOVE_S, shield=True):  # more than its own bound
                await runtime.close()

    async def run(self, ready: trio.Event) -> None:
        """Fill and renew until cancelled; then remove what is warm."""
        ready.set()
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    self._changed = trio.Event()
                    self._renew(nursery)
                    self._fill(nursery)
                    with trio.move_on_at(self._next_look()):
                        await self._changed.wait()
        finally:
            # more than their own bound: they are removed side by side
            with trio.move_on_after(2 * REMOVE_S, shield=True):
                await self._empty()

    # ── starting ──────────────────────────────────────────────────────────────

    async def _wait_settled(self, shelf: Shelf) -> None:
        """Wait for one that is starting: it is ready sooner than one started now."""
        shelf.awaited += 1
        try:
            await shelf.settled.wait()
        finally:
            shelf.awaited -= 1

    async def _started_cold(self, shape: Shape, session_id: str, lifetime_s: float) -> PodmanRuntime:
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
        """Start what is missing, as many at once as the sessions leave capacity for."""
        missing = [(shape, shelf) for shape, shelf in self._shelves.items() if self._missing(shelf)]
        for shape, shelf in sorted(missing, key=lambda each: len(each[1].ready)):
            while self._missing(shelf) and self._room():
                shelf.starting += 1
                shelf.started_for = (shelf.lifetime_s or WARM_LIFETIME_S) + WARM_AGE_S
                nursery.start_soon(self._fill_one, shape, shelf)

    def _missing(self, shelf: Shelf) -> bool:
        now = trio.current_time()
        kept = enough(
            waiting=shelf.waiting, rate=shelf.takes.rate(now), start_s=self._starts.mean_s, most=self.most
        )
        return len(shelf.ready) + shelf.starting < kept and shelf.retry_at <= now

    def _room(self) -> bool:
        starting = sum(shelf.starting for shelf in self._shelves.values())
        at_once = 0 if self._cold else max(1, self.starter.client.calls // SHARE)
        return starting < at_once and self.warm + starting < WARM_LIMIT and not self.held

    async def _fill_one(self, shape: Shape, shelf: Shelf) -> None:
        try:
            if not await self._is_present(shape.image):
                shelf.retry_at = trio.current_time() + RETRY_S
                return
            shelf.ready.append(await self._start(shape, WARM_SESSION, shelf.started_for))
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
        """Whether an image is there: one that is still being built is waited for, and is no failure."""
        if image not in self._present and await self.starter.client.has_image(image):
            self._present.add(image)
        return image in self._present

    def _next_look(self) -> float:
        """When to look again without a wake-up: at a failed start's next try, or for one that is too old."""
        retries = [
            shelf.retry_at
            for shelf in self._shelves.values()
            if shelf.waiting and shelf.retry_at > trio.current_time()
        ]
        return min([trio.current_time() + LOOK_S, *retries])

    # ── renewing ──────────────────────────────────────────────────────────────

    def _renew(self, nursery: trio.Nursery) -> None:
        """Remove the warm ones that are surplus, too old for the next session, or dead; forget
        unused shapes.
        """
        self._count()
        for shape, shelf in list(self._shelves.items()):
            for runtime in self._stale(shelf):
                shelf.ready.remove(runtime)
                nursery.start_soon(runtime.close)
            if not (shelf.waiting or shelf.ready or shelf.starting):
                del self._shelves[shape]

    def _count(self) -> None:
        """Count how many sessions wait for each shape, by the current state of their workspaces."""
        for shelf in self._shelves.values():
            shelf.waiting = 0
        for request in self._requests.values():
            shape, count = request.shape, request.count
            if request.workspace is not None:
                copy, count = self.expected(request.workspace, request.count)
                shape = evolve(shape, image=copy) if copy else shape
            self._shelf(shape).waiting += count

    def _stale(self, shelf: Shelf) -> list[PodmanRuntime]:
        worn = [runtime for runtime in shelf.ready if not shelf.usable(runtime, shelf.lifetime_s)]
        fine = [runtime for runtime in shelf.ready if runtime not in worn]
        return worn + fine[min(shelf.waiting, self.most) :]

    async def _empty(self) -> None:
        async with trio.open_nursery() as nursery:
            for shelf in self._shelves.values():
                while shelf.ready:
                    nursery.start_soon(shelf.ready.popleft().close)

    def _shelf(self, shape: Shape) -> Shelf:
        return self._shelves.setdefault(shape, Shelf())


# ── demand ────────────────────────────────────────────────────────────────────

Kind = tuple[Shape, Workspace | None]


@define(eq=False)
class Demand:
    """Counts the containers that sessions have yet to take. `prewarm` is the pool's; it is asked for at most
    `warm` of each kind.
    """

    prewarm: Callable[[RuntimeSpec, int], None]
    warm: int
    # by session: how many containers it has yet to get
    _waiting: dict[str, tuple[RuntimeSpec, int]] = field(factory=dict, init=False)
    _coming: "Counter[Kind]" = field(factory=Counter, init=False)
    _requested: dict[Kind, int] = field(factory=dict, init=False)

    def expect(self, session_ids: Iterable[str], spec: RuntimeSpec, *, each: int = 1) -> None:
        """These sessions will need so many containers each."""
        for session_id in session_ids:
            self._waiting[session_id] = spec, each
            self._coming[_kind(spec)] += each
        self._update(spec)

    def served(self, session_id: str, *, left: int = 0) -> None:
        """This session will need at most `left` more. Later calls for it change nothing."""
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
