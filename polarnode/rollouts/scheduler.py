"""The scheduler: starts the sessions of tasks, and another attempt for each session that the machine lost.

The node passes it the sessions' nursery, so that a session outlives the request that submitted it. Submission
is synchronous: a task is accepted whole or not at all. A caller that waits for a task must count the samples
of its group, not its sessions, because one sample may take several attempts.

`recover` settles the sessions that were running when an earlier run of this node ended. The journal alone
decides which they are. Each is settled in one entry, so a node killed during recovery resumes there.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any
from weakref import WeakValueDictionary

import trio
from attrs import define, evolve, field, frozen

from polarnode.containers.pool import Demand
from polarnode.core.errors import Refused
from polarnode.core.fleet import TaskCopy
from polarnode.core.status import LiveSessionStatus
from polarnode.core.task import HarnessSpec, TaskSpec
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.gateway.live_sessions import LiveSessions
from polarnode.groups.fork_policy import fork_place
from polarnode.groups.group import EARLY_STOP, lost_to_the_machine, stamped
from polarnode.journal.copies import held_sessions
from polarnode.journal.journal import Journal
from polarnode.journal.values import UnfinishedSession
from polarnode.merge.token_extras import unscored
from polarnode.merge.trajectory import Identity, Result, asked_fork, assemble
from polarnode.rollouts.admission import Admitted, admitted
from polarnode.rollouts.continuing import went_wrong
from polarnode.rollouts.lifecycle import (
    SESSION_ID_BYTES,
    Homes,
    SessionEnd,
    SessionRegistry,
    new_session_id,
    pause_before,
    retries_left,
    successor,
)
from polarnode.rollouts.services import NodeServices, SessionOrder
from polarnode.rollouts.session import Session
from polarnode.rollouts.trees import tree_way
from polarnode.support.bounded import remember
from polarnode.support.concurrency import SemaphoreStatistics
from polarnode.support.waiting_line import Cohort

logger = logging.getLogger(__name__)

KEPT_IMAGES = 32  # of recent tasks: a node keeps about so many prepared workspaces
NODE_ENDS = 8  # sessions of a fleet's place that its node may end with it: a task that ends nodes stops there
WEIGHT = 0.05  # of a session's seconds in the average: about the last twenty count
COUNTED_S = 1.0  # between counts of live sessions by priority: 2 ms for 20,000, and loads are 2 s old anyway
KEPT_ENDED = 10_000  # ended sessions that status still lists: about 1 kB each


@frozen(kw_only=True)
class SchedulerStatistics:
    """The stages and the counts of sessions. `retried` sessions were followed by another attempt and are not
    counted as `ended`.
    """

    stages: Mapping[str, SemaphoreStatistics]
    live: int
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
    """Accepts tasks and runs their sessions. `warm` is the most warm containers kept per shape."""

    nursery: trio.Nursery
    services: NodeServices
    registry: SessionRegistry
    sessions_by_key: LiveSessions
    warm: int
    _demand: Demand = field(init=False)
    _ended: dict[str, LiveSessionStatus] = field(factory=dict, init=False)
    session_s: float = field(default=0.0, init=False)  # moving average of sessions that ended
    _images: dict[str, None] = field(factory=dict, init=False)
    _cohorts: "WeakValueDictionary[str, Cohort]" = field(factory=WeakValueDictionary, init=False)
    _by_priority: tuple[float, Mapping[str, int]] = field(default=(-inf, {}), init=False)  # and when

    @_demand.default
    def _make_demand(self) -> Demand:
        return Demand(self.services.runtimes.prewarm, self.warm)

    # ── tasks ─────────────────────────────────────────────────────────────────

    def submit(
        self, spec: TaskSpec, *, idempotency_key: str | None = None, copy: TaskCopy | None = None
    ) -> tuple[str, tuple[str, ...]]:
        """Accept a task, of a fleet with its `copy`, and return (task_id, session_ids). Raises Refused when a
        part that it names is not available or does not accept its settings, or when the node is stopping.
        """
        if self.registry.stopping:
            raise Refused("this node is stopping and takes no new tasks: use another node, or retry later")
        task_id = spec.task_id or f"task-{secrets.token_hex(SESSION_ID_BYTES)}"
        orders = self._orders(spec, task_id, {index: new_session_id() for index in range(spec.num_samples)})
        session_ids = tuple(order.identity.session_id for order in orders)
        whose: dict[str, Any] = {"task_id": task_id, "session_ids": session_ids}
        whose |= {} if copy is None else {"copy": copy}
        self.services.journal.task_submitted(spec, idempotency_key=idempotency_key, **whose)
        self.registry.groups.begin(task_id, spec)
        self._begin(orders)
        return task_id, session_ids

    def adopt(self, spec: TaskSpec, task_id: str, places: Mapping[int, str]) -> None:
        """Begin these sessions, by place, of a task that the journal has and another node began. What cannot
        be run here ends with an error, because nobody waits for an answer.
        """
        try:
            self._begin(self._orders(spec, task_id, places))
        except Refused as refused:
            reason = f"the task's node is gone, and this one cannot run it: {refused}"
            for index, session_id in places.items():
                identity = self._identity(spec, task_id, index, session_id, HarnessSpec().name, None)
                outcome = Outcome(status="error", boundary="node", reason=reason)
                self.registry.publish(assemble(identity, spec, (), Result(outcome=outcome)))

    @property
    def recent_images(self) -> tuple[str, ...]:
        """The images of recent tasks, whose workspaces are likely to be prepared here."""
        return tuple(self._images)

    def _begin(self, orders: Sequence[SessionOrder]) -> None:
        for order in orders[:1]:
            self._images.pop(order.runtime.image, None)
            remember(self._images, order.runtime.image, None, most=KEPT_IMAGES)
        for order in orders:
            self.services.journal.session_started(order.identity)
        self._expect(orders)
        for order in orders:
            self._start(order)

    def _expect(self, orders: Sequence[SessionOrder]) -> None:
        """Warm containers for sessions of one task, but not for a tree's forks, which wait for a session."""
        ids = [
            order.identity.session_id
            for order in orders
            if fork_place(order.spec, order.identity.sample_index) is None
        ]
        if ids:
            self._demand.expect(ids, orders[0].runtime, each=orders[0].containers)

    def _orders(
        self, spec: TaskSpec, task_id: str, session_ids: Mapping[int, str]
    ) -> tuple[SessionOrder, ...]:
        found = self._admitted(spec)
        name, version = found.harness.name, found.harness.version
        cohort = self._cohort(spec.group_id or task_id)
        return tuple(
            SessionOrder(
                identity=self._identity(spec, task_id, index, session_id, name, version),
                spec=spec,
                harness=found.harness,
                evaluator=found.evaluator,
                first_attempt=self.registry.homes.first_attempt(task_id),
                cohort=cohort,
            )
            for index, session_id in session_ids.items()
        )

    def _cohort(self, group_id: str) -> Cohort:
        """A group's place at the stages, as old as the first of its sessions that are not over: a group may
        be several tasks, and its name may come again.
        """
        return self._cohorts.setdefault(group_id, Cohort())

    def _identity(
        self,
        spec: TaskSpec,
        task_id: str,
        index: int,
        session_id: str,
        harness: str,
        version: str | None,
    ) -> Identity:
        return Identity(
            session_id=session_id,
            task_id=task_id,
            group_id=spec.group_id or task_id,
            sample_index=index,
            harness=harness,
            harness_version=version,
            model=self.services.identity.model,
            node=self.services.identity.node,
            attempt=self.registry.homes.first_attempt(task_id),
            forked_from=asked_fork(spec),
        )

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

    def cancel(self, task_id: str) -> bool:
        """Cancel a task's sessions. Each keeps its turns, and none is retried, even after a restart. False
        when none is live.
        """
        sessions = self.registry.live(Session, task_id)
        if sessions:
            self.services.journal.task_cancelled(task_id)
        for session in sessions:
            session.cancel("cancelled")
        return bool(sessions)

    def cancel_session(self, session_id: str) -> bool:
        """Cancel one of a task's sessions; it keeps its turns. False when it is not live."""
        session = self.registry.get(Session, session_id)
        if session is not None:
            session.cancel("cancelled")
        return session is not None

    # ── sessions that the machine lost ────────────────────────────────────────

    def order_of(self, spec: TaskSpec, identity: Identity) -> SessionOrder:
        """Make the order of a session of an earlier run of the node again. Raises Refused if its task would
        not be accepted now.
        """
        found = self._admitted(spec)
        node = self.services.identity
        today = evolve(
            identity,
            harness=found.harness.name,
            harness_version=found.harness.version,
            model=node.model,
            node=node.node,
        )
        return SessionOrder(
            identity=today,
            spec=spec,
            harness=found.harness,
            evaluator=found.evaluator,
            first_attempt=self.registry.homes.first_attempt(identity.task_id),
            cohort=self._cohort(identity.group_id),
        )

    def replace(self, lost: Trajectory, order: SessionOrder) -> None:
        """Publish a session that the machine lost outside its group, and start the next attempt. `order` is
        the lost session's.
        """
        fresh = evolve(order, identity=successor(order.identity, new_session_id()))
        self.services.journal.replaced(evolve(lost, retried_as=fresh.identity.session_id), fresh.identity)
        self.services.tally.lost(lost.outcome)
        logger.warning(
            "session %s is lost (%s) and tried again as %s",
            lost.session_id,
            lost.outcome.reason,
            fresh.identity.session_id,
        )
        self._expect((fresh,))
        self._start(fresh)

    def recovered(self, trajectory: Trajectory, adapter: str) -> None:
        """Publish a session of an earlier run of the node. Its sample is over."""
        self.registry.publish(stamped(trajectory, self.services.versions_of(adapter)))

    # ── sessions ──────────────────────────────────────────────────────────────

    def _start(self, order: SessionOrder) -> None:
        session = Session(
            order=order,
            live=self.registry.open(order.identity, order.spec, calls_first=order.harness.calls_first),
            services=self.services,
            delay_s=pause_before(order.retries),  # give a transient fault time to pass
            place_over=self.registry.groups.place_over,
            on_phase=self._phase_changed,
            on_unpublished=lambda lost: self._list_ended(evolve(session_status(lost), outcome="error")),
        )
        self.registry.start(
            session, nursery=self.nursery, sessions_by_key=self.sessions_by_key, on_end=self._session_over
        )

    def _session_over(self, end: SessionEnd) -> None:
        """Publish a session that is over: its sample is over, or another attempt takes its place."""
        timing = end.trajectory.timing
        seconds = timing.init_s + timing.run_s + timing.post_s  # without what it waited for others
        self.session_s += (seconds - self.session_s) * (WEIGHT if self.session_s else 1.0)
        session_id = end.identity.session_id
        session = self.registry.get(Session, session_id)
        if self._goes_on(end):
            return  # unfinished in the journal, for who goes on with the task
        if session is not None and not end.cancelled and not self.registry.homes.moved(end.identity.task_id):
            order, outcome = session.order, end.trajectory.outcome
            if went_wrong(order.identity, session.live, outcome):  # it costs no retry
                self.replace(end.trajectory, evolve(order, first_attempt=order.first_attempt + 1))
                return
            if lost_to_the_machine(outcome) and retries_left(order.retries, session.task.budgets):
                self.replace(end.trajectory, order)
                return
        self.registry.end(end)
        if session is not None:
            self._list_ended(session_status(session, end.trajectory))

    def _goes_on(self, end: SessionEnd) -> bool:
        """Whether the session was ended by the stop of its node alone, and its task goes on without it."""
        stopped = end.cancelled == "stopped" and end.trajectory.outcome.status == "cancelled"
        return stopped and self.registry.stopping and self.registry.homes.outlives(end.identity.task_id)

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

    def live_by_priority(self) -> Mapping[str, int]:
        """How many sessions are not over, by priority, as of at most COUNTED_S ago."""
        at, found = self._by_priority
        now = trio.current_time()
        if now - at >= COUNTED_S:
            found = Counter(str(each.order.spec.priority) for each in self.registry.live(Session))
            self._by_priority = (now, found)
        return found

    def statistics(self) -> SchedulerStatistics:
        """Stage depths and counts."""
        stages = self.services.stages
        return SchedulerStatistics(
            stages={name: getattr(stages, name).statistics() for name in ("live", "init", "run", "post")},
            live=len(self.registry.live(Session)),
            ended=len(self._ended),
            retried=self.services.tally.replaced.total(),
            stopping=self.registry.stopping,
        )


