"""Chat Completions: the JSON we take, as attrs classes. Unknown fields are taken everywhere and left unread.

What a model would have to see and can not (images, sound) or a client would wait for and not get (several choices, a JSON grammar, the
old function_call API) is refused by a validator; what only decorates is left out of the class.
"""

from typing import Any, Literal

from attrs import field, frozen

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.providers.shapes import above_zero, at_least, no_empty_strings, some, text_only, unserved, within

_OLD_CALLS = "the function_call API of old is not served: use tools and tool_calls"


@frozen
class TextPart:
    """`input_text` and `output_text` are the Responses API's spelling, which some clients carry over."""

    type: Literal["text", "input_text", "output_text"]
    text: str


@frozen
class RefusalPart:
    type: Literal["refusal"]
    refusal: str


@frozen
class NotTextPart:
    type: Literal["image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file"] = field(validator=text_only)


Content = str | tuple[TextPart | RefusalPart | NotTextPart, ...] | None


@frozen
class SystemMessage:
    role: Literal["system", "developer"]
    content: Content = None


@frozen
class UserMessage:
    role: Literal["user"]
    content: Content = None


@frozen
class FunctionCall:
    """`arguments` is JSON text, kept as it is; some clients send the object itself, or nothing for none."""

    name: str
    arguments: str | dict[str, Json] | None = None


@frozen
class CallShape:
    id: str
    function: FunctionCall


@frozen
class AssistantMessage:
    """Thinking comes back as `reasoning_content` (Qwen, DeepSeek, SGLang) or `reasoning` (vLLM, OpenRouter), or not at all."""

    role: Literal["assistant"]
    content: Content = None
    tool_calls: tuple[CallShape, ...] | None = None
    reasoning_content: Json = None
    reasoning: Json = None
    reasoning_details: Json = None
    function_call: Json = field(default=None, validator=unserved(_OLD_CALLS))


@frozen
class ToolMessage:
    role: Literal["tool"]
    tool_call_id: str
    content: Content = None


MessageShape = SystemMessage | UserMessage | AssistantMessage | ToolMessage


@frozen
class FunctionShape:
    name: str
    description: str | None = None
    parameters: dict[str, Json] | None = None


@frozen
class ToolShape:
    """`type` other than function is a hosted tool, or a grammar's: the model can not call it and it is dropped."""

    type: str
    function: FunctionShape | None = None


@frozen
class NamedTool:
    name: str


@frozen
class NamedChoice:
    type: Literal["function"]
    function: NamedTool


@frozen
class AllowedTools:
    mode: Literal["auto", "required"] = "auto"


@frozen
class AllowedChoice:
    """A subset of the tools: taken for its mode, as all tools are rendered and the subset can not be enforced by a prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["auto", "none", "required"] | NamedChoice | AllowedChoice | None


@frozen
class StreamOptions:
    include_usage: bool | None = None


@frozen
class TemplateArguments:
    enable_thinking: bool | None = None


def _text_format(_: object, __: object, value: str) -> None:
    if value != "text":
        raise Refused(f"response_format {value!r} is not served: ask for JSON in the messages and send type 'text'", path="$.type")


@frozen
class ResponseFormat:
    type: str = field(validator=_text_format)


def _one_choice(_: object, __: object, value: int | None) -> None:
    if value not in (None, 1):
        raise Refused(f"n must be 1, not {value}: send the request once for each answer", path="$.n")


Stop = str | tuple[str, ...] | None


@frozen(kw_only=True)
class ChatRequest:
    """The body. Every field but `model` and `messages` may lack or be null; penalties and ranges are OpenAI's, `top_k` … are SGLang's."""

    model: str
    messages: tuple[MessageShape, ...] = field(validator=some)
    tools: tuple[ToolShape, ...] | None = None
    tool_choice: ToolChoice = None
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
    repetition_penalty: float | None = field(default=None, validator=above_zero(2))
    seed: int | None = None
    stop: Stop = field(default=None, validator=no_empty_strings)
    n: int | None = field(default=None, validator=_one_choice)
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    functions: Json = field(default=None, validator=unserved(_OLD_CALLS))
    function_call: Any = field(default=None, validator=unserved(_OLD_CALLS))
