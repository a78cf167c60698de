"""TLS on a socket: what is spoken, who is turned away before a handshake, and certificates that change."""

import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, Scope
from tls_kit import CertificateAuthority

from polarnode.core.errors import ConfigError
from polarnode.http import places, server
from polarnode.http.asgi import BodyBudget, header_map, read_body
from polarnode.http.places import AddressTries, admit
from polarnode.http.server import Address, Certificate, open_server

ANYWHERE = Address(host="127.0.0.1", port=0)
KEY = {"authorization": "Bearer key"}


async def app(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
    """Admits who has the key; answers the scheme, and the body as it came."""
    assert scope["type"] == "http"
    if header_map(scope["headers"]).get("authorization") == "Bearer key":
        admit(scope)
    with BodyBudget(64 << 20).reserve() as reservation:
        body = await read_body(receive, reservation=reservation, limit=64 << 20)
    assert isinstance(body, bytes)
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"x-scheme", scope["scheme"].encode())]}
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path)


@asynccontextmanager
async def serving(authority: CertificateAuthority) -> AsyncIterator[Address]:
    certificate = Certificate(*authority.issue("127.0.0.1", "node.example"))
    async with open_server(app, ANYWHERE, certificate=certificate) as address:
        yield address


def trusting(authority: CertificateAuthority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.pem))


async def shaken(address: Address, context: ssl.SSLContext) -> "trio.SSLStream[trio.SocketStream]":
    stream = await trio.open_ssl_over_tcp_stream(
        address.host, address.port, ssl_context=context, https_compatible=True
    )
    try:
        await stream.do_handshake()
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return stream


async def cut(stream: Any) -> bytes:
    """What comes until the connection is closed, by a reset too."""
    data = b""
    with trio.fail_after(10), suppress(trio.BrokenResourceError):
        while more := await stream.receive_some():
            data += more
    return data


# ── what is spoken ────────────────────────────────────────────────────────────


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_one_connection_carries_any_size(
    authority: CertificateAuthority, version: ssl.TLSVersion
) -> None:
    """Requests of any size come and go whole over one connection."""
    context = trusting(authority)
    context.minimum_version = context.maximum_version = version
    async with (
        serving(authority) as address,
        httpx.AsyncClient(verify=context, base_url=f"https://127.0.0.1:{address.port}") as client,
    ):
        for size in (0, 1, 70_000, 3 << 20):
            body = os.urandom(size)
            answer = await client.post("/", content=body, headers={"connection": "keep-alive"})
            assert (answer.content, answer.headers["x-scheme"]) == (body, "https")
        last = await client.post("/", content=b"x" * 99_999, headers={"connection": "close"})
        assert len(last.content) == 99_999


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_old_tls_and_http2_are_refused(authority: CertificateAuthority) -> None:
    """Older versions, other names and HTTP/2 are not spoken."""
    async with serving(authority) as address:
        old = trusting(authority)
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises(trio.BrokenResourceError):
            await shaken(address, old)
        both = trusting(authority)
        both.set_alpn_protocols(["h2", "http/1.1"])
        async with await shaken(address, both) as stream:
            assert stream.selected_alpn_protocol() == "http/1.1"
        with pytest.raises(trio.BrokenResourceError) as caught:
            await shaken(address, ssl.create_default_context())
        assert "CERTIFICATE_VERIFY_FAILED" in str(caught.value.__cause__)


async def test_plain_http_gets_tls_hint(authority: CertificateAuthority) -> None:
    async with serving(authority) as address:
        stream = await trio.open_tcp_stream(address.host, address.port)
        async with stream:
            await stream.send_all(
                b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n\r\n"
            )
            data = await cut(stream)
    assert data.startswith(b"HTTP/1.1 400 ")
    assert b"https://" in data
    assert b"end its capture" in data


# ── strangers ─────────────────────────────────────────────────────────────────


async def test_slow_handshake_ends(authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.2)
    async with serving(authority) as address:
        silent = await trio.open_tcp_stream(address.host, address.port)
        half = await trio.open_tcp_stream(address.host, address.port)
        async with silent, half:
            await half.send_all(b"\x16\x03\x01\x02\x00\x01")  # a record begins
            assert await cut(silent) == await cut(half) == b""


