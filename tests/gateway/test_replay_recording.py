"""Recorded requests in every spelling a recorder may give them."""

import json
from base64 import b64encode
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from polarnode.gateway.recorded_request import RecordedRequest, read_recorded
from polarnode.providers.contract import NoMemory

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TEXT = json.dumps(BODY)
TARGET = "/sessions/s/v1/chat/completions"
PAIRS = [["X-Session-Id", "ses_1"], ["Content-Type", "application/json"]]


def read(said: Any, response: bytes | None = None) -> RecordedRequest:
    return read_recorded("01-request.json", json.dumps(said).encode(), NoMemory(), response=response)


@pytest.mark.parametrize(
    "said",
    [
        {"method": "POST", "target": TARGET, "headers": PAIRS, "body": BODY},
        {"method": "post", "path": TARGET, "headers": dict(PAIRS), "body": TEXT},
        {
            "url": f"http://127.0.0.1:8899{TARGET}?x=1",
            "headers": {"x-session-id": ["ses_1"]},
            "body": b64encode(TEXT.encode()).decode(),
        },
        {
            "request": {
                "method": "POST",
                "url": TARGET,
                "headers": [{"name": "X-Session-Id", "value": "ses_1"}],
                "postData": {"text": TEXT},
            }
        },
        {"target": f"POST {TARGET} HTTP/1.1", "headers": "x-session-id: ses_1\r\nhost: here", "json": BODY},
        {
            "method": "POST",
            "target": TARGET,
            "headers": ["x-session-id: ses_1"],
            "body_base64": b64encode(TEXT.encode()).decode(),
        },
    ],
)
def test_every_spelling_reads_the_same(said: Any) -> None:
    found = read(said)
    assert found.error is None
    assert found.provider == "openai_chat"
    assert found.request is not None
    assert found.request.hints["session"] == "ses_1"
    assert found.request.conversation.messages[0].text == "hello"


@pytest.mark.parametrize(
    "said",
    [
        {"method": "GET", "target": "/api/tags"},
        {"method": "POST", "target": "/api/show", "headers": None, "body": {"name": "m"}},
        {"method": "GET", "target": "/v1/responses", "headers": [["upgrade", "websocket"]], "body": ""},
        {"method": "GET", "target": "/v1/models", "headers": {}},
        {
            "method": "POST",
            "target": "/v1/messages/count_tokens",
            "body": {"model": "m", "messages": [{"role": "user", "content": "x"}]},
        },
    ],
)
def test_request_without_model_is_no_error(said: Any) -> None:
    """A request that asks the model nothing is no error."""
    found = read(said)
    assert (found.request, found.error) == (None, None)


@pytest.mark.parametrize(
    "said", [[], "x", {"headers": []}, {"target": TARGET}, {"target": TARGET, "body": {"model": "m"}}]
)
def test_unreadable_recording_says_so(said: Any) -> None:
    assert read(said).error


@pytest.mark.parametrize(
    ("response", "failed"),
    [
        (None, False),
        (b"", True),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", False),
        (b"HTTP/1.1 529 Overloaded\r\n\r\n", True),
        (b"data: {}\n", False),
    ],
)
def test_failed_response_is_recognised(response: bytes | None, failed: bool) -> None:
    """A response may tell that there was no answer."""
    assert read({"target": TARGET, "body": BODY}, response).failed is failed


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["method", "target", "url", "headers", "body", "request", "postData"])
PATHS = st.sampled_from(
    [
        TARGET,
        "/v1/messages",
        "/v1/responses",
        "/v1beta/models/m:generateContent",
        "http://[",
        "POST /v1/messages HTTP/1.1",
        "//",
        "?",
    ]
)


@given(said=st.dictionaries(FIELDS, JSON, max_size=5), target=PATHS)
def test_no_file_ends_the_others(said: dict[str, Any], target: str) -> None:
    for file in (said, {"target": target} | said, {"target": target, "body": BODY} | said):
        content = json.dumps(file).encode()
        found = read_recorded("f", content, NoMemory(), response=content[:40])
        assert found.request is None or found.error is None


@given(content=st.binary(max_size=60))
def test_no_bytes_end_the_others(content: bytes) -> None:
    assert read_recorded("f", content, NoMemory()).error
