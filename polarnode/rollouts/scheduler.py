"""The scheduler: claims places from the log, runs a session in each, and gives the log its end.

A task's places stand in the log, which says what runs next: a node alone claims from its own journal, and the
nodes of a fleet from the same PostgreSQL. A caller that waits for a task must count the samples of its group,
not its sessions, because one sample may take several attempts.

`recover` settles what earlier runs of this node held. Each place is settled by one call of the log, so a node
that is killed meanwhile finds the rest at its next start.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

import trio
from attrs import define, evolve, field, frozen

from polarnode.containers.pool import Demand
from polarnode.core.errors import Busy, Refused
from polarnode.core.labels import every_label, label_texts, one_model, unmet
from polarnode.core.status import LiveSessionStatus
from polarnode.core.task import CAPTURE, HarnessSpec, TaskSpec
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.gateway.live_sessions import LiveSessions
from polarnode.groups.fork_policy import fork_place
from polarnode.groups.group import (
    EARLY_STOP,
    Facts,
    facts_of,
    judged,
    lost_to_the_machine,
    member_of,
    stamped,
)
from polarnode.journal.held import HeldResults
from polarnode.journal.journal import Journal
from polarnode.journal.log.news import wait_events
from polarnode.journal.log.port import (
    RETRY_S,
    Claim,
    Ended,
    EndingCause,
    FinishAnswer,
    Log,
    LogAway,
    NodeFacts,
    Offer,
)
from polarnode.journal.values import UnfinishedSession
from polarnode.merge.token_extras import unscored
from polarnode.merge.trajectory import Identity, Result, asked_fork, assemble
from polarnode.rollouts.admission import Admitted, admitted
from polarnode.rollouts.continuing import went_wrong
from polarnode.rollouts.lifecycle import (
    CancelCause,
    SessionEnd,
    SessionRegistry,
    pause_before,
    retries_left,
)
from polarnode.rollouts.results import LAST_S, Results
from polarnode.rollouts.services import NodeServices, SessionOrder
from polarnode.rollouts.session import Session
from polarnode.rollouts.trees import tree_way
from polarnode.support.bounded import remember
from polarnode.support.concurrency import SemaphoreStatistics
from polarnode.support.ids import new_id
from polarnode.support.waiting_line import Cohort

logger = logging.getLogger(__name__)

KEPT_IMAGES: Final = 32  # of recent tasks: a node keeps about so many prepared workspaces
KEPT_ENDED: Final = 10_000  # ended sessions that status still lists: about 1 kB each
KEPT_GROUPS: Final = 1_000  # that are not over: of others the log is asked
ENDINGS_AT_ONCE: Final = 64  # places that are ended without a run, between two looks at the rest
# that a node takes no place of a fork that must begin at another one, which is told when it is given back
AVOIDED_S: Final = 10.0
LOOK_S: Final = 5.0  # between looks at the log where nothing wakes: a lost notification costs no more
# A node beside others claims an eighth of its room at a time and pauses: a notification of new places reaches
# the other nodes within some milliseconds, a busy one within tens, and a node still fills in a second.
SHARES: Final = 8
SHARE_S: Final = 0.1


@frozen(kw_only=True)
class SchedulerStatistics:
    """The stages and the counts of sessions. `live` ones are claimed and not over, `queued` places wait for a
    node; `retried` sessions were followed by another attempt and are not counted as `ended`.
    """

    stages: Mapping[str, SemaphoreStatistics]
    live: int
    queued: int
    ended: int
    retried: int
    stopping: bool


def session_status(session: Session, published: Trajectory | None = None) -> LiveSessionStatus:
    """The status of a live session, or of one that is over with its `trajectory`."""
    identity, counters = session.identity, session.live.counters
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
    """Runs the sessions of tasks. `most_claimed`: sessions that are claimed and not over, at most; those
    beyond the slots of the first stage are the next ones, whose containers are made ahead. `warm` is the most
    warm containers kept per shape.
    """

    nursery: trio.Nursery
    services: NodeServices
    registry: SessionRegistry
    sessions_by_key: LiveSessions
    log: Log
    now: Callable[[], float]  # seconds since the epoch
    most_claimed: int
    warm: int
    # whether some engine host answers: places of a shared log are left to nodes whose engines do
    engines_ready: Callable[[], bool] = lambda: True
    draining: bool = field(default=False, init=False)  # it takes no new tasks; what runs goes on
    facts: NodeFacts = field(factory=lambda: NodeFacts(name=""), init=False)  # what it joined the log with
    incarnation: int = field(default=0, init=False)
    # another process of this node's name joined the log after it: nothing new begins here any more
    replaced: bool = field(default=False, init=False)
    _demand: Demand = field(init=False)
    _ended: dict[str, LiveSessionStatus] = field(factory=dict, init=False)
    _images: dict[str, None] = field(factory=dict, init=False)
    _cohorts: "WeakValueDictionary[str, Cohort]" = field(factory=WeakValueDictionary, init=False)
    # places whose forks must begin at another node, until when this one takes none of them
    _avoided: dict[tuple[str, int], float] = field(factory=dict, init=False)
    _unsure: bool = field(default=False, init=False)  # an answer that gave a place may have been lost
    settling: set[str] = field(factory=set, init=False)  # sessions of earlier runs that `recover` settles
    # places whose next attempt the log is asked for now
    _replacing: set[tuple[str, int]] = field(factory=set, init=False)
    _share_taken: bool = field(default=False, init=False)  # and there may be more for this node
    _strays: list[Claim] = field(factory=list, init=False)  # that this node holds and does not run
    # of groups that stop early, by task: the usable sessions that ended here
    _usable: "Counter[str]" = field(factory=Counter, init=False)
    # by task, what its group is judged by of the samples that ended here
    _filled: dict[str, dict[int, Facts]] = field(factory=dict, init=False)
    _room: trio.Event = field(factory=trio.Event, init=False)  # set when a session is over

    @_demand.default
    def _make_demand(self) -> Demand:
        return Demand(self.services.runtimes.prewarm, self.warm)

    # ── tasks ─────────────────────────────────────────────────────────────────

    async def submit(
        self,
        spec: TaskSpec,
        *,
        idempotency_key: str | None = None,
        callback_kinds: Sequence[str] = (),
    ) -> tuple[str, tuple[str, ...]]:
        """Accept a task and return (task_id, session_ids) once the log has it. Raises Refused, and Busy where
        only nodes that are away could run it.
        """
        here = not self.log.shared or (self.most_claimed > 0 and self._unmet(spec) is None)
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

    def _unmet(self, spec: TaskSpec) -> str | None:
        here = self.services.identity
        return unmet(spec.requires, every_label(here.labels, node=here.node, model=here.model))

    async def _check_nodes(self, spec: TaskSpec, *, here: bool) -> str:
        """The model that the task is for: nodes of another, which may come later, are to leave it. Raises
        Refused for a task that nodes of several models could run, or none of the log, which knows nodes for a
        day; Busy where those that could are away. `here`: this one could. What else it needs is checked by
        the node that begins it.
        """
        rows = await self.log.nodes()
        able = [row for row in rows if unmet(spec.requires, row.facts.labels) is None]
        model = one_model(spec.requires, (row.facts.labels for row in able if "" in row.serving))
        if here or able or self._unmet(spec) is None:
            return model
        away = sorted(
            row.facts.name
            for row in await self.log.nodes(every=True)
            if row.state in ("lost", "left") and unmet(spec.requires, row.facts.labels) is None
        )
        if away:
            raise Busy(
                f"only nodes that are away have the labels that requires names: {', '.join(away)}",
                retry_after=RETRY_S,
            )
        there = "; ".join(f"{row.facts.name} has {label_texts(row.facts.labels)}" for row in rows)
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

    async def place_over(self, task_id: str, sample_index: int) -> Facts | None:
        """Wait until a sample of a task is over, at whichever node; None if its end could not be written."""
        while (task_id, sample_index) not in self.registry.results.unwritten:
            seen = self.log.event_news
            # while the log is away no session ends because of it
            over = await self.registry.results.told(lambda: self.log.places_over(task_id))
            for facts in over:
                if facts.sample_index == sample_index:
                    return facts
            await wait_events(self.log, seen, LOOK_S)
        return None

    # ── claims ────────────────────────────────────────────────────────────────

    async def join(self, facts: NodeFacts) -> tuple[Claim, ...]:
        """Begin this node's incarnation in the log. Gives what earlier ones of its name held."""
        self.facts = facts
        joined = await self.registry.results.told(lambda: self.log.join(facts))
        self.incarnation = self.registry.results.incarnation = joined.incarnation
        return joined.inherited

    async def renew_certificate(self, certificate: str) -> None:
        """Tell the other nodes that this one shows another certificate."""
        self.facts = evolve(self.facts, certificate=certificate)  # also where it joins again
        await self.log.renew_certificate(self.incarnation, certificate)

    async def run(self, ready: trio.Event) -> None:
        """Claim places and end what must be ended, until cancelled."""
        ready.set()
        away, results = False, self.registry.results
        while True:
            seen = self.log.place_news
            try:
                # whoever used the connections first may have met the new primary, so that none was lost here
                if away or (self.log.shared and results.is_another(self.log.standing.log)):
                    await results.tell_again()
                if self.log.lost and not self.replaced:
                    await self._join_again()
                await self._look()
                away = False
            except LogAway as error:
                self._unsure = True
                if not away:
                    logger.warning("%s; sessions go on, and nothing new begins", error)
                away = True
            if self._share_taken:
                await trio.sleep(SHARE_S)
            else:
                await self._wait_reason_to_look(seen)

    async def _join_again(self) -> None:
        """This node was declared lost: it was stopped for longer than its lease. What it ran goes on, and who
        ends a place first has it.
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
        for claim in inherited:  # all at once: a session that ends meanwhile is refused with its old claim
            if results.claim_of(claim.session_id) is not None:
                results.hold(claim)
            elif claim.session_id not in self.settling:
                self._strays.append(claim)

    async def _look(self) -> None:
        """Ask the log once for everything that it may have for this node."""
        while self._strays:
            await self.log.put_back(self._strays[-1], counts=False)
            self._strays.pop()
        if self._unsure:  # what it gave with an answer that was lost
            self._unsure = False
            for claim in await self.log.claims(self.incarnation):
                if self._is_unknown(claim):
                    self.begin(claim)
        for claim in await self.log.claim_endings(self.incarnation, ENDINGS_AT_ONCE):
            self._end_unrun(claim)
        for session_id, cause in (await self.log.to_stop(self.incarnation)).items():
            driver = self.registry.find(session_id)
            if driver is not None:
                driver.cancel(_cancel_cause(cause))
        await self._claim()

    async def _claim(self) -> None:
        """Take places for the room that there is: alone at once, and beside other nodes a share at a time, so
        that each gets its part of what comes. A node that is fuller than another lets it choose first.
        """
        live = len(self.registry.live(Session))
        room = self.most_claimed - live
        begins = room > 0 and self._begins()
        load = live / self.most_claimed if begins else None
        self.log.tell_load(load)
        self._share_taken = False
        if load is None:
            return
        least, share = self.log.least_load, room
        if least is not None:
            share = min(room, max(1, self.most_claimed // SHARES))
            if load > least:
                await trio.sleep(SHARE_S)
        known: dict[str, Admitted] = {}
        taken = await self.log.claim(self._offer(share))
        for claim in taken:
            self.begin(claim, known)
        if share < room and taken:
            # a group's members share a prompt: the rest of one that begins here is this node's too
            rest = self._offer(room - len(taken), begun_only=True)
            for claim in await self.log.claim(rest):
                self.begin(claim, known)
            self._share_taken = len(taken) == share

    def _is_unknown(self, claim: Claim) -> bool:
        """Whether nothing here runs a session of a claim, ends it, or will."""
        results = self.registry.results
        return (
            results.claim_of(claim.session_id) is None
            and claim.session_id not in self.settling
            and (claim.task_id, claim.sample_index) not in results.unwritten | self._replacing
            and claim.spec.harness.name != CAPTURE  # its caller takes it again
        )

    def _begins(self) -> bool:
        """Whether this node begins new sessions. One that is alone begins what it took, whatever happens."""
        if self.registry.stopping or self.replaced:
            return False
        return not self.log.shared or (self.engines_ready() and not self.draining)

    async def _wait_reason_to_look(self, seen: int) -> None:
        """Wait for more news of places than were seen, or for room here, or for LOOK_S."""

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

    def _offer(self, room: int, *, begun_only: bool = False) -> Offer:
        here, services, now = self.services.identity, self.services, trio.current_time()
        self._avoided = {place: until for place, until in self._avoided.items() if until > now}
        return Offer(
            incarnation=self.incarnation,
            room=room,
            begun_only=begun_only,
            labels=every_label(here.labels, node=here.node, model=here.model),
            images=tuple(self._images),
            serving=services.serving(),
            avoided=frozenset(self._avoided),
        )

    def begin(self, claim: Claim, known: dict[str, Admitted] | None = None) -> None:
        """Begin the session of a claim. What cannot be run here ends with an error, because nobody waits for
        an answer. `known`: by task, what was found of those that begin in the same moment.
        """
        if self._has_enough(claim):
            self._end_unrun(evolve(claim, ending="early stop"))
            return
        self.registry.results.hold(claim)
        try:
            order = self._order(claim, {} if known is None else known)
        except Refused as refused:
            reason = f"node {self.services.identity.node} cannot run it: {refused}"
            self._publish_unrun(claim, Outcome(status="error", boundary="node", reason=reason))
            return
        image = order.runtime.image
        self._images.pop(image, None)
        remember(self._images, image, None, most=KEPT_IMAGES)
        self.services.journal.session_started(order.identity)
        # a tree's fork waits for a session, and needs no container before that is over
        if fork_place(order.spec, order.identity.sample_index) is None:
            self._demand.expect([order.identity.session_id], order.runtime, each=order.containers)
        session = Session(
            order=order,
            live=self.registry.open(order.identity, order.spec, calls_first=order.harness.calls_first),
            services=self.services,
            delay_s=pause_before(claim.retries),  # give a transient fault time to pass
            place_over=self.place_over,
            on_phase=self._phase_changed,
            on_unpublished=lambda lost: self._list_ended(evolve(session_status(lost), outcome="error")),
        )
        self.registry.start(
            session, nursery=self.nursery, sessions_by_key=self.sessions_by_key, on_end=self._session_over
        )

    def _end_unrun(self, claim: Claim) -> None:
        """End a place that nobody runs and nobody should."""
        self.registry.results.hold(claim)
        if claim.ending == "retries spent":
            reason = "its node was lost, once more than budgets.retries allows"
            self._publish_unrun(claim, Outcome(status="error", boundary="node", reason=reason))
        else:
            why = EARLY_STOP if claim.ending == "early stop" else "cancelled"
            self._publish_unrun(claim, Outcome(status="cancelled", reason=f"{why} before it began"))

    def _publish_unrun(self, claim: Claim, outcome: Outcome) -> None:
        identity = self.identity_of(claim)
        found = assemble(identity, claim.spec, (), Result(outcome=outcome))
        found = stamped(found, self.services.versions_of(claim.spec.adapter))
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

    def _order(self, claim: Claim, known: dict[str, Admitted]) -> SessionOrder:
        """The order of a claim's session. Raises Refused if its task would not be accepted here now."""
        found = known.get(claim.task_id) or self._admitted(claim.spec)
        known[claim.task_id] = found
        group_id = claim.spec.group_id or claim.task_id
        return SessionOrder(
            identity=self.identity_of(claim, found.harness.name, found.harness.version),
            spec=claim.spec,
            harness=found.harness,
            evaluator=found.evaluator,
            # a group's place at the stages, as old as the first of its sessions that are not over: a group
            # may be several tasks, and its name may come again
            cohort=self._cohorts.setdefault(group_id, Cohort()),
        )

    def identity_of(self, claim: Claim, harness: str | None = None, version: str | None = None) -> Identity:
        """The identity of a claim's session. `harness`: the one that runs it, where it differs from the one
        that its task names.
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
            forked_from=asked_fork(claim.spec),
        )

    def check(self, spec: TaskSpec) -> None:
        """Raise Refused when a part that a task names is not available or does not accept its settings, or
        when the node is stopping.
        """
        if self.registry.stopping:
            raise Refused("this node is stopping and takes no new tasks: use another node, or retry later")
        self._admitted(spec)

    def _admitted(self, spec: TaskSpec) -> Admitted:
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
            tree_way(spec, found.harness)  # refuses what cannot be resumed
        return found

    # ── ends ──────────────────────────────────────────────────────────────────

    async def _session_over(self, end: SessionEnd) -> None:
        """A session is over: its sample is over, or another attempt takes its place."""
        claim = self.registry.results.claim_of(end.identity.session_id)
        session = self.registry.get(Session, end.identity.session_id)
        if session is not None and session.elsewhere and claim is not None and end.cancelled is None:
            place = (claim.task_id, claim.sample_index)
            self._avoided[place] = trio.current_time() + AVOIDED_S
            with self.registry.results.patience():
                await self.registry.results.put_back(end.trajectory, counts=False, keep=False)
            self._wake()
            return
        if session is not None and claim is not None and end.cancelled is None:
            outcome = end.trajectory.outcome
            wrong = went_wrong(session.identity, session.live, outcome)  # it costs no retry
            again = lost_to_the_machine(outcome) and retries_left(claim.retries, session.task.budgets)
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
        """End at once what a node alone runs, or would begin, of a group that has enough with this session.
        Nodes that share a log hear of it from there, which says whose sessions have their places.
        """
        policy = claim.spec.group
        if self.log.shared or policy.early_stop_min is None:
            return
        self._usable[claim.task_id] += member_of(policy, facts_of(ended)).usable
        if self._has_enough(claim):
            for driver in self.registry.of_task(claim.task_id):
                if driver.identity.session_id != ended.session_id:
                    driver.cancel(EARLY_STOP)

    def _has_enough(self, claim: Claim) -> bool:
        enough = claim.spec.group.early_stop_min
        return enough is not None and self._usable[claim.task_id] >= enough

    async def replace(self, lost: Trajectory, *, counts: bool) -> bool:
        """Publish a session that the machine lost outside its group, and begin the next attempt here. False
        where its place is to be ended instead.
        """
        keep = not (self.registry.stopping and self.log.shared)
        kept: Claim | None = None
        place = (lost.task_id, lost.sample_index)
        self._replacing.add(place)
        try:
            with self.registry.results.patience():
                kept = await self.registry.results.put_back(lost, counts=counts, keep=keep)
        finally:
            self._replacing.discard(place)
        self._unsure = self._unsure or kept is None  # the answer that gave it may have been lost
        self.services.tally.lost(lost.outcome)
        again = "is not tried again" if kept is None else f"is tried again as {kept.session_id}"
        logger.warning("session %s is lost (%s) and %s", lost.session_id, lost.outcome.reason, again)
        if kept is not None:
            self.begin(kept)
        return kept is not None

    async def _give_away(self, stopped: Trajectory) -> None:
        """Publish a session that its node's stop ended as an attempt. Another node has its place, and no
        retry is spent. A log that is away hears of it at the next start, and by this node's silence before.
        """
        results = self.registry.results
        with trio.move_on_after(LAST_S) as scope:
            await results.put_back(stopped, counts=False, keep=False)
        again = "when the log answers" if scope.cancelled_caught else "now"
        logger.info("session %s is given back: another node may run it %s", stopped.session_id, again)

    async def note_filled(self, claim: Claim, ended: Ended, answer: FinishAnswer) -> None:
        """Count a sample that has its place in the log now, and its group with the last one."""
        if answer == "already":
            return
        policy = claim.spec.group
        self.services.tally.place(member_of(policy, ended.facts))
        if claim.spec.harness.name == CAPTURE:  # whose groups nobody asked for
            return
        filled = self._filled.get(claim.task_id, {})
        filled[claim.sample_index] = evolve(ended.facts, outcome=evolve(ended.outcome, log_tail=None))
        remember(self._filled, claim.task_id, filled, most=KEPT_GROUPS)
        if answer == "now":
            return
        await trio.lowlevel.checkpoint()  # for those that were written with it
        self._usable.pop(claim.task_id, None)
        self._filled.pop(claim.task_id, None)
        facts: Iterable[Facts] = filled.values()
        if len(filled) < claim.spec.num_samples:  # others ended at another node, or in an earlier run
            facts = await self.registry.results.told(partial(self.log.places_over, claim.task_id))
        group = judged(policy, facts, task_id=claim.task_id, group_id=ended.identity.group_id)
        self.services.tally.groups[group.state] += 1

    def _wake(self) -> None:
        self._room.set()

    def _phase_changed(self, session: Session) -> None:
        if session.phase != "init":
            self._demand.served(session.identity.session_id, left=session.to_come)

    def _list_ended(self, status: LiveSessionStatus) -> None:
        remember(self._ended, status.session_id, evolve(status, phase="ended"), most=KEPT_ENDED)

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
    held: HeldResults | None = None,
    engines_ready: Callable[[], bool] = lambda: True,
) -> Scheduler:
    """The scheduler of a node with its registry and results. The caller runs `scheduler.run` and
    `scheduler.registry.results.run`.
    """

    async def on_filled(claim: Claim, ended: Ended, answer: FinishAnswer) -> None:
        await scheduler.note_filled(claim, ended, answer)

    results = Results(log=log, now=now, on_filled=on_filled, held=held)
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
    return EARLY_STOP if cause == "early stop" else "cancelled"


# ── what earlier runs of the node held ────────────────────────────────────────

Report = Callable[[str], None]


async def recover(journal: Journal, scheduler: Scheduler, facts: NodeFacts, report: Report) -> None:
    """Join the log, and settle the places that earlier runs of this node held: each session is published as a
    trajectory of the turns that were captured, and another attempt begins if retries are left.

    Where the journal is damaged nothing is settled: what it lacks would be lost for good.
    """
    if journal.damage is not None:
        report(f"{journal.damage}; sessions of an earlier run stay as they are until then")
        return
    results = scheduler.registry.results
    inherited = {claim.session_id: claim for claim in await scheduler.join(facts)}
    scheduler.settling.update(inherited)
    over = await results.restore(inherited)
    unfinished = {each.identity.session_id: each for each in await journal.unfinished()}
    again = 0
    for session_id in over:
        unfinished.pop(session_id, None)
        claim = inherited.pop(session_id, None)
        if claim is not None and results.claim_of(session_id) is not None:
            results.hold(claim)  # its result is on its way, and its place is held by this incarnation now
        elif claim is not None:
            await results.told(partial(scheduler.log.put_back, claim, counts=False))
    for claim in inherited.values():
        session = unfinished.pop(claim.session_id, None) or _without_turns(claim, scheduler)
        if scheduler.log.shared:  # which has the task
            session = evolve(session, spec=claim.spec)
        again += await _recovered(journal, scheduler, claim, session)
    scheduler.settling.clear()
    # another has its place, so what it left is an attempt; those that had not begun wait in the log's queue
    for session in (each for each in unfinished.values() if each.began):
        if scheduler.log.shared:
            task = await results.told(partial(scheduler.log.task, session.identity.task_id))
            session = evolve(session, spec=None if task is None else task.spec)
        results.publish(await journal.read(partial(_trajectory, session, scheduler.services.allowed_imports)))
    await results.delivered()
    if inherited:
        report(
            f"{len(inherited)} sessions of an earlier run were interrupted; their turns are kept, and"
            f" {again} of them are tried again"
        )


async def _recovered(
    journal: Journal, scheduler: Scheduler, claim: Claim, session: UnfinishedSession
) -> bool:
    """Settle one place; True if another attempt was started. Its traces are built in a thread, because
    attempts started earlier are already running.
    """
    scheduler.registry.results.hold(claim)
    lost = await journal.read(partial(_trajectory, session, scheduler.services.allowed_imports))
    # asked for late, because siblings end meanwhile
    stopped = await scheduler.registry.results.told(partial(scheduler.log.to_stop, scheduler.incarnation))
    ending = stopped.get(claim.session_id, claim.ending)
    if ending == "early stop" and lost.outcome.status == "interrupted":
        lost = evolve(
            lost, outcome=Outcome(status="cancelled", reason=f"{EARLY_STOP}, and {lost.outcome.reason}")
        )
    may_retry = ending is None and retries_left(claim.retries, claim.spec.budgets)
    if session.spec is not None and lost_to_the_machine(lost.outcome) and may_retry:
        try:
            scheduler.check(claim.spec)
        except Refused as refused:
            reason = f"{lost.outcome.reason}; it cannot be tried again here: {refused}"
            lost = evolve(lost, outcome=evolve(lost.outcome, reason=reason))
        else:
            return await scheduler.replace(lost, counts=True)
    adapter = "" if session.spec is None else session.spec.adapter
    scheduler.registry.publish(stamped(lost, scheduler.services.versions_of(adapter)))
    return False


def _without_turns(claim: Claim, scheduler: Scheduler) -> UnfinishedSession:
    """A session of which this node's journal has nothing: it is another one than the claim was made with."""
    identity = scheduler.identity_of(claim)
    return UnfinishedSession(
        identity=identity, spec=claim.spec, turns=(), cancelled=claim.ending == "cancelled"
    )


def _trajectory(session: UnfinishedSession, allowed_imports: tuple[str, ...]) -> Trajectory:
    # a capture is built like any other session
    spec = session.spec or TaskSpec(instruction="", harness=HarnessSpec(name=session.identity.harness))
    reason = f"the node ended while the session ran; {len(session.turns)} turns were captured"
    outcome = Outcome(status="interrupted", boundary="node", reason=reason)
    if session.cancelled:
        outcome = Outcome(status="cancelled", reason=f"cancelled, and {reason}")
    found = assemble(
        session.identity,
        spec,
        session.turns,
        Result(outcome=outcome),
        allowed_imports=allowed_imports,
        damaged=session.damaged,
    )
    # not scored now: the node starts, and may have hundreds of them
    why = "the node ended before its teacher had scored it; POST /v1/score takes its rows"
    return unscored(found, why) if spec.carry.teacher else found
