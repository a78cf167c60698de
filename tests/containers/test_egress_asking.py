"""Whatever a container sends, what goes out is one request, of a method and headers that were understood, for
the host that was allowed.
"""

import h11
from hypothesis import example, given
from hypothesis import strategies as st

from polarnode.containers.egress.requests import (
    HOP_HEADERS,
    Forward,
    ProxyDenial,
    TunnelRequest,
    end_to_end,
    read,
)
from polarnode.containers.egress.rules import EgressRules

RULES = EgressRules(names=("site.example", "*.wild.example"))
HOSTS = st.sampled_from(
    [
        "site.example",
        "SITE.example.",
        "a.wild.example",
        "other.example",
        "127.0.0.1",
        "[::1]",
        "site.example@other.example",
        "site.example#",
    ]
)
PORTS = st.sampled_from(["", ":80", ":443", ":0080", ":22", ":99999", ":", ":+80", ":８０"])
PATHS = st.sampled_from(
    [
        "",
        "/",
        "/a b",
        "/a?b#c",
        "?q",
        "/%2e%2e/",
        "//other.example/",
        "/\r\nHost: other.example",
        "\\@other.example/",
        ";x",
        "/é",
    ]
)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "Host",
                "Content-Length",
                "Transfer-Encoding",
                "Connection",
                "X-A",
                "Upgrade",
                "Proxy-Authorization",
                "TE",
                "Expect",
                "x a",
                "X-A ",
            ]
        ),
        st.sampled_from(
            [
                "site.example",
                "other.example",
                "3",
                "0",
                "chunked",
                "identity",
                "chunked, gzip",
                "close",
                "host, x-a, content-length",
                "a\r\nb: c",
                "h2c",
                "",
            ]
        ),
    ),
    max_size=5,
)


@given(
    st.sampled_from(["GET", "POST", "CONNECT", "OPTIONS", "get"]),
    st.sampled_from(["http://", "HTTP://", "https://", "", "http:", "//"]),
    HOSTS,
    PORTS,
    PATHS,
    HEADERS,
)
@example(
    "POST",
    "http://",
    "site.example",
    "",
    "/",
    [("Host", "site.example"), ("Connection", "content-length"), ("Content-Length", "3")],
)
def test_egress_sends_one_allowed_request(
    method: str, scheme: str, host: str, port: str, path: str, headers: list[tuple[str, str]]
) -> None:
    """What goes out is one request for the host that was allowed."""
    lines = [
        f"{method} {scheme}{host}{port}{path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in headers),
        "",
        "",
    ]
    request = received("\r\n".join(lines).encode())
    parsed = read(request, RULES) if request is not None else None
    if isinstance(parsed, TunnelRequest):
        assert RULES.refusal(parsed.host, parsed.port) is None
    if isinstance(parsed, Forward):
        assert RULES.refusal(parsed.host, parsed.port) is None
        sent = h11.Connection(h11.CLIENT).send(parsed.request)
        again = received(sent or b"")
        assert again is not None
        found = dict(again.headers)
        assert found[b"host"].decode() == parsed.host + ("" if parsed.port == 80 else f":{parsed.port}")
        names = [name for name, _ in again.headers]
        assert all(names.count(name) == 1 for name in (b"host", b"connection"))
        assert again.target.startswith(b"/")
        assert found[b"connection"] == b"close"
        assert not {b"content-length", b"transfer-encoding"} <= found.keys()
        assert not found.keys() & {b"upgrade", b"proxy-authorization", b"te", b"expect"}
        assert (sent or b"").count(b" HTTP/1.1\r\n") == 1


def received(data: bytes) -> h11.Request | None:
    """As a server of HTTP reads it; None where it is none."""
    http = h11.Connection(h11.SERVER)
    try:
        http.receive_data(data)
        event = http.next_event()
    except h11.RemoteProtocolError:
        return None
    return event if isinstance(event, h11.Request) else None


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    request = received(data + b"\r\n\r\n")
    if request is not None:
        assert isinstance(read(request, RULES), ProxyDenial | TunnelRequest | Forward)


def test_connection_headers_are_not_forwarded() -> None:
    names = [b"Connection", b"Keep-Alive", b"Proxy-Authenticate", b"TE", b"Trailer", b"Upgrade", b"X-Named"]
    headers = [(name, b"x-named") for name in names] + [
        (b"Set-Cookie", b"a=1"),
        (b"Set-Cookie", b"b=2"),
        (b"ETag", b"x"),
    ]
    answer = h11.Response(status_code=200, headers=headers)
    assert end_to_end(answer) == ((b"Set-Cookie", b"a=1"), (b"Set-Cookie", b"b=2"), (b"ETag", b"x"))
    assert b"transfer-encoding" in HOP_HEADERS
