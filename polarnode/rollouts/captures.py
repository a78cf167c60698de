"""Captures: sessions without a container, whose harness the caller runs, on this machine or another.

A capture is a sample of a task like any other, so all readers of tasks, groups and sessions see it too.
Invariants: a capture is ended by its own Trio task and never by the request that ends it, because that
request may be disconnected; the first request to end it wins, and none is accepted while it closes, because
its turns are then being counted; a spent budget is reported as in any session, whatever status the caller
requests.
"""

from typing import Final

import trio
from attrs import define, evolve, field

from polarnode.core.errors import Conflict, DiskFull, EvaluatorError, Refused
from polarnode.core.ports import Endpoint, HarnessOrder
from polarnode.core.status import CaptureStatus, OpenedCapture
from polarnode.core.task import CAPTURE_HARNESS, CaptureEnd, CaptureSpec, HarnessSpec, TaskSpec
from polarnode.core.trajectory import Outcome, Timing, Trajectory, Turn, Verdict
from polarnode.evaluators.contract import checked_rewards
from polarnode.gateway.live_sessions import LiveSession, LiveSessions
from polarnode.harnesses.shell import endpoint_environment
from polarnode.journal.journal import Journal
from polarnode.journal.log.port import Claim, Log
from polarnode.merge.trajectory import Identity, Result
from polarnode.rollouts.admission import TaskAdmission, check_capture
from polarnode.rollouts.evaluation import spent_reason
from polarnode.rollouts.lifecycle import CancelCause, LiveSessionFactory, SessionRegistry
from polarnode.rollouts.run_clock import RunClock
from polarnode.rollouts.services import CachePlaces
from polarnode.support.ids import new_id

# ── one capture ───────────────────────────────────────────────────────────────

INSTRUCTION: Final = "(a capture: whoever holds its key runs its harness)"


def task_of(spec: CaptureSpec) -> TaskSpec:
    """The task whose samples are captures. Lost samples are not retried: the node cannot run their
    harness.
    """
    return TaskSpec(
        instruction=INSTRUCTION,
        harness=HarnessSpec(name=CAPTURE_HARNESS),
        task_id=spec.task_id,
        group_id=spec.group_id,
        num_samples=spec.num_samples,
        builder=spec.builder,
        budgets=evolve(spec.budgets, retries=0),
        sampling=spec.sampling,
        thinking=spec.thinking,
        carry=spec.carry,
        adapter=spec.adapter,
        requires=spec.requires,
        metadata=spec.metadata,
    )


@define(eq=False, kw_only=True)
class Capture:
    """A session whose harness the caller runs. A `SessionDriver`.

    `end_spec`: the requested end; None if its time ran out first. `closing`: the end can no longer be
    changed.
    """

    identity: Identity
    task: TaskSpec
    live: LiveSession
    began: float
    clock: RunClock  # around the wait for its end
    end_spec: CaptureEnd | None = None
    cancelled: CancelCause | None = None
    closing: bool = False
    end_requested: trio.Event = field(factory=trio.Event)
    # It is set after publishing, or after the journal refused the trajectory.
    over: trio.Event = field(factory=trio.Event)

    @property
    def expires_s(self) -> float:
        return max(0.0, self.clock.scope.deadline - trio.current_time())

    def end(self, end_spec: CaptureEnd) -> None:
        """Request this end, unless an end was requested before."""
        if not (self.closing or self.end_requested.is_set()):
            self.end_spec = end_spec
            self.end_requested.set()

    def cancel(self, cause: CancelCause) -> None:
        """End it as cancelled with the turns so far, unless an end was requested before."""
        self.cancelled = self.cancelled or cause
        reason = "its node was stopped" if cause == "stopped" else "its task was cancelled"
        self.end(CaptureEnd(status="cancelled", reason=reason))

    async def run(self) -> Result:
        """Wait for the end. The result is the requested one, unless the capture's time ran out first."""
        with self.clock.scope:
            await self.end_requested.wait()
        self.closing = True
        await self.live.close()
        end_spec = self.end_spec or CaptureEnd()
        metrics = self.live.metrics()
        if end_spec.reward is None and end_spec.metrics:
            metrics["evaluation"] = dict(end_spec.metrics)
        return Result(
            outcome=_capture_outcome(self),
            verdict=None if end_spec.reward is None else _verdict(end_spec, end_spec.reward),
            timing=Timing(run_s=trio.current_time() - self.began, held_s=self.clock.held_s),
            metrics=metrics,
        )

    def closed(self, *, failed: bool) -> None:
        """Wake the requests that wait for its end: the registry no longer holds it."""
        self.over.set()


