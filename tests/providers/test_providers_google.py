"""Google generateContent: the dialect as a whole."""

import json

from polarnode.providers.contract import ServedModel
from polarnode.providers.google import GOOGLE

SERVED = ServedModel(id="tiny", context_length=4096, created=1700000000)


def test_models_list_shows_context() -> None:
    """The list of models has the served id and its context length."""
    (entry,) = json.loads(GOOGLE.models(SERVED))["models"]
    assert (entry["name"], entry["displayName"], entry["inputTokenLimit"], entry["outputTokenLimit"]) == (
        "models/tiny",
        "tiny",
        4096,
        4096,
    )
    assert entry["supportedGenerationMethods"] == ["generateContent", "countTokens"]


def test_any_model_name_served() -> None:
    """A model is served under the name it was asked by."""
    assert json.loads(GOOGLE.model(SERVED, name="gemini-9"))["name"] == "models/gemini-9"


def test_count_is_total_tokens() -> None:
    assert json.loads(GOOGLE.count(7) or b"") == {"totalTokens": 7}
