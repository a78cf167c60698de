"""Responses: its items become the messages they stand for."""

import json
from typing import Any

import pytest

from polarnode.core.conversation import Json, Message, ToolCall
from polarnode.core.errors import Refused
from polarnode.providers.openai_responses.history import SealedContent, retold, seal
from polarnode.providers.openai_responses.transcript import (
    FOUND_TOOLS_TEXT,
    NEW_TOOLS_TEXT,
    NO_TOOLS_FOUND_TEXT,
    Transcript,
)


def parsed_transcript(*items: dict[str, Any]) -> Transcript:
    transcript = Transcript()
    for index, item in enumerate(items):
        transcript.read(item, f"$.input[{index}]")
    transcript.close()
    return transcript


def parsed_messages(*items: dict[str, Any]) -> tuple[Message, ...]:
    return tuple(parsed_transcript(*items).messages)


def refused(*items: dict[str, Any]) -> Refused:
    with pytest.raises(Refused) as caught:
        parsed_transcript(*items)
    return caught.value


# ── messages ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
@pytest.mark.parametrize(
    "head", [{}, {"type": "message"}, {"type": None, "id": "msg_1", "status": "completed", "phase": "x"}]
)
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ([{"type": "input_text", "text": "plain"}], "plain"),
        ([{"type": "output_text", "text": "plain", "annotations": [], "logprobs": []}], "plain"),
        ([{"type": "text", "text": "plain"}], "plain"),
        ([{"type": "summary_text", "text": "plain"}], "plain"),
        ([{"type": "refusal", "refusal": "plain"}], "plain"),
        (None, ""),
        ("", ""),
        ([], ""),
    ],
)
def test_content_string_or_parts(role: str, head: dict[str, Any], content: Any, text: str) -> None:
    """Content is a string or parts, for every role."""
    (message,) = parsed_messages({"role": role, "content": content, **head})
    assert (message.role, message.text) == ("system" if role == "developer" else role, text)
    assert message.refs == (("msg_1",) if role == "assistant" and "id" in head else ())


def test_assistant_parts_join_without_newline() -> None:
    """Parts are lines, but the parts of an answer are one text."""
    parts = [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    assert parsed_messages({"role": "user", "content": parts})[0].text == "a\nb"
    assert parsed_messages({"role": "assistant", "content": parts})[0].text == "ab"


def test_other_roles_stay_one_to_one() -> None:
    """Messages of other roles than the assistant's stay one to one."""
    roles = ["developer", "system", "user", "user", "developer"]
    found = parsed_messages(*({"role": role, "content": str(index)} for index, role in enumerate(roles)))
    assert [message.text for message in found] == list("01234")


@pytest.mark.parametrize(
    "kind", ["input_image", "input_file", "input_audio", "image_url", "computer_screenshot"]
)
def test_unseen_part_refused_with_path(kind: str) -> None:
    """A part that the model cannot see is refused where it stands."""
    part = {"type": kind, "image_url": "data:"}
    error = refused(
        {"role": "user", "content": "hi"},
        {"role": "user", "content": [{"type": "input_text", "text": "x"}, part]},
    )
    assert (error.path, str(error)) == (
        "$.input[1].content[1]",
        f"this model reads text only: remove the {kind} part",
    )
    (found,) = parsed_messages(
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "see"}, part],
        }
    )
    assert found.text == f"see\n[{kind}: not shown, because this model reads text only]", (
        "a tool result is described, and ends nothing"
    )


def test_unknown_part_read_only_as_text() -> None:
    """An unknown part is read if it is text, and named if it is not."""
    parts = [
        {"type": "new_text", "text": "a"},
        {"type": "new_thing", "data": "x"},
        {"type": "input_text", "text": "b"},
    ]
    found = parsed_transcript({"role": "user", "content": parts})
    assert (found.messages[0].text, found.ignored) == ("a\nb", ["$.input[0].content[1]"])