def _opened(capture: Capture, context_length: int, base_url: str, *, created: bool) -> OpenedCapture:
    base, key, identity = base_url, capture.live.key, capture.identity
    endpoint = Endpoint(base_url=base, key=key, context_length=context_length, model=identity.model)
    # A capture has no instruction, because the caller gives it to its harness directly.
    order = HarnessOrder(
        instruction="", endpoint=endpoint, workdir="", home="", model_name=None, settings={}, env={}
    )
    return OpenedCapture(
        session_id=identity.session_id,
        task_id=identity.task_id,
        group_id=identity.group_id,
        sample_index=identity.sample_index,
        key=key,
        base_urls={
            "anthropic": base,
            "openai": f"{base}/v1",
            "google": base,
            "any": f"{base}/sessions/{key}",
        },
        # the base URLs as the providers' SDKs expect them
        env={name: value for name, value in endpoint_environment(order).items() if value},
        expires_s=capture.expires_s,
        created=created,
    )


def _capture_status(capture: Capture) -> CaptureStatus:
    identity, live = capture.identity, capture.live
    return CaptureStatus(
        session_id=identity.session_id,
        task_id=identity.task_id,
        group_id=identity.group_id,
        sample_index=identity.sample_index,
        turns=live.budget.counters.turns,
        sampled_tokens=live.budget.counters.sampled_tokens,
        in_flight=live.calls.count,
        expires_s=capture.expires_s,
    )


# ── its end ───────────────────────────────────────────────────────────────────


def check_rewards(end_spec: CaptureEnd, turns: tuple[Turn, ...]) -> None:
    """Raise Refused when a reward names a turn or a lineage that does not exist."""
    try:
        checked_rewards(_verdict(end_spec, 0.0), turns)
    except EvaluatorError as error:
        where = "$.lineage_rewards" if "lineage" in str(error) else "$.turn_rewards"
        raise Refused(str(error).replace("the evaluator gave", "this end gives"), path=where) from None


def _capture_outcome(capture: Capture) -> Outcome:
    end_spec, spent = capture.end_spec, capture.live.budget.spent_clock
    if end_spec is None:
        return Outcome(
            status="timeout",
            clock="run",
            reason=f"nobody ended the capture within {capture.task.budgets.run_s:g} s",
        )
    if spent is not None and end_spec.status != "cancelled":
        return Outcome(
            status="timeout",
            clock=spent,
            exit_code=end_spec.exit_code,
            reason=end_spec.reason or spent_reason(spent, capture.task.budgets),
        )
    return Outcome(status=end_spec.status, exit_code=end_spec.exit_code, reason=end_spec.reason)


def _verdict(end_spec: CaptureEnd, reward: float) -> Verdict:
    return Verdict(
        reward=reward,
        metrics=end_spec.metrics,
        lineage_rewards={int(number): each for number, each in end_spec.lineage_rewards.items()},
        turn_rewards={int(number): each for number, each in end_spec.turn_rewards.items()},
    )


# ── captures of a node ────────────────────────────────────────────────────────

# The seconds that a request waits for a capture's begin or end to be on disk. A slower disk is reported as
# full.
WRITTEN_S: Final = 30.0


