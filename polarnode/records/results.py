"""What becomes of a session: its traces, its outcome, its verdict, and the trajectory that holds them all."""

from array import array
from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

from polarnode.conversation import FinishReason, Json
from polarnode.records.arrays import RoutedExperts, TopLogprobs
from polarnode.records.turns import Turn, TurnRole, VersionSpan

Status = Literal["completed", "timeout", "failed", "error", "cancelled", "interrupted"]
Clock = Literal["init", "run", "post", "turns", "tokens"]


@frozen(kw_only=True)
class TurnSpan:
    """Tokens [start, end) of a trace are the sample of this turn; `reward` is its own, where the evaluator gave turns rewards."""

    turn: int
    start: int
    end: int
    reward: float | None = None


@frozen(kw_only=True)
class Trace:
    """One training sequence: T tokens.

    `token_ids` int32[T]; `loss_mask` uint8[T], 1 where trainable; `logprobs` float32[T], 0 where the mask is 0; `version_spans` and
    `turn_spans` index into it. `turn_spans` name every sampled turn that lies in the trace, trainable here or only context.

    A row longer than the task's `max_row_tokens` is several traces, one behind the other: `part` of `parts`, each a stretch of the row with
    `offset` of the row's tokens before it, which the model saw and this trace does not show. `over_long`: one sample alone is longer.

    `top` has a row for each trainable token, in order; `routed` has positions [offset, offset + T - 1), without a gap. Each is None where it
    was not asked for, or where it would not be whole: `lacks` then says what is not there, of which turn, and why.
    """

    lineage: int
    token_ids: "array[int]"
    loss_mask: bytes
    logprobs: "array[float]"
    prompt_length: int
    turn_spans: tuple[TurnSpan, ...]
    version_spans: tuple[VersionSpan, ...]
    role: TurnRole = "main"
    finish_reason: FinishReason = "stop"
    reward: float | None = None
    offset: int = 0
    part: int = 0
    parts: int = 1
    over_long: bool = False
    top: TopLogprobs | None = None
    routed: RoutedExperts | None = None
    lacks: tuple[str, ...] = ()


@frozen(kw_only=True)
class LeftOut:
    """A turn none of whose sampled tokens is trainable, and why."""

    turn: int
    reason: str


@frozen(kw_only=True)
class Built:
    """What a builder makes of a session's turns."""

    traces: tuple[Trace, ...]
    left_out: tuple[LeftOut, ...] = ()


@frozen(kw_only=True)
class Outcome:
    """How a session ended. `clock` says which budget fired, `boundary` whose fault an error was, `log_tail` the harness's last words."""

    status: Status
    clock: Clock | None = None
    exit_code: int | None = None
    boundary: str | None = None
    reason: str | None = None
    log_tail: str | None = None


@frozen(kw_only=True)
class Timing:
    """Seconds spent in each phase; READY is waiting for a run slot and costs no budget."""

    init_s: float = 0.0
    ready_s: float = 0.0
    run_s: float = 0.0
    post_s: float = 0.0


@frozen(kw_only=True)
class Verdict:
    """What an evaluator says: a reward, and whatever it wants kept beside it.

    `lineage_rewards` stand in the traces of their lineage in the place of the session's; `turn_rewards` in their turns' spans.
    """

    reward: float
    metrics: Mapping[str, Json] = field(factory=dict)
    lineage_rewards: Mapping[int, float] = field(factory=dict)
    turn_rewards: Mapping[int, float] = field(factory=dict)


@frozen(kw_only=True)
class Trajectory:
    """All traces of one session, with its outcome, timing and reward: what a trainer reads.

    `attempt` counts the sessions of the same place in the group from 0; `retried_as` is the session that took this one's place. `staleness`:
    how many weight updates its oldest sampled token was behind when it ended, None where that is not known.
    """

    session_id: str
    task_id: str
    group_id: str
    sample_index: int
    outcome: Outcome
    reward: float | None
    traces: tuple[Trace, ...]
    turns: tuple[Turn, ...]
    left_out: tuple[LeftOut, ...] = ()
    metrics: Mapping[str, Json] = field(factory=dict)
    timing: Timing = field(factory=Timing)
    harness: str = ""
    harness_version: str | None = None
    model: str = ""
    node: str = ""
    metadata: Mapping[str, Json] = field(factory=dict)
    attempt: int = 0
    retried_as: str | None = None
    staleness: int | None = None

    @property
    def sampled_tokens(self) -> int:
        """Tokens the model sampled in this session."""
        return sum(len(turn.sampled) for turn in self.turns)

    @property
    def trainable_tokens(self) -> int:
        """Tokens that carry loss, over all traces."""
        return sum(trace.loss_mask.count(1) for trace in self.traces)
