"""Our conversation in the shape that templates read."""

import json

import pytest

from polarnode.core.conversation import Json, Message, Tool, ToolCall
from polarnode.tokens.families import TemplateManner
from polarnode.tokens.rendering import (
    EarlierCalls,
    Shown,
    argument_notes,
    call_shape,
    messages_shape,
    tools_shape,
)


def test_roles_and_texts_of_messages() -> None:
    said = [
        Message(role="system", text="s"),
        Message(role="user", text=""),
        Message(role="assistant", text="a"),
    ]
    assert messages_shape(said) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "a"},
    ]


def test_assistant_with_thinking_and_calls() -> None:
    call = ToolCall(id="c1", name="f", arguments='{"b": 1.0, "a": [true]}')
    (shape,) = messages_shape([Message(role="assistant", thinking="t", calls=(call,))])
    assert shape == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "t",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"b": 1.0, "a": [True]}}}
        ],
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
def test_arguments_are_objects_where_possible(text: str, value: Json) -> None:
    (shape,) = messages_shape(
        [Message(role="assistant", calls=(ToolCall(id="c", name="f", arguments=text),))]
    )
    assert shape["tool_calls"] == [call_shape(Shown(id="c", name="f"), value)]


def test_result_has_its_calls_name() -> None:
    call = ToolCall(id="c1", name="f", arguments="{}")
    said = [
        Message(role="assistant", calls=(call,)),
        Message(role="tool", text="r", call_id="c1"),
        Message(role="tool", text="q", call_id="other"),
    ]
    assert messages_shape(said)[1:] == [
        {"role": "tool", "content": "r", "tool_call_id": "c1", "name": "f"},
        {"role": "tool", "content": "q", "tool_call_id": "other"},
    ]
    assert messages_shape(
        said[1:2], earlier=EarlierCalls(calls={"c1": Shown(name="f", id="c1")}, count=1)
    ) == [{"role": "tool", "content": "r", "tool_call_id": "c1", "name": "f"}]


def test_tool_keys_are_complete_and_ordered() -> None:
    shapes = tools_shape(
        [Tool(name="f", parameters={"type": "object", "b": 1, "a": 2}), Tool(name="g", description="d")]
    )
    assert json.dumps(shapes) == json.dumps(
        [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": "",
                    "parameters": {"type": "object", "b": 1, "a": 2},
                },
            },
            {"type": "function", "function": {"name": "g", "description": "d", "parameters": {}}},
        ]
    )


# ── the manners of families ───────────────────────────────────────────────────

ONE, TWO = (ToolCall(id=f"c{number}", name=f"f{number}", arguments='{"a": 1}') for number in (1, 2))


def test_text_arguments_stay_verbatim() -> None:
    manner = TemplateManner(arguments="text")
    for text, shown in (('{ "a":1.0}', '{ "a":1.0}'), ("", "{}"), ("nonsense", "nonsense")):
        (shape,) = messages_shape(
            [Message(role="assistant", calls=(ToolCall(id="c", name="f", arguments=text),))], manner=manner
        )
        assert shape["tool_calls"] == [call_shape(Shown(id="c", name="f"), shown)]


def test_shortened_arguments_are_shown() -> None:
    """A harness sends what it shortened with every later request: refused once, it is refused for ever."""
    said = [Message(role="assistant", calls=(ToolCall(id="c", name="f", arguments='{"a": "aaa...[cut]'),))]
    (shape,) = messages_shape(said, manner=TemplateManner())
    assert shape["tool_calls"] == [call_shape(Shown(id="c", name="f"), {"arguments": '{"a": "aaa...[cut]'})]
    (note,) = argument_notes(said, TemplateManner())
    assert "'f' are no JSON object" in note
    assert argument_notes(said, TemplateManner(arguments="either")) == ()


def test_text_beside_call_set_apart() -> None:
    """A text beside a call is a message of its own where a template drops it."""
    said = [Message(role="assistant", text="I look.", thinking="hm", calls=(ONE,))]
    text, call = messages_shape(said, manner=TemplateManner(text_apart=True, thinking="thinking"))
    assert text == {"role": "assistant", "content": "I look."}
    assert (call["content"], call["thinking"], len(call["tool_calls"])) == ("", "hm", 1)  # type: ignore[arg-type]


def test_calls_alternate_with_their_results() -> None:
    """Several calls are shown one after another, each with its result."""
    results = [Message(role="tool", text=f"r{number}", call_id=f"c{number}") for number in (2, 9, 1)]
    said = [
        Message(role="assistant", thinking="hm", calls=(ONE, TWO)),
        *results,
        Message(role="user", text="q"),
    ]
    shapes = messages_shape(said, manner=TemplateManner(one_call=True))
    assert [shape.get("tool_call_id") or shape["role"] for shape in shapes] == [
        "assistant",
        "c1",
        "assistant",
        "c2",
        "c9",
        "user",
    ]
    assert [shape["name"] for shape in shapes if "name" in shape] == ["f1", "f2"]
    assert ["reasoning_content" in shape for shape in shapes] == [True, False, False, False, False, False]


def test_shown_call_ids_count_on() -> None:
    """Calls are counted through a conversation where their ids are shown."""
    said = [
        Message(role="assistant", calls=(ONE, TWO)),
        Message(role="tool", text="r", call_id="c2"),
        Message(role="assistant", calls=(ONE,)),
        Message(role="tool", text="r", call_id="c1"),
    ]
    shapes = messages_shape(said, manner=TemplateManner(model_call_ids=True), earlier=EarlierCalls(count=3))
    assert [shape["tool_call_id"] for shape in shapes if shape["role"] == "tool"] == [
        "functions.f2:4",
        "functions.f1:5",
    ]
