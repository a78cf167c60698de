"""How the results of sessions reach the log: each is kept here until the log has answered.

The result of a session that is over is taken here in one step, and is sent to the log in the background.
While the log is away the node goes on, and its results wait. Each is sent unchanged until there is an answer,
and the answer is the same however often the log is asked (`journal/log/port.py`). What a shared log may lack
is in the node's own journal (`journal/held.py`). There it outlives the node's process, and also a standby of
the log that knew less than the old primary had acknowledged. A result is read from there when it is sent, so
that hours without the log do not fill the memory.
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
from polarnode.groups.group import SessionFacts
from polarnode.journal.held import ResultStore, StoredResult, without_parts
from polarnode.journal.log.news import wait_events
from polarnode.journal.log.patience import retry_until_answered
from polarnode.journal.log.port import Claim, EndedSession, FinishAnswer, Log, LogUnavailable, pack_ended
from polarnode.rollouts.membership import LogMembership
from polarnode.support.ids import new_id

logger = logging.getLogger(__name__)

T = TypeVar("T")

AT_ONCE: Final = 8  # results sent at once, so that one large body does not hold up the others
SWEEP_S: Final = 60.0  # seconds between two looks for results that were acknowledged long ago
# The seconds that the log has to answer when the node stops. The next start sends what it does not take.
STOP_WAIT_S: Final = 10.0
LOOK_S: Final = 5.0  # the longest time between two looks for the end of a place, in case news is lost


@define(eq=False)
class SessionResults:
    """The results of a node's sessions. `run` delivers them, and `on_filled` is called for each that has
    filled its place. `held` keeps what a shared log may lack; None for a node alone.
    """

    log: Log
    membership: LogMembership
    now: Callable[[], float]  # seconds since the epoch
    on_filled: Callable[[Claim, EndedSession, FinishAnswer], Awaitable[None]]
    held: ResultStore | None = None
    unwritten: set[tuple[str, int]] = field(factory=set, init=False)  # samples whose end could not be written
    _claims: dict[str, Claim] = field(factory=dict, init=False)  # claims of running sessions, by session id
    _waiting: dict[str, EndedSession] = field(factory=dict, init=False)
    _changed: trio.Event = field(factory=trio.Event, init=False)
    _identity: str | None = field(default=None, init=False)  # the log's identity when it last answered
    _patient_scopes: set[trio.CancelScope] = field(factory=set, init=False)
    _last: float = field(default=math.inf, init=False)  # the time after which nobody waits for the log

    def hold(self, claim: Claim) -> None:
        """Hold the claim of a session that runs, or whose result is on its way."""
        self._claims[claim.session_id] = claim

    def claim_of(self, session_id: str) -> Claim | None:
        """The claim of a session that runs here, or whose result is on its way."""
        return self._claims.get(session_id)

    def publish(self, trajectory: Trajectory) -> None:
        """Take the result of a session. This never waits. A result that cannot be packed raises here, at its
        source.
        """
        ended = pack_ended(trajectory, finished=self.now())
        if self.held is not None:
            self.held.store_result(self._claims.get(trajectory.session_id), ended)
            ended = without_parts(ended)
        self._waiting[trajectory.session_id] = ended
        self._note()

    async def put_back(self, trajectory: Trajectory, *, counts: bool, keep: bool = True) -> Claim | None:
        """Give back the place of a session that was lost, for another attempt. With `keep` this node keeps
        the place, and its claim for the next attempt is returned, unless there is to be none. Waits until the
        log has answered.
        """
        session_id = trajectory.session_id
        ended = pack_ended(trajectory, finished=self.now())
        if self.held is not None:  # The session has lost its place, whenever the log learns that.
            self.held.store_result(None, ended)
            ended = without_parts(ended)
        while True:
            claim = self._claims[session_id]
            tell = partial(self.log.put_back, claim, counts=counts, keep=keep)
            kept = await self._send_whole(ended, tell)
            if kept is not None or self._claims[session_id] is claim:
                break  # Otherwise the node joined again meanwhile, and holds the place by another claim.
        self._answered(session_id)
        return kept

    @contextmanager
    def patience(self) -> Iterator[trio.CancelScope]:
        """Protect a wait for the log from cancellation. Only the node's stop ends it, STOP_WAIT_S later."""
        with trio.CancelScope(shield=True, deadline=self._last) as scope:
            self._patient_scopes.add(scope)
            try:
                yield scope
            finally:
                self._patient_scopes.discard(scope)

    def shorten_waits(self) -> None:
        """Bound all waits for the log, because the node stops."""
        self._last = min(self._last, trio.current_time() + STOP_WAIT_S)
        for scope in self._patient_scopes:
            scope.deadline = self._last

    async def restore(self, inherited: Mapping[str, Claim]) -> frozenset[str]:
        """Take up the results that earlier runs of this node held and that the log does not have. `inherited`
        are the claims of this run, by session. Returns all sessions with held results.
        """
        if self.held is None:
            return frozenset()
        self._identity = await retry_until_answered(self.log.log_name)
        kept = {each.ended.identity.session_id: each for each in await self.held.read_all()}
        # A primary that was lost while the node was down may have taken acknowledged results with it.
        over = await retry_until_answered(partial(self.log.session_ends, tuple(kept)))
        for session_id, each in kept.items():
            if each.answered is None or session_id in inherited or not over.get(session_id):
                held = inherited.get(session_id) if each.claim is not None else None
                self._take(each if held is None else evolve(each, claim=held))
        return frozenset(kept)

    def is_another_log(self, identity: str) -> bool:
        """Whether a log of this identity was not yet sent the results that are kept here. An empty identity
        means that it is unknown.
        """
        return self._identity is not None and identity not in ("", self._identity)

    async def resend_results(self) -> None:
        """Send the kept results again if the log, which was away, has another identity now. Its new primary
        may lack results that the old one acknowledged. A result that it knows already changes nothing.
        """
        if self.held is None or self._identity is None:  # `restore` comes first.
            return
        identity = await retry_until_answered(self.log.log_name)
        if identity == self._identity:
            return
        logger.warning(
            "the log is %s now, and was %s: recent results are told again", identity, self._identity
        )
        self._identity = identity
        self.held.clear_acknowledgements()
        for each in await self.held.read_all():
            self._take(each)

    def _take(self, result: StoredResult) -> None:
        session_id = result.ended.identity.session_id
        if session_id in self._waiting:
            return
        if result.claim is not None:
            self._claims.setdefault(session_id, result.claim)
        self._waiting[session_id] = result.ended
        self._note()

    @property
    def waiting(self) -> int:
        """The number of results that the log has not acknowledged."""
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

    async def place_over(self, task_id: str, sample_index: int) -> SessionFacts | None:
        """Wait until a sample of a task is over, at whichever node it runs. Returns its facts, or None if its
        end could not be written.
        """
        while (task_id, sample_index) not in self.unwritten:
            seen = self.log.event_news
            # This waits as long as the log is away, because no session may end on that account.
            over = await retry_until_answered(lambda: self.log.finished_places(task_id))
            for facts in over:
                if facts.sample_index == sample_index:
                    return facts
            await wait_events(self.log, seen, LOOK_S)
        return None

    async def leave(self) -> None:
        """End this incarnation at a shared log once the log has all results, or give up after STOP_WAIT_S."""
        with trio.move_on_after(STOP_WAIT_S) as scope:
            await self.delivered()
            if self.log.shared:
                await retry_until_answered(lambda: self.log.leave(self.membership.incarnation))
        if scope.cancelled_caught:
            logger.warning(
                "the log does not answer: the next start of this node tells it %d results", self.waiting
            )

    async def run(self, ready: trio.Event) -> None:
        """Deliver results as they come, until cancelled."""
        ready.set()
        under_way: set[str] = set()
        limit = trio.CapacityLimiter(AT_ONCE)

        async def deliver(session_id: str) -> None:
            ended = self._waiting[session_id]
            try:
                async with limit:
                    await self._deliver_result(session_id, ended)
            except Exception:
                # This is the isolation boundary: a result that cannot be written must not keep back the
                # others.
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

    async def _sweep(self, held: ResultStore) -> None:
        while True:
            held.delete_old()
            await trio.sleep(SWEEP_S)

    async def _send_whole(self, ended: EndedSession, tell: Callable[[EndedSession], Awaitable[T]]) -> T:
        """Send a whole result and return the log's answer. A shared log has no turns of this node's sessions
        before that. The turns are not in memory while the log is away.
        """

        async def ask() -> T:
            if self.held is None:
                return await tell(ended)
            if (away := await self.log.unavailable_reason()) is not None:
                raise LogUnavailable(away)
            return await tell(await self.held.load_result(ended))

        return await retry_until_answered(ask)

    async def _deliver_result(self, session_id: str, ended: EndedSession) -> None:
        while True:
            claim = self._claims.get(session_id)
            if claim is None:
                await self._send_whole(ended, self._publish)
                return
            answer = await self._finish(claim, ended)
            if answer == "another" and self._claims.get(session_id) is not claim:
                continue  # The node joined again meanwhile, and holds the place by another claim.
            if answer == "another":
                logger.warning("session %s lost its place and is published as an attempt", session_id)
                await self._send_whole(ended, self._publish)
            elif answer == "unknown":
                logger.warning("the log has no task %s any more: its result is dropped", claim.task_id)
            else:
                await self.on_filled(claim, ended, answer)
            return

    async def _publish(self, ended: EndedSession) -> FinishAnswer:
        return await self.log.publish_session(ended, self.membership.incarnation)

    async def _finish(self, claim: Claim, ended: EndedSession) -> FinishAnswer:
        answer = await self._send_whole(ended, partial(self.log.finish_claim, claim))
        if answer != "unknown" or self.held is None:
            return answer
        # Retention deletes no task that is so young, so the log's present primary never had it.
        ids = [new_id() for _ in range(claim.spec.num_samples)]
        ids[claim.sample_index] = claim.session_id
        await retry_until_answered(
            lambda: self.log.submit(
                claim.spec,
                task_id=claim.task_id,
                session_ids=tuple(ids),
                idempotency_key=claim.idempotency_key,
                submitted=claim.submitted,
                model=ended.identity.model,
            )
        )
        return await self._send_whole(ended, partial(self.log.finish_claim, claim))

    def _answered(self, session_id: str) -> None:
        self._claims.pop(session_id, None)
        if self.held is not None:
            self.held.mark_acknowledged(session_id)

    def _note(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()
