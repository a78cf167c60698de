"""A node that a launcher holds by a lifeline: it ends by itself when nobody holds it and nobody needs it.

The lifeline is a file that the launcher has locked. The kernel gives the lock back however the launcher dies,
and the next launcher takes it: unlike a pipe, it can be picked up. A node of a shared log goes on without a
launcher while there is work: sessions that run, places that wait, a consumer that reads.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import trio

from polarnode.journal.log.port import Log, LogAway
from polarnode.support.locks import lock_held

LOOK_S: Final = 1.0  # between looks at the lock: two system calls


async def orphaned(
    lifeline: Path, orphan_s: float, needed: Callable[[], Awaitable[bool]] | None = None
) -> None:
    """Return when for `orphan_s` seconds nobody has held the lifeline, and nobody has needed the node."""
    last = trio.current_time()
    while trio.current_time() - last < orphan_s:
        await trio.sleep(min(LOOK_S, orphan_s))
        if lock_held(lifeline) or (needed is not None and await needed()):
            last = trio.current_time()


async def has_work(log: Log, live: int, *, orphan_s: float, now: float) -> bool:
    """Whether a node of a shared log is needed, which runs `live` sessions. `now`: seconds since the epoch. A
    trainer computes for minutes between its tasks, and its stream is open meanwhile.
    """
    if live or log.open_places:
        return True
    try:
        consumers = await log.consumers()
    except LogAway:
        return True  # who needs it cannot be asked
    return any(each.connected or now - each.last_seen < orphan_s for each in consumers)
