"""A place in a group, and the sessions that hold it one after another: who takes it when the machine lost
one, and when that one begins.

Pure. Which ends are the machine's says `groups.lost_to_the_machine`. The rule for whoever edits it: what an
agent did is never tried again, however it ended, because choosing among its attempts would bend what a
trainer learns from; only what the machine did to it is, and no more often than the task's budget says.

What a scheduler says of itself: its sessions at a glance, its stages and counts.

The rule for whoever edits it: whoever waits for a task counts places, not sessions, because a place may be
held by several, one after another.

The groups that are not over: which of their places are, whether they have enough, and what they came to.

The rule for whoever edits it: it judges by the same facts and the same function as the journal, which says
what a group was; here is only what the node does about it, and counts. It is told of places, not of sessions:
one that was lost and is tried again is no news.

Who may start, who is live, which key is whose: tasks become sessions here.

The only holder of a nursery it did not open: the node hands it the sessions' nursery, and every session runs
there as `run_recorded`, out of which nothing comes but the node's own end. Submitting is synchronous, so a
task is either taken whole or not at all; so is giving a place that the machine lost to a fresh session.
"""

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, Protocol

import trio
from attrs import define, evolve, field, frozen

from polarnode.containers.pool import Demand
from polarnode.core.backoff import Backoff
from polarnode.core.errors import Refused
from polarnode.core.task import Budgets, GroupSpec, RuntimeSpec, TaskSpec
from polarnode.core.trajectory import Trajectory, Turn
from polarnode.gateway.live_sessions import LiveSession, LiveSessions
from polarnode.groups.group import (
    EARLY_STOP,
    Facts,
    facts_of,
    judged,
    lost_to_the_machine,
    member_of,
    stamped,
)
from polarnode.merge.lineage import Lineages
from polarnode.merge.token_extras import SessionExtras
from polarnode.merge.trajectory import Identity
from polarnode.rollouts.admission import Admitted, admitted
from polarnode.rollouts.services import House, SessionOrder
from polarnode.rollouts.session import Phase, Session
from polarnode.support.metrics import NodeCounters
from polarnode.support.semaphore import SemaphoreStatistics

# ── places ────────────────────────────────────────────────────────────

# before an attempt: a Podman service that died is back in one or two seconds
PAUSES: Final = Backoff(first_s=0.5, longest_s=5.0, factor=4.0)


def retries_left(identity: Identity, budgets: Budgets) -> bool:
    """Whether another session may take this one's place."""
    return identity.attempt < budgets.retries


def successor(identity: Identity, session_id: str) -> Identity:
    """Who holds the place next."""
    return evolve(identity, session_id=session_id, attempt=identity.attempt + 1)


def pause_before(attempt: int) -> float:
    """Seconds between a session's end and the beginning of the one that takes its place; none before the
    first.
    """
    return PAUSES.delay(attempt - 1) if attempt else 0.0


# ── glances ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class SessionStatus:
    """One session at a glance. A place of a group (`task_id`, `sample_index`) is over when a session that
    held it has an `outcome`.
    """

    session_id: str
    task_id: str
    harness: str
    phase: Phase
    turns: int
    sampled_tokens: int
    outcome: str | None = None
    reward: float | None = None
    traces: int | None = None
    sample_index: int = 0
    attempt: int = 0


@frozen(kw_only=True)
class SchedulerStatistics:
    """The stages and the sessions in them. `retried` are those whose place was given to a fresh one; they are
    not among the `ended`.
    """

    stages: Mapping[str, SemaphoreStatistics]
    live: int
    ended: int
    retried: int
    stopping: bool


def glance(session: Session, published: Trajectory | None = None) -> SessionStatus:
    """A session now, or with its trajectory when it is over."""
    identity, counters = session.order.identity, session.live.counters
    status = SessionStatus(
        session_id=identity.session_id,
        task_id=identity.task_id,
        harness=identity.harness,
        phase=session.phase,
        turns=counters.turns,
        sampled_tokens=counters.sampled_tokens,
        sample_index=identity.sample_index,
        attempt=identity.attempt,
    )
    if published is None:
        return status
    return evolve(
        status, outcome=published.outcome.status, reward=published.reward, traces=len(published.traces)
    )


# ── group watch ────────────────────────────────────────────────────────────


