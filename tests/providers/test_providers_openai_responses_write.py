"""Responses: an answer, whole and streamed; every event is read by OpenAI's own types."""

import json
from typing import Any

import pytest
from attrs import evolve
from openai.types.responses import Response, ResponseStreamEvent
from providers_kit import a_call
from pydantic import TypeAdapter

from polarnode.core.conversation import (
    Answer,
    Conversation,
    Message,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    Tool,
    ToolCall,
    Usage,
)
from polarnode.providers.contract import Fault, RequestEnvelope
from polarnode.providers.openai_responses.history import SealedContent, unseal
from polarnode.providers.openai_responses.read import read
from polarnode.providers.openai_responses.write import ResponseStream, whole

ECHO = read(
    b'{"model":"asked-for","input":"hi","tools":[{"type":"function","name":"go"},{"type":"local_shell"}]}',
    RequestEnvelope(),
).extras["echo"]
CALL = a_call(extras={"echo": ECHO})
GO = ToolCall(id="call_ab0", name="go", arguments='{"a": 1}')
USAGE = Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=8, thinking_tokens=1)
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def events(sent: bytes) -> list[Any]:
    blocks = sent.split(b"\n\n")
    assert blocks.pop() == b""
    found = []
    for block in blocks:
        name, data = block.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        found.append(event)
    return found


def kinds(sent: bytes) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events(sent)]


def test_whole_answer_in_responses_shape() -> None:
    answer = Answer(parts=(ThinkingPart("hm"), TextPart("I go."), GO), finish_reason="tool_calls")
    body = json.loads(whole(CALL, answer, USAGE))
    assert (body["id"], body["status"], [item["type"] for item in body["output"]]) == (
        "resp_0f1e",
        "completed",
        ["reasoning", "message", "function_call"],
    )
    assert body["usage"]["total_tokens"] == 14
    Response.model_validate(body, strict=True)


def test_stream_events_in_order() -> None:
    stream = ResponseStream(CALL)
    assert kinds(stream.start(prompt_tokens=10, cached_tokens=8)) == ["created", "in_progress"]
    assert kinds(stream.delta(ThinkingDelta("h"))) == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
    ]
    assert kinds(stream.delta(ThinkingDelta("m"))) == ["reasoning_summary_text.delta"]
    assert kinds(stream.delta(TextDelta("I "))) == [
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
    ]
    assert (stream.delta(TextDelta("")), stream.delta(ThinkingDelta(""))) == (b"", b"")
    assert kinds(stream.delta(TextDelta("go."))) == ["output_text.delta"]
    assert kinds(stream.delta(GO)) == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    end = stream.end(
        [Answer(parts=(ThinkingPart("hm"), TextPart("I go."), GO), finish_reason="tool_calls")], USAGE
    )
    assert kinds(end) == ["completed"]


def everything() -> tuple[bytes, Answer]:
    patch = ToolCall(id="call_ab1", name="patch", arguments='{"input": "+ü"}')
    shell = ToolCall(id="call_ab2", name="local_shell", arguments='{"command": ["ls"]}')
    answer = Answer(
        parts=(ThinkingPart("hm"), TextPart("I go."), GO, patch, shell, TextPart("And")),
        finish_reason="length",
    )
    stream = ResponseStream(everyone())
    sent = stream.start(prompt_tokens=10, cached_tokens=8)
    for delta in (ThinkingDelta("hm"), TextDelta("I go."), GO, patch, shell, TextDelta("And")):
        sent += stream.delta(delta)
    return sent + stream.end([answer], USAGE), answer


def everyone() -> Any:
    tools = (
        Tool(name="patch", spelling={"kind": "custom"}),
        Tool(name="local_shell", spelling={"kind": "local_shell"}),
    )
    return a_call(
        extras={"echo": ECHO},
        conversation=Conversation(messages=(Message(role="user", text="hi"),), tools=tools),
    )


def test_openai_types_accept_every_event() -> None:
    for number, event in enumerate(events(everything()[0])):
        EVENTS.validate_python(event, strict=True)
        assert event["sequence_number"] == number


