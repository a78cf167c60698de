"""Responses: read a request as a conversation with its tools, its sampling and its agent.

The agent is read from the headers of Codex and opencode, and from what they repeat in the body. It has a name
only if its harness marks it as not the main one, because a name for the main agent would make it look like a
second agent.

An unknown field, item or tool is never a reason to refuse. What the client would miss and the node cannot
provide is refused.

`transcript` turns the items of a request into messages.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from attrs import frozen

from polarnode.core.codec.json import read_json
from polarnode.core.conversation import Constraint, Conversation, Json, Message, ModelRequest, Sampling, Tool
from polarnode.core.errors import Refused
from polarnode.providers.contract import RequestEnvelope
from polarnode.providers.openai_responses import history
from polarnode.providers.openai_responses.history import INSTRUCTION
from polarnode.providers.openai_responses.shapes import (
    JsonObject,
    ReasoningShape,
    ResponsesRequest,
    TextConfigShape,
)
from polarnode.providers.openai_responses.tools import ToolReader, structure_at, tool_choice
from polarnode.providers.openai_responses.transcript import KnownItem, Transcript, read_known_item
from polarnode.providers.read_parts import PartsCache, is_list_of_objects
from polarnode.providers.shapes import compact, read_body
from polarnode.providers.volatile import without_volatile

# ── hints ────────────────────────────────────────────────────────────

_SESSION: Final = ("session-id", "session_id", "x-session-id", "x-litellm-session-id")
_METADATA_HEADER: Final = "x-codex-turn-metadata"
# values of Codex's `request_kind`; the usual value is `turn`
_KINDS: Final = {"compaction": "compaction", "prewarm": "auxiliary"}


def hints(request: ResponsesRequest, headers: Mapping[str, str], *, compacts: bool) -> dict[str, str]:
    """What the request says about the agent that sent it. `compacts`: the request itself is a compaction."""
    body = _object(request.client_metadata)
    turn = _turn(headers.get(_METADATA_HEADER)) or _turn(_text(body.get(_METADATA_HEADER)))
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
    """The kind of agent. `compact`, `memory_consolidation` and `guardian` are Codex's own helpers: they write
    summaries, note what to remember, and judge calls.
    """
    if "compact" in helper:
        return "compaction"
    if "memory_consolidation" in helper or "guardian" in helper:
        return "auxiliary"
    return _KINDS.get(_text(turn.get("request_kind"))) or ("subagent" if helper or parent else "")


def _turn(header: str | None) -> Mapping[str, Json]:
    """Codex's metadata of the turn, which is JSON in a header. Empty if there is none."""
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

