"""What a turn heard, on the wire: as JSON in a full row, and as the journal's bytes.

The rule for whoever edits it: messages stand as they are, letter by letter, and what they do not have is left
out; a reader ignores what it does not know. In the journal a message is a list as short as it can be, because
most are a role and a text.

A turn as a row of JSON, and a session's prompts rebuilt from its deltas.

The rule for whoever edits it: a row says everything about a turn but its tokens, and `prompt_sha256` lets
anyone who has the tokens check them; with `turns=full` the deltas are there too, and `read_turn` of that is
the turn again.
"""

from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Literal

from attrs import field, frozen

from polarnode.core.arrays import ids
from polarnode.core.codec.arrays import (
    Encode,
    RoutedShape,
    TopShape,
    carried_json,
    read_floats,
    read_ids,
    read_routed,
    read_top,
)
from polarnode.core.codec.json import dump_json, plain, read_json
from polarnode.core.conversation import (
    Answer,
    FinishReason,
    Json,
    Message,
    Part,
    Role,
    Sampling,
    TextPart,
    ThinkingPart,
    ToolCall,
    Usage,
)
from polarnode.core.trajectory import NewMessages, Turn, TurnKind, TurnRole, TurnState, VersionSpan

# ── heard ────────────────────────────────────────────────────────────

# ── as JSON ───────────────────────────────────────────────────────────────────


def heard_json(heard: NewMessages | None) -> Json:
    """The messages, and of a root its tools and its thinking flag."""
    if heard is None:
        return None
    messages: list[Json] = [_message_json(message) for message in heard.messages]
    return {
        "messages": messages,
        "tools": read_json(heard.tools.encode()) if heard.tools else [],
        "thinking": heard.thinking,
    }


def _message_json(message: Message) -> dict[str, Json]:
    said: dict[str, Json] = {"role": message.role, "text": message.text}
    if message.calls:
        said["calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.calls
        ]
    if message.call_id is not None:
        said["call_id"] = message.call_id
    if message.thinking:
        said["thinking"] = message.thinking
    return said


@frozen(kw_only=True)
class HeardCallShape:
    id: str
    name: str
    arguments: str


@frozen(kw_only=True)
class HeardMessageShape:
    role: Role
    text: str = ""
    calls: tuple[HeardCallShape, ...] = ()
    call_id: str | None = None
    thinking: str = ""


@frozen(kw_only=True)
class HeardShape:
    messages: tuple[HeardMessageShape, ...] = ()
    tools: tuple[Json, ...] = ()
    thinking: bool | None = None


def read_heard(shape: HeardShape | None) -> NewMessages | None:
    """What a full row says."""
    if shape is None:
        return None
    tools = dump_json(list(shape.tools)).decode() if shape.tools else ""
    return NewMessages(messages=tuple(map(_message_of, shape.messages)), tools=tools, thinking=shape.thinking)


def _message_of(shape: HeardMessageShape) -> Message:
    calls = tuple(ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in shape.calls)
    return Message(
        role=shape.role, text=shape.text, calls=calls, call_id=shape.call_id, thinking=shape.thinking
    )


# ── as the journal's bytes ────────────────────────────────────────────────────


def pack_heard(heard: NewMessages) -> dict[str, Any]:
    """What msgpack knows, without what is not there."""
    packed: dict[str, Any] = {"messages": [_packed(message) for message in heard.messages]}
    if heard.tools:
        packed["tools"] = heard.tools
    if heard.thinking is not None:
        packed["thinking"] = heard.thinking
    return packed


def _packed(message: Message) -> list[Any]:
    if not message.calls and message.call_id is None and not message.thinking:
        return [message.role, message.text]
    calls = [[call.id, call.name, call.arguments] for call in message.calls]
    return [message.role, message.text, calls, message.call_id, message.thinking]


def unpack_heard(found: Mapping[str, Any] | None) -> NewMessages | None:
    """What `pack_heard` was given."""
    return (
        None
        if found is None
        else NewMessages(**{**found, "messages": tuple(_unpacked(*message) for message in found["messages"])})
    )


