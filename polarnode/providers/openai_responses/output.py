"""Responses: the parts of an answer as this API's items, and the object they are put into.

The rules: an item's id is the answer's id and its place, so that it is the same in a stream and whole; `call_id` is the id the house minted
and signed; a call is spelled as its tool wants it, and as a plain `function_call` where what the model wrote does not fit that spelling, so
that the harness's own check of its tool's input tells the model.
"""

from collections.abc import Mapping, Sequence
from typing import Final, assert_never, cast

import orjson

from polarnode.conversation import Answer, Json, Part, TextPart, ThinkingPart, TokenLogprob, ToolCall, Usage
from polarnode.providers import freeform
from polarnode.providers.contract import Call
from polarnode.providers.openai_responses.history import item_id, response_id
from polarnode.providers.openai_responses.sealed import Sealed, seal
from polarnode.providers.openai_responses.shapes import Object

_LEAST_LOGPROB: Final = -9999.0  # OpenAI's own word for "never", as JSON has none for minus infinity


def usage_json(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def response_json(call: Call, *, status: str, output: Sequence[Json], usage: Usage | None = None, error: Json = None) -> Object:
    """The `response` object."""
    head: Object = {
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
    return head | cast(Object, call.request.extras.get("echo") or {})


def status(call: Call, answer: Answer) -> str:
    """How it ended. An answer with calls is complete, whatever cut it, because its client has work to do and Codex ends its run on an
    incomplete one; so is a compaction, whose one item is whole. A sample cut by an abort is called what a limit makes of it: both say that
    more was to come, and this API knows no other word."""
    whole = bool(answer.calls) or bool(call.request.extras.get("compacts"))
    return "incomplete" if not whole and answer.finish_reason in ("length", "abort", "error") else "completed"


# ── items ─────────────────────────────────────────────────────────────────────


def output_json(call: Call, answer: Answer) -> list[Json]:
    """All items of an answer."""
    if call.request.extras.get("compacts"):
        return [compaction_json(call, answer)]
    parts = [part for part in answer.parts if isinstance(part, ToolCall) or part.text]
    logprobs = _shared_out(parts, answer.logprobs)
    ended = status(call, answer)
    return [_item(call, part, index, logprobs[index], ended if index == len(parts) - 1 else "completed") for index, part in enumerate(parts)]


def _item(call: Call, part: Part, index: int, logprobs: Sequence[TokenLogprob], ended: str) -> Json:
    match part:
        case TextPart(text):
            return message_json(call, text, index, logprobs=logprobs_json(logprobs), ended=ended)
        case ThinkingPart(text):
            return reasoning_json(call, text, index)
        case ToolCall():
            return call_json(call, part, index)
        case _:
            assert_never(part)


def message_json(call: Call, text: str, index: int, *, logprobs: Sequence[Json], ended: str) -> Object:
    part: Json = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {"id": item_id("msg", call.id, index, call.signature), "type": "message", "status": ended, "role": "assistant", "content": [part]}


def reasoning_json(call: Call, text: str, index: int) -> Object:
    """Thinking, as a summary (Codex shows it and hands it back), and sealed for who asked for that. What is sealed always carries our
    signature, which tells answers with the same words apart when they come back."""
    sealed = seal(Sealed(signature=call.signature, thinking=text if call.request.extras.get("seals") else ""))
    summary: list[Json] = [{"type": "summary_text", "text": text}]
    return {"id": item_id("rs", call.id, index, call.signature), "type": "reasoning", "summary": summary, "encrypted_content": sealed}


def compaction_json(call: Call, answer: Answer) -> Object:
    """The one item of a compaction."""
    sealed = seal(Sealed(signature=call.signature, summary=answer.text))
    return {"id": item_id("cmp", call.id, 0, call.signature), "type": "compaction", "encrypted_content": sealed}


# ── calls ─────────────────────────────────────────────────────────────────────


def call_json(call: Call, made: ToolCall, index: int) -> Object:
    """A tool call as its tool's kind spells it."""
    spelling = _spelling(call, made.name)
    head: Object = {"status": "completed", "call_id": made.id}
    name: Object = {"name": spelling.get("name", made.name)} | ({"namespace": spelling["namespace"]} if "namespace" in spelling else {})
    match spelling.get("kind"):
        case "custom":
            return (
                {"id": item_id("ctc", call.id, index, call.signature), "type": "custom_tool_call"}
                | head
                | name
                | {"input": freeform.text_of(made.arguments)}
            )
        case "local_shell" | "shell" | "apply_patch" | "tool_search" as kind:
            known = _by_kind(kind, made.arguments)
            if known is not None:
                prefix = {"local_shell": "lsh", "shell": "sh", "apply_patch": "apc", "tool_search": "tsc"}[kind]
                return {"id": item_id(prefix, call.id, index, call.signature), "type": f"{kind}_call"} | head | known
    return {"id": item_id("fc", call.id, index, call.signature), "type": "function_call"} | head | name | {"arguments": made.arguments or "{}"}


def _spelling(call: Call, name: str) -> Mapping[str, Json]:
    found = next((tool.spelling for tool in call.request.conversation.tools if tool.name == name), None)
    if found is not None:
        return found
    later = call.request.extras.get("later")
    spelling = later.get(name) if isinstance(later, dict) else None
    return spelling if isinstance(spelling, dict) else {}


def _by_kind(kind: str, arguments: str) -> Object | None:
    """What stands in a call of this kind; None where the arguments can not be put into it."""
    said = freeform.object_of(arguments)
    if said is None:
        return None
    if kind == "tool_search":
        # The very text that was sampled, set into the item unread, so that no number is rounded.
        return {"execution": "client", "arguments": cast(Json, orjson.Fragment(arguments or "{}"))}
    if kind == "local_shell":
        action: Object = {"type": "exec", "env": {}}
        return {"action": action | said} if _strings(said.get("command")) and isinstance(said.get("env", {}), dict) else None
    if kind == "shell":
        return {"action": said} if _strings(said.get("commands")) else None
    return {"operation": said} if isinstance(said.get("type"), str) and isinstance(said.get("path"), str) else None


def _strings(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


# ── log-probabilities ─────────────────────────────────────────────────────────


def logprobs_json(logprobs: Sequence[TokenLogprob]) -> list[Json]:
    return [_token(each.data, each.logprob) | {"top_logprobs": [_token(other.data, other.logprob) for other in each.top]} for each in logprobs]


def _token(data: bytes, logprob: float) -> Object:
    return {"token": data.decode(errors="replace"), "bytes": list(data), "logprob": max(logprob, _LEAST_LOGPROB)}


def _shared_out(parts: Sequence[Part], logprobs: Sequence[TokenLogprob]) -> list[Sequence[TokenLogprob]]:
    """Each text's own tokens, by the bytes they spell; the last text has what is left over (tokens of a stop string)."""
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
