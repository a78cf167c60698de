"""How the ends of sessions reach the log: each is kept here until the log has answered.

A session that is over has its result written here in one step, and the log is told beside everything else.
While the log is away the node goes on, and what it has to say waits; it says each thing again as it was until
there is an answer, which is the same however often it is asked (`journal/log/port.py`). What a shared log
may lack is in the node's own journal (`journal/held.py`), so that it outlives the node's process, and a
standby of the log that knew less than it acknowledged; it is read from there when its turn comes, so that
hours without the log fill no memory.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

import trio
from attrs import define, evolve, field

from polarnode.core.trajectory import Trajectory
from polarnode.journal.held import HeldResult, HeldResults, without_parts
from polarnode.journal.log.patience import answered
from polarnode.journal.log.port import Claim, Ended, FinishAnswer, Log, LogAway, ended_session
from polarnode.support.ids import new_id

logger = logging.getLogger(__name__)

T = TypeVar("T")

AT_ONCE: Final = 8  # results on their way: one large body holds up no other
SWEEP_S: Final = 60.0  # between looks at what was acknowledged long ago
LAST_S: Final = 10.0  # for the log to answer when the node stops: what it does not take, the next start tells


@define(eq=False)
class Results:
    """The ends of a node's sessions. `run` delivers them; `on_filled` is told of each that has its place.
    `held`: where a shared log is, what it may lack.
    """

    log: Log
    now: Callable[[], float]  # seconds since the epoch
    on_filled: Callable[[Claim, Ended, FinishAnswer], Awaitable[None]]
    held: HeldResults | None = None
    incarnation: int = 0
    unwritten: set[tuple[str, int]] = field(factory=set, init=False)  # samples whose end could not be written
    _claims: dict[str, Claim] = field(factory=dict, init=False)  # by session, of those that run
    _waiting: dict[str, Ended] = field(factory=dict, init=False)
    _changed: trio.Event = field(factory=trio.Event, init=False)
    _identity: str | None = field(default=None, init=False)  # of the log, when it last answered
    _patient: set[trio.CancelScope] = field(factory=set, init=False)
    _last: float = field(default=math.inf, init=False)  # when nobody waits for the log any more

    def hold(self, claim: Claim) -> None:
        """A session of this claim runs, or its result is on its way."""
        self._claims[claim.session_id] = claim

    def claim_of(self, session_id: str) -> Claim | None:
        """The claim of a session that runs here, or whose result is on its way."""
        return self._claims.get(session_id)

    def publish(self, trajectory: Trajectory) -> None:
        """Take the end of a session. It never waits. What cannot be packed raises here, at its source."""
        ended = ended_session(trajectory, finished=self.now())
        if self.held is not None:
            self.held.hold(self._claims.get(trajectory.session_id), ended)
            ended = without_parts(ended)
        self._waiting[trajectory.session_id] = ended
        self._note()

    async def put_back(self, trajectory: Trajectory, *, counts: bool, keep: bool = True) -> Claim | None:
        """Give back the place of a session that was lost, for another attempt; with `keep` at this node,
        whose claim it gives unless there is to be none. Waits until the log has answered.
        """
        session_id = trajectory.session_id
        ended = ended_session(trajectory, finished=self.now())
        if self.held is not None:  # the place is not its own any more, whenever the log hears of it
            self.held.hold(None, ended)
            ended = without_parts(ended)
        while True:
            claim = self._claims[session_id]
            tell = partial(self.log.put_back, claim, counts=counts, keep=keep)
            kept = await self._told_whole(ended, tell)
            if kept is not None or self._claims[session_id] is claim:
                break  # else the node joined again meanwhile, and holds the place by another claim
        self._answered(session_id)
        return kept

    @contextmanager
    def patience(self) -> Iterator[trio.CancelScope]:
        """Around a wait for the log that is not cut short: only the node's stop ends it, LAST_S later."""
        with trio.CancelScope(shield=True, deadline=self._last) as scope:
            self._patient.add(scope)
            try:
                yield scope
            finally:
                self._patient.discard(scope)

    def hurry(self) -> None:
        """The node stops."""
        self._last = min(self._last, trio.current_time() + LAST_S)
        for scope in self._patient:
            scope.deadline = self._last

    async def restore(self, inherited: Mapping[str, Claim]) -> frozenset[str]:
        """Take what earlier runs of this node held for the log, and the log does not have; `inherited` are
        the claims of this run, by session. Gives all sessions that are held.
        """
        if self.held is None:
            return frozenset()
        self._identity = await self.told(self.log.identity)
        kept = {each.ended.identity.session_id: each for each in await self.held.all()}
        # a primary that was lost while the node was down took some of what it had acknowledged with it
        over = await self.told(partial(self.log.session_ends, tuple(kept)))
        for session_id, each in kept.items():
            if each.answered is None or session_id in inherited or not over.get(session_id):
                held = inherited.get(session_id) if each.claim is not None else None
                self._take(each if held is None else evolve(each, claim=held))
        return frozenset(kept)

    def is_another(self, identity: str) -> bool:
        """Whether a log of this identity was not told yet what is kept here. "": it is not known."""
        return self._identity is not None and identity not in ("", self._identity)

    async def tell_again(self) -> None:
        """The log was away, or is another. Where it has another identity now, its new primary may lack what
        the old one acknowledged: everything that is kept is told again, which changes nothing where it is
        known.
        """
        if self.held is None or self._identity is None:  # `restore` comes first
            return
        identity = await self.told(self.log.identity)
        if identity == self._identity:
            return
        logger.warning(
            "the log is %s now, and was %s: recent results are told again", identity, self._identity
        )
        self._identity = identity
        self.held.unanswered()
        for each in await self.held.all():
            self._take(each)

    def _take(self, result: HeldResult) -> None:
        session_id = result.ended.identity.session_id
        if session_id in self._waiting:
            return
        if result.claim is not None:
            self._claims.setdefault(session_id, result.claim)
        self._waiting[session_id] = result.ended
        self._note()

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

    async def leave(self) -> None:
        """End this incarnation at a shared log, once it has all results; or in LAST_S without that."""
        with trio.move_on_after(LAST_S) as scope:
            await self.delivered()
            if self.log.shared:
                await self.told(lambda: self.log.leave(self.incarnation))
        if scope.cancelled_caught:
            logger.warning(
                "the log does not answer: the next start of this node tells it %d results", self.waiting
            )

    async def run(self, ready: trio.Event) -> None:
        """Deliver what comes, until cancelled."""
        ready.set()
        under_way: set[str] = set()
        limit = trio.CapacityLimiter(AT_ONCE)

        async def deliver(session_id: str) -> None:
            ended = self._waiting[session_id]
            try:
                async with limit:
                    await self._deliver(session_id, ended)
            except Exception:
                # the isolation edge: one result that cannot be written must not keep back the others
                logger.exception(
                    "the end of session %s was not written: its turns are in the journal, where the node's"
                    " next start finds it",
                    session_id,
                )
                self.unwritten.add((ended.identity.task_id, ended.identity.sample_index))
                self._claims.pop(session_id, None)
            else:
                self._answered(session_id)
            del self._waiting[session_id]
            under_way.discard(session_id)
            self._note()

        async with trio.open_nursery() as nursery:
            if self.held is not None:
                nursery.start_soon(self._sweep, self.held)
            while True:
                for session_id in self._waiting.keys() - under_way:
                    under_way.add(session_id)
                    nursery.start_soon(deliver, session_id)
                await self._changed.wait()

    async def _sweep(self, held: HeldResults) -> None:
        while True:
            held.sweep()
            await trio.sleep(SWEEP_S)

    async def _told_whole(self, ended: Ended, tell: Callable[[Ended], Awaitable[T]]) -> T:
        """The log's answer to a result as it takes it: a shared one has no turns of this node's sessions yet.
        Nothing of it is in memory while the log is away.
        """

        async def ask() -> T:
            if self.held is None:
                return await tell(ended)
            if (away := await self.log.reachable()) is not None:
                raise LogAway(away)
            return await tell(await self.held.whole(ended))

        return await self.told(ask)

    async def _deliver(self, session_id: str, ended: Ended) -> None:
        while True:
            claim = self._claims.get(session_id)
            if claim is None:
                await self._told_whole(ended, self._publish)
                return
            answer = await self._finish(claim, ended)
            if answer == "another" and self._claims.get(session_id) is not claim:
                continue  # the node joined again meanwhile, and holds the place by another claim
            if answer == "another":
                logger.warning("session %s lost its place and is published as an attempt", session_id)
                await self._told_whole(ended, self._publish)
            elif answer == "unknown":
                logger.warning("the log has no task %s any more: its result is dropped", claim.task_id)
            else:
                await self.on_filled(claim, ended, answer)
            return

    async def _publish(self, ended: Ended) -> FinishAnswer:
        return await self.log.publish(ended, self.incarnation)

    async def _finish(self, claim: Claim, ended: Ended) -> FinishAnswer:
        answer = await self._told_whole(ended, partial(self.log.finish, claim))
        if answer != "unknown" or self.held is None:
            return answer
        # retention deletes no task so young: the primary that has this log now never had it
        ids = [new_id() for _ in range(claim.spec.num_samples)]
        ids[claim.sample_index] = claim.session_id
        await self.told(
            lambda: self.log.submit(
                claim.spec,
                task_id=claim.task_id,
                session_ids=tuple(ids),
                idempotency_key=claim.idempotency_key,
                submitted=claim.submitted,
                model=ended.identity.model,
            )
        )
        return await self._told_whole(ended, partial(self.log.finish, claim))

    def _answered(self, session_id: str) -> None:
        self._claims.pop(session_id, None)
        if self.held is not None:
            self.held.answered(session_id)

    async def told(self, tell: Callable[[], Awaitable[T]]) -> T:
        """The log's answer, however long it is away."""
        return await answered(tell, meanwhile="results wait here")

    def _note(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()
