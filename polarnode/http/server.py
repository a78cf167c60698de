"""Listening sockets, and how Hypercorn and Quart are configured to serve them.

This module and `connections.py` patch hypercorn 0.18 and quart-trio 0.12, whose defaults leak connections,
cut streams and cannot be stopped. Each patch states what was measured without it and has a test; pyproject
pins both. A node serves one control plane and one model endpoint for each session, so opening and closing a
server is cheap, and closing is bounded whatever a peer does.
"""

import errno
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from hashlib import sha256
from ipaddress import ip_network
from pathlib import Path
from typing import Final

import trio
from attrs import define, field, frozen
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import (
    AppWrapper,
    ASGIFramework,
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
)
from hypercorn.utils import wrap_app
from quart.asgi import ASGIHTTPConnection
from quart.typing import ResponseTypes
from quart.wrappers import Request
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers.request import TrioBody

from polarnode.core.errors import ConfigError, boundary
from polarnode.http.asgi import MAX_BODY_S, MAX_DRAINED_BYTES
from polarnode.http.connections import MAX_READ_BYTES, PLAIN, Connection, DirectApp, refusal_bytes
from polarnode.http.places import ConnectionSlots, Place

logger = logging.getLogger(__name__)

# The most connections that wait to be accepted. If a flood of them fills this queue, a trainer's connection
# waits a second for its next try. The kernel keeps some hundred bytes of each.
ACCEPT_BACKLOG: Final = 1024
# The most open connections of a socket. Ten measured harnesses used 3. A runaway client must not exhaust the
# node's descriptors.
CONNECTIONS: Final = 256
# The most open connections of the control plane. Each stream of a trainer takes one, and 384 may be streams.
MAX_CONTROL_CONNECTIONS: Final = 512
# The most open connections of the captures' endpoint: eight for each of the 64 captures that a node holds.
# With TLS they take some 60 MB.
MAX_CAPTURE_CONNECTIONS: Final = 512
# Connections that were closed for others are logged once in this many seconds, with their number, so that a
# flood of them does not fill the log.
LOG_PERIOD_S: Final = 10.0
# This many refused connections get this many seconds to read the reason.
REFUSED: Final = 32
REFUSED_S: Final = 1.0
# A peer that reads nothing for this long is taken to be gone. A harness that compiles or swaps resumes
# sooner.
STALLED_MS: Final = 30_000
ANSWERING_S: Final = 1.0  # time a closing server gives to responses in progress
# The tasks of these responses then have this time to end. A task that has not ended is blocked in a send, and
# its socket is closed.
UNWINDING_S: Final = 1.0
CLOSING_S: Final = ANSWERING_S + 3 * UNWINDING_S  # an outer limit, never reached: `close` has its own
# A TLS handshake must end within this time from the connection's start. It takes two round trips, 1 s on the
# slowest links.
HANDSHAKE_S: Final = 10.0
# Seconds between checks of a certificate's files. Kubernetes renews a certificate days before it expires.
CERTIFICATE_CHECK_S: Final = 30.0

# ── TLS ────────────────────────────────────────────────────────────


