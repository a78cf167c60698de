"""Google generateContent: the dialect as a whole."""

import json

from polarnode.providers.contract import ServedModel
from polarnode.providers.google import GOOGLE

SERVED = ServedModel(id="tiny", context_length=4096, created=1700000000)


def test_14_24_the_models_list_has_the_served_id_and_its_context_length() -> None:
    (entry,) = json.loads(GOOGLE.models(SERVED))["models"]
    assert (entry["name"], entry["displayName"], entry["inputTokenLimit"], entry["outputTokenLimit"]) == (
        "models/tiny",
        "tiny",
        4096,
        4096,
    )
    assert entry["supportedGenerationMethods"] == ["generateContent", "countTokens"]


def test_14_16_a_model_is_served_under_the_name_it_was_asked_by() -> None:
    assert json.loads(GOOGLE.model(SERVED, name="gemini-9"))["name"] == "models/gemini-9"


def test_counting() -> None:
    assert json.loads(GOOGLE.count(7) or b"") == {"totalTokens": 7}
