"""Chat Completions: tools of both kinds, and calls of them, there and back."""

import json
from typing import Any

import pytest
from providers_kit import a_call

from polarnode.core.conversation import Answer, Conversation, Message, ModelRequest, Tool, ToolCall, Usage
from polarnode.core.errors import Refused
from polarnode.providers.openai_chat.read import read
from polarnode.providers.openai_chat.tools import call_json
from polarnode.providers.openai_chat.write import ChatStream, whole

HI = {"role": "user", "content": "hi"}
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a+/"}}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits.", "format": GRAMMAR}}
NOTE = {"type": "custom", "custom": {"name": "note"}}


def asked(**changes: Any) -> ModelRequest:
    return read(json.dumps({"model": "m", "messages": [HI]} | changes).encode(), headers={}, model=None)


def test_uncallable_tools_are_named() -> None:
    """Tools that the model cannot call are dropped and named."""
    function: dict[str, Any] = {
        "name": "go",
        "description": None,
        "parameters": {"type": "object", "properties": {"z": {}, "a": {}}},
        "strict": True,
    }
    tools = [
        {"type": "web_search"},
        {"type": "function", "function": function},
        {"type": "mcp"},
        {"type": "function", "function": {"name": "stop"}},
    ]
    request = asked(tools=tools)
    assert request.conversation.tools == (
        Tool(name="go", parameters=function["parameters"]),
        Tool(name="stop"),
    )
    assert list(request.conversation.tools[0].parameters["properties"]) == ["z", "a"]  # type: ignore[arg-type]
    assert request.ignored == ("$.tools[0]", "$.tools[1].function.strict", "$.tools[2]")


def test_custom_tool_is_function() -> None:
    """A custom tool is shown as a function of one string, with its grammar."""
    request = asked(tools=[PATCH, NOTE])
    patch, note = request.conversation.tools
    assert (patch.name, patch.description) == (
        "patch",
        "Edits.\n\nThe input must follow this lark grammar:\nstart: /a+/",
    )
    assert (note.description, note.parameters["required"]) == ("", ["input"])
    assert request.notes == ("the grammar of tool 'patch' is shown to the model, and nothing enforces it",)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"input": "aa\\nö"}', "aa\nö"),
        ('{"input":3}', '{"input":3}'),
        ("aaa {", "aaa {"),
        ("[1]", "[1]"),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_custom_call_is_answered_custom(arguments: str, shown: str) -> None:
    """A call of a custom tool is answered as custom, whole and streamed."""
    conversation = Conversation(
        messages=(Message(role="user", text="hi"),), tools=asked(tools=[PATCH]).conversation.tools
    )
    call = a_call(conversation=conversation)
    made = ToolCall(id="call_1", name="patch", arguments=arguments)
    spelled = {"id": "call_1", "type": "custom", "custom": {"name": "patch", "input": shown}}
    body = json.loads(whole(call, [Answer(parts=(made,), finish_reason="tool_calls")], Usage()))
    assert body["choices"][0]["message"]["tool_calls"] == [spelled]
    chunk = json.loads(ChatStream(call, opened=True).delta(made).removeprefix(b"data: "))
    assert chunk["choices"][0]["delta"]["tool_calls"] == [{"index": 0} | spelled]


def test_echoed_custom_call_reads_back() -> None:
    """An echoed custom call is the call that was made."""
    calls = [
        {"id": "call_1", "type": "custom", "custom": {"name": "patch", "input": "aa\nö"}},
        {"id": "call_2", "function": {"name": "go"}},
    ]
    (message,) = asked(messages=[{"role": "assistant", "tool_calls": calls}]).conversation.messages
    assert message.calls == (
        ToolCall(id="call_1", name="patch", arguments='{"input":"aa\\nö"}'),
        ToolCall(id="call_2", name="go", arguments="{}"),
    )
    assert message.refs == ("call_1", "call_2")


@pytest.mark.parametrize(
    ("choice", "word"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "go"}}, "go"),
        ({"type": "custom", "custom": {"name": "patch"}}, "patch"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, "required"),
    ],
)
def test_tool_choice_words_and_notes(choice: Any, word: str) -> None:
    tools = [{"type": "function", "function": {"name": "go"}}, PATCH]
    assert asked(tools=tools, tool_choice=choice).conversation.tool_choice == word


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"tools": [{"type": "custom"}]}, "$.tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "$.tools[0].custom.name"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "gone"}}}, "$.tool_choice.custom.name"),
    ],
)
def test_malformed_tool_is_refused(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(Refused) as caught:
        asked(**changes)
    assert caught.value.path == path


def test_undeclared_tool_is_function_call() -> None:
    """A call of an undeclared tool is a function call."""
    call = ToolCall(id="call_1", name="gone", arguments="{}")
    assert call_json(call, ()) == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "gone", "arguments": "{}"},
    }
