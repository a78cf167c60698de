"""One capture: who it is, until when, what is said of its end, and what that makes of it.

The rule for whoever edits it: the first word on how a capture ends stands, and none is taken once it closes,
because its turns are then being counted; a budget that was spent is told as in any session, whatever its
caller says.

Captures: sessions without a runtime, whose harness somebody runs anywhere on this machine with a key of ours.

A capture is a place of a task like any other, so that whatever reads tasks, groups or sessions reads it too.
The rules for whoever edits it: a capture is ended by its own task and never by the request that asks for it,
because that request may be cut off half-way; and the last act is the synchronous `publish`, as of any
session.
"""

import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import trio
from attrs import define, evolve, field, frozen

from polarnode.core.errors import Busy, Conflict, DiskFull, EvaluatorError, Refused
from polarnode.core.ports import Endpoint, HarnessOrder
from polarnode.core.task import CaptureEnd, CaptureSpec, HarnessSpec, TaskSpec
from polarnode.core.trajectory import Outcome, Timing, Trajectory, Turn, Verdict
from polarnode.evaluators.contract import checked_rewards
from polarnode.gateway.live_sessions import LiveSession, LiveSessions
from polarnode.harnesses.shell import endpoint_environment
from polarnode.journal.values import TaskRecord
from polarnode.merge.builders import build
from polarnode.merge.lineage import DropsThinking, Lineages
from polarnode.merge.token_extras import SessionExtras
from polarnode.merge.trajectory import Identity, Result, assemble, without_traces
from polarnode.support.metrics import NodeCounters

# ── capture ────────────────────────────────────────────────────────────

HARNESS: Final = "capture"  # what a capture's records call its harness: no task can ask for one of this name
INSTRUCTION: Final = "(a capture: whoever holds its key runs its harness)"


def task_of(spec: CaptureSpec) -> TaskSpec:
    """The task whose places a capture and its like hold. None of them is tried again: the node can not run
    their harness.
    """
    return TaskSpec(
        instruction=INSTRUCTION,
        harness=HarnessSpec(name=HARNESS),
        task_id=spec.task_id,
        group_id=spec.group_id,
        num_samples=spec.num_samples,
        builder=spec.builder,
        budgets=evolve(spec.budgets, retries=0),
        sampling=spec.sampling,
        thinking=spec.thinking,
        carry=spec.carry,
        metadata=spec.metadata,
    )


@frozen(kw_only=True)
class CaptureHouse:
    """What captures need of their node. `base_url` is where their door listens, without a version path."""

    base_url: str
    node: str
    model: str
    context_length: int
    publish: Callable[[Trajectory], None]
    limit: int  # open at once
    drops_thinking: DropsThinking
    tally: NodeCounters
    allowed_imports: tuple[str, ...] = ()
    carried_limit: int = 0
    unrouted: str | None = None  # why no capture can have its routed experts; None when it can


@frozen(kw_only=True)
class Opened:
    """A capture that is open: where a harness finds its model, and until when. `created` is False when this
    was answered before.
    """

    session_id: str
    task_id: str
    group_id: str
    sample_index: int
    key: str = field(repr=False)
    base_urls: Mapping[str, str] = field(repr=False)
    env: Mapping[str, str] = field(repr=False)
    expires_s: float
    created: bool = True


@frozen(kw_only=True)
class CaptureStatus:
    """A capture that is open, at a glance."""

    session_id: str
    task_id: str
    group_id: str
    sample_index: int
    turns: int
    sampled_tokens: int
    in_flight: int
    expires_s: float


@define(eq=False, kw_only=True)
class Capture:
    """One of them. `said`: how it is to end; None where its time was over first. `closing`: what is said now
    comes too late.
    """

    identity: Identity
    task: TaskSpec
    live: LiveSession
    began: float
    clock: trio.CancelScope = field(factory=trio.CancelScope)  # around the wait for its end
    said: CaptureEnd | None = None
    closing: bool = False
    asked: trio.Event = field(factory=trio.Event)
    over: trio.Event = field(factory=trio.Event)

    @property
    def expires_s(self) -> float:
        return max(0.0, self.clock.deadline - trio.current_time())

    def end(self, said: CaptureEnd) -> None:
        """Let it end so, unless it ends already."""
        if not (self.closing or self.asked.is_set()):
            self.said = said
            self.asked.set()


