"""Responses: what a fault is called, before and inside a stream."""

import json
from typing import Any, get_args

import pytest

from polarnode.providers.contract import Fault, FaultKind
from polarnode.providers.openai_responses.errors import error, in_stream

KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
# What may be tried again: its connection is broken, or its status says so.
RETRIED = ("overloaded", "engine_failed", "cancelled")


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("bad_request", 400, None),
        ("unauthorized", 401, "invalid_api_key"),
        ("not_found", 404, "unknown_url"),
        ("method_not_allowed", 405, "method_not_supported"),
        ("session_over", 410, "session_over"),
        ("context_too_long", 400, "context_length_exceeded"),
        ("budget_spent", 400, "session_budget_spent"),
        ("overloaded", 429, "rate_limit_exceeded"),
        ("engine_failed", 500, None),
        ("cancelled", 503, "cancelled"),
        ("too_large", 413, "request_too_large"),
    ],
)
def test_the_table(kind: FaultKind, status: int, code: str | None) -> None:
    reply = error(Fault(kind=kind, message="One sentence.", path="$.input[0].role"))
    said: Any = json.loads(reply.body)["error"]
    assert (reply.status, said["code"], said["message"]) == (status, code, "One sentence.")
    assert said["param"] == ("input" if kind == "context_too_long" else "input[0].role")
    assert said["type"].endswith("_error")


def test_the_table_is_whole() -> None:
    assert all(error(Fault(kind=kind, message="m")).status >= 400 for kind in KINDS)


def test_14_21_a_long_context_is_said_in_the_words_harnesses_look_for() -> None:
    fault = Fault(kind="context_too_long", message="m", prompt_tokens=12, limit=8)
    said: Any = json.loads(error(fault).body)["error"]
    assert "exceeds the context window" in said["message"]
    assert "maximum context length is 8 tokens" in said["message"]
    assert "12 tokens" in said["message"]


@pytest.mark.parametrize("kind", KINDS)
def test_14_8_in_a_stream_only_what_is_final_is_said(kind: FaultKind) -> None:
    """Codex ends its run on these codes and tries again on `server_error` and `rate_limit_exceeded`; a broken connection it always tries again."""
    said: Any = in_stream(Fault(kind=kind, message="m"))
    if kind in RETRIED:
        assert said is None
    else:
        assert said["code"] == ("context_length_exceeded" if kind == "context_too_long" else "invalid_prompt")
        assert said["message"]
