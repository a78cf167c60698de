"""Anthropic Messages: answers, whole or as events, errors, and the spelling of tool-call ids.

This node makes ids as `call_…` and shows them to this API's clients as `toolu_…`. Both directions are here,
so that an echoed id is exactly the one that was made and signed. Other ids (from the history of another
server) pass unchanged.

Claude Code acts on the status of an error: it retries 429, 5xx, 529, 408, 409 and 401 ten times over three
minutes, and ends on 413. On any other 400 it drops features one by one, which changes the prompt.

Every event has its `event:` line; without it Claude Code reads nothing and repeats the request. A tool's
input comes only as `input_json_delta`; input in the block's start would be ignored and the tool called with
{}. Every thinking block is signed before it stops.
"""

from collections.abc import Sequence
from typing import Literal, assert_never, cast

import orjson
from attrs import define

from polarnode.core.codec.json import dump_json
from polarnode.core.conversation import (
    Answer,
    Delta,
    Json,
    Part,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    ToolCall,
    Usage,
)
from polarnode.providers.contract import (
    STREAM_TYPE,
    Fault,
    FaultKind,
    FaultRow,
    FinalBytes,
    ModelCallInfo,
    Reply,
    error_reply,
    event,
)
from polarnode.providers.shapes import parse_strict_json

# ── ids ────────────────────────────────────────────────────────────

_OURS = "call_"
_API_ID_PREFIX = "toolu_"


def to_api_id(call_id: str) -> str:
    """The id in this API's format."""
    return _API_ID_PREFIX + call_id.removeprefix(_OURS) if call_id.startswith(_OURS) else call_id


def to_node_id(tool_use_id: str) -> str:
    """The id as this node made it."""
    return (
        _OURS + tool_use_id.removeprefix(_API_ID_PREFIX)
        if tool_use_id.startswith(_API_ID_PREFIX)
        else tool_use_id
    )


# ── errors ────────────────────────────────────────────────────────────


def fault_row(kind: FaultKind) -> FaultRow:
    """Status and `error.type`. 529 is this API's status for overload. The API has no type for 410;
    `not_found_error` is the nearest type that no client retries.
    """
    match kind:
        case "bad_request" | "context_too_long" | "budget_spent":
            return FaultRow(400, "invalid_request_error")
        case "unauthorized":
            return FaultRow(401, "authentication_error")
        case "not_found":
            return FaultRow(404, "not_found_error")
        case "method_not_allowed":
            return FaultRow(405, "invalid_request_error")
        case "session_over":
            return FaultRow(410, "not_found_error")
        case "overloaded":
            return FaultRow(529, "overloaded_error")
        case "engine_failed":
            return FaultRow(500, "api_error")
        case "cancelled":
            return FaultRow(503, "api_error")
        case "too_large":
            return FaultRow(413, "request_too_large")
        case _:
            assert_never(kind)


def message(fault: Fault) -> str:
    """The fault's message with its path, because this API has no field for the path. For a context that is
    too long it has the words on which Claude Code compacts.
    """
    if fault.kind == "context_too_long" and fault.limit is not None and fault.prompt_tokens is not None:
        return f"prompt is too long: {fault.prompt_tokens} tokens > {fault.limit} maximum"
    return f"{fault.path.removeprefix('$.')}: {fault.message}" if fault.path else fault.message


def error_body(fault: Fault) -> Json:
    """The error object, the same in a reply and in a stream's `error` event."""
    return {"type": "error", "error": {"type": fault_row(fault.kind).type, "message": message(fault)}}


def error(fault: Fault) -> Reply:
    return error_reply(fault_row(fault.kind).status, error_body(fault), fault)


# ── write ────────────────────────────────────────────────────────────


def stop_reason(call: ModelCallInfo, answer: Answer) -> str:
    """The stop reason. A sample that an abort cut is reported as `max_tokens`, because both mean that the
    answer is incomplete.
    """
    if call.cut(answer):
        return "max_tokens"
    if answer.calls:
        return "tool_use"
    return "stop_sequence" if answer.finish_reason == "stop_string" else "end_turn"


def _stop(call: ModelCallInfo, answer: Answer) -> dict[str, Json]:
    reason = stop_reason(call, answer)
    return {"stop_reason": reason, "stop_sequence": answer.stop_string if reason == "stop_sequence" else None}


