"""What no model of text can see of a Responses request: described where a tool gave it, or refused."""

import json
from typing import Any

import pytest

from polarnode.core.errors import Refused
from polarnode.providers.contract import Envelope
from polarnode.providers.dialect import route
from polarnode.providers.shapes import as_unseen

URL = "data:image/png;base64," + "iVBORw0KGgo" * 1000


def read(*items: dict[str, Any]) -> Any:
    found = route("POST", "/v1/responses", {})
    assert found is not None
    return found.dialect.read(json.dumps({"model": "m", "input": items}).encode(), Envelope())


@pytest.mark.parametrize("kind", ["computer_call", "computer_call_output"])
def test_computer_items_are_refused(kind: str) -> None:
    with pytest.raises(Refused, match="sees no screen") as caught:
        read({"type": "message", "role": "user", "content": "click"}, {"type": kind, "call_id": "c"})
    assert caught.value.path == "$.input[1]"


def test_data_url_result_is_described() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "shot", "arguments": "{}"}
    said = read(call, {"type": "function_call_output", "call_id": "c", "output": URL}).conversation
    assert said.messages[-1].text == "[image/png: not shown, because this model reads text only]"


PDF = {
    "type": "document",
    "title": "t",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"},
}


BLOCKS = [{"type": "text", "text": "x"}, {"type": "image", "source": {"type": "url", "url": "x"}}]
PICTURED = {"type": "document", "title": "t", "source": {"type": "content", "content": BLOCKS}}


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        (PDF, "t\n[document: not shown"),
        (PICTURED, "t\nx\n[image: not shown"),
        ({"type": "browser_state", "url": "x"}, "[browser_state: not shown"),
    ],
)
def test_messages_result_is_described(part: dict[str, Any], shown: str) -> None:
    found = route("POST", "/v1/messages", {})
    assert found is not None
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [part]}
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    said = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": said}).encode()
    assert found.dialect.read(body, Envelope()).conversation.messages[-1].text.startswith(shown)


def test_chat_data_url_is_described() -> None:
    found = route("POST", "/v1/chat/completions", {})
    assert found is not None
    said = [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "c", "content": URL}]
    read_one = found.dialect.read(json.dumps({"model": "m", "messages": said}).encode(), Envelope())
    assert read_one.conversation.messages[-1].text.startswith("[image/png: not shown")


@pytest.mark.parametrize("text", ["", "data:", "see " + URL, URL + " above", "data:image/png;base64,a b"])
def test_text_about_data_stays(text: str) -> None:
    assert as_unseen(text) == text


def test_google_data_url_is_described() -> None:
    found = route("POST", "/v1beta/models/m:generateContent", {})
    assert found is not None
    result = {"name": "shot", "response": {"size": 3, "pages": [{"png": URL}]}}
    said = [
        {"role": "user", "parts": [{"text": "x"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "shot", "args": {}}}]},
        {"role": "user", "parts": [{"functionResponse": result}]},
    ]
    text = (
        found.dialect.read(json.dumps({"contents": said}).encode(), Envelope()).conversation.messages[-1].text
    )
    shown = "[image/png: not shown, because this model reads text only]"
    assert json.loads(text) == {"size": 3, "pages": [{"png": shown}]}
