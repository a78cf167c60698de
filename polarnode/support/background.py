"""A background service: it runs beside a block, outlives the block's users, and ends when the block ends.

In one nursery a service and its users are cancelled together, and the users' teardown then finds no service
(trio.md P15). The shield has no deadline of its own because the end of the block cancels it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from polarnode.core.errors import PolarnodeError

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
