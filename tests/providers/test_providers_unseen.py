"""What no model of text can see of a Responses request: described where a tool gave it, or refused."""

import json
from typing import Any

import pytest

from polarnode.core.errors import Refused
from polarnode.providers.contract import RequestEnvelope
from polarnode.providers.dialect import route
from polarnode.providers.shapes import replace_media

URL = "data:image/png;base64," + "iVBORw0KGgo" * 1000


def read(*items: dict[str, Any]) -> Any:
    found = route("POST", "/v1/responses", {})
    assert found is not None
    return found.dialect.read(json.dumps({"model": "m", "input": items}).encode(), RequestEnvelope())


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
    assert found.dialect.read(body, RequestEnvelope()).conversation.messages[-1].text.startswith(shown)


def test_chat_data_url_is_described() -> None:
    found = route("POST", "/v1/chat/completions", {})
    assert found is not None
    said = [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "c", "content": URL}]
    read_one = found.dialect.read(json.dumps({"model": "m", "messages": said}).encode(), RequestEnvelope())
    assert read_one.conversation.messages[-1].text.startswith("[image/png: not shown")


PNG = "iVBORw0KGgo="
SHOWN = "[image/png: not shown, because this model reads text only]"
MCP = {"type": "image", "data": PNG, "mimeType": "image/png"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"Took a picture:\n  {URL}\r\nDone", f"Took a picture:\n  {SHOWN}\r\nDone"),
        (f"![page 1]({URL})", SHOWN),
        ("DATA:image/png;charset=x;base64,iVBO", SHOWN),
        ("data:;base64,iVBO", SHOWN.replace("image/png", "data")),
        ("data:image/png;base64," + f"{'A' * 76}\n" * 3 + "AA==\nDone", f"{SHOWN}\nDone"),
        (f'{{"a": 1.0,\n "png": "{URL}"}}', f'{{"a": 1.0,\n "png": "{SHOWN}"}}'),
        (f'{{"png": "{"data:image/png;base64,iV/O".replace("/", chr(92) + "/")}"}}', f'{{"png": "{SHOWN}"}}'),
        (json.dumps({"n": [json.dumps({"png": URL})]}), json.dumps({"n": [json.dumps({"png": SHOWN})]})),
        (json.dumps({"content": [MCP]}), json.dumps({"content": [MCP | {"data": SHOWN}]})),
        (f"log\n{json.dumps(MCP)}\nend", f"log\n{json.dumps(MCP | {'data': SHOWN})}\nend"),
        (
            json.dumps({"resource": {"blob": PNG, "mimeType": "image/png", "uri": "x"}}),
            json.dumps({"resource": {"blob": SHOWN, "mimeType": "image/png", "uri": "x"}}),
        ),
    ],
)
def test_encoded_bytes_in_text_are_described(text: str, shown: str) -> None:
    assert replace_media(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        *("", "data:", "see " + URL, URL + " above", "data:image/png;base64,a b"),
        f'<img src="{URL}">',
        f'{{"a": "{URL} is long"}}',
        '{"mimeType": "text/plain", "data": "word"}',
        '{"mimeType": "image/png", "data": "a picture"}',
        '{"mimeType": "image/png", ' + "[" * 2000,
    ],
)
def test_text_about_data_is_kept(text: str) -> None:
    assert replace_media(text) == text


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
        found.dialect.read(json.dumps({"contents": said}).encode(), RequestEnvelope())
        .conversation.messages[-1]
        .text
    )
    shown = "[image/png: not shown, because this model reads text only]"
    assert json.loads(text) == {"size": 3, "pages": [{"png": shown}]}


RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Read it."}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("part", [PDF, IMAGE, PICTURED])
def test_part_beside_a_result_is_described(part: dict[str, Any], first: bool) -> None:
    found = route("POST", "/v1/messages", {})
    assert found is not None
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [RESULT, part] if first else [part, RESULT]},
    ]
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": said}).encode()
    messages = found.dialect.read(body, RequestEnvelope()).conversation.messages
    assert {message.role for message in messages[2:]} == {"tool", "user"}
    assert "not shown, because" in "".join(message.text for message in messages[2:])
    # and what a user shows by itself is refused, with its path
    said.append({"role": "user", "content": [{"type": "text", "text": "see"}, part]})
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": said}).encode()
    with pytest.raises(Refused, match="reads text only") as caught:
        found.dialect.read(body, RequestEnvelope())
    assert str(caught.value.path).startswith("$.messages[3].content[1]")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses", "google"])
def test_mcp_parts_are_described(path: str) -> None:
    """As parts of a result, and as JSON in its text."""
    parts = [MCP, {"type": "audio", "data": PNG, "mimeType": "audio/wav"}]
    for given in (parts, [{"type": "text", "text": json.dumps({"content": parts})}]):
        if path == "/v1/messages":
            result = {"type": "tool_result", "tool_use_id": "t", "content": given}
            said: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": [result]}]}
        elif path == "/v1/chat/completions":
            said = {"messages": [{"role": "tool", "tool_call_id": "t", "content": given}]}
        elif path == "/v1/responses":
            said = {"input": [{"type": "function_call_output", "call_id": "t", "output": given}]}
        else:
            path = "/v1beta/models/m:generateContent"
            result = {"name": "look", "response": {"content": given}}
            said = {"contents": [{"role": "user", "parts": [{"functionResponse": result}]}]}
        found = route("POST", path, {})
        assert found is not None
        body = json.dumps({"model": "m"} | said).encode()
        text = found.dialect.read(body, RequestEnvelope(model="m")).conversation.messages[-1].text
        assert text.count("not shown, because") == 2
        assert PNG not in text
