"""Responses: the parts of an answer as items."""

import json
from typing import Any

import pytest
from attrs import evolve
from providers_kit import a_call

from polarnode.core.codec import dump_json
from polarnode.core.conversation import (
    Alternative,
    Answer,
    Conversation,
    FinishReason,
    Message,
    TextPart,
    ThinkingPart,
    TokenLogprob,
    Tool,
    ToolCall,
    Usage,
)
from polarnode.providers.contract import ModelCallInfo
from polarnode.providers.openai_responses.history import SealedContent, unseal
from polarnode.providers.openai_responses.write import (
    call_json,
    output_json,
    response_json,
    status,
    usage_json,
)

GO = ToolCall(id="call_ab0", name="go", arguments='{"a": 1}')
CALL = a_call()


def calling(*tools: Tool, **extras: Any) -> ModelCallInfo:
    return a_call(
        conversation=Conversation(messages=(Message(role="user", text="hi"),), tools=tools), extras=extras
    )


def written(value: Any) -> Any:
    return json.loads(dump_json(value))


def test_usage_counts_every_token() -> None:
    assert usage_json(Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=8, thinking_tokens=1)) == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 8},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 14,
    }


def test_response_echoes_the_request() -> None:
    found = response_json(
        a_call(extras={"echo": {"tools": [], "store": False}}), status="in_progress", output=[]
    )
    assert (found["id"], found["object"], found["created_at"], found["model"]) == (
        "resp_0f1e",
        "response",
        1700000000,
        "asked-for",
    )
    assert (
        found["status"],
        found["output"],
        found["usage"],
        found["error"],
        found["incomplete_details"],
    ) == ("in_progress", [], None, None, None)
    assert (found["tools"], found["store"]) == ([], False)


@pytest.mark.parametrize(
    ("reason", "calls", "word"),
    [
        ("stop", False, "completed"),
        ("stop_string", False, "completed"),
        ("tool_calls", False, "completed"),
        ("length", False, "incomplete"),
        ("abort", False, "incomplete"),
        ("error", False, "incomplete"),
        ("length", True, "incomplete"),
        ("abort", True, "incomplete"),
        ("tool_calls", True, "completed"),
    ],
)
def test_completeness_of_each_ending(reason: FinishReason, calls: bool, word: str) -> None:
    """The reason of an ending decides whether the answer is complete."""
    answer = Answer(parts=(TextPart("x"), GO) if calls else (TextPart("x"),), finish_reason=reason)
    assert status(CALL, answer) == word
    assert status(a_call(extras={"compacts": True}), answer) == "completed"
    assert status(evolve(CALL, calls_first=True), answer) == ("completed" if calls else word)
    found = response_json(CALL, status=word, output=[])
    assert found["incomplete_details"] == ({"reason": "max_output_tokens"} if word == "incomplete" else None)


def test_items_keep_part_order() -> None:
    answer = Answer(
        parts=(ThinkingPart("hm"), TextPart("I go."), GO, TextPart("And?"), TextPart("")),
        finish_reason="stop",
    )
    found = written(output_json(CALL, answer))
    sealed = found[0].pop("encrypted_content")
    assert unseal(sealed) == SealedContent(signature="c2ln")
    text = {"type": "output_text", "annotations": [], "logprobs": []}
    assert found == [
        {"id": "rs_0f1e_0", "type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {
            "id": "msg_0f1e_1",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [text | {"text": "I go."}],
        },
        {
            "id": "fc_0f1e_2",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_ab0",
            "name": "go",
            "arguments": '{"a": 1}',
        },
        {
            "id": "msg_0f1e_3",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [text | {"text": "And?"}],
        },
    ]


def test_cut_answer_incomplete_in_last_item() -> None:
    """Only the last item of a cut answer is incomplete."""
    answer = Answer(parts=(ThinkingPart("hm"), TextPart("I g")), finish_reason="length")
    assert written(output_json(CALL, answer))[1]["status"] == "incomplete"


def test_thinking_sealed_on_request() -> None:
    (item,) = output_json(
        a_call(extras={"seals": True}), Answer(parts=(ThinkingPart("hm\n"),), finish_reason="stop")
    )
    assert isinstance(item, dict)
    assert unseal(str(item["encrypted_content"])) == SealedContent(signature="c2ln", thinking="hm\n")


def test_compaction_is_one_item() -> None:
    answer = Answer(
        parts=(ThinkingPart("hm"), TextPart("We did "), GO, TextPart("it.")), finish_reason="stop"
    )
    (item,) = output_json(a_call(extras={"compacts": True}), answer)
    assert isinstance(item, dict)
    assert (item["id"], item["type"]) == ("cmp_0f1e_0", "compaction")
    assert unseal(str(item["encrypted_content"])) == SealedContent(signature="c2ln", summary="We did it.")


# ── calls in their tools' own spelling ────────────────────────────────────────


