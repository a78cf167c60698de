"""What a fault is called in Google's words."""

import json
from typing import Any

import pytest

from polarnode.core.errors import ContextTooLong
from polarnode.providers.contract import Fault, FaultKind
from polarnode.providers.google.write import error, message


def said(fault: Fault) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(error(fault).body)["error"]
    return found


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("bad_request", 400, "INVALID_ARGUMENT"),
        ("context_too_long", 400, "INVALID_ARGUMENT"),
        ("budget_spent", 400, "FAILED_PRECONDITION"),
        ("unauthorized", 401, "UNAUTHENTICATED"),
        ("not_found", 404, "NOT_FOUND"),
        ("method_not_allowed", 405, "UNIMPLEMENTED"),
        ("session_over", 410, "NOT_FOUND"),
        ("overloaded", 429, "RESOURCE_EXHAUSTED"),
        ("engine_failed", 500, "INTERNAL"),
        ("cancelled", 503, "UNAVAILABLE"),
        ("too_large", 413, "INVALID_ARGUMENT"),
    ],
)
def test_kinds_map_to_google_errors(kind: FaultKind, status: int, code: str) -> None:
    fault = Fault(kind=kind, message="One sentence.")
    assert error(fault).status == status
    assert (said(fault)["code"], said(fault)["status"], said(fault)["message"]) == (
        status,
        code,
        "One sentence.",
    )


def test_long_context_in_google_words() -> None:
    """A long context is told in Google's words."""
    fault = Fault.of(ContextTooLong(prompt_tokens=12, limit=8))
    assert (
        said(fault)["message"]
        == "The input token count (12) exceeds the maximum number of tokens allowed (8)."
    )


def test_bad_field_named_in_error() -> None:
    """A bad field is named in the sentence and beside it."""
    fault = Fault(
        kind="bad_request", message="the role must be 'user' or 'model', not 'x'", path="$.contents[0].role"
    )
    assert said(fault)["message"] == "contents[0].role: the role must be 'user' or 'model', not 'x'"
    (detail,) = said(fault)["details"]
    assert detail["@type"] == "type.googleapis.com/google.rpc.BadRequest"
    assert detail["fieldViolations"] == [{"field": "contents[0].role", "description": fault.message}]


def test_field_is_not_named_twice() -> None:
    assert (
        message(Fault(kind="bad_request", message="contents is empty: send one", path="$.contents"))
        == "contents is empty: send one"
    )
    assert message(Fault(kind="bad_request", message="the body is empty", path="$")) == "the body is empty"


def test_retry_info_for_gemini_cli() -> None:
    """Gemini CLI finds the delay of a retry where it reads it."""
    (detail,) = said(Fault(kind="overloaded", message="m", retry_after_s=7))["details"]
    assert detail == {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "7s"}
    assert said(Fault(kind="cancelled", message="m"))["details"][0]["retryDelay"] == "2s"
    assert "details" not in said(Fault(kind="budget_spent", message="m"))