def _unpacked(
    role: Role, text: str, calls: Any = (), call_id: str | None = None, thinking: str = ""
) -> Message:
    read = tuple(ToolCall(id=name, name=tool, arguments=arguments) for name, tool, arguments in calls)
    return Message(role=role, text=text, calls=read, call_id=call_id, thinking=thinking)


# ── turns ────────────────────────────────────────────────────────────

# ── what the deltas add up to ─────────────────────────────────────────────────


def sequence(turns: Mapping[int, Turn], index: int) -> "array[int]":
    """Everything turn `index` was conditioned on and then its sample: int32[prompt_length + S]. KeyError when
    an ancestor is not there.
    """
    line = line_of(turns, index)
    if line is None:
        raise KeyError(index)
    whole = ids()
    for turn in line:
        whole.extend(turn.prompt_delta)
        whole.extend(turn.sampled)
    return whole


def line_of(turns: Mapping[int, Turn], index: int, *, since: int = -1) -> list[Turn] | None:
    """The turns from a root to `index`, in that order; None when an ancestor is not there.

    `since`: not from the root on, but from the turn that brought the token at that place of the row.
    """
    line: list[Turn] = []
    at: int | None = index
    while at is not None:
        turn = turns.get(at)
        if turn is None:
            return None
        line.append(turn)
        at = None if turn.begin <= since else turn.parent
    line.reverse()
    return line


def prompt_digests(turns: Sequence[Turn]) -> dict[int, str]:
    """By turn index: the SHA-256, in hex, of the turn's whole prompt as little-endian int32. A turn whose
    ancestor is missing has none.
    """
    digests: dict[int, str] = {}
    # the hash of prompt and sample, copied for each child: every token is hashed once, however long the
    # session
    after: dict[int, Any] = {}
    for turn in sorted(turns, key=lambda turn: turn.index):
        if turn.parent is not None and turn.parent not in after:
            continue
        state = sha256() if turn.parent is None else after[turn.parent].copy()
        state.update(turn.prompt_delta)
        digests[turn.index] = state.hexdigest()
        state.update(turn.sampled)
        after[turn.index] = state
    return digests


def weight_versions(spans: Sequence[VersionSpan]) -> list[str]:
    """Each version once, in the order it first sampled."""
    return list(dict.fromkeys(span.version for span in spans))


# ── out ───────────────────────────────────────────────────────────────────────


def turn_row(turn: Turn, *, prompt_sha256: str | None, left_out: str | None) -> dict[str, Json]:
    """The row of the turns table. Times are seconds; `started` is since the epoch, the others are
    after it.
    """
    return {
        "index": turn.index,
        "provider": turn.provider,
        "lineage": turn.lineage,
        "parent": turn.parent,
        "kind": turn.kind,
        "reason": turn.reason,
        "role": turn.role,
        "state": turn.state,
        "finish_reason": turn.finish_reason,
        "prompt_length": turn.prompt_length,
        "close_length": turn.close_length,
        "matched": turn.matched,
        "messages": turn.messages,
        "sampled_length": len(turn.sampled),
        "prompt_sha256": prompt_sha256,
        "sampling": {"asked": plain(turn.asked), "used": plain(turn.used)},
        "usage": plain(turn.usage),
        "timing": {"started": turn.started, "first_token_s": turn.first_token_s, "ended_s": turn.ended_s},
        "notes": list(turn.notes),
        "left_out": left_out,
        "weight_versions": list[Json](weight_versions(turn.version_spans)),
    }


def turn_tokens(turn: Turn, encode: Encode) -> dict[str, Json]:
    """What `turns=full` adds to a row."""
    return {
        "prompt_delta": encode(turn.prompt_delta),
        "sampled": encode(turn.sampled),
        "logprobs": encode(turn.logprobs),
        "version_spans": plain(turn.version_spans),
        **carried_json(turn, encode),
        "request_key": turn.request_key,
        "before_key": turn.before_key,
        "message_key": turn.message_key,
        "heard": heard_json(turn.heard),
        "answer": None if turn.answer is None else _answer_json(turn.answer),
    }


def _answer_json(answer: Answer) -> dict[str, Json]:
    parts: list[Json] = [_part_json(part) for part in answer.parts]
    return {
        "parts": parts,
        "finish_reason": answer.finish_reason,
        "stop_string": answer.stop_string,
        "malformed_calls": answer.malformed_calls,
    }


