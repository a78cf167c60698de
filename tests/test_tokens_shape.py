"""Our conversation in the shape that templates read."""

import json

import pytest

from polarnode.conversation import Json, Message, Tool, ToolCall
from polarnode.tokens.shape import call_shape, messages_shape, tools_shape


def test_roles_and_texts() -> None:
    said = [Message(role="system", text="s"), Message(role="user", text=""), Message(role="assistant", text="a")]
    assert messages_shape(said) == [{"role": "system", "content": "s"}, {"role": "user", "content": ""}, {"role": "assistant", "content": "a"}]


def test_an_assistant_with_thinking_and_calls() -> None:
    call = ToolCall(id="c1", name="f", arguments='{"b": 1.0, "a": [true]}')
    (shape,) = messages_shape([Message(role="assistant", thinking="t", calls=(call,))])
    assert shape == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "t",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"b": 1.0, "a": [True]}}}],
    }
    assert json.dumps(shape["tool_calls"][0]["function"]["arguments"]) == '{"b": 1.0, "a": [true]}'  # type: ignore[call-overload, index]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        (" \n", {}),
        ("{}", {}),
        ("nonsense", "nonsense"),
        ("[1]", "[1]"),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
    ],
)
def test_arguments_are_an_object_where_they_are_one(text: str, value: Json) -> None:
    (shape,) = messages_shape([Message(role="assistant", calls=(ToolCall(id="c", name="f", arguments=text),))])
    assert shape["tool_calls"] == [call_shape(ToolCall(id="c", name="f", arguments=""), value)]


def test_a_result_has_the_name_of_the_call_it_answers() -> None:
    call = ToolCall(id="c1", name="f", arguments="{}")
    said = [Message(role="assistant", calls=(call,)), Message(role="tool", text="r", call_id="c1"), Message(role="tool", text="q", call_id="other")]
    assert messages_shape(said)[1:] == [
        {"role": "tool", "content": "r", "tool_call_id": "c1", "name": "f"},
        {"role": "tool", "content": "q", "tool_call_id": "other"},
    ]
    assert messages_shape(said[1:2], earlier=(call,)) == [{"role": "tool", "content": "r", "tool_call_id": "c1", "name": "f"}]


def test_tools_have_every_key_in_one_order() -> None:
    shapes = tools_shape([Tool(name="f", parameters={"type": "object", "b": 1, "a": 2}), Tool(name="g", description="d")])
    assert json.dumps(shapes) == json.dumps(
        [
            {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object", "b": 1, "a": 2}}},
            {"type": "function", "function": {"name": "g", "description": "d", "parameters": {}}},
        ]
    )
