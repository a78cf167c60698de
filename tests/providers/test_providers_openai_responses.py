"""Responses: the dialect as a whole."""

import json
from typing import Any

import pytest

from polarnode.core.conversation import Answer, ModelRequest, TextPart, Usage
from polarnode.core.errors import Refused
from polarnode.gateway.earlier_requests import SessionMemory
from polarnode.providers.contract import ModelCallInfo, RequestEnvelope, ServedModel
from polarnode.providers.openai_chat import OPENAI_CHAT
from polarnode.providers.openai_responses import OPENAI_RESPONSES
from polarnode.providers.openai_responses.history import retold

SERVED = ServedModel(id="tiny", context_length=4096, created=1700000000)
USERS = [{"role": "user", "content": "hi"}, {"role": "user", "content": "on"}]


def read(memory: SessionMemory, **body: Any) -> ModelRequest:
    return OPENAI_RESPONSES.read(json.dumps({"model": "m"} | body).encode(), RequestEnvelope(memory=memory))


def answered(memory: SessionMemory, number: int, **body: Any) -> ModelRequest:
    request = read(memory, **body)
    OPENAI_RESPONSES.remember(
        ModelCallInfo(request=request, id=f"{number:x}", created=1, signature="c2ln"), said("Said."), memory
    )
    return request


def said(text: str) -> Answer:
    return Answer(parts=(TextPart(text),), finish_reason="stop")


def test_models_list_as_in_chat() -> None:
    """The list of models is that of the other OpenAI dialect."""
    assert OPENAI_RESPONSES.models(SERVED) == OPENAI_CHAT.models(SERVED)
    assert OPENAI_RESPONSES.model(SERVED, name="gpt-x") == OPENAI_CHAT.model(SERVED, name="gpt-x")


def test_count_is_input_tokens() -> None:
    assert json.loads(OPENAI_RESPONSES.count(3) or b"") == {
        "object": "response.input_tokens",
        "input_tokens": 3,
    }


def test_answer_continues_previous_response() -> None:
    memory = SessionMemory()
    answered(memory, 1, input="hi", instructions="Code.")
    answered(memory, 2, input="on", previous_response_id="resp_1")
    found = read(memory, input="end", previous_response_id="resp_2").conversation.messages
    assert [(message.role, message.text) for message in found] == [
        ("user", "hi"),
        ("assistant", "Said."),
        ("user", "on"),
        ("assistant", "Said."),
        ("user", "end"),
    ]


def test_unstored_response_is_not_remembered() -> None:
    """Nothing is remembered for a client that does not want it."""
    memory = SessionMemory()
    answered(memory, 1, input="hi", store=False)
    with pytest.raises(Refused, match="not known here"):
        read(memory, input="on", previous_response_id="resp_1")


def test_continuation_starts_at_compaction() -> None:
    """A conversation that goes on from a compaction begins with it."""
    memory = SessionMemory()
    answered(memory, 1, input=[*USERS, {"type": "compaction_trigger"}])
    found = read(memory, input="end", previous_response_id="resp_1").conversation.messages
    assert [message.text for message in found] == [retold("Said."), "end"]


def test_whole_answer_has_one_choice() -> None:
    request = read(SessionMemory(), input="hi")
    body = json.loads(
        OPENAI_RESPONSES.whole(
            ModelCallInfo(request=request, id="1", created=1, signature="c2ln"), [said("x")], Usage()
        )
    )
    assert (body["object"], body["store"], len(body["output"])) == ("response", True, 1)
