"""Recognise by path and headers which provider's API a request uses, and find the session keys that it
carries.

A path is matched by its end, under any prefix, because base URLs differ by a `/v1` and the prefix may carry
the session. Only a provider's routes are answered: an answer to a probe for another kind of server
(`/api/v1/models`, `/props`, `/api/tags`) would make the harness use that server's API.
"""

import re
from collections.abc import Mapping
from urllib.parse import parse_qs

from attrs import frozen

from polarnode.providers.anthropic import ANTHROPIC
from polarnode.providers.contract import (
    JSON_TYPE,
    STREAM_TYPE,
    Dialect,
    Fault,
    FaultKind,
    FinalBytes,
    Memory,
    ModelCallInfo,
    NoMemory,
    Operation,
    Reply,
    RequestEnvelope,
    ServedModel,
    StreamWriter,
)
from polarnode.providers.google import GOOGLE
from polarnode.providers.openai_chat import OPENAI_CHAT
from polarnode.providers.openai_responses import OPENAI_RESPONSES

__all__ = [
    "JSON_TYPE",
    "STREAM_TYPE",
    "Dialect",
    "Fault",
    "FaultKind",
    "FinalBytes",
    "Memory",
    "ModelCallInfo",
    "NoMemory",
    "Operation",
    "Reply",
    "RequestEnvelope",
    "Route",
    "ServedModel",
    "StreamWriter",
    "missed",
    "not_found_dialect",
    "route",
    "session_keys",
]


@frozen(kw_only=True)
class Route:
    """The dialect and operation of a request. Where the path contains them, `model` is the model's name, and
    `stream` whether the request asks for a stream.
    """

    dialect: Dialect
    operation: Operation
    model: str | None = None
    stream: bool | None = None


# One row per path: the end of the path without the version, the provider, the operation.
_POST_ROUTES: tuple[tuple[str, Dialect, Operation], ...] = (
    ("/chat/completions", OPENAI_CHAT, "generate"),
    ("/responses", OPENAI_RESPONSES, "generate"),
    ("/responses/compact", OPENAI_RESPONSES, "compact"),
    ("/responses/input_tokens", OPENAI_RESPONSES, "count_tokens"),
    ("/messages", ANTHROPIC, "generate"),
    ("/messages/count_tokens", ANTHROPIC, "count_tokens"),
)

# Google's paths end with the model's name, which may contain anything, and the method after the last colon.
# The pattern covers all paths of AI Studio and Vertex.
_GOOGLE_METHOD_PATH = re.compile(r".*?/(?:models|tunedModels|endpoints)/(?P<model>.+):(?P<method>\w+)")
_METHODS: Mapping[str, tuple[Operation, bool]] = {
    "generateContent": ("generate", False),
    "streamGenerateContent": ("generate", True),
    "countTokens": ("count_tokens", False),
}
# a method's name, unlike a tag in a model's name (`qwen:7b`)
_METHOD_NAME = re.compile(r"[a-z]+(?:[A-Z][a-z]*)+|predict")
_GOOGLE_PATH = re.compile(r".*/(?:v1beta1?|publishers|tunedModels|cachedContents)(?:/.*)?")

_SESSION = re.compile(r"/sessions/([^/]+)")
_MODELS_PATH = re.compile(
    r"(?P<prefix>.*?)(?:/v1|/v1beta1?)?(?:/publishers/[^/]+)?/models(?:/(?P<model>.+))?"
)
_FOREIGN_PREFIX = "/api"  # Clients recognise LM Studio by `/api/v1/models`.


def route(method: str, path: str, headers: Mapping[str, str]) -> Route | None:
    """The route of a request. None if it has none; `missed` then returns the response."""
    found = _find(path, headers)
    return found if found is not None and method == _served_method(found) else None


