"""Listening sockets, and how Hypercorn and Quart are configured to serve them.

This module and `connections.py` patch hypercorn 0.18 and quart-trio 0.12, whose defaults leak connections,
cut streams and cannot be stopped. Each patch names what was measured without it and has a test; pyproject
pins both. The control plane is served here once, and one model endpoint per session, so opening and closing
a server is cheap and closing is bounded whatever a peer does.
"""

import errno
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

import trio
from attrs import define, field, frozen
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import (
    AppWrapper,
    ASGIFramework,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
)
from hypercorn.utils import wrap_app
from quart.asgi import ASGIHTTPConnection
from quart.typing import ResponseTypes
from quart.wrappers import Request
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection

from polarnode.core.errors import ConfigError
from polarnode.http.connections import RECEIVED_BYTES, Connection, Places, refusal_bytes

logger = logging.getLogger(__name__)

# connections that wait to be accepted: a flood of them must not make a trainer's wait a second for its next
# try; the kernel keeps some hundred bytes of each
BACKLOG: Final = 1024
# open connections per socket: ten harnesses measured used 3; a runaway must not exhaust the node's
# descriptors
CONNECTIONS: Final = 256
# of the control plane, where each stream of a trainer takes one: 384 streams
CONTROL_CONNECTIONS: Final = 512
# connections closed for others are logged once in so many seconds, with their number: a flood of them must
# not fill the log
LOGGED_S: Final = 10.0
# refused connections that are given time to read why, and the seconds for it
REFUSED: Final = 32
REFUSED_S: Final = 1.0
# a peer that reads nothing for this long is gone; a harness that compiles or swaps resumes sooner
STALLED_MS: Final = 30_000
ANSWERING_S: Final = 1.0  # time a closing server gives to responses in progress
# time their tasks then have to end; one that has not is blocked in a send, and its socket is closed
UNWINDING_S: Final = 1.0
CLOSING_S: Final = ANSWERING_S + 3 * UNWINDING_S  # an outer limit, never reached: `close` has its own


@frozen(kw_only=True)
class Address:
    """Where a server listens. Port 0 means any free port."""

    host: str
    port: int


class MendedConnection(TrioASGIHTTPConnection):
    """quart-trio's connection, without the cancellation that leaves sockets open.

    After a whole response Hypercorn sends the app `http.disconnect`; quart-trio then cancels the request, and
    with it the send that is about to close the connection or to restart its idle timer. Measured without this
    patch: a connection with `Connection: close` still open after 12 s, and idle connections that never time
    out. So a disconnect is ignored once the last body message is handed over.
    """

    answered = False

    async def handle_messages(  # type: ignore[override]
        self, nursery: trio.Nursery, request: Request, receive: ASGIReceiveCallable
    ) -> None:
        await ASGIHTTPConnection.handle_messages(self, request, receive)
        if not self.answered:
            nursery.cancel_scope.cancel()

    async def _send_response(self, send: ASGISendCallable, response: ResponseTypes) -> None:
        async def noting(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self.answered = True
            await send(message)

        await super()._send_response(noting, response)


def mend(app: QuartTrio) -> None:
    """Configure a Quart app for streams: its default time limits (60 s) cut a response in the middle, without
    an error.
    """
    app.asgi_http_class = MendedConnection
    app.config.update(RESPONSE_TIMEOUT=None, BODY_TIMEOUT=None)


@asynccontextmanager
async def open_server(
    app: ASGIFramework, where: socket.socket | Address, *, connections: int | None = None
) -> AsyncIterator[Address]:
    """Serve `app` on an address, or on a listening socket, which is closed at the end. Raises ConfigError
    when the address is not available. At most `connections` are open at once, CONNECTIONS by default.

    The app gets no lifespan events; open what it needs around this block. The server outlives the block, even
    a cancelled one, and then closes: idle connections at once, responses in progress after ANSWERING_S,
    everything after about 2 s. An exception of the block is raised as itself, not in a group.
    """
    if isinstance(app, QuartTrio):
        mend(app)
    sock = listening_socket(where) if isinstance(where, Address) else where
    places = Places(limit=connections or CONNECTIONS)
    server = _Server(app=wrap_app(app, 0, "asgi"), listener=_listener(sock), places=places)
    failed: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        try:
            yield Address(host=sock.getsockname()[0], port=sock.getsockname()[1])
        except Exception as error:  # raised after this nursery, which would wrap it in a group
            failed = error
        finally:
            with trio.move_on_after(CLOSING_S, shield=True):
                await server.close()
    if failed is not None:
        raise failed


def listening_socket(address: Address) -> socket.socket:
    """Open a listening socket. The message of a ConfigError names the setting to change."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    except OSError as error:
        remedy = (
            "choose another with --port"
            if error.errno == errno.EADDRINUSE
            else "choose another with --host and --port"
        )
        raise ConfigError(
            f"cannot listen on {address.host} port {address.port} ({error.strerror}): {remedy}"
        ) from error


def _listener(sock: socket.socket) -> trio.SocketListener:
    """Accepted sockets inherit the time limit for a peer that stops reading: Hypercorn shields every send and
    sets no limit itself.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS)
    return trio.SocketListener(trio.socket.from_stdlib_socket(sock))


