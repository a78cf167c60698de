"""How long a caller waits that cannot go on without the log: until it answers."""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from polarnode.core.backoff import Backoff
from polarnode.journal.log.port import LogAway

logger = logging.getLogger(__name__)

T = TypeVar("T")

# before the log is asked again: a failover takes some seconds
PAUSES: Final = Backoff(first_s=0.1, longest_s=5.0)


async def answered(ask: Callable[[], Awaitable[T]], *, meanwhile: str) -> T:
    """The log's answer to a call that may be made again, however long it is away. `meanwhile`: what happens
    to what waits, for the node's log.
    """
    tries = 0
    while True:
        try:
            return await ask()
        except LogAway as away:
            if not tries:
                logger.warning("%s; %s", away, meanwhile)
            await trio.sleep(PAUSES.delay(tries))
            tries += 1
