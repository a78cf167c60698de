"""Helpers of concurrent tasks: a semaphore with priorities, a session's share of threads, services in the
background, and child processes.

The semaphore limits how many sessions may be in a stage at once. It wakes its waiters by priority, then by
group and age (`waiting_line.py`). Trio's own limiters serve in order of arrival, but a trainer that raises
the priority of a task expects its sessions to pass the waiting ones. A limit may change at any time; sessions
already in the stage stay in it.

A background service runs beside a block, outlives the block's users, and ends when the block ends. In one
nursery a service and its users would be cancelled together, and the users' teardown would find no service;
the service therefore runs under a shield. The shield has no deadline of its own, because the end of the block
cancels it.

A child process and everything it started are one unit that ends with its block. A killed process leaves its
grandchildren, and a process that ends well may leave background children; both are ended by their process
group. Invariants: output goes to files, never to pipes (a grandchild that keeps a pipe open would hold up its
reader); teardown is bounded, shielded, and never raises. A program that makes a session of its own leaves the
group; a program that must not escape belongs in a container.
"""

import logging
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import trio
from attrs import define, field, frozen

from polarnode.core.errors import PolarnodeError, Refused
from polarnode.support.waiting_line import EntryCohort, WaitingLine

T = TypeVar("T")

# ── semaphore ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class SemaphoreStatistics:
    """`inside` of at most `limit` sessions are in the stage; `waiting` are queued before it. `held_back`: why
    the limit is lower than configured, or why the first waiter has no place.
    """

    limit: int
    inside: int
    waiting: int
    held_back: str | None = None


class Place(Protocol):
    """A resource that a holder needs in addition to its slot."""

    def take(self) -> str | None:
        """Take the resource. Returns None, or why it is not available."""

    def give_back(self) -> None:
        """Give the resource back: its holder leaves the stage, or gave up after it was taken."""


class NoResource:
    """The place of holders that need nothing but a slot."""

    def take(self) -> str | None:
        return None

    def give_back(self) -> None:
        pass


@define(eq=False)
class _Turn:
    place: Place
    entered: trio.Event = field(factory=trio.Event)


@define(eq=False)
class PrioritySemaphore:
    """A semaphore with at most `limit` holders and an order of waiters. Waiters enter by priority (0-100,
    higher first); within a priority those of one cohort enter together, the oldest cohort first, and those
    without a cohort in order of arrival. The first waiter enters when there is a slot and its place can be
    taken; a later one that needs less does not pass it.
    """

    limit: int
    held_back: str | None = field(default=None, init=False)
    _inside: int = field(default=0, init=False)
    _waiting: WaitingLine[_Turn] = field(factory=WaitingLine, init=False)
    _refused: str | None = field(default=None, init=False)  # why the first one waits though slots are free

    @property
    def is_refused(self) -> bool:
        """Whether the first waiter waits for its place although there are free slots."""
        return self._refused is not None

    @asynccontextmanager
    async def slot(
        self, *, priority: int, cohort: EntryCohort | None = None, place: Place | None = None
    ) -> AsyncIterator[None]:
        """Wait for a slot of the stage, and for `place`, and hold both for the block."""
        turn = _Turn(place or NoResource())
        await self._enter(turn, priority, cohort or EntryCohort())
        try:
            yield
        finally:
            self._leave(turn)

    def adjust(self, limit: int, held_back: str | None = None) -> None:
        """Change the limit from now on; `held_back` is why it is lower than configured. The first waiter
        tries again to take its place.
        """
        self.limit, self.held_back = limit, held_back
        self._admit()

    async def _enter(self, turn: _Turn, priority: int, cohort: EntryCohort) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self._waiting.add(turn, priority=priority, cohort=cohort)
        self._admit()
        try:
            await turn.entered.wait()
        except trio.Cancelled:
            if turn.entered.is_set():  # it entered in the tick of the cancellation
                self._leave(turn)
            else:
                self._waiting.discard(turn)
                self._admit()
            raise

    def _admit(self) -> None:
        self._refused = None
        while self._waiting and self._inside < self.limit:
            self._refused = self._waiting.first().place.take()
            if self._refused is not None:
                return
            self._inside += 1
            self._waiting.pop().entered.set()

    def _leave(self, turn: _Turn) -> None:
        turn.place.give_back()
        self._inside -= 1
        self._admit()

    def statistics(self) -> SemaphoreStatistics:
        """How full the stage is."""
        return SemaphoreStatistics(
            limit=self.limit,
            inside=self._inside,
            waiting=len(self._waiting),
            held_back=self.held_back or self._refused,
        )


