"""Which provider a request speaks, and who is asking."""

import json

import pytest

from polarnode.core.conversation import Message
from polarnode.providers.anthropic import ANTHROPIC
from polarnode.providers.contract import Dialect, Operation, RequestEnvelope
from polarnode.providers.dialect import missed, not_found_dialect, route, session_keys
from polarnode.providers.google import GOOGLE
from polarnode.providers.openai_chat import OPENAI_CHAT
from polarnode.providers.openai_responses import OPENAI_RESPONSES

BEARER = {"authorization": "Bearer k"}
X_API_KEY = {"x-api-key": "k"}


@pytest.mark.parametrize("prefix", ["", "/sessions/abc123", "/sessions/models", "/some/other/prefix"])
@pytest.mark.parametrize(
    ("method", "end", "dialect", "operation"),
    [
        ("POST", "/v1/chat/completions", OPENAI_CHAT, "generate"),
        ("POST", "/chat/completions", OPENAI_CHAT, "generate"),
        ("POST", "/v1/v1/chat/completions", OPENAI_CHAT, "generate"),
        ("POST", "/v1/responses", OPENAI_RESPONSES, "generate"),
        ("POST", "/responses", OPENAI_RESPONSES, "generate"),
        ("POST", "/v1/responses?x=y", OPENAI_RESPONSES, "generate"),
        ("POST", "/v1/responses/compact", OPENAI_RESPONSES, "compact"),
        ("POST", "/v1/responses/input_tokens", OPENAI_RESPONSES, "count_tokens"),
        ("POST", "/v1/messages", ANTHROPIC, "generate"),
        ("POST", "/v1/messages?beta=true", ANTHROPIC, "generate"),
        ("POST", "/v1/messages/", ANTHROPIC, "generate"),
        ("POST", "/messages", ANTHROPIC, "generate"),
        ("POST", "/v1/messages/count_tokens", ANTHROPIC, "count_tokens"),
        ("GET", "/v1beta/models", GOOGLE, "models"),
        ("GET", "/v1beta1/publishers/google/models", GOOGLE, "models"),
        ("GET", "/v1/models", OPENAI_CHAT, "models"),
        ("GET", "/models", OPENAI_CHAT, "models"),
    ],
)
def test_routes_under_any_prefix(
    prefix: str, method: str, end: str, dialect: Dialect, operation: Operation
) -> None:
    """A route is the end of its path, under any prefix."""
    found = route(method, prefix + end, BEARER)
    assert found is not None
    assert (found.dialect, found.operation, found.model) == (dialect, operation, None)


GENERATED = {
    "generateContent": ("generate", False),
    "streamGenerateContent": ("generate", True),
    "countTokens": ("count_tokens", False),
}


@pytest.mark.parametrize("prefix", ["", "/sessions/abc123", "/sessions/models", "/some/other/prefix"])
@pytest.mark.parametrize("method", GENERATED)
@pytest.mark.parametrize("query", ["", "?alt=sse", "?key=a:b/c"])
@pytest.mark.parametrize(
    ("end", "model"),
    [
        ("/v1beta/models/local-model", "local-model"),
        ("/v1/models/local-model", "local-model"),
        ("/models/local-model", "local-model"),
        ("/v1beta/models/org/some-model", "org/some-model"),
        ("/v1beta/models/qwen:7b", "qwen:7b"),
        ("/v1beta/tunedModels/mine-1", "mine-1"),
        ("/v1beta1/publishers/google/models/local-model", "local-model"),
        ("/v1/projects/p/locations/l/publishers/google/models/local-model", "local-model"),
        ("/v1beta1/projects/p/locations/l/endpoints/12", "12"),
    ],
)
def test_google_paths_name_method(prefix: str, method: str, query: str, end: str, model: str) -> None:
    """Google's paths name the model and the method."""
    path = f"{prefix}{end}:{method}{query}"
    found = route("POST", path, {})
    assert found is not None
    assert (found.dialect, found.operation, found.model, found.stream) == (
        GOOGLE,
        GENERATED[method][0],
        model,
        GENERATED[method][1],
    )
    assert route("GET", path, {}) is None
    assert ("allow", "POST") in missed("GET", path, {}).headers


@pytest.mark.parametrize(
    "path",
    [
        "/v1beta/models/m:embedContent",
        "/v1/models/m:batchEmbedContents",
        "/v1beta1/publishers/google/models/m:predict",
        "/v1beta/cachedContents",
        "/v1beta/tunedModels",
        "/v1beta/models:generateContent",
        "/v1beta/files",
    ],
)
def test_unserved_google_path_is_404(path: str) -> None:
    """A path that Google serves and the node does not is a 404 in Google's words."""
    assert route("POST", path, {}) is None
    reply = missed("POST", path, {})
    assert reply.status == 404
    assert json.loads(reply.body)["error"]["status"] == "NOT_FOUND"


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/v1beta/models/org/m", "org/m"),
        ("/v1/models/qwen:7b", "qwen:7b"),
        ("/v1beta1/publishers/google/models/m", "m"),
    ],
)
def test_google_single_model_route(path: str, model: str) -> None:
    found = route("GET", f"/sessions/abc{path}", {"x-goog-api-key": "k"})
    assert found is not None
    assert (found.dialect, found.operation, found.model) == (GOOGLE, "model", model)