def test_streamed_items_equal_whole_answer() -> None:
    sent, answer = everything()
    found = events(sent)
    body = json.loads(whole(everyone(), answer, USAGE))
    assert found[-1]["response"] == body
    done = [event for event in found if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == body["output"]
    assert [event["output_index"] for event in done] == list(range(6))
    assert len({item["id"] for item in body["output"]}) == 6


def test_call_arguments_in_one_piece() -> None:
    """A call is shown empty, and then in one piece."""
    added, delta, done, item = events(ResponseStream(CALL).delta(GO))[2:]
    assert (added["item"]["arguments"], added["item"]["status"], added["item"]["call_id"]) == (
        "",
        "in_progress",
        "call_ab0",
    )
    assert (delta["delta"], done["arguments"], done["name"], item["item"]["arguments"]) == (
        '{"a": 1}',
        '{"a": 1}',
        "go",
        '{"a": 1}',
    )
    assert delta["item_id"] == done["item_id"] == item["item"]["id"]


def test_call_id_as_minted() -> None:
    assert events(ResponseStream(CALL).delta(GO))[2]["item"]["call_id"] == GO.id


def test_terminal_markers() -> None:
    end = events(ResponseStream(CALL).end([Answer(parts=(), finish_reason="stop")], USAGE))
    assert [event["type"] for event in end] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    assert (end[-1]["response"]["id"], end[-1]["response"]["output"], end[-1]["response"]["status"]) == (
        "resp_0f1e",
        [],
        "completed",
    )
    cut = ResponseStream(CALL)
    cut.delta(TextDelta("ha"))
    last = events(cut.end([Answer(parts=(TextPart("ha"),), finish_reason="length")], USAGE))
    assert [event["type"] for event in last][-2:] == ["response.output_item.done", "response.incomplete"]
    assert last[-2]["item"]["status"] == "incomplete"
    assert last[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(("calls_first", "status"), [(False, "incomplete"), (True, "completed")])
def test_cut_answer_beside_calls(calls_first: bool, status: str) -> None:
    call = evolve(CALL, calls_first=calls_first)
    answer = Answer(parts=(GO,), finish_reason="length")
    body = json.loads(whole(call, answer, USAGE))
    assert (body["status"], body["incomplete_details"] is None) == (status, calls_first)
    assert body["output"][0]["status"] == "completed"
    stream = ResponseStream(call)
    stream.delta(GO)
    assert events(stream.end([answer], USAGE))[-1]["type"] == f"response.{status}"


def test_usage_only_at_end() -> None:
    """Usage is at the end and only there."""
    found = events(everything()[0])
    assert [event["response"]["usage"] is None for event in found if "response" in event] == [
        True,
        True,
        False,
    ]


def test_keepalive_before_the_start() -> None:
    """A keep-alive is an event, and legal before the start."""
    stream = ResponseStream(CALL)
    assert kinds(stream.keep_alive()) == ["created", "in_progress"]
    assert kinds(stream.keep_alive()) == ["in_progress"]
    assert stream.start(prompt_tokens=1, cached_tokens=0) == b""
    stream.delta(TextDelta("x"))
    assert kinds(stream.keep_alive()) == ["in_progress"]
    assert kinds(stream.delta(TextDelta("y"))) == ["output_text.delta"]


@pytest.mark.parametrize("kind", ["engine_failed", "overloaded", "cancelled"])
@pytest.mark.parametrize("shown", [False, True])
def test_retryable_failure_breaks_silently(kind: Any, shown: bool) -> None:
    """A failure that can be tried again breaks the stream without a word."""
    stream = ResponseStream(CALL)
    if shown:
        stream.delta(TextDelta("half"))
    assert stream.failed(Fault(kind=kind, message="m")) is None


@pytest.mark.parametrize(
    ("kind", "code"), [("session_over", "invalid_prompt"), ("context_too_long", "context_length_exceeded")]
)
def test_final_failure_is_said(kind: Any, code: str) -> None:
    stream = ResponseStream(CALL)
    stream.delta(GO)
    stream.delta(TextDelta("half"))
    said = stream.failed(Fault(kind=kind, message="Stop."))
    assert said is not None
    (event,) = events(said.data)
    assert (event["type"], event["response"]["status"], event["response"]["error"]) == (
        "response.failed",
        "failed",
        {"code": code, "message": "Stop."},
    )
    assert [item["type"] for item in event["response"]["output"]] == ["function_call"]
    alone = ResponseStream(CALL).failed(Fault(kind=kind, message="Stop."))
    assert alone is not None
    assert kinds(alone.data) == ["created", "in_progress", "failed"]


# ── compaction ────────────────────────────────────────────────────────────────

COMPACTS = a_call(extras={"echo": ECHO, "compacts": True})
SUMMARY = Answer(parts=(ThinkingPart("hm"), TextPart("We did it."), GO), finish_reason="tool_calls")


def test_streamed_compaction_one_item() -> None:
    stream = ResponseStream(COMPACTS)
    sent = stream.start(prompt_tokens=10, cached_tokens=8)
    for delta in (ThinkingDelta("hm"), TextDelta("We did it."), GO):
        assert stream.delta(delta) == b""
    found = events(sent + stream.keep_alive() + stream.end([SUMMARY], USAGE))
    assert [event["type"] for event in found][-3:] == [
        "response.output_item.added",
        "response.output_item.done",
        "response.completed",
    ]
    (item,) = found[-1]["response"]["output"]
    assert found[-2]["item"] == item
    assert (item["type"], unseal(item["encrypted_content"])) == (
        "compaction",
        SealedContent(signature="c2ln", summary="We did it."),
    )
    assert json.loads(whole(COMPACTS, SUMMARY, USAGE)) == found[-1]["response"]


def test_compacted_conversation_with_summary() -> None:
    """A compacted conversation is the user's words and the summary."""
    told = [
        {"role": "user", "content": "hi"},
        {"type": "message", "id": "x", "role": "user", "content": [{"type": "input_text", "text": "on"}]},
    ]
    body = json.loads(whole(a_call(extras={"compacts": True, "sent": told}), SUMMARY, USAGE))
    assert (body["id"], body["object"], body["created_at"], body["usage"]["total_tokens"]) == (
        "resp_0f1e",
        "response.compaction",
        1700000000,
        14,
    )
    *users, item = body["output"]
    assert [user["content"] for user in users] == [
        [{"type": "input_text", "text": "hi"}],
        [{"type": "input_text", "text": "on"}],
    ]
    assert len({each["id"] for each in body["output"]}) == 3
    assert unseal(item["encrypted_content"]) == SealedContent(signature="c2ln", summary="We did it.")
    again = read(
        json.dumps({"model": "m", "input": body["output"]}).encode(), RequestEnvelope()
    ).conversation.messages
    assert [message.role for message in again] == ["user", "user", "user"]
    assert again[-1].text.endswith("We did it.")