def missed(method: str, path: str, headers: Mapping[str, str]) -> Reply:
    """The response to a request without a route: 405 if the path has another method, else 404."""
    found = _find(path, headers)
    if found is None:
        fault = Fault(
            kind="not_found",
            message=(
                f"there is no {_clean_path(path)} here: this node serves models to harnesses and nothing else"
            ),
        )
        return not_found_dialect(path, headers).error(fault)
    allow = _served_method(found)
    fault = Fault(
        kind="method_not_allowed",
        message=f"{method} is not served on {_clean_path(path)}: use {allow}",
        allow=allow,
    )
    return found.dialect.error(fault)


def not_found_dialect(path: str, headers: Mapping[str, str]) -> Dialect:
    """The dialect whose error format answers a request without a route."""
    if _speaks_google(_clean_path(path), headers):
        return GOOGLE
    if "/responses" in path:
        return OPENAI_RESPONSES
    return ANTHROPIC if "/messages" in path or _speaks_anthropic(headers) else OPENAI_CHAT


def session_keys(target: str, headers: Mapping[str, str]) -> tuple[str, ...]:
    """The keys in a request, in order of preference: the key in the path, which every harness passes on
    unchanged, the keys in the three headers, and `key` in the query, as in manual calls of Google's API.
    """
    path, _, query = target.partition("?")
    prefix = _SESSION.search(_clean_path(path))
    named = [
        headers.get("x-api-key") or "",
        headers.get("x-goog-api-key") or "",
        *parse_qs(query).get("key", ()),
    ]
    candidates = [prefix[1] if prefix else "", _bearer_key(headers), *named]
    return tuple(dict.fromkeys(key.strip() for key in candidates if key.strip()))


def _find(path: str, headers: Mapping[str, str]) -> Route | None:
    path = _SESSION.sub("", _clean_path(path), count=1)  # A session may have any name, even `models`.
    for end, dialect, operation in _POST_ROUTES:
        if path.endswith(end):
            return Route(dialect=dialect, operation=operation)
    method = _GOOGLE_METHOD_PATH.fullmatch(path)
    if method is not None and _METHOD_NAME.fullmatch(method["method"]):
        operation_and_stream = _METHODS.get(method["method"])
        if operation_and_stream is None:
            return None
        operation, stream = operation_and_stream
        return Route(dialect=GOOGLE, operation=operation, model=method["model"], stream=stream)
    listed = _MODELS_PATH.fullmatch(path)
    if listed is None or listed["prefix"].endswith(_FOREIGN_PREFIX):
        return None
    return Route(
        dialect=_model_list_dialect(path, headers),
        operation="model" if listed["model"] else "models",
        model=listed["model"],
    )


def _model_list_dialect(path: str, headers: Mapping[str, str]) -> Dialect:
    """The dialect in whose format models are listed. The paths of these APIs are similar, so the headers
    decide too.
    """
    if _speaks_google(path, headers):
        return GOOGLE
    return ANTHROPIC if _speaks_anthropic(headers) else OPENAI_CHAT


def _served_method(found: Route) -> str:
    return "GET" if found.operation in ("models", "model") else "POST"


def _clean_path(path: str) -> str:
    return path.partition("?")[0].rstrip("/")


def _bearer_key(headers: Mapping[str, str]) -> str:
    scheme, _, key = (headers.get("authorization") or "").partition(" ")
    return key if scheme.lower() == "bearer" else ""


def _speaks_anthropic(headers: Mapping[str, str]) -> bool:
    return "anthropic-version" in headers or ("x-api-key" in headers and not _bearer_key(headers))


def _speaks_google(path: str, headers: Mapping[str, str]) -> bool:
    method = _GOOGLE_METHOD_PATH.fullmatch(path)
    named = "x-goog-api-key" in headers or "x-goog-api-client" in headers
    return (
        named
        or _GOOGLE_PATH.fullmatch(path) is not None
        or (method is not None and _METHOD_NAME.fullmatch(method["method"]) is not None)
    )
