"""Chat Completions: the dialect as a whole."""

import json

from polarnode.providers.contract import ServedModel
from polarnode.providers.openai_chat import OPENAI_CHAT

SERVED = ServedModel(id="tiny", context_length=4096, created=1700000000)


def test_models_list_shows_context() -> None:
    """The list of models has the served id and its context length."""
    body = json.loads(OPENAI_CHAT.models(SERVED))
    assert body["object"] == "list"
    (entry,) = body["data"]
    assert (entry["id"], entry["object"], entry["created"]) == ("tiny", "model", 1700000000)
    assert entry["max_model_len"] == entry["context_length"] == 4096


def test_any_model_name_served() -> None:
    """A model is served under the name it was asked by."""
    assert json.loads(OPENAI_CHAT.model(SERVED, name="gpt-x"))["id"] == "gpt-x"


def test_chat_cannot_count_tokens() -> None:
    """This API counts nothing in advance."""
    assert OPENAI_CHAT.count(3) is None
