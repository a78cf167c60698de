"""How the ends of sessions reach the log: each is kept here until the log has answered.

A session that is over has its result written here in one step, and the log is told beside everything else.
While the log is away the node goes on, and what it has to say waits; it says each thing again as it was until
there is an answer, which is the same however often it is asked (`journal/log/port.py`).
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio
from attrs import define, field

from polarnode.core.backoff import Backoff
from polarnode.core.trajectory import Trajectory
from polarnode.journal.log.port import Claim, Ended, FinishAnswer, LogAway, Places, ended_session

logger = logging.getLogger(__name__)

T = TypeVar("T")

# before the log is asked again: a failover takes some seconds, and only trainers wait for these results
PAUSES: Final = Backoff(first_s=0.1, longest_s=5.0)
AT_ONCE: Final = 8  # results on their way: one large body holds up no other


@define(eq=False)
class Results:
    """The ends of a node's sessions. `run` delivers them; `on_filled` is told of each that has its place."""

    log: Places
    now: Callable[[], float]  # seconds since the epoch
    on_filled: Callable[[Claim, Trajectory, FinishAnswer], Awaitable[None]]
    incarnation: int = 0
    unwritten: set[tuple[str, int]] = field(factory=set, init=False)  # samples whose end could not be written
    _claims: dict[str, Claim] = field(factory=dict, init=False)  # by session, of those that run
    _waiting: dict[str, tuple[Claim | None, Trajectory, Ended]] = field(factory=dict, init=False)
    _changed: trio.Event = field(factory=trio.Event, init=False)

    def hold(self, claim: Claim) -> None:
        """A session of this claim runs."""
        self._claims[claim.session_id] = claim

    def claim_of(self, session_id: str) -> Claim | None:
        """The claim of a session that runs here, or whose result is on its way."""
        return self._claims.get(session_id)

    def publish(self, trajectory: Trajectory) -> None:
        """Take the end of a session. It never waits. What cannot be packed raises here, at its source."""
        claim = self._claims.get(trajectory.session_id)
        ended = ended_session(trajectory, finished=self.now())
        self._waiting[trajectory.session_id] = (claim, trajectory, ended)
        self._note()

    async def put_back(self, trajectory: Trajectory, *, counts: bool) -> Claim | None:
        """Give back the place of a session that was lost, for another attempt at this node. None where there
        is to be none. Waits until the log has answered.
        """
        claim = self._claims[trajectory.session_id]
        ended = ended_session(trajectory, finished=self.now())
        with trio.CancelScope(shield=True):
            kept = await self._told(lambda: self.log.put_back(claim, ended, counts=counts, keep=True))
        del self._claims[trajectory.session_id]
        return kept

    @property
    def waiting(self) -> int:
        """Results that the log has not acknowledged."""
        return len(self._waiting)

    async def written(self, session_id: str) -> None:
        """Return when the log has the result of a session that is over."""
        while session_id in self._waiting:
            await self._changed.wait()
        await trio.lowlevel.checkpoint()

    async def delivered(self) -> None:
        """Return when the log has all results."""
        while self._waiting:
            await self._changed.wait()
        await trio.lowlevel.checkpoint()

    async def run(self, ready: trio.Event) -> None:
        """Deliver what comes, until cancelled."""
        ready.set()
        under_way: set[str] = set()
        limit = trio.CapacityLimiter(AT_ONCE)

        async def deliver(session_id: str) -> None:
            claim, trajectory, ended = self._waiting[session_id]
            try:
                async with limit:
                    await self._deliver(claim, trajectory, ended)
            except Exception:
                # the isolation edge: one result that cannot be written must not keep back the others
                logger.exception(
                    "the end of session %s was not written: its turns are in the journal, where the node's"
                    " next start finds it",
                    session_id,
                )
                self.unwritten.add((trajectory.task_id, trajectory.sample_index))
            del self._waiting[session_id]
            self._claims.pop(session_id, None)
            under_way.discard(session_id)
            self._note()

        async with trio.open_nursery() as nursery:
            while True:
                for session_id in self._waiting.keys() - under_way:
                    under_way.add(session_id)
                    nursery.start_soon(deliver, session_id)
                await self._changed.wait()

    async def _deliver(self, claim: Claim | None, trajectory: Trajectory, ended: Ended) -> None:
        if claim is None:
            await self._told(lambda: self.log.publish(ended, self.incarnation))
            return
        answer = await self._told(lambda: self.log.finish(claim, ended))
        if answer == "another":
            logger.warning(
                "session %s lost its place to another and is published as an attempt", claim.session_id
            )
            await self._told(lambda: self.log.publish(ended, self.incarnation))
        elif answer == "unknown":
            logger.warning("the log has no task %s any more: its result is dropped", claim.task_id)
        else:
            await self.on_filled(claim, trajectory, answer)

    async def _told(self, tell: Callable[[], Awaitable[T]]) -> T:
        """The log's answer, however long it is away."""
        tries = 0
        while True:
            try:
                return await tell()
            except LogAway as away:
                if not tries:
                    logger.warning("%s; results wait here", away)
                await trio.sleep(PAUSES.delay(tries))
                tries += 1

    def _note(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()
