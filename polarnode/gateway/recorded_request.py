"""Read one recorded request (method, target, headers and body) in whatever format a recorder wrote it.

The file format is read leniently, because every recorder has its own. The request itself is read by the
provider that it was sent to. A target without a provider's route is no error, because harnesses probe for
other kinds of servers.
"""

from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Iterator, Mapping
from typing import Final

from attrs import frozen

from polarnode.core.codec.json import dump_json, read_json
from polarnode.core.conversation import Json, ModelRequest
from polarnode.core.errors import PolarnodeError, Refused, boundary
from polarnode.gateway.model_requests import request_key
from polarnode.providers.contract import Memory, RequestEnvelope
from polarnode.providers.dialect import Route, route

_METHODS: Final = ("method", "verb")
_TARGETS: Final = ("target", "path", "url", "uri")
_BODIES: Final = ("body", "json", "data", "content", "postData", "body_base64", "body_b64")


@frozen(kw_only=True)
class RecordedRequest:
    """The content of one file. `key` identifies the request. `request` is None if the model was not called;
    `error` says why if that is a fault.

    `failed`: the recorded response is known to hold no answer.
    """

    file: str
    route: Route | None = None
    request: ModelRequest | None = None
    key: str = ""
    error: str | None = None
    failed: bool = False

    @property
    def provider(self) -> str | None:
        """The name of the request's dialect. None if the route belongs to no provider."""
        return None if self.route is None else self.route.dialect.name


@frozen(kw_only=True)
class _SentRequest:
    """A request as it was sent. `headers` have lower-case names."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


def read_recorded(
    file: str, content: bytes, memory: Memory, *, response: bytes | None = None
) -> RecordedRequest:
    """Read a recorded request, with the bytes of its response if they were kept. Never raises: `error` says
    what cannot be read.
    """
    try:
        sent = _sent(_object(content))
        found = route(sent.method, sent.target, sent.headers)
        # One bad file of thousands must not end the reading of the others.
        with boundary(Refused, "the provider cannot read it"):
            request = _request(found, sent, memory)
    except PolarnodeError as error:
        return RecordedRequest(file=file, route=_find_route(content), error=sentence(error))
    return RecordedRequest(
        file=file,
        route=found,
        request=request,
        key="" if found is None or request is None else request_key(request, found.operation),
        failed=response is not None and not _answered(response),
    )


def _request(found: Route | None, sent: _SentRequest, memory: Memory) -> ModelRequest | None:
    """The request to the model. None if the model is not called (a list of models, a count, a warm-up)."""
    if found is None or found.operation in ("models", "model"):
        return None
    _, _, query = sent.target.partition("?")
    envelope = RequestEnvelope(
        headers=sent.headers,
        model=found.model,
        operation=found.operation,
        stream=found.stream,
        query=query,
        memory=memory,
    )
    request = found.dialect.read(sent.body, envelope)
    return request if request.generate and found.operation != "count_tokens" else None


def _find_route(content: bytes) -> Route | None:
    """The route of a request that was refused, for the report."""
    try:
        sent = _sent(_object(content))
    except Refused:
        return None
    return route(sent.method, sent.target, sent.headers)


def sentence(error: PolarnodeError) -> str:
    """An error's message, preceded by the path of its field where it has one."""
    path = getattr(error, "path", None)
    return f"{path}: {error}" if path else str(error)


def _answered(response: bytes) -> bool:
    """Whether a response is an answer: not empty, and without an error status."""
    head = response[:64].split(None, 2)
    if not head:
        return False
    return not (head[0].startswith(b"HTTP/") and len(head) > 1 and head[1][:1] in (b"4", b"5"))


# ── the file ──────────────────────────────────────────────────────────────────


def _object(content: bytes) -> dict[str, Json]:
    value = read_json(content.removeprefix(b"\xef\xbb\xbf"))
    inner = value.get("request") if isinstance(value, dict) else None
    found = inner if isinstance(inner, dict) else value
    if not isinstance(found, dict):
        raise Refused(
            "this file is no recorded request: it holds an object with method, target, headers and body"
        )
    return found


def _sent(recorded: Mapping[str, Json]) -> _SentRequest:
    target = next((value for name in _TARGETS if isinstance(value := recorded.get(name), str)), None)
    if target is None:
        raise Refused("this file is no recorded request: it names no target")
    method = next((value for name in _METHODS if isinstance(value := recorded.get(name), str)), "POST")
    method, target = _request_line(method, target)
    return _SentRequest(
        method=method.upper(),
        target=_origin_form(target),
        headers=dict(_headers(recorded.get("headers"))),
        body=_body(recorded),
    )


def _request_line(method: str, target: str) -> tuple[str, str]:
    """Parse a request line such as `POST /v1/messages HTTP/1.1`, which recorders store in one field or in
    two.
    """
    words = target.split()
    return (words[0], words[1]) if len(words) > 1 and words[1].startswith("/") else (method, target)


def _origin_form(target: str) -> str:
    """The path and query of a target that may be a whole URL, even one with a malformed host."""
    scheme, found, rest = target.partition("://")
    if not found or "/" in scheme or "?" in scheme:
        return target
    _, slash, path = rest.partition("/")
    return slash + path


def _headers(headers: Json) -> Iterator[tuple[str, str]]:
    """Headers given as an object, a list of pairs, a list of objects with name and value, or lines."""
    match headers:
        case dict():
            yield from ((name.lower(), _word(value)) for name, value in headers.items())
        case list():
            for entry in headers:
                yield from _header(entry)
        case str():
            yield from (_line(line) for line in headers.splitlines() if ":" in line)
        case _:
            return


def _header(entry: Json) -> Iterator[tuple[str, str]]:
    match entry:
        case [str() as name, value, *_]:
            yield name.lower(), _word(value)
        case {"name": str() as name, "value": value}:
            yield name.lower(), _word(value)
        case str() as line if ":" in line:
            yield _line(line)
        case _:
            return


def _line(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()


def _word(value: Json) -> str:
    if isinstance(value, list):
        return ", ".join(map(_word, value))
    return value if isinstance(value, str) else "" if value is None else str(value)


def _body(recorded: Mapping[str, Json]) -> bytes:
    value = next((recorded[name] for name in _BODIES if recorded.get(name) is not None), None)
    match value:
        case None:
            return b""
        case {"text": str() as text}:  # HAR
            return text.encode("utf-8", "surrogatepass")
        case str() as text:
            return _text_body(text)
        case _:
            return dump_json(value)


def _text_body(text: str) -> bytes:
    """A body stored as text: JSON itself, or its base64."""
    if not text.lstrip().startswith(("{", "[")):
        try:
            return b64decode(text, validate=True)
        except (NotBase64, ValueError):
            pass
    return text.encode("utf-8", "surrogatepass")
