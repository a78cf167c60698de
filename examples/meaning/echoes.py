"""Read the conversation that a harness sent with each request, and match requests with turns.

`polarnode run --record-requests FOLDER` keeps the requests. Reading them is the only code of polarnode used
here: every gateway reads them, and the two ways compared differ only in what becomes of the model's own
turns. What cannot be matched for sure is counted and not compared.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.meaning.checkpoint import Checkpoint
from examples.meaning.trajectories import Session
from polarnode.core.conversation import Conversation, Message
from polarnode.gateway.recorded_request import read_recorded
from polarnode.providers.contract import NoMemory


@dataclass(frozen=True)
class Echo:
    """One request's conversation: every message of it, the model's own as the harness gave them back."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    thinking: bool | None

    def prompt(self, checkpoint: Checkpoint) -> str:
        return checkpoint.rendered(self.messages, self.tools, asking=True, thinking=self.thinking)

    def whole(self, answer: dict[str, Any], checkpoint: Checkpoint) -> str:
        """The rendered conversation with its answer appended."""
        return checkpoint.rendered(
            [*self.messages, answered(answer)], self.tools, asking=False, thinking=self.thinking
        )


def echoes(folder: Path, session: Session, checkpoint: Checkpoint) -> dict[int, Echo]:
    """The request of each turn, by its index: the first one unused whose rendering ends with what the turn
    added to its prompt.
    """
    sent = [(echo, echo.prompt(checkpoint)) for echo in requests(folder / session.id)]
    found: dict[int, Echo] = {}
    for turn in sorted(session.turns.values(), key=lambda turn: turn.index):
        place = next(
            (
                place
                for place, (_, text) in enumerate(sent)
                if text.endswith(checkpoint.text(turn.delta[turn.close_length :]))
            ),
            None,
        )
        if place is not None:
            found[turn.index] = sent.pop(place)[0]
    return found


def requests(folder: Path) -> list[Echo]:
    """The requests to the model, in order."""
    read = (
        read_recorded(file.name, file.read_bytes(), NoMemory())
        for file in sorted(folder.glob("*-request.json"), key=number)
    )
    return [echo(each.request.conversation) for each in read if each.request is not None]


def number(file: Path) -> int:
    return int(file.name.partition("-")[0])


def echo(conversation: Conversation) -> Echo:
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
        for tool in conversation.tools
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    return Echo(
        messages=[shape(message) for message in conversation.messages],
        tools=tools,
        thinking=conversation.thinking,
    )


def shape(message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.thinking:
        made["reasoning_content"] = message.thinking
    if message.calls:
        made["tool_calls"] = [call(each.name, each.arguments) for each in message.calls]
    return made


def answered(answer: dict[str, Any]) -> dict[str, Any]:
    """The message made of a sample, as the harness was given it."""
    parts = answer["parts"]
    calls = [call(part["name"], part["arguments"]) for part in parts if part["type"] == "tool_call"]
    made: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(part["text"] for part in parts if part["type"] == "text"),
    }
    if thought := "".join(part["text"] for part in parts if part["type"] == "thinking"):
        made["reasoning_content"] = thought
    return {**made, "tool_calls": calls} if calls else made


def call(name: str, arguments: str) -> dict[str, Any]:
    """Its arguments as an object for the template; a text that is not an object is kept."""
    try:
        value = json.loads(arguments or "{}")
    except json.JSONDecodeError:
        value = arguments
    return {
        "type": "function",
        "function": {"name": name, "arguments": value if isinstance(value, dict) else arguments},
    }
