"""Servers over real sockets: connections end when they should, streams live as long as they like, closing is
bounded whatever a peer does.
"""

import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.client import HTTPConnection
from typing import Any

import pytest
import trio
import trio.testing
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, Scope
from quart import Response
from quart_trio import QuartTrio

from polarnode.core.errors import ConfigError
from polarnode.http import connections, server
from polarnode.http.asgi import ResponseSender
from polarnode.http.connections import DirectApp, ResponseWriter
from polarnode.http.server import Address, PatchedConnection, listening_socket, mend, open_server
from polarnode.providers.contract import Reply

ANYWHERE = Address(host="127.0.0.1", port=0)
GET = b"GET %b HTTP/1.1\r\nHost: node\r\n\r\n"
CLOSE = b"GET / HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n"


def quart_app() -> QuartTrio:
    app = QuartTrio("tests", static_folder=None)

    @app.get("/")
    async def root() -> dict[str, str]:
        await trio.lowlevel.checkpoint()
        return {"said": "hello"}

    @app.get("/flood")
    async def flood() -> Response:
        async def body() -> AsyncIterator[bytes]:
            while True:
                await trio.lowlevel.checkpoint()
                yield b"x" * 65536

        await trio.lowlevel.checkpoint()

        return Response(body())

    @app.get("/late")
    async def late() -> dict[str, str]:
        await trio.sleep(0.3)
        return {"said": "late"}

    return app


