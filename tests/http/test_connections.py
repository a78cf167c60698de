"""Connections that cost a node something: silent, slow, malformed, or of another protocol. Over raw sockets."""

import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import trio
import trio.testing
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, Scope

from polarnode.http import connections, server
from polarnode.http.asgi import BodyBudget, header_map, read_body
from polarnode.http.connections import DirectApp, ResponseWriter
from polarnode.http.places import ConnectionSlots, Place, admit, slot_of
from polarnode.http.server import Address, open_server

ANYWHERE = Address(host="127.0.0.1", port=0)
KEY = b"Authorization: Bearer key\r\n"
GET = b"GET /%b HTTP/1.1\r\nHost: node\r\n%b\r\n"


async def app(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
    """Admits who has the key, reads the body, answers its length; `/wait` answers never, `/stream` is one."""
    assert scope["type"] == "http"
    if header_map(scope["headers"]).get("authorization") == "Bearer key":
        admit(scope)
    with BodyBudget(64 << 20).reserve() as reservation:
        body = await read_body(receive, reservation=reservation, limit=64 << 20)
    if scope["path"] == "/wait":
        await trio.sleep_forever()
    place = slot_of(scope)
    assert place is not None
    streamed = scope["path"] == "/stream" and place.open_stream()
    status = 200 if streamed or scope["path"] != "/stream" else 429
    text = str(len(body)).encode() if isinstance(body, bytes) else b"none"
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(text))]}
    )
    if streamed:
        await trio.sleep_forever()
    await send({"type": "http.response.body", "body": text, "more_body": False})


@asynccontextmanager
async def connected(address: Address) -> AsyncIterator[trio.SocketStream]:
    async with await trio.open_tcp_stream(address.host, address.port) as stream:
        yield stream


async def read_all(stream: trio.SocketStream) -> bytes:
    """What comes until the server closes; a reset closes too."""
    data = b""
    try:
        while more := await stream.receive_some():
            data += more
    except trio.BrokenResourceError:
        pass
    return data


async def answer(stream: trio.SocketStream, request: bytes) -> bytes:
    """The answer to a request, by its content-length."""
    await stream.send_all(request)
    data = b""
    while True:
        head, end, body = data.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        if end and len(body) >= int(length or b"0"):
            return data
        more = await stream.receive_some()
        if not more:
            return data
        data += more


async def cut(sent: bytes) -> bytes:
    """All that a server answers to these bytes before it closes the connection."""
    async with open_server(app, ANYWHERE) as address, connected(address) as stream:
        with trio.fail_after(10):
            await stream.send_all(sent)
            return await read_all(stream)