# ── threads ────────────────────────────────────────────────────────────


@define(eq=False)
class ThreadShare:
    """A limiter for `trio.to_thread.run_sync` that takes a place of `own` and a place of `node` for a thread.

    A session waits for a place of its own first, so that it never takes more of the node's places than it
    has. Threads that were abandoned and still run are counted too.
    """

    own: trio.CapacityLimiter
    node: trio.CapacityLimiter

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, which is abandoned when the caller is cancelled, and return its result.

        A Refused is raised without the frames that raised it: Trio keeps a thread's exception in a cycle, and
        the request with it, until the garbage collector runs, which is rare.
        """
        done = await trio.to_thread.run_sync(
            _catch_refusal,
            work,
            limiter=self,  # type: ignore[arg-type]  # documented: any object with these two methods
            abandon_on_cancel=True,
        )
        try:
            if isinstance(done, Refused):
                raise done
            return done
        finally:
            del done  # otherwise the exception's frame would hold the exception

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


def _catch_refusal(work: Callable[[], T]) -> T | Refused:
    try:
        return work()
    except Refused as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)


# ── background services ────────────────────────────────────────────────────────────

Task = Callable[[trio.Event], Awaitable[None]]  # a task sets the event when it is ready


@asynccontextmanager
async def open_background(task: Task) -> AsyncIterator[None]:
    """Run a task beside the block, which starts when the task is ready. A PolarnodeError of the task is
    raised as it is, not in an exception group.
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


# ── processes ───────────────────────────────────────────────────────────────────────────────────────

TERM_GRACE = 5.0  # seconds between TERM and KILL: what polarnode starts has nothing to save by itself
# The kernel may take this many seconds to end killed processes; a GPU context of many GB takes some seconds.
KILL_GRACE_S = 10.0
POLL = 0.05  # seconds between checks of a group, only while one is being ended

_log = logging.getLogger(__name__)


@asynccontextmanager
async def open_process_group(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdout: BinaryIO | None = None,
    pass_fds: Sequence[int] = (),
) -> AsyncIterator[trio.Process]:
    """Start a program as the leader of its own session; at the end of the block, TERM then KILL whatever
    remains of its group.

    `stdout` receives stdout and stderr (None: neither is kept). `env` is the whole environment (None: that of
    this process). Raises OSError when the program cannot be started. The process may be awaited inside the
    block; its end does not end the block.
    """
    sink = stdout if stdout is not None else subprocess.DEVNULL
    process = await trio.lowlevel.open_process(
        list(argv),
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=sink,
        stderr=subprocess.STDOUT,
        pass_fds=tuple(pass_fds),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with trio.move_on_after(TERM_GRACE + 2 * KILL_GRACE_S, shield=True):
            await _end(process)


def group_members(group: int) -> list[int]:
    """The ids of the processes of a group that still run, without zombies."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _process_group(entry) == group
    ]


def _process_group(entry: Path) -> int | None:
    try:
        after_name = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None  # it ended during the check
    state, _, group = after_name[:3]
    return None if state in "ZX" else int(group)


async def _end(process: trio.Process) -> None:
    """End the group: TERM, wait, KILL, wait. The leader is reaped last, because its id is also the id of the
    group and must not be reused meanwhile.
    """
    for order, grace in ((signal.SIGTERM, TERM_GRACE), (signal.SIGKILL, KILL_GRACE_S)):
        if not _signal_group(process.pid, order):
            break
        with trio.move_on_after(grace):
            await _wait_until_gone(process)
    with trio.move_on_after(KILL_GRACE_S):
        await process.wait()
    if remaining := group_members(process.pid):
        _log.error("processes %s outlived SIGKILL", remaining)


def _signal_group(group: int, order: signal.Signals) -> bool:
    """Send a signal to the group. Returns whether it had any process."""
    if not group_members(group):
        return False
    with suppress(ProcessLookupError):
        os.killpg(group, order)
    return True


async def _wait_until_gone(process: trio.Process) -> None:
    # The kernel reports the end of our own child, but not of that child's children, so the group is polled.
    while group_members(process.pid):  # noqa: ASYNC110
        await trio.sleep(POLL)
