"""Turns, traces, outcomes, verdicts and trajectories.

A `Turn` is a delta: its prompt is its parent's prompt and sample, then `prompt_delta`; a root's delta is its
whole prompt. Every token of a session is stored once, so a later prompt cannot disagree with an earlier one.
A `Trajectory` holds everything that a session produced: its turns, its traces, its outcome and its reward.

The journal's bytes, the JSON of the API and its schema are derived from these classes: a new field needs a
default here and nothing elsewhere. Field metadata gives the key in JSON where that is not the field's name.
"""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, Literal, get_args

from attrs import evolve, field, frozen

from polarnode.core.arrays import Float32Array, Int32Array, RoutedExperts, TopLogprobs, ids
from polarnode.core.conversation import (
    Answer,
    FinishReason,
    Json,
    JsonText,
    Message,
    Sampling,
    Usage,
    json_key,
    written_as,
)
from polarnode.core.task import ForkWay

# ── turns ─────────────────────────────────────────────────────────────────────────────────────────

TurnKind = Literal["root", "extend", "branch", "continue", "retry"]
# A turn is partial if the client disconnected or aborted, and failed if the engine gave no whole answer.
TurnState = Literal["complete", "partial", "failed"]
TurnRole = Literal["main", "subagent", "auxiliary", "compaction"]
_ROLES: Final[Mapping[str, TurnRole]] = {role: role for role in get_args(TurnRole)}

# How a turn's fields stand in its row of a trajectory's JSON: `optional` may be absent there although the
# class needs it, `full` is there only with turns=full.
OPTIONAL_IN_ROW: Final[dict[str, Any]] = {"optional": True}
FULL: Final[dict[str, Any]] = {"optional": True, "full": True}


UNKNOWN_VERSION: Final = ""  # It is not known which weights sampled these tokens.


@frozen(kw_only=True)
class VersionSpan:
    """Tokens [start, end) of a sample (or of a trace) were sampled by these weights. `version` is
    UNKNOWN_VERSION where nobody named them.
    """

    version: str
    start: int
    end: int


@frozen(kw_only=True)
class NewMessages:
    """The messages that a turn's `prompt_delta` was rendered from: those after its parent's, without the
    node's signed references.

    `tools` (JSON text, "" for none) and `thinking` (enable_thinking, None: the template's default) are set at
    a root: they stand at the head of a prompt, and no turn extends one with others. They are text, because 30
    KB of schemas are 300 KB as objects.
    """

    messages: tuple[Message, ...] = ()
    tools: JsonText = ""
    thinking: bool | None = None


@frozen(kw_only=True)
class Turn:
    """One model call.

    * `index` counts the session's turns from 0, in the order of their requests.
    * `prompt_delta` int32[D]: the ids that the prompt adds to its parent's prompt and sample. The first
      `close_length` of them close the parent's sample (a turn end that a cut sample lacks) and are never
      trained.
    * `sampled` int32[S], with the stop token if one was sampled; `logprobs` float32[S], in nats, of the
      distribution sampled from; `version_spans` cover [0, S) in order.
    * `top` has a row for each of `sampled`; `routed` has the positions that no earlier turn has, up to the
      sample's last token. Both are None where the task did not request them, and where `notes` give the
      reason that they are missing.
    * `new_messages`: the messages that the prompt adds to its parent's.
    """

    session_id: str = field(metadata=OPTIONAL_IN_ROW)
    index: int
    provider: str
    lineage: int
    parent: int | None
    kind: TurnKind
    reason: str
    role: TurnRole = "main"
    state: TurnState = "complete"
    prompt_delta: Int32Array = field(metadata=FULL)
    prompt_length: int
    close_length: int = 0
    sampled: Int32Array = field(metadata=FULL)
    logprobs: Float32Array = field(metadata=FULL)
    version_spans: tuple[VersionSpan, ...] = field(default=(), metadata=FULL)
    finish_reason: FinishReason = "stop"
    refused: bool = False  # it failed because of what its client asked for, and not because of the engine
    # This hash of the request recognises a retry.
    request_key: str = field(default="", metadata=FULL)
    # This is the lineage key of the request's whole path, so that a session can be rebuilt from its turns.
    before_key: str = field(default="", metadata=FULL)
    # This is the lineage key after the returned message.
    message_key: str = field(default="", metadata=FULL)
    answer: Answer | None = field(default=None, metadata=FULL)
    # This is the text with which the prompt ends, inside of the assistant's turn that the answer continues.
    prefill: str = field(default="", metadata=FULL)
    asked: Sampling = field(factory=Sampling, metadata=json_key("sampling.asked"))
    used: Sampling = field(factory=Sampling, metadata=json_key("sampling.used"))
    usage: Usage = field(factory=Usage)
    # `started` is in wall seconds since the epoch; the others are seconds after it.
    started: float = field(default=0.0, metadata=json_key("timing.started"))
    first_token_s: float | None = field(default=None, metadata=json_key("timing.first_token_s"))
    ended_s: float = field(default=0.0, metadata=json_key("timing.ended_s"))
    notes: tuple[str, ...] = ()  # edits that were kept, repairs, ambiguities
    top: TopLogprobs | None = field(default=None, metadata=json_key("top_logprobs") | FULL)
    routed: RoutedExperts | None = field(default=None, metadata=json_key("routed_experts") | FULL)
    # `matched` of the request's `messages` are in the parent's path. Both are None in journals of 0.1.
    matched: int | None = None
    messages: int | None = None
    # None where only ids are known: in journals of 0.1, and of calls merged by tokens
    new_messages: NewMessages | None = field(default=None, metadata=written_as("heard") | FULL)

    @property
    def heard(self) -> NewMessages | None:
        """The older name of `new_messages`."""
        return self.new_messages

    @property
    def message(self) -> Message | None:
        """The assistant's message that the answer made, with the text that it went on; None without one."""
        return None if self.answer is None else self.answer.as_message(prefill=self.prefill)

    @property
    def begin(self) -> int:
        """The index in a row where the turn's new tokens begin: its parent's `end`."""
        return self.prompt_length - len(self.prompt_delta)

    @property
    def end(self) -> int:
        """The length of a row that ends with this turn."""
        return self.prompt_length + len(self.sampled)