Report = Callable[[str], None]


async def recover(
    journal: Journal,
    scheduler: Scheduler,
    report: Report,
    *,
    skips: Callable[[str], bool] = lambda task: False,
) -> None:
    """Publish each interrupted session as a trajectory of the captured turns, and start another attempt if
    retries are left. Tasks that `skips` names, and results that wait for a second home, are left alone.

    A group that has enough gets no new attempts: the node died before it had ended all its sessions.
    """
    if journal.damage is not None:
        report(f"{journal.damage}; sessions of an earlier run stay as they are until then")
        return
    held = await journal.query(held_sessions)
    unfinished = [
        each
        for each in await journal.unfinished()
        if each.identity.session_id not in held and not skips(each.identity.task_id)
    ]
    for task_id, spec in {
        each.identity.task_id: each.spec for each in unfinished if each.spec is not None
    }.items():
        scheduler.registry.groups.begin(task_id, spec, await journal.places_over(task_id))
    again = sum([await _recovered(journal, scheduler, session) for session in unfinished])
    await journal.flushed()
    if unfinished:
        report(
            f"{len(unfinished)} sessions of an earlier run were interrupted; their turns are kept, and"
            f" {again} of them are tried again"
        )


async def _recovered(journal: Journal, scheduler: Scheduler, session: UnfinishedSession) -> bool:
    """Settle one session; True if another attempt was started. Its traces are built in a thread, because
    attempts started earlier are already running.
    """
    lost = await journal.read(partial(_trajectory, session, scheduler.services.allowed_imports))
    homes = scheduler.registry.homes
    made = session.identity.attempt - homes.first_attempt(session.identity.task_id)
    # read late, because siblings end meanwhile
    if lost.outcome.status == "interrupted" and scheduler.registry.groups.has_enough(
        session.identity.task_id
    ):
        lost = evolve(
            lost, outcome=Outcome(status="cancelled", reason=f"{EARLY_STOP}, and {lost.outcome.reason}")
        )
    if (
        session.spec is not None
        and lost_to_the_machine(lost.outcome)
        and retries_left(made - _free(homes, session), session.spec.budgets)
        and not homes.moved(session.identity.task_id)
    ):
        try:
            order = scheduler.order_of(session.spec, session.identity)
        except Refused as refused:
            lost = evolve(
                lost,
                outcome=evolve(
                    lost.outcome, reason=f"{lost.outcome.reason}; it cannot be tried again here: {refused}"
                ),
            )
        else:
            # its budget's own retries are as many as before
            fresh = session.identity.attempt + 1 if _free(homes, session) else order.first_attempt
            scheduler.replace(lost, evolve(order, first_attempt=fresh))
            return True
    scheduler.recovered(lost, "" if session.spec is None else session.spec.adapter)
    return False


