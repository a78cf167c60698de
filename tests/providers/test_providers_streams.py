"""A property of every dialect: a stream put together again is the whole answer, and what a client echoes
reads as what we said.
"""

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from providers_kit import a_call

from polarnode.core.conversation import (
    Answer,
    Delta,
    FinishReason,
    Part,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    ToolCall,
    Usage,
)
from polarnode.providers.anthropic import ANTHROPIC
from polarnode.providers.contract import Dialect, RequestEnvelope
from polarnode.providers.openai_chat import OPENAI_CHAT
from polarnode.providers.openai_responses import OPENAI_RESPONSES

CALL = a_call()
words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
arguments = st.dictionaries(
    words, st.none() | st.booleans() | st.integers(-(2**53), 2**53) | words, max_size=3
).map(json.dumps)
calls = st.builds(ToolCall, id=st.integers(0, 2**32).map("call_{:x}".format), name=words, arguments=arguments)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    """Parts as `tokens.parse` leaves them: two texts, or two thoughts, never stand side by side."""
    parts: list[Part] = []
    for part in draw(
        st.lists(st.builds(TextPart, words) | st.builds(ThinkingPart, words) | calls, max_size=6)
    ):
        if isinstance(part, ToolCall) or not parts or type(part) is not type(parts[-1]):
            parts.append(part)
    reason: FinishReason = draw(st.sampled_from(["stop", "length", "tool_calls"]))
    return Answer(parts=tuple(parts), finish_reason=reason)


usages = st.builds(
    lambda cached, new, out: Usage(prompt_tokens=cached + new, cached_tokens=cached, completion_tokens=out),
    st.integers(0, 99),
    st.integers(0, 99),
    st.integers(0, 99),
)


def cut(answer: Answer, size: int) -> Iterator[Delta]:
    for part in answer.parts:
        match part:
            case TextPart(text):
                yield from (TextDelta(text[at : at + size]) for at in range(0, len(text), size))
            case ThinkingPart(text):
                yield from (ThinkingDelta(text[at : at + size]) for at in range(0, len(text), size))
            case ToolCall():
                yield part


def streamed(dialect: Dialect, answer: Answer, usage: Usage, size: int, pings: int) -> bytes:
    stream = dialect.stream(CALL)
    sent = stream.keep_alive() if pings % 2 else b""
    sent += stream.start(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)
    for number, delta in enumerate(cut(answer, size)):
        sent += stream.delta(delta) + (stream.keep_alive() if number < pings else b"")
    return sent + stream.end([answer], usage)


def data(sent: bytes) -> list[Any]:
    lines = [line for line in sent.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def chat_from(events: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    body: dict[str, Any] = {}
    for event in events:
        body |= {"usage": event["usage"]} if "usage" in event else {}
        for choice in event["choices"]:
            for name in ("content", "reasoning_content"):
                message[name] += choice["delta"].get(name, "")
            message["tool_calls"] += [
                {k: v for k, v in call.items() if k != "index"}
                for call in choice["delta"].get("tool_calls", [])
            ]
            body["finish_reason"] = choice["finish_reason"]
    return body | {"message": message}


@given(answers(), usages, st.integers(1, 5), st.integers(0, 4))
def test_chat_streamed_is_chat_whole(answer: Answer, usage: Usage, size: int, pings: int) -> None:
    whole = json.loads(OPENAI_CHAT.whole(CALL, [answer], usage))
    built = chat_from(data(streamed(OPENAI_CHAT, answer, usage, size, pings)))
    said = whole["choices"][0]["message"]
    assert built["message"]["content"] == (said["content"] or "")
    assert built["message"]["reasoning_content"] == said.get("reasoning_content", "")
    assert built["message"]["tool_calls"] == said.get("tool_calls", [])
    assert (built["finish_reason"], built["usage"]) == (whole["choices"][0]["finish_reason"], whole["usage"])


def blocks_from(events: list[Any]) -> list[Any]:
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        if event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            match delta["type"]:
                case "text_delta":
                    block["text"] += delta["text"]
                case "thinking_delta":
                    block["thinking"] += delta["thinking"]
                case "signature_delta":
                    block["signature"] = delta["signature"]
                case "input_json_delta":
                    block["input"] = json.loads(delta["partial_json"])
    return blocks


@given(answers(), usages, st.integers(1, 5), st.integers(0, 4))
def test_messages_streamed_are_messages_whole(answer: Answer, usage: Usage, size: int, pings: int) -> None:
    whole = json.loads(ANTHROPIC.whole(CALL, [answer], usage))
    events = data(streamed(ANTHROPIC, answer, usage, size, pings))
    assert blocks_from(events) == whole["content"]
    assert events[-2]["usage"] == whole["usage"]
    assert events[-2]["delta"] == {
        "stop_reason": whole["stop_reason"],
        "stop_sequence": whole["stop_sequence"],
    }


def items_from(events: list[Any]) -> list[Any]:
    """Items put together from their deltas alone, as a client does that shows them as they come."""
    items: list[Any] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "content_part.added":
                items[-1]["content"].append(event["part"])
            case "reasoning_summary_part.added":
                items[-1]["summary"].append(event["part"])
            case "output_text.delta":
                items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
            case "reasoning_summary_text.delta":
                items[event["output_index"]]["summary"][event["summary_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "output_item.done":
                items[-1]["status"] = event["item"].get("status")
                assert event["item"]["id"] == items[-1]["id"]
    return [{name: value for name, value in item.items() if value is not None} for item in items]


@given(answers(), usages, st.integers(1, 5), st.integers(0, 4))
def test_responses_streamed_are_responses_whole(answer: Answer, usage: Usage, size: int, pings: int) -> None:
    whole = json.loads(OPENAI_RESPONSES.whole(CALL, [answer], usage))
    events = data(streamed(OPENAI_RESPONSES, answer, usage, size, pings))
    assert items_from(events) == whole["output"]
    assert events[-1]["response"] == whole
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@given(answers())
def test_echoed_answer_reads_as_returned(answer: Answer) -> None:
    """What lineage stands on: a faithful client changes nothing but the spelling of arguments."""
    echoes: dict[Dialect, Any] = {
        OPENAI_CHAT: json.loads(OPENAI_CHAT.whole(CALL, [answer], Usage()))["choices"][0]["message"],
        ANTHROPIC: {
            "role": "assistant",
            "content": json.loads(ANTHROPIC.whole(CALL, [answer], Usage()))["content"],
        },
    }
    items = json.loads(OPENAI_RESPONSES.whole(CALL, [answer], Usage()))["output"]
    for dialect, echo in ({**echoes, OPENAI_RESPONSES: items} if items else echoes).items():
        said: Any = [{"role": "user", "content": "hi"}, *(echo if isinstance(echo, list) else [echo])]
        body = json.dumps({"model": "m", "max_tokens": 1, "messages": said, "input": said}).encode()
        read = dialect.read(body, RequestEnvelope()).conversation.messages[-1]
        meant = answer.as_message()
        assert (read.text, read.thinking) == (meant.text, meant.thinking)
        assert [(call.id, call.name, json.loads(call.arguments)) for call in read.calls] == [
            (call.id, call.name, json.loads(call.arguments)) for call in meant.calls
        ]
        assert set(read.refs) >= {call.id for call in meant.calls}