def test_model_route_takes_any_name() -> None:
    found = route("GET", "/sessions/abc/v1/models/org/some-model", BEARER)
    assert found is not None
    assert (found.operation, found.model) == ("model", "org/some-model")


@pytest.mark.parametrize(
    ("headers", "dialect"),
    [
        ({}, OPENAI_CHAT),
        (BEARER, OPENAI_CHAT),
        (X_API_KEY, ANTHROPIC),
        (X_API_KEY | BEARER, OPENAI_CHAT),
        (X_API_KEY | BEARER | {"anthropic-version": "2023-06-01"}, ANTHROPIC),
        (BEARER | {"anthropic-version": "2023-06-01"}, ANTHROPIC),
        ({"x-goog-api-key": "k"}, GOOGLE),
        (BEARER | {"x-goog-api-client": "google-genai-sdk/1"}, GOOGLE),
    ],
)
def test_models_list_shape_per_client(headers: dict[str, str], dialect: Dialect) -> None:
    """The list of models has the shape of the client that asks."""
    found = route("GET", "/v1/models", headers)
    assert found is not None
    assert found.dialect is dialect
    assert not_found_dialect("/nowhere", headers) is dialect


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "/api/v1/models",
        "/sessions/abc/api/v1/models",
        "/api/tags",
        "/v1/props",
        "/props",
        "/version",
        "/v1/model/info",
    ],
)
def test_foreign_probes_get_404(path: str) -> None:
    """Probes for other servers are a fast 404."""
    assert route("GET", path, {}) is None
    reply = missed("GET", path, {})
    assert reply.status == 404
    assert json.loads(reply.body)["error"]["code"] == "unknown_url"
    assert ("content-type", "application/json") in reply.headers


def test_wrong_method_names_served_one() -> None:
    assert route("GET", "/v1/messages", {}) is None
    reply = missed("GET", "/v1/messages", {})
    assert (reply.status, ("allow", "POST") in reply.headers) == (405, True)
    assert json.loads(reply.body)["type"] == "error"
    assert route("POST", "/v1/models", {}) is None
    assert ("allow", "GET") in missed("POST", "/v1/models", {}).headers


def test_missing_path_answers_in_dialect() -> None:
    assert not_found_dialect("/v1/messages/batches", {}) is ANTHROPIC
    assert not_found_dialect("/v1/responses/resp_1", {}) is OPENAI_RESPONSES
    assert not_found_dialect("/v1/completions", {}) is OPENAI_CHAT
    assert json.loads(missed("POST", "/v1/messages/batches", {}).body)["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("path", "headers", "keys"),
    [
        ("/v1/messages", {}, ()),
        ("/sessions/abc123/v1/messages?beta=true", {}, ("abc123",)),
        ("/sessions/abc", {}, ("abc",)),
        ("/v1/chat/completions", {"authorization": "Bearer one"}, ("one",)),
        ("/v1/chat/completions", {"authorization": "bearer  one "}, ("one",)),
        ("/v1/chat/completions", {"authorization": "Basic one"}, ()),
        (
            "/sessions/p/v1/messages",
            {"x-goog-api-key": "g", "x-api-key": "x", "authorization": "Bearer b"},
            ("p", "b", "x", "g"),
        ),
        ("/sessions/same/v1/messages", {"x-api-key": "same", "authorization": "Bearer same"}, ("same",)),
        ("/v1/messages", {"x-api-key": "", "authorization": "Bearer "}, ()),
        ("/v1beta/models/m:generateContent?alt=sse&key=q", {}, ("q",)),
        ("/sessions/p/v1beta/models/m:generateContent?key=q%2Fr", {"x-goog-api-key": "g"}, ("p", "g", "q/r")),
    ],
)
def test_key_in_path_first(path: str, headers: dict[str, str], keys: tuple[str, ...]) -> None:
    """The path is the first key, and any header or the query may hold one."""
    assert session_keys(path, headers) == keys


SPLIT = {
    "/v1/messages": {
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "a"}, *[{"role": "assistant", "content": "b"}] * 100],
    },
    "/v1beta/models/m:generateContent": {
        "contents": [
            {"role": "user", "parts": [{"text": "a"}]},
            *[{"role": "model", "parts": [{"text": "b"}]}] * 100,
        ]
    },
}


@pytest.mark.parametrize("path", SPLIT)
def test_split_answer_joins_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each joining copies all that is joined: one for each message would cost the square of their number."""
    joined, counts = Message.joined, []

    def counted(message: Message, *others: Message) -> Message:
        counts.append(len(others))
        return joined(message, *others)

    monkeypatch.setattr(Message, "joined", counted)
    found = route("POST", path, {})
    assert found is not None
    body = json.dumps({"model": "m"} | SPLIT[path]).encode()
    assert found.dialect.read(body, RequestEnvelope(model="m")).conversation.messages[-1].text == "b" * 100
    assert counts == [99]
