"""Responses: answers, whole or as events, their items, and errors inside a stream.

An item's id is made from the answer's id and the item's place, and is the same in a stream and in a whole
answer. `call_id` is the id that was made and signed. A call has the format of its tool. If the model's
arguments do not fit that format, it is a plain `function_call`, so that the harness's own check reports the
error to the model.

Every event has an `event:` line and a `sequence_number`, counted from 0. `response.created` is the very
first, because OpenAI's SDK reads nothing before it. An item is closed by `response.output_item.done`, at
which Codex executes a call without waiting for the end. `response.failed` ends Codex's run for some codes and
restarts it for others; a broken connection always restarts it.
"""

from collections.abc import Mapping, Sequence
from typing import Final, assert_never, cast

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
from polarnode.providers import openai
from polarnode.providers.contract import (
    RETRYABLE_FAULTS,
    STREAM_TYPE,
    Fault,
    FinalBytes,
    ModelCallInfo,
    event,
)
from polarnode.providers.openai_responses.history import SealedContent, item_id, response_id, seal
from polarnode.providers.openai_responses.shapes import JsonObject

# ── errors ────────────────────────────────────────────────────────────


def stream_error(fault: Fault) -> Json:
    """The `error` of a `response.failed`. None for a fault after which a client should retry: its connection
    is broken without an event.

    `invalid_prompt` is the one code in this API's streams that is fatal to Codex and does not concern
    accounts or quotas.
    """
    if fault.kind in RETRYABLE_FAULTS:
        return None
    code = "context_length_exceeded" if fault.kind == "context_too_long" else "invalid_prompt"
    return {"code": code, "message": openai.message(fault)}


# ── output ────────────────────────────────────────────────────────────

_MIN_LOGPROB: Final = -9999.0  # OpenAI's value for minus infinity, which JSON does not have


