"""The door of this room: which provider a request speaks, who is asking, and the words others need for a provider (from `contract`).

The rule for whoever edits it: a path is matched by its end, under any prefix, because base URLs differ by a `/v1` more or less and the
prefix may carry the session. What is not a provider's route has no route: an answer to a probe for another kind of server (`/api/v1/models`,
`/props`, `/api/tags`) would make the harness speak that server's language.
"""

import re
from collections.abc import Mapping

from attrs import frozen

from polarnode.providers.anthropic import ANTHROPIC
from polarnode.providers.contract import (
    JSON_TYPE,
    STREAM_TYPE,
    Call,
    Dialect,
    Envelope,
    Fault,
    FaultKind,
    Memory,
    NoMemory,
    Operation,
    Reply,
    ServedModel,
    StreamWriter,
)
from polarnode.providers.openai_chat import OPENAI_CHAT

__all__ = [
    "JSON_TYPE",
    "STREAM_TYPE",
    "Call",
    "Dialect",
    "Envelope",
    "Fault",
    "FaultKind",
    "Memory",
    "NoMemory",
    "Operation",
    "Reply",
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
    """What a request asks of which provider. `model` is the name in the path, where the path has one."""

    dialect: Dialect
    operation: Operation
    model: str | None = None


# A row a path: its end without the version, the provider, the operation.
_POSTS: tuple[tuple[str, Dialect, Operation], ...] = (
    ("/chat/completions", OPENAI_CHAT, "generate"),
    ("/messages", ANTHROPIC, "generate"),
    ("/messages/count_tokens", ANTHROPIC, "count_tokens"),
)

_SESSION = re.compile(r"/sessions/([^/]+)")
# `/api/v1/models` is how LM Studio is recognised, `/v1beta/models` is Google's.
_MODELS = re.compile(r"(?P<prefix>.*?)(?:/v1)?/models(?:/(?P<model>.+))?")
_NOT_OURS = ("/api", "/v1beta", "/v1beta1")


def route(method: str, path: str, headers: Mapping[str, str]) -> Route | None:
    """The route of a request; None when there is none (`missed` then says it in the right words)."""
    found = _find(path, headers)
    return found if found is not None and method == _method(found) else None


def missed(method: str, path: str, headers: Mapping[str, str]) -> Reply:
    """The answer to a request without a route: 405 where another method has one, else 404."""
    found = _find(path, headers)
    if found is None:
        fault = Fault(kind="not_found", message=f"there is no {_clean(path)} here: this node serves models to harnesses and nothing else")
        return not_found_dialect(path, headers).error(fault)
    allow = _method(found)
    fault = Fault(kind="method_not_allowed", message=f"{method} is not served on {_clean(path)}: use {allow}", allow=allow)
    return found.dialect.error(fault)


def not_found_dialect(path: str, headers: Mapping[str, str]) -> Dialect:
    """Whose error shape a request without a route is answered in."""
    return ANTHROPIC if "/messages" in path or _speaks_anthropic(headers) else OPENAI_CHAT


def session_keys(path: str, headers: Mapping[str, str]) -> tuple[str, ...]:
    """The keys a request carries, best first: the path's, which survived in every harness, then those of the three headers."""
    prefix = _SESSION.search(_clean(path))
    candidates = [prefix[1] if prefix else "", _bearer(headers), headers.get("x-api-key") or "", headers.get("x-goog-api-key") or ""]
    return tuple(dict.fromkeys(key.strip() for key in candidates if key.strip()))


def _find(path: str, headers: Mapping[str, str]) -> Route | None:
    path = _SESSION.sub("", _clean(path), count=1)  # a session may be called anything, `models` too
    for end, dialect, operation in _POSTS:
        if path.endswith(end):
            return Route(dialect=dialect, operation=operation)
    listed = _MODELS.fullmatch(path)
    if listed is None or listed["prefix"].endswith(_NOT_OURS):
        return None
    dialect = ANTHROPIC if _speaks_anthropic(headers) else OPENAI_CHAT
    return Route(dialect=dialect, operation="model" if listed["model"] else "models", model=listed["model"])


def _method(found: Route) -> str:
    return "GET" if found.operation in ("models", "model") else "POST"


def _clean(path: str) -> str:
    return path.partition("?")[0].rstrip("/")


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, key = (headers.get("authorization") or "").partition(" ")
    return key if scheme.lower() == "bearer" else ""


def _speaks_anthropic(headers: Mapping[str, str]) -> bool:
    return "anthropic-version" in headers or ("x-api-key" in headers and not _bearer(headers))
