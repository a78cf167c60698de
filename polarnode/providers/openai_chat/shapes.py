"""Chat Completions: the accepted JSON, as attrs classes. Unknown fields are accepted everywhere and not read.

A validator refuses content that the model would have to see but cannot (images, sound), and content that a
client would wait for but not get (audio answers, the old function_call API). Fields that only decorate have
no attribute.
"""

from typing import Any, Literal

from attrs import field, frozen

from polarnode.core.codec.limits import REPETITION_RANGE
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.providers.openai_chat.tools import ToolCallShape, ToolChoice, ToolShape
from polarnode.providers.shapes import (
    above_zero,
    at_least,
    no_empty_strings,
    refuse_non_text,
    seed_fits,
    some,
    unserved,
    within,
)

_NO_FUNCTION_CALL = "the function_call API of old is not served: use tools and tool_calls"

# The limit on `n`. Each choice occupies memory of the engine until the last is done. A task that needs many
# answers uses `num_samples`.
CHOICES = 8
ALTERNATIVES = 20  # OpenAI's own limit


@frozen
class TextPartShape:
    """`input_text` and `output_text` are the Responses API's types, which some clients use here."""

    type: Literal["text", "input_text", "output_text"]
    text: str


@frozen
class RefusalPart:
    type: Literal["refusal"]
    refusal: str


NotText = Literal["image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file"]


@frozen
class NotTextPart:
    type: NotText = field(validator=refuse_non_text)


@frozen
class UnseenPart:
    """Such a part in a tool's result, where it is described. `image` and `audio` are types of MCP."""

    type: NotText | Literal["image", "audio"]


Content = str | tuple[TextPartShape | RefusalPart | NotTextPart, ...] | None
ResultContent = str | tuple[TextPartShape | RefusalPart | UnseenPart, ...] | None


@frozen
class SystemMessage:
    role: Literal["system", "developer"]
    content: Content = None


@frozen
class UserMessage:
    role: Literal["user"]
    content: Content = None


@frozen
class AssistantMessage:
    """An echoed answer. Its thinking comes as `reasoning_content` (Qwen, DeepSeek, SGLang) or `reasoning`
    (vLLM, OpenRouter), or not at all.
    """

    role: Literal["assistant"]
    content: Content = None
    refusal: str | None = None
    tool_calls: tuple[ToolCallShape, ...] | None = None
    reasoning_content: Json = None
    reasoning: Json = None
    reasoning_details: Json = None
    function_call: Json = field(default=None, validator=unserved(_NO_FUNCTION_CALL))


@frozen
class ToolMessage:
    role: Literal["tool"]
    tool_call_id: str | None = None  # None for the result of a call without an id
    content: ResultContent = None


MessageShape = SystemMessage | UserMessage | AssistantMessage | ToolMessage


# ── settings ──────────────────────────────────────────────────────────────────


@frozen
class StreamOptions:
    include_usage: bool | None = None


@frozen
class ReasoningShape:
    """OpenRouter's reasoning settings."""

    enabled: bool | None = None
    effort: str | None = None


@frozen
class ThinkingSwitchShape:
    """The thinking switch of GLM and DeepSeek."""

    type: str | None = None


@frozen
class SchemaShape:
    """A schema and its name. Without a schema any object matches."""

    name: str | None = None
    schema: dict[str, Json] | None = None


def _check_format(_: object, __: object, value: str) -> None:
    if value not in ("text", "json_object", "json_schema"):
        raise Refused(
            f"response_format {value!r} is not served: use 'json_schema', 'json_object' or 'text'",
            path="$.type",
        )


def _check_schema(shape: Any, _: object, value: SchemaShape | None) -> None:
    if shape.type == "json_schema" and value is None:
        raise Refused("json_schema is missing: a response_format of this type needs it", path="$.json_schema")


@frozen
class ResponseFormat:
    type: str = field(validator=_check_format)
    json_schema: SchemaShape | None = field(default=None, validator=_check_schema)


@frozen
class StructuredOutputs:
    """vLLM's settings for what an answer must match."""

    json: dict[str, Json] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def _check_modalities(_: object, __: object, value: tuple[str, ...] | None) -> None:
    if value is not None and any(kind != "text" for kind in value):
        raise Refused("this model writes text only: send modalities ['text']", path="$.modalities")


Stop = str | tuple[str, ...] | None


@frozen(kw_only=True)
class ChatRequest:
    """The body. Every field but `model` and `messages` may be absent or null. Penalties and ranges are
    OpenAI's; `top_k` and the like are SGLang's.

    `continue_final_message` is that of SGLang and vLLM. Constraints are accepted in their formats and in
    OpenAI's, old and new.
    """

    model: str
    messages: tuple[MessageShape, ...] = field(validator=some)
    tools: tuple[ToolShape, ...] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = field(default=None, validator=at_least(1))
    max_completion_tokens: int | None = field(default=None, validator=at_least(1))
    temperature: float | None = field(default=None, validator=within(0, 2))
    top_p: float | None = field(default=None, validator=above_zero(1))
    top_k: int | None = field(default=None, validator=at_least(-1))
    min_p: float | None = field(default=None, validator=within(0, 1))
    frequency_penalty: float | None = field(default=None, validator=within(-2, 2))
    presence_penalty: float | None = field(default=None, validator=within(-2, 2))
    repetition_penalty: float | None = field(default=None, validator=within(*REPETITION_RANGE))
    seed: int | None = field(default=None, validator=seed_fits)
    stop: Stop = field(default=None, validator=no_empty_strings)
    n: int | None = field(default=None, validator=within(1, CHOICES))
    logprobs: bool | None = None
    top_logprobs: int | None = field(default=None, validator=within(0, ALTERNATIVES))
    modalities: tuple[str, ...] | None = field(default=None, validator=_check_modalities)
    response_format: ResponseFormat | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: dict[str, Json] | str | None = None
    guided_json: dict[str, Json] | str | None = None
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningShape | None = None
    include_reasoning: bool | None = None
    thinking: ThinkingSwitchShape | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    continue_final_message: bool | None = None
    functions: Json = field(default=None, validator=unserved(_NO_FUNCTION_CALL))
    function_call: Any = field(default=None, validator=unserved(_NO_FUNCTION_CALL))