@pytest.mark.parametrize(
    ("item", "path"),
    [
        ({"type": "message", "role": "robot", "content": "x"}, "$.input[0].role"),
        ({"type": "message", "content": "x"}, "$.input[0].role"),
        ({"role": "user", "content": 5}, "$.input[0].content"),
        ({"role": "user", "content": ["x"]}, "$.input[0].content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "$.input[0].content[0].type"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "$.input[0].name"),
        ({"type": "function_call", "name": "go", "arguments": 5}, "$.input[0].arguments"),
        ({"type": "custom_tool_call", "name": "go", "call_id": "c"}, "$.input[0].input"),
        ({"type": "reasoning", "summary": "x"}, "$.input[0].summary"),
        ({"type": "additional_tools", "tools": [5]}, "$.input[0].tools[0]"),
        ({"type": "additional_tools", "tools": [{"type": "function"}]}, "$.input[0].tools[0].name"),
    ],
)
def test_malformed_item_refused_with_path(item: dict[str, Any], path: str) -> None:
    error = refused(item)
    assert error.path == path
    assert str(error).startswith("input[0]")


# ── one answer is one message ─────────────────────────────────────────────────

REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [{"type": "summary_text", "text": "hm\n"}],
    "encrypted_content": None,
}
TEXT = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "I go."}],
    "status": "completed",
}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_a0",
    "name": "go",
    "arguments": '{"b": 1,  "a":2}',
}
PATCH = {
    "type": "custom_tool_call",
    "id": "ctc_1",
    "call_id": "call_a1",
    "name": "patch",
    "input": "+ü\n",
    "namespace": "ed",
}
DONE = {"type": "function_call_output", "id": "fco_1", "call_id": "call_a0", "output": "ok\n"}


def test_adjacent_items_are_one_answer() -> None:
    found = parsed_messages(
        {"role": "user", "content": "hi"},
        REASONING,
        TEXT,
        CALL,
        PATCH,
        DONE,
        {"type": "custom_tool_call_output", "call_id": "call_a1", "output": ""},
    )
    assert [message.role for message in found] == ["user", "assistant", "tool", "tool"]
    assert found[1] == Message(
        role="assistant",
        text="I go.",
        thinking="hm\n",
        calls=(
            ToolCall(id="call_a0", name="go", arguments='{"b": 1,  "a":2}'),
            ToolCall(id="call_a1", name="ed.patch", arguments='{"input":"+ü\\n"}'),
        ),
        refs=("rs_1", "msg_1", "call_a0", "fc_1", "call_a1", "ctc_1"),
    )
    assert found[2:] == (
        Message(role="tool", text="ok\n", call_id="call_a0"),
        Message(role="tool", text="", call_id="call_a1"),
    )


def test_other_role_ends_the_answer() -> None:
    found = parsed_messages(TEXT, {"role": "user", "content": "on"}, TEXT, CALL, DONE, REASONING, TEXT)
    assert [message.role for message in found] == ["assistant", "user", "assistant", "tool", "assistant"]
    assert [message.text for message in found] == ["I go.", "on", "I go.", "ok\n", "I go."]


def test_texts_and_thoughts_are_joined() -> None:
    """Texts and thoughts of one answer are joined as the answer joins them."""
    (found,) = parsed_messages(REASONING, TEXT, CALL, REASONING, TEXT)
    assert (found.text, found.thinking) == ("I go.I go.", "hm\nhm\n")


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ("not json {", "not json {"),
        ("", ""),
        ({"b": 1, "a": [2.0]}, '{"b":1,"a":[2.0]}'),
        (None, "{}"),
    ],
)
def test_arguments_keep_client_spelling(written: Any, kept: str) -> None:
    """Arguments are kept as the client wrote them."""
    assert parsed_messages(CALL | {"arguments": written})[0].calls[0].arguments == kept