@pytest.mark.parametrize(
    ("spelling", "arguments", "item"),
    [
        ({}, '{"a": 1}', {"type": "function_call", "name": "t", "arguments": '{"a": 1}'}),
        ({}, "", {"type": "function_call", "name": "t", "arguments": "{}"}),
        (
            {"kind": "function", "name": "n", "namespace": "s"},
            "{}",
            {"type": "function_call", "name": "n", "namespace": "s", "arguments": "{}"},
        ),
        (
            {"kind": "custom"},
            '{"input": "+ü\\n"}',
            {"type": "custom_tool_call", "name": "t", "input": "+ü\n"},
        ),
        (
            {"kind": "custom", "name": "n", "namespace": "functions"},
            '{"input": ""}',
            {"type": "custom_tool_call", "name": "n", "namespace": "functions", "input": ""},
        ),
        ({"kind": "custom"}, "free text", {"type": "custom_tool_call", "name": "t", "input": "free text"}),
        (
            {"kind": "custom"},
            '{"other": 1}',
            {"type": "custom_tool_call", "name": "t", "input": '{"other": 1}'},
        ),
        (
            {"kind": "custom"},
            '{"input": 5}',
            {"type": "custom_tool_call", "name": "t", "input": '{"input": 5}'},
        ),
        (
            {"kind": "local_shell"},
            '{"command": ["ls"], "timeout_ms": 5}',
            {
                "type": "local_shell_call",
                "action": {"type": "exec", "env": {}, "command": ["ls"], "timeout_ms": 5},
            },
        ),
        ({"kind": "shell"}, '{"commands": ["ls"]}', {"type": "shell_call", "action": {"commands": ["ls"]}}),
        (
            {"kind": "apply_patch"},
            '{"type": "delete_file", "path": "a"}',
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
        ),
        (
            {"kind": "tool_search"},
            '{"query": "x", "n": 2}',
            {"type": "tool_search_call", "execution": "client", "arguments": {"query": "x", "n": 2}},
        ),
        ({"kind": "tool_search"}, "", {"type": "tool_search_call", "execution": "client", "arguments": {}}),
    ],
)
def test_call_in_tool_spelling(spelling: Any, arguments: str, item: Any) -> None:
    """A call is spelled as its tool wants it."""
    found = written(
        call_json(
            calling(Tool(name="t", spelling=spelling)),
            ToolCall(id="call_1", name="t", arguments=arguments),
            3,
        )
    )
    assert found.pop("id").endswith("_0f1e_3")
    assert found == {"status": "completed", "call_id": "call_1"} | item


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("local_shell", '{"command": "ls"}'),
        ("local_shell", '{"command": ["ls"], "env": 5}'),
        ("local_shell", "no json"),
        ("shell", '{"commands": [5]}'),
        ("apply_patch", '{"path": "a"}'),
        ("apply_patch", "[]"),
        ("tool_search", "[1]"),
        ("tool_search", '{"a": NaN}'),
        ("shell", '{"commands": ["ls"], "timeout_ms": 123456789012345678901234567890}'),
        ("tool_search", '{"a": "\\ud800"}'),
    ],
)
def test_unfit_arguments_stay_function_call(kind: str, arguments: str) -> None:
    """Arguments that do not fit their tool's spelling are left to the harness to refuse."""
    found = written(
        call_json(
            calling(Tool(name=kind, spelling={"kind": kind})),
            ToolCall(id="call_1", name=kind, arguments=arguments),
            0,
        )
    )
    assert (found["type"], found["name"], found["arguments"]) == ("function_call", kind, arguments)


def test_later_tools_keep_spelling() -> None:
    """Tools that came later have their spelling too."""
    call = calling(later={"cal.list": {"kind": "function", "name": "list", "namespace": "cal"}})
    found = call_json(call, ToolCall(id="call_1", name="cal.list", arguments="{}"), 0)
    assert (found["name"], found["namespace"]) == ("list", "cal")
    assert call_json(call, GO, 0)["name"] == "go"


# ── log-probabilities ─────────────────────────────────────────────────────────


def token(text: str) -> TokenLogprob:
    return TokenLogprob(data=text.encode(), logprob=-0.5)


def test_each_text_has_its_tokens() -> None:
    tokens = tuple(map(token, ("I ", "gö.", "And", "?", "<end>")))
    answer = Answer(parts=(TextPart("I gö."), GO, TextPart("And?")), finish_reason="stop", logprobs=tokens)
    first, _, last = written(output_json(CALL, answer))
    assert [each["token"] for each in first["content"][0]["logprobs"]] == ["I ", "gö."]
    assert [each["token"] for each in last["content"][0]["logprobs"]] == ["And", "?", "<end>"]


def test_non_text_tokens_keep_bytes() -> None:
    top = (Alternative(data=b"\xf0\x9f", logprob=float("-inf")),)
    answer = Answer(
        parts=(TextPart("x"),),
        finish_reason="stop",
        logprobs=(TokenLogprob(data=b"x\xf0", logprob=-1.5, top=top),),
    )
    (found,) = written(output_json(CALL, answer))[0]["content"][0]["logprobs"]
    assert found == {
        "token": "x\ufffd",
        "bytes": [120, 240],
        "logprob": -1.5,
        "top_logprobs": [{"token": "\ufffd", "bytes": [240, 159], "logprob": -9999.0}],
    }
