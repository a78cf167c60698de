"""Anthropic Messages: its blocks become flat messages, in order."""

from typing import Any

import pytest
from attrs import validators

from polarnode.core.codec import structure
from polarnode.core.conversation import Message, ToolCall
from polarnode.core.errors import Refused
from polarnode.providers.anthropic.read import foreign, messages, referenced, volatile
from polarnode.providers.anthropic.shapes import MessageShape, SystemContent


def shapes(*raw_messages: dict[str, Any]) -> tuple[MessageShape, ...]:
    return structure(list(raw_messages), tuple[MessageShape, ...])


def parsed_messages(*raw_messages: dict[str, Any], system: Any = None) -> tuple[Message, ...]:
    head: SystemContent = structure(system, SystemContent)  # type: ignore[arg-type]
    return messages(head, shapes(*raw_messages))


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def result(call: str, content: Any, **extra: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **extra}


@pytest.mark.parametrize(
    ("system", "head"),
    [
        (None, None),
        ("", None),
        ([], None),
        ("You code.", "You code."),
        ([text("You code."), text("Be brief.")], "You code.\nBe brief."),
        ([text("x-anthropic-billing-header: cc_version=2; cch=5d1;"), text("You code.")], "You code."),
        ("x-anthropic-billing-header: cch=5d1;\nYou code.\nBe brief.", "You code.\nBe brief."),
        ("You know x-anthropic-billing-header: a line.", "You know x-anthropic-billing-header: a line."),
    ],
)
def test_system_without_billing_line(system: Any, head: str | None) -> None:
    """The system prompt is read without its volatile line."""
    expected = (
        [Message(role="user", text="hi")]
        if head is None
        else [Message(role="system", text=head), Message(role="user", text="hi")]
    )
    assert parsed_messages({"role": "user", "content": "hi"}, system=system) == tuple(expected)


def test_billing_line_only_dropped_from_system() -> None:
    assert volatile("x-anthropic-billing-header: a")
    assert not volatile("You code.")
    line = "x-anthropic-billing-header: a"
    assert parsed_messages({"role": "user", "content": line}, {"role": "system", "content": line}) == (
        Message(role="user", text=line),
        Message(role="system", text=line),
    )


@pytest.mark.parametrize(
    "content", ["note", [text("note")], [{**text("note"), "cache_control": {"type": "ephemeral"}}]]
)
def test_system_messages_keep_place(content: Any) -> None:
    """System messages stay where they are."""
    found = parsed_messages(
        {"role": "user", "content": "a"},
        {"role": "system", "content": content},
        {"role": "user", "content": "b"},
    )
    assert found == (
        Message(role="user", text="a"),
        Message(role="system", text="note"),
        Message(role="user", text="b"),
    )


def test_user_message_splits_in_order() -> None:
    """A user message is split at its results, in order."""
    blocks = [result("toolu_1", "one"), text("and"), text("then"), result("toolu_2", "two"), text("last")]
    assert parsed_messages({"role": "user", "content": blocks}) == (
        Message(role="tool", text="one", call_id="call_1"),
        Message(role="user", text="and\nthen"),
        Message(role="tool", text="two", call_id="call_2"),
        Message(role="user", text="last"),
    )


@pytest.mark.parametrize("content", ["", [], [text("")]])
def test_empty_user_message_is_one_message(content: Any) -> None:
    assert parsed_messages({"role": "user", "content": content}) == (Message(role="user"),)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("out", "out"),
        ([text("out")], "out"),
        ([text("a"), text("b")], "a\nb"),
        (None, ""),
        ([], ""),
        ([{"type": "tool_reference", "tool_name": "NotebookEdit"}], "Tool loaded: NotebookEdit"),
    ],
)
def test_tool_result_content_becomes_text(content: Any, shown: str) -> None:
    assert parsed_messages({"role": "user", "content": [result("toolu_1", content)]}) == (
        Message(role="tool", text=shown, call_id="call_1"),
    )


def test_error_result_keeps_its_words() -> None:
    assert (
        parsed_messages({"role": "user", "content": [result("toolu_1", "No such file", is_error=True)]})[
            0
        ].text
        == "No such file"
    )


