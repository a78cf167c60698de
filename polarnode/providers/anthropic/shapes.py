"""Anthropic Messages: the JSON we take, as attrs classes. Unknown fields (`cache_control`, `context_management`, betas) are taken and left unread.

What a model would have to see and can not is refused by a validator; a tool without an `input_schema` runs on Anthropic's servers, and is
dropped by the reader.
"""

from typing import Literal

from attrs import field, frozen

from polarnode.conversation import Json
from polarnode.providers.shapes import above_zero, at_least, no_empty_strings, some, text_only, within


@frozen
class TextBlock:
    type: Literal["text"]
    text: str


@frozen
class NotTextBlock:
    type: Literal["image", "document", "search_result", "container_upload"] = field(validator=text_only)


@frozen
class ThinkingBlock:
    """`signature` is ours, echoed; clients that take unsigned thinking send it empty or not at all."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


@frozen
class RedactedThinkingBlock:
    type: Literal["redacted_thinking"]
    data: str


@frozen
class ToolUseBlock:
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Json]


@frozen
class ToolReferenceBlock:
    """Inside a tool result: from here on the model knows this deferred tool."""

    type: Literal["tool_reference"]
    tool_name: str


ResultContent = str | tuple[TextBlock | ToolReferenceBlock | NotTextBlock, ...] | None


@frozen
class ToolResultBlock:
    type: Literal["tool_result"]
    tool_use_id: str
    content: ResultContent = None


UserBlock = TextBlock | ToolResultBlock | NotTextBlock
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | NotTextBlock
SystemContent = str | tuple[TextBlock, ...] | None


@frozen
class UserMessage:
    role: Literal["user"]
    content: str | tuple[UserBlock, ...]


@frozen
class AssistantMessage:
    role: Literal["assistant"]
    content: str | tuple[AssistantBlock, ...]


@frozen
class SystemMessage:
    """Not in the public API, but Claude Code sends it in the middle of a conversation."""

    role: Literal["system"]
    content: SystemContent


MessageShape = UserMessage | AssistantMessage | SystemMessage


@frozen
class ToolShape:
    """`defer_loading`: not shown to the model before a tool result refers to it."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Json] | None = None
    defer_loading: bool | None = None


@frozen
class AnyChoice:
    type: Literal["auto", "any", "none"]


@frozen
class NamedChoice:
    type: Literal["tool"]
    name: str


@frozen
class ThinkingShape:
    """`adaptive` lets the model decide, which is what a chat template does by itself."""

    type: Literal["enabled", "disabled", "adaptive"]


@frozen(kw_only=True)
class MessagesRequest:
    """The body. `max_tokens` is required but for counting, so the reader asks for it."""

    model: str
    messages: tuple[MessageShape, ...] = field(validator=some)
    system: SystemContent = None
    tools: tuple[ToolShape, ...] | None = None
    tool_choice: AnyChoice | NamedChoice | None = None
    thinking: ThinkingShape | None = None
    max_tokens: int | None = field(default=None, validator=at_least(1))
    stop_sequences: tuple[str, ...] | None = field(default=None, validator=no_empty_strings)
    temperature: float | None = field(default=None, validator=within(0, 1))
    top_p: float | None = field(default=None, validator=above_zero(1))
    top_k: int | None = field(default=None, validator=at_least(-1))
    stream: bool | None = None
