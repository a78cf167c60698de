"""The places that this node claims from its log, and those that it gives back.

The log holds the places of all tasks and decides what runs next. A node alone claims from its own journal,
and the nodes of a fleet claim from the same PostgreSQL. A node claims as far as it has room, gives each claim
to a `SessionStarter`, and ends the places that nobody should run. Invariant: a place that the log has given
to this node is begun, ended or given back, even if the answer that gave it was lost.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import trio
from attrs import define, field

from polarnode.core.task import CAPTURE_HARNESS
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import EARLY_STOP_REASON
from polarnode.journal.log.port import Claim, ClaimOffer, Log, LogUnavailable
from polarnode.rollouts.admission import AdmittedTask
from polarnode.rollouts.lifecycle import SessionRegistry
from polarnode.rollouts.membership import LogMembership
from polarnode.rollouts.results import STOP_WAIT_S
from polarnode.rollouts.services import NodeIdentity
from polarnode.rollouts.session import Session
from polarnode.support.bounded import remember

logger = logging.getLogger(__name__)

MAX_RECENT_IMAGES: Final = 32  # images of recent tasks; a node keeps about as many prepared workspaces
MAX_ENDINGS: Final = 64  # places that are ended without a run, between two looks at the rest
# The seconds that a node does not take a place again which it gave back because its fork must begin at
# another node. The other nodes are notified when the place is given back.
AVOID_PLACE_S: Final = 10.0
LOOK_S: Final = 5.0  # the longest time between two looks at the log, in case a notification is lost
# A node beside others claims an eighth of its room at a time, and then pauses. A notification of new places
# reaches the other nodes within some milliseconds, a busy one within tens, and a node still fills in a
# second.
CLAIM_SHARES: Final = 8
SHARE_PAUSE_S: Final = 0.1


class SessionStarter(Protocol):
    """Begins the sessions of claims. The scheduler is one."""

    def begin(self, claim: Claim, known: dict[str, AdmittedTask]) -> None:
        """Begin the session of a claim. `known` maps tasks that begin in the same moment to their admitted
        parts.
        """

    def end_without_run(self, claim: Claim) -> None:
        """End a place that nobody runs and nobody should run."""


@define(eq=False, kw_only=True)
class PlaceClaims:
    """The claims of one node. `most_claimed` limits the sessions that are claimed and not over. Those beyond
    the slots of the first stage are the next ones, and their containers are made ahead.
    """

    log: Log
    membership: LogMembership
    registry: SessionRegistry
    identity: NodeIdentity
    most_claimed: int
    # It maps each adapter to the version that this node serves; "" is the base.
    serving: Callable[[], Mapping[str, str]] = dict
    # Whether some engine host answers. Places of a shared log are left to nodes whose engines do.
    engines_ready: Callable[[], bool] = lambda: True
    settling: set[str] = field(factory=set, init=False)  # sessions of earlier runs that `recover` settles
    _recent_images: dict[str, None] = field(factory=dict, init=False)
    _room: trio.Event = field(factory=trio.Event, init=False)  # set when a session is over
    _took_full_share: bool = field(default=False, init=False)  # whether the log may have more for this node
    # Maps places whose forks must begin at another node to the time until which this node avoids them.
    _avoided_places: dict[tuple[str, int], float] = field(factory=dict, init=False)
    # The places for whose next attempt the log is being asked.
    _replacing_places: set[tuple[str, int]] = field(factory=set, init=False)
    # Claims that this node holds and does not run.
    _stray_claims: list[Claim] = field(factory=list, init=False)
    # Whether an answer that gave a place may be lost.
    _claims_uncertain: bool = field(default=False, init=False)

    # ── claiming ──────────────────────────────────────────────────────────────

    async def run(self, starter: SessionStarter, ready: trio.Event) -> None:
        """Claim places, and end the sessions that must end, until cancelled."""
        ready.set()
        away, results = False, self.registry.results
        while True:
            seen = self.log.place_news
            try:
                # Another task may have used the connections first and met the new primary, so that no
                # connection was lost here.
                if away or (self.log.shared and results.is_another_log(self.log.log_status.log)):
                    await results.resend_results()
                if self.log.lost and not self.membership.replaced:
                    await self._rejoin_log()
                await self._look(starter)
                away = False
            except LogUnavailable as error:
                self._claims_uncertain = True
                if not away:
                    logger.warning("%s; sessions go on, and nothing new begins", error)
                away = True
            if self._took_full_share:
                await trio.sleep(SHARE_PAUSE_S)
            else:
                await self._wait_for_news(seen)

    async def _rejoin_log(self) -> None:
        """Join the log again. The sessions of this node go on. Of two sessions with one place, the one that
        ends first has it.
        """
        inherited, results = await self.membership.join_again(), self.registry.results
        # There is no checkpoint in this loop, because a session that ended meanwhile would be refused with
        # its old claim.
        for claim in inherited:
            if results.claim_of(claim.session_id) is not None:
                results.hold(claim)
            elif claim.session_id not in self.settling:
                self._stray_claims.append(claim)

    async def _look(self, starter: SessionStarter) -> None:
        """Ask the log once for everything that it has for this node."""
        while self._stray_claims:
            await self.log.put_back(self._stray_claims[-1], counts=False)
            self._stray_claims.pop()
        if self._claims_uncertain:  # The log may have given places with an answer that was lost.
            self._claims_uncertain = False
            for claim in await self.log.claims(self.membership.incarnation):
                if self._is_unknown_claim(claim):
                    starter.begin(claim, {})
        for claim in await self.log.claim_endings(self.membership.incarnation, MAX_ENDINGS):
            starter.end_without_run(claim)
        to_stop = await self.log.sessions_to_stop(self.membership.incarnation)
        for session_id, cause in to_stop.items():
            driver = self.registry.find(session_id)
            if driver is not None:
                driver.cancel(EARLY_STOP_REASON if cause == "early stop" else "cancelled")
        await self._claim_places(starter)

    def _is_unknown_claim(self, claim: Claim) -> bool:
        """Whether nothing at this node runs the session of a claim or ends it, or is about to."""
        results = self.registry.results
        return (
            results.claim_of(claim.session_id) is None
            and claim.session_id not in self.settling
            and (claim.task_id, claim.sample_index) not in results.unwritten | self._replacing_places
            and claim.spec.harness.name != CAPTURE_HARNESS  # The caller of a capture takes its place again.
        )

    async def _claim_places(self, starter: SessionStarter) -> None:
        """Take places as far as there is room. A node alone takes them at once. A node beside others takes a
        share at a time, so that each node gets its part, and lets a node with less load choose first.
        """
        live = len(self.registry.live(Session))
        room = self.most_claimed - live
        begins = room > 0 and self._begins()
        load = live / self.most_claimed if begins else None
        self.log.set_load(load)
        self._took_full_share = False
        if load is None:
            return
        least, share = self.log.least_load, room
        if least is not None:
            share = min(room, max(1, self.most_claimed // CLAIM_SHARES))
            if load > least:
                await trio.sleep(SHARE_PAUSE_S)
        known: dict[str, AdmittedTask] = {}
        taken = await self.log.claim(self._make_offer(share))
        for claim in taken:
            starter.begin(claim, known)
        if share < room and taken:
            # The members of a group share a prompt, so the rest of a group that begins here runs here too.
            rest = self._make_offer(room - len(taken), begun_only=True)
            for claim in await self.log.claim(rest):
                starter.begin(claim, known)
            self._took_full_share = len(taken) == share

    def _begins(self) -> bool:
        """Whether this node begins new sessions. A node alone begins what it took even while its engines are
        not ready or it drains.
        """
        if self.registry.stopping or self.membership.replaced:
            return False
        return not self.log.shared or (self.engines_ready() and not self.membership.draining)

    def _make_offer(self, room: int, *, begun_only: bool = False) -> ClaimOffer:
        now = trio.current_time()
        self._avoided_places = {place: until for place, until in self._avoided_places.items() if until > now}
        return ClaimOffer(
            incarnation=self.membership.incarnation,
            room=room,
            begun_only=begun_only,
            labels=self.identity.all_labels,
            images=tuple(self._recent_images),
            serving=self.serving(),
            avoided=frozenset(self._avoided_places),
        )

    async def _wait_for_news(self, seen: int) -> None:
        """Wait until there is news of places after number `seen`, or room here, or LOOK_S have passed."""

        async def wait_places() -> None:
            while True:
                news = self.log.news
                if self.log.place_news != seen:
                    break
                await self.log.wait_news(news, LOOK_S)
            nursery.cancel_scope.cancel()

        with trio.move_on_after(LOOK_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_places)
                await self._room.wait()
                nursery.cancel_scope.cancel()
        if self._room.is_set():
            self._room = trio.Event()

    def note_image(self, image: str) -> None:
        """Note that a session of an image begins here. The log prefers to give this node more of that
        image.
        """
        remember(self._recent_images, image, None, most=MAX_RECENT_IMAGES)

    def note_room(self) -> None:
        """Note that a session is over, so that there may be room for another one."""
        self._room.set()

    # ── giving back ───────────────────────────────────────────────────────────

    async def keep_for_next_attempt(self, lost: Trajectory, *, counts: bool) -> Claim | None:
        """Publish a session that was lost as an attempt, and keep its place. Returns the claim for the next
        attempt, or None if there is none or this node stops. With `counts` it takes one of the task's
        retries.
        """
        keep = not (self.registry.stopping and self.log.shared)
        kept: Claim | None = None
        place = (lost.task_id, lost.sample_index)
        self._replacing_places.add(place)
        try:
            with self.registry.results.patience():
                kept = await self.registry.results.put_back(lost, counts=counts, keep=keep)
        finally:
            self._replacing_places.discard(place)
        if kept is None:  # The answer that gave the place may have been lost.
            self._claims_uncertain = True
        return kept

    async def leave_to_other_nodes(self, lost: Trajectory) -> None:
        """Publish a session that must begin at another node as an attempt. Its place is given back, and this
        node does not take it again for a while.
        """
        place = (lost.task_id, lost.sample_index)
        self._avoided_places[place] = trio.current_time() + AVOID_PLACE_S
        with self.registry.results.patience():
            await self.registry.results.put_back(lost, counts=False, keep=False)

    async def give_away(self, stopped: Trajectory) -> None:
        """Publish a session that was ended by its node's stop as an attempt. Another node gets its place, and
        no retry is spent. If the log is away, it is told at the node's next start; before that it concludes
        the same from this node's silence.
        """
        with trio.move_on_after(STOP_WAIT_S) as scope:
            await self.registry.results.put_back(stopped, counts=False, keep=False)
        again = "when the log answers" if scope.cancelled_caught else "now"
        logger.info("session %s is given back: another node may run it %s", stopped.session_id, again)
