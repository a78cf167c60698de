"""What OpenAI's two APIs share: faults in their words, and the list of models."""

import json
from typing import Any

import pytest

from polarnode.providers.contract import Fault, FaultKind, ServedModel
from polarnode.providers.openai import error, model, models


def body_of(fault: Fault) -> Any:
    return json.loads(error(fault, conversation="messages").body)["error"]


@pytest.mark.parametrize(
    ("kind", "status", "type_", "code"),
    [
        ("bad_request", 400, "invalid_request_error", None),
        ("unauthorized", 401, "invalid_request_error", "invalid_api_key"),
        ("not_found", 404, "invalid_request_error", "unknown_url"),
        ("method_not_allowed", 405, "invalid_request_error", "method_not_supported"),
        ("session_over", 410, "invalid_request_error", "session_over"),
        ("budget_spent", 400, "invalid_request_error", "session_budget_spent"),
        ("overloaded", 429, "rate_limit_error", "rate_limit_exceeded"),
        ("engine_failed", 500, "server_error", None),
        ("cancelled", 503, "server_error", "cancelled"),
        ("too_large", 413, "invalid_request_error", "request_too_large"),
    ],
)
def test_kinds_map_to_openai_errors(kind: FaultKind, status: int, type_: str, code: str | None) -> None:
    fault = Fault(kind=kind, message="One sentence.")
    assert error(fault, conversation="messages").status == status
    assert body_of(fault) == {"message": "One sentence.", "type": type_, "param": None, "code": code}


def test_long_context_words() -> None:
    """A long context is told in the words that harnesses compact on."""
    fault = Fault(kind="context_too_long", message="ours", prompt_tokens=40000, limit=32768)
    assert error(fault, conversation="messages").status == 400
    assert body_of(fault)["code"] == "context_length_exceeded"
    assert body_of(fault)["message"].startswith(
        "This model's maximum context length is 32768 tokens. However, your messages resulted in 40000"
        " tokens."
    )
    assert "exceeds the context window" in body_of(fault)["message"]


@pytest.mark.parametrize("field", ["messages", "input"])
def test_long_context_names_api_field(field: str) -> None:
    """A long context names the field of its own API."""
    assert (
        json.loads(error(Fault(kind="context_too_long", message="m"), conversation=field).body)["error"][
            "param"
        ]
        == field
    )


def test_path_is_the_error_param() -> None:
    assert (
        body_of(Fault(kind="bad_request", message="m", path="$.messages[0].role"))["param"]
        == "messages[0].role"
    )


def test_model_listed_under_any_name() -> None:
    """The one model is listed, and shown by any name."""
    served = ServedModel(id="m", context_length=4096, created=1)
    assert [entry["id"] for entry in json.loads(models(served))["data"]] == ["m"]
    shown = json.loads(model(served, name="other"))
    assert (shown["id"], shown["max_model_len"], shown["context_length"]) == ("other", 4096, 4096)
