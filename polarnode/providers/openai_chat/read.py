"""Chat Completions: read a request as a conversation, with its constraint and whether to think.

Each message becomes one message, in order. A client's text is kept verbatim. Only the spelling is normalised
(`developer` is `system`, part lists become text, null and "" and [] are the same). `refs` collects every
opaque id of an assistant message, unchecked.

Constraints and thinking are read in the spellings of OpenAI, SGLang and vLLM, old and new. Of several
settings for thinking the first that is set wins, from the most to the least literal. An effort other than
none is left to the template, which knows no efforts.
"""

import json
from collections.abc import Iterator, Mapping
from typing import assert_never

from attrs import evolve

from polarnode.core.codec.json import read_json
from polarnode.core.conversation import Constraint, Conversation, Json, Message, ModelRequest, Sampling
from polarnode.core.errors import Refused
from polarnode.providers.openai_chat.shapes import (
    AssistantMessage,
    ChatRequest,
    Content,
    MessageShape,
    NotTextPart,
    RefusalPart,
    ResponseFormat,
    ResultContent,
    SystemMessage,
    TextPartShape,
    ToolMessage,
    UnseenPart,
    UserMessage,
)
from polarnode.providers.openai_chat.tools import read_call, read_choice, read_tools
from polarnode.providers.openai_chat.write import REASONING_DETAILS, detail_refs, wants_details
from polarnode.providers.read_parts import PartsCache
from polarnode.providers.shapes import (
    as_tuple,
    compact,
    non_text_error,
    paragraphs,
    read_body,
    replace_media,
    unseen,
)
from polarnode.providers.volatile import without_volatile

# ── constraints ────────────────────────────────────────────────────────────

_ANY_OBJECT = Constraint(kind="json_schema", text='{"type":"object"}')


def constraint(request: ChatRequest) -> Constraint | None:
    """The constraint on the answer. Raises Refused if there is more than one."""
    found = dict(_all_constraints(request))
    if len(found) > 1:
        first, second, *_ = found
        raise Refused(
            f"{first[2:]} and {second[2:]} both say what the answer must match: send one", path=second
        )
    return next((evolve(each, path=path) for path, each in found.items()), None)


def _all_constraints(request: ChatRequest) -> Iterator[tuple[str, Constraint]]:
    if request.response_format is not None and request.response_format.type != "text":
        yield "$.response_format", _format_constraint(request.response_format)
    yield from _schema_constraints(request)
    yield from _grammar_constraints(request)


def _schema_constraints(request: ChatRequest) -> Iterator[tuple[str, Constraint]]:
    new = request.structured_outputs
    if new is not None and new.json_object:
        yield "$.structured_outputs.json_object", _ANY_OBJECT
    schemas = {
        "$.json_schema": request.json_schema,
        "$.guided_json": request.guided_json,
        "$.structured_outputs.json": new.json if new is not None else None,
    }
    for path, schema in schemas.items():
        if schema is not None:
            yield path, Constraint(kind="json_schema", text=_schema_text(schema, path))


def _grammar_constraints(request: ChatRequest) -> Iterator[tuple[str, Constraint]]:
    new = request.structured_outputs
    regexes = {
        "$.regex": request.regex,
        "$.guided_regex": request.guided_regex,
        "$.structured_outputs.regex": new.regex if new else None,
    }
    grammars = {
        "$.ebnf": request.ebnf,
        "$.guided_grammar": request.guided_grammar,
        "$.structured_outputs.grammar": new.grammar if new else None,
    }
    choices = {
        "$.guided_choice": request.guided_choice,
        "$.structured_outputs.choice": new.choice if new else None,
    }
    yield from (
        (path, Constraint(kind="regex", text=_some(text, path)))
        for path, text in regexes.items()
        if text is not None
    )
    yield from (
        (path, Constraint(kind="ebnf", text=_some(text, path)))
        for path, text in grammars.items()
        if text is not None
    )
    yield from (
        (path, Constraint(kind="ebnf", text=_one_of(words, path)))
        for path, words in choices.items()
        if words is not None
    )


def _format_constraint(shape: ResponseFormat) -> Constraint:
    schema = (
        shape.json_schema.schema if shape.type == "json_schema" and shape.json_schema is not None else None
    )
    return _ANY_OBJECT if schema is None else Constraint(kind="json_schema", text=compact(schema))


def _schema_text(value: dict[str, Json] | str, path: str) -> str:
    """A schema, or the JSON text of one."""
    try:
        schema = read_json(value.encode(errors="replace")) if isinstance(value, str) else value
    except Refused as error:
        raise Refused(f"{path[2:]} is no JSON schema: {error}", path=path) from None
    if not isinstance(schema, dict | bool):
        raise Refused(f"{path[2:]} is no JSON schema: send an object", path=path)
    return compact(schema)


def _some(text: str, path: str) -> str:
    if not text:
        raise Refused(f"{path[2:]} is empty: leave it out, or say what the answer must match", path=path)
    return text


def _one_of(words: tuple[str, ...], path: str) -> str:
    if not words or "" in words:
        raise Refused(f"{path[2:]} must hold at least one word, and none that is empty", path=path)
    return "root ::= " + " | ".join(json.dumps(word, ensure_ascii=False) for word in words)


# ── thinking ────────────────────────────────────────────────────────────