def opened(capture: Capture, house: CaptureHouse, *, created: bool) -> Opened:
    """What its caller is told."""
    base, key, whose = house.base_url, capture.live.key, capture.identity
    return Opened(
        session_id=whose.session_id,
        task_id=whose.task_id,
        group_id=whose.group_id,
        sample_index=whose.sample_index,
        key=key,
        base_urls={
            "anthropic": base,
            "openai": f"{base}/v1",
            "google": base,
            "any": f"{base}/sessions/{key}",
        },
        env=_environment(
            Endpoint(base_url=base, key=key, context_length=house.context_length, model=house.model)
        ),
        expires_s=capture.expires_s,
        created=created,
    )


def _environment(endpoint: Endpoint) -> dict[str, str]:
    """The endpoint as the SDKs of the providers read it. There is no instruction: that is between the caller
    and its harness.
    """
    order = HarnessOrder(
        instruction="", endpoint=endpoint, workdir="", home="", model_name=None, settings={}, env={}
    )
    return {name: value for name, value in endpoint_environment(order).items() if value}


def glance(capture: Capture) -> CaptureStatus:
    """A capture now."""
    whose, live = capture.identity, capture.live
    return CaptureStatus(
        session_id=whose.session_id,
        task_id=whose.task_id,
        group_id=whose.group_id,
        sample_index=whose.sample_index,
        turns=live.counters.turns,
        sampled_tokens=live.counters.sampled_tokens,
        in_flight=live.in_flight,
        expires_s=capture.expires_s,
    )


# ── its end ───────────────────────────────────────────────────────────────────


def check_rewards(said: CaptureEnd, turns: tuple[Turn, ...]) -> None:
    """Refused when a reward is of a turn or a lineage that is not there."""
    try:
        checked_rewards(_judged(said, 0.0), turns)
    except EvaluatorError as error:
        where = "$.lineage_rewards" if "lineage" in str(error) else "$.turn_rewards"
        raise Refused(str(error).replace("the evaluator gave", "this end gives"), path=where) from None


def result(capture: Capture) -> Result:
    """What became of it: what was said, unless its time was over before that."""
    said = capture.said or CaptureEnd()
    metrics = capture.live.metrics()
    if said.reward is None and said.metrics:
        metrics["evaluation"] = dict(said.metrics)
    return Result(
        outcome=_outcome(capture),
        verdict=None if said.reward is None else _judged(said, said.reward),
        timing=Timing(run_s=trio.current_time() - capture.began),
        metrics=metrics,
    )


def _outcome(capture: Capture) -> Outcome:
    said, spent = capture.said, capture.live.spent_clock
    if said is None:
        return Outcome(
            status="timeout",
            clock="run",
            reason=f"nobody ended the capture within {capture.task.budgets.run_s:g} s",
        )
    if spent is not None and said.status != "cancelled":
        return Outcome(
            status="timeout",
            clock=spent,
            exit_code=said.exit_code,
            reason=said.reason or "its budget is spent",
        )
    return Outcome(status=said.status, exit_code=said.exit_code, reason=said.reason)


def _judged(said: CaptureEnd, reward: float) -> Verdict:
    return Verdict(
        reward=reward,
        metrics=said.metrics,
        lineage_rewards={int(number): each for number, each in said.lineage_rewards.items()},
        turn_rewards={int(number): each for number, each in said.turn_rewards.items()},
    )


# ── captures ────────────────────────────────────────────────────────────

logger = logging.getLogger(__name__)

SESSION_ID_BYTES: Final = 8  # as of any session
# for a beginning or an end to be on disk before it is answered; a disk that takes longer is full, and that is
# said
WRITTEN_S: Final = 30.0
RETRY_S: Final = 5.0  # when a node is full: captures last minutes, and their ends are spread
STOPPED: Final = CaptureEnd(status="cancelled", reason="its node was stopped")
CANCELLED: Final = CaptureEnd(status="cancelled", reason="its task was cancelled")


class Record(Protocol):
    """What captures write down and read again: the journal."""

    @property
    def refuses_tasks(self) -> bool: ...

    def task_submitted(
        self, spec: TaskSpec, *, task_id: str, session_ids: tuple[str, ...], idempotency_key: str | None
    ) -> None: ...

    def session_started(self, identity: Identity) -> None: ...

    def turn(self, turn: Turn) -> None: ...

    def task_cancelled(self, task_id: str) -> None: ...

    async def flushed(self) -> None: ...

    async def task(self, task_id: str) -> TaskRecord | None: ...

    async def trajectory(self, session_id: str) -> Trajectory | None: ...