@define(eq=False)
class Certificate:
    """A certificate chain and its key, read from two PEM files into the `context` of new connections. `watch`
    reads the files again when they change, so that a certificate may be renewed while it serves. Raises
    ConfigError, which names the settings that begin with `settings`. `digest` is the certificate's SHA-256,
    as clients pin it.
    """

    chain: str
    key: str
    settings: str = field(default="capture_tls", kw_only=True)
    context: ssl.SSLContext = field(init=False)
    digest: str = field(init=False)
    _seen: tuple[tuple[int, int], ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._seen = self._file_stamps()
        self.context, self.digest = self._read()

    async def watch(self) -> None:
        """Look at the files every CERTIFICATE_CHECK_S, for ever."""
        while True:
            await trio.sleep(CERTIFICATE_CHECK_S)
            await self.renew()

    async def renew(self) -> None:
        """Read the files again if they changed. If the new chain and key do not fit each other, the old ones
        stay in use, because the two files may be written one after the other.
        """
        try:
            stamps = await trio.to_thread.run_sync(self._file_stamps)
            if stamps != self._seen:
                self.context, self.digest = await trio.to_thread.run_sync(self._read)
                self._seen = stamps
                logger.info("the certificate %s was read again", self.chain)
        except ConfigError as error:
            logger.warning("the certificate in use stays: %s", error)

    def _file_stamps(self) -> tuple[tuple[int, int], ...]:
        """Numbers of both files that change when a file is written, or a link leads to another file."""
        stamps = []
        for name, path in (("cert", self.chain), ("key", self.key)):
            with boundary(ConfigError, f"{self.settings}_{name} {path} cannot be read"):
                found = os.stat(path)
            stamps.append((found.st_ino, found.st_mtime_ns))
        return tuple(stamps)

    def _read(self) -> tuple[ssl.SSLContext, str]:
        """Return a context for TLS 1.2 and 1.3 and for HTTP/1.1 only, without renegotiation, and the digest
        of the chain's first certificate, which is the server's own.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.chain, self.key, password=lambda: b"")  # never asks at a terminal
            pem = Path(self.chain).read_text("latin-1")
            end = pem.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
            shown = ssl.PEM_cert_to_DER_cert(pem[pem.index(ssl.PEM_HEADER) : end])
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{self.settings}_cert {self.chain} and {self.settings}_key {self.key} do not serve"
                f" ({reason}): give the PEM file of a certificate with its chain, and that of its key"
                " without a passphrase"
            ) from error
        return context, sha256(shown).hexdigest()


# ── servers ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Address:
    """Where a server listens. Port 0 means any free port."""

    host: str
    port: int


# The most bytes of a body that wait for its handler: enough for some writes to a disk.
MAX_BUFFERED_BYTES: Final = 4 << 20


class StreamedBody(TrioBody):
    """The body of a PUT, whose size its handler limits. `async for` takes it piece by piece, and at most
    about MAX_BUFFERED_BYTES are received before they are taken.
    """

    def __init__(self) -> None:
        super().__init__(None, None)
        self._taken = trio.Event()

    async def __anext__(self) -> bytes:
        data = await super().__anext__()
        self._taken.set()
        return data

    async def wait_room(self) -> None:
        """Wait until the handler has taken enough that more can be received."""
        while len(self._data) > MAX_BUFFERED_BYTES:
            self._taken = trio.Event()
            await self._taken.wait()

    async def drop_rest(self) -> None:
        """Read and drop what the handler did not take, because a client that is still sending does not read
        its refusal.
        """
        dropped = 0
        with trio.move_on_after(MAX_BODY_S):
            async for data in self:
                dropped += len(data)
                if dropped > MAX_DRAINED_BYTES:
                    return


class PatchedConnection(TrioASGIHTTPConnection):
    """quart-trio's connection, without the cancellation that leaves sockets open.

    After a whole response Hypercorn sends the app `http.disconnect`; quart-trio then cancels the request, and
    with it the send that is about to close the connection or to restart its idle timer. Measured without this
    patch: a connection with `Connection: close` was still open after 12 s, and idle connections never timed
    out. So a disconnect is ignored once the last body message has been handed over. In addition, the body of
    a PUT is received only as fast as its handler takes it.
    """

    answered = False

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if self.scope["method"] != "PUT":
            await super().__call__(receive, send)
            return
        request, body = self._create_request_from_scope(send), StreamedBody()
        request.body = body

        async def paced() -> ASGIReceiveEvent:
            await body.wait_room()
            return await receive()

        async def send_after_body(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.start":
                await body.drop_rest()
            await send(message)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.handle_messages, nursery, request, paced)
            nursery.start_soon(self.handle_request, nursery, request, send_after_body)

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
    app.asgi_http_class = PatchedConnection
    app.config.update(RESPONSE_TIMEOUT=None, BODY_TIMEOUT=None)


@asynccontextmanager
async def open_server(
    app: ASGIFramework | DirectApp,
    where: socket.socket | Address,
    *,
    connections: int | None = None,
    certificate: Certificate | None = None,
) -> AsyncIterator[Address]:
    """Serve `app` on an address, or on a listening socket, which is closed at the end. Raises ConfigError
    when the address is not available. At most `connections` are open at once, CONNECTIONS by default. With a
    `certificate` only TLS is spoken, and its files are watched.

    The app gets no lifespan events; open what it needs around this block. The server outlives the block, even
    a cancelled one, and then closes: idle connections at once, responses in progress after ANSWERING_S,
    everything after about 2 s. An exception of the block is raised as itself, not in a group.
    """
    if isinstance(app, QuartTrio):
        mend(app)
    sock = listening_socket(where) if isinstance(where, Address) else where
    places = ConnectionSlots(limit=connections or CONNECTIONS)
    server = _Server(
        app=app if isinstance(app, DirectApp) else wrap_app(app, 0, "asgi"),
        listener=_trio_listener(sock),
        places=places,
        certificate=certificate,
    )
    failed: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        nursery.start_soon(server.watch)
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
        return socket.create_server((address.host, address.port), family=family, backlog=ACCEPT_BACKLOG)
    except OSError as error:
        remedy = (
            "choose another with --port"
            if error.errno == errno.EADDRINUSE
            else "choose another with --host and --port"
        )
        raise ConfigError(
            f"cannot listen on {address.host} port {address.port} ({error.strerror}): {remedy}"
        ) from error


def _trio_listener(sock: socket.socket) -> trio.SocketListener:
    """Set the time limit for a peer that stops reading, which accepted sockets inherit: Hypercorn shields
    every send and sets no limit itself.
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

    app: AppWrapper | DirectApp
    listener: trio.SocketListener
    places: ConnectionSlots
    certificate: Certificate | None = None
    config: Config = field(factory=_config)
    _context: WorkerContext = field(factory=partial(WorkerContext, None), init=False)
    _streams: set[trio.SocketStream] = field(factory=set, init=False)
    _accepting: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _watching: trio.CancelScope = field(factory=trio.CancelScope, init=False)
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
                connections.start_soon(self._accept_connections, connections)
        self._emptied.set()

    async def watch(self) -> None:
        """Keep the certificate up to date with its files, until closed."""
        with self._watching:
            if self.certificate is not None:
                await self.certificate.watch()

    async def _accept_connections(self, connections: trio.Nursery) -> None:
        with self._accepting:
            await trio.serve_listeners(self._connection, [self.listener], handler_nursery=connections)

    async def _connection(self, stream: trio.SocketStream) -> None:
        """Serve one connection to its end and log its errors, because Hypercorn lets one error end the whole
        server.
        """
        peer, now = _peer_address(stream), trio.current_time()
        if self.certificate is not None and not self.places.tries.take(peer, now):
            self._count_displaced()
            stream.socket.close()  # without a response, which would take a handshake
            return
        with trio.CancelScope() as scope:
            place, displaced = self.places.take(peer, partial(_end, stream, scope), now)
            if displaced is not None or place is None:
                self._count_displaced()
            if place is None:
                if self.certificate is None:
                    await self._refuse(stream)
                return
            self._streams.add(stream)
            try:
                await self._serve(stream, place)
            except* Exception:
                logger.exception("a connection failed unexpectedly")
            finally:
                self.places.leave(place)
                self._streams.discard(stream)
                stream.socket.close()  # also where Hypercorn was cancelled before it did

    async def _serve(self, stream: trio.SocketStream, place: Place) -> None:
        secure: trio.SSLStream[trio.SocketStream] | None = None
        if self.certificate is not None:
            place.tried = True
            secure = trio.SSLStream(stream, self.certificate.context, server_side=True, https_compatible=True)
            if not await _shake_hands(secure):
                return
        connection = Connection(self.app, self.config, self._context, secure or stream, place)
        try:
            await connection
        finally:
            # Break the reference cycle: the garbage collector runs rarely.
            connection.protocol = None  # type: ignore[assignment]

    async def _refuse(self, stream: trio.SocketStream) -> None:
        """Answer 503. What the client has sent is read first, because closing a socket that has unread bytes
        discards the answer.
        """
        try:
            self._refused.acquire_nowait()
        except trio.WouldBlock:
            return
        try:
            with trio.move_on_after(REFUSED_S), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await stream.send_all(refusal_bytes(503))
                await stream.send_eof()
                while await stream.receive_some(MAX_READ_BYTES):
                    pass
        finally:
            self._refused.release()

    def _count_displaced(self) -> None:
        self._displaced += 1
        now = trio.current_time()
        if now >= self._logged + LOG_PERIOD_S:
            logger.warning(
                "%d connections were closed for newer ones or refused: %d may be open on this socket, and an"
                " address that shows no right key has few",
                self._displaced,
                self.places.limit,
            )
            self._displaced, self._logged = 0, now

    async def close(self) -> None:
        """Stop accepting, let responses end, cancel the rest, and close the sockets of tasks blocked in a
        send.
        """
        self._accepting.cancel()
        self._watching.cancel()
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


async def _shake_hands(stream: trio.SSLStream[trio.SocketStream]) -> bool:
    """Do the TLS handshake. Return False where it fails; a client that speaks plain HTTP gets a 400."""
    try:
        with trio.fail_after(HANDSHAKE_S):
            await stream.do_handshake()
    except trio.BrokenResourceError as error:
        if getattr(error.__cause__, "reason", None) == "HTTP_REQUEST":
            with trio.move_on_after(REFUSED_S), suppress(trio.BrokenResourceError):
                await stream.transport_stream.send_all(refusal_bytes(400, PLAIN))
                await stream.transport_stream.send_eof()
        return False
    except (trio.TooSlowError, trio.ClosedResourceError, OSError):
        return False
    return True


def _peer_address(stream: trio.SocketStream) -> str:
    """The address of a client. Of an IPv6 address only the first half counts, because every client has a
    whole network of second halves.
    """
    try:
        address = str(stream.socket.getpeername()[0]).partition("%")[0]
    except OSError:  # it has left already
        return ""
    return str(ip_network(f"{address}/64", strict=False)) if ":" in address else address


def _end(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    """Close a connection from outside. Its sends are shielded, and end because the socket is shut down."""
    with suppress(OSError):
        stream.socket.shutdown(socket.SHUT_RDWR)
    scope.cancel()
