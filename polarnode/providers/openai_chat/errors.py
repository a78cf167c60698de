"""Chat Completions: what a fault is called, as OpenAI's SDKs and the harnesses on them understand it.

Whoever changes a row should look up what the harnesses do on its status: they retry 429 and 5xx, stop on other 4xx, compact on one code.
"""

from typing import assert_never

from attrs import frozen

from polarnode.conversation import Json
from polarnode.providers.contract import Fault, FaultKind, Reply, error_reply


@frozen
class Row:
    """One row of the table: HTTP status, `error.type`, `error.code`."""

    status: int
    type: str
    code: str | None


def row(kind: FaultKind) -> Row:
    """The table. 500, not 503, for a failed engine, and 429 for overload: those were seen to be retried by every harness measured."""
    match kind:
        case "bad_request":
            return Row(400, "invalid_request_error", None)
        case "unauthorized":
            return Row(401, "invalid_request_error", "invalid_api_key")
        case "not_found":
            return Row(404, "invalid_request_error", "unknown_url")
        case "method_not_allowed":
            return Row(405, "invalid_request_error", "method_not_supported")
        case "session_over":
            return Row(410, "invalid_request_error", "session_over")
        case "context_too_long":
            return Row(400, "invalid_request_error", "context_length_exceeded")
        case "budget_spent":  # a plain 400 is what makes harnesses stop for good; no code they could act on
            return Row(400, "invalid_request_error", "session_budget_spent")
        case "overloaded":
            return Row(429, "rate_limit_error", "rate_limit_exceeded")
        case "engine_failed":
            return Row(500, "server_error", None)
        case "cancelled":
            return Row(503, "server_error", "cancelled")
        case "too_large":
            return Row(413, "invalid_request_error", "request_too_large")
        case _:
            assert_never(kind)


def message(fault: Fault) -> str:
    """The fault's own sentence, but for a long context: harnesses look for these very words before they compact."""
    if fault.kind != "context_too_long" or fault.limit is None or fault.prompt_tokens is None:
        return fault.message
    return (
        f"This model's maximum context length is {fault.limit} tokens. However, your messages resulted in {fault.prompt_tokens} tokens. "
        "Please reduce the length of the messages."
    )


def error(fault: Fault) -> Reply:
    """The whole reply. `param` is the field's path without its `$.`, as OpenAI writes it."""
    found = row(fault.kind)
    param = "messages" if fault.kind == "context_too_long" else fault.path and fault.path.removeprefix("$.")
    body: Json = {"error": {"message": message(fault), "type": found.type, "param": param, "code": found.code}}
    return error_reply(found.status, body, fault)
