"""Google generateContent: answers (whole, as server-sent events, or as a JSON array in pieces), errors, and
tool-call ids.

Ids are sent as this node makes them (`call_…`). Gemini CLI can be set to keep its own contexts, and then puts
the function's name and two underscores before every id. Other clients drop ids and keep the signature beside
the call. Both are read back as exactly the original id. Other ids (which Gemini CLI invents, or from the
history of another server) pass unchanged.

Errors have the shape of google.rpc.Status. Gemini CLI (0.61, measured) retries 429 and 5xx ten times over 200
s. Every other 4xx ends it at once with exit code 1, even for a context that is too long. It waits at least as
long as `RetryInfo` says (without one 5 s, doubling). Over 300 s it gives up at once, and also if a message
says that its limit is 0 or its capacity exhausted. It does not read the `retry-after` header.

Parts stand in the order in which they were sampled, and a call is one whole part. A chunk without content has
an empty text: for a content without parts the official SDK drops a chat's turn, and for an SSE comment Gemini
CLI drops a finished answer. Thoughts are shown only on request (`includeThoughts`), and always counted.
"""

import re
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import assert_never, cast

import orjson
from attrs import define, field

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
    TokenLogprob,
    ToolCall,
    Usage,
)
from polarnode.providers.contract import (
    JSON_TYPE,
    RETRY_AFTER_S,
    RETRYABLE_FAULTS,
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

_OURS = re.compile(r"call_[0-9a-f]{16,}")
# This is the content of a signature, and also the beginning of the id of each call of the turn.
_REFERENCE_DIGITS = re.compile(rb"[0-9a-f]{16}")


def to_node_id(call_id: str, name: str) -> str:
    """The id as this node made it."""
    bare = call_id.removeprefix(f"{name}__")
    return bare if _OURS.fullmatch(bare) else call_id


def signature_call_id(signature: str | None, place: int) -> str | None:
    """The id of a turn's call at `place`, from 0, given only the turn's signature. None if the signature is
    not this node's. The signature is not verified here.
    """
    try:
        reference = b64decode((signature or "").replace("-", "+").replace("_", "/"), validate=True)
    except (NotBase64, ValueError):
        return None
    return f"call_{reference.decode()}{place:02x}" if _REFERENCE_DIGITS.fullmatch(reference) else None


# ── errors ────────────────────────────────────────────────────────────

_RPC_PREFIX = "type.googleapis.com/google.rpc."


def fault_row(kind: FaultKind) -> FaultRow:
    """Status and canonical code of google.rpc. There is no code for 405, 410 and 413; the one with the
    nearest meaning is used.
    """
    match kind:
        case "bad_request" | "context_too_long":
            return FaultRow(400, "INVALID_ARGUMENT")
        case "budget_spent":
            return FaultRow(400, "FAILED_PRECONDITION")
        case "unauthorized":
            return FaultRow(401, "UNAUTHENTICATED")
        case "not_found":
            return FaultRow(404, "NOT_FOUND")
        case "method_not_allowed":
            return FaultRow(405, "UNIMPLEMENTED")
        case "session_over":
            return FaultRow(410, "NOT_FOUND")
        case "overloaded":
            return FaultRow(429, "RESOURCE_EXHAUSTED")
        case "engine_failed":
            return FaultRow(500, "INTERNAL")
        case "cancelled":
            return FaultRow(503, "UNAVAILABLE")
        case "too_large":
            return FaultRow(413, "INVALID_ARGUMENT")
        case _:
            assert_never(kind)


def message(fault: Fault) -> str:
    """The fault's message, with its path before it unless it begins with the path. A context that is too long
    is reported in Google's own words.
    """
    if fault.kind == "context_too_long" and fault.limit is not None and fault.prompt_tokens is not None:
        return (
            f"The input token count ({fault.prompt_tokens}) exceeds the maximum number of tokens allowed"
            f" ({fault.limit})."
        )
    field = (fault.path or "$").removeprefix("$").removeprefix(".")
    return f"{field}: {fault.message}" if field and not fault.message.startswith(field) else fault.message


def error_body(fault: Fault) -> Json:
    """The error object, the same in a reply and in a stream."""
    found = fault_row(fault.kind)
    error: dict[str, Json] = {"code": found.status, "message": message(fault), "status": found.type}
    details = _error_details(fault)
    return {"error": error | {"details": details} if details else error}


def _error_details(fault: Fault) -> list[Json]:
    if fault.kind in RETRYABLE_FAULTS:
        return [
            {"@type": f"{_RPC_PREFIX}RetryInfo", "retryDelay": f"{fault.retry_after_s or RETRY_AFTER_S}s"}
        ]
    if fault.path is not None:
        return [
            {
                "@type": f"{_RPC_PREFIX}BadRequest",
                "fieldViolations": [{"field": fault.path.removeprefix("$."), "description": fault.message}],
            }
        ]
    return []


def error(fault: Fault) -> Reply:
    return error_reply(fault_row(fault.kind).status, error_body(fault), fault)


# ── write ────────────────────────────────────────────────────────────

NOTHING: Json = {"text": ""}


def finish_reason(call: ModelCallInfo, answer: Answer) -> str:
    """The finish reason. This API has no reason of its own for calls or stop strings."""
    return "MAX_TOKENS" if call.cut(answer) else "STOP"


def usage_json(usage: Usage) -> Json:
    """The usage. `candidatesTokenCount` excludes thoughts and `promptTokenCount` includes cached tokens, as
    in this API.
    """
    return {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens - usage.thinking_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
        "thoughtsTokenCount": usage.thinking_tokens,
        "cachedContentTokenCount": usage.cached_tokens,
    }


def arguments_json(arguments: str) -> Json:
    """The arguments of a call. The sampled text is inserted into the body verbatim and unparsed, so that no
    number is rounded and no nesting is too deep.

    This API's clients accept only objects. Any other text is put under `input`. The harness's own check of
    its tool's arguments then reports the error to the model.
    """
    text = arguments.strip() or "{}"
    try:
        value = parse_strict_json(text)
    except (ValueError, RecursionError):
        return {"input": arguments}
    fragment = cast(Json, orjson.Fragment(text))
    return fragment if isinstance(value, dict) else {"input": fragment}


def part_json(part: Part, signature: str) -> Json:
    """One part. Thoughts and calls are signed, so that their echo can be verified."""
    match part:
        case TextPart(text):
            return {"text": text}
        case ThinkingPart(text):
            return {"text": text, "thought": True, "thoughtSignature": signature}
        case ToolCall():
            called: Json = {"id": part.id, "name": part.name, "args": arguments_json(part.arguments)}
            return {"functionCall": called, "thoughtSignature": signature}
        case _:
            assert_never(part)


def logprobs_json(tokens: Sequence[TokenLogprob]) -> dict[str, Json]:
    """`logprobsResult`. A token that is part of a character is shown as U+FFFD, because this API has no field
    for bytes.
    """
    chosen: list[Json] = [_token_json(token.data, token.logprob) for token in tokens]
    top: list[Json] = [
        {"candidates": [_token_json(other.data, other.logprob) for other in token.top]} for token in tokens
    ]
    return {"logprobsResult": {"topCandidates": top, "chosenCandidates": chosen}}


def _token_json(data: bytes, logprob: float) -> Json:
    return {"token": data.decode(errors="replace"), "logProbability": logprob}


def candidate_json(
    parts: list[Json], index: int, *, logprobs: Sequence[TokenLogprob] = (), finish: str | None = None
) -> Json:
    candidate: dict[str, Json] = {"content": {"parts": parts or [NOTHING], "role": "model"}, "index": index}
    if finish is not None:
        candidate["finishReason"] = finish
    return candidate | logprobs_json(logprobs) if logprobs else candidate


def whole(call: ModelCallInfo, answers: Sequence[Answer], usage: Usage) -> bytes:
    """A GenerateContentResponse."""
    candidates: list[Json] = [
        candidate_json(
            [
                part_json(part, call.signature)
                for part in answer.parts
                if shows_thinking(call) or not isinstance(part, ThinkingPart)
            ],
            index,
            logprobs=answer.logprobs,
            finish=finish_reason(call, answer),
        )
        for index, answer in enumerate(answers)
    ]
    return dump_json({"candidates": candidates, "usageMetadata": usage_json(usage)} | _tail(call))


def shows_thinking(call: ModelCallInfo) -> bool:
    return call.request.extras.get("thoughts") is True


def _tail(call: ModelCallInfo) -> dict[str, Json]:
    return {"modelVersion": call.model, "responseId": call.id, "createTime": _timestamp(call.created)}


def _timestamp(created: int) -> str:
    return datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@define(eq=False)
class ContentStream:
    """One answer as chunks, each a GenerateContentResponse. The first and the last contain the counts."""

    call: ModelCallInfo
    sse: bool
    started: bool = False
    opened: bool = False  # whether the array's opening bracket was sent
    tail: dict[str, Json] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.tail = _tail(self.call)

    @property
    def content_type(self) -> str:
        return STREAM_TYPE if self.sse else JSON_TYPE

    def start(self, *, prompt_tokens: int, cached_tokens: int) -> bytes:
        if self.started:
            return b""
        self.started = True
        counts: Json = {
            "promptTokenCount": prompt_tokens,
            "totalTokenCount": prompt_tokens,
            "cachedContentTokenCount": cached_tokens,
        }
        return self._chunk([candidate_json([], 0)], counts)

    def delta(self, delta: Delta, *, choice: int = 0) -> bytes:
        match delta:
            case TextDelta(text, logprobs):
                parts: list[Json] = [{"text": text}]
                return (
                    self._begun() + self._chunk([candidate_json(parts, choice, logprobs=logprobs)])
                    if text or logprobs
                    else b""
                )
            case ThinkingDelta(text):
                return (
                    self._begun() + self._part(ThinkingPart(text), choice)
                    if text and shows_thinking(self.call)
                    else b""
                )
            case ToolCall():
                return self._begun() + self._part(delta, choice)
            case _:
                assert_never(delta)

    def keep_alive(self) -> bytes:
        """An empty chunk. In an array it is white space between the elements, which no client reads as an
        element.
        """
        return self._chunk([candidate_json([], 0)]) if self.sse else b"\r\n"

    def end(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        begun = self.start(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)
        last: list[Json] = [
            candidate_json([], index, finish=finish_reason(self.call, answer))
            for index, answer in enumerate(answers)
        ]
        return begun + self._chunk(last, usage_json(usage)) + (b"" if self.sse else b"\r\n]")

    def failed(self, fault: Fault) -> bytes | FinalBytes | None:
        """An error in the form that Google itself uses in a stream: bare JSON, not an event, and then the
        end.

        Google's SDKs raise it, and Gemini CLI (0.61, tested) repeats the request, whatever it has shown. The
        SDKs would read an event as a chunk without text. A broken connection ends Gemini CLI with exit code
        1, with or without an error before it, because Node drops what is not yet read. After a proper end
        without an error, Gemini CLI repeats the request only if the answer had calls; a text then counts as
        the whole answer. In an array the error is an element, and then the connection breaks.
        """
        body = error_body(fault)
        return FinalBytes(dump_json(body) + b"\n") if self.sse else self._write_element(body)

    def _begun(self) -> bytes:
        # This is empty if `start` was called, as usual.
        return self.start(prompt_tokens=0, cached_tokens=0)

    def _part(self, part: Part, choice: int) -> bytes:
        return self._chunk([candidate_json([part_json(part, self.call.signature)], choice)])

    def _chunk(self, candidates: list[Json], usage: Json = None) -> bytes:
        body: dict[str, Json] = {"candidates": candidates}
        if usage is not None:
            body["usageMetadata"] = usage
        return self._write_element(body | self.tail)

    def _write_element(self, body: Json) -> bytes:
        if self.sse:
            return event(body)
        opening, self.opened = (b",\r\n" if self.opened else b"["), True
        return opening + dump_json(body)
