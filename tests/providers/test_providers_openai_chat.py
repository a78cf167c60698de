"""Chat Completions: the dialect as a whole."""

import json

from polarnode.providers.contract import ServedModel
from polarnode.providers.openai_chat import OPENAI_CHAT

SERVED = ServedModel(id="tiny", context_length=4096, created=1700000000)


def test_14_24_the_models_list_has_the_served_id_and_its_context_length() -> None:
    body = json.loads(OPENAI_CHAT.models(SERVED))
    assert body["object"] == "list"
    (entry,) = body["data"]
    assert (entry["id"], entry["object"], entry["created"]) == ("tiny", "model", 1700000000)
    assert entry["max_model_len"] == entry["context_length"] == 4096


def test_14_16_a_model_is_served_under_the_name_it_was_asked_by() -> None:
    assert json.loads(OPENAI_CHAT.model(SERVED, name="gpt-x"))["id"] == "gpt-x"


def test_this_api_counts_nothing_in_advance() -> None:
    assert OPENAI_CHAT.count(3) is None