@define(eq=False, kw_only=True)
class Captures:
    """The captures of a node. `base_url` is where harnesses find their model endpoint, without a version;
    `port` is where it listens on this machine; `limit` is how many may be open at once. `nursery` holds a
    task for each open one.
    """

    nursery: trio.Nursery
    admission: TaskAdmission
    registry: SessionRegistry
    session_factory: LiveSessionFactory
    sessions_by_key: LiveSessions
    places: CachePlaces
    journal: Journal
    log: Log
    base_url: str
    port: int
    limit: int
    # Two concurrent requests for one sample must get one capture.
    _beginning: trio.Lock = field(factory=trio.Lock, init=False)

    # ── beginning ─────────────────────────────────────────────────────────────

    async def begin(self, spec: CaptureSpec) -> OpenedCapture:
        """Open a capture, or repeat the answer to an identical earlier request. Raises Refused, Conflict,
        Busy or DiskFull.
        """
        if self.limit == 0:
            raise Refused("this node takes no captures: its setting capture_limit is 0")
        self.admission.check_capture_spec(spec)
        context_length = self.admission.context_length
        async with self._beginning:
            claim = await self._place(spec)
            existing = self.registry.get(Capture, claim.session_id)
            if existing is not None:
                return _opened(existing, context_length, self.base_url, created=False)
            capture = self._started(claim, spec)
            await self._written("the capture is open: its task_id gives it again")
            return _opened(capture, context_length, self.base_url, created=True)

    async def _place(self, spec: CaptureSpec) -> Claim:
        """Claim the place of the capture's sample, in a task that exists or in one that is made for it. An
        open capture has its place already.
        """
        task = task_of(spec)
        record = None if spec.task_id is None else await self.log.task(spec.task_id)
        if record is None:
            self._check_capacity()
            record = await self.log.submit(
                task,
                task_id=spec.task_id or f"task-{new_id()}",
                session_ids=tuple(new_id() for _ in range(spec.num_samples)),
                submitted=self.journal.now(),
            )
        elif evolve(record.spec, task_id=spec.task_id) != task:
            raise Conflict(
                f"task {spec.task_id} was taken before with another body: give this capture its own task_id"
            )
        sample = record.sessions[spec.sample_index]
        if sample.outcome is not None:
            raise Conflict(
                f"sample {spec.sample_index} of task {spec.task_id} is over ({sample.outcome.status}): take"
                " another sample_index or task_id"
            )
        running = self.registry.results.claim_of(sample.session_id)
        if running is not None:
            return running
        self._check_capacity()
        claim = await self._taken(record.task_id, spec.sample_index)
        if claim is None:
            raise Conflict(
                f"sample {spec.sample_index} of task {record.task_id} is taken at another node: ask there, or"
                " take another sample_index"
            )
        return claim

    async def _taken(self, task_id: str, sample_index: int) -> Claim | None:
        """Take a place that is free, or that this node took before with an answer that was lost. None if
        another node has it.
        """
        results, place = self.registry.results, (task_id, sample_index)
        incarnation = results.membership.incarnation
        claim = await self.log.take_place(task_id, sample_index, incarnation)
        if claim is not None or place in results.unwritten:
            return claim
        held = await self.log.claims(results.membership.incarnation)
        return next((each for each in held if (each.task_id, each.sample_index) == place), None)

    def _check_capacity(self) -> None:
        self.registry.require_not_stopping("captures")
        check_capture(self.journal.health.statistics(), count=len(self.list()), limit=self.limit)

    def _started(self, claim: Claim, spec: CaptureSpec) -> Capture:
        identity = self.admission.identity.session_identity(claim)
        self.registry.results.hold(claim)
        self.journal.writer.record_session(identity)
        now, task = trio.current_time(), task_of(spec)
        capture = Capture(
            identity=identity,
            task=task,
            live=self.session_factory.open(identity, task),
            began=now,
            clock=RunClock(trio.CancelScope(deadline=now + spec.budgets.run_s)),
        )
        # The caller has the key already, so the capture does not wait here. Its calls are held instead.
        self.places.begin_session(
            identity.session_id, CAPTURE_HARNESS, identity.group_id, capture.clock.credit, waits=False
        )
        self.registry.start(capture, nursery=self.nursery, sessions_by_key=self.sessions_by_key)
        return capture

    # ── ending ────────────────────────────────────────────────────────────────

    async def end(self, session_id: str, end_spec: CaptureEnd) -> Trajectory | None:
        """End a capture and return its trajectory once that is on disk. For a capture that is over already
        the answer is the same; None if no capture has this id.

        Raises Refused for rewards of turns that it does not have; the capture then stays open. Raises
        DiskFull when it is over and the journal's disk accepts no writes.
        """
        capture = self.registry.get(Capture, session_id)
        if capture is not None:
            check_rewards(end_spec, capture.live.lineages.turns)
            capture.end(end_spec)
        return await self.trajectory(session_id)

    async def trajectory(self, session_id: str) -> Trajectory | None:
        """A capture's trajectory. Waits if the capture is ending. None if no capture has this id."""
        capture = self.registry.get(Capture, session_id)
        if capture is not None:
            await capture.over.wait()
        await self._written("the finished trajectory is kept in memory", session_id)
        found = await self.log.trajectory(session_id)
        if found is None:
            # The capture may have been one that could not be written.
            self.journal.health.require_undamaged()
        return found if found is not None and found.harness == CAPTURE_HARNESS else None

    async def _written(self, meanwhile: str, session_id: str = "") -> None:
        """Return when all earlier writes are on disk, and the log has the end of `session_id`. Raises
        DiskFull when that takes too long.
        """
        with trio.move_on_after(WRITTEN_S):
            if session_id:
                await self.registry.results.written(session_id)
            await self.journal.writer.flush()
            if not session_id:  # The write of a new capture may have failed before this was called.
                self.journal.health.require_undamaged()
            return
        why = (
            self.journal.health.statistics().warning or "the journal's disk is full or hangs: free some room"
        )
        raise DiskFull(f"{why}; {meanwhile}, then ask again")

    # ── status ────────────────────────────────────────────────────────────────

    def list(self) -> tuple[CaptureStatus, ...]:
        """The open captures, oldest first."""
        return tuple(map(_capture_status, self.registry.live(Capture)))

    def status(self, session_id: str) -> CaptureStatus | None:
        """The status of one open capture."""
        capture = self.registry.get(Capture, session_id)
        return None if capture is None or capture.closing else _capture_status(capture)
