"""A runtime that is made while something else goes on: an evaluator's, while the harness runs.

It takes a place in INIT when no session wants it. The rules for whoever edits it: whoever wants the runtime never waits behind others for one that
was not begun, but makes its own; and what was made is gone when the block is left, in whatever way.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import trio
from attrs import define, field

from polarnode.errors import PolarnodeError
from polarnode.shell.gates import Gate
from polarnode.shell.podman import PodmanRuntime

LAST = -1  # priority of its place: a session's is 0 to 100

logger = logging.getLogger(__name__)


@define(eq=False, kw_only=True)
class Beforehand:
    """`begin` says that it may be made now, `take` gives it to the one who needs it."""

    open: Callable[[], AbstractAsyncContextManager[PodmanRuntime]]
    gate: Gate
    budget_s: float
    on_settled: Callable[[], None]  # told once, when it is made or will never be
    _may_begin: trio.Event = field(factory=trio.Event, init=False)
    _waiting: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _begun: bool = field(default=False, init=False)
    _settled: trio.Event = field(factory=trio.Event, init=False)
    _runtime: PodmanRuntime | None = field(default=None, init=False)

    def begin(self) -> None:
        """Make it as soon as there is a place that no session wants."""
        self._may_begin.set()

    async def take(self) -> PodmanRuntime | None:
        """The runtime, for once; None where it was not begun, failed, or ended since."""
        if not self._begun:
            self._waiting.cancel()
        await self._settled.wait()
        taken, self._runtime = self._runtime, None
        return taken if taken is not None and taken.alive else None

    async def run(self) -> None:
        """Make it, and hold it until cancelled."""
        async with AsyncExitStack() as stack:
            try:
                self._runtime = await self._made(stack)
            except PolarnodeError as error:
                logger.warning("a runtime that was made beforehand failed: %s", error)
            self._settled.set()
            self.on_settled()
            await trio.sleep_forever()

    async def _made(self, stack: AsyncExitStack) -> PodmanRuntime | None:
        with self._waiting:
            await self._may_begin.wait()
            async with self.gate.slot(priority=LAST):
                self._begun = True
                with trio.move_on_after(self.budget_s):
                    return await stack.enter_async_context(self.open())
        return None


@asynccontextmanager
async def open_beforehand(
    open_runtime: Callable[[], AbstractAsyncContextManager[PodmanRuntime]], gate: Gate, *, budget_s: float, on_settled: Callable[[], None]
) -> AsyncIterator[Beforehand]:
    """Something that makes a runtime behind the block. An error of the block comes out as itself, not as a group of one."""
    beforehand = Beforehand(open=open_runtime, gate=gate, budget_s=budget_s, on_settled=on_settled)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beforehand.run)
            yield beforehand
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        sole = _sole(group)
        if sole is None:
            raise
        raise sole from group


def _sole(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """The error, if the group holds one and no more."""
    found = group.exceptions[0]
    return found if len(group.exceptions) == 1 and not isinstance(found, BaseExceptionGroup) else None
