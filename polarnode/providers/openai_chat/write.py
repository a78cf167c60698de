"""Chat Completions: answers, whole or as chunks, and OpenRouter's `reasoning_details`.

`finish_reason` is `tool_calls` for an answer that ended with calls, and `length` for one that was cut, with
or without calls. A call is sent in one chunk, id, name and arguments together.

`reasoning_details` is the one opaque field of this API that a client returns. It identifies the turn of an
answer; without it an answer that has no tool calls cannot be identified. It is written only for clients of
OpenRouter's API (they send `reasoning` or `include_reasoning`), because for others it is an unknown field. It
is written once in an answer, and never for several choices, which are several turns.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, assert_never

from attrs import define, field

from polarnode.core.codec.json import dump_json
from polarnode.core.conversation import (
    Answer,
    Delta,
    Json,
    TextDelta,
    ThinkingDelta,
    TokenLogprob,
    ToolCall,
    Usage,
)
from polarnode.providers import openai
from polarnode.providers.contract import DONE, STREAM_TYPE, Fault, FinalBytes, ModelCallInfo, event
from polarnode.providers.openai_chat.shapes import ChatRequest
from polarnode.providers.openai_chat.tools import call_json

# ── details ────────────────────────────────────────────────────────────

REASONING_DETAILS: Final = "reasoning_details"


def wants_details(request: ChatRequest) -> bool:
    """Whether the client uses OpenRouter's format and asks for a single answer."""
    return (request.reasoning is not None or request.include_reasoning is True) and (request.n or 1) == 1


def details(call: ModelCallInfo) -> dict[str, Json]:
    """The fields to merge into the message or a delta. Empty unless requested."""
    if not call.request.extras.get(REASONING_DETAILS):
        return {}
    return {
        REASONING_DETAILS: [
            {
                "type": "reasoning.encrypted",
                "data": call.signature,
                "id": None,
                "format": "unknown",
                "index": 0,
            }
        ]
    }


def detail_refs(echoed: Json) -> Iterator[str]:
    """The opaque fields in what a client echoes, including those that it added itself."""
    for detail in echoed if isinstance(echoed, list) else ():
        if isinstance(detail, dict):
            yield from (
                found
                for name in ("id", "data", "signature")
                if isinstance(found := detail.get(name), str) and found
            )


# ── write ────────────────────────────────────────────────────────────

# OpenAI's value for a token that could not have been sampled, because JSON has no infinity.
MIN_LOGPROB: Final = -9999.0


def finish_reason(call: ModelCallInfo, answer: Answer) -> str:
    """The finish reason. A sample that an abort cut is reported as `length`, because both mean that the
    answer is incomplete.
    """
    if call.cut(answer):
        return "length"
    return "tool_calls" if answer.calls else "stop"


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
    }


def message_json(call: ModelCallInfo, answer: Answer) -> Json:
    """The assistant message. `content` is null if there are only calls, as in OpenAI's API."""
    message: dict[str, Json] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
    if answer.thinking:
        message["reasoning_content"] = answer.thinking
    if answer.calls:
        tools = call.request.conversation.tools
        message["tool_calls"] = [call_json(made, tools) for made in answer.calls]
    return message | details(call)


def logprobs_json(tokens: Sequence[TokenLogprob]) -> Json:
    """The logprobs of visible text. A token that is part of a character is shown as U+FFFD, but its `bytes`
    are exact.
    """
    content: list[Json] = [
        _token_json(each.data, each.logprob)
        | {"top_logprobs": [_token_json(o.data, o.logprob) for o in each.top]}
        for each in tokens
    ]
    return {"content": content, "refusal": None} if content else None


def _token_json(data: bytes, logprob: float) -> dict[str, Json]:
    return {
        "token": data.decode(errors="replace"),
        "bytes": list(data),
        "logprob": max(logprob, MIN_LOGPROB),
    }


def whole(call: ModelCallInfo, answers: Sequence[Answer], usage: Usage) -> bytes:
    """A `chat.completion` body."""
    choices: list[Json] = [
        {
            "index": index,
            "message": message_json(call, answer),
            "logprobs": logprobs_json(answer.logprobs),
            "finish_reason": finish_reason(call, answer),
        }
        for index, answer in enumerate(answers)
    ]
    return dump_json(_head(call, "chat.completion") | {"choices": choices, "usage": usage_json(usage)})


def _head(call: ModelCallInfo, kind: str) -> dict[str, Json]:
    return {"id": f"chatcmpl-{call.id}", "object": kind, "created": call.created, "model": call.model}


@define(eq=False)
class ChatStream:
    """Answers as `chat.completion.chunk` events. The first event of each answer holds the role. A keep-alive
    may come first, because it holds no count.
    """

    call: ModelCallInfo
    content_type: str = STREAM_TYPE
    opened: bool = False
    # for each choice, the number of calls sent so far, which is the index of the next call
    calls: Counter[int] = field(factory=Counter)

    def start(self, *, prompt_tokens: int, cached_tokens: int) -> bytes:
        return self._opening()

    def delta(self, delta: Delta, *, choice: int = 0) -> bytes:
        match delta:
            case TextDelta(text, logprobs):
                # Tokens of an incomplete character are reported at once. Otherwise they would be missing from
                # the chunk that has their text.
                return (
                    self._opening() + self._chunk({"content": text}, choice, logprobs=logprobs)
                    if text or logprobs
                    else b""
                )
            case ThinkingDelta(text):
                return self._opening() + self._chunk({"reasoning_content": text}, choice) if text else b""
            case ToolCall():
                made: Json = {"index": self.calls[choice]} | call_json(
                    delta, self.call.request.conversation.tools
                )
                self.calls[choice] += 1
                return self._opening() + self._chunk({"tool_calls": [made]}, choice)
            case _:
                assert_never(delta)

    def keep_alive(self) -> bytes:
        """A chunk with an empty delta, because clients count only data as a sign of life."""
        return self._opening() or self._chunk({}, 0)

    def end(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        last = b"".join(
            self._chunk(details(self.call), choice, finish=finish_reason(self.call, answer))
            for choice, answer in enumerate(answers)
        )
        counts = (
            event(self._chunk_head() | {"choices": [], "usage": usage_json(usage)})
            if self.call.request.include_usage
            else b""
        )
        return self._opening() + last + counts + DONE

    def failed(self, fault: Fault) -> bytes | FinalBytes | None:
        """Send nothing and break the connection. Every chat harness then repeats the request, while Pi ends
        its run on an error chunk. So only a request that can never be answered, however often it is repeated,
        gets an error chunk.
        """
        return FinalBytes(event(openai.error_body(fault))) if fault.kind == "bad_request" else None

    def _opening(self) -> bytes:
        if self.opened:
            return b""
        self.opened = True
        return b"".join(
            self._chunk({"role": "assistant", "content": ""}, choice)
            for choice in range(self.call.request.choices)
        )

    def _chunk(
        self,
        delta: dict[str, Json],
        choice: int,
        *,
        finish: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> bytes:
        choice_json: Json = {
            "index": choice,
            "delta": delta,
            "logprobs": logprobs_json(logprobs),
            "finish_reason": finish,
        }
        return event(self._chunk_head() | {"choices": [choice_json]})

    def _chunk_head(self) -> dict[str, Json]:
        return _head(self.call, "chat.completion.chunk")
