"""How late the event loop is: a task that sleeps a moment, again and again, and notes by how much it overslept.

What a step of the loop takes, every session waits for, so this one figure says whether a node has room. The rule for whoever edits it: it
costs a wake-up a TICK_S and a few kilobytes, and never more.
"""

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio
from attrs import define, field, frozen

TICK_S: Final = 0.05  # 20 looks a second: a step of 50 ms is seen each time, and the looking is 0.1 % of a core
KEPT: Final = 1200  # looks, a minute of them: longer hides what happens now


@frozen(kw_only=True)
class LagStatistics:
    """Seconds the loop was late within the last minute, at most half, 99 of 100 and all of the times it was looked at."""

    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0


@define(eq=False)
class LoopLag:
    """The last looks, as a ring."""

    _late: "array[float]" = field(factory=lambda: array("d"))
    _next: int = 0

    def note(self, seconds: float) -> None:
        """The loop was so late."""
        if len(self._late) < KEPT:
            self._late.append(seconds)
        else:
            self._late[self._next] = seconds
            self._next = (self._next + 1) % KEPT

    def statistics(self) -> LagStatistics:
        """Of the last minute; zeros before the first look."""
        late = sorted(self._late)
        if not late:
            return LagStatistics()
        return LagStatistics(p50=late[len(late) // 2], p99=late[min(len(late) - 1, len(late) * 99 // 100)], max=late[-1])


@asynccontextmanager
async def open_lag() -> AsyncIterator[LoopLag]:
    """Looks at the loop for as long as the block."""
    lag = LoopLag()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_look, lag)
        yield lag
        nursery.cancel_scope.cancel()


async def _look(lag: LoopLag) -> None:
    while True:
        meant = trio.current_time() + TICK_S
        await trio.sleep_until(meant)
        lag.note(max(0.0, trio.current_time() - meant))