# The request fields that a response echoes, with their values for a request that does not have them.
_ECHO_DEFAULTS: Final[JsonObject] = {
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


def read(body: bytes, envelope: RequestEnvelope) -> ModelRequest:
    """Read a Responses body, or a body whose conversation is to be compacted or counted. Raises Refused with
    the path of the field.
    """
    request, unknown = read_body(body, ResponsesRequest, envelope.parts)
    if request.model is None and envelope.operation == "generate":
        raise Refused("model is missing: it is required", path="$.model")
    items = list(_items(request, envelope))
    compacts = envelope.operation == "compact" or _asks_compaction(items)
    listed = _listed(request, envelope.parts)
    transcript = _read_transcript(
        request, items[:-1] if _asks_compaction(items) else items, listed, compacts=compacts
    )
    tools = listed.tools if len(transcript.head.tools) == len(listed.tools) else tuple(transcript.head.tools)
    choice, notes = tool_choice(request.tool_choice, (*tools, *transcript.later))
    conversation = Conversation(
        messages=tuple(transcript.messages),
        tools=tools,
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
        constraint=None if compacts else _read_constraint(request),
        logprobs=(request.top_logprobs or 0) if LOGPROBS in (request.include or ()) else None,
        one_call=request.parallel_tool_calls is False,
        generate=request.generate is not False,
        extras=_writer_extras(request, envelope, items, transcript, compacts=compacts),
        ignored=(*unknown, *_unused(request), *transcript.head.ignored, *transcript.ignored),
        notes=(*_request_notes(request), *notes, *transcript.head.notes, *transcript.notes),
    )


# ── transcript ──────────────────────────────────────────────────────────────


@frozen
class _InputItem:
    """An item of the conversation, and what is known about it from earlier requests if it is in the body."""

    path: str
    value: JsonObject
    known: KnownItem | None = None


def _items(request: ResponsesRequest, envelope: RequestEnvelope) -> Iterator[_InputItem]:
    """Every item of the conversation, stored ones first. References are replaced by the items that
    they name.
    """
    if request.previous_response_id is not None:
        for item in history.previous(envelope.memory, request.previous_response_id):
            yield _InputItem("$.previous_response_id", item)
    sent = request.input
    listed: list[Json] = [{"role": "user", "content": sent}] if isinstance(sent, str) else list(sent or ())
    known = envelope.parts.convert_json(listed, read_known_item) if is_list_of_objects(listed) else None
    for index, value in enumerate(listed):
        path = f"$.input[{index}]"
        item = value if type(value) is dict else structure_at(value, JsonObject, path)
        name = item.get("id")
        refers = item.get("type") == "item_reference" or (item.get("type") is None and "role" not in item)
        found = history.referenced(envelope.memory, name, path) if refers and isinstance(name, str) else None
        if found is None:
            yield _InputItem(path, item, None if known is None else known[index])
        else:
            yield _InputItem(path, found)


def _asks_compaction(items: list[_InputItem]) -> bool:
    """Whether the last item asks for a compaction of the items before it."""
    return bool(items) and items[-1].value.get("type") == "compaction_trigger"


@frozen
class _Listed:
    """The content of the request's own list of tools."""

    tools: tuple[Tool, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]


def _listed(request: ResponsesRequest, parts: PartsCache) -> _Listed:
    sent = list(request.tools or ())
    if not is_list_of_objects(sent):
        return _read_tools(sent)
    return parts.convert_list(parts.convert_json(sent, _same_tool), _read_tools)


def _same_tool(tool: JsonObject) -> JsonObject:
    return tool


def _read_tools(sent: Sequence[Json]) -> _Listed:
    box = ToolReader()
    box.read(sent, "$.tools")
    return _Listed(tuple(box.tools), tuple(box.ignored), tuple(box.notes))


def _read_transcript(
    request: ResponsesRequest, items: list[_InputItem], listed: _Listed, *, compacts: bool
) -> Transcript:
    transcript = Transcript()
    transcript.head = ToolReader(list(listed.tools), list(listed.ignored), list(listed.notes))
    if request.instructions:
        transcript.add(Message(role="system", text=request.instructions))
    for item in items:
        transcript.take(item.value, item.path, item.known)
    transcript.close()
    transcript.messages, volatile = _drop_volatile(transcript.messages)
    transcript.ignored += ["$.input[-1]"] if volatile else []
    if not transcript.messages and request.generate is not False:
        raise Refused("input is empty: send at least one item", path="$.input")
    if compacts:
        transcript.add(Message(role="user", text=INSTRUCTION))
    return transcript


def _drop_volatile(messages: list[Message]) -> tuple[list[Message], bool]:
    """The messages without a harness's volatile context, and whether there was any."""
    kept, volatile = without_volatile(tuple(messages))
    return list(kept), volatile


# ── settings ──────────────────────────────────────────────────────────────────


def _thinking(request: ResponsesRequest) -> bool | None:
    """Whether to think. An effort other than none leaves it to the template."""
    shape = structure_at(request.reasoning or {}, ReasoningShape, "$.reasoning")
    return False if shape.effort == "none" else None


def _read_constraint(request: ResponsesRequest) -> Constraint | None:
    shape = structure_at(request.text or {}, TextConfigShape, "$.text").format
    if shape is None or shape.type == "text":
        return None
    if shape.type == "json_object":
        return Constraint(kind="json_schema", text='{"type":"object"}', path="$.text.format")
    if shape.schema is None:
        raise Refused(
            "text.format.schema is missing: it is required with json_schema", path="$.text.format.schema"
        )
    return Constraint(kind="json_schema", text=compact(shape.schema), path="$.text.format.schema")


def _unused(request: ResponsesRequest) -> Iterator[str]:
    """The paths of fields without effect. Logprobs are shown only if `include` asks for them, as in the API
    itself.
    """
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
        yield "$.top_logprobs"
    if request.text and request.text.get("verbosity") is not None:
        yield "$.text.verbosity"


def _request_notes(request: ResponsesRequest) -> Iterator[str]:
    if request.truncation not in (None, "disabled"):
        yield (
            f"truncation {request.truncation!r} was asked: nothing is ever dropped, a conversation that is"
            " too long is refused"
        )


# ── extras for the writer ────────────────────────────────────────────────


def _writer_extras(
    request: ResponsesRequest,
    envelope: RequestEnvelope,
    items: list[_InputItem],
    transcript: Transcript,
    *,
    compacts: bool,
) -> JsonObject:
    """What the writer needs of the request: the echoed fields, whether thinking is sealed, the format of
    tools that were added later, and what to store or what a compaction keeps visible.
    """
    extras: JsonObject = {"echo": _echo(request), "seals": SEALED_THINKING in (request.include or ())}
    if transcript.later:
        extras["later"] = {tool.name: dict(tool.spelling) for tool in transcript.later}
    if compacts:
        extras["compacts"] = True
    if envelope.operation == "compact":
        extras["sent"] = [
            item.value
            for item in items
            if item.value.get("role") == "user" and item.value.get("type") in (None, "message")
        ]
    elif envelope.operation == "generate" and request.store is not False:
        # After a compaction a conversation begins with the compaction's single item, which replaces
        # everything before it.
        shown = [] if compacts else items
        digests = (
            history.item_digest(item.value) if item.known is None else item.known.digest for item in shown
        )
        kept = history.input_to_store(envelope.memory, [item.value for item in shown], digests)
        extras["keeps"] = kept.as_json()
    return extras


def _echo(request: ResponsesRequest) -> JsonObject:
    echoed: JsonObject = {
        name: value for name in _ECHO_DEFAULTS if (value := getattr(request, name)) is not None
    }
    text: JsonObject = {"format": {"type": "text"}}
    reasoning: JsonObject = {"effort": None, "summary": None}
    more: JsonObject = {
        "text": text | (request.text or {}),
        "reasoning": reasoning | (request.reasoning or {}),
        "tools": list(request.tools or ()),
    }
    return _ECHO_DEFAULTS | echoed | more
