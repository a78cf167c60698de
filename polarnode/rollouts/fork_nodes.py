"""At which node a fork can begin, and the parent that it goes on from.

The turns of a session that is over are in the log, and a fork by replay begins at any node. Those of one
that still runs, and every snapshot, are on the disk of the session's own node: a fork that needs them begins
there. Another node that has its place gives it back, as long as that node is alive.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import trio
from attrs import evolve, field, frozen

from polarnode.core.errors import PolarnodeError
from polarnode.core.task import ForkSpec
from polarnode.journal.forks import EarlierAttempt, ForkParent
from polarnode.journal.journal import Journal
from polarnode.journal.log.port import Log, LogAway
from polarnode.merge.trajectory import Identity
from polarnode.rollouts.services import NoCopies, SnapshotCopies
from polarnode.rollouts.snapshots import list_snapshots

T = TypeVar("T")

AWAY_S: Final = 1.0  # before the log is asked again


class ForkElsewhere(PolarnodeError):
    """What a fork needs is at another node, which is alive."""

    boundary = "node"


@frozen(kw_only=True)
class ForkNodes:
    """What the log and this node know of the parents of forks. A `patient` one, as sessions have it, waits
    while the log is away: a session does not end because of that.
    """

    log: Log
    journal: Journal
    node: str
    snapshots: Path  # the folder of this node's
    copies: SnapshotCopies = field(factory=NoCopies)  # those that other nodes left
    patient: bool = True

    async def parent(self, fork: ForkSpec) -> ForkParent | None:
        """The session that forks go on from, with what is known of it here."""
        found = await self._asked(lambda: self.log.fork_parent(fork))
        if found is None or found.count:
            return found
        own = await self.journal.fork_parent(fork)  # it runs here, or its end is on its way to the log
        if own is not None:
            return evolve(own, spec=found.spec)
        turns = await self.copies.turns(fork)
        return found if turns is None else evolve(found, turns=turns, count=len(turns))

    async def earlier_attempts(self, place: Identity) -> tuple[EarlierAttempt, ...]:
        """The sessions that had a session's place before it."""
        return await self._asked(lambda: self.log.earlier_attempts(place))

    async def elsewhere(self, fork: ForkSpec) -> str | None:
        """The other node where a fork must begin; None where it may begin here."""
        if not self.log.shared:
            return None
        session = await self._asked(lambda: self.log.session(fork.session))
        if session is None or (fork.by == "replay" and session.outcome is not None):
            return None
        row = await self._asked(lambda: self.log.node_of(fork.session))
        if row is None or row.facts.name == self.node or await self._has_snapshot(fork):
            return None
        alive = {each.facts.name for each in await self._asked(self.log.nodes)}
        return row.facts.name if row.facts.name in alive else None

    async def _has_snapshot(self, fork: ForkSpec) -> bool:
        if fork.by == "replay":
            return False
        if fork.by == "resume":
            await self.copies.fetch(fork.session)
        listed = await trio.to_thread.run_sync(list_snapshots, self.snapshots, fork.session)
        return bool(listed.snapshots)

    async def insist_here(self, fork: ForkSpec) -> None:
        """Raise ForkElsewhere for a fork that must begin at another node."""
        node = await self.elsewhere(fork)
        if node is not None:
            raise ForkElsewhere(f"it begins at node {node}, which has session {fork.session}")

    async def _asked(self, ask: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await ask()
            except LogAway:
                if not self.patient:
                    raise
                await trio.sleep(AWAY_S)
