"""Pinned certificates: what is no pin, and both clients towards a server that shows the right certificate, and
towards one that shows another.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from attrs import define, field
from quart import Response, request
from quart_trio import QuartTrio
from tls_kit import CertificateAuthority

from polarnode.client import AsyncPolarnodeClient, PolarnodeClient
from polarnode.client.pins import split_pin, trust
from polarnode.client.values import Unreachable
from polarnode.core.errors import ConfigError
from polarnode.http.server import Address, Certificate, open_server

PIN = "0f" * 32


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("https://a:1#0f", "64 hexadecimal digits, not 2 characters"),
        (f"https://a:1#{PIN}0", "not 65 characters"),
        ("https://a:1#" + "g" * 64, "SHA-256"),
        ("https://a:1#", "not 0 characters"),
        (f"http://a:1#{PIN}", "only an https address"),
    ],
)
def test_invalid_pin_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        split_pin(text)
    with pytest.raises(ConfigError, match=words):
        PolarnodeClient(text).status()
    with pytest.raises(ConfigError, match=words):
        AsyncPolarnodeClient(text)


def test_pin_in_openssl_format() -> None:
    printed = ":".join(["0F"] * 32)
    assert split_pin(f" https://a:1#{printed}\n") == ("https://a:1", PIN)
    assert split_pin("http://a:1/") == ("http://a:1/", "")
    assert trust("http://a:1") is None


@define(eq=False)
class Served:
    """A server that counts requests, and the addresses of it with the right pin and another."""

    url: str
    digest: str
    tokens: list[str] = field(factory=list)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Served]:
    # for another name, and over: neither counts where the certificate itself is known
    certificate = Certificate(*CertificateAuthority(folder).issue("elsewhere.invalid", days=-1))
    app = QuartTrio("node")
    found = Served(url="", digest=certificate.digest)

    @app.get("/v1/status")
    async def status() -> Response:
        await trio.lowlevel.checkpoint()
        found.tokens.append(request.headers["Authorization"])
        return Response('{"node": "n"}', 200, content_type="application/json")

    async with open_server(app, Address(host="127.0.0.1", port=0), certificate=certificate) as address:
        found.url = f"https://127.0.0.1:{address.port}"
        yield found


async def asked_every_way(url: str) -> list[object]:
    """The answers, or errors, of the client that blocks, and of the other one under Trio and asyncio."""

    async def ask() -> object:
        async with AsyncPolarnodeClient(url, token="t", patience_s=0) as client:
            return await client.status()

    def blocking() -> object:
        return PolarnodeClient(url, token="t", patience_s=0).status()

    found: list[object] = []
    for act in (
        lambda: trio.to_thread.run_sync(blocking),
        ask,
        lambda: trio.to_thread.run_sync(asyncio.run, ask()),
    ):
        try:
            found.append(await act())
        except (ConfigError, Unreachable) as error:
            found.append(error)
    return found


async def test_only_pinned_certificate_gets_requests(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        assert await asked_every_way(f"{server.url}#{server.digest}") == [{"node": "n"}] * 3
        assert server.tokens == ["Bearer t"] * 3
        for error in await asked_every_way(f"{server.url}#{PIN}"):
            assert isinstance(error, ConfigError)
            assert "shows another certificate than the one that was pinned" in str(error)
            assert server.url in str(error)
        for error in await asked_every_way(server.url):  # an authority that nobody knows
            assert isinstance(error, Unreachable)
            assert "certificate" in str(error).lower()
        assert len(server.tokens) == 3, "no token was sent to a server that was not the right one"
