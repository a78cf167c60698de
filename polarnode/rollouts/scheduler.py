"""The scheduler: runs a session for each claimed place, and settles the place when its session is over.

`PlaceClaims` gives it the claims of places. A session that is over gives its sample to the log, or another
attempt takes its place. A caller that waits for a task must count the samples of its group, not its sessions,
because one sample may take several attempts.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from weakref import WeakValueDictionary

import trio
from attrs import define, evolve, field, frozen

from polarnode.containers.pool import RuntimeDemand
from polarnode.core.errors import Refused
from polarnode.core.status import LiveSessionStatus
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.gateway.live_sessions import LiveSessions
from polarnode.groups.fork_policy import fork_place
from polarnode.groups.group import EARLY_STOP_REASON, lost_to_the_machine, stamp_staleness
from polarnode.journal.held import ResultStore
from polarnode.journal.log.port import Claim, Log
from polarnode.merge.trajectory import Result, assemble
from polarnode.rollouts.admission import AdmittedTask, TaskAdmission
from polarnode.rollouts.claims import PlaceClaims
from polarnode.rollouts.forks import went_wrong
from polarnode.rollouts.group_progress import GroupProgress
from polarnode.rollouts.lifecycle import (
    LiveSessionFactory,
    SessionEnd,
    SessionRegistry,
    has_retries_left,
    no_versions,
    pause_before,
)
from polarnode.rollouts.membership import LogMembership
from polarnode.rollouts.results import SessionResults
from polarnode.rollouts.services import SessionOrder
from polarnode.rollouts.session import Session, SessionServices
from polarnode.support.bounded import remember
from polarnode.support.concurrency import SemaphoreStatistics
from polarnode.support.waiting_line import EntryCohort

logger = logging.getLogger(__name__)

MAX_ENDED_SESSIONS: Final = 10_000  # ended sessions that status still lists: about 1 kB each


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


@define(eq=False, kw_only=True)
class Scheduler:
    """Runs the sessions of claimed places. `container_demand` tells the pool which containers the next
    sessions need.
    """

    nursery: trio.Nursery
    log: Log
    now: Callable[[], float]  # seconds since the epoch
    admission: TaskAdmission
    claims: PlaceClaims
    groups: GroupProgress
    registry: SessionRegistry
    session_factory: LiveSessionFactory
    sessions_by_key: LiveSessions
    services: SessionServices
    container_demand: RuntimeDemand
    _cohorts: "WeakValueDictionary[str, EntryCohort]" = field(factory=WeakValueDictionary, init=False)
    _ended: dict[str, LiveSessionStatus] = field(factory=dict, init=False)

    # ── from a claim to its session ───────────────────────────────────────────

    def begin(self, claim: Claim, known: dict[str, AdmittedTask] | None = None) -> None:
        """Begin the session of a claim. A session that cannot run here ends with an error, because nobody
        waits for an answer. `known` maps tasks that begin in the same moment to their admitted parts.
        """
        if self.groups.has_enough(claim):
            self.end_without_run(evolve(claim, ending="early stop"))
            return
        self.registry.results.hold(claim)

        # 1. The task is admitted again, because this node may have other settings than the one that took it.
        known, here = {} if known is None else known, self.admission.identity
        try:
            parts = known.get(claim.task_id) or self.admission.admit(claim.spec)
        except Refused as refused:
            reason = f"node {here.node} cannot run it: {refused}"
            self._publish_without_run(claim, Outcome(status="error", boundary="node", reason=reason))
            return
        known[claim.task_id] = parts
        group_id = claim.spec.group_id or claim.task_id
        order = SessionOrder(
            identity=here.session_identity(claim, parts.harness.name, parts.harness.version),
            spec=claim.spec,
            harness=parts.harness,
            evaluator=parts.evaluator,
            # The group's position at the stages is as old as the first of its sessions that are not over. A
            # group may be several tasks, and its name may come again.
            cohort=self._cohorts.setdefault(group_id, EntryCohort()),
        )

        # 2. The journal, the other claims and the pool of containers learn of the session.
        self.claims.note_image(order.runtime.image)
        self.services.journal.record_session(order.identity)
        # The fork of a tree waits for its root's session, and needs no container before that one is over.
        if fork_place(order.spec, order.identity.sample_index) is None:
            self.container_demand.expect([order.identity.session_id], order.runtime, each=order.containers)

        # 3. The session runs in a task of its own, and its end comes to `_on_session_end`.
        session = Session(
            order=order,
            live=self.session_factory.open(order.identity, order.spec, calls_first=order.harness.calls_first),
            services=self.services,
            delay_s=pause_before(claim.retries),  # give a transient fault time to pass
            place_over=self.registry.results.place_over,
            on_phase=self._on_phase_change,
            on_unpublished=lambda lost: self._list_ended(evolve(session_status(lost), outcome="error")),
        )
        self.registry.start(
            session, nursery=self.nursery, sessions_by_key=self.sessions_by_key, on_end=self._on_session_end
        )

    def _on_phase_change(self, session: Session) -> None:
        if session.phase != "init":
            self.container_demand.served(session.identity.session_id, left=session.remaining_containers)

    def end_without_run(self, claim: Claim) -> None:
        """End a place that nobody runs and nobody should run."""
        self.registry.results.hold(claim)
        if claim.ending == "retries spent":
            reason = "its node was lost, once more than budgets.retries allows"
            self._publish_without_run(claim, Outcome(status="error", boundary="node", reason=reason))
        else:
            why = EARLY_STOP_REASON if claim.ending == "early stop" else "cancelled"
            self._publish_without_run(claim, Outcome(status="cancelled", reason=f"{why} before it began"))

    def _publish_without_run(self, claim: Claim, outcome: Outcome) -> None:
        identity = self.admission.identity.session_identity(claim)
        found = assemble(identity, claim.spec, (), Result(outcome=outcome))
        found = stamp_staleness(found, self.registry.served_versions(claim.spec.adapter))
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

    # ── what its end does ─────────────────────────────────────────────────────

    async def _on_session_end(self, end: SessionEnd) -> None:
        """Settle the place of a session that is over: its sample is over, or another attempt takes the
        place.
        """
        claim = self.registry.results.claim_of(end.identity.session_id)
        session = self.registry.get(Session, end.identity.session_id)
        if session is not None and claim is not None and end.cancelled is None:
            # 1. Another node has what the session needs, and gets its place.
            if session.elsewhere:
                await self.claims.leave_to_other_nodes(end.trajectory)
                self.claims.note_room()
                return

            # 2. The machine lost the session, or it could not go on from its state, which costs no retry.
            outcome = end.trajectory.outcome
            wrong = went_wrong(session.identity, session.live, outcome)
            again = lost_to_the_machine(outcome) and has_retries_left(claim.retries, session.task.budgets)
            if wrong or again:
                await self.replace(end.trajectory, counts=not wrong)
                self.claims.note_room()
                return

        # 3. This node stops, and another node of its log runs the place.
        if end.cancelled == "stopped" and claim is not None and self.log.shared:
            await self.claims.give_away(end.trajectory)
            return

        # 4. The sample is over.
        self.registry.end(end)
        if claim is not None:
            self._stop_siblings(claim, end.trajectory)
        if session is not None:
            self._list_ended(session_status(session, end.trajectory))
        self.claims.note_room()

    async def replace(self, lost: Trajectory, *, counts: bool) -> bool:
        """Publish a session that the machine lost as an attempt, outside its group, and begin the next
        attempt here. Returns False if its place is to be ended instead.
        """
        kept = await self.claims.keep_for_next_attempt(lost, counts=counts)
        self.registry.tally.lost(lost.outcome)
        again = "is not tried again" if kept is None else f"is tried again as {kept.session_id}"
        logger.warning("session %s is lost (%s) and %s", lost.session_id, lost.outcome.reason, again)
        if kept is not None:
            self.begin(kept)
        return kept is not None

    def _stop_siblings(self, claim: Claim, ended: Trajectory) -> None:
        """End the other sessions of a group that has enough with this session, at a node alone. Nodes that
        share a log learn this from the log, which decides which sessions have their places.
        """
        if self.log.shared or claim.spec.group.early_stop_min is None:
            return
        self.groups.count_session(claim, ended)
        if self.groups.has_enough(claim):
            for driver in self.registry.of_task(claim.task_id):
                if driver.identity.session_id != ended.session_id:
                    driver.cancel(EARLY_STOP_REASON)

    # ── cancelling ────────────────────────────────────────────────────────────

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
            retried=self.registry.tally.replaced.total(),
            stopping=self.registry.stopping,
        )

    def _list_ended(self, status: LiveSessionStatus) -> None:
        remember(self._ended, status.session_id, evolve(status, phase="ended"), most=MAX_ENDED_SESSIONS)


def make_scheduler(
    log: Log,
    nursery: trio.Nursery,
    *,
    admission: TaskAdmission,
    services: SessionServices,
    session_factory: LiveSessionFactory,
    sessions_by_key: LiveSessions,
    now: Callable[[], float],
    most_claimed: int,
    warm: int,
    served_versions: Callable[[str], Sequence[str]] = no_versions,
    serving: Callable[[], Mapping[str, str]] = dict,
    engines_ready: Callable[[], bool] = lambda: True,
    held: ResultStore | None = None,
) -> Scheduler:
    """The scheduler of a node with the claims, the registry and the results that it works with. At most
    `warm` containers of each shape are kept warm. The caller runs `scheduler.registry.results.run`, and
    `scheduler.claims.run` with the scheduler.
    """
    membership, groups = LogMembership(log), GroupProgress(log, session_factory.tally)
    results = SessionResults(
        log=log, membership=membership, now=now, on_filled=groups.count_filled_place, held=held
    )
    registry = SessionRegistry(
        results=results,
        places=services.places,
        tally=session_factory.tally,
        adapters=admission.adapters,
        scoring=admission.scoring,
        allowed_imports=admission.allowed_imports,
        served_versions=served_versions,
    )
    claims = PlaceClaims(
        log=log,
        membership=membership,
        registry=registry,
        identity=admission.identity,
        most_claimed=most_claimed,
        serving=serving,
        engines_ready=engines_ready,
    )
    return Scheduler(
        nursery=nursery,
        log=log,
        now=now,
        admission=admission,
        claims=claims,
        groups=groups,
        registry=registry,
        session_factory=session_factory,
        sessions_by_key=sessions_by_key,
        services=services,
        container_demand=RuntimeDemand(services.containers.runtimes.prewarm, warm),
    )
