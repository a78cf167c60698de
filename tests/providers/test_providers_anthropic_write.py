"""Anthropic Messages: an answer, whole and streamed."""

import json
from typing import Any

import pytest
from attrs import evolve
from providers_kit import a_call

from polarnode.core.conversation import (
    Answer,
    FinishReason,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    ToolCall,
    Usage,
)
from polarnode.providers.anthropic.write import MessageStream, whole
from polarnode.providers.contract import Fault

CALL = a_call()
GO = ToolCall(id="call_ab0", name="go", arguments='{"a": 1}')
USAGE = Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=8, thinking_tokens=1)
COUNTS = {
    "input_tokens": 2,
    "cache_creation_input_tokens": 0,
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    "cache_read_input_tokens": 8,
    "output_tokens": 4,
}


def events(sent: bytes) -> list[Any]:
    """The data of each event, whose `event:` line must say the same as its type."""
    found = []
    lines = sent.split(b"\n\n")
    assert lines.pop() == b""
    for line in lines:
        name, _, data = line.partition(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        found.append(event)
    return found


def started(*, shown: bool = False) -> MessageStream:
    stream = MessageStream(CALL)
    stream.start(prompt_tokens=10, cached_tokens=8)
    if shown:
        stream.delta(TextDelta("x"))
    return stream


def test_whole_answer_keeps_part_order() -> None:
    answer = Answer(
        parts=(ThinkingPart("hm"), TextPart("I go."), GO, TextPart("Gone.")), finish_reason="tool_calls"
    )
    assert json.loads(whole(CALL, answer, USAGE)) == {
        "id": "msg_0f1e",
        "type": "message",
        "role": "assistant",
        "model": "asked-for",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
            {"type": "text", "text": "I go."},
            {"type": "tool_use", "id": "toolu_ab0", "name": "go", "input": {"a": 1}},
            {"type": "text", "text": "Gone."},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": COUNTS,
    }


@pytest.mark.parametrize(
    ("reason", "calls", "word", "sequence"),
    [
        ("stop", False, "end_turn", None),
        ("tool_calls", False, "end_turn", None),
        ("length", False, "max_tokens", None),
        ("abort", False, "max_tokens", None),
        ("stop_string", False, "stop_sequence", "END"),
        ("stop_string", True, "tool_use", None),
        ("length", True, "max_tokens", None),
        ("stop", True, "tool_use", None),
    ],
)
def test_stop_reason_of_each_ending(
    reason: FinishReason, calls: bool, word: str, sequence: str | None
) -> None:
    answer = Answer(
        parts=(GO,) if calls else (TextPart("x"),),
        finish_reason=reason,
        stop_string="END" if reason == "stop_string" else None,
    )
    body = json.loads(whole(CALL, answer, USAGE))
    assert (body["stop_reason"], body["stop_sequence"]) == (word, sequence)
    calls_first = json.loads(whole(evolve(CALL, calls_first=True), answer, USAGE))
    assert calls_first["stop_reason"] == ("tool_use" if calls else word)
    assert events(started().end([answer], USAGE))[-2]["delta"] == {
        "stop_reason": word,
        "stop_sequence": sequence,
    }


def test_stream_events_in_order() -> None:
    stream = MessageStream(CALL)
    sent = stream.start(prompt_tokens=10, cached_tokens=8)
    for delta in (
        ThinkingDelta("h"),
        ThinkingDelta("m"),
        TextDelta("I "),
        TextDelta(""),
        TextDelta("go."),
        GO,
        TextDelta("Gone."),
    ):
        sent += stream.delta(delta)
    sent += stream.end([Answer(parts=(TextPart("x"), GO), finish_reason="tool_calls")], USAGE)
    found = events(sent)
    kinds = (
        "message_start start delta delta delta stop start delta delta stop start delta stop start delta stop"
        " message_delta message_stop"
    )
    assert [event["type"].removeprefix("content_block_") for event in found] == kinds.split()
    assert [event["index"] for event in found if "index" in event] == [
        0,
        0,
        0,
        0,
        0,
        1,
        1,
        1,
        1,
        2,
        2,
        2,
        3,
        3,
        3,
    ]
    assert found[4]["delta"] == {"type": "signature_delta", "signature": "c2ln"}
    assert found[10]["content_block"] == {"type": "tool_use", "id": "toolu_ab0", "name": "go", "input": {}}
    assert found[11]["delta"] == {"type": "input_json_delta", "partial_json": '{"a": 1}'}


def test_counts_at_both_ends() -> None:
    """Counts stand at the start and at the end of a stream."""
    stream = MessageStream(CALL)
    (first,) = events(stream.start(prompt_tokens=10, cached_tokens=8))
    assert first["message"]["usage"] == COUNTS | {"output_tokens": 0}
    assert (first["message"]["id"], first["message"]["model"], first["message"]["content"]) == (
        "msg_0f1e",
        "asked-for",
        [],
    )
    assert events(stream.end([Answer(parts=(), finish_reason="stop")], USAGE))[0]["usage"] == COUNTS


def test_terminal_markers() -> None:
    end = events(started(shown=True).end([Answer(parts=(TextPart("x"),), finish_reason="stop")], USAGE))
    assert [event["type"] for event in end] == ["content_block_stop", "message_delta", "message_stop"]


def test_end_without_start_starts_itself() -> None:
    """An end without a start begins by itself."""
    end = events(MessageStream(CALL).end([Answer(parts=(), finish_reason="stop")], USAGE))
    assert [event["type"] for event in end] == ["message_start", "message_delta", "message_stop"]
    assert end[0]["message"]["usage"]["input_tokens"] == 2


def test_keepalive_is_ping() -> None:
    stream = MessageStream(CALL)
    assert events(stream.keep_alive()) == [{"type": "ping"}]
    assert events(stream.start(prompt_tokens=1, cached_tokens=0))[0]["type"] == "message_start"
    stream.delta(TextDelta("x"))
    assert events(stream.keep_alive()) == [{"type": "ping"}]
    assert events(stream.delta(TextDelta("y")))[0]["index"] == 0, "a ping does not close a block"


@pytest.mark.parametrize("deltas", [(), (ThinkingDelta("hm"),), (TextDelta(""),)])
def test_failure_before_visible_text(deltas: tuple[Any, ...]) -> None:
    """A failure before anything is shown breaks the connection."""
    stream = started()
    for delta in deltas:
        stream.delta(delta)
    assert stream.failed(Fault(kind="engine_failed", message="m")) is None


@pytest.mark.parametrize("delta", [TextDelta("half"), GO])
def test_failure_after_visible_text(delta: Any) -> None:
    """A failure after something is shown is an error event."""
    stream = started()
    stream.delta(delta)
    sent = stream.failed(Fault(kind="engine_failed", message="The engine died."))
    assert sent is not None
    assert events(sent) == [{"type": "error", "error": {"type": "api_error", "message": "The engine died."}}]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"b": 1, "a": 2.0}', {"b": 1, "a": 2.0}),
        ("", {}),
        ("[1]", [1]),
        ("not json", "not json"),
        ('{"a": "\\ud83d"}', {"a": "\ud83d"}),
        ('{"a": 12345678901234567890123, "b": 1e400}', {"a": 12345678901234567890123, "b": float("inf")}),
        ('{"a": NaN}', '{"a": NaN}'),
        ("[" * 300 + "]" * 300, json.loads("[" * 300 + "]" * 300)),
        ("[" * 100000, "[" * 100000),
    ],
)
def test_arguments_are_sent_as_sampled(arguments: str, value: Any) -> None:
    answer = Answer(
        parts=(ToolCall(id="call_1", name="go", arguments=arguments),), finish_reason="tool_calls"
    )
    assert json.loads(whole(CALL, answer, USAGE))["content"][0]["input"] == value


def test_call_input_in_one_piece() -> None:
    found = events(started().delta(ToolCall(id="call_1", name="go", arguments="")))
    assert [event["type"] for event in found] == [
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
    ]
    assert found[1]["delta"]["partial_json"] == "{}"


def test_omitted_thinking_is_signature_alone() -> None:
    """Thinking that is not to be shown is a signature alone, whole and streamed."""
    call = a_call(extras={"thinking": "omitted"})
    answer = Answer(parts=(ThinkingPart("hm"), TextPart("x")), finish_reason="stop")
    block = {"type": "thinking", "thinking": "", "signature": "c2ln"}
    assert json.loads(whole(call, answer, USAGE))["content"] == [block, {"type": "text", "text": "x"}]
    stream = MessageStream(call)
    sent = (
        stream.delta(ThinkingDelta("h"))
        + stream.delta(ThinkingDelta("m"))
        + stream.delta(TextDelta("x"))
        + stream.end([answer], USAGE)
    )
    assert "thinking_delta" not in sent.decode()
    assert [
        event["delta"]["signature"]
        for event in events(sent)
        if event.get("delta", {}).get("type") == "signature_delta"
    ] == ["c2ln"]