# ── results ───────────────────────────────────────────────────────────────────────────────────────

Status = Literal["completed", "timeout", "failed", "error", "cancelled", "interrupted"]
Clock = Literal["init", "run", "post", "turns", "tokens", "repeats"]


@frozen(kw_only=True)
class TurnSpan:
    """Tokens [start, end) of a trace are the sample of this turn. `reward` is the turn's own, where the
    evaluator gave one.
    """

    turn: int
    start: int
    end: int
    reward: float | None = None


@frozen(kw_only=True)
class Trace:
    """One training sequence of T tokens.

    `token_ids` int32[T]; `loss_mask` uint8[T], 1 where trainable; `logprobs` float32[T], in nats, 0 where the
    mask is 0. `version_spans` and `turn_spans` index into it. `turn_spans` name every sampled turn in the
    trace, whether it is trainable here or only context.

    A row longer than the task's `max_row_tokens` becomes several traces in order: `part` of `parts`, each a
    stretch of the row. `offset` is the number of tokens of the row before this trace; the model saw them, but
    this trace does not contain them. `over_long`: one sample alone is longer than the limit.

    `top` has a row for each trainable token, in order; `routed` has positions [offset, offset + T - 1)
    without a gap. Each is None where it was not requested, or where it would be incomplete: `missing_extras`
    then gives what is missing, of which turn, and why.

    `teacher_logprobs` float32[T], in nats, 0 where the mask is 0: what the task's `carry.teacher` gives each
    trained token after all tokens of the row before it, those before `offset` too. None where no teacher was
    requested, or where it could not score the row: `missing_extras` then says why. `metrics.teacher` of the
    trajectory names the teacher and its version.
    """

    lineage: int
    token_ids: Int32Array
    loss_mask: bytes
    logprobs: Float32Array
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
    top: TopLogprobs | None = field(default=None, metadata=json_key("top_logprobs"))
    routed: RoutedExperts | None = field(default=None, metadata=json_key("routed_experts"))
    teacher_logprobs: Float32Array | None = None
    missing_extras: tuple[str, ...] = field(default=(), metadata=written_as("lacks"))

    @property
    def lacks(self) -> tuple[str, ...]:
        """The older name of `missing_extras`."""
        return self.missing_extras


@frozen(kw_only=True)
class LeftOut:
    """A turn without any trainable sampled token, and the reason."""

    turn: int
    reason: str


@frozen(kw_only=True)
class Built:
    """What a builder makes of a session's turns."""

    traces: tuple[Trace, ...]
    left_out: tuple[LeftOut, ...] = ()


@frozen(kw_only=True)
class Damaged:
    """A part that is missing because its row in the journal is damaged: `turns[3]`, `traces[0]`, `identity`,
    `task`, or `trajectory` for all that is not in the turns. `reason` is a sentence.
    """

    part: str
    reason: str