@pytest.mark.parametrize(
    ("namespace", "name"),
    [(None, "go"), ("", "go"), ("functions", "go"), ("multi_agent_v1", "multi_agent_v1.go")],
)
def test_call_has_shown_name(namespace: str | None, name: str) -> None:
    """A call has the name that its tool is shown by."""
    assert parsed_messages(CALL | {"namespace": namespace})[0].calls[0].name == name


# ── thinking ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("item", "thinking", "refs"),
    [
        (
            {
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "raw"}],
                "encrypted_content": "gAAAA",
            },
            "raw",
            ("gAAAA",),
        ),
        (
            {
                "summary": [{"type": "summary_text", "text": "short"}],
                "content": [{"type": "reasoning_text", "text": "raw"}],
            },
            "raw",
            (),
        ),
        (
            {"summary": [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]},
            "a\nb",
            (),
        ),
        (
            {
                "summary": [{"type": "summary_text", "text": "shown"}],
                "encrypted_content": seal(SealedContent(signature="c2ln")),
            },
            "shown",
            ("c2ln",),
        ),
        (
            {"summary": [], "encrypted_content": seal(SealedContent(signature="c2ln", thinking="exact\n"))},
            "exact\n",
            ("c2ln",),
        ),
        (
            {
                "summary": [{"type": "summary_text", "text": "exact"}],
                "encrypted_content": seal(SealedContent(signature="c2ln", thinking="exact\n")),
            },
            "exact\n",
            ("c2ln",),
        ),
    ],
)
def test_sealed_thinking_precedes_shown(item: dict[str, Any], thinking: str, refs: tuple[str, ...]) -> None:
    """Sealed thinking is read before the shown text."""
    (found,) = parsed_messages({"type": "reasoning", **item})
    assert (found.role, found.text, found.thinking, found.refs) == ("assistant", "", thinking, refs)


@pytest.mark.parametrize("item", [{}, {"summary": [], "encrypted_content": "gAAAA"}])
def test_foreign_reasoning_is_noted(item: dict[str, Any]) -> None:
    """It belongs to what follows it, and alone it is no answer: an empty one would be shown to the model."""
    reasoning = {"type": "reasoning", "id": "rs_1", **item}
    said = [{"role": "user", "content": "a"}, reasoning, {"role": "user", "content": "b"}]
    found = parsed_transcript(*said)
    assert [message.role for message in found.messages] == ["user", "user"]
    assert found.notes == [
        "input[1]: the reasoning was not made by this node, or was left out, and cannot be read"
    ]
    called = {"type": "function_call", "call_id": "c1", "name": "sh", "arguments": "{}"}
    (answer,) = parsed_messages(reasoning, called)
    assert (answer.role, len(answer.calls), answer.thinking, answer.refs[0]) == ("assistant", 1, "", "rs_1")


# ── tools this API knows by itself ────────────────────────────────────────────