def refusal(data: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


# ── places, without sockets ───────────────────────────────────────────────────


def full(limit: int = 4, peer: str = "a") -> tuple[ConnectionSlots, list[Place], list[Place]]:
    """All places taken; the closed ones are in the last list."""
    places, closed = ConnectionSlots(limit=limit), list[Place]()
    taken = [take(places, peer, number, closed) for number in range(limit)]
    return places, taken, closed


def take(places: ConnectionSlots, peer: str, now: float, closed: list[Place]) -> Place:
    holder: list[Place] = []
    place, displaced = places.take(peer, lambda: closed.append(holder[0]), now)
    assert place is not None
    holder.append(place)
    assert displaced is None or displaced is closed[-1]
    return place


def test_oldest_stranger_leaves_first() -> None:
    places, taken, closed = full()
    taken[0].admitted = True
    taken[1].busy = True
    take(places, "a", 9, closed)
    take(places, "a", 9, closed)
    assert closed == [taken[1], taken[2]]


def test_peer_with_most_strangers_loses() -> None:
    places, taken, closed = full(limit=3, peer="trainer")
    places.leave(taken[1])
    places.leave(taken[2])
    for _ in range(9):
        take(places, "flood", 5, closed)
    assert len(closed) == 7
    assert taken[0] not in closed


def test_longest_idle_admitted_leaves_first() -> None:
    """Of those let in the longest idle leaves, and none at work."""
    places, taken, closed = full()
    for number, place in enumerate(taken):
        place.admitted = place.busy = True
        place.rest(10 - number)
    taken[3].busy = True
    take(places, "a", 20, closed).admitted = True
    assert closed == [taken[2]]
    for place in taken:
        place.busy = True
    places, taken, closed = full()
    for place in taken:
        place.admitted = place.busy = True
    assert places.take("a", lambda: None, 9) == (None, None)


def test_streams_leave_room_for_others() -> None:
    _, taken, _ = full()
    assert [place.open_stream() for place in taken] == [True, True, True, False]
    assert taken[0].open_stream(), "the one it has"
    taken[0].rest(1)
    assert taken[3].open_stream()


# ── a full socket ─────────────────────────────────────────────────────────────


async def test_silent_connections_block_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Half a head on every place, then a thousand more; the key opens the socket all the while, and what it
    holds open stays. One line of log is enough.
    """
    async with (
        open_server(app, ANYWHERE, connections=64) as address,
        AsyncExitStack() as held,
        connected(address) as trainer,
    ):
        assert (await answer(trainer, GET % (b"", KEY))).endswith(b"0")
        for number in range(64 + 1000):
            stream = await held.enter_async_context(connected(address))
            await stream.send_all(b"GET / HTTP/1.1\r\nHost: no"[: number % 20])
            if number % 100 == 0:
                async with connected(address) as fresh:
                    with trio.fail_after(5):
                        assert (await answer(fresh, GET % (b"", KEY))).endswith(b"0")
        with trio.fail_after(5):
            assert (await answer(trainer, GET % (b"", KEY))).endswith(b"0")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "64 may be open" in caplog.text


async def test_full_busy_socket_answers_so() -> None:
    async with open_server(app, ANYWHERE, connections=4) as address, AsyncExitStack() as held:
        for _ in range(4):
            stream = await held.enter_async_context(connected(address))
            await stream.send_all(GET % (b"wait", KEY))
        await trio.testing.wait_all_tasks_blocked(0.05)
        async with connected(address) as fresh:
            with trio.fail_after(5):
                await fresh.send_all(GET % (b"", KEY))
                status, error = refusal(await read_all(fresh))
    assert (status, error["type"]) == (503, "busy")


async def test_streams_leave_places_for_requests() -> None:
    async with open_server(app, ANYWHERE, connections=8) as address, AsyncExitStack() as held:
        for _ in range(6):
            stream = await held.enter_async_context(connected(address))
            await stream.send_all(GET % (b"stream", KEY))
            assert b" 200 " in await stream.receive_some()
        async with connected(address) as fresh:
            assert b" 429 " in await answer(fresh, GET % (b"stream", KEY))
            assert (await answer(fresh, GET % (b"", KEY))).endswith(b"0")


# ── slow ones ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nHost: "])
async def test_head_timeout_starts_at_first_byte(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that drip in do not prolong it, on a new connection and on one that was used."""
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    async with open_server(app, ANYWHERE) as address:
        for used in (False, True):
            async with connected(address) as stream, trio.open_nursery() as nursery:
                if used:
                    await answer(stream, GET % (b"", b""))

                async def drip(stream: trio.SocketStream = stream) -> None:
                    with suppress(trio.BrokenResourceError):
                        await stream.send_all(sent or b"G")
                        while True:
                            await trio.sleep(0.05)
                            await stream.send_all(b"x")

                if sent or used:
                    nursery.start_soon(drip)
                with trio.fail_after(5):
                    said = await read_all(stream)
                nursery.cancel_scope.cancel()
                assert said == b"" or refusal(said)[0] == 408


async def test_idle_limit_exceeds_head_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.1)
    async with open_server(app, ANYWHERE) as address, connected(address) as stream:
        for _ in range(2):
            assert (await answer(stream, GET % (b"", b""))).endswith(b"0")
            await trio.sleep(0.3)


async def test_stalled_body_is_answered_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_PAUSE_S", 0.3)
    head = b"POST / HTTP/1.1\r\nHost: node\r\nContent-Length: 100\r\n\r\n"
    async with open_server(app, ANYWHERE) as address, connected(address) as stream:
        with trio.fail_after(5):
            await stream.send_all(head + b"{")
            assert refusal(await read_all(stream))[0] == 408


async def test_slow_steady_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than it may pause in all, and dripping below the rate it is cut."""
    monkeypatch.setattr(connections, "BODY_PAUSE_S", 0.5)
    monkeypatch.setattr(connections, "BODY_BYTES_PER_S", 1000)
    head = b"POST / HTTP/1.1\r\nHost: node\r\nContent-Length: 2000\r\n\r\n"
    async with open_server(app, ANYWHERE) as address:
        async with connected(address) as stream:
            await stream.send_all(head)
            for _ in range(9):
                await trio.sleep(0.1)
                await stream.send_all(b"x" * 200)
            assert (await answer(stream, b"x" * 200)).endswith(b"2000")
        async with connected(address) as stream:
            sent = 0
            await stream.send_all(head)
            with trio.fail_after(10):
                with suppress(trio.BrokenResourceError):
                    while sent < 1000:
                        await trio.sleep(0.1)
                        await stream.send_all(b"x")
                        sent += 1
            assert 2 <= sent < 100


async def test_unread_response_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives the connection up; its place is free again."""
    monkeypatch.setattr(server, "STALLED_MS", 300)
    ended = trio.Event()

    async def flood(scope: Scope, receive: ASGIReceiveCallable, response: ResponseWriter) -> None:
        try:
            taken = await response.write((200, []), b"", end=False)
            while taken:
                taken = await response.write(None, b"x" * 65536, end=False)
        finally:
            ended.set()

    async with open_server(DirectApp(flood), ANYWHERE) as address, connected(address) as stream:
        await stream.send_all(GET % (b"", b""))
        with trio.fail_after(20):
            await ended.wait()


