"""Waiting for a log that is away, for callers that cannot go on without its answer."""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from polarnode.core.backoff import Backoff
from polarnode.journal.log.port import LogUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

# the pauses before the log is asked again: a failover takes some seconds
RETRY_PAUSES: Final = Backoff(first_s=0.1, longest_s=5.0)


async def retry_until_answered(ask: Callable[[], Awaitable[T]], *, meanwhile: str = "results wait here") -> T:
    """Make a call of the log until it answers, however long it is away. The call must be one that may be made
    again. `meanwhile` says for node.log what happens to the work that waits.
    """
    tries = 0
    while True:
        try:
            return await ask()
        except LogUnavailable as away:
            if not tries:
                logger.warning("%s; %s", away, meanwhile)
            await trio.sleep(RETRY_PAUSES.delay(tries))
            tries += 1