@pytest.mark.parametrize(
    ("item", "name", "arguments"),
    [
        (
            {
                "type": "local_shell_call",
                "call_id": "call_1",
                "action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 5, "user": None},
            },
            "local_shell",
            {"command": ["ls"], "timeout_ms": 5},
        ),
        (
            {"type": "local_shell_call", "id": "call_1", "action": {"command": ["ls"], "env": {"A": "b"}}},
            "local_shell",
            {"command": ["ls"], "env": {"A": "b"}},
        ),
        (
            {
                "type": "shell_call",
                "call_id": "call_1",
                "action": {"commands": ["ls"], "max_output_length": None},
            },
            "shell",
            {"commands": ["ls"]},
        ),
        (
            {
                "type": "apply_patch_call",
                "call_id": "call_1",
                "operation": {"type": "create_file", "path": "a", "diff": "+x"},
            },
            "apply_patch",
            {"type": "create_file", "path": "a", "diff": "+x"},
        ),
        (
            {
                "type": "tool_search_call",
                "call_id": "call_1",
                "execution": "client",
                "arguments": {"query": "x"},
            },
            "tool_search",
            {"query": "x"},
        ),
        (
            {
                "type": "tool_search_call",
                "call_id": "call_1",
                "execution": "client",
                "arguments": '{"query": "x"}',
            },
            "tool_search",
            {"query": "x"},
        ),
        ({"type": "local_shell_call", "call_id": "call_1"}, "local_shell", {}),
    ],
)
def test_call_of_every_kind(item: dict[str, Any], name: str, arguments: Json) -> None:
    (found,) = parsed_messages(item)
    assert [(call.id, call.name, json.loads(call.arguments)) for call in found.calls] == [
        ("call_1", name, arguments)
    ]
    assert "call_1" in found.refs


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"type": "function_call_output", "output": "x"}, "x"),
        (
            {
                "type": "function_call_output",
                "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            "a\nb",
        ),
        ({"type": "function_call_output", "output": []}, ""),
        (
            {"type": "function_call_output", "output": {"content": "x", "success": True}},
            '{"content":"x","success":true}',
        ),
        ({"type": "function_call_output", "output": ["x", 1]}, '["x",1]'),
        ({"type": "function_call_output"}, ""),
        ({"type": "local_shell_call_output", "output": '{"stdout":"x"}'}, '{"stdout":"x"}'),
        ({"type": "apply_patch_call_output", "status": "failed", "output": "no such file"}, "no such file"),
        ({"type": "apply_patch_call_output", "status": "completed"}, "completed"),
        (
            {
                "type": "shell_call_output",
                "output": [{"stdout": "x\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
            },
            "x\n\n[exit code 0]",
        ),
        (
            {
                "type": "shell_call_output",
                "output": [{"stdout": "", "stderr": "e", "outcome": {"type": "timeout"}}, {"stdout": "y"}],
            },
            "e\n[timed out]\ny",
        ),
    ],
)
def test_output_is_text_in_any_spelling(item: dict[str, Any], text: str) -> None:
    assert parsed_messages(item | {"call_id": "call_1"}) == (
        Message(role="tool", text=text, call_id="call_1"),
    )
    assert parsed_messages(item)[0].call_id == ""


def test_local_shell_output_names_call() -> None:
    """The output of a local shell names its call by its id."""
    assert (
        parsed_messages({"type": "local_shell_call_output", "id": "call_1", "output": "x"})[0].call_id
        == "call_1"
    )


# ── tools that come later ─────────────────────────────────────────────────────

LATE = {
    "type": "namespace",
    "name": "cal",
    "tools": [{"type": "function", "name": "list", "defer_loading": True, "parameters": {"type": "object"}}],
}
LINE = '{"type":"function","function":{"name":"cal.list","description":"","parameters":{"type":"object"}}}'


def test_tools_at_the_head() -> None:
    """Tools at the head are the request's tools."""
    found = parsed_transcript(
        {"role": "developer", "content": "x"},
        {"type": "additional_tools", "role": "developer", "tools": [LATE, {"type": "web_search"}]},
    )
    assert [tool.name for tool in found.head.tools] == ["cal.list"]
    assert found.head.ignored == ["$.input[1].tools[1]"]
    assert (found.later, len(found.messages)) == ([], 1)


def test_tools_in_the_middle() -> None:
    """Tools in the middle are described there."""
    found = parsed_transcript(
        {"role": "user", "content": "x"},
        {"type": "additional_tools", "tools": [LATE, {"type": "web_search"}]},
        {"role": "user", "content": "y"},
    )
    assert found.head.tools == []
    assert [tool.name for tool in found.later] == ["cal.list"]
    assert found.messages[1] == Message(role="system", text=f"{NEW_TOOLS_TEXT}\n{LINE}")
    assert found.ignored == ["$.input[1].tools[1]"]


def test_found_tools_in_result() -> None:
    """Tools that were found are described in the result."""
    found = parsed_transcript(
        {
            "type": "tool_search_output",
            "call_id": "call_1",
            "status": "completed",
            "execution": "client",
            "tools": [LATE],
        }
    )
    assert found.messages == [Message(role="tool", text=f"{FOUND_TOOLS_TEXT}\n{LINE}", call_id="call_1")]
    assert [tool.name for tool in found.later] == ["cal.list"]
    assert parsed_messages({"type": "tool_search_output", "call_id": None, "tools": []}) == (
        Message(role="tool", text=NO_TOOLS_FOUND_TEXT, call_id=""),
    )


# ── what is not ours ──────────────────────────────────────────────────────────


def test_foreign_items_are_named() -> None:
    """Items of other servers are kept out and named."""
    kinds = [
        "web_search_call",
        "file_search_call",
        "mcp_list_tools",
        "image_generation_call",
        "item_reference",
    ]
    found = parsed_transcript(
        *({"type": kind, "id": "x_1"} for kind in kinds), {"role": "user", "content": "hi"}
    )
    assert [message.text for message in found.messages] == ["hi"]
    assert found.ignored == [f"$.input[{index}]" for index in range(len(kinds))]
    assert found.notes[0] == "input[0]: the web_search_call belongs to another server and is kept out"
    assert len(found.notes) == len(kinds)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "configuration_update"},
        {"type": "ghost_snapshot"},
        {"type": 5},
        {},
        {"id": "x"},
        {"type": "compaction_trigger"},
    ],
)
def test_unknown_item_is_named(item: dict[str, Any]) -> None:
    found = parsed_transcript({"role": "user", "content": "hi"}, item)
    assert (len(found.messages), found.ignored) == (1, ["$.input[1]"])


