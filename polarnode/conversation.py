"""What is said: messages, tools and sampling as every provider module reads them, an answer and its deltas as it writes them.

These are values: frozen, without JSON spelling, without a model family. A message is flat (text, thinking, calls) because that is what a
chat template renders and what lineage compares; the order of an answer's parts is kept apart in `Answer.parts` for the dialects that show it.
"""

from collections.abc import Mapping
from typing import Literal

from attrs import asdict, evolve, field, frozen

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "tool_calls", "length", "stop_string", "abort", "error"]


@frozen(kw_only=True)
class ToolCall:
    """One call. `arguments` is JSON text as sampled or as the client wrote it: compare it parsed, show it as it is."""

    id: str
    name: str
    arguments: str


@frozen(kw_only=True)
class Message:
    """One message. `call_id` only with role tool; `calls`, `thinking`, `refs` only with role assistant.

    `refs` are our own signed references found in opaque fields the client echoed (tool-call ids, thinking signatures); they prove which
    turn this message is, and never override what the client changed.
    """

    role: Role
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    thinking: str = ""
    refs: tuple[str, ...] = ()


@frozen(kw_only=True)
class Tool:
    """A function the model may call; `parameters` is its JSON Schema in the client's own key order."""

    name: str
    description: str = ""
    parameters: Mapping[str, Json] = field(factory=dict)


@frozen(kw_only=True)
class Conversation:
    """All that is rendered into a prompt. `thinking` is enable_thinking for templates that know it (None: the template's default).

    `tool_choice` is "auto", "none", "required" or a tool's name; it changes what we ask of the engine, never the prompt.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    thinking: bool | None = None


@frozen(kw_only=True)
class Sampling:
    """How to sample; None means not said. `stop` are strings; the node watches for them, the engine only knows ids."""

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
        """This one where it says something, `other` elsewhere: the task's sampling laid over what a harness asks."""
        said = {name: value for name, value in asdict(self, recurse=False).items() if value not in (None, ())}
        return evolve(other, **said)


@frozen(kw_only=True)
class ModelRequest:
    """One call of a harness, read by its provider module: everything the rest of the house needs to know of it."""

    provider: str
    model: str  # the name the client used; echoed back, never looked up
    conversation: Conversation
    sampling: Sampling
    stream: bool = False
    include_usage: bool = True  # chat: only when stream_options asks for it
    hints: Mapping[str, str] = field(factory=dict)  # who is asking: agent ids from headers, opaque
    ignored: tuple[str, ...] = ()  # JSON paths of fields we read and did not use


# ── an answer, as it comes ────────────────────────────────────────────────────


@frozen
class TextDelta:
    """More visible text."""

    text: str


@frozen
class ThinkingDelta:
    """More thinking."""

    text: str


Delta = TextDelta | ThinkingDelta | ToolCall  # a call is held back until it is whole (harnesses.md 14.8, 14.9)


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
    """A finished answer: its parts in the order they were sampled. `malformed_calls` were sampled but could not be read, and are in the text."""

    parts: tuple[Part, ...]
    finish_reason: FinishReason
    stop_string: str | None = None
    malformed_calls: int = 0

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def thinking(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ThinkingPart))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCall))

    def as_message(self, *, refs: tuple[str, ...] = ()) -> Message:
        """The message a faithful client will echo; lineage fingerprints this, never the tokens."""
        return Message(role="assistant", text=self.text, calls=self.calls, thinking=self.thinking, refs=refs)