_THINKING_KEYWORDS = ("enable_thinking", "thinking")  # the name that Qwen and GLM use, and DeepSeek's
_TYPES = {"enabled": True, "disabled": False}


def thinking(request: ChatRequest) -> bool | None:
    """Whether the client wants thinking. None if it leaves that open."""
    return next((value for value in _requested(request) if value is not None), None)


def unused(request: ChatRequest) -> Iterator[str]:
    """The paths of settings for thinking and the template that are not used."""
    if request.reasoning_effort not in (None, "none"):
        yield "$.reasoning_effort"
    if request.reasoning is not None and request.reasoning.effort not in (None, "none"):
        yield "$.reasoning.effort"
    yield from (
        f"$.chat_template_kwargs.{name}"
        for name in request.chat_template_kwargs or {}
        if name not in _THINKING_KEYWORDS
    )


def _requested(request: ChatRequest) -> Iterator[bool | None]:
    yield request.enable_thinking
    for name in _THINKING_KEYWORDS:
        yield _flag(request, name)
    yield _TYPES.get(request.thinking.type or "") if request.thinking is not None else None
    if request.reasoning is not None:
        yield request.reasoning.enabled
        yield False if request.reasoning.effort == "none" else None
    yield False if request.reasoning_effort == "none" else None


def _flag(request: ChatRequest, name: str) -> bool | None:
    value = (request.chat_template_kwargs or {}).get(name)
    if value is None or isinstance(value, bool):
        return value
    path = f"$.chat_template_kwargs.{name}"
    raise Refused(f"{path[2:]} must be true or false or null, not {value!r}", path=path)


# ── read ────────────────────────────────────────────────────────────


def read(
    body: bytes, *, headers: Mapping[str, str], model: str | None, parts: PartsCache | None = None
) -> ModelRequest:
    """Read a Chat Completions body. Raises Refused with the path of the field."""
    parts = parts or PartsCache()
    request, unknown = read_body(body, ChatRequest, parts)
    listed = parts.convert_list(request.tools or (), read_tools)
    messages, volatile = without_volatile(tuple(parts.convert(request.messages, _message)))
    choice = read_choice(request.tool_choice, listed.tools)
    prefilled = bool(request.continue_final_message)
    if prefilled and (not messages or messages[-1].role != "assistant"):
        raise Refused(
            "continue_final_message needs a last message of the assistant: send one, or leave it out",
            path="$.continue_final_message",
        )
    conversation = Conversation(
        messages=messages,
        tools=listed.tools,
        tool_choice=choice,
        thinking=thinking(request),
        prefilled=prefilled,
    )
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
        extras={REASONING_DETAILS: True} if wants_details(request) else {},
    )


# ── messages ──────────────────────────────────────────────────────────────────


def _message(shape: MessageShape) -> Message:
    match shape:
        case SystemMessage():
            return Message(role="system", text=paragraphs(_texts(shape.content)))
        case UserMessage():
            return Message(role="user", text=paragraphs(_texts(shape.content)))
        case ToolMessage():
            text = paragraphs(map(replace_media, _texts(shape.content)))
            return Message(role="tool", text=text, call_id=shape.tool_call_id)
        case AssistantMessage():
            return _assistant_message(shape)
        case _:
            assert_never(shape)


def _assistant_message(shape: AssistantMessage) -> Message:
    calls = tuple(read_call(call) for call in shape.tool_calls or ())
    return Message(
        role="assistant",
        # The parts of this node's answer are joined as in `Answer.text`.
        text="".join(_texts(shape.content)) + (shape.refusal or ""),
        calls=calls,
        thinking=_text_or_empty(shape.reasoning_content) or _text_or_empty(shape.reasoning),
        refs=tuple(call.id for call in calls if call.id) + tuple(detail_refs(shape.reasoning_details)),
    )


def _texts(content: Content | ResultContent) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    for part in () if isinstance(content, str) else content or ():
        match part:
            case TextPartShape():
                yield part.text
            case RefusalPart():
                yield part.refusal
            case UnseenPart():
                yield unseen(part.type)
            case NotTextPart():
                raise non_text_error(part.type)
            case _:
                assert_never(part)


def _text_or_empty(value: Json) -> str:
    return value if isinstance(value, str) else ""  # Some clients put an object of their own here.


# ── settings ──────────────────────────────────────────────────────────────────


def _unused(request: ChatRequest) -> Iterator[str]:
    """The paths of fields without effect. Top logprobs are shown only together with logprobs, as in the API
    itself.
    """
    if request.top_logprobs and not request.logprobs:
        yield "$.top_logprobs"
    yield from unused(request)


def _sampling(request: ChatRequest) -> Sampling:
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        # 0 and -1 both mean all tokens
        top_k=request.top_k if request.top_k and request.top_k > 0 else None,
        min_p=request.min_p,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stop=as_tuple(request.stop),
        seed=request.seed,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
    )


def _hints(headers: Mapping[str, str]) -> dict[str, str]:
    """The agent that sent the request. opencode sends a sub-agent's session id and its parent's; OpenHands
    names its conversation.
    """
    session = headers.get("x-session-id") or headers.get("x-litellm-session-id") or ""
    parent = headers.get("x-parent-session-id") or ""
    if not session and not parent:
        return {}
    return {"session": session, "agent": session if parent else "", "parent": parent} | (
        {"kind": "subagent"} if parent else {}
    )
