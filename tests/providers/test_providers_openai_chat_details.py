"""Chat: the reference that clients of OpenRouter's dialect are given in `reasoning_details`, and give
back.
"""

import json
from typing import Any

import pytest
from attrs import evolve

from polarnode.core.conversation import Answer, ModelRequest, TextPart, Usage
from polarnode.providers.contract import ModelCallInfo
from polarnode.providers.openai_chat.read import read
from polarnode.providers.openai_chat.write import REASONING_DETAILS, ChatStream, detail_refs, whole

ANSWER = Answer(parts=(TextPart("Off."),), finish_reason="stop")


def parsed_request(**fields: Any) -> ModelRequest:
    return read(
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "q"}], **fields}).encode(),
        headers={},
        model=None,
    )


def call_of(request: ModelRequest) -> ModelCallInfo:
    return ModelCallInfo(request=request, id="ab", created=1, signature="signed-by-us")


def shown(request: ModelRequest) -> Any:
    (choice,) = json.loads(whole(call_of(request), (ANSWER,), Usage()))["choices"]
    return choice["message"].get(REASONING_DETAILS)


@pytest.mark.parametrize(
    "fields",
    [{"reasoning": {"enabled": True}}, {"reasoning": {"effort": "low"}}, {"include_reasoning": True}],
)
def test_openrouter_client_echoes_the_reference(
    fields: dict[str, Any],
) -> None:
    """A client of OpenRouter's dialect is given the reference and gives it back."""
    request = parsed_request(**fields)
    given = shown(request)
    assert [detail["data"] for detail in given] == ["signed-by-us"]
    echo = {"role": "assistant", "content": "Off.", REASONING_DETAILS: given}
    assert parsed_request(messages=[{"role": "user", "content": "q"}, echo]).conversation.messages[
        1
    ].refs == ("signed-by-us",)


@pytest.mark.parametrize(
    "fields",
    [{}, {"reasoning_effort": "low"}, {"include_reasoning": False}, {"reasoning": {"enabled": True}, "n": 2}],
)
def test_other_clients_get_no_details(fields: dict[str, Any]) -> None:
    request = parsed_request(**fields)
    answers = (ANSWER,) * request.choices
    body = whole(call_of(request), answers, Usage()) + ChatStream(call_of(request)).end(answers, Usage())
    assert REASONING_DETAILS.encode() not in body


def test_stream_sends_details_at_end() -> None:
    """A stream gives the details once, with its end."""
    call = call_of(evolve(parsed_request(include_reasoning=True), stream=True))
    sent = ChatStream(call).end((ANSWER,), Usage())
    chunks = [json.loads(line[6:]) for line in sent.split(b"\n\n") if line.startswith(b"data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert [delta[REASONING_DETAILS][0]["data"] for delta in deltas if REASONING_DETAILS in delta] == [
        "signed-by-us"
    ]


@pytest.mark.parametrize("echoed", [None, "x", {}, [None, 3, {"data": 5}, {"id": ""}]])
def test_malformed_details_name_nothing(echoed: Any) -> None:
    assert list(detail_refs(echoed)) == []
