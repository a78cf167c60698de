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

BACKLOG: Final = 128  # the kernel's usual cap; a harness starting all its agents at once opens a dozen
# read at once; Hypercorn's 64 KiB take a long request apart, and each part costs 50 us
RECEIVED_BYTES: Final = 256 << 10
# open at once on one socket: ten harnesses measured used 3; a runaway must not take the node's descriptors
CONNECTIONS: Final = 256
# request line and headers: Claude Code, the longest measured, sends under 4 KiB
HEADERS_BYTES: Final = 64 << 10
# an idle connection: longer than clients keep theirs (5-90 s), so that none is closed as its next request
# comes
KEEP_ALIVE_S: Final = 120.0
# a peer that takes no byte for this long is gone; a harness that compiles or swaps is back before
STALLED_MS: Final = 30_000
ANSWERING_S: Final = 1.0  # what a closing server leaves to answers under way
# what their tasks then have to end; whoever has not is stuck in a send, and its socket is closed under it
UNWINDING_S: Final = 1.0
CLOSING_S: Final = ANSWERING_S + 3 * UNWINDING_S  # never reached: it holds what `close` holds itself


@frozen(kw_only=True)
class Address:
    """Where a server listens. Port 0 asks for any free one."""

    host: str
    port: int


class MendedConnection(TrioASGIHTTPConnection):
    """quart-trio's connection, without the cancel that leaves sockets open.

    After a whole answer Hypercorn tells the app `http.disconnect`; quart-trio then cancels the request, and
    with it the very send that is about to close the connection or to restart its idle timer. Seen without
    this: after `Connection: close` no end in 12 s, and idle connections that never time out. So a disconnect
    counts only until the last body message is handed over.
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
    """Set a Quart app so that streams live: its default time limits (60 s) cut an answer silently, in the
    middle, without an error.
    """
    app.asgi_http_class = MendedConnection
    app.config.update(RESPONSE_TIMEOUT=None, BODY_TIMEOUT=None)


@asynccontextmanager
async def open_server(app: ASGIFramework, where: socket.socket | Address) -> AsyncIterator[Address]:
    """Serve `app` on an address, or on a listening socket that is handed over (closed at the end).
    ConfigError when the address is not available.

    The app gets no lifespan events: what it needs is opened around it. The server outlives the block, even
    one that is cancelled, and then closes: idle connections at once, answers under way after ANSWERING_S,
    everything after 2 s or so. What the block raises leaves as itself, not in a group.
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
        except Exception as error:  # not handled: taken past this nursery, which would wrap it in a group
            failed = error
        finally:
            with trio.move_on_after(CLOSING_S, shield=True):
                await server.close()
    if failed is not None:
        raise failed


def listening_socket(address: Address) -> socket.socket:
    """A socket that listens. ConfigError names the setting to change."""
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
    """Accepted sockets inherit the time limit for a peer that stops reading: Hypercorn shields every send,
    without an end of its own.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS)
    return trio.SocketListener(trio.socket.from_stdlib_socket(sock))


def _config() -> Config:
    config = Config()
    config.h11_max_incomplete_size = HEADERS_BYTES
    config.keep_alive_timeout = KEEP_ALIVE_S  # it also ends a connection whose headers do not come
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logger  # its own default adds a handler to stderr for each server
    return config


@define(eq=False)
class _IdleTimer:
    """Hypercorn's timer of an idle connection in one task for all of its idle times: starting and cancelling
    one a request cost 80 us.
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
        """The connection needs no timer any more."""
        self.idle, self.ended = False, True
        self.scope.cancel()


class _Connection(TCPServer):
    """Hypercorn's connection, without the idle timer that outlives its client.

    A client that closes as soon as it has its answer is often seen to leave before the answer's end is noted,
    which then starts the timer of an idle connection that nobody has. Seen without this: one in four of such
    connections stayed for KEEP_ALIVE_S, until none was taken.

    And it tells, in the state of its requests, what its socket took: Hypercorn's own `send` returns the same
    for bytes that nobody gets.
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
        # Plain TCP, as it checks; of the idle timer only two methods are called.
        super().__init__(app, config, context, state, stream)  # type: ignore[arg-type]
        self.idle_task: _IdleTimer = _IdleTimer()  # type: ignore[assignment]

    async def _read_data(self) -> None:
        """As Hypercorn's, but that it reads more at once."""
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
        """Close when a time of idleness was too long, or when the server closes in one. A busy connection is
        then closed by its answer's end.
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
        """As Hypercorn's, shield and all, but that it counts, and lets a head wait for what comes
        after it.
        """
        writes: ConnectionWrites = self.state[WRITES]  # what `_Server` put there
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
    """One socket and its connections. `run` is the service; `close` ends it, bounded and shielded, and never
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
        """Serve until closed, however the tasks around it fare."""
        with self._service, self._connected:
            async with trio.open_nursery() as connections:
                connections.start_soon(self._accept, connections)
        self._emptied.set()

    async def _accept(self, connections: trio.Nursery) -> None:
        with self._accepting:
            await trio.serve_listeners(self._connection, [self.listener], handler_nursery=connections)

    async def _connection(self, stream: trio.SocketStream) -> None:
        """One connection to its end; what goes wrong in it stays in it. The isolation edge: Hypercorn lets a
        bug end the whole server.
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
            logger.exception("a connection met a bug")
        finally:
            self._streams.discard(stream)
            # Each holds the other: no connection is left to the garbage collector, which runs rarely.
            connection.protocol = None  # type: ignore[assignment]

    async def close(self) -> None:
        """Stop accepting, let answers end, cancel the rest, and take the sockets from whoever is stuck in a
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
