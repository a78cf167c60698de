"""How the journal is read: a read is a function of a connection, which runs in a thread off the event loop.

The functions are in `queries`, `forks`, `entries` and other modules. They see only what is on disk: a caller
that wants what was just enqueued flushes the writer first.
"""

from collections.abc import Callable
from pathlib import Path
from sqlite3 import Connection
from typing import Concatenate, ParamSpec, TypeVar

import trio
from attrs import define, field

from polarnode.core.errors import JournalError, boundary
from polarnode.journal import queries
from polarnode.journal.damage import DamageRecorder
from polarnode.journal.queries import ByteCache
from polarnode.journal.schema import connect_journal
from polarnode.journal.values import EventFilters, EventPage, TrajectoryEncoder, json_encoder

P = ParamSpec("P")
T = TypeVar("T")

# Threads and connections for reading. Packing JSON holds the interpreter's lock, so more of them would only
# wait for it.
MAX_READERS = 4
EVENTS_PER_PAGE = 64  # group events of small sessions are a kilobyte; large ones are bounded by bytes


@define(eq=False)
class JournalReader:
    """The threads and connections for reads. Damaged rows that a read meets are noted in `damages`."""

    path: Path
    damages: DamageRecorder
    _limiter: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(MAX_READERS), init=False)
    _connections: list[Connection] = field(factory=list, init=False)  # those that no read uses now
    _event_cache: ByteCache = field(factory=ByteCache, init=False)

    async def query(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function of a read connection in a thread."""

        def run() -> T:
            with boundary(JournalError, "the journal cannot be read (polarnode check names what is damaged)"):
                if self._connections:
                    db = self._connections.pop()
                else:
                    db = connect_journal(self.path, read_only=True, damages=self.damages)
                try:
                    return query(db, *args, **kwargs)
                finally:
                    self._connections.append(db)

        return await self.run_in_thread(run)

    async def events(
        self,
        after: int,
        *,
        filters: EventFilters | None = None,
        encoder: TrajectoryEncoder | None = None,
        limit: int = EVENTS_PER_PAGE,
    ) -> EventPage:
        """A page of the events after `after`, bounded in number and bytes. Trajectories are JSON unless
        `encoder` writes them otherwise. The next page begins at this page's `seen`.
        """
        return await self.query(
            queries.events,
            after,
            limit,
            filters or EventFilters(),
            encoder or json_encoder(),
            self._event_cache,
        )

    async def run_in_thread(self, call: Callable[[], T]) -> T:
        """Run a long pure call, such as a trajectory to JSON, in the threads of the reads."""
        return await trio.to_thread.run_sync(call, limiter=self._limiter)

    def close(self) -> None:
        """Close the connections."""
        for db in self._connections:
            db.close()
