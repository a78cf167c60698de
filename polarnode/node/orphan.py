"""The lifeline of a node that a launcher started. The node ends by itself when nobody holds the lifeline and
nobody needs the node.

The lifeline is a file that the launcher has locked. The kernel releases the lock however the launcher dies,
and the next launcher can take it, which would not work with a pipe. A node of a shared log goes on without a
launcher while there is work: sessions that run, places that wait, or a consumer that reads.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import trio

from polarnode.journal.log.port import Log, LogUnavailable
from polarnode.support.locks import is_locked

LOOK_INTERVAL_S: Final = 1.0  # between looks at the lock, which take two system calls


async def wait_orphaned(
    lifeline: Path, orphan_s: float, needed: Callable[[], Awaitable[bool]] | None = None
) -> None:
    """Return when nobody has held the lifeline, and nobody has needed the node, for `orphan_s` seconds."""
    last = trio.current_time()
    while trio.current_time() - last < orphan_s:
        await trio.sleep(min(LOOK_INTERVAL_S, orphan_s))
        if is_locked(lifeline) or (needed is not None and await needed()):
            last = trio.current_time()


async def has_work(log: Log, live: int, *, orphan_s: float, now: float) -> bool:
    """Whether a node of a shared log that runs `live` sessions is needed. `now` is in seconds since the
    epoch. An open stream counts, because a trainer computes for minutes between its tasks and keeps its
    stream open.
    """
    if live or log.open_places:
        return True
    try:
        consumers = await log.consumers()
    except LogUnavailable:
        return True  # it is not known whether somebody needs the node
    return any(each.connected or now - each.last_seen < orphan_s for each in consumers)
