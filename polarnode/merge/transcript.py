"""Conversations rebuilt from turns: the new messages of each turn, and the whole conversation of a line.

Pure. Messages are what the client sent and the template was given, answers what the client was given; nothing
is decoded from tokens. A conversation with a gap is None, never guessed.
"""

from collections.abc import Mapping, Sequence

from attrs import evolve

from polarnode.core.codec.json import dump_json, read_json
from polarnode.core.conversation import Conversation, Json, Message, Tool
from polarnode.core.trajectory import NewMessages, Turn, line_of
from polarnode.merge.attach import RESUMED, Plan


def new_messages_of(plan: Plan, conversation: Conversation) -> NewMessages:
    """What the turn of this plan adds: the messages that are rendered, and at a root the tools and
    thinking flag at the head of the prompt.
    """
    messages = tuple(evolve(message, refs=()) if message.refs else message for message in plan.new)
    if plan.parent is not None:
        return NewMessages(messages=messages)
    return NewMessages(messages=messages, tools=_written(conversation.tools), thinking=conversation.thinking)


def _written(tools: Sequence[Tool]) -> str:
    if not tools:
        return ""
    described: list[Json] = [
        {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
        for tool in tools
    ]
    return dump_json(described).decode()


def tools_of(new: NewMessages) -> tuple[Tool, ...]:
    """A root's tools, parsed again."""
    found = read_json(new.tools.encode()) if new.tools else []
    return tuple(_tool(each) for each in found if isinstance(each, dict)) if isinstance(found, list) else ()


def _tool(fields: Mapping[str, Json]) -> Tool:
    parameters = fields.get("parameters")
    return Tool(
        name=str(fields.get("name", "")),
        description=str(fields.get("description", "")),
        parameters=parameters if isinstance(parameters, dict) else {},
    )


def transcript(turns: Mapping[int, Turn], index: int) -> Conversation | None:
    """The conversation that the model had read and written when turn `index` ended; None if a turn of its
    line is missing or has no messages.

    `turns` by their index. An answer that continued after a cut is one message, as its client saw it.
    """
    line = line_of(turns, index)
    if line is None:
        return None
    messages: list[Message] = []
    before: Turn | None = None
    for turn in line:
        if turn.new_messages is None:
            return None
        messages += turn.new_messages.messages
        _answered(messages, before, turn)
        before = turn
    head = line[0].new_messages
    return (
        None
        if head is None
        else Conversation(messages=tuple(messages), tools=tools_of(head), thinking=head.thinking)
    )


def _answered(messages: list[Message], before: Turn | None, turn: Turn) -> None:
    """Append a turn's answer to its messages, or put it in the place of the cut answer that it continues."""
    if turn.answer is None:
        return
    message = turn.answer.as_message()
    goes_on = (
        before is not None
        and before.answer is not None
        and turn.new_messages is not None
        and not turn.new_messages.messages
    )
    if goes_on and turn.reason == RESUMED:  # its answer includes the tokens sampled before the cut
        messages[-1] = message
    elif goes_on and before is not None and before.finish_reason not in ("stop", "tool_calls"):
        messages[-1] = messages[-1].joined(message)
    else:
        messages.append(message)