def _part_json(part: Part) -> dict[str, Json]:
    match part:
        case TextPart(text):
            return {"type": "text", "text": text}
        case ThinkingPart(text):
            return {"type": "thinking", "text": text}
        case ToolCall():
            return {"type": "tool_call", "id": part.id, "name": part.name, "arguments": part.arguments}


# ── in ────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class TextShape:
    type: Literal["text"]
    text: str


@frozen(kw_only=True)
class ThinkingShape:
    type: Literal["thinking"]
    text: str


@frozen(kw_only=True)
class CallShape:
    type: Literal["tool_call"]
    id: str
    name: str
    arguments: str


@frozen(kw_only=True)
class AnswerShape:
    parts: tuple[TextShape | ThinkingShape | CallShape, ...]
    finish_reason: FinishReason
    stop_string: str | None = None
    malformed_calls: int = 0


@frozen(kw_only=True)
class SamplingShape:
    asked: Sampling
    used: Sampling


@frozen(kw_only=True)
class TurnTimingShape:
    started: float
    first_token_s: float | None
    ended_s: float


@frozen(kw_only=True)
class TurnShape:
    """A row, with its tokens when it is full (`prompt_delta` is then not None)."""

    index: int
    provider: str
    lineage: int
    parent: int | None
    kind: TurnKind
    reason: str
    role: TurnRole
    state: TurnState
    finish_reason: FinishReason
    prompt_length: int
    sampling: SamplingShape
    usage: Usage
    timing: TurnTimingShape
    notes: tuple[str, ...] = ()
    close_length: int = 0
    matched: int | None = None
    messages: int | None = None
    prompt_delta: Json = None
    sampled: Json = None
    logprobs: Json = None
    version_spans: tuple[VersionSpan, ...] = ()
    request_key: str = ""
    before_key: str = ""
    message_key: str = ""
    heard: HeardShape | None = None
    answer: AnswerShape | None = field(default=None)
    top_logprobs: TopShape | None = None
    routed_experts: RoutedShape | None = None


def turn_of(shape: TurnShape, session_id: str, path: str) -> Turn:
    """The turn a full row says. Refused when an array is none."""
    return Turn(
        session_id=session_id,
        index=shape.index,
        provider=shape.provider,
        lineage=shape.lineage,
        parent=shape.parent,
        kind=shape.kind,
        reason=shape.reason,
        role=shape.role,
        state=shape.state,
        prompt_delta=read_ids(shape.prompt_delta, f"{path}.prompt_delta"),
        prompt_length=shape.prompt_length,
        close_length=shape.close_length,
        matched=shape.matched,
        messages=shape.messages,
        heard=read_heard(shape.heard),
        sampled=read_ids(shape.sampled, f"{path}.sampled"),
        logprobs=read_floats(shape.logprobs, f"{path}.logprobs"),
        version_spans=shape.version_spans,
        finish_reason=shape.finish_reason,
        request_key=shape.request_key,
        before_key=shape.before_key,
        message_key=shape.message_key,
        answer=None if shape.answer is None else _answer_of(shape.answer),
        asked=shape.sampling.asked,
        used=shape.sampling.used,
        usage=shape.usage,
        started=shape.timing.started,
        first_token_s=shape.timing.first_token_s,
        ended_s=shape.timing.ended_s,
        notes=shape.notes,
        top=read_top(shape.top_logprobs, f"{path}.top_logprobs"),
        routed=read_routed(shape.routed_experts, f"{path}.routed_experts"),
    )


def _answer_of(shape: AnswerShape) -> Answer:
    parts = tuple(_part_of(part) for part in shape.parts)
    return Answer(
        parts=parts,
        finish_reason=shape.finish_reason,
        stop_string=shape.stop_string,
        malformed_calls=shape.malformed_calls,
    )


def _part_of(shape: TextShape | ThinkingShape | CallShape) -> Part:
    match shape:
        case TextShape():
            return TextPart(shape.text)
        case ThinkingShape():
            return ThinkingPart(shape.text)
        case CallShape():
            return ToolCall(id=shape.id, name=shape.name, arguments=shape.arguments)
