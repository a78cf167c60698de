"""An answer in Google's shape: whole, as events, as an array."""

import json
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from providers_kit import a_call
from test_providers_streams import answers, cut, usages

from polarnode.core.codec import dump_json
from polarnode.core.conversation import (
    Alternative,
    Answer,
    FinishReason,
    Part,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    TokenLogprob,
    ToolCall,
    Usage,
)
from polarnode.providers.contract import Fault, FinalBytes, RequestEnvelope
from polarnode.providers.google import GOOGLE
from polarnode.providers.google.write import arguments_json, finish_reason

SSE = a_call(extras={"thoughts": True, "sse": True})
ARRAY = a_call(extras={"thoughts": True, "sse": False})
QUIET = a_call(extras={"thoughts": False, "sse": True})
GO = ToolCall(id="call_ab0", name="go", arguments='{"to": "Köln", "n": 10000000000000000000000001}')
USAGE = Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=8, thinking_tokens=2)


def whole(*parts: Part, call: Any = SSE, reason: FinishReason = "stop") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOOGLE.whole(call, [Answer(parts=parts, finish_reason=reason)], USAGE))
    return found


def chunks(call: Any, sent: bytes) -> list[Any]:
    """The elements of a stream, as its clients cut it."""
    if call.request.extras["sse"]:
        events = sent.decode().split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        return [json.loads(event[6:]) for event in events]
    found: list[Any] = json.loads(sent)
    return found


def streamed(call: Any, answer: Answer, usage: Usage, size: int, pings: int) -> bytes:
    stream = GOOGLE.stream(call)
    sent = stream.keep_alive() if pings % 2 else b""
    sent += stream.start(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)
    for number, delta in enumerate(cut(answer, size)):
        sent += stream.delta(delta) + (stream.keep_alive() if number < pings else b"")
    return sent + stream.end([answer], usage)


def folded(found: list[Any], index: int = 0) -> list[Any]:
    """The parts of one candidate, put together as a client would: texts of a kind joined, empty ones
    dropped.
    """
    parts: list[Any] = []
    for candidate in (
        candidate for chunk in found for candidate in chunk["candidates"] if candidate["index"] == index
    ):
        for part in candidate["content"]["parts"]:
            if (
                "text" in part
                and parts
                and "text" in parts[-1]
                and part.get("thought") == parts[-1].get("thought")
            ):
                parts[-1]["text"] += part["text"]
            elif part != {"text": ""}:
                parts.append(part)
    return parts


# ── whole ─────────────────────────────────────────────────────────────────────


def test_parts_in_order_and_signed() -> None:
    """Parts stand in their order, and those that must come back are signed."""
    body = whole(ThinkingPart("hm"), TextPart("I go"), GO, TextPart("now"))
    (candidate,) = body["candidates"]
    assert candidate["content"]["role"] == "model"
    assert candidate["content"]["parts"] == [
        {"text": "hm", "thought": True, "thoughtSignature": "c2ln"},
        {"text": "I go"},
        {
            "functionCall": {
                "id": "call_ab0",
                "name": "go",
                "args": {"to": "Köln", "n": 10000000000000000000000001},
            },
            "thoughtSignature": "c2ln",
        },
        {"text": "now"},
    ]
    assert (candidate["index"], candidate["finishReason"]) == (0, "STOP")


def test_head_echoes_asked_name() -> None:
    """The head says the name that was asked for."""
    body = whole(TextPart("x"))
    assert (body["modelVersion"], body["responseId"], body["createTime"]) == (
        "asked-for",
        "0f1e",
        "2023-11-14T22:13:20Z",
    )


def test_usage_counts_thoughts_apart() -> None:
    """Usage is true, and thoughts are counted apart."""
    assert whole(TextPart("x"))["usageMetadata"] == {
        "promptTokenCount": 10,
        "candidatesTokenCount": 3,
        "thoughtsTokenCount": 2,
        "totalTokenCount": 15,
        "cachedContentTokenCount": 8,
    }


