"""Anthropic Messages: the accepted JSON, as attrs classes. Unknown fields (`cache_control`, `citations`,
betas) are accepted and not read.

Content that the model would have to see but cannot (images, PDFs, files stored elsewhere) is refused when it
is read. Blocks of tools that run on Anthropic's machines (`ServerBlock`, a tool without an `input_schema`)
are dropped by the reader.
"""

from typing import Any, Literal

from attrs import field, frozen

from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.providers.shapes import (
    above_zero,
    at_least,
    no_empty_strings,
    non_text_error,
    refuse_non_text,
    some,
    within,
)


@frozen
class TextBlock:
    type: Literal["text"]
    text: str


@frozen
class NotTextBlock:
    type: Literal["image", "container_upload"] = field(validator=refuse_non_text)


@frozen
class TextSource:
    type: Literal["text"]
    data: str


@frozen
class SearchResultBlock:
    type: Literal["search_result"]
    content: tuple[TextBlock, ...]
    source: str = ""
    title: str = ""


@frozen
class ThinkingBlock:
    """`signature` is this node's, echoed. Clients that accept unsigned thinking send it empty or
    not at all.
    """

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


@frozen
class RedactedThinkingBlock:
    type: Literal["redacted_thinking"]
    data: str


@frozen
class ToolUseBlock:
    """`input` is an object. Harnesses that received broken JSON send its text instead."""

    type: Literal["tool_use"]
    name: str
    id: str | None = None
    input: Json = None


@frozen
class ServerBlock:
    """A tool that ran on another server, or its result. Answers of this node have no such block."""

    type: Literal[
        "server_tool_use",
        "mcp_tool_use",
        "mcp_tool_result",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "advisor_tool_result",
        "compaction",
        "fallback",
    ]


@frozen
class ToolReferenceBlock:
    """This block is inside a tool result. From there on the model knows this deferred tool."""

    type: Literal["tool_reference"]
    tool_name: str


@frozen
class UnseenBlock:
    """A block that is not text. It is described inside a tool result and beside one. `audio` is a part of
    MCP.
    """

    type: Literal["image", "audio", "container_upload", "browser_state"]


@frozen
class UnseenSource:
    """A PDF, or a source that would have to be fetched."""

    type: Literal["base64", "url", "file"]


@frozen
class ContentSource:
    """The blocks of a document. Some of them may be pictures."""

    type: Literal["content"]
    content: str | tuple[TextBlock | UnseenBlock, ...]


@frozen
class DocumentBlock:
    type: Literal["document"]
    source: TextSource | ContentSource | UnseenSource
    title: str | None = None
    context: str | None = None


TextualBlock = TextBlock | DocumentBlock | SearchResultBlock
ResultPart = TextualBlock | ToolReferenceBlock | UnseenBlock
ResultContent = str | tuple[ResultPart, ...] | None


@frozen
class ToolResultBlock:
    type: Literal["tool_result"]
    tool_use_id: str | None = None
    content: ResultContent = None


UserBlock = TextualBlock | ToolResultBlock | ToolReferenceBlock | UnseenBlock | ServerBlock
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | NotTextBlock | ServerBlock
SystemContent = str | tuple[TextBlock, ...] | None


@frozen
class UserMessage:
    """Blocks that the model cannot see are refused. Beside a tool's result, to which they belong, they are
    described instead.
    """

    role: Literal["user"]
    content: str | tuple[UserBlock, ...] | None = None

    def __attrs_post_init__(self) -> None:
        blocks = self.content if isinstance(self.content, tuple) else ()
        if any(isinstance(block, ToolResultBlock) for block in blocks):
            return
        for index, block in enumerate(blocks):
            _check_text_only(block, f"$.content[{index}]")


def _check_text_only(block: UserBlock, path: str) -> None:
    """Raise Refused, with its path, for a block that the model cannot see."""
    if isinstance(block, UnseenBlock):
        raise Refused(str(non_text_error(block.type)), path=path)
    source = block.source if isinstance(block, DocumentBlock) else None
    if isinstance(source, UnseenSource):
        sentence = f"this model reads text only: send the document as text, not as {source.type}"
        raise Refused(sentence, path=f"{path}.source.type")
    if isinstance(source, ContentSource) and isinstance(source.content, tuple):
        for index, part in enumerate(source.content):
            _check_text_only(part, f"{path}.source.content[{index}]")


@frozen
class AssistantMessage:
    role: Literal["assistant"]
    content: str | tuple[AssistantBlock, ...] | None = None


@frozen
class SystemMessage:
    """This message is not in the public API, but Claude Code sends it in the middle of a conversation."""

    role: Literal["system"]
    content: SystemContent = None


MessageShape = UserMessage | AssistantMessage | SystemMessage


@frozen
class ToolShape:
    """`defer_loading`: the model is shown the tool only when a tool result refers to it."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Json] | None = None
    defer_loading: bool | None = None


@frozen
class AnyChoice:
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


@frozen
class NamedChoice:
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


@frozen
class ThinkingConfigShape:
    """`adaptive` lets the model decide, which is the default of a chat template. `display` says whether
    thinking is shown to the client.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


def _check_format(_: object, __: object, value: str) -> None:
    if value != "json_schema":
        raise Refused(f"format {value!r} is not served: use 'json_schema'", path="$.type")


@frozen
class FormatShape:
    schema: dict[str, Json]
    type: str = field(validator=_check_format)


@frozen
class OutputConfig:
    effort: Any = None
    format: FormatShape | None = None


@frozen(kw_only=True)
class MessagesRequest:
    """The body. `max_tokens` is required, except for counting, so the reader checks it."""

    model: str
    messages: tuple[MessageShape, ...] = field(validator=some)
    system: SystemContent = None
    tools: tuple[ToolShape, ...] | None = None
    tool_choice: AnyChoice | NamedChoice | None = None
    thinking: ThinkingConfigShape | None = None
    output_config: OutputConfig | None = None
    output_format: FormatShape | None = None  # the beta's name for `output_config.format`
    mcp_servers: tuple[Json, ...] | None = None
    max_tokens: int | None = field(default=None, validator=at_least(1))
    stop_sequences: tuple[str, ...] | None = field(default=None, validator=no_empty_strings)
    temperature: float | None = field(default=None, validator=within(0, 1))
    top_p: float | None = field(default=None, validator=above_zero(1))
    top_k: int | None = field(default=None, validator=at_least(-1))
    stream: bool | None = None
