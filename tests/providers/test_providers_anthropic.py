"""Anthropic Messages: the dialect as a whole."""

import json

from polarnode.providers.anthropic import ANTHROPIC
from polarnode.providers.contract import ServedModel

SERVED = ServedModel(id="tiny", context_length=4096, created=1700000000)


def test_14_24_the_models_list_has_the_served_id_and_its_context_length() -> None:
    body = json.loads(ANTHROPIC.models(SERVED))
    (entry,) = body["data"]
    assert entry["id"] == body["first_id"] == body["last_id"] == "tiny"
    assert (entry["type"], entry["created_at"], entry["max_input_tokens"]) == (
        "model",
        "2023-11-14T22:13:20Z",
        4096,
    )
    assert body["has_more"] is False


def test_14_16_a_model_is_served_under_the_name_it_was_asked_by() -> None:
    assert json.loads(ANTHROPIC.model(SERVED, name="claude-x"))["id"] == "claude-x"


def test_counting() -> None:
    assert json.loads(ANTHROPIC.count(7) or b"") == {"input_tokens": 7}