def test_thoughts_shown_only_when_asked() -> None:
    body = whole(ThinkingPart("hm"), TextPart("x"), call=QUIET)
    assert body["candidates"][0]["content"]["parts"] == [{"text": "x"}]
    assert body["usageMetadata"]["thoughtsTokenCount"] == 2
    assert whole(ThinkingPart("hm"), call=a_call())["candidates"][0]["content"]["parts"] == [{"text": ""}]


def test_empty_answer_is_empty_text() -> None:
    assert whole()["candidates"][0]["content"]["parts"] == [{"text": ""}]


@pytest.mark.parametrize(
    ("reason", "calls", "said"),
    [
        ("stop", (), "STOP"),
        ("stop_string", (), "STOP"),
        ("tool_calls", (GO,), "STOP"),
        ("length", (GO,), "MAX_TOKENS"),
        ("length", (), "MAX_TOKENS"),
        ("abort", (), "MAX_TOKENS"),
        ("error", (), "MAX_TOKENS"),
    ],
)
def test_finish_reason_of_each_ending(reason: FinishReason, calls: tuple[ToolCall, ...], said: str) -> None:
    answer = Answer(parts=calls, finish_reason=reason)
    assert finish_reason(SSE, answer) == said
    assert finish_reason(evolve(SSE, calls_first=True), answer) == ("STOP" if calls else said)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("", b"{}"),
        (" ", b"{}"),
        ('{"a": 1.10}', b'{"a": 1.10}'),
        (' {"a":1}\n', b'{"a":1}'),
        ('{"a":' * 300 + "1" + "}" * 300, b'{"a":' * 300 + b"1" + b"}" * 300),
        ("[1, 2]", b'{"input":[1, 2]}'),
        ('"x"', b'{"input":"x"}'),
        ("null", b'{"input":null}'),
        ('{"a": NaN}', b'{"input":"{\\"a\\": NaN}"}'),
        ("*** Begin", b'{"input":"*** Begin"}'),
    ],
)
def test_arguments_are_sampled_objects(arguments: str, meant: bytes) -> None:
    """Arguments are an object, as sampled."""
    assert dump_json(arguments_json(arguments)) == meant


def test_several_answers_are_candidates() -> None:
    answers = [
        Answer(parts=(TextPart(text),), finish_reason=reason)
        for text, reason in (("a", "stop"), ("b", "length"))
    ]  # type: ignore[arg-type]
    found = json.loads(GOOGLE.whole(SSE, answers, USAGE))["candidates"]
    assert [(each["index"], each["content"]["parts"], each["finishReason"]) for each in found] == [
        (0, [{"text": "a"}], "STOP"),
        (1, [{"text": "b"}], "MAX_TOKENS"),
    ]


LOGPROBS = (
    TokenLogprob(
        data=b"a",
        logprob=-0.5,
        top=(Alternative(data=b"a", logprob=-0.5), Alternative(data=b"\xff", logprob=-1.5)),
    ),
    TokenLogprob(data=b"b", logprob=-2.0),
)


def test_logprobs_shown_per_token() -> None:
    answer = Answer(parts=(TextPart("ab"),), finish_reason="stop", logprobs=LOGPROBS)
    (candidate,) = json.loads(GOOGLE.whole(SSE, [answer], USAGE))["candidates"]
    assert candidate["logprobsResult"] == {
        "chosenCandidates": [{"token": "a", "logProbability": -0.5}, {"token": "b", "logProbability": -2.0}],
        "topCandidates": [
            {
                "candidates": [
                    {"token": "a", "logProbability": -0.5},
                    {"token": "\ufffd", "logProbability": -1.5},
                ]
            },
            {"candidates": []},
        ],
    }
    assert "logprobsResult" not in whole(TextPart("x"))["candidates"][0]


# ── streamed ──────────────────────────────────────────────────────────────────


