"""The consumers of an open journal: their positions, acknowledgements and open streams.

What a consumer is, and what the journal keeps for it, is in `retention`. Each consumer keeps its own
position, and a slow one delays no session.
"""

import logging
from collections import Counter
from collections.abc import Callable

from attrs import define, field

from polarnode.core.errors import Refused
from polarnode.core.status import Consumer
from polarnode.journal.retention import (
    MAX_CONSUMERS,
    acknowledge_entry,
    forget_entry,
    longest_unseen,
    seen_entry,
)
from polarnode.journal.writer import CommitWatch, JournalWriter, WriterThread

logger = logging.getLogger(__name__)


@define(eq=False, kw_only=True)
class JournalConsumers:
    """The consumers as of the last commit. The writer's thread is told which of them have a stream open,
    because it prunes nothing that they have not acknowledged.
    """

    now: Callable[[], float]  # seconds since the epoch
    _writer: JournalWriter
    _thread: WriterThread
    _commits: CommitWatch
    _open_streams: Counter[str] = field(factory=Counter, init=False)  # by consumer

    def position(self, consumer: str) -> int:
        """The number of the last event that `consumer` acknowledged; 0 for an unknown consumer."""
        found = self._commits.progress.consumers.get(consumer)
        return 0 if found is None else found.seq

    async def acknowledge(self, consumer: str, seq: int, *, now: float | None = None) -> int:
        """Move a consumer's position forward, never back and never beyond the last event. Returns the
        position.

        `now` is in seconds since the epoch; the journal's own time is the default. An unknown consumer is
        created, with `seq` 0 at the beginning. Where there are MAX_CONSUMERS, a new one replaces the one
        that was not seen for longest; Refused is raised when the journal waits for all of them.
        """
        progress = self._commits.progress
        if consumer not in progress.consumers:
            if len(progress.consumers) >= MAX_CONSUMERS:
                unseen = longest_unseen(progress.consumers, self._thread.awaited_consumers())
                if unseen is None:
                    raise Refused(
                        f"there are {MAX_CONSUMERS} consumers: DELETE /v1/consumers/{{name}} those that do"
                        " not come back",
                        path="$.consumer",
                    )
                self._writer.write(forget_entry(unseen))
            logger.info("consumer %s is new, after event %d", consumer, min(seq, progress.last_seq))
        entry = acknowledge_entry(consumer, seq, now=self.now() if now is None else now)
        await self._writer.wait_written(self._writer.write(entry))
        return self.position(consumer)

    async def forget(self, consumer: str) -> bool:
        """Delete `consumer` and its position. Its name may be used again. Returns False when it does not
        exist.
        """
        existed = consumer in self._commits.progress.consumers
        await self._writer.wait_written(self._writer.write(forget_entry(consumer)))
        logger.info("consumer %s was forgotten", consumer)
        return existed

    def track_stream(self, consumer: str, change: int) -> None:
        """Count a stream of a consumer that is opened (`change` 1) or closed (-1). While a stream is open,
        retention waits for the consumer, even if it acknowledges nothing for long.
        """
        self._open_streams[consumer] += change
        self._open_streams += Counter()  # drops those at 0
        self._thread.connected_consumers = self.connected
        self._writer.write(seen_entry(consumer, now=self.now()))
        verb = "reads" if change > 0 else "left"
        logger.info("consumer %s %s after event %d", consumer, verb, self.position(consumer))

    @property
    def connected(self) -> frozenset[str]:
        """The consumers that have a stream open."""
        return frozenset(self._open_streams)

    def describe(self) -> tuple[Consumer, ...]:
        """Describe every consumer, and how far it is behind, in the order of their names."""
        progress, awaited = self._commits.progress, self._thread.awaited_consumers()
        return tuple(
            Consumer(
                consumer=name,
                position=at.seq,
                behind_events=progress.events_after(at.seq),
                behind_bytes=progress.estimate_bytes(progress.events_after(at.seq)),
                missed=max(0, progress.first_seq - 1 - at.seq),
                moved=at.moved,
                last_seen=at.last_seen,
                connected=self._open_streams[name],
                holds=awaited.awaits(name, at),
            )
            for name, at in progress.consumers.items()
        )