async def plain_app(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
    assert scope["type"] == "http"
    if scope["path"] == "/bug":
        raise RuntimeError("a bug of ours")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok", "more_body": False})


async def read_answer(stream: trio.SocketStream) -> bytes:
    """One answer with a content-length, off a connection that may stay open."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive_some()
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    while len(body) < length:
        body += await stream.receive_some()
    return head + b"\r\n\r\n" + body


async def read_to_end(stream: trio.SocketStream) -> bytes:
    data = b""
    while more := await stream.receive_some():
        data += more
    return data


@asynccontextmanager
async def connected(address: Address) -> AsyncIterator[trio.SocketStream]:
    stream = await trio.open_tcp_stream(address.host, address.port)
    async with stream:
        yield stream


BOTH = pytest.mark.parametrize("make", [quart_app, lambda: plain_app], ids=["quart", "asgi"])


# ── connections end when they should (P13b) ───────────────────────────────────


@BOTH
async def test_connection_close_closes_at_once(make: Any) -> None:
    async with open_server(make(), ANYWHERE) as address, connected(address) as stream:
        await stream.send_all(CLOSE)
        with trio.fail_after(5):  # it never came without the mend
            assert (await read_to_end(stream)).startswith(b"HTTP/1.1 200")


@BOTH
async def test_idle_connection_times_out(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", 0.2)
    async with open_server(make(), ANYWHERE) as address, connected(address) as stream:
        await stream.send_all(GET % b"/")
        await read_answer(stream)
        started = trio.current_time()
        with trio.fail_after(10):
            assert await stream.receive_some() == b""
        assert trio.current_time() - started >= 0.15


async def test_idle_timer_restarts_after_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One timer serves all idle periods: a request stops it, the end of the response restarts it."""
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", 0.2)
    async with open_server(quart_app(), ANYWHERE) as address, connected(address) as stream:
        with trio.fail_after(10):
            for path in (b"/", b"/late", b"/", b"/late"):  # the late ones take longer than the timer
                await stream.send_all(GET % path)
                assert (await read_answer(stream)).startswith(b"HTTP/1.1 200")
                await trio.sleep(0.1)
            assert await stream.receive_some() == b""


async def test_whole_response_is_one_write() -> None:
    writes: list[int] = []

    async def serve(scope: Scope, receive: ASGIReceiveCallable, response: ResponseWriter) -> None:
        assert scope["type"] == "http"
        assert isinstance(response, connections.Stream)
        responder = ResponseSender(response, "1")
        body = b"ok" if scope["path"] == "/" else b""
        await responder.reply(Reply(status=200, headers=(("content-type", "text/plain"),), body=body))
        assert responder.delivered
        writes.append(response.protocol.writes.writes)

    async with open_server(DirectApp(serve), ANYWHERE) as address, connected(address) as stream:
        with trio.fail_after(10):
            for path, end in ((b"/", b"\r\n\r\nok"), (b"/empty", b"\r\n\r\n"), (b"/", b"\r\n\r\nok")):
                await stream.send_all(GET % path)
                assert (await read_answer(stream)).endswith(end)
            await stream.send_all(CLOSE.replace(b"GET", b"HEAD"))
            head = await read_to_end(stream)
    assert b"content-length: 2" in head
    assert head.endswith(b"\r\n\r\n")
    assert writes == [1, 2, 3, 4]


async def test_stream_end_confirms_last_bytes() -> None:
    """The last bytes of a stream leave with its end, and are known to be delivered."""
    found: list[tuple[int, bool]] = []

    async def serve(scope: Scope, receive: ASGIReceiveCallable, response: ResponseWriter) -> None:
        assert isinstance(response, connections.Stream)
        responder, taken = ResponseSender(response, "1"), response.protocol.writes
        await responder.stream(b"first ", "text/plain")
        before = taken.writes
        await responder.stream(b"last", "text/plain", last=True)
        await responder.end()
        found.append((taken.writes - before, responder.delivered))

    async with open_server(DirectApp(serve), ANYWHERE) as address, connected(address) as stream:
        await stream.send_all(CLOSE)
        with trio.fail_after(10):
            assert (await read_to_end(stream)).endswith(b"6\r\nfirst \r\n4\r\nlast\r\n0\r\n\r\n")
    assert found == [(1, True)]


@BOTH
async def test_connection_serves_requests_in_turn(make: Any) -> None:
    async with open_server(make(), ANYWHERE) as address, connected(address) as stream:
        for _ in range(3):
            await stream.send_all(GET % b"/")
            assert (await read_answer(stream)).startswith(b"HTTP/1.1 200")


async def test_headers_are_limited() -> None:
    async with open_server(plain_app, ANYWHERE) as address:
        async with connected(address) as stream:
            await stream.send_all(b"GET / HTTP/1.1\r\nHost: node\r\nX: " + b"x" * 40_000 + b"\r\n\r\n")
            assert (await read_answer(stream)).startswith(b"HTTP/1.1 200")
        async with connected(address) as stream:
            await stream.send_all(b"GET / HTTP/1.1\r\nHost: node\r\nX: " + b"x" * 80_000)
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 431")


async def test_early_disconnect_cancels_request() -> None:
    cancelled = trio.Event()
    app = quart_app()

    @app.get("/wait")
    async def wait() -> str:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()
        return "never"

    async with open_server(app, ANYWHERE) as address:
        async with connected(address) as stream:
            await stream.send_all(GET % b"/wait")
            await trio.sleep(0.1)
        with trio.fail_after(5):
            await cancelled.wait()


# ── streams live ────────────────────────────────────────────────────────────────


async def test_quart_stream_survives_a_minute(autojump_clock: trio.testing.MockClock) -> None:
    """The app itself, in virtual time: quart-trio's own limit of 60 s would cut this without a word."""
    app = quart_app()

    @app.get("/long")
    async def long() -> Response:
        await trio.lowlevel.checkpoint()

        async def body() -> AsyncIterator[bytes]:
            for _ in range(7):
                await trio.sleep(10)
                yield b"tick"

        return Response(body())

    mend(app)
    sent: list[Any] = []
    scope: Any = {
        "type": "http", "http_version": "1.1", "method": "GET", "path": "/long", "raw_path": b"/long", "query_string": b"", "headers": [],
        "scheme": "http", "client": None, "server": None, "extensions": {}, "asgi": {}, "root_path": "", "state": {},
    }  # fmt: skip

    async def send(message: Any) -> None:
        await trio.lowlevel.checkpoint()
        sent.append(message)

    await app(scope, trio.sleep_forever, send)  # type: ignore[arg-type]
    assert [message["body"] for message in sent[1:]] == [b"tick"] * 7 + [b""]
    assert sent[-1]["more_body"] is False
    assert trio.current_time() >= 70


def test_served_quart_app_is_patched() -> None:
    app = quart_app()
    mend(app)
    assert app.asgi_http_class is PatchedConnection
    assert (app.config["RESPONSE_TIMEOUT"], app.config["BODY_TIMEOUT"]) == (None, None)


# ── closing is bounded ──────────────────────────────────────────────────────────


async def test_stalled_peer_does_not_delay_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypercorn shields every send without an end: what is stuck there loses its socket."""
    monkeypatch.setattr(server, "CLOSING_S", 3600.0)
    with trio.fail_after(60):  # not the hour after which a server is given up
        async with open_server(quart_app(), ANYWHERE) as address:
            stream = await trio.open_tcp_stream(address.host, address.port)
            await stream.send_all(GET % b"/flood")
            await trio.sleep(0.5)  # until every buffer between us is full
    await stream.aclose()


def test_listening_socket_has_stall_timeout() -> None:
    """A peer that stops reading is given up in the end."""
    sock = listening_socket(ANYWHERE)
    with server._trio_listener(sock).socket:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == server.STALLED_MS


async def test_idle_connections_close_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ANSWERING_S", 3600.0)
    with trio.fail_after(60):  # not the hour that an answer under way would get
        async with open_server(plain_app, ANYWHERE) as address:
            stream = await trio.open_tcp_stream(address.host, address.port)
            await stream.send_all(GET % b"/")
            await read_answer(stream)
    assert await stream.receive_some() == b""
    await stream.aclose()


async def test_running_answer_may_finish() -> None:
    async with open_server(quart_app(), ANYWHERE) as address:
        stream = await trio.open_tcp_stream(address.host, address.port)
        await stream.send_all(GET % b"/late")
        await trio.sleep(0.1)
    async with stream:
        assert b'"late"' in await read_to_end(stream)


async def test_server_outlives_cancelled_block() -> None:
    """Its users still finish what they do in their own cleanup."""
    answers: list[bytes] = []
    with trio.CancelScope() as scope:
        async with open_server(plain_app, ANYWHERE) as address:
            try:
                scope.cancel()
                await trio.sleep_forever()
            finally:
                with trio.move_on_after(5, shield=True):
                    async with connected(address) as stream:
                        await stream.send_all(CLOSE)
                        answers.append(await read_to_end(stream))
    assert answers[0].endswith(b"ok")


async def test_closed_server_refuses_connections() -> None:
    async with open_server(plain_app, ANYWHERE) as address:
        pass
    with pytest.raises(OSError, match=r"."):
        await trio.open_tcp_stream(address.host, address.port)


async def test_cancelled_opening_is_harmless() -> None:
    with trio.fail_after(10), trio.CancelScope() as scope:
        scope.cancel()
        async with open_server(plain_app, ANYWHERE):
            await trio.lowlevel.checkpoint()


async def test_block_error_is_raised_unchanged() -> None:
    async def block() -> None:
        async with open_server(plain_app, ANYWHERE):
            await trio.lowlevel.checkpoint()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await block()


async def test_hundreds_of_servers_open_and_close() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        async with open_server(plain_app, ANYWHERE):
            await trio.lowlevel.checkpoint()
    assert len(os.listdir("/proc/self/fd")) <= before


# ── sockets ───────────────────────────────────────────────────────────────────


async def test_listening_socket_is_passed_over() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    async with open_server(plain_app, sock) as address, connected(address) as stream:
        assert address.port == port
        assert not sock.get_inheritable()
        await stream.send_all(CLOSE)
        assert (await read_to_end(stream)).endswith(b"ok")
    assert sock.fileno() == -1


async def test_taken_port_names_remedy() -> None:
    async with open_server(plain_app, ANYWHERE) as address:
        with pytest.raises(ConfigError, match=rf"port {address.port} .* choose another with --port"):
            async with open_server(plain_app, address):
                pytest.fail("two servers on one port")


def test_foreign_address_names_remedy() -> None:
    with pytest.raises(ConfigError, match="--host"):
        listening_socket(Address(host="203.0.113.7", port=0))


@BOTH
async def test_closing_clients_leave_no_connection(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python's own http.client does. Without the mend a tenth to a quarter of them stay, each for the time
    of an idle connection.
    """
    monkeypatch.setattr(server, "CONNECTIONS", 10)

    def ask(address: Address) -> int:
        connection = HTTPConnection(address.host, address.port, timeout=30)
        try:
            connection.request("GET", "/")
            return len(connection.getresponse().read())
        finally:
            connection.close()

    async with open_server(make(), ANYWHERE) as address:
        for _ in range(300):
            assert await trio.to_thread.run_sync(ask, address)


# ── bugs stay where they are ────────────────────────────────────────────────────


async def test_app_bug_ends_one_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with open_server(plain_app, ANYWHERE) as address:
        async with connected(address) as stream:
            await stream.send_all(GET % b"/bug")
            assert (await read_to_end(stream)).startswith(b"HTTP/1.1 500")
        async with connected(address) as stream:
            await stream.send_all(CLOSE)
            assert (await read_to_end(stream)).endswith(b"ok")
    assert "a bug of ours" in caplog.text


async def test_server_bug_ends_one_connection(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Any, event: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise LookupError("a bug of theirs")

    async with open_server(plain_app, ANYWHERE) as address:
        with monkeypatch.context() as patched:
            patched.setattr("hypercorn.protocol.h11.H11Protocol.handle", broken)
            async with connected(address) as stream:
                await stream.send_all(CLOSE)
                assert await read_to_end(stream) == b""
        async with connected(address) as stream:
            await stream.send_all(CLOSE)
            assert (await read_to_end(stream)).endswith(b"ok")
    assert "a bug of theirs" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
