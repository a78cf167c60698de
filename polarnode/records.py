"""What happened: turns, traces, trajectories, outcomes. Frozen values; token ids are `array('i')`, logprobs `array('f')`, never lists of ints.

A `Turn` is a delta: its prompt is its parent's prompt and sample, then `prompt_delta`. A root turn's delta is its whole prompt. Every token
of a session is therefore stored once, and a later prompt can not disagree with an earlier one.
"""

from array import array
from collections.abc import Iterable, Mapping
from typing import Literal

from attrs import field, frozen

from polarnode.conversation import Answer, FinishReason, Json, Sampling, Usage

TurnKind = Literal["root", "extend", "branch", "continue", "retry"]
TurnState = Literal["complete", "partial", "failed"]  # partial: cut by the client's leaving or an abort; failed: the engine's fault, never trained
TurnRole = Literal["main", "subagent", "auxiliary", "compaction"]
Status = Literal["completed", "timeout", "failed", "error", "cancelled", "interrupted"]
Clock = Literal["init", "run", "post", "turns", "tokens"]


def ids(values: Iterable[int] | bytes = ()) -> "array[int]":
    """An int32 array of token ids, from numbers or from little-endian bytes."""
    return array("i", values)


def floats(values: Iterable[float] | bytes = ()) -> "array[float]":
    """A float32 array of logprobs, from numbers or from little-endian bytes."""
    return array("f", values)


@frozen(kw_only=True)
class VersionSpan:
    """Tokens [start, end) of a sample (or of a trace) were sampled by these weights."""

    version: str
    start: int
    end: int


@frozen(kw_only=True)
class Turn:
    """One model call.

    `index` counts the session's turns from 0 in the order they were asked. `prompt_delta` int32[D], `sampled` int32[S] with the stop token
    when one was sampled, `logprobs` float32[S] in nats of the distribution sampled from, `version_spans` cover [0, S) in order.
    `close_length` of the first ids in `prompt_delta` close the parent's sample (a turn end its cut sample lacks); they are never trained.
    """

    session_id: str
    index: int
    provider: str
    lineage: int
    parent: int | None
    kind: TurnKind
    reason: str
    role: TurnRole = "main"
    state: TurnState = "complete"
    prompt_delta: "array[int]"
    prompt_length: int
    close_length: int = 0
    sampled: "array[int]"
    logprobs: "array[float]"
    version_spans: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason = "stop"
    request_key: str = ""  # what was asked, for recognising a retry
    before_key: str = ""  # lineage key of the request's whole path, so that a session can be rebuilt from its turns
    message_key: str = ""  # lineage key after the returned message
    answer: Answer | None = None
    asked: Sampling = field(factory=Sampling)
    used: Sampling = field(factory=Sampling)
    usage: Usage = field(factory=Usage)
    started: float = 0.0  # wall seconds since the epoch
    first_token_s: float | None = None  # seconds after started
    ended_s: float = 0.0  # seconds after started
    notes: tuple[str, ...] = ()  # edits kept, repairs, ambiguity: whatever a reader should know


@frozen(kw_only=True)
class TurnSpan:
    """Tokens [start, end) of a trace are the sample of this turn."""

    turn: int
    start: int
    end: int


@frozen(kw_only=True)
class Trace:
    """One training sequence: T tokens.

    `token_ids` int32[T]; `loss_mask` uint8[T], 1 where trainable; `logprobs` float32[T], 0 where the mask is 0; `version_spans` and
    `turn_spans` index into it. `turn_spans` name every sampled turn that lies in the trace, trainable here or only context.
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
    """What an evaluator says: a reward, and whatever it wants kept beside it."""

    reward: float
    metrics: Mapping[str, Json] = field(factory=dict)


@frozen(kw_only=True)
class Trajectory:
    """All traces of one session, with its outcome, timing and reward: what a trainer reads."""

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