@pytest.mark.parametrize("kind", ["tool_search_call", "tool_search_output"])
def test_server_side_search_is_dropped(kind: str) -> None:
    """A search on another server is kept out."""
    assert parsed_transcript({"type": kind, "execution": "server"}).ignored == ["$.input[0]"]


def test_own_summary_is_user_message() -> None:
    """Our own summary comes back as a user's message."""
    item = {
        "type": "compaction",
        "id": "cmp_1",
        "encrypted_content": seal(SealedContent(signature="c2ln", summary="We did it.")),
    }
    assert parsed_messages(item) == (Message(role="user", text=retold("We did it.")),)
    assert parsed_messages(item | {"type": "context_compaction"}) == parsed_messages(item)


@pytest.mark.parametrize("sealed", [None, "gAAAA", seal(SealedContent(thinking="x"))])
def test_foreign_summary_cannot_be_read(sealed: str | None) -> None:
    found = parsed_transcript(
        {"type": "compaction", "encrypted_content": sealed}, {"role": "user", "content": "hi"}
    )
    assert (len(found.messages), found.ignored) == (1, ["$.input[0]"])
    assert "cannot be read" in found.notes[0]


def test_agent_message_is_user_message() -> None:
    """Codex marks what its agents say as encrypted, and hands on what it got: our model's words in clear, or
    another server's token.
    """
    head = {"type": "input_text", "text": "Sender: /root\nPayload:\n"}
    item = {"type": "agent_message", "author": "/root", "recipient": "/root/a"}
    found = parsed_transcript(
        item | {"content": [head, {"type": "encrypted_content", "encrypted_content": "say hello"}]}
    )
    assert (found.messages, found.ignored) == (
        [Message(role="user", text="Sender: /root\nPayload:\nsay hello")],
        [],
    )
    foreign = "gAAAAABo" + "x_-A" * 40 + "=="
    found = parsed_transcript(
        item | {"content": [head, {"type": "encrypted_content", "encrypted_content": foreign}]}
    )
    assert (found.messages[0].text, found.ignored) == (head["text"], ["$.input[0].content[1]"])
