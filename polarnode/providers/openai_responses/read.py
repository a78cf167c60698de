"""Responses: a request as a conversation, its tools, its sampling and its agent.

The agent is read from the headers of Codex and opencode and from what they repeat in the body. It has a name
only where its harness marks it as not the main one, because a second name for the main agent would make a
second agent of it.

An unknown field, item or tool is never a reason to refuse; what cannot be honoured and would be missed is.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from polarnode.core.codec.json import read_json
from polarnode.core.conversation import Constraint, Conversation, Json, Message, ModelRequest, Sampling
from polarnode.core.errors import Refused
from polarnode.providers.contract import Envelope, Memory
from polarnode.providers.openai_responses import history
from polarnode.providers.openai_responses.history import INSTRUCTION
from polarnode.providers.openai_responses.items import Transcript
from polarnode.providers.openai_responses.shapes import (
    Object,
    ReasoningShape,
    ResponsesRequest,
    TextConfigShape,
)
from polarnode.providers.openai_responses.tools import shaped, tool_choice
from polarnode.providers.shapes import compact, read_body
from polarnode.providers.volatile import without_volatile

# ── hints ────────────────────────────────────────────────────────────

_SESSION: Final = ("session-id", "session_id", "x-session-id", "x-litellm-session-id")
_METADATA: Final = "x-codex-turn-metadata"
# values of Codex's `request_kind`; the usual one is `turn`
_KINDS: Final = {"compaction": "compaction", "prewarm": "auxiliary"}


def hints(request: ResponsesRequest, headers: Mapping[str, str], *, compacts: bool) -> dict[str, str]:
    """What the request states about the agent that sent it. `compacts`: the request itself is a
    compaction.
    """
    body = _object(request.client_metadata)
    turn = _turn(headers.get(_METADATA)) or _turn(_text(body.get(_METADATA)))
    parent = (
        headers.get("x-codex-parent-thread-id")
        or _text(turn.get("parent_thread_id"))
        or headers.get("x-parent-session-id")
        or ""
    )
    helper = headers.get("x-openai-subagent") or _text(turn.get("subagent_kind"))
    session = next((headers[name] for name in _SESSION if headers.get(name)), "")
    session = session or _text(body.get("session_id")) or _text(request.prompt_cache_key)
    agent = (headers.get("thread-id") or _text(turn.get("thread_id")) or session) if parent or helper else ""
    named = {
        "session": session,
        "agent": agent,
        "parent": parent,
        "kind": "compaction" if compacts else _kind(turn, helper, parent),
    }
    present = {name: value for name, value in named.items() if value}
    return {"session": "", "agent": "", "parent": ""} | present if present else {}


def _kind(turn: Mapping[str, Json], helper: str, parent: str) -> str:
    """`compact` is Codex's own name for the helper that writes summaries."""
    if "compact" in helper:
        return "compaction"
    return _KINDS.get(_text(turn.get("request_kind"))) or ("subagent" if helper or parent else "")


def _turn(header: str | None) -> Mapping[str, Json]:
    """Codex's metadata of the turn, JSON in a header; empty where there is none."""
    try:
        return _object(read_json(header.encode("utf-8", "replace"))) if header else {}
    except Refused:
        return {}


def _object(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, dict) else {}


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


# ── read ────────────────────────────────────────────────────────────

SEALED_THINKING: Final = "reasoning.encrypted_content"
LOGPROBS: Final = "message.output_text.logprobs"

# The request fields that a response echoes, with their values where the request has none.
_ECHOED: Final[Object] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


def read(body: bytes, envelope: Envelope) -> ModelRequest:
    """Read a Responses body, or one whose conversation is to be compacted or counted. Raises Refused with the
    path of the field.
    """
    request, unknown = read_body(body, ResponsesRequest)
    if request.model is None and envelope.operation == "generate":
        raise Refused("model is missing: it is required", path="$.model")
    items = list(_items(request, envelope.memory))
    compacts = envelope.operation == "compact" or _triggers(items)
    transcript = _transcript(request, items[:-1] if _triggers(items) else items, compacts=compacts)
    choice, notes = tool_choice(request.tool_choice, (*transcript.head.tools, *transcript.later))
    conversation = Conversation(
        messages=tuple(transcript.messages),
        tools=tuple(transcript.head.tools),
        tool_choice="none" if compacts else choice,
        thinking=_thinking(request),
    )
    return ModelRequest(
        provider="openai_responses",
        model=envelope.model or request.model or "",
        conversation=conversation,
        sampling=Sampling(
            temperature=request.temperature, top_p=request.top_p, max_tokens=request.max_output_tokens
        ),
        stream=bool(request.stream) and envelope.operation == "generate",
        hints=hints(request, envelope.headers, compacts=compacts),
        constraint=None if compacts else _constraint(request),
        logprobs=(request.top_logprobs or 0) if LOGPROBS in (request.include or ()) else None,
        one_call=request.parallel_tool_calls is False,
        generate=request.generate is not False,
        extras=_extras(request, envelope, [item for _, item in items], transcript, compacts=compacts),
        ignored=(*unknown, *_unused(request), *transcript.head.ignored, *transcript.ignored),
        notes=(*_remarks(request), *notes, *transcript.head.notes, *transcript.notes),
    )


