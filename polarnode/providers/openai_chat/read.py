"""Chat Completions: a request's shapes into a conversation.

The rule: one message in, one message out, in order. What a client wrote is kept letter for letter; only the spelling goes (`developer` is
`system`, part lists become text, null and "" and [] are the same). `refs` collect every opaque id of an assistant message, unjudged.
"""

from collections.abc import Iterator, Mapping
from typing import assert_never

from polarnode.conversation import Conversation, Json, Message, ModelRequest, Sampling
from polarnode.providers.openai_chat.constraints import constraint
from polarnode.providers.openai_chat.details import DETAILS, asked, detail_refs
from polarnode.providers.openai_chat.shapes import (
    AssistantMessage,
    ChatRequest,
    Content,
    MessageShape,
    NotTextPart,
    RefusalPart,
    ResultContent,
    SystemMessage,
    TextPart,
    ToolMessage,
    UnseenPart,
    UserMessage,
)
from polarnode.providers.openai_chat.thinking import thinking, unused
from polarnode.providers.openai_chat.tools import read_call, read_choice, read_tools
from polarnode.providers.shapes import as_tuple, not_text, paragraphs, read_body, unseen
from polarnode.providers.volatile import without_volatile


def read(body: bytes, *, headers: Mapping[str, str], model: str | None) -> ModelRequest:
    """A Chat Completions body. Refused with the path of the field."""
    request, unknown = read_body(body, ChatRequest)
    listed = read_tools(request.tools or ())
    messages, volatile = without_volatile(tuple(_message(shape) for shape in request.messages))
    choice = read_choice(request.tool_choice, listed.tools)
    conversation = Conversation(messages=messages, tools=listed.tools, tool_choice=choice, thinking=thinking(request))
    return ModelRequest(
        provider="openai_chat",
        model=model or request.model,
        conversation=conversation,
        sampling=_sampling(request),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        hints=_hints(headers),
        constraint=constraint(request),
        choices=request.n or 1,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        one_call=request.parallel_tool_calls is False,
        ignored=(*unknown, *_unused(request), *listed.ignored, *(("$.messages[-1]",) if volatile else ())),
        notes=listed.notes,
        extras={DETAILS: True} if asked(request) else {},
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
    calls = tuple(read_call(call) for call in shape.tool_calls or ())
    return Message(
        role="assistant",
        text="".join(_texts(shape.content)) + (shape.refusal or ""),  # our own answer's parts, so joined as `Answer.text` joins them
        calls=calls,
        thinking=_spoken(shape.reasoning_content) or _spoken(shape.reasoning),
        refs=tuple(call.id for call in calls if call.id) + tuple(detail_refs(shape.reasoning_details)),
    )


def _texts(content: Content | ResultContent) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    for part in () if isinstance(content, str) else content or ():
        match part:
            case TextPart():
                yield part.text
            case RefusalPart():
                yield part.refusal
            case UnseenPart():
                yield unseen(part.type)
            case NotTextPart():
                raise not_text(part.type)
            case _:
                assert_never(part)


def _spoken(value: Json) -> str:
    return value if isinstance(value, str) else ""  # some clients keep an object of their own here


# ── settings ──────────────────────────────────────────────────────────────────


def _unused(request: ChatRequest) -> Iterator[str]:
    """Alternatives are shown only to who asks for logprobs, as in the API itself."""
    if request.top_logprobs and not request.logprobs:
        yield "$.top_logprobs"
    yield from unused(request)


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
    return {"session": session, "agent": session if parent else "", "parent": parent} | ({"kind": "subagent"} if parent else {})
