"""Messages, tools, sampling parameters, answers and their deltas.

Frozen values without a JSON spelling and without a model family. A message is flat (text, thinking, calls)
because that is what a chat template renders and what lineage compares. `Answer.parts` keeps the order of an
answer's parts for the dialects that show it.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from attrs import asdict, evolve, field, frozen

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
# A JSON list that is kept as text, "" for an empty one. In JSON it is written as the list.
JsonText = Annotated[str, "JSON"]
Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "tool_calls", "length", "stop_string", "abort", "error"]


def json_key(key: str | None) -> dict[str, Any]:
    """Metadata of an attrs field whose key in JSON is not its name.

    "a.b" is the key b of an object a; None keeps the field out of JSON.
    """
    return {"json": key}


def written_as(name: str) -> dict[str, Any]:
    """Metadata of an attrs field that keeps an older name wherever it is written, in JSON and in journals."""
    return {"json": name, "packed": name}


@frozen(kw_only=True)
class ToolCall:
    """One call. `arguments` is JSON text as sampled or as the client wrote it: compare it parsed, show it
    verbatim.
    """

    id: str
    name: str
    arguments: str


@frozen(kw_only=True)
class Message:
    """One message. `call_id` only with role tool; `calls`, `thinking`, `refs` only with role assistant.

    `refs` are the node's signed references, found in opaque fields that the client echoed (tool-call ids,
    thinking signatures). They prove which turn this message is, but never override what the client changed.
    """

    role: Role
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    thinking: str = ""
    refs: tuple[str, ...] = field(default=(), metadata=json_key(None))

    def joined(self, *others: "Message") -> "Message":
        """This message and those that follow it as one, for a client that shows one assistant turn as several
        messages. Each reference appears once, because all parts of an answer carry it.
        """
        parts = (self, *others)
        return Message(
            role=self.role,
            text="".join(part.text for part in parts),
            calls=tuple(call for part in parts for call in part.calls),
            call_id=self.call_id,
            thinking="".join(part.thinking for part in parts),
            refs=tuple(dict.fromkeys(ref for part in parts for ref in part.refs)),
        )


@frozen(kw_only=True)
class Tool:
    """A function that the model may call; `parameters` is its JSON Schema in the client's own key order.

    `spelling` belongs to the dialect: how a call is written when the tool is not a plain function there. It
    is opaque to all other code.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Json] = field(factory=dict)
    spelling: Mapping[str, Json] = field(factory=dict)


@frozen(kw_only=True)
class Conversation:
    """Everything that is rendered into a prompt. `thinking` is enable_thinking for templates that support it
    (None: the template's default).

    `tool_choice` is "auto", "none", "required" or a tool's name. It changes what the engine must generate,
    never the prompt. `prefilled`: the last message is an assistant's, and the answer goes on with its text.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    thinking: bool | None = None
    prefilled: bool = False

    @property
    def before_prefill(self) -> "Conversation":
        """The conversation without the last message of a prefilled one; any other unchanged."""
        if not self.prefilled:
            return self
        return evolve(self, messages=self.messages[:-1], prefilled=False)


@frozen(kw_only=True)
class Sampling:
    """Sampling parameters; None means not specified. `stop` are strings: the node searches for them, because
    the engine stops only at ids.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None

    def over(self, other: "Sampling") -> "Sampling":
        """These values where they are specified, those of `other` elsewhere: the task's sampling merged over
        what a harness requests.
        """
        requested = {
            name: value for name, value in asdict(self, recurse=False).items() if value not in (None, ())
        }
        return evolve(other, **requested)


@frozen(kw_only=True)
class Constraint:
    """What the visible answer must match; the engine enforces it token by token. `text` is in the language
    `kind`; a JSON Schema is JSON text. `path` is the client's field that has it, for a refusal; it makes no
    other constraint.
    """

    kind: Literal["json_schema", "regex", "ebnf"]
    text: str
    path: str | None = field(default=None, eq=False)


@frozen(kw_only=True)
class ModelRequest:
    """One model call of a harness, as its provider module read it.

    * `hints` describe the agent that sent it and are opaque except for their names: `session`, `agent` (empty
      for the main one), `parent`, and `kind`, a turn's role where the harness names it (`subagent`,
      `auxiliary`, `compaction`).
    * `logprobs` is None when they are not requested, else the number of alternatives to show with each token.
    * `one_call`: the answer ends with its first tool call.
    * `generate`: False samples nothing, because the client only warms its connection.
    * `extras` is what the provider's writer needs back; opaque to all other code.
    """

    provider: str
    model: str  # the name the client used; echoed back, never looked up
    conversation: Conversation
    sampling: Sampling
    stream: bool = False
    include_usage: bool = True  # in Chat Completions only if stream_options asks for it
    hints: Mapping[str, str] = field(factory=dict)
    ignored: tuple[str, ...] = ()  # JSON paths of fields that were read and not used
    # The turn keeps these notes of requests that can be met only in part.
    notes: tuple[str, ...] = ()
    constraint: Constraint | None = None
    choices: int = 1
    logprobs: int | None = None
    one_call: bool = False
    generate: bool = True
    extras: Mapping[str, Json] = field(factory=dict)


# ── deltas of an answer ───────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Alternative:
    """A token that could have been sampled: its bytes, and its logprob in nats."""

    data: bytes
    logprob: float


@frozen(kw_only=True)
class TokenLogprob:
    """One sampled token of visible text: its bytes, its logprob in nats, and the likeliest alternatives,
    likeliest first.
    """

    data: bytes
    logprob: float
    top: tuple[Alternative, ...] = ()


@frozen
class TextDelta:
    """More visible text. `logprobs` only where they were requested: of the tokens read since the previous
    delta, including held-back ones.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@frozen
class ThinkingDelta:
    """More thinking."""

    text: str


# A call is held back until it is complete.
Delta = TextDelta | ThinkingDelta | ToolCall


@frozen
class TextPart:
    text: str


@frozen
class ThinkingPart:
    text: str


Part = TextPart | ThinkingPart | ToolCall


@frozen(kw_only=True)
class Usage:
    """Token counts of one call; `cached_tokens` of `prompt_tokens` came from the engine's prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    thinking_tokens: int = 0


@frozen(kw_only=True)
class Answer:
    """A finished answer: its parts in the order they were sampled. `malformed_calls` counts calls that could
    not be read; they are in the text.
    """

    parts: tuple[Part, ...]
    finish_reason: FinishReason
    stop_string: str | None = None
    malformed_calls: int = 0
    # The logprobs are those of the visible text, if they were requested.
    logprobs: tuple[TokenLogprob, ...] = field(default=(), metadata=json_key(None))

    @property
    def cut(self) -> bool:
        """Whether something else than the model ended it: a limit, an abort or a failure."""
        return self.finish_reason in ("length", "abort", "error")

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def thinking(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ThinkingPart))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCall))

    def as_message(self, *, refs: tuple[str, ...] = (), prefill: str = "") -> Message:
        """The message that a faithful client echoes; lineage fingerprints this, never the tokens. `prefill`
        is the text that the client had put before the answer.
        """
        text = prefill + self.text
        return Message(role="assistant", text=text, calls=self.calls, thinking=self.thinking, refs=refs)