# ── other protocols ───────────────────────────────────────────────────────────


async def test_http2_is_not_spoken() -> None:
    status, error = refusal(await cut(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)))
    assert (status, error["type"]) == (505, "http_version")
    assert "HTTP/1.1" in error["message"]


async def test_http2_upgrade_is_ignored() -> None:
    upgrade = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
    )
    async with open_server(app, ANYWHERE) as address, connected(address) as stream:
        for _ in range(2):
            assert (await answer(stream, GET % (b"", upgrade))).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("version", [b"2.0", b"3.0", b"0.9", b"1.2"])
async def test_other_http_versions_are_refused(version: bytes) -> None:
    assert refusal(await cut(b"GET / HTTP/%b\r\nHost: node\r\n\r\n" % version))[0] == 505


async def test_websockets_are_refused() -> None:
    upgrade = (
        b"Connection: Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    )
    status, error = refusal(await cut(GET % (b"", upgrade)))
    assert status == 426
    assert "WebSockets are not served" in error["message"]


# ── HTTP/1.1 ──────────────────────────────────────────────────────────────────

POST = b"POST / HTTP/1.1\r\nHost: node\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: node\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN, 400),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + HIDDEN, 400),
        (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (POST + b"Content-Length: +3\r\n\r\nabc", 400),
        (POST + b"Content-Length: -1\r\n\r\n", 400),
        (POST + b"Content-Length : 3\r\n\r\nabc", 400),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (POST + b"Transfer-Encoding: identity\r\n\r\nabc", 501),
        (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        (POST + b"X: a\x00b\r\n\r\n", 400),
        (POST + b"X: a\rb\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: node\r\n\r\n", 400),
        (b"CONNECT evil.example:80 HTTP/1.1\r\nHost: node\r\n\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nHost: node\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: node\r\n\r\n", 400),
        (b"GET / a HTTP/1.1\r\nHost: node\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: node\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: node\r\nX: " + b"x" * 80_000, 431),
        (b"GET / HTTP/1.1\r\nHost: node\r\nX: " + b"x" * 80_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\nHost: node\n" + b"a: b\n" * 300, 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n", 400),
    ],
)
async def test_invalid_request_closes_connection(sent: bytes, status: int) -> None:
    """Nothing after it is taken for a request."""
    said = await cut(sent)
    assert said.count(b"HTTP/1.1 200") == 0
    assert refusal(said)[0] == status


async def test_long_second_head_is_refused() -> None:
    said = await cut(GET % (b"", b"") + b"GET / HTTP/1.1\r\nHost: node\r\n" + b"a:\r\n" * 20_000 + b"\r\n")
    assert said.count(b"HTTP/1.1 200") == 1
    assert b"HTTP/1.1 431" in said


async def test_refused_head_request_has_no_body() -> None:
    said = await cut(b"HEAD http://evil.example/ HTTP/1.1\r\nHost: node\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 400")
    assert said.endswith(b"\r\n\r\n")


async def test_unusual_valid_requests_are_served() -> None:
    for sent, body in (
        (b"GET / HTTP/1.0\r\n\r\n", b"0"),
        (POST + b"Connection: close\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc", b"3"),
        (POST + b"Connection: close\r\nX: a\r\n b\r\nContent-Length: 3\r\n\r\nabc", b"3"),
        (
            POST
            + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n2;a=b\r\nab\r\n1\r\nc\r\n0\r\nT: u\r\n\r\n",
            b"3",
        ),
        (GET % (b"%00%ff/../..%2f", b"Connection: close\r\n"), b"0"),
    ):
        said = await cut(sent)
        assert said.startswith(b"HTTP/1.1 200"), sent
        assert said.endswith(body), sent


async def test_expect_continue_is_answered() -> None:
    async with open_server(app, ANYWHERE) as address, connected(address) as stream:
        await stream.send_all(POST + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n")
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 100")
        assert (await answer(stream, b"abc")).endswith(b"3")


async def test_pipelined_requests_wait_in_socket() -> None:
    """One at a time is read from the buffer: a flood of them costs the sender, and leaves the loop free."""
    most = 0

    async def counted(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.lowlevel.checkpoint()
        await app(scope, receive, send)
        running -= 1

    running = 0
    async with open_server(counted, ANYWHERE) as address, connected(address) as stream:
        await stream.send_all((GET % (b"", b"")) * 200 + GET % (b"", b"Connection: close\r\n"))
        with trio.fail_after(20):
            said = await read_all(stream)
    assert said.count(b"HTTP/1.1 200") == 201
    assert most == 1