@frozen(kw_only=True)
class Outcome:
    """How a session ended. `clock` is the budget that ran out, `boundary` names the part that was at fault in
    an error, `log_tail` is the end of the harness's log.
    """

    status: Status
    clock: Clock | None = None
    exit_code: int | None = None
    boundary: str | None = None
    reason: str | None = None
    log_tail: str | None = None


@frozen(kw_only=True)
class Timing:
    """Seconds spent in each phase. `ready_s` is the wait for a run slot and costs no budget. `held_s`:
    those of `run_s` in which calls were held for the session's place in the engine's cache, or for a
    snapshot; they cost none either.
    """

    init_s: float = 0.0
    ready_s: float = 0.0
    run_s: float = 0.0
    post_s: float = 0.0
    held_s: float = 0.0


@frozen(kw_only=True)
class Verdict:
    """An evaluator's result: a reward, and any metrics to keep.

    `lineage_rewards` replace the session's reward in the traces of their lineage; `turn_rewards` are recorded
    in their turns' spans.
    """

    reward: float
    metrics: Mapping[str, Json] = field(factory=dict)
    lineage_rewards: Mapping[int, float] = field(factory=dict)
    turn_rewards: Mapping[int, float] = field(factory=dict)


@frozen(kw_only=True)
class ForkedFrom:
    """The state in which a session began: that of session `session_id` before its turn `turn`, as its task
    asked.

    Turns with an index below `got` are inherited: the other session sampled them, and they are trained
    there. `got` is less than `turn` where the fork left the record earlier; `differs` then says in words
    what was different. With `got` equal to `turn` it says how the state before that turn is another one.
    """

    session_id: str
    turn: int
    got: int
    by: ForkWay
    differs: str | None = None


@frozen(kw_only=True)
class ContinuedFrom:
    """The state with which a session took the place of one that the machine lost: that of session
    `session_id` before its turn `turn`.

    Turns with a lower index were sampled there and are this session's own: trained here, as the lost session
    holds no place in its group. `run_s`: seconds of RUN that were spent until then, which count in
    `budgets.run_s` and not in `timing`.
    """

    session_id: str
    turn: int
    run_s: float


