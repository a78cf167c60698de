"""What a client in a container asks of the proxy: a tunnel, a plain request to hand on, or something that is refused.

Pure: h11's events in, a value out. The proxy never hands on bytes it did not parse: a request is read whole-heartedly or refused, and what
goes out is written anew from what was read, so that no two programs can take it for different requests. Rule for whoever edits it: a header
is dropped unless it is the end points' own business.
"""

import re

import h11
from attrs import frozen

from polarnode.shell.egress.rules import EgressRules, spelled

HTTP_PORT = 80
CONNECT = re.compile(r"([^\s:@/?#\[\]]+):(\d{1,5})")
ABSOLUTE = re.compile(r"http://([^/?#]*)([^#]*)", re.IGNORECASE)
AUTHORITY = re.compile(r"([^\s:@/?#\[\]]+)(?::(\d{1,5}))?")

# A connection's own headers (RFC 9110, 7.6.1), the proxy's, and what the proxy answers itself.
OUR_OWN = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade expect host".split()
)

Headers = tuple[tuple[bytes, bytes], ...]


@frozen(kw_only=True)
class Denial:
    """An answer of the proxy's own: `host` is what was asked for, as it was spelled."""

    status: int
    text: str
    host: str = ""


@frozen(kw_only=True)
class Tunnel:
    """Bytes both ways, untouched: what is said in TLS is not ours to read."""

    host: str
    port: int


@frozen(kw_only=True)
class Forward:
    """A plain request, and what is asked of its server."""

    host: str
    port: int
    request: h11.Request


Asked = Tunnel | Forward | Denial


def read(request: h11.Request, rules: EgressRules) -> Asked:
    """What is asked, if the rules allow it."""
    asked = _tunnel(request) if request.method == b"CONNECT" else _forward(request)
    if isinstance(asked, Denial):
        return asked
    refusal = rules.refusal(asked.host, asked.port)
    return asked if refusal is None else Denial(status=403, text=refusal, host=asked.host)


def _tunnel(request: h11.Request) -> Tunnel | Denial:
    target = request.target.decode("ascii")
    found = CONNECT.fullmatch(target)
    if found is None:
        return _malformed(f"{target[:300]!r} can not be connected to: ask for NAME:PORT, by name and not by address", status=403)
    if _framing(request):
        return _malformed("a CONNECT has no body")
    return Tunnel(host=spelled(found[1]), port=int(found[2]))


def _forward(request: h11.Request) -> Forward | Denial:
    target = request.target.decode("ascii")
    found = ABSOLUTE.fullmatch(target)
    if found is None:
        return _malformed(f"this is a proxy: ask it for http://NAME/PATH, or to CONNECT for anything else, not for {target[:300]!r}")
    authority = AUTHORITY.fullmatch(found[1])
    if authority is None:
        return _malformed(f"{found[1][:300]!r} can not be connected to: ask for NAME or NAME:PORT, by name and not by address", status=403)
    host, port = spelled(authority[1]), int(authority[2] or HTTP_PORT)
    fault = _host_fault(request, host, port) or _framing_fault(request)
    if fault is not None:
        return _malformed(fault)
    return Forward(host=host, port=port, request=_anew(request, host, port, found[2]))


def _host_fault(request: h11.Request, host: str, port: int) -> str | None:
    """A Host that is not the target's: a server that goes by it would serve another site than the one that was allowed."""
    for value in _values(request, b"host"):
        told = value.decode("latin1")
        found = AUTHORITY.fullmatch(told)
        if found is None or (spelled(found[1]), int(found[2] or HTTP_PORT)) != (host, port):
            return f"the header Host, {told[:300]!r}, is not the host of the request's target: make them the same"
    return None


def _framing_fault(request: h11.Request) -> str | None:
    """Two lengths of one body are two requests to somebody."""
    return "a body has either a Content-Length or a Transfer-Encoding, not both" if len(_framing(request)) > 1 else None


def _framing(request: h11.Request) -> list[bytes]:
    return [name for name, _ in request.headers if name in (b"content-length", b"transfer-encoding")]


def _anew(request: h11.Request, host: str, port: int, rest: str) -> h11.Request:
    """The request as its server gets it: one on a connection, which is closed after it."""
    authority = host if port == HTTP_PORT else f"{host}:{port}"
    chunked = [(b"Transfer-Encoding", b"chunked")] if b"transfer-encoding" in _framing(request) else []
    headers = [(b"Host", authority.encode()), *end_to_end(request), *chunked, (b"Connection", b"close")]
    path = rest if rest.startswith("/") else f"/{rest}"
    return h11.Request(method=request.method, target=path.encode(), headers=headers)


def end_to_end(message: h11.Request | h11.Response) -> Headers:
    """A message's headers but for those of its connection, and those the connection's own header names. How long a body is stays said."""
    named = {name.strip().lower() for value in _values(message, b"connection") for name in value.split(b",")} - {b"content-length"}
    dropped = OUR_OWN | named
    return tuple((name, value) for name, value in message.headers.raw_items() if name.lower() not in dropped)  # spelled as they came


def _values(message: h11.Request | h11.Response, wanted: bytes) -> list[bytes]:
    return [value for name, value in message.headers if name == wanted]


def _malformed(text: str, *, status: int = 400) -> Denial:
    return Denial(status=status, text=text)