def usage_json(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def response_json(
    call: ModelCallInfo,
    *,
    status: str,
    output: Sequence[Json],
    usage: Usage | None = None,
    error: Json = None,
) -> JsonObject:
    """The `response` object."""
    head: JsonObject = {
        "id": response_id(call.id),
        "object": "response",
        "created_at": call.created,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": call.model,
        "output": list(output),
        "usage": None if usage is None else usage_json(usage),
    }
    return head | cast(JsonObject, call.request.extras.get("echo") or {})


def status(call: ModelCallInfo, answer: Answer) -> str:
    """The status. A compaction is complete, because its single item is whole. A sample that an abort cut is
    reported like one that a limit cut, because both mean that the answer is incomplete, and this API has no
    other reason.
    """
    compacts = bool(call.request.extras.get("compacts"))
    return "incomplete" if call.cut(answer) and not compacts else "completed"


# ── items ─────────────────────────────────────────────────────────────────────


def output_json(call: ModelCallInfo, answer: Answer) -> list[Json]:
    """All items of an answer."""
    if call.request.extras.get("compacts"):
        return [compaction_json(call, answer)]
    parts = [part for part in answer.parts if isinstance(part, ToolCall) or part.text]
    logprobs = _divide_logprobs(parts, answer.logprobs)
    ended = status(call, answer)
    return [
        _item(call, part, index, logprobs[index], ended if index == len(parts) - 1 else "completed")
        for index, part in enumerate(parts)
    ]


def _item(call: ModelCallInfo, part: Part, index: int, logprobs: Sequence[TokenLogprob], ended: str) -> Json:
    match part:
        case TextPart(text):
            return message_json(call, text, index, logprobs=logprobs_json(logprobs), ended=ended)
        case ThinkingPart(text):
            return reasoning_json(call, text, index)
        case ToolCall():
            return call_json(call, part, index)
        case _:
            assert_never(part)


def message_json(
    call: ModelCallInfo, text: str, index: int, *, logprobs: Sequence[Json], ended: str
) -> JsonObject:
    part: Json = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {
        "id": item_id("msg", call.id, index, call.signature),
        "type": "message",
        "status": ended,
        "role": "assistant",
        "content": [part],
    }


def reasoning_json(call: ModelCallInfo, text: str, index: int) -> JsonObject:
    """Thinking, as a summary (Codex shows and echoes it), and also sealed if the client asked for that. A
    sealed item always contains this node's signature, which distinguishes echoed answers with the same text.
    """
    sealed = seal(
        SealedContent(signature=call.signature, thinking=text if call.request.extras.get("seals") else "")
    )
    summary: list[Json] = [{"type": "summary_text", "text": text}]
    return {
        "id": item_id("rs", call.id, index, call.signature),
        "type": "reasoning",
        "summary": summary,
        "encrypted_content": sealed,
    }


def compaction_json(call: ModelCallInfo, answer: Answer) -> JsonObject:
    """The one item of a compaction."""
    sealed = seal(SealedContent(signature=call.signature, summary=answer.text))
    return {
        "id": item_id("cmp", call.id, 0, call.signature),
        "type": "compaction",
        "encrypted_content": sealed,
    }


# ── calls ─────────────────────────────────────────────────────────────────────


def call_json(call: ModelCallInfo, made: ToolCall, index: int) -> JsonObject:
    """A tool call in the format of its tool's kind."""
    spelling = _tool_spelling(call, made.name)
    head: JsonObject = {"status": "completed", "call_id": made.id}
    name: JsonObject = {"name": spelling.get("name", made.name)} | (
        {"namespace": spelling["namespace"]} if "namespace" in spelling else {}
    )
    match spelling.get("kind"):
        case "custom":
            return (
                {"id": item_id("ctc", call.id, index, call.signature), "type": "custom_tool_call"}
                | head
                | name
                | {"input": openai.text_of(made.arguments)}
            )
        case "local_shell" | "shell" | "apply_patch" | "tool_search" as kind:
            of_kind = _kind_fields(kind, made.arguments)
            if of_kind is not None:
                prefix = {"local_shell": "lsh", "shell": "sh", "apply_patch": "apc", "tool_search": "tsc"}[
                    kind
                ]
                return (
                    {"id": item_id(prefix, call.id, index, call.signature), "type": f"{kind}_call"}
                    | head
                    | of_kind
                )
    return (
        {"id": item_id("fc", call.id, index, call.signature), "type": "function_call"}
        | head
        | name
        | {"arguments": made.arguments or "{}"}
    )


def _tool_spelling(call: ModelCallInfo, name: str) -> Mapping[str, Json]:
    found = next((tool.spelling for tool in call.request.conversation.tools if tool.name == name), None)
    if found is not None:
        return found
    later = call.request.extras.get("later")
    spelling = later.get(name) if isinstance(later, dict) else None
    return spelling if isinstance(spelling, dict) else {}


def _kind_fields(kind: str, arguments: str) -> JsonObject | None:
    """The fields of a call of this kind. None if the arguments do not fit them."""
    value = openai.parse_arguments(arguments)
    if value is None:
        return None
    if kind == "tool_search":
        # The sampled text is inserted verbatim and unparsed, so that no number is rounded.
        return {"execution": "client", "arguments": cast(Json, orjson.Fragment(arguments or "{}"))}
    if kind == "local_shell":
        action: JsonObject = {"type": "exec", "env": {}}
        return (
            {"action": action | value}
            if _strings(value.get("command")) and isinstance(value.get("env", {}), dict)
            else None
        )
    if kind == "shell":
        return {"action": value} if _strings(value.get("commands")) else None
    return (
        {"operation": value}
        if isinstance(value.get("type"), str) and isinstance(value.get("path"), str)
        else None
    )


def _strings(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


# ── log-probabilities ─────────────────────────────────────────────────────────


def logprobs_json(logprobs: Sequence[TokenLogprob]) -> list[Json]:
    return [
        _token_json(each.data, each.logprob)
        | {"top_logprobs": [_token_json(other.data, other.logprob) for other in each.top]}
        for each in logprobs
    ]


def _token_json(data: bytes, logprob: float) -> JsonObject:
    return {
        "token": data.decode(errors="replace"),
        "bytes": list(data),
        "logprob": max(logprob, _MIN_LOGPROB),
    }


def _divide_logprobs(parts: Sequence[Part], logprobs: Sequence[TokenLogprob]) -> list[Sequence[TokenLogprob]]:
    """Divide the tokens among the texts that they wrote, by the bytes to which they decode. The last text
    also gets the rest (the tokens of a stop string).
    """
    found: list[Sequence[TokenLogprob]] = [()] * len(parts)
    texts = [index for index, part in enumerate(parts) if isinstance(part, TextPart)]
    begun = 0
    for index in texts:
        part = parts[index]
        room = len(part.text.encode()) if isinstance(part, TextPart) and index != texts[-1] else None
        end = begun
        while end < len(logprobs) and (room is None or room > 0):
            room = None if room is None else room - len(logprobs[end].data)
            end += 1
        found[index] = logprobs[begun:end]
        begun = end
    return found


# ── write ────────────────────────────────────────────────────────────


def whole(call: ModelCallInfo, answer: Answer, usage: Usage) -> bytes:
    """A `response` body, or a `response.compaction` if the conversation was compacted."""
    sent = call.request.extras.get("sent")
    if isinstance(sent, list):
        return dump_json(_compaction_body(call, sent, answer, usage))
    return dump_json(
        response_json(call, status=status(call, answer), output=output_json(call, answer), usage=usage)
    )


def _compaction_body(call: ModelCallInfo, sent: list[Json], answer: Answer, usage: Usage) -> Json:
    """The items that replace the conversation: every message of the user, verbatim, and the summary."""
    kept = [_user(call, item, index) for index, item in enumerate(sent) if isinstance(item, dict)]
    head: JsonObject = {
        "id": response_id(call.id),
        "object": "response.compaction",
        "created_at": call.created,
    }
    return head | {"output": [*kept, compaction_json(call, answer)], "usage": usage_json(usage)}


def _user(call: ModelCallInfo, item: JsonObject, index: int) -> Json:
    content = item.get("content")
    parts: Json = [{"type": "input_text", "text": content}] if isinstance(content, str) else content or []
    return {
        "id": item_id("msg", call.id, index),
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": parts,
    }


@define(eq=False)
class _Open:
    """The item to which deltas are now added."""

    kind: type[TextDelta | ThinkingDelta]
    index: int
    text: str = ""
    logprobs: list[TokenLogprob] = field(factory=list)


@define(eq=False)
class ResponseStream:
    """One answer as events. Items are numbered as they open. At most one is open, and a delta of another kind
    closes it.
    """

    call: ModelCallInfo
    content_type: str = STREAM_TYPE
    created: bool = False
    sequence: int = 0
    open: _Open | None = None
    items: list[Json] = field(factory=list)

    def start(self, *, prompt_tokens: int, cached_tokens: int) -> bytes:
        return self._opening()

    def delta(self, delta: Delta, *, choice: int = 0) -> bytes:
        if self.call.request.extras.get("compacts"):
            return b""  # A compaction is a single item, which is sealed when the summary is complete.
        match delta:
            case TextDelta(text, logprobs):
                return self._text(text, logprobs) if text else b""
            case ThinkingDelta(text):
                return self._thought(text) if text else b""
            case ToolCall():
                return self._opening() + self._close() + self._write_call(delta)
            case _:
                assert_never(delta)

    def keep_alive(self) -> bytes:
        """`response.in_progress`: Codex counts events as a sign of life, but not comments."""
        return self._opening() or self._event("response.in_progress", response=self._response("in_progress"))

    def end(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        (answer,) = answers
        ended = status(self.call, answer)
        last = self._opening() + self._close(ended)
        if self.call.request.extras.get("compacts"):
            item = compaction_json(self.call, answer)
            last += self._added(item | {"encrypted_content": ""}) + self._done(item)
        response = response_json(self.call, status=ended, output=self.items, usage=usage)
        return last + self._event(f"response.{ended}", response=response)

    def failed(self, fault: Fault) -> FinalBytes | None:
        """Break the connection for a fault that can be retried: Codex, Pi and all others then repeat the
        request, while Pi ends its run on any error event. Other faults (the session is over, the context is
        too long) are reported by `response.failed`, on which clients stop or compact. Codex does so at the
        end of the stream, and forgets that event if the connection breaks.
        """
        error = stream_error(fault)
        if error is None:
            return None
        response = response_json(self.call, status="failed", output=self.items, error=error)
        return FinalBytes(self._opening() + self._event("response.failed", response=response))

    # ── text and thinking ─────────────────────────────────────────────────────

    def _text(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        begun = self._within(TextDelta)
        item = self._current
        item.text += text
        item.logprobs += logprobs
        entries = logprobs_json(logprobs)
        return begun + self._item_event(
            "response.output_text.delta", "msg", item.index, content_index=0, delta=text, logprobs=entries
        )

    def _thought(self, text: str) -> bytes:
        begun = self._within(ThinkingDelta)
        self._current.text += text
        return begun + self._item_event(
            "response.reasoning_summary_text.delta", "rs", self._current.index, summary_index=0, delta=text
        )

    def _within(self, kind: type[TextDelta | ThinkingDelta]) -> bytes:
        if self.open is not None and self.open.kind is kind:
            return b""
        before = self._opening() + self._close()
        index = len(self.items)
        self.open = _Open(kind, index)
        if kind is TextDelta:
            item = message_json(self.call, "", index, logprobs=(), ended="in_progress") | {"content": []}
            return before + self._added(item) + self._part("response.content_part.added", index, "", [])
        item = reasoning_json(self.call, "", index) | {"summary": []}
        return before + self._added(item) + self._summary("response.reasoning_summary_part.added", index, "")

    def _close(self, ended: str = "completed") -> bytes:
        if self.open is None:
            return b""
        item, self.open = self.open, None
        if item.kind is TextDelta:
            entries = logprobs_json(item.logprobs)
            return (
                self._item_event(
                    "response.output_text.done",
                    "msg",
                    item.index,
                    content_index=0,
                    text=item.text,
                    logprobs=entries,
                )
                + self._part("response.content_part.done", item.index, item.text, entries)
                + self._done(message_json(self.call, item.text, item.index, logprobs=entries, ended=ended))
            )
        return (
            self._item_event(
                "response.reasoning_summary_text.done", "rs", item.index, summary_index=0, text=item.text
            )
            + self._summary("response.reasoning_summary_part.done", item.index, item.text)
            + self._done(reasoning_json(self.call, item.text, item.index))
        )

    @property
    def _current(self) -> _Open:
        if self.open is None:
            raise ValueError("a delta belongs to an open item")
        return self.open

    def _part(self, kind: str, index: int, text: str, logprobs: list[Json]) -> bytes:
        part: Json = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return self._item_event(kind, "msg", index, content_index=0, part=part)

    def _summary(self, kind: str, index: int, text: str) -> bytes:
        return self._item_event(
            kind, "rs", index, summary_index=0, part={"type": "summary_text", "text": text}
        )

    # ── calls ─────────────────────────────────────────────────────────────────

    def _write_call(self, made: ToolCall) -> bytes:
        """A whole call at once: the item is opened empty, its input follows as one delta if its kind has such
        events, and then it is done.
        """
        item = call_json(self.call, made, len(self.items))
        started = item | {"status": "in_progress"}
        match item["type"]:
            case "function_call":
                begun = self._added(started | {"arguments": ""})
                arguments = self._argument_events(
                    "response.function_call_arguments", item, "arguments", {"name": item["name"]}
                )
            case "custom_tool_call":
                begun = self._added(started | {"input": ""})
                arguments = self._argument_events("response.custom_tool_call_input", item, "input", {})
            case _:
                begun, arguments = self._added(started), b""
        return begun + arguments + self._done(item)

    def _argument_events(self, kind: str, item: JsonObject, name: str, more: JsonObject) -> bytes:
        place: JsonObject = {"item_id": item["id"], "output_index": len(self.items)}
        return self._event(f"{kind}.delta", **place, delta=item[name]) + self._event(
            f"{kind}.done", **place | more | {name: item[name]}
        )

    # ── events ────────────────────────────────────────────────────────────────

    def _opening(self) -> bytes:
        if self.created:
            return b""
        self.created = True
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _response(self, status: str) -> Json:
        return response_json(self.call, status=status, output=self.items)

    def _added(self, item: Json) -> bytes:
        return self._event("response.output_item.added", output_index=len(self.items), item=item)

    def _done(self, item: Json) -> bytes:
        index = len(self.items)
        self.items.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)

    def _item_event(self, kind: str, prefix: str, index: int, **fields: Json) -> bytes:
        return self._event(
            kind,
            item_id=item_id(prefix, self.call.id, index, self.call.signature),
            output_index=index,
            **fields,
        )

    def _event(self, kind: str, **fields: Json) -> bytes:
        number, self.sequence = self.sequence, self.sequence + 1
        return event({"type": kind, **fields, "sequence_number": number}, name=kind)
