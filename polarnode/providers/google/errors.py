"""Google: what a fault is called, in the shape of google.rpc.Status that its SDKs and Gemini CLI read.

Whoever changes a row should know what Gemini CLI (0.61, tried) does on its status: 429 and 5xx are tried ten times over 200 s, every other
4xx ends it at once with exit code 1, a long context too. `RetryInfo` is the least it waits (5 s, doubling, without one); over 300 s it gives
up at once, and so it does where a message says its limit is 0 or its capacity exhausted. The header it does not read.
"""

from typing import assert_never

from attrs import frozen

from polarnode.conversation import Json
from polarnode.providers.contract import RETRY_AFTER_S, TRIED_AGAIN, Fault, FaultKind, Reply, error_reply

_RPC = "type.googleapis.com/google.rpc."


@frozen
class Row:
    """One row of the table: HTTP status and the canonical code of google.rpc."""

    status: int
    code: str


def row(kind: FaultKind) -> Row:
    """The table. google.rpc has no word for 405, 410 and 413; the nearest is taken that says the same to a reader."""
    match kind:
        case "bad_request" | "context_too_long":
            return Row(400, "INVALID_ARGUMENT")
        case "budget_spent":
            return Row(400, "FAILED_PRECONDITION")
        case "unauthorized":
            return Row(401, "UNAUTHENTICATED")
        case "not_found":
            return Row(404, "NOT_FOUND")
        case "method_not_allowed":
            return Row(405, "UNIMPLEMENTED")
        case "session_over":
            return Row(410, "NOT_FOUND")
        case "overloaded":
            return Row(429, "RESOURCE_EXHAUSTED")
        case "engine_failed":
            return Row(500, "INTERNAL")
        case "cancelled":
            return Row(503, "UNAVAILABLE")
        case "too_large":
            return Row(413, "INVALID_ARGUMENT")
        case _:
            assert_never(kind)


def message(fault: Fault) -> str:
    """The fault's sentence, behind its path unless it names it itself; a long context in Google's own words."""
    if fault.kind == "context_too_long" and fault.limit is not None and fault.prompt_tokens is not None:
        return f"The input token count ({fault.prompt_tokens}) exceeds the maximum number of tokens allowed ({fault.limit})."
    field = (fault.path or "$").removeprefix("$").removeprefix(".")
    return f"{field}: {fault.message}" if field and not fault.message.startswith(field) else fault.message


def body(fault: Fault) -> Json:
    """The error object, the same in a reply and in a stream."""
    found = row(fault.kind)
    error: dict[str, Json] = {"code": found.status, "message": message(fault), "status": found.code}
    details = _details(fault)
    return {"error": error | {"details": details} if details else error}


def _details(fault: Fault) -> list[Json]:
    if fault.kind in TRIED_AGAIN:
        return [{"@type": f"{_RPC}RetryInfo", "retryDelay": f"{fault.retry_after_s or RETRY_AFTER_S}s"}]
    if fault.path is not None:
        return [{"@type": f"{_RPC}BadRequest", "fieldViolations": [{"field": fault.path.removeprefix("$."), "description": fault.message}]}]
    return []


def error(fault: Fault) -> Reply:
    return error_reply(row(fault.kind).status, body(fault), fault)