@define(eq=False)
class _Open:
    """A group that is not over. `over` by sample_index; None for a place whose end could not be
    written down.
    """

    spec: GroupSpec
    places: int
    over: dict[int, Facts | None] = field(factory=dict)
    usable: int = 0

    @property
    def enough(self) -> bool:
        return self.spec.early_stop_min is not None and self.usable >= self.spec.early_stop_min


@define(eq=False)
class GroupWatch:
    """By task, as a task's sessions are a group."""

    tally: NodeCounters
    _open: dict[str, _Open] = field(factory=dict, init=False)

    def begin(self, task_id: str, spec: TaskSpec, over: Iterable[Facts] = ()) -> None:
        """Watch a task's group. `over`: the places that ended in an earlier life of the node, which counted
        them.
        """
        before = {each.sample_index: each for each in over}
        usable = sum(member_of(spec.group, each).usable for each in before.values())
        self._open[task_id] = _Open(spec=spec.group, places=spec.num_samples, over={**before}, usable=usable)

    def has_enough(self, task_id: str) -> bool:
        """Whether the group needs none of the sessions that are not over."""
        group = self._open.get(task_id)
        return group is not None and group.enough

    def over(self, trajectory: Trajectory) -> bool:
        """A place of its group is over. Whether it is the one that makes enough: those that are not over are
        to be ended now.
        """
        group = self._open.get(trajectory.task_id)
        if group is None or trajectory.sample_index in group.over:
            return False
        had, facts = group.enough, facts_of(trajectory)
        member = member_of(group.spec, facts)
        self.tally.place(member)
        group.usable += member.usable
        self._fill(trajectory.task_id, group, trajectory.sample_index, facts)
        return group.enough and not had

    def unwritten(self, task_id: str, sample_index: int) -> None:
        """A place's end could not be written down: the journal holds the group open, and the node's next
        start finds it.
        """
        group = self._open.get(task_id)
        if group is not None and sample_index not in group.over:
            self._fill(task_id, group, sample_index, None)

    def _fill(self, task_id: str, group: _Open, sample_index: int, facts: Facts | None) -> None:
        group.over[sample_index] = facts
        if len(group.over) < group.places:
            return
        del self._open[task_id]
        known = [each for each in group.over.values() if each is not None]
        if len(known) == group.places:
            self.tally.groups[judged(group.spec, known, task_id=task_id, group_id=task_id).state] += 1


# ── scheduler ────────────────────────────────────────────────────────────

logger = logging.getLogger(__name__)

KEPT_ENDED = 10_000  # ended sessions still listed in status: about 1 kB each
SESSION_ID_BYTES = 8  # 64 random bits: no two sessions of a lifetime of journals collide


class Record(Protocol):
    """What the scheduler writes down: the journal's synchronous side."""

    def task_submitted(
        self, spec: TaskSpec, *, task_id: str, session_ids: tuple[str, ...], idempotency_key: str | None
    ) -> None: ...

    def session_started(self, identity: Identity) -> None: ...

    def turn(self, turn: Turn) -> None: ...

    def replaced(self, trajectory: Trajectory, successor: Identity) -> None: ...

    def task_cancelled(self, task_id: str) -> None: ...


@frozen(kw_only=True)
class Who:
    """What every trajectory of this node says of it."""

    node: str
    model: str


