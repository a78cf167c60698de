"""A link to a node: whole answers, streams, and the certificate that is pinned before anything is sent."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import pytest
import trio
from quart import Response, request
from quart_trio import QuartTrio
from tls_kit import CertificateAuthority

from polarnode.client.values import ClientError, Unreachable
from polarnode.http.link import Link, NotListening
from polarnode.http.server import Address, Certificate, open_server


def app() -> QuartTrio:
    made = QuartTrio("node")

    @made.post("/echo")
    async def echo() -> Response:
        sent = {"body": await request.get_json(), "token": request.headers.get("Authorization")}
        return Response(str(sent).replace("'", '"'), 200, content_type="application/json")

    @made.get("/busy")
    async def busy() -> Response:
        await trio.lowlevel.checkpoint()
        body = '{"error": {"type": "busy", "message": "full"}}'
        return Response(body, 429, {"Retry-After": "7"}, content_type="application/json")

    @made.get("/stream")
    async def stream() -> Response:
        await trio.lowlevel.checkpoint()

        async def pieces() -> AsyncIterator[bytes]:
            yield b"one"
            await trio.sleep(0.05)
            yield b"two"
            await trio.sleep_forever()

        return Response(pieces(), 200)

    return made


@asynccontextmanager
async def linked(certificate: Certificate | None = None, pin: str = "") -> AsyncIterator[Link]:
    async with open_server(app(), Address(host="127.0.0.1", port=0), certificate=certificate) as address:
        scheme = "http" if certificate is None else "https"
        link = Link(url=f"{scheme}://127.0.0.1:{address.port}", token="t", certificate=pin)
        try:
            yield link
        finally:
            await link.close()  # noqa: ASYNC102 - bounded and shielded there


async def test_answers_are_whole_including_errors() -> None:
    async with linked() as link:
        assert await link.call("POST", "/echo", value={"a": 1}) == {"body": {"a": 1}, "token": "Bearer t"}
        answer = await link.ask("GET", "/busy")
        assert (answer.status, answer.error.retry_after) == (429, 7.0)
        with pytest.raises(ClientError, match="full"):
            await link.call("GET", "/busy")


async def test_stream_is_incremental_and_can_close() -> None:
    async with linked() as link:
        async with link.stream("/stream") as pieces:
            assert [await anext(pieces), await anext(pieces)] == [b"one", b"two"]
        async with link.stream("/stream", silence_s=0.3) as pieces:
            with pytest.raises(Unreachable, match="does not answer"):
                async for _ in pieces:
                    pass


async def test_refused_connection_is_distinguished() -> None:
    link = Link(url="http://127.0.0.1:9")
    with pytest.raises(NotListening):
        await link.ask("GET", "/")
    await link.close()


async def test_only_pinned_certificate_is_trusted(tmp_path: Path) -> None:
    chain, key = CertificateAuthority(tmp_path).issue("elsewhere.invalid")
    pin = sha256(ssl.PEM_cert_to_DER_cert(await trio.Path(chain).read_text())).hexdigest()
    served = Certificate(chain, key)
    async with linked(served, pin) as link:
        assert (await link.ask("GET", "/busy")).status == 429
    async with linked(served, "00" * 32) as link:
        with pytest.raises(Unreachable, match="another certificate than the one that was pinned"):
            await link.ask("GET", "/busy")
    async with linked(served) as link:
        with pytest.raises(Unreachable, match="certificate verify failed"):
            await link.ask("GET", "/busy")
