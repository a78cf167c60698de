"""Our conversation in the shape chat templates read: OpenAI's messages and tools, as dictionaries.

Whoever edits this keeps to what transformers' templates expect: `content` is a string, never None; `arguments` is an object whose keys stand
in the client's order; what is absent is left out, because templates ask `is defined`.
"""

from collections.abc import Iterable, Mapping, Sequence

from polarnode.conversation import Json, Message, Tool, ToolCall
from polarnode.tokens.calls import read_object

Shape = dict[str, Json]


def messages_shape(messages: Sequence[Message], *, earlier: Iterable[ToolCall] = ()) -> list[Shape]:
    """Messages as templates read them. `earlier` calls lend their names to the results that answer them."""
    names = {call.id: call.name for call in earlier}
    shapes = []
    for message in messages:
        names |= {call.id: call.name for call in message.calls}
        shapes.append(_message(message, names))
    return shapes


def tools_shape(tools: Sequence[Tool]) -> list[Shape]:
    """Tools as templates write them out: every key always there, in this order, because the model was trained on the text this makes."""
    return [
        {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}} for tool in tools
    ]


def call_shape(call: ToolCall, arguments: Json) -> Json:
    """One call of an assistant message."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _message(message: Message, names: Mapping[str, str]) -> Shape:
    shape: Shape = {"role": message.role, "content": message.text}
    if message.thinking:
        shape["reasoning_content"] = message.thinking
    if message.calls:
        shape["tool_calls"] = [call_shape(call, _arguments(call.arguments)) for call in message.calls]
    if message.call_id is not None:
        shape["tool_call_id"] = message.call_id
        if message.call_id in names:
            shape["name"] = names[message.call_id]
    return shape


def _arguments(text: str) -> Json:
    """The object a template writes out as it was trained to; a text that is none stands as it is, nothing at all is no arguments."""
    if not text.strip():
        return {}
    value = read_object(text)
    return text if value is None else value
