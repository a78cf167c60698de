"""Chat Completions: an answer, whole or as chunks.

The rule: `finish_reason` is exactly `tool_calls` whenever there is a call, whatever else ended the answer, because OpenClaw executes nothing
otherwise and Qwen Code, opencode and hermes ask again. A call is sent in one chunk, id, name and arguments together.
"""

from collections.abc import Sequence
from typing import assert_never

from attrs import define

from polarnode.conversation import Answer, Delta, Json, TextDelta, ThinkingDelta, ToolCall, Usage
from polarnode.providers.contract import STREAM_TYPE, Call, Fault
from polarnode.providers.sse import DONE, event
from polarnode.wire import dump_json


def finish_reason(answer: Answer) -> str:
    """Why it ended. A sample cut by an abort is called `length`: both say that more was to come."""
    if answer.calls:
        return "tool_calls"
    match answer.finish_reason:
        case "stop" | "stop_string" | "tool_calls":
            return "stop"
        case "length" | "abort" | "error":
            return "length"
        case _:
            assert_never(answer.finish_reason)


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
    }


def call_json(call: ToolCall) -> dict[str, Json]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def message_json(answer: Answer) -> Json:
    """The assistant message; `content` is null when only calls were made, as OpenAI's own is."""
    message: dict[str, Json] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
    if answer.thinking:
        message["reasoning_content"] = answer.thinking
    if answer.calls:
        message["tool_calls"] = [call_json(call) for call in answer.calls]
    return message


def whole(call: Call, answers: Sequence[Answer], usage: Usage) -> bytes:
    """A `chat.completion` body."""
    choices: list[Json] = [
        {"index": index, "message": message_json(answer), "logprobs": None, "finish_reason": finish_reason(answer)}
        for index, answer in enumerate(answers)
    ]
    return dump_json(_head(call, "chat.completion") | {"choices": choices, "usage": usage_json(usage)})


def _head(call: Call, kind: str) -> dict[str, Json]:
    return {"id": f"chatcmpl-{call.id}", "object": kind, "created": call.created, "model": call.model}


@define(eq=False)
class ChatStream:
    """One answer as `chat.completion.chunk` events. The first says the role; it may be a keep-alive, as it holds no count."""

    call: Call
    content_type: str = STREAM_TYPE
    opened: bool = False
    calls: int = 0  # sent so far: the next call's index

    def start(self, *, prompt_tokens: int, cached_tokens: int) -> bytes:
        return self._opening()

    def delta(self, delta: Delta, *, choice: int = 0) -> bytes:
        match delta:
            case TextDelta(text):
                return self._opening() + self._chunk({"content": text}) if text else b""
            case ThinkingDelta(text):
                return self._opening() + self._chunk({"reasoning_content": text}) if text else b""
            case ToolCall():
                index, self.calls = self.calls, self.calls + 1
                return self._opening() + self._chunk({"tool_calls": [{"index": index} | call_json(delta)]})
            case _:
                assert_never(delta)

    def keep_alive(self) -> bytes:
        """A chunk whose delta is empty: clients count only data as life."""
        return self._opening() or self._chunk({})

    def end(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        last = self._opening() + self._chunk({}, finish=finish_reason(answers[0]))
        counts = (
            event(_head(self.call, "chat.completion.chunk") | {"choices": [], "usage": usage_json(usage)}) if self.call.request.include_usage else b""
        )
        return last + counts + DONE

    def failed(self, fault: Fault) -> bytes | None:
        """Nothing: break the connection. Every chat harness then asks again, while Pi ends its run on an error chunk."""
        return None

    def _opening(self) -> bytes:
        if self.opened:
            return b""
        self.opened = True
        return self._chunk({"role": "assistant", "content": ""})

    def _chunk(self, delta: dict[str, Json], *, finish: str | None = None) -> bytes:
        choice: Json = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event(_head(self.call, "chat.completion.chunk") | {"choices": [choice]})