# ── transcript ──────────────────────────────────────────────────────────────


def _items(request: ResponsesRequest, memory: Memory) -> Iterator[tuple[str, Object]]:
    """Every item of the conversation with its path, stored ones first, with references replaced by the items
    they name.
    """
    if request.previous_response_id is not None:
        for item in history.previous(memory, request.previous_response_id):
            yield "$.previous_response_id", item
    sent = request.input
    listed: tuple[Json, ...] = ({"role": "user", "content": sent},) if isinstance(sent, str) else sent or ()
    for index, value in enumerate(listed):
        path = f"$.input[{index}]"
        item = shaped(value, Object, path)
        name = item.get("id")
        refers = item.get("type") == "item_reference" or (item.get("type") is None and "role" not in item)
        found = history.referenced(memory, name, path) if refers and isinstance(name, str) else None
        yield path, item if found is None else found


def _triggers(items: list[tuple[str, Object]]) -> bool:
    """Whether the last item asks for a compaction of the items before it."""
    return bool(items) and items[-1][1].get("type") == "compaction_trigger"


def _transcript(request: ResponsesRequest, items: list[tuple[str, Object]], *, compacts: bool) -> Transcript:
    transcript = Transcript()
    transcript.head.read(request.tools or (), "$.tools")
    if request.instructions:
        transcript.add(Message(role="system", text=request.instructions))
    for path, item in items:
        transcript.read(item, path)
    transcript.close()
    transcript.messages, volatile = _steady(transcript.messages)
    transcript.ignored += ["$.input[-1]"] if volatile else []
    if not transcript.messages and request.generate is not False:
        raise Refused("input is empty: send at least one item", path="$.input")
    if compacts:
        transcript.add(Message(role="user", text=INSTRUCTION))
    return transcript


def _steady(messages: list[Message]) -> tuple[list[Message], bool]:
    """The messages without a harness's volatile context, and whether there was any."""
    kept, volatile = without_volatile(tuple(messages))
    return list(kept), volatile


# ── settings ──────────────────────────────────────────────────────────────────


def _thinking(request: ResponsesRequest) -> bool | None:
    """Whether to think. An effort other than none leaves it to the template."""
    shape = shaped(request.reasoning or {}, ReasoningShape, "$.reasoning")
    return False if shape.effort == "none" else None


def _constraint(request: ResponsesRequest) -> Constraint | None:
    shape = shaped(request.text or {}, TextConfigShape, "$.text").format
    if shape is None or shape.type == "text":
        return None
    if shape.type == "json_object":
        return Constraint(kind="json_schema", text='{"type":"object"}')
    if shape.schema is None:
        raise Refused(
            "text.format.schema is missing: it is required with json_schema", path="$.text.format.schema"
        )
    return Constraint(kind="json_schema", text=compact(shape.schema))


def _unused(request: ResponsesRequest) -> Iterator[str]:
    """The paths of fields without effect. Logprobs are shown only when `include` asks for them, as in the API
    itself.
    """
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
        yield "$.top_logprobs"
    if request.text and request.text.get("verbosity") is not None:
        yield "$.text.verbosity"


def _remarks(request: ResponsesRequest) -> Iterator[str]:
    if request.truncation not in (None, "disabled"):
        yield (
            f"truncation {request.truncation!r} was asked: nothing is ever dropped, a conversation that is"
            " too long is refused"
        )


# ── extras for the writer ────────────────────────────────────────────────


def _extras(
    request: ResponsesRequest,
    envelope: Envelope,
    items: list[Object],
    transcript: Transcript,
    *,
    compacts: bool,
) -> Object:
    """What the writer needs of the request: the echoed fields; whether thinking is sealed; the format of
    tools that were added later; what to store, or what a compaction keeps visible.
    """
    extras: Object = {"echo": _echo(request), "seals": SEALED_THINKING in (request.include or ())}
    if transcript.later:
        extras["later"] = {tool.name: dict(tool.spelling) for tool in transcript.later}
    if compacts:
        extras["compacts"] = True
    if envelope.operation == "compact":
        extras["sent"] = [
            item for item in items if item.get("role") == "user" and item.get("type") in (None, "message")
        ]
    elif envelope.operation == "generate" and request.store is not False:
        # A conversation after a compaction begins with its one item, which replaces all before it.
        extras["keeps"] = history.to_keep(envelope.memory, [] if compacts else items).as_json()
    return extras


def _echo(request: ResponsesRequest) -> Object:
    echoed: Object = {name: value for name in _ECHOED if (value := getattr(request, name)) is not None}
    text: Object = {"format": {"type": "text"}}
    reasoning: Object = {"effort": None, "summary": None}
    more: Object = {
        "text": text | (request.text or {}),
        "reasoning": reasoning | (request.reasoning or {}),
        "tools": list(request.tools or ()),
    }
    return _ECHOED | echoed | more
