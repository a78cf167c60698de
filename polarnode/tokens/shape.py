"""Our conversation in the shape chat templates read: OpenAI's messages and tools, as dictionaries, in the manner a family's template wants.

Whoever edits this keeps to what transformers' templates expect: `content` is a string, never None; `arguments` is an object whose keys stand
in the client's order; what is absent is left out, because templates ask `is defined`. What a template would leave out of a message is shown
as a message of its own, so that nothing a client said vanishes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from attrs import evolve, field, frozen

from polarnode.conversation import Json, Message, Tool, ToolCall
from polarnode.errors import Refused
from polarnode.tokens.calls import read_object
from polarnode.tokens.family import Manner

Shape = dict[str, Json]
_EITHER: Final = Manner(arguments="either")


@frozen(kw_only=True)
class Shown:
    """A call as the template shows it: its tool, and its id there."""

    name: str
    id: str


@frozen(kw_only=True)
class Earlier:
    """What stands before some messages: calls that they answer, by their ids, and how many calls the conversation had."""

    calls: Mapping[str, Shown] = field(factory=dict)
    count: int = 0


def messages_shape(messages: Sequence[Message], *, manner: Manner = _EITHER, earlier: Earlier | None = None) -> list[Shape]:
    """Messages as templates read them. Calls lend their names to the results that answer them, earlier ones too."""
    before = earlier or Earlier()
    shown, count, shapes = dict(before.calls), before.count, []
    for message in _apart(messages, manner):
        for call in message.calls:
            shown[call.id] = shown_call(call, count, manner)
            count += 1
        shapes.append(_message(message, shown, manner))
    return shapes


def shown_call(call: ToolCall, place: int, manner: Manner) -> Shown:
    """A call that the model did not speak here, the so manieth of a conversation."""
    return Shown(name=call.name, id=f"functions.{call.name}:{place}" if manner.spoken_ids else call.id)


def tools_shape(tools: Sequence[Tool]) -> list[Shape]:
    """Tools as templates write them out: every key always there, in this order, because the model was trained on the text this makes."""
    return [
        {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}} for tool in tools
    ]


def call_shape(shown: Shown, arguments: Json) -> Json:
    """One call of an assistant message."""
    return {"id": shown.id, "type": "function", "function": {"name": shown.name, "arguments": arguments}}


def _apart(messages: Sequence[Message], manner: Manner) -> Iterator[Message]:
    """The same messages, of which none holds more than the template shows of one."""
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if message.calls and message.text and manner.text_apart:
            yield Message(role="assistant", text=message.text)
            message = evolve(message, text="")
        if len(message.calls) < 2 or not manner.one_call:
            yield message
            continue
        results = _results(messages, at)
        at += len(results)
        yield from _one_by_one(message, results)


def _results(messages: Sequence[Message], at: int) -> Sequence[Message]:
    end = next((place for place in range(at, len(messages)) if messages[place].role != "tool"), len(messages))
    return messages[at:end]


def _one_by_one(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    """A message's calls, each with its results behind it."""
    for place, call in enumerate(message.calls):
        yield evolve(message, text="" if place else message.text, thinking="" if place else message.thinking, calls=(call,))
        yield from (result for result in results if result.call_id == call.id)
    ids = {call.id for call in message.calls}
    yield from (result for result in results if result.call_id not in ids)


def _message(message: Message, shown: Mapping[str, Shown], manner: Manner) -> Shape:
    shape: Shape = {"role": message.role, "content": message.text}
    if message.thinking:
        shape[manner.thinking] = message.thinking
    if message.calls:
        shape["tool_calls"] = [call_shape(shown[call.id], arguments_shape(call, manner)) for call in message.calls]
    if message.call_id is not None:
        answered = shown.get(message.call_id)
        shape["tool_call_id"] = message.call_id if answered is None else answered.id
        if answered is not None:
            shape["name"] = answered.name
    return shape


def arguments_shape(call: ToolCall, manner: Manner) -> Json:
    """What a template writes out as it was trained to: the object; a text that is none stands as it is, nothing at all is no arguments."""
    text = call.arguments if call.arguments.strip() else "{}"
    if manner.arguments == "text":
        return text
    value = read_object(text)
    if value is None and manner.arguments == "object":
        raise Refused(
            f"the arguments of a call of {call.name!r} are no JSON object, and this model's chat template can not show them: send an object",
            path="$.messages",
        )
    return text if value is None else value
