"""A node that a launcher holds by a lifeline: it ends by itself when nobody holds it any more.

The lifeline is a file that the launcher has locked. The kernel gives the lock back however the launcher dies,
and the next launcher takes it: unlike a pipe, it can be picked up.
"""

from pathlib import Path
from typing import Final

import trio

from polarnode.support.locks import lock_held

LOOK_S: Final = 1.0  # between looks at the lock: two system calls


async def orphaned(lifeline: Path, orphan_s: float) -> None:
    """Return when nobody has held the lifeline for `orphan_s` seconds."""
    last = trio.current_time()
    while trio.current_time() - last < orphan_s:
        await trio.sleep(min(LOOK_S, orphan_s))
        if lock_held(lifeline):
            last = trio.current_time()