def _free(homes: Homes, session: UnfinishedSession) -> int:
    """The retries that a fleet's task has for ends of its node, beside those of its own budget."""
    return NODE_ENDS if homes.outlives(session.identity.task_id) else 0


def _trajectory(session: UnfinishedSession, allowed_imports: tuple[str, ...]) -> Trajectory:
    spec = _spec(session)
    found = assemble(
        session.identity,
        spec,
        session.turns,
        Result(outcome=_outcome(session)),
        allowed_imports=allowed_imports,
        damaged=session.damaged,
    )
    # not scored now: the node starts, and may have hundreds of them
    why = "the node ended before its teacher had scored it; POST /v1/score takes its rows"
    return unscored(found, why) if spec.carry.teacher else found


def _spec(session: UnfinishedSession) -> TaskSpec:
    """The spec of an interrupted session. A capture is built like any other session."""
    return session.spec or TaskSpec(instruction="", harness=HarnessSpec(name=session.identity.harness))


def _outcome(session: UnfinishedSession) -> Outcome:
    reason = f"the node ended while the session ran; {len(session.turns)} turns were captured"
    if session.cancelled:
        return Outcome(status="cancelled", reason=f"cancelled, and {reason}")
    return Outcome(status="interrupted", boundary="node", reason=reason)