@given(answers(), usages, st.integers(1, 5), st.integers(0, 4), st.sampled_from([SSE, ARRAY, QUIET]))
def test_streamed_is_whole(answer: Answer, usage: Usage, size: int, pings: int, call: Any) -> None:
    meant = json.loads(GOOGLE.whole(call, [answer], usage))
    found = chunks(call, streamed(call, answer, usage, size, pings))
    assert folded(found) == folded([meant])
    assert found[-1]["usageMetadata"] == meant["usageMetadata"]
    assert found[-1]["candidates"][0]["finishReason"] == meant["candidates"][0]["finishReason"]
    assert all("finishReason" not in chunk["candidates"][0] for chunk in found[:-1])
    assert all(
        {name: chunk[name] for name in ("modelVersion", "responseId", "createTime")}.items() <= meant.items()
        for chunk in found
    )


@given(answers(), st.integers(1, 5), st.booleans())
def test_echoed_answer_reads_as_returned(answer: Answer, size: int, merged: bool) -> None:
    """What lineage stands on: as one content, as Gemini CLI keeps it, or as a content a chunk, as the SDK's
    chats do.
    """
    found = chunks(SSE, streamed(SSE, answer, Usage(), size, 2))
    contents = [candidate["content"] for chunk in found for candidate in chunk["candidates"]]
    if merged:
        contents = [{"role": "model", "parts": folded(found)}]
    body = json.dumps({"contents": [{"role": "user", "parts": [{"text": "hi"}]}, *contents]}).encode()
    (_, read) = GOOGLE.read(body, RequestEnvelope()).conversation.messages
    meant = answer.as_message()
    assert (read.role, read.text, read.thinking) == (meant.role, meant.text, meant.thinking)
    assert [(call.id, call.name, json.loads(call.arguments)) for call in read.calls] == [
        (call.id, call.name, json.loads(call.arguments)) for call in meant.calls
    ]
    signed = any(not isinstance(part, TextPart) for part in answer.parts)
    assert set(read.refs) == {call.id for call in meant.calls} | ({"c2ln"} if signed else set())


def test_counts_in_first_and_last_chunk() -> None:
    stream = GOOGLE.stream(SSE)
    (first,) = chunks(SSE, stream.start(prompt_tokens=10, cached_tokens=8))
    assert first["usageMetadata"] == {
        "promptTokenCount": 10,
        "totalTokenCount": 10,
        "cachedContentTokenCount": 8,
    }
    assert first["candidates"][0]["index"] == 0
    (second,) = chunks(SSE, stream.delta(TextDelta("x")))
    assert "usageMetadata" not in second


@pytest.mark.parametrize("call", [SSE, ARRAY])
def test_keepalive_is_unkept_data(call: Any) -> None:
    """A sign of life is data, and nothing that a client keeps."""
    stream = GOOGLE.stream(call)
    alive = stream.keep_alive()
    assert alive
    assert not alive.startswith(b":")
    sent = (
        alive
        + stream.delta(TextDelta("x"))
        + stream.keep_alive()
        + stream.end([Answer(parts=(TextPart("x"),), finish_reason="stop")], USAGE)
    )
    assert folded(chunks(call, sent)) == [{"text": "x"}]


def test_no_chunk_is_without_parts() -> None:
    """The official SDK drops a turn from a chat's history over a content without parts, or over an empty
    part.
    """
    sent = streamed(SSE, Answer(parts=(ThinkingPart("t"), GO), finish_reason="stop"), USAGE, 1, 4)
    found = [
        candidate["content"]["parts"] for chunk in chunks(SSE, sent) for candidate in chunk["candidates"]
    ]
    assert all(parts and all(parts) for parts in found)


def test_client_chooses_kind_of_stream() -> None:
    assert GOOGLE.stream(SSE).content_type == "text/event-stream"
    assert GOOGLE.stream(ARRAY).content_type == "application/json"