@define(eq=False)
class Scheduler:
    """Takes tasks, runs their sessions, and knows each by its key."""

    nursery: trio.Nursery
    house: House
    lives: LiveSessions
    record: Record
    who: Who
    prewarm: Callable[[RuntimeSpec, int], None]
    warm: int
    tally: NodeCounters = field(factory=NodeCounters, init=False)
    groups: GroupWatch = field(init=False)
    stopping: bool = field(default=False, init=False)
    # set when the last session of a stopping node is over
    _emptied: trio.Event = field(factory=trio.Event, init=False)
    _demand: Demand = field(init=False)
    _sessions: dict[str, Session] = field(factory=dict, init=False)
    _ended: dict[str, SessionStatus] = field(factory=dict, init=False)
    # sessions that lost their place and are not quite gone
    _replaced: set[str] = field(factory=set, init=False)
    # of sessions that are about to begin
    _pauses: dict[str, trio.CancelScope] = field(factory=dict, init=False)

    @_demand.default
    def _make_demand(self) -> Demand:
        return Demand(self.prewarm, self.warm)

    @groups.default
    def _make_groups(self) -> GroupWatch:
        return GroupWatch(self.tally)

    # ── tasks ─────────────────────────────────────────────────────────────────

    def submit(self, spec: TaskSpec, *, idempotency_key: str | None = None) -> tuple[str, tuple[str, ...]]:
        """Take a task: (task_id, session_ids). Refused when something it names can not be had or set so, or
        when the node is stopping.
        """
        if self.stopping:
            raise Refused("this node is stopping and takes no new tasks: submit to another, or again later")
        task_id = spec.task_id or f"task-{secrets.token_hex(SESSION_ID_BYTES)}"
        orders = self._orders(spec, task_id)
        session_ids = tuple(order.identity.session_id for order in orders)
        self.record.task_submitted(
            spec, task_id=task_id, session_ids=session_ids, idempotency_key=idempotency_key
        )
        for order in orders:
            self.record.session_started(order.identity)
        self.groups.begin(task_id, spec)
        self._demand.expect(session_ids, orders[0].runtime, each=orders[0].containers)
        for order in orders:
            self._start(order)
        return task_id, session_ids

    def _orders(self, spec: TaskSpec, task_id: str) -> tuple[SessionOrder, ...]:
        found = self._admitted(spec)
        return tuple(
            SessionOrder(
                identity=Identity(
                    session_id=_new_session_id(),
                    task_id=task_id,
                    group_id=spec.group_id or task_id,
                    sample_index=index,
                    harness=found.harness.name,
                    harness_version=found.harness.version,
                    model=self.who.model,
                    node=self.who.node,
                ),
                spec=spec,
                harness=found.harness,
                evaluator=found.evaluator,
            )
            for index in range(spec.num_samples)
        )

    def _admitted(self, spec: TaskSpec) -> Admitted:
        house, model = self.house, self.who.model
        return admitted(
            spec,
            model=model,
            context_length=house.context_length,
            allowed_imports=house.allowed_imports,
            unrouted=house.unrouted,
            judges=house.judges,
            volumes=house.volumes,
            egress=house.egress.names,
        )

    def cancel(self, task_id: str) -> bool:
        """Cancel a task's sessions; each ends with what it has, and none is tried again, whatever becomes of
        the node. False when none is live.
        """
        found = [session for session in self._sessions.values() if session.order.identity.task_id == task_id]
        if found:
            self.record.task_cancelled(task_id)
        self._end(found)
        return bool(found)

    def cancel_session(self, session_id: str) -> bool:
        """Cancel one of a task's sessions, which ends with what it has. False when it is not live."""
        found = self._sessions.get(session_id)
        if found is not None:
            self._end([found])
        return found is not None

    def cancel_all(self) -> None:
        """Cancel every session; each ends with what it has."""
        self._end(self._sessions.values())

    def _end(self, sessions: Iterable[Session], word: str = "cancelled") -> None:
        for session in sessions:
            session.cancel(word)
            if (pause := self._pauses.get(session.order.identity.session_id)) is not None:
                pause.cancel()

    # ── places that were lost ─────────────────────────────────────────────────

    def order_of(self, spec: TaskSpec, identity: Identity) -> SessionOrder:
        """The order of a session of an earlier life, as of this one. Refused where its task would not be
        taken today.
        """
        found = self._admitted(spec)
        version, model, node = found.harness.version, self.who.model, self.who.node
        today = evolve(identity, harness=found.harness.name, harness_version=version, model=model, node=node)
        return SessionOrder(identity=today, spec=spec, harness=found.harness, evaluator=found.evaluator)

    def replace(self, lost: Trajectory, order: SessionOrder) -> None:
        """Publish a session that the machine lost beside its group, and start a fresh one in its place.
        `order` was the lost one's.
        """
        fresh = evolve(order, identity=successor(order.identity, _new_session_id()))
        self.record.replaced(evolve(lost, retried_as=fresh.identity.session_id), fresh.identity)
        self.tally.lost(lost.outcome)
        logger.warning(
            "session %s is lost (%s) and tried again as %s",
            lost.session_id,
            lost.outcome.reason,
            fresh.identity.session_id,
        )
        self._demand.expect((fresh.identity.session_id,), fresh.runtime, each=fresh.containers)
        self._start(fresh)

    def _publish(self, order: SessionOrder, trajectory: Trajectory) -> None:
        """The last act of a session: it is over, or another takes its place."""
        cancelled = self._sessions[order.identity.session_id].cancelled
        if (
            lost_to_the_machine(trajectory.outcome)
            and retries_left(order.identity, order.spec.budgets)
            and not cancelled
        ):
            self.replace(trajectory, order)
            self._replaced.add(order.identity.session_id)
        else:
            self._publish_last(trajectory)

    def _publish_last(self, trajectory: Trajectory) -> None:
        """A place is over; its siblings under way too, where their group has enough now."""
        self.house.publish(trajectory)
        if self.groups.over(trajectory):
            others = (
                each for each in self._sessions.values() if each.order.identity.task_id == trajectory.task_id
            )
            self._end(
                (each for each in others if each.order.identity.session_id != trajectory.session_id),
                EARLY_STOP,
            )

    def recovered(self, trajectory: Trajectory) -> None:
        """Publish a session of an earlier life, whose place is over."""
        self._publish_last(stamped(trajectory, self.house.versions()))

    # ── sessions ──────────────────────────────────────────────────────────────

    def _start(self, order: SessionOrder) -> None:
        house = evolve(self.house, publish=partial(self._publish, order))
        session = Session(order=order, live=self._live(order), house=house, on_phase=self._phase_changed)
        self._sessions[order.identity.session_id] = session
        self.lives.add(session.live)
        self.nursery.start_soon(self._run, session, name=f"session {order.identity.session_id}")

    def _live(self, order: SessionOrder) -> LiveSession:
        session_id = order.identity.session_id
        drops = self.house.drops_thinking if order.spec.thinking == "template" else None
        return LiveSession(
            session_id=session_id,
            key=f"sk-polarnode-{secrets.token_urlsafe(24)}",
            lineages=Lineages(session_id=session_id, secret=secrets.token_bytes(32), drops_thinking=drops),
            sampling=order.spec.sampling,
            budgets=order.spec.budgets,
            record=self.record.turn,
            carrier=SessionExtras(order.spec.carry, limit=self.house.carried_limit),
            tally=self.tally,
        )

    async def _run(self, session: Session) -> None:
        session_id = session.order.identity.session_id
        try:
            await self._paused(session)
            await session.run_recorded()
        except Exception:
            # the isolation edge: not even a session that can not be published ends its siblings
            logger.exception(
                "session %s was not published: its turns are in the journal, where the node's next start"
                " finds it",
                session_id,
            )
            self._ended[session_id] = evolve(glance(session), phase="ended", outcome="error")
            self.groups.unwritten(session.order.identity.task_id, session.order.identity.sample_index)
        finally:
            self.lives.remove(session.live)
            self._demand.served(session_id)
            self._pauses.pop(session_id, None)
            self._replaced.discard(session_id)
            del self._sessions[session_id]
            if self.stopping and not self._sessions:
                self._emptied.set()

    async def _paused(self, session: Session) -> None:
        """What broke may be mended in a moment; a cancel cuts the wait."""
        identity = session.order.identity
        with trio.move_on_after(pause_before(identity.attempt)) as self._pauses[identity.session_id]:
            await trio.sleep_forever()

    def _phase_changed(self, session: Session, published: Trajectory | None) -> None:
        if published is not None and published.session_id not in self._replaced:
            self.tally.published(published)
            self._ended[session.order.identity.session_id] = glance(session, published)
            if len(self._ended) > KEPT_ENDED:
                del self._ended[next(iter(self._ended))]
        if session.phase not in ("init", "ended"):
            self._demand.served(session.order.identity.session_id, left=session.to_come)

    # ── the end, and a look ───────────────────────────────────────────────────

    async def stop(self, *, cancel: bool) -> None:
        """Take no new tasks and wait until every session is over; `cancel` ends them with what they have.
        Bounded by their own budgets.
        """
        self.stopping = True
        if cancel:
            self.cancel_all()
        if self._sessions:
            await self._emptied.wait()

    def sessions(self, task_id: str | None = None) -> tuple[SessionStatus, ...]:
        """Live and lately ended sessions, oldest first."""
        every = (
            *self._ended.values(),
            *(glance(session) for session in self._sessions.values() if session.phase != "ended"),
        )
        return tuple(status for status in every if task_id in (None, status.task_id))

    def statistics(self) -> SchedulerStatistics:
        """Stage depths and counts."""
        stages = self.house.stages
        depths = {name: getattr(stages, name).statistics() for name in ("live", "init", "run", "post")}
        return SchedulerStatistics(
            stages=depths,
            live=len(self._sessions),
            ended=len(self._ended),
            retried=self.tally.replaced.total(),
            stopping=self.stopping,
        )


def _new_session_id() -> str:
    return secrets.token_hex(SESSION_ID_BYTES)
