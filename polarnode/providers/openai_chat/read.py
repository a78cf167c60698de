"""Chat Completions: a request's shapes into a conversation.

The rule: one message in, one message out, in order. What a client wrote is kept letter for letter; only the spelling goes (`developer` is
`system`, part lists become text, null and "" and [] are the same). `refs` collect every opaque id of an assistant message, unjudged.
"""

from collections.abc import Iterator, Mapping
from typing import assert_never

from polarnode.conversation import Conversation, Json, Message, ModelRequest, Sampling, Tool, ToolCall
from polarnode.errors import Refused
from polarnode.providers.openai_chat.shapes import (
    AllowedChoice,
    AssistantMessage,
    CallShape,
    ChatRequest,
    Content,
    MessageShape,
    NamedChoice,
    NotTextPart,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolMessage,
    ToolShape,
    UserMessage,
)
from polarnode.providers.shapes import as_tuple, compact, not_text, paragraphs, read_body


def read(body: bytes, *, headers: Mapping[str, str], model: str | None) -> ModelRequest:
    """A Chat Completions body. Refused with the path of the field."""
    request, unknown = read_body(body, ChatRequest)
    tools, dropped = _tools(request.tools or ())
    conversation = Conversation(
        messages=tuple(_message(shape) for shape in request.messages),
        tools=tools,
        tool_choice=_tool_choice(request, tools),
        thinking=_thinking(request),
    )
    return ModelRequest(
        provider="openai_chat",
        model=model or request.model,
        conversation=conversation,
        sampling=_sampling(request),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        hints=_hints(headers),
        ignored=unknown + dropped,
    )


# ── messages ──────────────────────────────────────────────────────────────────


def _message(shape: MessageShape) -> Message:
    match shape:
        case SystemMessage():
            return Message(role="system", text=paragraphs(_texts(shape.content)))
        case UserMessage():
            return Message(role="user", text=paragraphs(_texts(shape.content)))
        case ToolMessage():
            return Message(role="tool", text=paragraphs(_texts(shape.content)), call_id=shape.tool_call_id)
        case AssistantMessage():
            return _assistant(shape)
        case _:
            assert_never(shape)


def _assistant(shape: AssistantMessage) -> Message:
    calls = tuple(_call(call) for call in shape.tool_calls or ())
    return Message(
        role="assistant",
        text="".join(_texts(shape.content)),  # our own answer's parts, so joined as `Answer.text` joins them
        calls=calls,
        thinking=_spoken(shape.reasoning_content) or _spoken(shape.reasoning),
        refs=tuple(call.id for call in calls if call.id) + tuple(_detail_refs(shape.reasoning_details)),
    )


def _texts(content: Content) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    for part in () if isinstance(content, str) else content or ():
        match part:
            case TextPart():
                yield part.text
            case RefusalPart():
                yield part.refusal
            case NotTextPart():
                raise not_text(part.type)
            case _:
                assert_never(part)


def _call(shape: CallShape) -> ToolCall:
    said = shape.function.arguments
    arguments = said if isinstance(said, str) else compact(said or {})
    return ToolCall(id=shape.id, name=shape.function.name, arguments=arguments)


def _spoken(value: Json) -> str:
    return value if isinstance(value, str) else ""  # some clients keep an object of their own here


def _detail_refs(details: Json) -> Iterator[str]:
    """Opaque fields of OpenRouter's `reasoning_details`, which a client echoes."""
    for detail in details if isinstance(details, list) else ():
        if isinstance(detail, dict):
            yield from (found for name in ("id", "data", "signature") if isinstance(found := detail.get(name), str) and found)


# ── tools and settings ────────────────────────────────────────────────────────


def _tools(shapes: tuple[ToolShape, ...]) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """The functions, and the paths of the tools the model can not call."""
    tools, dropped = [], []
    for index, shape in enumerate(shapes):
        if shape.type != "function":
            dropped.append(f"$.tools[{index}]")
        elif shape.function is None:
            raise Refused(f"tools[{index}].function is missing: it is required", path=f"$.tools[{index}].function")
        else:
            function = shape.function
            tools.append(Tool(name=function.name, description=function.description or "", parameters=function.parameters or {}))
    return tuple(tools), tuple(dropped)


def _tool_choice(request: ChatRequest, tools: tuple[Tool, ...]) -> str:
    match request.tool_choice:
        case None:
            return "auto"
        case str() as word:
            return word
        case AllowedChoice() as choice:
            return choice.allowed_tools.mode
        case NamedChoice() as choice:
            name = choice.function.name
            if all(tool.name != name for tool in tools):
                raise Refused(f"tool_choice names {name!r}, which is not among the tools: add it", path="$.tool_choice.function.name")
            return name
        case _:
            assert_never(request.tool_choice)


def _thinking(request: ChatRequest) -> bool | None:
    """Whether to think, where the client says so; an effort other than none leaves it to the template."""
    if request.enable_thinking is not None:
        return request.enable_thinking
    if request.chat_template_kwargs is not None and request.chat_template_kwargs.enable_thinking is not None:
        return request.chat_template_kwargs.enable_thinking
    return False if request.reasoning_effort == "none" else None


def _sampling(request: ChatRequest) -> Sampling:
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k if request.top_k and request.top_k > 0 else None,  # 0 and -1 both mean "all tokens"
        min_p=request.min_p,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stop=as_tuple(request.stop),
        seed=request.seed,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
    )


def _hints(headers: Mapping[str, str]) -> dict[str, str]:
    """Who asks: opencode gives a sub-agent its own session id and its parent's; OpenHands names its conversation."""
    session = headers.get("x-session-id") or headers.get("x-litellm-session-id") or ""
    parent = headers.get("x-parent-session-id") or ""
    if not session and not parent:
        return {}
    return {"session": session, "agent": session if parent else "", "parent": parent}