def test_answer_is_flat_with_references() -> None:
    """An answer comes back flat, with its references."""
    blocks = [
        {"type": "thinking", "thinking": "Look ", "signature": "c2lnMQ=="},
        {"type": "redacted_thinking", "data": "ZGF0YQ=="},
        {"type": "thinking", "thinking": "first.", "signature": ""},
        text("I "),
        text("look."),
        {"type": "tool_use", "id": "toolu_ab0", "name": "go", "input": {"b": 1, "a": "ü"}},
        {"type": "tool_use", "id": "foreign", "name": "go", "input": {}},
    ]
    assert parsed_messages({"role": "assistant", "content": blocks}) == (
        Message(
            role="assistant",
            text="I look.",
            thinking="Look first.",
            calls=(
                ToolCall(id="call_ab0", name="go", arguments='{"b":1,"a":"ü"}'),
                ToolCall(id="foreign", name="go", arguments="{}"),
            ),
            refs=("c2lnMQ==", "ZGF0YQ==", "call_ab0", "foreign"),
        ),
    )


def test_unsigned_thinking_is_read() -> None:
    (message,) = parsed_messages({"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]})
    assert (message.thinking, message.refs) == ("hm", ())


def test_adjacent_assistant_messages_are_one() -> None:
    call = {"type": "tool_use", "id": "toolu_ab0", "name": "go", "input": {}}
    split = parsed_messages(
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look."},
        {"role": "assistant", "content": [call]},
    )
    whole = parsed_messages(
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": [text("I look."), call]}
    )
    assert split == whole
    assert len(whole) == 2


def test_adjacent_user_messages_stay_apart() -> None:
    """User messages in a row stay apart, so that a history only grows."""
    one, two = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    assert parsed_messages(one, two)[:1] == parsed_messages(one)


def test_reference_describes_known_tool() -> None:
    """A reference shows its tool at its place, once the request has the tool."""
    reference = {
        "role": "user",
        "content": [result("toolu_1", [{"type": "tool_reference", "tool_name": "later"}, text("loaded")])],
    }
    (found,) = messages(None, shapes(reference), {"later": '{"type":"function"}', "other": "x"})
    assert found.text == 'Tool loaded: later\n{"type":"function"}\nloaded'


def test_server_tool_blocks_are_noted() -> None:
    """Blocks of tools that another server ran are left out and named."""
    server = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}
    found = {
        "type": "web_search_tool_result",
        "tool_use_id": "srvtoolu_1",
        "content": [{"type": "web_search_result", "url": "u"}],
    }
    raw_messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [server, found, text("So it is.")]},
    ]
    assert parsed_messages(*raw_messages)[1] == Message(role="assistant", text="So it is.")
    assert list(foreign(shapes(*raw_messages))) == ["$.messages[1].content[0]", "$.messages[1].content[1]"]


@pytest.mark.parametrize(
    ("given", "arguments"),
    [(None, "{}"), ("not json {", "not json {"), ([1], "[1]"), ({"a": 1.0}, '{"a":1.0}')],
)
def test_echoed_call_with_any_input(given: Any, arguments: str) -> None:
    """A call comes back with whatever its harness made of its input."""
    (message,) = parsed_messages(
        {"role": "assistant", "content": [{"type": "tool_use", "name": "go", "input": given}]}
    )
    assert (message.calls, message.refs) == ((ToolCall(id="", name="go", arguments=arguments),), ())


def test_loaded_deferred_tools() -> None:
    """Which deferred tools were loaded is read from their references."""
    reference = {"type": "tool_reference", "tool_name": "NotebookEdit"}
    raw_messages = shapes(
        {"role": "user", "content": "tool_reference"},
        {"role": "assistant", "content": "x"},
        {
            "role": "user",
            "content": [result("toolu_1", "text"), result("toolu_2", [text("found"), reference])],
        },
    )
    assert referenced(raw_messages) == {"NotebookEdit"}
    assert referenced(shapes({"role": "user", "content": "hi"})) == frozenset()


def test_image_in_result_is_described() -> None:
    """An image that a tool found is described and ends nothing."""
    (found,) = messages(
        None,
        shapes(
            {"role": "user", "content": [result("toolu_1", [text("see"), {"type": "image", "source": {}}])]}
        ),
    )
    assert found.text == "see\n[image: not shown, because this model reads text only]"


@pytest.mark.parametrize(("role", "block"), [("user", {"type": "image"}), ("assistant", {"type": "image"})])
def test_block_without_text_is_refused(role: str, block: dict[str, Any]) -> None:
    """Its shape refuses it with the path; this is the second check, in case a change loosens the first."""
    with validators.disabled(), pytest.raises(Refused, match="reads text only"):
        messages(None, shapes({"role": role, "content": [block]}))