@define(eq=False, kw_only=True)
class Captures:
    """Every capture of a node. `nursery` holds a task for each that is open."""

    nursery: trio.Nursery
    lives: LiveSessions
    record: Record
    house: CaptureHouse
    stopping: bool = field(default=False, init=False)
    _open: dict[str, Capture] = field(factory=dict, init=False)
    # two that begin one place at once must be one capture
    _beginning: trio.Lock = field(factory=trio.Lock, init=False)

    # ── beginning ─────────────────────────────────────────────────────────────

    async def begin(self, spec: CaptureSpec) -> Opened:
        """Open a capture, or answer again what was answered to the same one. Raises Refused, Conflict, Busy
        or DiskFull.
        """
        self._check(spec)
        async with self._beginning:
            place = await self._place(spec)
            known = self._open.get(place.session_id)
            if known is not None:
                return opened(known, self.house, created=False)
            capture = self._started(place, spec)
            await self._written("the capture is open, and can be had by its task_id")
            return opened(capture, self.house, created=True)

    def _check(self, spec: CaptureSpec) -> None:
        if self.house.limit == 0:
            raise Refused("this node takes no captures: its setting capture_limit is 0")
        if spec.carry.routed_experts and self.house.unrouted is not None:
            raise Refused(
                f"carry.routed_experts can not be had here: {self.house.unrouted}",
                path="$.carry.routed_experts",
            )
        build(spec.builder, (), allowed_imports=self.house.allowed_imports)

    async def _place(self, spec: CaptureSpec) -> Identity:
        """Whose place it is: of a task that is known, or of one that is taken with it."""
        if spec.task_id is None:
            return self._taken(spec)
        await self._written("nothing was opened")  # a place that was over a moment ago is not free
        record = await self.record.task(spec.task_id)
        if record is None:
            return self._taken(spec)
        if evolve(record.spec, task_id=spec.task_id) != task_of(spec):
            raise Conflict(
                f"task {spec.task_id} was taken before with another body: give this capture its own task_id"
            )
        place = record.sessions[spec.sample_index]
        if place.outcome is not None:
            raise Conflict(
                f"sample {spec.sample_index} of task {spec.task_id} is over ({place.outcome.status}): take"
                " another sample_index or task_id"
            )
        if place.session_id not in self._open:
            self._check_room()
        return self._identity(place.session_id, record.task_id, spec)

    def _taken(self, spec: CaptureSpec) -> Identity:
        self._check_room()
        task_id = spec.task_id or f"task-{secrets.token_hex(SESSION_ID_BYTES)}"
        session_ids = tuple(secrets.token_hex(SESSION_ID_BYTES) for _ in range(spec.num_samples))
        self.record.task_submitted(
            task_of(spec), task_id=task_id, session_ids=session_ids, idempotency_key=None
        )
        return self._identity(session_ids[spec.sample_index], task_id, spec)

    def _check_room(self) -> None:
        if self.stopping:
            raise Refused("this node is stopping and takes no new captures: ask another, or again later")
        if self.record.refuses_tasks:
            raise DiskFull(
                "the journal's disk is full: free some, then ask again; captures that are open are kept in"
                " memory meanwhile"
            )
        if len(self._open) >= self.house.limit:
            raise Busy(
                f"{len(self._open)} captures are open, as many as this node holds (capture_limit): end some",
                retry_after=RETRY_S,
            )

    def _identity(self, session_id: str, task_id: str, spec: CaptureSpec) -> Identity:
        return Identity(
            session_id=session_id,
            task_id=task_id,
            group_id=spec.group_id or task_id,
            sample_index=spec.sample_index,
            harness=HARNESS,
            harness_version=None,
            model=self.house.model,
            node=self.house.node,
        )

    def _started(self, identity: Identity, spec: CaptureSpec) -> Capture:
        self.record.session_started(identity)
        now = trio.current_time()
        clock = trio.CancelScope(deadline=now + spec.budgets.run_s)
        capture = Capture(
            identity=identity, task=task_of(spec), live=self._live(identity, spec), began=now, clock=clock
        )
        self._open[identity.session_id] = capture
        self.lives.add(capture.live)
        self.nursery.start_soon(self._run, capture, name=f"capture {identity.session_id}")
        return capture

    def _live(self, identity: Identity, spec: CaptureSpec) -> LiveSession:
        drops = self.house.drops_thinking if spec.thinking == "template" else None
        return LiveSession(
            session_id=identity.session_id,
            key=f"sk-polarnode-{secrets.token_urlsafe(24)}",
            lineages=Lineages(
                session_id=identity.session_id, secret=secrets.token_bytes(32), drops_thinking=drops
            ),
            sampling=spec.sampling,
            budgets=spec.budgets,
            record=self.record.turn,
            carrier=SessionExtras(spec.carry, limit=self.house.carried_limit),
            tally=self.house.tally,
        )

    # ── ending ────────────────────────────────────────────────────────────────

    async def end(self, session_id: str, said: CaptureEnd) -> Trajectory | None:
        """End a capture; its trajectory, once that is on disk. One that is over already answers the same
        again; None for what is no capture.

        Raises Refused for rewards of turns it has not, and is then still open; DiskFull when it is over and
        its disk takes nothing.
        """
        capture = self._open.get(session_id)
        if capture is not None:
            check_rewards(said, capture.live.lineages.turns)
            capture.end(said)
        return await self.trajectory(session_id)

    async def trajectory(self, session_id: str) -> Trajectory | None:
        """A capture's trajectory: waits for its end, if that is under way. None for what is no capture."""
        capture = self._open.get(session_id)
        if capture is not None:
            await capture.over.wait()
        await self._written("what is over is kept in memory")
        found = await self.record.trajectory(session_id)
        return found if found is not None and found.harness == HARNESS else None

    async def _written(self, meanwhile: str) -> None:
        """Return when all that was written before is on disk; a disk that is full for long is said."""
        with trio.move_on_after(WRITTEN_S):
            await self.record.flushed()
            return
        raise DiskFull(f"the journal's disk is full or hangs; {meanwhile}: free some room, then ask again")

    async def cancel(self, task_id: str) -> bool:
        """End all places of a task of captures with what they have, those that never began too. False when
        none was left.
        """
        async with self._beginning:
            return await self._cancelled(task_id)

    async def _cancelled(self, task_id: str) -> bool:
        record = await self.record.task(task_id)
        if record is None or record.spec.harness.name != HARNESS or record.finished:
            return False
        self.record.task_cancelled(task_id)
        for place in record.sessions:
            capture = self._open.get(place.session_id)
            if capture is not None:
                capture.end(CANCELLED)
            elif place.outcome is None:
                whose = evolve(
                    self._identity(place.session_id, task_id, CaptureSpec(group_id=record.group_id)),
                    sample_index=place.sample_index,
                )
                outcome = Outcome(status="cancelled", reason="cancelled before it began")
                found = assemble(whose, record.spec, (), Result(outcome=outcome))
                self.house.publish(found)
                self.house.tally.published(found)
        return True

    async def stop(self, *, cancel: bool) -> None:
        """Open no more, and wait until all are over; `cancel` ends them with what they have. Bounded by their
        own budgets.
        """
        self.stopping = True
        if cancel:
            self.cancel_all()
        for capture in tuple(self._open.values()):
            await capture.over.wait()

    def cancel_all(self) -> None:
        """End every capture with what it has."""
        for capture in self._open.values():
            capture.end(STOPPED)

    async def _run(self, capture: Capture) -> None:
        """A capture from its beginning to its end."""
        with capture.clock:
            await capture.asked.wait()
        capture.closing = True
        try:
            await capture.live.close()
            self._publish(capture)
        except Exception:  # the isolation edge: a capture that can not be published ends none of the others
            logger.exception(
                "capture %s was not published: its turns are in the journal, where the node's next start"
                " finds it",
                capture.identity,
            )
        finally:
            self.lives.remove(capture.live)
            del self._open[capture.identity.session_id]
            capture.over.set()

    def _publish(self, capture: Capture) -> None:
        turns, ended = capture.live.lineages.turns, result(capture)
        try:
            found = assemble(
                capture.identity, capture.task, turns, ended, allowed_imports=self.house.allowed_imports
            )
            self.house.publish(found)
        except Exception as error:
            # the edge of any session: what can not be built or packed costs its traces, not the record
            logger.exception("capture %s met a bug", capture.identity.session_id)
            bug = Outcome(status="error", boundary="node", reason=f"{type(error).__name__}: {error}")
            found = without_traces(capture.identity, capture.task, turns, evolve(ended, outcome=bug))
            self.house.publish(found)
        self.house.tally.published(found)

    # ── a look ────────────────────────────────────────────────────────────────

    def list(self) -> tuple[CaptureStatus, ...]:
        """Those that are open, oldest first."""
        return tuple(glance(capture) for capture in self._open.values())

    def status(self, session_id: str) -> CaptureStatus | None:
        """One that is open."""
        capture = self._open.get(session_id)
        return None if capture is None or capture.closing else glance(capture)
