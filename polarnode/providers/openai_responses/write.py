"""Responses: an answer, whole or as events.

The rules: every event has an `event:` line and a `sequence_number`, counted from 0; `response.created` is the very first, because OpenAI's
SDK reads nothing before it; an item is closed by `response.output_item.done`, at which Codex executes a call without waiting for the end.
"""

from collections.abc import Sequence
from typing import assert_never

from attrs import define, field

from polarnode.conversation import Answer, Delta, Json, TextDelta, ThinkingDelta, TokenLogprob, ToolCall, Usage
from polarnode.providers.contract import STREAM_TYPE, Call, Fault
from polarnode.providers.openai_responses import errors
from polarnode.providers.openai_responses.history import item_id, response_id
from polarnode.providers.openai_responses.output import (
    call_json,
    compaction_json,
    logprobs_json,
    message_json,
    output_json,
    reasoning_json,
    response_json,
    status,
    usage_json,
)
from polarnode.providers.openai_responses.shapes import Object
from polarnode.providers.sse import event
from polarnode.wire import dump_json


def whole(call: Call, answer: Answer, usage: Usage) -> bytes:
    """A `response` body; a `response.compaction` where a conversation was to be compacted."""
    told = call.request.extras.get("told")
    if isinstance(told, list):
        return dump_json(_compacted(call, told, answer, usage))
    return dump_json(response_json(call, status=status(call, answer), output=output_json(call, answer), usage=usage))


def _compacted(call: Call, told: list[Json], answer: Answer, usage: Usage) -> Json:
    """What stands for the conversation from now on: every message of the user, as it was, and the summary."""
    kept = [_user(call, item, index) for index, item in enumerate(told) if isinstance(item, dict)]
    head: Object = {"id": response_id(call.id), "object": "response.compaction", "created_at": call.created}
    return head | {"output": [*kept, compaction_json(call, answer)], "usage": usage_json(usage)}


def _user(call: Call, item: Object, index: int) -> Json:
    content = item.get("content")
    parts: Json = [{"type": "input_text", "text": content}] if isinstance(content, str) else content or []
    return {"id": item_id("msg", call.id, index), "type": "message", "status": "completed", "role": "user", "content": parts}


@define(eq=False)
class _Open:
    """The item that deltas go into."""

    kind: type[TextDelta | ThinkingDelta]
    index: int
    text: str = ""
    logprobs: list[TokenLogprob] = field(factory=list)


@define(eq=False)
class ResponseStream:
    """One answer as events. Items are numbered as they open; at most one is open, and a delta of another kind closes it."""

    call: Call
    content_type: str = STREAM_TYPE
    created: bool = False
    sequence: int = 0
    open: _Open | None = None
    items: list[Json] = field(factory=list)

    def start(self, *, prompt_tokens: int, cached_tokens: int) -> bytes:
        return self._opening()

    def delta(self, delta: Delta, *, choice: int = 0) -> bytes:
        if self.call.request.extras.get("compacts"):
            return b""  # a compaction is one item, sealed when the summary is whole
        match delta:
            case TextDelta(text, logprobs):
                return self._text(text, logprobs) if text else b""
            case ThinkingDelta(text):
                return self._thought(text) if text else b""
            case ToolCall():
                return self._opening() + self._close() + self._called(delta)
            case _:
                assert_never(delta)

    def keep_alive(self) -> bytes:
        """`response.in_progress`: Codex counts events as life, and no comments."""
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

    def failed(self, fault: Fault) -> bytes | None:
        """Break the connection for what can be tried again: Codex, Pi and all others then ask the same again, while Pi ends its run on any
        error event. What can not (the session is over, the context too long) is said by `response.failed`, on which they stop or compact."""
        error = errors.in_stream(fault)
        if error is None:
            return None
        response = response_json(self.call, status="failed", output=self.items, error=error)
        return self._opening() + self._event("response.failed", response=response)

    # ── text and thinking ─────────────────────────────────────────────────────

    def _text(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        begun = self._within(TextDelta)
        item = self._current
        item.text += text
        item.logprobs += logprobs
        said = logprobs_json(logprobs)
        return begun + self._of_item("response.output_text.delta", "msg", item.index, content_index=0, delta=text, logprobs=said)

    def _thought(self, text: str) -> bytes:
        begun = self._within(ThinkingDelta)
        self._current.text += text
        return begun + self._of_item("response.reasoning_summary_text.delta", "rs", self._current.index, summary_index=0, delta=text)

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
            said = logprobs_json(item.logprobs)
            return (
                self._of_item("response.output_text.done", "msg", item.index, content_index=0, text=item.text, logprobs=said)
                + self._part("response.content_part.done", item.index, item.text, said)
                + self._done(message_json(self.call, item.text, item.index, logprobs=said, ended=ended))
            )
        return (
            self._of_item("response.reasoning_summary_text.done", "rs", item.index, summary_index=0, text=item.text)
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
        return self._of_item(kind, "msg", index, content_index=0, part=part)

    def _summary(self, kind: str, index: int, text: str) -> bytes:
        return self._of_item(kind, "rs", index, summary_index=0, part={"type": "summary_text", "text": text})

    # ── calls ─────────────────────────────────────────────────────────────────

    def _called(self, made: ToolCall) -> bytes:
        """A call in one piece: shown empty, its input in one delta where its kind has such events, and done."""
        item = call_json(self.call, made, len(self.items))
        started = item | {"status": "in_progress"}
        match item["type"]:
            case "function_call":
                begun = self._added(started | {"arguments": ""})
                said = self._said("response.function_call_arguments", item, "arguments", {"name": item["name"]})
            case "custom_tool_call":
                begun = self._added(started | {"input": ""})
                said = self._said("response.custom_tool_call_input", item, "input", {})
            case _:
                begun, said = self._added(started), b""
        return begun + said + self._done(item)

    def _said(self, kind: str, item: Object, name: str, more: Object) -> bytes:
        place: Object = {"item_id": item["id"], "output_index": len(self.items)}
        return self._event(f"{kind}.delta", **place, delta=item[name]) + self._event(f"{kind}.done", **place | more | {name: item[name]})

    # ── events ────────────────────────────────────────────────────────────────

    def _opening(self) -> bytes:
        if self.created:
            return b""
        self.created = True
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event("response.in_progress", response=response)

    def _response(self, status: str) -> Json:
        return response_json(self.call, status=status, output=self.items)

    def _added(self, item: Json) -> bytes:
        return self._event("response.output_item.added", output_index=len(self.items), item=item)

    def _done(self, item: Json) -> bytes:
        index = len(self.items)
        self.items.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)

    def _of_item(self, kind: str, prefix: str, index: int, **fields: Json) -> bytes:
        return self._event(kind, item_id=item_id(prefix, self.call.id, index, self.call.signature), output_index=index, **fields)

    def _event(self, kind: str, **fields: Json) -> bytes:
        number, self.sequence = self.sequence, self.sequence + 1
        return event({"type": kind, **fields, "sequence_number": number}, name=kind)
