"""Responses: what a fault is called, in a reply and inside a stream, as OpenAI's SDKs, Codex and the others on this API understand it.

Whoever changes a row should know what Codex does: 429 is tried again only with `retry-after`, 5xx thirty times in 25 s, 400 ends the run at
once. In a stream `response.failed` ends it for some codes and starts it again for others, while a broken connection always starts it again.
"""

from typing import assert_never

from attrs import frozen

from polarnode.conversation import Json
from polarnode.providers.contract import Fault, FaultKind, Reply, error_reply


@frozen
class Row:
    """One row of the table: HTTP status, `error.type`, `error.code`; `fatal`, the code in a stream for what nobody should try again."""

    status: int
    type: str
    code: str | None
    fatal: str | None = None


def row(kind: FaultKind) -> Row:
    """The table. `invalid_prompt` is the one code of this API's streams that is fatal to Codex and says nothing of accounts or quotas."""
    match kind:
        case "bad_request":
            return Row(400, "invalid_request_error", None, "invalid_prompt")
        case "unauthorized":
            return Row(401, "invalid_request_error", "invalid_api_key", "invalid_prompt")
        case "not_found":
            return Row(404, "invalid_request_error", "unknown_url", "invalid_prompt")
        case "method_not_allowed":
            return Row(405, "invalid_request_error", "method_not_supported", "invalid_prompt")
        case "session_over":
            return Row(410, "invalid_request_error", "session_over", "invalid_prompt")
        case "context_too_long":
            return Row(400, "invalid_request_error", "context_length_exceeded", "context_length_exceeded")
        case "budget_spent":
            return Row(400, "invalid_request_error", "session_budget_spent", "invalid_prompt")
        case "overloaded":
            return Row(429, "rate_limit_error", "rate_limit_exceeded")
        case "engine_failed":
            return Row(500, "server_error", None)
        case "cancelled":
            return Row(503, "server_error", "cancelled")
        case "too_large":
            return Row(413, "invalid_request_error", "request_too_large", "invalid_prompt")
        case _:
            assert_never(kind)


def message(fault: Fault) -> str:
    """The fault's own sentence, but for a long context: harnesses look for these very words before they compact."""
    if fault.kind != "context_too_long" or fault.limit is None or fault.prompt_tokens is None:
        return fault.message
    return (
        f"Your input exceeds the context window of this model: this model's maximum context length is {fault.limit} tokens. However, your "
        f"messages resulted in {fault.prompt_tokens} tokens. Please reduce the length of the messages."
    )


def error(fault: Fault) -> Reply:
    """The whole reply. `param` is the field's path without its `$.`, as OpenAI writes it."""
    found = row(fault.kind)
    param = "input" if fault.kind == "context_too_long" else fault.path and fault.path.removeprefix("$.")
    body: Json = {"error": {"message": message(fault), "type": found.type, "param": param, "code": found.code}}
    return error_reply(found.status, body, fault)


def in_stream(fault: Fault) -> Json:
    """The `error` of a `response.failed`; None for what a client should try again: to that end its connection is broken without a word."""
    code = row(fault.kind).fatal
    return None if code is None else {"code": code, "message": message(fault)}
