"""Anthropic Messages: faults in Anthropic's words."""

import json
from typing import Any

import pytest

from polarnode.providers.anthropic.write import error, error_body
from polarnode.providers.contract import Fault, FaultKind


def body_of(fault: Fault) -> Any:
    return json.loads(error(fault).body)


@pytest.mark.parametrize(
    ("kind", "status", "type_"),
    [
        ("bad_request", 400, "invalid_request_error"),
        ("unauthorized", 401, "authentication_error"),
        ("not_found", 404, "not_found_error"),
        ("method_not_allowed", 405, "invalid_request_error"),
        ("session_over", 410, "not_found_error"),
        ("budget_spent", 400, "invalid_request_error"),
        ("overloaded", 529, "overloaded_error"),
        ("engine_failed", 500, "api_error"),
        ("too_large", 413, "request_too_large"),
    ],
)
def test_kinds_map_to_anthropic_errors(kind: FaultKind, status: int, type_: str) -> None:
    fault = Fault(kind=kind, message="One sentence.")
    assert error(fault).status == status
    assert (
        body_of(fault)
        == {"type": "error", "error": {"type": type_, "message": "One sentence."}}
        == error_body(fault)
    )


def test_long_context_words() -> None:
    """A long context is told in the words that Claude Code compacts on."""
    fault = Fault(kind="context_too_long", message="ours", prompt_tokens=40000, limit=32768)
    assert error(fault).status == 400
    assert body_of(fault)["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 40000 tokens > 32768 maximum",
    }


def test_path_precedes_the_sentence() -> None:
    fault = Fault(kind="bad_request", message="no", path="$.messages[0].role")
    assert body_of(fault)["error"]["message"] == "messages[0].role: no"
