"""One model call, as it is kept.

A `Turn` is a delta: its prompt is its parent's prompt and sample, then `prompt_delta`. A root turn's delta is its whole prompt. Every token
of a session is therefore stored once, and a later prompt can not disagree with an earlier one.
"""

from array import array
from typing import Literal

from attrs import field, frozen

from polarnode.conversation import Answer, FinishReason, Message, Sampling, Usage
from polarnode.records.arrays import RoutedExperts, TopLogprobs

TurnKind = Literal["root", "extend", "branch", "continue", "retry"]
TurnState = Literal["complete", "partial", "failed"]  # partial: cut by the client's leaving or an abort; failed: the engine's fault
TurnRole = Literal["main", "subagent", "auxiliary", "compaction"]


@frozen(kw_only=True)
class VersionSpan:
    """Tokens [start, end) of a sample (or of a trace) were sampled by these weights."""

    version: str
    start: int
    end: int


@frozen(kw_only=True)
class Heard:
    """What a turn's `prompt_delta` was rendered from, in words: the messages behind its parent's, without our references in them.

    `tools` (JSON text, "" for none) and `thinking` (enable_thinking, None: the template's own) are a root's: they stand at the head of a
    prompt, and no turn extends one that has others. Text and not values, because 30 KB of schemas are 300 KB of objects.
    """

    messages: tuple[Message, ...] = ()
    tools: str = ""
    thinking: bool | None = None


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
    heard: Heard | None = None  # None where only ids are known: in journals of 0.1, and of calls merged by tokens

    @property
    def begin(self) -> int:
        """Where in a row what it brought begins: where its parent ended."""
        return self.prompt_length - len(self.prompt_delta)

    @property
    def end(self) -> int:
        """The length of a row that it ends."""
        return self.prompt_length + len(self.sampled)
