"""Three helpers of concurrent tasks: a semaphore with priorities, a session's share of threads, and services
in the background.

The semaphore is for stage limits: how many sessions may be in a stage at once. It wakes its waiters by
priority, then by age. Trio's own limiters are first come, first served, and a trainer that raises the
priority of a task expects its sessions to pass the waiting ones. A limit may change at any time; sessions
already in the stage stay in it.

A background service runs beside a block, outlives the block's users, and ends when the block ends. In one
nursery a service and its users are cancelled together, and the users' teardown then finds no service
(trio.md P15). The shield has no deadline of its own because the end of the block cancels it.
"""

import heapq
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import TypeVar

import trio
from attrs import define, field, frozen

from polarnode.core.errors import PolarnodeError, Refused

T = TypeVar("T")

# ── semaphore ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class SemaphoreStatistics:
    """`inside` of at most `limit` sessions are in the stage; `waiting` are queued before it. `held_back`: why
    the limit is lower than configured.
    """

    limit: int
    inside: int
    waiting: int
    held_back: str | None = None


@define(eq=False)
class PrioritySemaphore:
    """At most `limit` holders; waiters enter by priority (0-100, higher first), then in order of arrival."""

    limit: int
    held_back: str | None = field(default=None, init=False)
    _inside: int = field(default=0, init=False)
    _waiting: list[tuple[int, int, trio.Event]] = field(factory=list, init=False)
    _order: "count[int]" = field(factory=count, init=False)

    @asynccontextmanager
    async def slot(self, *, priority: int) -> AsyncIterator[None]:
        """Wait for a place in the stage and hold it for the block."""
        await self._enter(priority)
        try:
            yield
        finally:
            self._leave()

    def adjust(self, limit: int, held_back: str | None = None) -> None:
        """Change the limit from now on; `held_back` is why it is lower than configured."""
        self.limit, self.held_back = limit, held_back
        while self._waiting and self._inside < self.limit:
            self._inside += 1
            heapq.heappop(self._waiting)[2].set()

    async def _enter(self, priority: int) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._inside < self.limit and not self._waiting:
            self._inside += 1
            return
        turn = (-priority, next(self._order), trio.Event())
        heapq.heappush(self._waiting, turn)
        try:
            await turn[2].wait()
        except trio.Cancelled:
            self._give_up(turn)
            raise

    def _give_up(self, turn: tuple[int, int, trio.Event]) -> None:
        if turn in self._waiting:
            self._waiting.remove(turn)
            heapq.heapify(self._waiting)
        else:  # the place was handed over in the tick of the cancellation
            self._leave()

    def _leave(self) -> None:
        """Give the place to the next waiter, or free it when nobody waits or too many are inside."""
        if self._waiting and self._inside <= self.limit:
            heapq.heappop(self._waiting)[2].set()
        else:
            self._inside -= 1

    def statistics(self) -> SemaphoreStatistics:
        """How full the stage is."""
        return SemaphoreStatistics(
            limit=self.limit, inside=self._inside, waiting=len(self._waiting), held_back=self.held_back
        )


# ── threads ────────────────────────────────────────────────────────────


@define(eq=False)
class ThreadShare:
    """A limiter for `trio.to_thread.run_sync` that holds a place of `own` and one of `node`.

    A session waits for its own threads first, so that it takes at most its own number of the node's places,
    also with threads that were abandoned and still run.
    """

    own: trio.CapacityLimiter
    node: trio.CapacityLimiter

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, from a thread, which is abandoned when the caller is cancelled.

        A refusal comes without the frames it was raised in: Trio keeps a thread's exception in a cycle, and
        with it the request, until the garbage collector runs, which is rare.
        """
        done = await trio.to_thread.run_sync(
            _caught,
            work,
            limiter=self,  # type: ignore[arg-type]  # documented: any object with these two methods
            abandon_on_cancel=True,
        )
        try:
            if isinstance(done, Refused):
                raise done
            return done
        finally:
            del done  # or the exception's frame would hold the exception

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        await self.own.acquire_on_behalf_of(borrower)
        try:
            await self.node.acquire_on_behalf_of(borrower)
        except BaseException:
            self.own.release_on_behalf_of(borrower)
            raise

    def release_on_behalf_of(self, borrower: object) -> None:
        self.node.release_on_behalf_of(borrower)
        self.own.release_on_behalf_of(borrower)


def _caught(work: Callable[[], T]) -> T | Refused:
    try:
        return work()
    except Refused as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)


# ── background services ────────────────────────────────────────────────────────────

Task = Callable[[trio.Event], Awaitable[None]]  # sets the event when it is ready


@asynccontextmanager
async def open_background(task: Task) -> AsyncIterator[None]:
    """Run a task beside the block, which starts when the task is ready. A PolarnodeError of the task is
    raised itself, not as a group of one.
    """
    scope, ready = trio.CancelScope(shield=True), trio.Event()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_run, scope, task, ready)
            try:
                await ready.wait()
                yield
            finally:
                scope.cancel()
    except BaseExceptionGroup as group:
        ours = _ours(group)
        if ours is None:
            raise
        raise ours from group


async def _run(scope: trio.CancelScope, task: Task, ready: trio.Event) -> None:
    with scope:
        await task(ready)


def _ours(group: BaseExceptionGroup[BaseException]) -> PolarnodeError | None:
    """The group's PolarnodeError, if it contains nothing else."""
    found = group.exceptions[0]
    if len(group.exceptions) > 1:
        return None
    if isinstance(found, BaseExceptionGroup):
        return _ours(found)
    return found if isinstance(found, PolarnodeError) else None
