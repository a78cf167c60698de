"""Who may start, who is live, which key is whose: tasks become sessions here.

The only holder of a nursery it did not open: the node hands it the sessions' nursery, and every session runs there as `run_recorded`, out of
which nothing comes but the node's own end. Submitting is synchronous, so a task is either taken whole or not at all.
"""

import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Protocol

import trio
from attrs import define, evolve, field, frozen

from polarnode.errors import Refused
from polarnode.merge.carried import Carrier
from polarnode.merge.lineage import Lineages
from polarnode.merge.trajectory import Identity
from polarnode.records import Trajectory, Turn
from polarnode.shell.admission import admitted
from polarnode.shell.demand import Demand
from polarnode.shell.gates import GateStatistics
from polarnode.shell.live import LiveSession, LiveSessions
from polarnode.shell.orders import House, SessionOrder
from polarnode.shell.session import Phase, Session
from polarnode.shell.tally import Tally
from polarnode.tasks import RuntimeSpec, TaskSpec

logger = logging.getLogger(__name__)

KEPT_ENDED = 10_000  # ended sessions still listed in status: about 1 kB each
SESSION_ID_BYTES = 8  # 64 random bits: no two sessions of a lifetime of journals collide


class Record(Protocol):
    """What the scheduler writes down: the journal's synchronous side."""

    def task_submitted(self, spec: TaskSpec, *, task_id: str, session_ids: tuple[str, ...], idempotency_key: str | None) -> None: ...

    def session_started(self, identity: Identity) -> None: ...

    def turn(self, turn: Turn) -> None: ...

    def publish(self, trajectory: Trajectory) -> None: ...


@frozen(kw_only=True)
class SessionStatus:
    """One session at a glance."""

    session_id: str
    task_id: str
    harness: str
    phase: Phase
    turns: int
    sampled_tokens: int
    outcome: str | None = None
    reward: float | None = None
    traces: int | None = None


@frozen(kw_only=True)
class SchedulerStatistics:
    """The stages and the sessions in them."""

    stages: Mapping[str, GateStatistics]
    live: int
    ended: int
    stopping: bool


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
    want: Callable[[RuntimeSpec, int], None]
    warm: int
    tally: Tally = field(factory=Tally, init=False)
    stopping: bool = field(default=False, init=False)
    _emptied: trio.Event = field(factory=trio.Event, init=False)  # set when the last session of a stopping node is over
    _demand: Demand = field(init=False)
    _sessions: dict[str, Session] = field(factory=dict, init=False)
    _ended: dict[str, SessionStatus] = field(factory=dict, init=False)

    @_demand.default
    def _make_demand(self) -> Demand:
        return Demand(self.want, self.warm)

    # ── tasks ─────────────────────────────────────────────────────────────────

    def submit(self, spec: TaskSpec, *, idempotency_key: str | None = None) -> tuple[str, tuple[str, ...]]:
        """Take a task: (task_id, session_ids). Refused when something it names can not be had or set so, or when the node is stopping."""
        if self.stopping:
            raise Refused("this node is stopping and takes no new tasks: submit to another, or again later")
        orders = self._orders(spec)
        task_id = orders[0].identity.task_id
        session_ids = tuple(order.identity.session_id for order in orders)
        self.record.task_submitted(spec, task_id=task_id, session_ids=session_ids, idempotency_key=idempotency_key)
        for order in orders:
            self.record.session_started(order.identity)
        self._demand.expect(session_ids, orders[0].runtime)
        for order in orders:
            self._start(order)
        return task_id, session_ids

    def _orders(self, spec: TaskSpec) -> tuple[SessionOrder, ...]:
        house, model = self.house, self.who.model
        found = admitted(spec, model=model, context_length=house.context_length, allowed_imports=house.allowed_imports, unrouted=house.unrouted)
        task_id = spec.task_id or f"task-{secrets.token_hex(SESSION_ID_BYTES)}"
        return tuple(
            SessionOrder(
                identity=Identity(
                    session_id=secrets.token_hex(SESSION_ID_BYTES),
                    task_id=task_id,
                    group_id=spec.group_id or task_id,
                    sample_index=index,
                    harness=found.harness.name,
                    harness_version=found.harness.version,
                    model=model,
                    node=self.who.node,
                ),
                spec=spec,
                harness=found.harness,
                evaluator=found.evaluator,
            )
            for index in range(spec.num_samples)
        )

    def cancel(self, task_id: str) -> bool:
        """Cancel a task's sessions; each ends with what it has. False when none of them is live."""
        found = [session for session in self._sessions.values() if session.order.identity.task_id == task_id]
        for session in found:
            session.cancel()
        return bool(found)

    def cancel_all(self) -> None:
        """Cancel every session; each ends with what it has."""
        for session in self._sessions.values():
            session.cancel()

    # ── sessions ──────────────────────────────────────────────────────────────

    def _start(self, order: SessionOrder) -> None:
        session = Session(order=order, live=self._live(order), house=self.house, on_phase=self._phase_changed)
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
            carrier=Carrier(order.spec.carry, limit=self.house.carried_limit),
            tally=self.tally,
        )

    async def _run(self, session: Session) -> None:
        session_id = session.order.identity.session_id
        try:
            await session.run_recorded()
        except Exception:  # the isolation edge: not even a session that can not be published ends its siblings
            logger.exception("session %s was not published: its turns are in the journal, where the node's next start finds it", session_id)
            self._ended[session_id] = evolve(_status(session, None), phase="ended", outcome="error")
        finally:
            self.lives.remove(session.live)
            self._demand.served(session_id)
            del self._sessions[session_id]
            if self.stopping and not self._sessions:
                self._emptied.set()

    def _phase_changed(self, session: Session, published: Trajectory | None) -> None:
        if published is not None:
            self.tally.published(published)
            self._ended[session.order.identity.session_id] = _status(session, published)
            if len(self._ended) > KEPT_ENDED:
                del self._ended[next(iter(self._ended))]
        if session.phase not in ("init", "ended"):
            self._demand.served(session.order.identity.session_id)

    # ── the end, and a look ───────────────────────────────────────────────────

    async def stop(self, *, cancel: bool) -> None:
        """Take no new tasks and wait until every session is over; `cancel` ends them with what they have. Bounded by their own budgets."""
        self.stopping = True
        if cancel:
            self.cancel_all()
        if self._sessions:
            await self._emptied.wait()

    def sessions(self, task_id: str | None = None) -> tuple[SessionStatus, ...]:
        """Live and lately ended sessions, oldest first."""
        every = (*self._ended.values(), *(_status(session, None) for session in self._sessions.values() if session.phase != "ended"))
        return tuple(status for status in every if task_id in (None, status.task_id))

    def statistics(self) -> SchedulerStatistics:
        """Stage depths and counts."""
        stages = self.house.stages
        depths = {name: getattr(stages, name).statistics() for name in ("live", "init", "run", "post")}
        return SchedulerStatistics(stages=depths, live=len(self._sessions), ended=len(self._ended), stopping=self.stopping)


def _status(session: Session, published: Trajectory | None) -> SessionStatus:
    identity, counters = session.order.identity, session.live.counters
    status = SessionStatus(
        session_id=identity.session_id,
        task_id=identity.task_id,
        harness=identity.harness,
        phase=session.phase,
        turns=counters.turns,
        sampled_tokens=counters.sampled_tokens,
    )
    if published is None:
        return status
    return evolve(status, outcome=published.outcome.status, reward=published.reward, traces=len(published.traces))
