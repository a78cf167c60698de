"""The scheduler: claims places from the log, runs a session in each, and gives the log its end.

The log holds the places of a task and decides what runs next. A node alone claims from its own journal, and
the nodes of a fleet claim from the same PostgreSQL. A caller that waits for a task must count the samples of
its group, not its sessions, because one sample may take several attempts.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

import trio
from attrs import define, evolve, field, frozen

from polarnode.containers.pool import RuntimeDemand
from polarnode.core.errors import Busy, Refused
from polarnode.core.labels import all_labels, choose_model, first_unmet_label, format_labels
from polarnode.core.status import LiveSessionStatus
from polarnode.core.task import CAPTURE_HARNESS, TaskSpec
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.gateway.live_sessions import LiveSessions
from polarnode.groups.fork_policy import fork_place
from polarnode.groups.group import (
    EARLY_STOP_REASON,
    SessionFacts,
    facts_of,
    judged,
    lost_to_the_machine,
    make_member,
    stamp_staleness,
)
from polarnode.journal.held import ResultStore
from polarnode.journal.log.news import wait_events
from polarnode.journal.log.port import (
    LOG_RETRY_S,
    Claim,
    ClaimOffer,
    EndedSession,
    EndingCause,
    FinishAnswer,
    Log,
    LogUnavailable,
    NodeFacts,
)
from polarnode.merge.trajectory import Identity, Result, assemble, requested_fork
from polarnode.rollouts.admission import AdmittedTask, admitted
from polarnode.rollouts.forks import tree_way, went_wrong
from polarnode.rollouts.lifecycle import (
    CancelCause,
    SessionEnd,
    SessionRegistry,
    has_retries_left,
    pause_before,
)
from polarnode.rollouts.results import STOP_WAIT_S, SessionResults
from polarnode.rollouts.services import NodeServices, SessionOrder
from polarnode.rollouts.session import Session
from polarnode.support.bounded import remember
from polarnode.support.concurrency import SemaphoreStatistics
from polarnode.support.ids import new_id
from polarnode.support.waiting_line import EntryCohort

logger = logging.getLogger(__name__)

MAX_RECENT_IMAGES: Final = 32  # images of recent tasks; a node keeps about as many prepared workspaces
MAX_ENDED_SESSIONS: Final = 10_000  # ended sessions that status still lists: about 1 kB each
MAX_OPEN_GROUPS: Final = 1_000  # groups that are not over; the log is asked about the others
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


@frozen(kw_only=True)
class SchedulerStatistics:
    """The stages and the counts of sessions. `live` sessions are claimed and not over. `queued` places wait
    for a node. `retried` sessions were followed by another attempt and are not counted as `ended`.
    """

    stages: Mapping[str, SemaphoreStatistics]
    live: int
    queued: int
    ended: int
    retried: int
    stopping: bool


def session_status(session: Session, published: Trajectory | None = None) -> LiveSessionStatus:
    """The status of a live session, or of one that is over with its `trajectory`."""
    identity, counters = session.identity, session.live.budget.counters
    now, last = trio.current_time(), counters.last_turn
    status = LiveSessionStatus(
        session_id=identity.session_id,
        task_id=identity.task_id,
        harness=identity.harness,
        phase=session.phase,
        turns=counters.turns,
        sampled_tokens=counters.sampled_tokens,
        sample_index=identity.sample_index,
        attempt=identity.attempt,
        age_s=round(now - session.began, 1),
        phase_s=round(now - session.phase_began, 1),
        last_turn_s=None if last is None else round(now - last, 1),
    )
    if published is None:
        return status
    return evolve(
        status, outcome=published.outcome.status, reward=published.reward, traces=len(published.traces)
    )


@define(eq=False)
class Scheduler:
    """Runs the sessions of tasks. `most_claimed` limits the sessions that are claimed and not over. Those
    beyond the slots of the first stage are the next ones, and their containers are made ahead. `warm` limits
    the warm containers that are kept for each shape.
    """

    nursery: trio.Nursery
    services: NodeServices
    registry: SessionRegistry
    sessions_by_key: LiveSessions
    log: Log
    now: Callable[[], float]  # seconds since the epoch
    most_claimed: int
    warm: int
    # Whether some engine host answers. Places of a shared log are left to nodes whose engines do.
    engines_ready: Callable[[], bool] = lambda: True
    draining: bool = field(default=False, init=False)  # whether it takes no new tasks; sessions go on
    facts: NodeFacts = field(factory=lambda: NodeFacts(name=""), init=False)  # what it joined the log with
    incarnation: int = field(default=0, init=False)
    # Whether another process with this node's name joined the log after it. Then nothing new begins here.
    replaced: bool = field(default=False, init=False)
    _container_demand: RuntimeDemand = field(init=False)
    _ended: dict[str, LiveSessionStatus] = field(factory=dict, init=False)
    _recent_images: dict[str, None] = field(factory=dict, init=False)
    _cohorts: "WeakValueDictionary[str, EntryCohort]" = field(factory=WeakValueDictionary, init=False)
    # Maps places whose forks must begin at another node to the time until which this node avoids them.
    _avoided_places: dict[tuple[str, int], float] = field(factory=dict, init=False)
    _claims_uncertain: bool = field(
        default=False, init=False
    )  # whether an answer that gave a place may be lost
    settling: set[str] = field(factory=set, init=False)  # sessions of earlier runs that `recover` settles
    # the places for whose next attempt the log is being asked
    _replacing_places: set[tuple[str, int]] = field(factory=set, init=False)
    _took_full_share: bool = field(default=False, init=False)  # whether the log may have more for this node
    _stray_claims: list[Claim] = field(
        factory=list, init=False
    )  # claims that this node holds and does not run
    # For groups that stop early: how many usable sessions of each task ended here.
    _usable: "Counter[str]" = field(factory=Counter, init=False)
    # For each task: the facts of the samples that ended here, by which its group is judged.
    _filled: dict[str, dict[int, SessionFacts]] = field(factory=dict, init=False)
    _room: trio.Event = field(factory=trio.Event, init=False)  # set when a session is over

    @_container_demand.default
    def _make_container_demand(self) -> RuntimeDemand:
        return RuntimeDemand(self.services.runtimes.prewarm, self.warm)

    # ── tasks ─────────────────────────────────────────────────────────────────

    async def submit(
        self,
        spec: TaskSpec,
        *,
        idempotency_key: str | None = None,
        callback_kinds: Sequence[str] = (),
    ) -> tuple[str, tuple[str, ...]]:
        """Accept a task and return (task_id, session_ids) once the log has it. Raises Refused, and Busy if
        only nodes that are away could run it.
        """
        here = not self.log.shared or (self.most_claimed > 0 and self._unmet_label(spec) is None)
        model = await self._check_nodes(spec, here=here) if self.log.shared else ""
        if here:
            self.check(spec)
        task_id = spec.task_id or f"task-{new_id()}"
        record = await self.log.submit(
            spec,
            task_id=task_id,
            session_ids=tuple(new_id() for _ in range(spec.num_samples)),
            idempotency_key=idempotency_key,
            callback_kinds=tuple(callback_kinds),
            submitted=self.now(),
            model=model,
        )
        return record.task_id, tuple(session.session_id for session in record.sessions)

    def _unmet_label(self, spec: TaskSpec) -> str | None:
        here = self.services.identity
        return first_unmet_label(spec.requires, all_labels(here.labels, node=here.node, model=here.model))

    async def _check_nodes(self, spec: TaskSpec, *, here: bool) -> str:
        """Return the model that the task is for. Nodes of another model, which may join later, leave the
        task.

        Raises Refused for a task that nodes of several models could run, or that no node of the log could
        run; the log remembers nodes for a day. Raises Busy if the nodes that could run it are away. `here`
        says that this node could run it. The node that begins the task checks everything else that it needs.
        """
        rows = await self.log.nodes()
        able = [row for row in rows if first_unmet_label(spec.requires, row.facts.labels) is None]
        model = choose_model(spec.requires, (row.facts.labels for row in able if "" in row.serving))
        if here or able or self._unmet_label(spec) is None:
            return model
        away = sorted(
            row.facts.name
            for row in await self.log.nodes(every=True)
            if row.state in ("lost", "left") and first_unmet_label(spec.requires, row.facts.labels) is None
        )
        if away:
            raise Busy(
                f"only nodes that are away have the labels that requires names: {', '.join(away)}",
                retry_after=LOG_RETRY_S,
            )
        there = "; ".join(f"{row.facts.name} has {format_labels(row.facts.labels)}" for row in rows)
        raise Refused(
            f"no node of this log has the labels that requires names: {there}; correct requires, or start a"
            " node that has them",
            path="$.requires",
        )

    async def cancel(self, task_id: str) -> bool:
        """Cancel a task's sessions, wherever they run. Each keeps its turns, and none is retried, even after
        a restart. False when none of its places is open.
        """
        cancelled = await self.log.cancel(task_id, self.now())
        for driver in self.registry.of_task(task_id):
            driver.cancel("cancelled")
        return cancelled

    def cancel_session(self, session_id: str) -> bool:
        """Cancel one of a task's sessions; it keeps its turns. False when it is not live."""
        session = self.registry.get(Session, session_id)
        if session is not None:
            session.cancel("cancelled")
        return session is not None

    async def place_over(self, task_id: str, sample_index: int) -> SessionFacts | None:
        """Wait until a sample of a task is over, at whichever node it runs. Returns its facts, or None if its
        end could not be written.
        """
        while (task_id, sample_index) not in self.registry.results.unwritten:
            seen = self.log.event_news
            # This waits as long as the log is away, because no session may end on that account.
            over = await self.registry.results.told(lambda: self.log.finished_places(task_id))
            for facts in over:
                if facts.sample_index == sample_index:
                    return facts
            await wait_events(self.log, seen, LOOK_S)
        return None

    # ── claims ────────────────────────────────────────────────────────────────

    async def join(self, facts: NodeFacts) -> tuple[Claim, ...]:
        """Begin this node's incarnation in the log. Returns the claims that earlier incarnations of its name
        held.
        """
        self.facts = facts
        joined = await self.registry.results.told(lambda: self.log.join(facts))
        self.incarnation = self.registry.results.incarnation = joined.incarnation
        return joined.inherited

    async def renew_certificate(self, certificate: str) -> None:
        """Tell the other nodes that this one now shows another certificate."""
        self.facts = evolve(self.facts, certificate=certificate)  # for the case that it joins again
        await self.log.renew_certificate(self.incarnation, certificate)

    async def run(self, ready: trio.Event) -> None:
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
                if self.log.lost and not self.replaced:
                    await self._rejoin_log()
                await self._look()
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
        """Join the log again after this node was declared lost, because it was stopped for longer than its
        lease. Its sessions go on. Of two sessions with one place, the one that ends first has it.
        """
        rows = {row.incarnation: row for row in await self.log.nodes(every=True)}
        mine = rows.get(self.incarnation)
        if mine is not None and mine.state == "replaced":
            self.replaced = True
            logger.error(
                "another process joined the log as %s: this one ends what it runs and takes nothing new; give"
                " each node a node_id of its own",
                self.facts.name,
            )
            return
        logger.warning("this node was silent for longer than its lease: it joins the log again")
        inherited, results = await self.join(self.facts), self.registry.results
        # There is no checkpoint in this loop, because a session that ended meanwhile would be refused with
        # its old claim.
        for claim in inherited:
            if results.claim_of(claim.session_id) is not None:
                results.hold(claim)
            elif claim.session_id not in self.settling:
                self._stray_claims.append(claim)

    async def _look(self) -> None:
        """Ask the log once for everything that it has for this node."""
        while self._stray_claims:
            await self.log.put_back(self._stray_claims[-1], counts=False)
            self._stray_claims.pop()
        if self._claims_uncertain:  # The log may have given places with an answer that was lost.
            self._claims_uncertain = False
            for claim in await self.log.claims(self.incarnation):
                if self._is_unknown_claim(claim):
                    self.begin(claim)
        for claim in await self.log.claim_endings(self.incarnation, MAX_ENDINGS):
            self._end_without_run(claim)
        for session_id, cause in (await self.log.sessions_to_stop(self.incarnation)).items():
            driver = self.registry.find(session_id)
            if driver is not None:
                driver.cancel(_cancel_cause(cause))
        await self._claim_places()

    async def _claim_places(self) -> None:
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
            self.begin(claim, known)
        if share < room and taken:
            # The members of a group share a prompt, so the rest of a group that begins here runs here too.
            rest = self._make_offer(room - len(taken), begun_only=True)
            for claim in await self.log.claim(rest):
                self.begin(claim, known)
            self._took_full_share = len(taken) == share

    def _is_unknown_claim(self, claim: Claim) -> bool:
        """Whether nothing at this node runs the session of a claim or ends it, or is about to."""
        results = self.registry.results
        return (
            results.claim_of(claim.session_id) is None
            and claim.session_id not in self.settling
            and (claim.task_id, claim.sample_index) not in results.unwritten | self._replacing_places
            and claim.spec.harness.name != CAPTURE_HARNESS  # The caller of a capture takes its place again.
        )

    def _begins(self) -> bool:
        """Whether this node begins new sessions. A node alone begins what it took even while its engines are
        not ready or it drains.
        """
        if self.registry.stopping or self.replaced:
            return False
        return not self.log.shared or (self.engines_ready() and not self.draining)

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

    def _make_offer(self, room: int, *, begun_only: bool = False) -> ClaimOffer:
        here, services, now = self.services.identity, self.services, trio.current_time()
        self._avoided_places = {place: until for place, until in self._avoided_places.items() if until > now}
        return ClaimOffer(
            incarnation=self.incarnation,
            room=room,
            begun_only=begun_only,
            labels=all_labels(here.labels, node=here.node, model=here.model),
            images=tuple(self._recent_images),
            serving=services.serving(),
            avoided=frozenset(self._avoided_places),
        )

    def begin(self, claim: Claim, known: dict[str, AdmittedTask] | None = None) -> None:
        """Begin the session of a claim. A session that cannot run here ends with an error, because nobody
        waits for an answer. `known` maps tasks that begin in the same moment to their admitted parts.
        """
        if self._group_has_enough(claim):
            self._end_without_run(evolve(claim, ending="early stop"))
            return
        self.registry.results.hold(claim)
        try:
            order = self._order(claim, {} if known is None else known)
        except Refused as refused:
            reason = f"node {self.services.identity.node} cannot run it: {refused}"
            self._publish_without_run(claim, Outcome(status="error", boundary="node", reason=reason))
            return
        image = order.runtime.image
        self._recent_images.pop(image, None)
        remember(self._recent_images, image, None, most=MAX_RECENT_IMAGES)
        self.services.journal.record_session(order.identity)
        # The fork of a tree waits for its root's session, and needs no container before that one is over.
        if fork_place(order.spec, order.identity.sample_index) is None:
            self._container_demand.expect([order.identity.session_id], order.runtime, each=order.containers)
        session = Session(
            order=order,
            live=self.registry.open(order.identity, order.spec, calls_first=order.harness.calls_first),
            services=self.services,
            delay_s=pause_before(claim.retries),  # give a transient fault time to pass
            place_over=self.place_over,
            on_phase=self._on_phase_change,
            on_unpublished=lambda lost: self._list_ended(evolve(session_status(lost), outcome="error")),
        )
        self.registry.start(
            session, nursery=self.nursery, sessions_by_key=self.sessions_by_key, on_end=self._on_session_end
        )

    def _end_without_run(self, claim: Claim) -> None:
        """End a place that nobody runs and nobody should run."""
        self.registry.results.hold(claim)
        if claim.ending == "retries spent":
            reason = "its node was lost, once more than budgets.retries allows"
            self._publish_without_run(claim, Outcome(status="error", boundary="node", reason=reason))
        else:
            why = EARLY_STOP_REASON if claim.ending == "early stop" else "cancelled"
            self._publish_without_run(claim, Outcome(status="cancelled", reason=f"{why} before it began"))

    def _publish_without_run(self, claim: Claim, outcome: Outcome) -> None:
        identity = self.identity_of(claim)
        found = assemble(identity, claim.spec, (), Result(outcome=outcome))
        found = stamp_staleness(found, self.services.versions_of(claim.spec.adapter))
        self.registry.end(SessionEnd(identity=identity, trajectory=found, cancelled=None))
        status = LiveSessionStatus(
            session_id=identity.session_id,
            task_id=identity.task_id,
            harness=identity.harness,
            phase="ended",
            turns=0,
            sampled_tokens=0,
            sample_index=identity.sample_index,
            attempt=identity.attempt,
            outcome=outcome.status,
        )
        self._list_ended(status)

    def _order(self, claim: Claim, known: dict[str, AdmittedTask]) -> SessionOrder:
        """The order of a claim's session. Raises Refused if its task would not be accepted here now."""
        found = known.get(claim.task_id) or self._admit_task(claim.spec)
        known[claim.task_id] = found
        group_id = claim.spec.group_id or claim.task_id
        return SessionOrder(
            identity=self.identity_of(claim, found.harness.name, found.harness.version),
            spec=claim.spec,
            harness=found.harness,
            evaluator=found.evaluator,
            # The group's position at the stages is as old as the first of its sessions that are not over. A
            # group may be several tasks, and its name may come again.
            cohort=self._cohorts.setdefault(group_id, EntryCohort()),
        )

    def identity_of(self, claim: Claim, harness: str | None = None, version: str | None = None) -> Identity:
        """The identity of a claim's session. `harness` is the harness that runs it, if that differs from the
        one that its task names.
        """
        return Identity(
            session_id=claim.session_id,
            task_id=claim.task_id,
            group_id=claim.spec.group_id or claim.task_id,
            sample_index=claim.sample_index,
            harness=harness or claim.spec.harness.name,
            harness_version=version,
            model=self.services.identity.model,
            node=self.services.identity.node,
            attempt=claim.attempt,
            forked_from=requested_fork(claim.spec),
        )

    def check(self, spec: TaskSpec) -> None:
        """Raise Refused when a part that a task names is not available or does not accept its settings, or
        when the node is stopping.
        """
        if self.registry.stopping:
            raise Refused("this node is stopping and takes no new tasks: use another node, or retry later")
        self._admit_task(spec)

    def _admit_task(self, spec: TaskSpec) -> AdmittedTask:
        services = self.services
        services.check_labels(spec.requires)
        services.check_adapter(spec.adapter)
        services.check_teacher(spec.carry)
        found = admitted(
            spec,
            model=services.identity.model,
            context_length=services.context_length,
            allowed_imports=services.allowed_imports,
            unrouted=services.unrouted,
            judges=services.judges,
            volumes=services.volumes,
            egress=services.egress.names,
        )
        if spec.group.fork is not None:
            tree_way(spec, found.harness)  # This refuses a task whose forks cannot be resumed.
        return found

    # ── ends ──────────────────────────────────────────────────────────────────

    async def _on_session_end(self, end: SessionEnd) -> None:
        """Settle the place of a session that is over: its sample is over, or another attempt takes the
        place.
        """
        claim = self.registry.results.claim_of(end.identity.session_id)
        session = self.registry.get(Session, end.identity.session_id)
        if session is not None and session.elsewhere and claim is not None and end.cancelled is None:
            place = (claim.task_id, claim.sample_index)
            self._avoided_places[place] = trio.current_time() + AVOID_PLACE_S
            with self.registry.results.patience():
                await self.registry.results.put_back(end.trajectory, counts=False, keep=False)
            self._wake()
            return
        if session is not None and claim is not None and end.cancelled is None:
            outcome = end.trajectory.outcome
            wrong = went_wrong(session.identity, session.live, outcome)  # This costs no retry.
            again = lost_to_the_machine(outcome) and has_retries_left(claim.retries, session.task.budgets)
            if wrong or again:
                await self.replace(end.trajectory, counts=not wrong)
                self._wake()
                return
        if end.cancelled == "stopped" and claim is not None and self.log.shared:
            await self._give_away(end.trajectory)
            return
        self.registry.end(end)
        if claim is not None:
            self._stop_siblings(claim, end.trajectory)
        if session is not None:
            self._list_ended(session_status(session, end.trajectory))
        self._wake()

    def _stop_siblings(self, claim: Claim, ended: Trajectory) -> None:
        """End the other sessions of a group that has enough with this session, at a node alone. Nodes that
        share a log learn this from the log, which decides which sessions have their places.
        """
        policy = claim.spec.group
        if self.log.shared or policy.early_stop_min is None:
            return
        self._usable[claim.task_id] += make_member(policy, facts_of(ended)).usable
        if self._group_has_enough(claim):
            for driver in self.registry.of_task(claim.task_id):
                if driver.identity.session_id != ended.session_id:
                    driver.cancel(EARLY_STOP_REASON)

    def _group_has_enough(self, claim: Claim) -> bool:
        enough = claim.spec.group.early_stop_min
        return enough is not None and self._usable[claim.task_id] >= enough

    async def replace(self, lost: Trajectory, *, counts: bool) -> bool:
        """Publish a session that the machine lost as an attempt, outside its group, and begin the next
        attempt here. Returns False if its place is to be ended instead.
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
        self._claims_uncertain = (
            self._claims_uncertain or kept is None
        )  # The answer that gave the place may have been lost.
        self.services.tally.lost(lost.outcome)
        again = "is not tried again" if kept is None else f"is tried again as {kept.session_id}"
        logger.warning("session %s is lost (%s) and %s", lost.session_id, lost.outcome.reason, again)
        if kept is not None:
            self.begin(kept)
        return kept is not None

    async def _give_away(self, stopped: Trajectory) -> None:
        """Publish a session that was ended by its node's stop as an attempt. Another node gets its place, and
        no retry is spent. If the log is away, it is told at the node's next start; before that it concludes
        the same from this node's silence.
        """
        results = self.registry.results
        with trio.move_on_after(STOP_WAIT_S) as scope:
            await results.put_back(stopped, counts=False, keep=False)
        again = "when the log answers" if scope.cancelled_caught else "now"
        logger.info("session %s is given back: another node may run it %s", stopped.session_id, again)

    async def count_filled_place(self, claim: Claim, ended: EndedSession, answer: FinishAnswer) -> None:
        """Count a sample whose place the log has now filled, and with the last sample its group."""
        if answer == "already":
            return
        policy = claim.spec.group
        self.services.tally.place(make_member(policy, ended.facts))
        if claim.spec.harness.name == CAPTURE_HARNESS:  # Nobody asked for groups of captures.
            return
        filled = self._filled.get(claim.task_id, {})
        filled[claim.sample_index] = evolve(ended.facts, outcome=evolve(ended.outcome, log_tail=None))
        remember(self._filled, claim.task_id, filled, most=MAX_OPEN_GROUPS)
        if answer == "now":
            return
        await trio.lowlevel.checkpoint()  # Samples that were written with this one are counted first.
        self._usable.pop(claim.task_id, None)
        self._filled.pop(claim.task_id, None)
        facts: Iterable[SessionFacts] = filled.values()
        if len(filled) < claim.spec.num_samples:  # The others ended at another node or in an earlier run.
            facts = await self.registry.results.told(partial(self.log.finished_places, claim.task_id))
        group = judged(policy, facts, task_id=claim.task_id, group_id=ended.identity.group_id)
        self.services.tally.groups[group.state] += 1

    def _wake(self) -> None:
        self._room.set()

    def _on_phase_change(self, session: Session) -> None:
        if session.phase != "init":
            self._container_demand.served(session.identity.session_id, left=session.remaining_containers)

    def _list_ended(self, status: LiveSessionStatus) -> None:
        remember(self._ended, status.session_id, evolve(status, phase="ended"), most=MAX_ENDED_SESSIONS)

    # ── status ────────────────────────────────────────────────────────────────

    def sessions(self, task_id: str | None = None) -> tuple[LiveSessionStatus, ...]:
        """Live and recently ended sessions, oldest first."""
        ended = (status for status in self._ended.values() if task_id in (None, status.task_id))
        return (*ended, *map(session_status, self.registry.live(Session, task_id)))

    def statistics(self) -> SchedulerStatistics:
        """Stage depths and counts."""
        stages, live = self.services.stages, len(self.registry.live(Session))
        return SchedulerStatistics(
            stages={name: getattr(stages, name).statistics() for name in ("live", "init", "run", "post")},
            live=live,
            queued=max(0, self.log.open_places - live),
            ended=len(self._ended),
            retried=self.services.tally.replaced.total(),
            stopping=self.registry.stopping,
        )


def make_scheduler(
    log: Log,
    services: NodeServices,
    nursery: trio.Nursery,
    *,
    sessions_by_key: LiveSessions,
    now: Callable[[], float],
    most_claimed: int,
    warm: int,
    held: ResultStore | None = None,
    engines_ready: Callable[[], bool] = lambda: True,
) -> Scheduler:
    """The scheduler of a node with its registry and results. The caller runs `scheduler.run` and
    `scheduler.registry.results.run`.
    """

    async def on_filled(claim: Claim, ended: EndedSession, answer: FinishAnswer) -> None:
        await scheduler.count_filled_place(claim, ended, answer)

    results = SessionResults(log=log, now=now, on_filled=on_filled, held=held)
    scheduler = Scheduler(
        nursery=nursery,
        services=services,
        registry=SessionRegistry(services, results),
        sessions_by_key=sessions_by_key,
        log=log,
        now=now,
        most_claimed=most_claimed,
        warm=warm,
        engines_ready=engines_ready,
    )
    return scheduler


def _cancel_cause(cause: EndingCause) -> CancelCause:
    return EARLY_STOP_REASON if cause == "early stop" else "cancelled"