async def test_keyless_handshakes_use_up_tries(
    authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handshakes without a key use up their address's tries, and a key gives one back."""
    monkeypatch.setattr(places, "TRIES", 4)
    monkeypatch.setattr(places, "TRIES_PER_S", 0.0)
    context = trusting(authority)

    async def asked(headers: "dict[str, str]", source: str = "127.0.0.1") -> bool:
        transport = httpx.AsyncHTTPTransport(verify=context, local_address=source)
        async with httpx.AsyncClient(transport=transport) as client:
            try:
                return (await client.get(f"https://127.0.0.1:{address.port}", headers=headers)).is_success
            except httpx.TransportError:
                return False

    async with serving(authority) as address:
        assert [await asked(KEY) for _ in range(9)] == [True] * 9, "keys are free"
        kept = httpx.AsyncClient(verify=context, headers=KEY, base_url=f"https://127.0.0.1:{address.port}")
        async with kept:
            assert (await kept.get("/")).is_success
            strangers = [await asked({"x-forwarded-for": f"10.0.0.{number}"}) for number in range(6)]
            assert strangers == [True] * 4 + [False] * 2
            assert not await asked(KEY), "nobody is heard before the handshake"
            assert (await kept.get("/")).is_success, "but a connection that has shown its key is served"
        assert await asked({}, "127.0.0.2"), "another address"


def test_tries_return_up_to_limit() -> None:
    tries = AddressTries()
    assert [tries.take("a", 0.0) for _ in range(places.TRIES + 1)] == [True] * places.TRIES + [False]
    assert [tries.take("a", 0.1) for _ in range(3)] == [True, True, False]
    assert tries.take("b", 0.1)
    assert sum(tries.take("a", 1e6) for _ in range(2 * places.TRIES)) == places.TRIES
    for number in range(2 * places.MAX_ADDRESSES):
        tries.take(str(number), 1e6)
    assert len(tries._left) == places.MAX_ADDRESSES


async def test_ipv6_networks_are_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    class Socket:
        def getpeername(self) -> Any:
            return ("2001:db8:1:2:3::9%eth0", 1, 0, 0)

    class Stream:
        socket = Socket()

    assert server._peer_address(Stream()) == "2001:db8:1:2::/64"  # type: ignore[arg-type]


# ── certificates ──────────────────────────────────────────────────────────────


async def test_changed_certificate_is_reloaded(
    authority: CertificateAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    chain, key = authority.issue("127.0.0.1")
    certificate = Certificate(chain, key)

    async def names() -> Any:
        async with await shaken(address, trusting(authority)) as stream:
            return [value for _, value in stream.getpeercert()["subjectAltName"]]

    async with open_server(app, ANYWHERE, certificate=certificate) as address:
        await certificate.renew()
        assert not caplog.text, "nothing changed"
        await trio.Path(key).write_text("half a file")
        await certificate.renew()
        assert "the certificate in use stays" in caplog.text
        assert await names() == ["127.0.0.1"]
        authority.issue("127.0.0.1", "renewed.example")
        await certificate.renew()
        assert await names() == ["127.0.0.1", "renewed.example"]


def test_invalid_certificate_files_are_named(authority: CertificateAuthority, tmp_path: Path) -> None:
    chain, key = authority.issue("a.example")
    _, other = authority.issue("a.example", label="other")
    _, locked = authority.issue("a.example", passphrase="secret", label="locked")
    text = tmp_path / "text"
    text.write_text("hello")
    for files, words in (
        ((str(tmp_path / "none"), key), r"capture_tls_cert .*none cannot be read: .*No such file"),
        ((chain, str(tmp_path / "none")), r"capture_tls_key .*none cannot be read"),
        ((chain, other), "KEY_VALUES_MISMATCH.*chain"),
        ((chain, locked), "without a passphrase"),
        ((str(text), key), "PEM"),
    ):
        with pytest.raises(ConfigError, match=words):
            Certificate(*files)
