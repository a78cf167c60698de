"""One capture: who it is, until when, what is said of its end, and what that makes of it.

The rule for whoever edits it: the first word on how a capture ends stands, and none is taken once it closes, because its turns are then being
counted; a budget that was spent is told as in any session, whatever its caller says.
"""

from collections.abc import Callable, Mapping
from typing import Final

import trio
from attrs import define, evolve, field, frozen

from polarnode.errors import EvaluatorError, Refused
from polarnode.evaluators.rewards import checked_rewards
from polarnode.harnesses.shell import endpoint_environment
from polarnode.merge.thoughts import DropsThinking
from polarnode.merge.trajectory import Identity, Result
from polarnode.ports import Endpoint, HarnessOrder
from polarnode.records import Outcome, Timing, Trajectory, Turn, Verdict
from polarnode.shell.live import LiveSession
from polarnode.shell.tally import Tally
from polarnode.tasks import CaptureEnd, CaptureSpec, HarnessSpec, TaskSpec

HARNESS: Final = "capture"  # what a capture's records call its harness: no task can ask for one of this name
INSTRUCTION: Final = "(a capture: whoever holds its key runs its harness)"


def task_of(spec: CaptureSpec) -> TaskSpec:
    """The task whose places a capture and its like hold. None of them is tried again: the node can not run their harness."""
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
    tally: Tally
    allowed_imports: tuple[str, ...] = ()
    carried_limit: int = 0
    unrouted: str | None = None  # why no capture can have its routed experts; None when it can


@frozen(kw_only=True)
class Opened:
    """A capture that is open: where a harness finds its model, and until when. `created` is False when this was answered before."""

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
    """One of them. `said`: how it is to end; None where its time was over first. `closing`: what is said now comes too late."""

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
        base_urls={"anthropic": base, "openai": f"{base}/v1", "google": base, "any": f"{base}/sessions/{key}"},
        env=_environment(Endpoint(base_url=base, key=key, context_length=house.context_length, model=house.model)),
        expires_s=capture.expires_s,
        created=created,
    )


def _environment(endpoint: Endpoint) -> dict[str, str]:
    """The endpoint as the SDKs of the providers read it. There is no instruction: that is between the caller and its harness."""
    order = HarnessOrder(instruction="", endpoint=endpoint, workdir="", home="", model_name=None, settings={}, env={})
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
        return Outcome(status="timeout", clock="run", reason=f"nobody ended the capture within {capture.task.budgets.run_s:g} s")
    if spent is not None and said.status != "cancelled":
        return Outcome(status="timeout", clock=spent, exit_code=said.exit_code, reason=said.reason or "its budget is spent")
    return Outcome(status=said.status, exit_code=said.exit_code, reason=said.reason)


def _judged(said: CaptureEnd, reward: float) -> Verdict:
    return Verdict(
        reward=reward,
        metrics=said.metrics,
        lineage_rewards={int(number): each for number, each in said.lineage_rewards.items()},
        turn_rewards={int(number): each for number, each in said.turn_rewards.items()},
    )
