"""Captures that other machines reach: nothing is answered without a key, and a flood of wrong ones is cheap."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import trio
from captures_kit import Desk, Told, in_thread, open_capture_node
from fakes_engine import ScriptedEngine
from plane_kit import CONTEXT, answers
from tls_kit import CertificateAuthority

from polarnode.http import asgi, places
from polarnode.http.server import Certificate
from polarnode.journal import queries

CHAT: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    engine = ScriptedEngine(reply=answers("Bread.", "Loaf."), vocab_size=4096, context_length=CONTEXT)
    certificate = Certificate(*CertificateAuthority(tmp_path).issue("127.0.0.1"))
    async with open_capture_node(tmp_path, engine, certificate=certificate) as opened:
        yield opened


@asynccontextmanager
async def agent(folder: Path, source: str = "127.0.0.1") -> AsyncIterator[httpx.AsyncClient]:
    """A client of its own address that trusts the authority."""
    context = ssl.create_default_context(cafile=str(folder / "authority.pem"))
    transport = httpx.AsyncHTTPTransport(verify=context, local_address=source)
    async with httpx.AsyncClient(transport=transport) as client:
        yield client


def bearer(key: str) -> "dict[str, str]":
    return {"Authorization": f"Bearer {key}"}


async def test_sdks_use_public_address_from_environment(desk: Desk, tmp_path: Path) -> None:
    """The SDKs take the public address and the authority from the environment."""
    opened = await desk.open()
    assert opened["env"]["OPENAI_BASE_URL"].startswith("https://127.0.0.1:")
    assert {url[:8] for url in opened["base_urls"].values()} == {"https://"}
    told = Told({**opened["env"], "SSL_CERT_FILE": str(tmp_path / "authority.pem")})
    assert [await in_thread(told.chat), await in_thread(told.messages)] == ["Bread.", "Loaf."]
    async with agent(tmp_path) as client:  # the key in the path alone
        url = f"{opened['base_urls']['any']}/v1/chat/completions"
        assert (await client.post(url, json=CHAT)).is_success
    assert (await desk.end(opened["session_id"], reward=1))["turns"] == 3


async def test_tls_and_loopback_give_same_trajectory(tmp_path: Path) -> None:
    found = []
    for name, secure in (("tls", True), ("plain", False)):
        folder = tmp_path / name
        await trio.Path(folder).mkdir()
        authority = CertificateAuthority(folder)
        certificate = Certificate(*authority.issue("127.0.0.1")) if secure else None
        engine = ScriptedEngine(reply=answers("Bread.", "Loaf."), vocab_size=4096, context_length=CONTEXT)
        async with open_capture_node(folder, engine, certificate=certificate) as desk:
            opened = await desk.open(task_id="t")
            told = Told({**opened["env"], "SSL_CERT_FILE": str(authority.pem)})
            assert [await in_thread(told.chat), await in_thread(told.messages)] == ["Bread.", "Loaf."]
            await desk.end(opened["session_id"], reward=1)
            kept = await desk.journal.reader.query(queries.trajectory, opened["session_id"])
            assert kept is not None
            rows = [
                (trace.token_ids.tolist(), list(trace.loss_mask), trace.logprobs.tolist(), trace.reward)
                for trace in kept.traces
            ]
            turns = [(turn.provider, turn.parent, turn.role, turn.new_messages) for turn in kept.turns]
            found.append((rows, turns, kept.outcome))
    assert found[0] == found[1]


async def test_closed_captures_answer_alike(desk: Desk, tmp_path: Path) -> None:
    """Without the key of an open capture every route answers the same."""
    opened, over = await desk.open(), await desk.open()
    await desk.end(over["session_id"])
    base = opened["base_urls"]["anthropic"]
    async with agent(tmp_path) as client:
        said = set()
        for headers in ({}, bearer("sk-polarnode-guessed"), bearer(over["key"]), bearer(over["session_id"])):
            for method, path in (
                ("GET", "/"),
                ("GET", "/v1/models"),
                ("GET", "/v1/status"),
                ("POST", "/v1/chat/completions"),
                ("DELETE", f"/v1/capture/{opened['session_id']}"),
            ):
                answer = await client.request(method, f"{base}{path}", headers=headers)
                said.add((answer.status_code, answer.text))
        assert len(said) == 1
        assert said.pop()[0] == 401
        inside = [
            await client.get(f"{base}{path}", headers=bearer(opened["key"]))
            for path in ("/", "/v1/models", "/x")
        ]
        assert [each.status_code for each in inside] == [200, 200, 404]
        anthropic = await client.post(f"{base}/v1/messages", json=CHAT)
        assert anthropic.json()["error"]["type"] == "authentication_error"
        page = bearer(opened["key"]) | {"Origin": "https://evil.example"}
        assert (await client.post(f"{base}/v1/chat/completions", json=CHAT, headers=page)).status_code == 403
    folder = trio.Path(tmp_path, "requests")
    assert [each.name for each in await folder.iterdir()] == [opened["session_id"]], (
        "a stranger's is not kept"
    )


async def test_wrong_keys_counted_by_address(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(places, "TRIES", 5)
    monkeypatch.setattr(places, "TRIES_PER_S", 0.0)
    opened = await desk.open()
    url = f"{opened['base_urls']['openai']}/chat/completions"

    async def ask(client: httpx.AsyncClient, key: str, **headers: str) -> httpx.Response:
        return await client.post(url, json=CHAT, headers=bearer(key) | headers)

    async with agent(tmp_path) as client, agent(tmp_path, "127.0.0.2") as sibling, agent(tmp_path) as same:
        assert [(await ask(each, opened["key"])).status_code for each in (sibling, same)] == [200, 200]
        spoofed = [
            await ask(client, f"sk-{number}", **{"X-Forwarded-For": f"9.9.9.{number}"}) for number in range(5)
        ]
        assert [each.status_code for each in spoofed] == [401, 401, 401, 401, 429]
        assert (spoofed[-1].headers["connection"], "retry-after" in spoofed[-1].headers) == ("close", True)
        with pytest.raises(httpx.TransportError):
            await ask(client, "sk-5")
        assert [(await ask(each, opened["key"])).status_code for each in (sibling, same)] == [200, 200]
    assert not any(word in caplog.text for word in ("sk-", opened["key"]))


async def test_connections_per_key_are_limited(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "MAX_KEY_CONNECTIONS", 2)
    one, two = await desk.open(), await desk.open()
    url = f"{one['base_urls']['openai']}/models"
    async with agent(tmp_path) as first, agent(tmp_path) as second, agent(tmp_path) as third:
        statuses = [(await each.get(url, headers=bearer(one["key"]))).status_code for each in (first, second)]
        refused = await third.get(url, headers=bearer(one["key"]))
        assert [*statuses, refused.status_code] == [200, 200, 429]
        assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
        assert (await third.get(url, headers=bearer(two["key"]))).status_code == 200
        await second.aclose()
        async with agent(tmp_path) as fourth:
            assert (await fourth.get(url, headers=bearer(one["key"]))).status_code == 200


async def test_strangers_body_is_not_read(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's long or slow body is not read to its end."""
    monkeypatch.setattr(asgi, "MAX_DRAIN_S", 0.2)
    address = urlsplit((await desk.open())["base_urls"]["openai"])
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n"
    context = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
    for body, chunks in ((b"x" * 65536, 999), (b"", 1)):
        stream = await trio.open_ssl_over_tcp_stream(
            address.hostname or "", address.port or 0, ssl_context=context, https_compatible=True
        )
        sent, answer = 0, b""
        async with stream:
            with trio.fail_after(10):
                try:
                    await stream.send_all(head)
                    for _ in range(chunks):
                        await stream.send_all(body)
                        sent += len(body)
                    while more := await stream.receive_some():
                        answer += more
                except trio.BrokenResourceError:
                    pass  # it was still sending when the connection was closed
        assert sent < 32 << 20
        assert body or b" 401 " in answer[:20]
