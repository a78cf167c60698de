"""What OpenAI's two APIs share: errors, the list of models, and tools that take plain text.

Harnesses act on the status of an error: they retry 429 and 5xx, stop on other 4xx, and compact on one code.
Codex retries 429 only with `retry-after`, retries 5xx thirty times in 25 s, and ends its run on 400.

A tool that takes plain text (`custom`, called freeform here) is shown to the model as a function of one
string, `input`. The text is wrapped and unwrapped only here, so that a call comes back as it was made. A
grammar is shown to the model but not enforced; its reader leaves a note.
"""

from collections.abc import Mapping
from typing import Final, assert_never

import orjson

from polarnode.core.codec.json import dump_json
from polarnode.core.conversation import Json, Tool
from polarnode.providers.contract import Fault, FaultKind, FaultRow, Reply, ServedModel, error_reply
from polarnode.providers.shapes import compact, parse_strict_json

# ── errors and models ────────────────────────────────────────────────────────────


def fault_row(kind: FaultKind) -> FaultRow:
    """Status, `error.type` and `error.code`. A failed engine is 500, not 503, and overload is 429, because
    every harness measured retries on those.
    """
    match kind:
        case "bad_request":
            return FaultRow(400, "invalid_request_error", None)
        case "unauthorized":
            return FaultRow(401, "invalid_request_error", "invalid_api_key")
        case "not_found":
            return FaultRow(404, "invalid_request_error", "unknown_url")
        case "method_not_allowed":
            return FaultRow(405, "invalid_request_error", "method_not_supported")
        case "session_over":
            return FaultRow(410, "invalid_request_error", "session_over")
        case "context_too_long":
            return FaultRow(400, "invalid_request_error", "context_length_exceeded")
        case "budget_spent":  # A plain 400, without a code on which harnesses act, makes them stop for good.
            return FaultRow(400, "invalid_request_error", "session_budget_spent")
        case "overloaded":
            return FaultRow(429, "rate_limit_error", "rate_limit_exceeded")
        case "engine_failed":
            return FaultRow(500, "server_error", None)
        case "cancelled":
            return FaultRow(503, "server_error", "cancelled")
        case "too_large":
            return FaultRow(413, "invalid_request_error", "request_too_large")
        case _:
            assert_never(kind)


def message(fault: Fault) -> str:
    """The fault's message. For a context that is too long it has OpenAI's words, which harnesses look for
    before they compact.
    """
    if fault.kind != "context_too_long" or fault.limit is None or fault.prompt_tokens is None:
        return fault.message
    return (
        f"This model's maximum context length is {fault.limit} tokens. However, your messages resulted in"
        f" {fault.prompt_tokens} tokens. Please reduce the length of the messages: your input exceeds the"
        " context window of this model."
    )


def error(fault: Fault, *, conversation: str) -> Reply:
    """The whole reply. `param` is the field's path without its `$.`, as OpenAI writes it; `conversation`
    names the field that may be too long.
    """
    body = error_body(fault, conversation=conversation)
    return error_reply(fault_row(fault.kind).status, body, fault)


def error_body(fault: Fault, *, conversation: str | None = None) -> Json:
    """The error object, the same in a reply and in a stream's last chunk."""
    found = fault_row(fault.kind)
    param = conversation if fault.kind == "context_too_long" else fault.path and fault.path.removeprefix("$.")
    return {"error": {"message": message(fault), "type": found.type, "param": param, "code": found.code}}


def models(served: ServedModel) -> bytes:
    """The list of models, which has one entry."""
    return dump_json({"object": "list", "data": [_entry(served, served.id)]})


def model(served: ServedModel, *, name: str) -> bytes:
    """The model under the requested name."""
    return dump_json(_entry(served, name))


def _entry(served: ServedModel, name: str) -> Json:
    """A model. Its context length has both names in use: `max_model_len` (vLLM, SGLang), and the one that
    OpenRouter's clients read.
    """
    length = served.context_length
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "polarnode",
        "max_model_len": length,
        "context_length": length,
    }


# ── freeform ────────────────────────────────────────────────────────────

# A tool's `spelling` with this value marks the tool as freeform for the writer.
CUSTOM_SPELLING: Final[Mapping[str, Json]] = {"kind": "custom"}

_INPUT_SCHEMA: Final[Json] = {
    "type": "string",
    "description": "The whole input, as it is, without any wrapping.",
}
_FREEFORM_PARAMETERS: Final[Mapping[str, Json]] = {
    "type": "object",
    "properties": {"input": _INPUT_SCHEMA},
    "required": ["input"],
}


def tool(name: str, description: str | None, rule: str) -> Tool:
    """A freeform tool as the model is shown it. `rule` is its grammar as text, made by `grammar_text`,
    or empty.
    """
    return Tool(
        name=name,
        description="\n\n".join(filter(None, (description, rule))),
        parameters=_FREEFORM_PARAMETERS,
        spelling=CUSTOM_SPELLING,
    )


def grammar_text(definition: str, syntax: str) -> str:
    """A grammar as text for the model."""
    return f"The input must follow this {syntax} grammar:\n{definition}"


def arguments_of(text: str) -> str:
    """The text of a freeform call as the arguments of its function."""
    return compact({"input": text})


def text_of(arguments: str) -> str:
    """The text of a freeform call. Arguments that are not an object with an `input` are returned
    unchanged.
    """
    value = parse_arguments(arguments)
    text = None if value is None else value.get("input")
    return text if isinstance(text, str) else arguments


def parse_arguments(arguments: str) -> dict[str, Json] | None:
    """A call's arguments, parsed. None if they are not an object, or hold what cannot be written again (half
    a surrogate pair, an integer of 65 bits).
    """
    try:
        value = parse_strict_json(arguments or "{}")
        orjson.dumps(value)
    except (ValueError, RecursionError, orjson.JSONEncodeError):
        return None
    return value if isinstance(value, dict) else None
