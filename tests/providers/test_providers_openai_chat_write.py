"""Chat Completions: an answer, whole and streamed."""

import json
from typing import Any

import pytest
from attrs import evolve
from providers_kit import a_call

from polarnode.core.conversation import (
    Alternative,
    Answer,
    FinishReason,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    TokenLogprob,
    ToolCall,
    Usage,
)
from polarnode.providers.contract import Fault
from polarnode.providers.openai_chat.write import ChatStream, whole

CALL = a_call(include_usage=True)
QUIET = a_call(include_usage=False)
GO = ToolCall(id="call_ab0", name="go", arguments='{"a": 1}')
STAY = ToolCall(id="call_ab1", name="stay", arguments="{}")
USAGE = Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=8, thinking_tokens=1)


def events(sent: bytes) -> list[Any]:
    lines = sent.split(b"\n\n")
    assert lines.pop() == b""
    assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines)
    return ["[DONE]" if line == b"data: [DONE]" else json.loads(line[6:]) for line in lines]


def deltas(sent: bytes) -> list[Any]:
    return [event["choices"][0]["delta"] for event in events(sent) if event != "[DONE]" and event["choices"]]


def test_whole_answer_in_chat_shape() -> None:
    answer = Answer(parts=(ThinkingPart("hm"), TextPart("I go."), GO, STAY), finish_reason="tool_calls")
    body = json.loads(whole(CALL, [answer], USAGE))
    assert (body["id"], body["object"], body["created"], body["model"]) == (
        "chatcmpl-0f1e",
        "chat.completion",
        1700000000,
        "asked-for",
    )
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "I go.",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_ab0", "type": "function", "function": {"name": "go", "arguments": '{"a": 1}'}},
            {"id": "call_ab1", "type": "function", "function": {"name": "stay", "arguments": "{}"}},
        ],
    }
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def test_content_null_only_beside_calls() -> None:
    only_call = json.loads(whole(CALL, [Answer(parts=(GO,), finish_reason="tool_calls")], USAGE))
    assert only_call["choices"][0]["message"]["content"] is None
    nothing = json.loads(whole(CALL, [Answer(parts=(), finish_reason="stop")], USAGE))
    assert nothing["choices"][0]["message"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("reason", "calls", "word"),
    [
        ("stop", False, "stop"),
        ("stop_string", False, "stop"),
        ("tool_calls", False, "stop"),
        ("length", False, "length"),
        ("abort", False, "length"),
        ("stop", True, "tool_calls"),
        ("length", True, "length"),
        ("tool_calls", True, "tool_calls"),
    ],
)
def test_finish_reason_of_each_ending(reason: FinishReason, calls: bool, word: str) -> None:
    answer = Answer(parts=(GO,) if calls else (TextPart("x"),), finish_reason=reason)
    assert json.loads(whole(CALL, [answer], USAGE))["choices"][0]["finish_reason"] == word
    assert events(ChatStream(CALL).end([answer], USAGE))[1]["choices"][0]["finish_reason"] == word
    calls_first = json.loads(whole(evolve(CALL, calls_first=True), [answer], USAGE))
    assert calls_first["choices"][0]["finish_reason"] == ("tool_calls" if calls else word)


def test_call_is_one_chunk() -> None:
    """A call is one chunk with id, name and all arguments."""
    stream = ChatStream(CALL)
    stream.start(prompt_tokens=10, cached_tokens=0)
    assert deltas(stream.delta(GO)) == [
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": "call_ab0",
                    "type": "function",
                    "function": {"name": "go", "arguments": '{"a": 1}'},
                }
            ]
        }
    ]
    assert deltas(stream.delta(STAY))[0]["tool_calls"][0]["index"] == 1


def test_stream_chunks_in_order() -> None:
    stream = ChatStream(CALL)
    sent = stream.start(prompt_tokens=10, cached_tokens=8)
    for delta in (
        ThinkingDelta("h"),
        ThinkingDelta("m"),
        TextDelta("I "),
        TextDelta(""),
        TextDelta("go."),
        GO,
    ):
        sent += stream.delta(delta)
    sent += stream.end(
        [Answer(parts=(ThinkingPart("hm"), TextPart("I go."), GO), finish_reason="tool_calls")], USAGE
    )
    found = deltas(sent)
    assert found[:5] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "h"},
        {"reasoning_content": "m"},
        {"content": "I "},
        {"content": "go."},
    ]
    assert found[6] == {}
    assert {event["id"] for event in events(sent)[:-1]} == {"chatcmpl-0f1e"}
    assert {event["object"] for event in events(sent)[:-1]} == {"chat.completion.chunk"}


