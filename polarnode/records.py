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
TurnState = Literal["complete", "partial", "failed"]  # partial: cut by the client's leaving or an abort; failed: the engine's fault
TurnRole = Literal["main", "subagent", "auxiliary", "compaction"]
Status = Literal["completed", "timeout", "failed", "error", "cancelled", "interrupted"]
Clock = Literal["init", "run", "post", "turns", "tokens"]
ExpertType = Literal["uint8", "int16"]  # int16 only for models with more than 256 experts a layer


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
class TopLogprobs:
    """The `k` likeliest tokens of each of N places: `ids` int32[N * k] and `logprobs` float32[N * k] in nats, row by row, likeliest first."""

    k: int
    ids: "array[int]"
    logprobs: "array[float]"

    @property
    def rows(self) -> int:
        """N."""
        return len(self.ids) // self.k

    @property
    def size(self) -> int:
        """Bytes: 8 k a row."""
        return 8 * len(self.ids)

    def row(self, place: int) -> tuple[tuple[int, float], ...]:
        """(id, logprob) of one place."""
        first, last = place * self.k, (place + 1) * self.k
        return tuple(zip(self.ids[first:last], self.logprobs[first:last], strict=True))

    def until(self, rows: int) -> "TopLogprobs":
        """The first `rows` places."""
        return self if rows >= self.rows else TopLogprobs(k=self.k, ids=self.ids[: rows * self.k], logprobs=self.logprobs[: rows * self.k])

    def narrowed(self, k: int) -> "TopLogprobs":
        """The `k` likeliest of those here."""
        if k == self.k:
            return self
        found = TopLogprobs(k=k, ids=array("i", bytes(4 * k * self.rows)), logprobs=array("f", bytes(4 * k * self.rows)))
        for column in range(k):  # as memory, a column at a time
            found.ids[column::k] = self.ids[column :: self.k]
            found.logprobs[column::k] = self.logprobs[column :: self.k]
        return found

    @staticmethod
    def joined(parts: "Iterable[TopLogprobs]") -> "TopLogprobs | None":
        """One behind the other; None for none, and for parts of different width."""
        rows = list(parts)
        if len({part.k for part in rows}) != 1:
            return None
        ids, logprobs = (b"".join(map(memoryview, each)) for each in ([part.ids for part in rows], [part.logprobs for part in rows]))
        return TopLogprobs(k=rows[0].k, ids=array("i", ids), logprobs=array("f", logprobs))


@frozen(kw_only=True)
class RoutedExperts:
    """Which experts of each layer read the tokens at positions [start, start + n) of a prompt and its sample.

    `data` has n rows of `layers` * `top_k` numbers of `dtype`, little-endian; a layer without experts has zeros. The last token of a
    sequence has no row: nothing was computed from it.
    """

    start: int
    layers: int
    top_k: int
    dtype: ExpertType
    data: bytes = field(repr=False)

    @property
    def width(self) -> int:
        """Bytes a row."""
        return self.layers * self.top_k * (2 if self.dtype == "int16" else 1)

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + len(self.data) // self.width

    def between(self, start: int, end: int) -> "RoutedExperts":
        """The rows of positions [start, end), as far as they are here."""
        first = min(max(start, self.start), self.end)
        last = max(first, min(end, self.end))
        if (first, last) == (self.start, self.end):
            return self
        data = self.data[(first - self.start) * self.width : (last - self.start) * self.width]
        return RoutedExperts(start=first, layers=self.layers, top_k=self.top_k, dtype=self.dtype, data=data)

    @staticmethod
    def joined(parts: "Iterable[RoutedExperts]", end: int, *, start: int = 0) -> "RoutedExperts | None":
        """The rows of positions [start, end), each from the first part that has it; None when one lacks its row, or parts differ in shape."""
        taken: list[RoutedExperts] = []
        have = start
        for part in parts:
            if part.start <= have < min(part.end, end):
                taken.append(part.between(have, end))
                have = taken[-1].end
        if have < end or len({(part.layers, part.top_k, part.dtype) for part in taken}) != 1:
            return None
        first = taken[0]
        return RoutedExperts(start=start, layers=first.layers, top_k=first.top_k, dtype=first.dtype, data=b"".join(part.data for part in taken))


@frozen(kw_only=True)
class Turn:
    """One model call.

    `index` counts the session's turns from 0 in the order they were asked. `prompt_delta` int32[D], `sampled` int32[S] with the stop token
    when one was sampled, `logprobs` float32[S] in nats of the distribution sampled from, `version_spans` cover [0, S) in order.
    `close_length` of the first ids in `prompt_delta` close the parent's sample (a turn end its cut sample lacks); they are never trained.
    `top` has a row for each of `sampled`; `routed` the positions that no turn before it has, up to the sample's last token. Both are None
    where the task did not ask for them, and where `notes` say why they are not carried.
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
    top: TopLogprobs | None = None
    routed: RoutedExperts | None = None
    matched: int | None = None  # of the request's `messages`, so many are the parent's path; None in journals of 0.1
    messages: int | None = None


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
