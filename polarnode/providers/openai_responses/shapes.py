"""Responses: the accepted JSON, as attrs classes. Unknown fields (`status`, `phase`,
`internal_chat_message_metadata_passthrough` …) are accepted everywhere and not read.

Items, tools and parts of content are open sets, because every release of Codex brings new ones. So each is
given a shape by its `type` when it is read, and an unknown type is reported in `ignored`, never refused.
"""

from typing import Literal

from attrs import field, frozen

from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.providers.shapes import above_zero, at_least, unserved, within

JsonObject = dict[str, Json]


@frozen
class PartShape:
    """A part of content. `type` decides which field holds its text."""

    type: str
    text: str | None = None
    refusal: str | None = None
    encrypted_content: str | None = None


Content = str | tuple[PartShape, ...] | None


# ── items ──────────────────────────────────────────────────────


@frozen
class MessageItem:
    role: Literal["user", "assistant", "system", "developer"]
    content: Content = None
    id: str | None = None


@frozen
class AgentMessageItem:
    """A message from one of Codex's agents to another. Its text names the sender."""

    content: Content = None


@frozen
class ReasoningItem:
    """`content` is raw thinking, `summary` the part of it that is shown. `encrypted_content` is this node's,
    or it is another server's and opaque.
    """

    summary: tuple[PartShape, ...] | None = None
    content: tuple[PartShape, ...] | None = None
    encrypted_content: str | None = None
    id: str | None = None


@frozen
class CompactionItem:
    encrypted_content: str | None = None


@frozen
class FunctionCallItem:
    """`arguments` is JSON text, kept verbatim. Some clients send the object itself, or nothing if there are
    no arguments.
    """

    name: str
    arguments: str | JsonObject | None = None
    call_id: str | None = None
    id: str | None = None
    namespace: str | None = None


@frozen
class CustomCallItem:
    name: str
    input: str
    call_id: str | None = None
    id: str | None = None
    namespace: str | None = None


@frozen
class ActionCallItem:
    """A call of a tool built into this API: `local_shell_call` and `shell_call` have an action,
    `apply_patch_call` an operation.
    """

    action: JsonObject | None = None
    operation: JsonObject | None = None
    call_id: str | None = None
    id: str | None = None


@frozen
class SearchCallItem:
    arguments: Json = None
    execution: str | None = None
    call_id: str | None = None
    id: str | None = None


@frozen
class OutputItem:
    """The result of a call. `local_shell_call_output` names its call by `id`; `apply_patch_call_output` may
    have only a `status`.
    """

    output: Json = None
    call_id: str | None = None
    id: str | None = None
    status: str | None = None


@frozen
class SearchOutputItem:
    tools: tuple[Json, ...] | None = None
    execution: str | None = None
    call_id: str | None = None


@frozen
class AdditionalToolsItem:
    tools: tuple[Json, ...] | None = None


# ── tools ─────────────────────────────────────────────────────────────────────


@frozen
class FunctionTool:
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    defer_loading: bool | None = None


@frozen
class FormatShape:
    """The format of a freeform input: any `text`, or a `grammar`."""

    type: str
    syntax: str | None = None
    definition: str | None = None


@frozen
class CustomTool:
    name: str
    description: str | None = None
    format: FormatShape | None = None
    defer_loading: bool | None = None


@frozen
class NamespaceTool:
    name: str
    tools: tuple[Json, ...]
    description: str | None = None


@frozen
class SearchTool:
    """With `execution` client the harness looks the tools up. Otherwise the search runs on the API's own
    servers.
    """

    execution: str | None = None
    description: str | None = None
    parameters: JsonObject | None = None


@frozen
class ShellTool:
    """`environment` is absent or local if the client runs the commands."""

    environment: Json = None


# ── the body ──────────────────────────────────────────────────────────────────


@frozen
class ReasoningShape:
    effort: str | None = None


@frozen
class TextFormat:
    """`json_schema` requires a `schema`. The other types have only their name."""

    type: Literal["text", "json_schema", "json_object"]
    schema: JsonObject | None = None


@frozen
class TextConfigShape:
    format: TextFormat | None = None


def _refuse_background(_: object, __: object, value: bool | None) -> None:
    if value:
        raise Refused(
            "background responses are not served: send the request without background, and stream it",
            path="$.background",
        )


_NO_CONVERSATION = "conversation objects are not kept here: send the whole input, or previous_response_id"
_NO_PROMPT = "prompt templates are not kept here: send the prompt's text as instructions and input"


@frozen(kw_only=True)
class ResponsesRequest:
    """The body. Every field may be absent or null except `model`, which the reader checks. If `generate` is
    false, the request only warms a connection.

    Items, tools, and what the response echoes (`text`, `reasoning`) are kept as sent. Their readers convert
    them to shapes.
    """

    model: str | None = None
    input: str | tuple[Json, ...] | None = None
    instructions: str | None = None
    tools: tuple[Json, ...] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: tuple[str, ...] | None = None
    stream: bool | None = None
    generate: bool | None = None
    max_output_tokens: int | None = field(default=None, validator=at_least(1))
    temperature: float | None = field(default=None, validator=within(0, 2))
    top_p: float | None = field(default=None, validator=above_zero(1))
    top_logprobs: int | None = field(default=None, validator=within(0, 20))
    reasoning: JsonObject | None = None
    text: JsonObject | None = None
    truncation: str | None = None
    client_metadata: Json = None
    metadata: Json = None  # This field and the next are only echoed.
    max_tool_calls: Json = None
    prompt_cache_key: Json = None
    safety_identifier: Json = None
    service_tier: Json = None
    user: Json = None
    background: bool | None = field(default=None, validator=_refuse_background)
    conversation: Json = field(default=None, validator=unserved(_NO_CONVERSATION))
    prompt: Json = field(default=None, validator=unserved(_NO_PROMPT))
