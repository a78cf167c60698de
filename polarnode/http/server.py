"""Listening sockets, and how Hypercorn and Quart are configured to serve them.

This module patches hypercorn 0.18 and quart-trio 0.12, whose defaults leak connections, cut streams and
cannot be stopped. Each patch names what was measured without it and has a test; pyproject pins both. The
control plane is served here once, and one model endpoint per session, so opening and closing a server is
cheap and closing is bounded whatever a peer does.
"""

import errno
import logging
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import trio
from attrs import define, field, frozen
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import (
    AppWrapper,
    ASGIFramework,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    ConnectionState,
)
from hypercorn.utils import wrap_app
from quart.asgi import ASGIHTTPConnection
from quart.typing import ResponseTypes
from quart.wrappers import Request
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection

from polarnode.core.errors import ConfigError
from polarnode.http.asgi import WRITES, ConnectionWrites

logger = logging.getLogger(__name__)

# the kernel's usual limit; a harness that starts all its agents at once opens a dozen connections
BACKLOG: Final = 128
# bytes per read; Hypercorn's 64 KiB split a long request into parts that cost 50 us each
RECEIVED_BYTES: Final = 256 << 10
# open connections per socket: ten harnesses measured used 3; a runaway must not exhaust the node's
# descriptors
CONNECTIONS: Final = 256
# request line and headers: Claude Code, the longest measured, sends under 4 KiB
HEADERS_BYTES: Final = 64 << 10
# limit of an idle connection: longer than clients keep theirs (5-90 s), so that none is closed while its next
# request is sent
KEEP_ALIVE_S: Final = 120.0
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
async def open_server(app: ASGIFramework, where: socket.socket | Address) -> AsyncIterator[Address]:
    """Serve `app` on an address, or on a listening socket, which is closed at the end. Raises ConfigError
    when the address is not available.

    The app gets no lifespan events; open what it needs around this block. The server outlives the block, even
    a cancelled one, and then closes: idle connections at once, responses in progress after ANSWERING_S,
    everything after about 2 s. An exception of the block is raised as itself, not in a group.
    """
    if isinstance(app, QuartTrio):
        mend(app)
    sock = listening_socket(where) if isinstance(where, Address) else where
    server = _Server(app=wrap_app(app, 0, "asgi"), listener=_listener(sock))
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
    config.h11_max_incomplete_size = HEADERS_BYTES
    config.keep_alive_timeout = KEEP_ALIVE_S  # also ends a connection that sends no headers
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logger  # Hypercorn's default adds a stderr handler per server
    return config


@define(eq=False)
class _IdleTimer:
    """Hypercorn's timer of an idle connection, as one task for all idle periods: a task per request costs 80
    us.
    """

    idle: bool = field(default=False, init=False)
    ended: bool = field(default=False, init=False)
    scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _started: bool = field(default=False, init=False)

    async def restart(self, task_group: TaskGroup, action: Callable[[], Awaitable[None]]) -> None:
        self.idle = True
        self.scope.deadline = trio.current_time() + KEEP_ALIVE_S
        if not self._started:
            self._started = True
            task_group.spawn(action)

    async def stop(self) -> None:
        self.idle = False
        self.scope.deadline = math.inf

    def end(self) -> None:
        """Stop the timer for good."""
        self.idle, self.ended = False, True
        self.scope.cancel()


class _Connection(TCPServer):
    """Hypercorn's connection, without the idle timer that outlives its client.

    A client that closes as soon as it has its response often leaves before Hypercorn notes the end of the
    response, which then starts the idle timer of a closed connection. Measured without this patch: one in
    four such connections stayed open for KEEP_ALIVE_S, until no more were accepted.

    The state of its requests also records what the socket took: Hypercorn's own `send` returns the same for
    bytes that are lost.
    """

    _held = b""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        state: ConnectionState,
        stream: trio.SocketStream,
    ) -> None:
        # A plain TCP stream, which the base class accepts; it calls only two methods of the idle timer.
        super().__init__(app, config, context, state, stream)  # type: ignore[arg-type]
        self.idle_task: _IdleTimer = _IdleTimer()  # type: ignore[assignment]

    async def _read_data(self) -> None:
        """As in Hypercorn, but with larger reads."""
        data = b" "
        while data:
            try:
                data = bytes(await self.stream.receive_some(RECEIVED_BYTES))
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                break
            await self.protocol.handle(RawData(data))
        await self.protocol.handle(Closed())
        self.idle_task.end()

    async def _idle_timeout(self) -> None:
        """Close the connection when it is idle for too long, or idle while the server closes. A busy
        connection is closed at the end of its response.
        """
        while not self.idle_task.ended and not self.context.terminated.is_set():
            self.idle_task.scope = trio.CancelScope(deadline=self.idle_task.scope.deadline)
            with self.idle_task.scope:
                await self.context.terminated.wait()
            if self.idle_task.idle:
                with trio.CancelScope(shield=True):
                    await self._initiate_server_close()
                return

    async def protocol_send(self, event: Event) -> None:
        if self.idle_task.ended and isinstance(event, Updated):
            return
        if isinstance(event, RawData):
            await self._write(event.data)
        else:
            await super().protocol_send(event)

    async def _write(self, data: bytes) -> None:
        """As in Hypercorn, shielded, but counted; and the head may be held until the bytes that follow it."""
        writes: ConnectionWrites = self.state[WRITES]  # set by `_Server`
        data, self._held = self._held + data, b""
        if writes.hold_next:
            writes.hold_next, self._held = False, data
            return
        async with self.send_lock:
            try:
                with trio.CancelScope(shield=True):
                    await self.stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                writes.broken = True
                await self.protocol.handle(Closed())
            else:
                writes.writes += 1


@define(eq=False)
class _Server:
    """One socket and its connections. `run` serves; `close` ends it within CLOSING_S, shielded, and never
    raises.
    """

    app: AppWrapper
    listener: trio.SocketListener
    config: Config = field(factory=_config)
    _context: WorkerContext = field(factory=partial(WorkerContext, None), init=False)
    _streams: set[trio.SocketStream] = field(factory=set, init=False)
    _accepting: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _connected: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _service: trio.CancelScope = field(factory=partial(trio.CancelScope, shield=True), init=False)
    _emptied: trio.Event = field(factory=trio.Event, init=False)

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
        if len(self._streams) >= CONNECTIONS:
            logger.warning("refusing a connection: %d are open on this socket", CONNECTIONS)
            return
        self._streams.add(stream)
        connection = _Connection(
            self.app, self.config, self._context, ConnectionState({WRITES: ConnectionWrites()}), stream
        )
        try:
            await connection
        except* Exception:
            logger.exception("a connection failed unexpectedly")
        finally:
            self._streams.discard(stream)
            # Break the reference cycle: the garbage collector runs rarely.
            connection.protocol = None  # type: ignore[assignment]

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