@frozen(kw_only=True)
class Trajectory:
    """All traces of one session, with its outcome, timing and reward: what a trainer reads.

    `attempt` counts the sessions of one place in the group from 0; `retried_as` is the session that replaced
    this one. `staleness`: the weight updates between its oldest sampled token and its end, None where that is
    unknown. `damaged` names what the journal could not give back of it. `forked_from`: the session whose
    first turns this one inherited, which are in `turns` too. `continued_from`: the lost session that this one
    went on with.
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
    harness: str = field(default="", metadata=json_key("harness.name"))
    harness_version: str | None = field(default=None, metadata=json_key("harness.version"))
    model: str = field(default="", metadata=json_key("model.name"))
    node: str = ""
    metadata: Mapping[str, Json] = field(factory=dict)
    attempt: int = 0
    retried_as: str | None = None
    staleness: int | None = None
    damaged: tuple[Damaged, ...] = ()
    forked_from: ForkedFrom | None = None
    continued_from: ContinuedFrom | None = None

    @property
    def inherited(self) -> int:
        """Turns with an index below this are inherited. 0 for a session that is no fork."""
        return 0 if self.forked_from is None else self.forked_from.got

    @property
    def sampled_tokens(self) -> int:
        """Tokens the model sampled in this session, without those of inherited turns. Where it was read
        without its turns, as groups of a stream are, the number is the recorded one.
        """
        if not self.turns and isinstance(recorded := self.metrics.get("sampled_tokens"), int):
            return recorded
        return sum(len(turn.sampled) for turn in self.turns if turn.index >= self.inherited)

    @property
    def trainable_tokens(self) -> int:
        """Tokens that carry loss, over all traces."""
        return sum(trace.loss_mask.count(1) for trace in self.traces)


def with_published_roles(turns: Sequence[Turn], left_out: Sequence[LeftOut]) -> tuple[Turn, ...]:
    """The turns of a published session, where one that was left out for its role has that role: earlier nodes
    recorded another and decided when the session was over.
    """
    roles = {each.turn: _ROLES[each.reason] for each in left_out if each.reason in _ROLES}
    return tuple(
        evolve(turn, role=roles[turn.index]) if roles.get(turn.index, turn.role) != turn.role else turn
        for turn in turns
    )


def left_out_by_reason(trajectory: Trajectory) -> "tuple[Counter[str], Counter[str]]":
    """The turns of this session that no row trains, and their sampled tokens, by reason. Inherited turns are
    trained elsewhere.
    """
    sampled = {turn.index: len(turn.sampled) for turn in trajectory.turns}
    turns, tokens = Counter[str](), Counter[str]()
    for each in trajectory.left_out:
        if each.turn >= trajectory.inherited:
            turns[each.reason] += 1
            tokens[each.reason] += sampled.get(each.turn, 0)
    return turns, tokens


def rewarded(trace: Trace, verdict: Verdict) -> Trace:
    """A trace with its lineage's reward where there is one, else the session's, and its turns with theirs."""
    reward = verdict.lineage_rewards.get(trace.lineage, verdict.reward)
    if not verdict.turn_rewards and all(span.reward is None for span in trace.turn_spans):
        return evolve(trace, reward=reward)
    spans = tuple(evolve(span, reward=verdict.turn_rewards.get(span.turn)) for span in trace.turn_spans)
    return evolve(trace, reward=reward, turn_spans=spans)


def without_damaged(
    trajectory: Trajectory, turns: Sequence[Turn], damaged: tuple[Damaged, ...]
) -> Trajectory:
    """A trajectory whose damaged parts are named, with the session's `turns` that can be read. Those that are
    in none of its traces and not left out for another reason are left out as `damaged`.
    """
    used = {span.turn for trace in trajectory.traces for span in trace.turn_spans}
    used |= {each.turn for each in trajectory.left_out}
    # A session that was recovered without some parts names them already.
    known = {each.part for each in trajectory.damaged}
    also = (LeftOut(turn=turn.index, reason="damaged") for turn in turns if turn.index not in used)
    return evolve(
        trajectory,
        turns=tuple(turns),
        left_out=(*trajectory.left_out, *also),
        damaged=(*trajectory.damaged, *(each for each in damaged if each.part not in known)),
    )


def sequence(turns: Mapping[int, Turn], index: int) -> "array[int]":
    """The whole prompt of turn `index`, followed by its sample: int32[prompt_length + S]. Raises KeyError
    when an ancestor is missing.
    """
    line = line_of(turns, index)
    if line is None:
        raise KeyError(index)
    whole = ids()
    for turn in line:
        whole.extend(turn.prompt_delta)
        whole.extend(turn.sampled)
    return whole


def line_of(turns: Mapping[int, Turn], index: int, *, since: int = -1) -> list[Turn] | None:
    """The turns from a root to `index`, in that order; None when an ancestor is missing.

    `since`: begin with the turn that added the token at this index of the row, not with the root.
    """
    line: list[Turn] = []
    at: int | None = index
    while at is not None:
        turn = turns.get(at)
        if turn is None:
            return None
        line.append(turn)
        at = None if turn.begin <= since else turn.parent
    line.reverse()
    return line


def prompt_digests(turns: Sequence[Turn]) -> dict[int, str]:
    """By turn index: the SHA-256, in hex, of the turn's whole prompt as little-endian int32. A turn whose
    ancestor is missing has none.
    """
    digests: dict[int, str] = {}
    # The hash of prompt and sample is copied for each child, so every token is hashed once, however long the
    # session is.
    after: dict[int, Any] = {}
    for turn in sorted(turns, key=lambda turn: turn.index):
        if turn.parent is not None and turn.parent not in after:
            continue
        state = sha256() if turn.parent is None else after[turn.parent].copy()
        state.update(turn.prompt_delta)
        digests[turn.index] = state.hexdigest()
        state.update(turn.sampled)
        after[turn.index] = state
    return digests


def weight_versions(spans: Sequence[VersionSpan]) -> list[str]:
    """Each version once, in the order in which it first sampled."""
    return list(dict.fromkeys(span.version for span in spans))


def join_top_logprobs(trained: Sequence[Turn | None]) -> TopLogprobs | None:
    """The top logprobs of a trace's trained turns; None when one turn has none, or is missing."""
    found = [turn.top for turn in trained if turn is not None and turn.top is not None]
    return TopLogprobs.joined(found) if len(found) == len(trained) else None


def trained_of(mask: bytes, spans: Sequence[TurnSpan], turns: Mapping[int, Turn]) -> list[Turn | None]:
    """The turns that a trace trains, according to its mask."""
    return [turns.get(span.turn) for span in spans if any(mask[span.start : span.end])]


def join_routed_experts(offset: int, line: Sequence[Turn] | None) -> RoutedExperts | None:
    """The routed experts of a line of turns, for the trace at its end that begins at `offset`; None when a
    position has none.
    """
    end = line[-1].end - 1 if line else 0
    return RoutedExperts.joined(
        (turn.routed for turn in line or () if turn.routed is not None), end, start=offset
    )