def _config() -> Config:
    config = Config()
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logger  # Hypercorn's default adds a stderr handler per server
    return config


@define(eq=False)
class _Server:
    """One socket and its connections. `run` serves; `close` ends it within CLOSING_S, shielded, and never
    raises.
    """

    app: AppWrapper
    listener: trio.SocketListener
    places: Places
    config: Config = field(factory=_config)
    _context: WorkerContext = field(factory=partial(WorkerContext, None), init=False)
    _streams: set[trio.SocketStream] = field(factory=set, init=False)
    _accepting: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _connected: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _service: trio.CancelScope = field(factory=partial(trio.CancelScope, shield=True), init=False)
    _emptied: trio.Event = field(factory=trio.Event, init=False)
    _refused: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(REFUSED), init=False)
    _displaced: int = field(default=0, init=False)  # connections closed for others since the last line
    _logged: float = field(default=float("-inf"), init=False)

    async def run(self) -> None:
        """Serve until closed, even when the surrounding tasks are cancelled."""
        with self._service, self._connected:
            async with trio.open_nursery() as connections:
                connections.start_soon(self._accept, connections)
        self._emptied.set()

    async def _accept(self, connections: trio.Nursery) -> None:
        with self._accepting:
            await trio.serve_listeners(self._connection, [self.listener], handler_nursery=connections)

    async def _connection(self, stream: trio.SocketStream) -> None:
        """Serve one connection to its end and log its errors, because Hypercorn lets one error end the whole
        server.
        """
        with trio.CancelScope() as scope:
            place, displaced = self.places.take(
                _peer(stream), partial(_end, stream, scope), trio.current_time()
            )
            if displaced is not None or place is None:
                self._count_displaced()
            if place is None:
                await self._refuse(stream)
                return
            self._streams.add(stream)
            connection = Connection(self.app, self.config, self._context, stream, place)
            try:
                await connection
            except* Exception:
                logger.exception("a connection failed unexpectedly")
            finally:
                self.places.leave(place)
                self._streams.discard(stream)
                stream.socket.close()  # also where Hypercorn was cancelled before it did
                # Break the reference cycle: the garbage collector runs rarely.
                connection.protocol = None  # type: ignore[assignment]

    async def _refuse(self, stream: trio.SocketStream) -> None:
        """Answer 503. What the client has sent is read, because closing a socket with unread bytes takes the
        answer back.
        """
        try:
            self._refused.acquire_nowait()
        except trio.WouldBlock:
            return
        try:
            with trio.move_on_after(REFUSED_S), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await stream.send_all(refusal_bytes(503))
                await stream.send_eof()
                while await stream.receive_some(RECEIVED_BYTES):
                    pass
        finally:
            self._refused.release()

    def _count_displaced(self) -> None:
        self._displaced += 1
        now = trio.current_time()
        if now >= self._logged + LOGGED_S:
            logger.warning(
                "%d connections were closed for newer ones or refused: %d may be open on this socket",
                self._displaced,
                self.places.limit,
            )
            self._displaced, self._logged = 0, now

    async def close(self) -> None:
        """Stop accepting, let responses end, cancel the rest, and close the sockets of tasks blocked in a
        send.
        """
        self._accepting.cancel()
        self.listener.socket.close()
        await self._context.terminated.set()
        with trio.move_on_after(ANSWERING_S):
            await self._emptied.wait()
        self._connected.cancel()
        with trio.move_on_after(UNWINDING_S):
            await self._emptied.wait()
        for stream in self._streams:
            stream.socket.close()
        with trio.move_on_after(UNWINDING_S):
            await self._emptied.wait()
        self._service.cancel()


def _peer(stream: trio.SocketStream) -> str:
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:  # it has left already
        return ""


def _end(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    """Close a connection from outside: its sends are shielded, and end with the socket."""
    with suppress(OSError):
        stream.socket.shutdown(socket.SHUT_RDWR)
    scope.cancel()
