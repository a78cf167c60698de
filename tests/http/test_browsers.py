"""What web pages of other origins make a browser send is refused; programs and the server's own pages pass."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from quart import Response, request
from quart_trio import QuartTrio

from polarnode.http.asgi import BrowserGuard, guard_browsers
from polarnode.http.server import Address, open_server

LOOPBACK = BrowserGuard(bound="127.0.0.1")


def refused(
    guard: BrowserGuard, host: str | None, origin: str | None = None, site: str | None = None
) -> bool:
    return guard.refusal(host=host, origin=origin, site=site) is not None


@pytest.mark.parametrize(
    "host",
    [None, "", "127.0.0.1", "127.0.0.1:8080", "127.8.9.1:1", "localhost", "LocalHost:9000", "localhost.:80",
     "node.localhost:8080", "[::1]", "[::1]:8080", "[::ffff:127.0.0.1]:1"],
)  # fmt: skip
def test_loopback_name_allows_any_port(host: str | None) -> None:
    assert not refused(LOOPBACK, host)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "notlocalhost",
     "10.0.0.5", "0.0.0.0:8080", "[::]", "[fe80::1]:80", "127.0.0.1:80:80", "127.0.0.1@evil.example", "a b",
     "evil.example#127.0.0.1", "[::1", "2130706433", "192.168.0.1:8080", ":8080", "/"],
)  # fmt: skip
def test_other_name_is_refused_with_remedy(host: str) -> None:
    sentence = LOOPBACK.refusal(host=host, origin=None, site=None)
    assert sentence is not None
    assert "allowed_hosts" in sentence


def test_bound_address_and_allowed_names() -> None:
    guard = BrowserGuard(bound="10.0.0.5", allowed=("node.example", "*.pool.example"))
    for host in ("10.0.0.5:8080", "node.example", "NODE.example:443", "a.pool.example", "127.0.0.1"):
        assert not refused(guard, host), host
    for host in ("10.0.0.6", "pool.example", "xnode.example", "node.example.evil.example", "apool.example"):
        assert refused(guard, host), host
    assert not refused(BrowserGuard(bound="gpu-7"), "gpu-7:8080")


def test_wildcard_bind_serves_addresses_only() -> None:
    """A page that rebinds a name sends the name."""
    for bound in ("0.0.0.0", "::"):
        assert not refused(BrowserGuard(bound=bound), "10.1.2.3:11000")
        assert refused(BrowserGuard(bound=bound), "evil.example:11000")


def test_token_allows_hosts_not_origins() -> None:
    """With a token any host is served, but no page of another origin."""
    guard = BrowserGuard(any_host=True)
    assert not refused(guard, "proxy.example")
    assert not refused(guard, "proxy.example", "https://proxy.example", "same-origin")
    assert refused(guard, "proxy.example", "https://evil.example")


@pytest.mark.parametrize(
    ("host", "origin"),
    [("127.0.0.1:8080", "null"), ("127.0.0.1:8080", "http://evil.example"), ("127.0.0.1:8080", ""),
     ("127.0.0.1:8080", "http://127.0.0.1:3000"), ("127.0.0.1:8080", "http://localhost:8080"),
     ("127.0.0.1:8080", "http://127.0.0.1:8080.evil.example"), ("localhost", "file://localhost"),
     ("127.0.0.1:8080", "chrome-extension://127.0.0.1:8080"), (None, "http://127.0.0.1:8080")],
)  # fmt: skip
def test_another_origin_is_refused(host: str | None, origin: str) -> None:
    assert refused(LOOPBACK, host, origin)
    assert refused(LOOPBACK, host, origin, "same-origin")


def test_own_pages_pass_tunnel_and_proxy() -> None:
    assert not refused(LOOPBACK, "localhost:9000", "http://localhost:9000", "same-origin")
    assert not refused(LOOPBACK, "[::1]:8080", "http://[::1]:8080")
    assert not refused(LOOPBACK, "127.0.0.1:8080", None, "none"), "typed by the user"
    proxied = BrowserGuard(allowed=("node.example",))
    assert not refused(proxied, "127.0.0.1:8080", "https://node.example", "same-origin")


@pytest.mark.parametrize("site", ["cross-site", "same-site", "elsewhere"])
def test_another_site_is_refused(site: str) -> None:
    assert refused(LOOPBACK, "127.0.0.1:8080", None, site)
    assert refused(LOOPBACK, "127.0.0.1:8080", "http://127.0.0.1:8080", site)


# ── in front of an app ────────────────────────────────────────────────────────


def guarded() -> QuartTrio:
    app = QuartTrio("tests", static_folder=None)
    guard_browsers(app, LOOPBACK, open_to_all=True)

    @app.route("/", methods=["GET", "POST", "DELETE"])
    async def root() -> dict[str, Any]:
        return {"body": (await request.get_data()).decode()}

    return app


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("method", "headers", "body", "status"),
    [
        ("GET", {}, b"", 200),
        ("GET", {"Host": "evil.example"}, b"", 403),
        ("GET", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, b"", 403),
        ("GET", {"Content-Type": "text/plain"}, b"", 200),
        ("POST", {}, b"", 200),
        ("POST", {}, b"{}", 200),
        ("POST", {"Content-Type": "application/json; charset=utf-8"}, b"{}", 200),
        ("POST", {"Content-Type": "application/merge-patch+json"}, b"{}", 200),
        ("POST", {"Content-Type": "text/plain"}, b"{}", 415),
        ("POST", {"Content-Type": FORM}, b"", 415),
        ("POST", {"Content-Type": "multipart/form-data; boundary=x"}, b"--x--", 415),
        ("POST", {"Content-Type": "text/plain, application/json"}, b"{}", 415),
        ("DELETE", {"Content-Type": FORM}, b"a=1", 415),
        ("POST", {"Origin": "http://evil.example"}, b"", 403),
        ("POST", {"Origin": "null", "Content-Type": "text/plain"}, b"{}", 403),
        ("DELETE", {"Origin": "http://evil.example"}, b"", 403),
    ],
)
async def test_unpreflighted_requests_are_refused(
    method: str, headers: dict[str, str], body: bytes, status: int
) -> None:
    async with (
        open_server(guarded(), Address(host="127.0.0.1", port=0)) as address,
        httpx.AsyncClient() as client,
    ):
        url = f"http://127.0.0.1:{address.port}/"
        answer = await client.request(method, url, headers=headers, content=body or None)
    assert answer.status_code == status
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(("path", "status"), [("/none", 404), ("/broken", 500), ("/stream", 200)])
async def test_no_content_type_is_guessed(path: str, status: int) -> None:
    app = guarded()

    @app.route("/broken")
    async def broken() -> str:
        raise KeyError("a bug")

    @app.route("/stream")
    async def stream() -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"<script>"

        return Response(pieces(), content_type="text/plain")

    async with (
        open_server(app, Address(host="127.0.0.1", port=0)) as address,
        httpx.AsyncClient() as client,
    ):
        answer = await client.get(f"http://127.0.0.1:{address.port}{path}")
    assert (answer.status_code, answer.headers["X-Content-Type-Options"]) == (status, "nosniff")