def test_terminal_markers() -> None:
    end = events(ChatStream(CALL).end([Answer(parts=(TextPart("x"),), finish_reason="stop")], USAGE))
    assert end[-1] == "[DONE]"
    assert (end[-2]["choices"], end[-2]["usage"]["total_tokens"]) == ([], 14)
    assert end[-3]["choices"][0]["finish_reason"] == "stop"


def test_no_unasked_usage_chunk() -> None:
    end = events(ChatStream(QUIET).end([Answer(parts=(), finish_reason="stop")], USAGE))
    assert all("usage" not in event for event in end[:-1])
    assert end[-1] == "[DONE]"


def test_keepalive_before_the_start() -> None:
    """A keep-alive is data, and legal before the start."""
    stream = ChatStream(CALL)
    assert deltas(stream.keep_alive()) == [{"role": "assistant", "content": ""}]
    assert deltas(stream.keep_alive()) == [{}]
    assert stream.start(prompt_tokens=1, cached_tokens=0) == b""
    assert deltas(stream.delta(TextDelta("x"))) == [{"content": "x"}]
    assert deltas(stream.keep_alive()) == [{}]


def test_failed_stream_is_broken() -> None:
    """A stream that fails is broken, never ended."""
    stream = ChatStream(CALL)
    assert stream.failed(Fault(kind="engine_failed", message="m")) is None
    stream.delta(TextDelta("half"))
    assert stream.failed(Fault(kind="engine_failed", message="m")) is None


def test_id_sent_as_minted() -> None:
    assert deltas(ChatStream(CALL).delta(GO))[1]["tool_calls"][0]["id"] == GO.id


def test_answers_have_their_index() -> None:
    """Several answers each have their index, whole and streamed."""
    call = a_call(choices=2)
    answers = [
        Answer(parts=(TextPart("x"),), finish_reason="stop"),
        Answer(parts=(GO, STAY), finish_reason="tool_calls"),
    ]
    found = json.loads(whole(call, answers, USAGE))["choices"]
    assert [(choice["index"], choice["finish_reason"]) for choice in found] == [
        (0, "stop"),
        (1, "tool_calls"),
    ]
    stream = ChatStream(call)
    sent = (
        stream.delta(GO, choice=1)
        + stream.delta(TextDelta("x"), choice=0)
        + stream.delta(STAY, choice=1)
        + stream.end(answers, USAGE)
    )
    chunks = [event["choices"][0] for event in events(sent) if event != "[DONE]" and event["choices"]]
    assert [chunk["index"] for chunk in chunks] == [0, 1, 1, 0, 1, 0, 1]
    assert [chunk["delta"] for chunk in chunks[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert [
        chunk["delta"]["tool_calls"][0]["index"] for chunk in chunks if "tool_calls" in chunk["delta"]
    ] == [0, 1]
    assert [chunk["finish_reason"] for chunk in chunks[-2:]] == ["stop", "tool_calls"]


def test_logprobs_in_openai_shape() -> None:
    euro = "€".encode()
    tokens = (
        TokenLogprob(
            data=b"a",
            logprob=-0.5,
            top=(Alternative(data=b"a", logprob=-0.5), Alternative(data=b"b", logprob=float("-inf"))),
        ),
        TokenLogprob(data=euro[:2], logprob=-1.0),
        TokenLogprob(data=euro[2:], logprob=-2.0),
    )
    first = {
        "token": "a",
        "bytes": [97],
        "logprob": -0.5,
        "top_logprobs": [
            {"token": "a", "bytes": [97], "logprob": -0.5},
            {"token": "b", "bytes": [98], "logprob": -9999.0},
        ],
    }
    body = json.loads(
        whole(CALL, [Answer(parts=(TextPart("a€"),), finish_reason="stop", logprobs=tokens)], USAGE)
    )
    said = body["choices"][0]["logprobs"]
    assert said["refusal"] is None
    assert said["content"][0] == first
    assert [token["token"] for token in said["content"][1:]] == ["\ufffd", "\ufffd"]
    assert bytes(said["content"][1]["bytes"] + said["content"][2]["bytes"]) == euro
    stream = ChatStream(CALL, opened=True)
    sent = (
        stream.delta(TextDelta("a", tokens[:1]))
        + stream.delta(TextDelta("", tokens[1:2]))
        + stream.delta(TextDelta("€", tokens[2:]))
    )
    assert [token for event in events(sent) for token in event["choices"][0]["logprobs"]["content"]] == said[
        "content"
    ]
    assert events(stream.keep_alive())[0]["choices"][0]["logprobs"] is None