def usage_json(usage: Usage) -> dict[str, Json]:
    """The usage. `input_tokens` are those not read from the cache, as in this API."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,  # this node bills no cache writes
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def arguments_json(arguments: str) -> Json:
    """The input of a call. The sampled text is inserted into the body verbatim and unparsed, so that no
    number is rounded and no nesting is too deep.

    Text that is not JSON is sent as a string. The harness's own check of its tool's input then reports the
    error to the model.
    """
    try:
        parse_strict_json(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return cast(Json, orjson.Fragment(arguments or "{}"))


def shows_thinking(call: ModelCallInfo) -> bool:
    """Whether the client wants the text of thinking. If not, each thinking block holds only its signature, as
    in this API.
    """
    return call.request.extras.get("thinking") != "omitted"


def block_json(part: Part, call: ModelCallInfo) -> Json:
    match part:
        case TextPart(text):
            return {"type": "text", "text": text}
        case ThinkingPart(text):
            return {
                "type": "thinking",
                "thinking": text if shows_thinking(call) else "",
                "signature": call.signature,
            }
        case ToolCall():
            return {
                "type": "tool_use",
                "id": to_api_id(part.id),
                "name": part.name,
                "input": arguments_json(part.arguments),
            }
        case _:
            assert_never(part)


def whole(call: ModelCallInfo, answer: Answer, usage: Usage) -> bytes:
    """A `message` body."""
    blocks: list[Json] = [block_json(part, call) for part in answer.parts]
    return dump_json(_head(call) | {"content": blocks} | _stop(call, answer) | {"usage": usage_json(usage)})


def _head(call: ModelCallInfo) -> dict[str, Json]:
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": call.model}


def _event(kind: str, **fields: Json) -> bytes:
    return event({"type": kind, **fields}, name=kind)


@define(eq=False)
class MessageStream:
    """One answer as events. Blocks are numbered as they open. At most one is open, and a delta of another
    kind closes it.
    """

    call: ModelCallInfo
    content_type: str = STREAM_TYPE
    started: bool = False
    shown: bool = False  # whether something was sent that a client keeps (text, a call)
    open: Literal["text", "thinking"] | None = None
    index: int = 0

    def start(self, *, prompt_tokens: int, cached_tokens: int) -> bytes:
        if self.started:
            return b""
        self.started = True
        counts = usage_json(Usage(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens))
        empty: dict[str, Json] = {"content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=_head(self.call) | empty | {"usage": counts})

    def delta(self, delta: Delta, *, choice: int = 0) -> bytes:
        match delta:
            case TextDelta(text):
                self.shown = self.shown or bool(text)
                return (
                    self._begun()
                    + self._enter_block("text")
                    + self._write_block_delta({"type": "text_delta", "text": text})
                    if text
                    else b""
                )
            case ThinkingDelta(text):
                return self._begun() + self._enter_block("thinking") + self._thought(text) if text else b""
            case ToolCall():
                self.shown = True
                return self._begun() + self._close() + self._write_tool_use(delta)
            case _:
                assert_never(delta)

    def keep_alive(self) -> bytes:
        """A ping. This API allows it anywhere, and its SDKs drop it before they check the order of events."""
        return _event("ping")

    def end(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        begun = self.start(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)
        return (
            begun
            + self._close()
            + _event("message_delta", delta=_stop(self.call, answers[0]), usage=usage_json(usage))
            + _event("message_stop")
        )

    def failed(self, fault: Fault) -> bytes | FinalBytes | None:
        """Break the connection as long as nothing is shown: Claude Code then repeats the request, streamed.
        Later it would keep the partial text and add a message about it, so it gets an `error` event, on which
        it drops the partial text and repeats the request without streaming. A refusal is always reported by
        that event.
        """
        report = event(error_body(fault), name="error")
        if fault.kind == "bad_request":
            return FinalBytes(report)
        return report if self.shown else None

    def _begun(self) -> bytes:
        # This is empty if `start` was called, as usual.
        return self.start(prompt_tokens=0, cached_tokens=0)

    def _enter_block(self, kind: Literal["text", "thinking"]) -> bytes:
        if self.open == kind:
            return b""
        closed, self.open = self._close(), kind
        empty: Json = (
            {"type": "text", "text": ""}
            if kind == "text"
            else {"type": "thinking", "thinking": "", "signature": ""}
        )
        return closed + _event("content_block_start", index=self.index, content_block=empty)

    def _close(self) -> bytes:
        if self.open is None:
            return b""
        signed = (
            self._write_block_delta({"type": "signature_delta", "signature": self.call.signature})
            if self.open == "thinking"
            else b""
        )
        self.open = None
        return signed + self._stop_block()

    def _write_tool_use(self, call: ToolCall) -> bytes:
        empty: Json = {"type": "tool_use", "id": to_api_id(call.id), "name": call.name, "input": {}}
        started = _event("content_block_start", index=self.index, content_block=empty)
        return (
            started
            + self._write_block_delta({"type": "input_json_delta", "partial_json": call.arguments or "{}"})
            + self._stop_block()
        )

    def _thought(self, text: str) -> bytes:
        return (
            self._write_block_delta({"type": "thinking_delta", "thinking": text})
            if shows_thinking(self.call)
            else b""
        )

    def _write_block_delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=self.index, delta=delta)

    def _stop_block(self) -> bytes:
        index, self.index = self.index, self.index + 1
        return _event("content_block_stop", index=index)
