"""What a turn heard, on the wire: as JSON in a full row, and as the journal's bytes.

The rule for whoever edits it: messages stand as they are, letter by letter, and what they do not have is left out; a reader ignores what it
does not know. In the journal a message is a list as short as it can be, because most are a role and a text.
"""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from polarnode.conversation import Json, Message, Role, ToolCall
from polarnode.records import Heard
from polarnode.wire.core import dump_json, read_json

# ── as JSON ───────────────────────────────────────────────────────────────────


def heard_json(heard: Heard | None) -> Json:
    """The messages, and of a root its tools and its thinking flag."""
    if heard is None:
        return None
    messages: list[Json] = [_message_json(message) for message in heard.messages]
    return {"messages": messages, "tools": read_json(heard.tools.encode()) if heard.tools else [], "thinking": heard.thinking}


def _message_json(message: Message) -> dict[str, Json]:
    said: dict[str, Json] = {"role": message.role, "text": message.text}
    if message.calls:
        said["calls"] = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.calls]
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


def read_heard(shape: HeardShape | None) -> Heard | None:
    """What a full row says."""
    if shape is None:
        return None
    tools = dump_json(list(shape.tools)).decode() if shape.tools else ""
    return Heard(messages=tuple(map(_message_of, shape.messages)), tools=tools, thinking=shape.thinking)


def _message_of(shape: HeardMessageShape) -> Message:
    calls = tuple(ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in shape.calls)
    return Message(role=shape.role, text=shape.text, calls=calls, call_id=shape.call_id, thinking=shape.thinking)


# ── as the journal's bytes ────────────────────────────────────────────────────


def pack_heard(heard: Heard) -> dict[str, Any]:
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


def unpack_heard(found: Mapping[str, Any] | None) -> Heard | None:
    """What `pack_heard` was given."""
    return None if found is None else Heard(**{**found, "messages": tuple(_unpacked(*message) for message in found["messages"])})


def _unpacked(role: Role, text: str, calls: Any = (), call_id: str | None = None, thinking: str = "") -> Message:
    read = tuple(ToolCall(id=name, name=tool, arguments=arguments) for name, tool, arguments in calls)
    return Message(role=role, text=text, calls=read, call_id=call_id, thinking=thinking)
