"""Anthropic Messages: the dialect as a whole."""

import json

from polarnode.providers.anthropic import ANTHROPIC
from polarnode.providers.contract import ServedModel

SERVED = ServedModel(id="tiny", context_length=4096, created=1700000000)


def test_models_list_shows_context() -> None:
    """The list of models has the served id and its context length."""
    body = json.loads(ANTHROPIC.models(SERVED))
    (entry,) = body["data"]
    assert entry["id"] == body["first_id"] == body["last_id"] == "tiny"
    assert (entry["type"], entry["created_at"], entry["max_input_tokens"]) == (
        "model",
        "2023-11-14T22:13:20Z",
        4096,
    )
    assert body["has_more"] is False


def test_any_model_name_served() -> None:
    """A model is served under the name it was asked by."""
    assert json.loads(ANTHROPIC.model(SERVED, name="claude-x"))["id"] == "claude-x"


def test_count_is_input_tokens() -> None:
    assert json.loads(ANTHROPIC.count(7) or b"") == {"input_tokens": 7}