def test_array_stream_in_closed_pieces() -> None:
    """An array comes piece by piece and is closed."""
    stream = GOOGLE.stream(ARRAY)
    sent = [
        stream.keep_alive(),
        stream.start(prompt_tokens=1, cached_tokens=0),
        stream.keep_alive(),
        stream.delta(TextDelta("x")),
    ]
    sent.append(stream.end([Answer(parts=(TextPart("x"),), finish_reason="stop")], USAGE))
    assert sent[0] == sent[2] == b"\r\n"
    assert sent[1].startswith(b"[{")
    assert sent[3].startswith(b",\r\n{")
    assert sent[4].endswith(b"}\r\n]")


def test_call_is_one_chunk() -> None:
    stream = GOOGLE.stream(SSE)
    stream.start(prompt_tokens=1, cached_tokens=0)
    (chunk,) = chunks(SSE, stream.delta(GO))
    (part,) = chunk["candidates"][0]["content"]["parts"]
    assert part["functionCall"]["args"]["to"] == "Köln"


def test_each_choice_is_a_candidate() -> None:
    stream = GOOGLE.stream(SSE)
    sent = stream.start(prompt_tokens=1, cached_tokens=0)
    sent += (
        stream.delta(TextDelta("a"), choice=1)
        + stream.delta(TextDelta("b"), choice=0)
        + stream.delta(TextDelta("c"), choice=1)
    )
    both = [
        Answer(parts=(TextPart("b"),), finish_reason="stop"),
        Answer(parts=(TextPart("ac"),), finish_reason="length"),
    ]
    found = chunks(SSE, sent + stream.end(both, USAGE))
    assert (folded(found, 0), folded(found, 1)) == ([{"text": "b"}], [{"text": "ac"}])
    assert [(each["index"], each["finishReason"]) for each in found[-1]["candidates"]] == [
        (0, "STOP"),
        (1, "MAX_TOKENS"),
    ]


def test_logprobs_follow_text_or_hold_back() -> None:
    """Logprobs come with their text, and held-back ones without."""
    stream = GOOGLE.stream(SSE)
    sent = stream.delta(TextDelta("", LOGPROBS[:1])) + stream.delta(TextDelta("ab", LOGPROBS[1:]))
    found = [chunk["candidates"][0].get("logprobsResult") for chunk in chunks(SSE, sent)][1:]
    assert [each["chosenCandidates"][0]["token"] for each in found] == ["a", "b"]


def test_empty_deltas_send_nothing() -> None:
    stream = GOOGLE.stream(QUIET)
    assert stream.delta(TextDelta("")) == b""
    assert stream.delta(ThinkingDelta("hidden")) == b""
    assert GOOGLE.stream(SSE).delta(ThinkingDelta("")) == b""


def test_failed_stream_bare_json() -> None:
    """A stream that failed says so in bare JSON and has no end."""
    stream = GOOGLE.stream(SSE)
    started = stream.start(prompt_tokens=1, cached_tokens=0)
    said = stream.failed(Fault(kind="engine_failed", message="The engine died."))
    assert isinstance(said, FinalBytes)
    error = json.loads(said.data)["error"]
    assert (error["code"], error["status"], error["message"]) == (500, "INTERNAL", "The engine died.")
    assert b"\n" not in said.data[:-1]
    assert b"finishReason" not in started + said.data


def error_bytes(said: bytes | FinalBytes | None) -> bytes:
    """What is said before the connection breaks."""
    assert isinstance(said, bytes)
    return said


def test_failed_array_stays_open() -> None:
    """An array that failed has an error for its last element, and no bracket."""
    stream = GOOGLE.stream(ARRAY)
    sent = stream.start(prompt_tokens=1, cached_tokens=0) + error_bytes(
        stream.failed(Fault(kind="cancelled", message="Later."))
    )
    assert json.loads(sent + b"]")[-1]["error"]["code"] == 503
    with pytest.raises(json.JSONDecodeError):
        json.loads(sent)
