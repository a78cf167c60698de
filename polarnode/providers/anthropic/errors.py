"""Anthropic Messages: what a fault is called, as its SDKs and Claude Code understand it.

Whoever changes a row should know what Claude Code does on its status: 429, 5xx, 529, 408, 409 and 401 are tried ten times over three
minutes, 413 ends it, and any other 400 makes it drop features one by one, which changes the prompt.
"""

from typing import assert_never

from attrs import frozen

from polarnode.conversation import Json
from polarnode.providers.contract import Fault, FaultKind, Reply, error_reply


@frozen
class Row:
    """One row of the table: HTTP status and `error.type`."""

    status: int
    type: str


def row(kind: FaultKind) -> Row:
    """The table. 529 is this API's own word for overload; 410 has none, and `not_found_error` is the nearest that no client tries again."""
    match kind:
        case "bad_request" | "context_too_long" | "budget_spent":
            return Row(400, "invalid_request_error")
        case "unauthorized":
            return Row(401, "authentication_error")
        case "not_found":
            return Row(404, "not_found_error")
        case "method_not_allowed":
            return Row(405, "invalid_request_error")
        case "session_over":
            return Row(410, "not_found_error")
        case "overloaded":
            return Row(529, "overloaded_error")
        case "engine_failed":
            return Row(500, "api_error")
        case "cancelled":
            return Row(503, "api_error")
        case "too_large":
            return Row(413, "request_too_large")
        case _:
            assert_never(kind)


def message(fault: Fault) -> str:
    """The fault's sentence with its path, as this API has no field for one; a long context in the words Claude Code compacts on."""
    if fault.kind == "context_too_long" and fault.limit is not None and fault.prompt_tokens is not None:
        return f"prompt is too long: {fault.prompt_tokens} tokens > {fault.limit} maximum"
    return f"{fault.path.removeprefix('$.')}: {fault.message}" if fault.path else fault.message


def body(fault: Fault) -> Json:
    """The error object, the same in a reply and in a stream's `error` event."""
    return {"type": "error", "error": {"type": row(fault.kind).type, "message": message(fault)}}


def error(fault: Fault) -> Reply:
    return error_reply(row(fault.kind).status, body(fault), fault)
