"""One connection, which speaks HTTP/1.1 only and has time limits.

This module patches hypercorn 0.18. Each patch states what was measured without it and has a test; pyproject
pins the version. Hypercorn would also speak HTTP/2 without TLS and WebSockets to every client that asks.
Nothing here is made for them, so both are refused with a sentence.
"""

import math
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, Protocol, cast

import h11
import trio
from attrs import define, field, frozen
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, Request, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import (
    AppWrapper,
    ASGIReceiveCallable,
    ASGISendCallable,
    ConnectionState,
    HTTPScope,
    Scope,
)
from hypercorn.utils import parse_socket_addr, suppress_body

from polarnode.core.codec.json import dump_json
from polarnode.http.places import SLOT_KEY, Place

# Bytes of one read. Hypercorn's 64 KiB split a long request into parts that cost 50 us each.
MAX_READ_BYTES: Final = 256 << 10
# An idle connection is closed after this time. It is longer than clients keep theirs (5-90 s), so that none
# is closed while its next request is being sent.
KEEP_ALIVE_S: Final = 120.0
# A request's head must come within this time from its first byte; the first head of a connection, from the
# connection's start. Clients send it in one write as soon as they are connected.
HEAD_S: Final = 10.0
# A body may pause for BODY_PAUSE_S in all, and regains one second of that with every BODY_BYTES_PER_S bytes.
# Every link is much faster, and a harness that compiles or swaps pauses for less.
BODY_PAUSE_S: Final = 30.0
BODY_BYTES_PER_S: Final = 4 << 10
# The most lines of a head. The longest measured request of a harness has 25. Each line costs some 5 us of the
# event loop, and all connections may send theirs at once.
MAX_HEAD_LINES: Final = 128
# The most bytes of request line and headers. Claude Code, the longest measured, sends under 4 KiB.
HEADERS_BYTES: Final = 64 << 10
_HEAD_END: Final = re.compile(rb"\n\r?\n")

# ── apps that write their responses ─────────────────────────────────────────────────

Head = tuple[int, list[tuple[bytes, bytes]]]  # a response's status and headers


@define(eq=False)
class ClientDeparture:
    """Whether the client of one request has left, or has received its whole response. `then` is called
    synchronously when that happens, because a task that waits for it costs 60 us a request.
    """

    left: bool = False
    then: Callable[[], object] | None = None

    def note(self) -> None:
        self.left = True
        if self.then is not None:
            self.then()


class ResponseWriter(Protocol):
    """Writes the response to one request, and knows of its client's departure."""

    @property
    def departure(self) -> ClientDeparture: ...

    async def write(self, head: Head | None, data: bytes, *, end: bool) -> bool:
        """Write the next part of the response in one write: its head, some of its body, its end. Returns
        whether the socket of a connected client took it.
        """


@frozen
class DirectApp:
    """An app that is given a writer for its response where an ASGI app is given `send`. It learns whether the
    socket took what it wrote, and that the client has left without waiting for it. An app that returns before
    it wrote the end cuts the connection.
    """

    serve: Callable[[HTTPScope, ASGIReceiveCallable, ResponseWriter], Awaitable[None]]

    def answer_with(self, response: ResponseWriter) -> AppWrapper:
        """The app as Hypercorn calls it for one request."""

        async def run(
            scope: Scope,
            receive: ASGIReceiveCallable,
            send: ASGISendCallable,
            sync_spawn: Callable[..., Any],
            call_soon: Callable[..., Any],
        ) -> None:
            await self.serve(cast(HTTPScope, scope), receive, response)

        return run


# ── refusals ────────────────────────────────────────────────────────────

Headers = list[tuple[bytes, bytes]]
SENTENCES: Final = {
    400: ("bad_request", "this is not a well-formed HTTP/1.1 request: check its head and its length"),
    408: ("too_slow", "the request did not come whole in time: send it again, at once"),
    426: ("invalid_request_error", "WebSockets are not served here: send the request over plain HTTP"),
    431: ("too_large", "the request has too many headers, or too long ones: send fewer"),
    501: ("not_implemented", "the only transfer encoding taken is chunked"),
    503: ("busy", "all connections of this socket are in use: close some, and try again"),
    505: ("http_version", "only HTTP/1.1 is served here: turn HTTP/2 off in the client"),
}
# The words of a 400 to plain HTTP on a TLS socket.
PLAIN: Final = (
    "tls_required",
    (
        "only TLS is spoken here: write https:// in the address; a key or a token that was just sent could"
        " be read on its way: end its capture and begin another, or give the node another token"
    ),
)
_EXTRA_HEADERS: Final[dict[int, Headers]] = {
    426: [(b"upgrade", b"HTTP/1.1")],
    503: [(b"retry-after", b"1")],
}


def _refusal(status: int, words: tuple[str, str] | None = None) -> tuple[Headers, bytes]:
    kind, message = words or SENTENCES.get(status, SENTENCES[400])
    body = dump_json({"error": {"type": kind, "message": message}})
    length = (b"content-length", str(len(body)).encode())
    return [
        (b"content-type", b"application/json"),
        (b"x-content-type-options", b"nosniff"),
        length,
        (b"connection", b"close"),
        *_EXTRA_HEADERS.get(status, []),
    ], body


def refusal_bytes(status: int, words: tuple[str, str] | None = None) -> bytes:
    """A whole response to a connection that is closed afterwards. `words` replace the status's own."""
    headers, body = _refusal(status, words)
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    return b"HTTP/1.1 %d \r\n%b\r\n%b" % (status, lines, body)


def unserved(request: h11.Request) -> int | None:
    """The status with which a well-formed head is refused, or None."""
    if request.http_version not in (b"1.1", b"1.0"):
        return 505  # HTTP/2's first line is a request for `*`
    if not request.target.startswith(b"/"):
        return 400  # the target is one for a proxy, which this is not
    names = dict(request.headers)
    if b"transfer-encoding" in names and b"content-length" in names:
        return 400  # a proxy in front might believe the other one, and take a body for a request
    return 426 if names.get(b"upgrade", b"").lower() == b"websocket" else None


class _BoundedParser(h11.Connection):
    """h11's parser, which checks the size of a head before it parses it. Measured without this: a head of
    15,000 lines takes 75 ms of the event loop.
    """

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE:
            data, _ = self.trailing_data
            end = _HEAD_END.search(data)
            length = end.start() if end else len(data)
            if length > HEADERS_BYTES or data.count(b"\n", 0, length) > MAX_HEAD_LINES:
                raise h11.RemoteProtocolError("the head is too long", error_status_hint=431)
        return super().next_event()


class Stream(HTTPStream):
    """Hypercorn's request, which is also the writer of the response of a `DirectApp`."""

    protocol: "Http1Protocol"
    departure: ClientDeparture

    async def handle(self, event: StreamEvent) -> None:
        if isinstance(event, StreamClosed) and not self.closed:
            self.departure.note()
        await super().handle(event)

    async def end_body(self, data: bytes) -> None:
        """Pass the last bytes of the body to the app, together with its end."""
        await self.app_put({"type": "http.request", "body": data, "more_body": False})

    async def write(self, head: Head | None, data: bytes, *, end: bool) -> bool:
        """Do what `ResponseWriter` says. Through ASGI a whole response takes three writes and their events,
        measured as 0.1 ms.
        """
        if self.closed:
            return False
        writes = self.protocol.writes
        before = writes.writes
        if head is not None:
            self.response = {"type": "http.response.start", "status": head[0], "headers": head[1]}
            self.state = ASGIHTTPState.RESPONSE
        bodiless = suppress_body(self.scope["method"], self.response["status"])
        await self.protocol.write(head, b"" if bodiless else data, end=end)
        if end:
            self.state = ASGIHTTPState.CLOSED
            await self.send(StreamClosed(stream_id=STREAM_ID))
        return writes.writes > before and not writes.broken


class Http1Protocol(H11Protocol):
    """Hypercorn's HTTP/1.1, which never becomes HTTP/2 or a WebSocket, and refuses with a sentence.

    Measured with HTTP/2: equal requests got one answer, because it was not known that an answer had been
    delivered, and a harness that opened and reset streams made the event loop 8 s late.

    WebSockets are refused with 426 and not with 404: Codex tries one first, and after a 404 it waits 7 s
    before it falls back to HTTP.
    """

    def __init__(self, writes: "ConnectionWrites", *arguments: Any) -> None:
        super().__init__(*arguments)
        self.writes = writes
        self.connection = _BoundedParser(h11.SERVER, max_incomplete_event_size=HEADERS_BYTES)

    async def _create_stream(self, request: h11.Request) -> None:
        status = unserved(request)
        if status is not None:
            await self._send_error_response(status, bodiless=request.method == b"HEAD")
            await self.send(Closed())
            return
        stream = self.stream = Stream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        stream.protocol, stream.departure = self, ClientDeparture()
        if isinstance(self.app, DirectApp):
            stream.app = self.app.answer_with(stream)
        await stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=request.target,
                state=ConnectionState({**self.connection_state}),
            )
        )
        # Otherwise the stream refers to itself, and keeps a session in memory until the garbage collector
        # runs.
        stream.app = self.app
        self.keep_alive_requests += 1
        await self.context.mark_request()

    async def write(self, head: Head | None, data: bytes, *, end: bool) -> None:
        """Write the next part of the response in progress, in one write."""
        events: list[h11.Response | h11.Data | h11.EndOfMessage] = []
        if head is not None:
            status, headers = head
            headers = [*headers, *self.config.response_headers("h11")]
            if self.keep_alive_requests >= self.config.keep_alive_max_requests:
                headers.append((b"connection", b"close"))
            events.append(h11.Response(status_code=status, headers=headers))
        if data:
            events.append(h11.Data(data=data))
        if end:
            events.append(h11.EndOfMessage())
        try:
            written = b"".join([self.connection.send(event) or b"" for event in events])
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise
        else:
            await self.send(RawData(data=written))

    async def _handle_events(self) -> None:
        """Do what Hypercorn does, but pass the last bytes of a body together with its end, which wakes the
        app one time less.
        """
        held: bytes | None = None
        while True:
            if self.connection.they_are_waiting_for_100_continue:
                await self._send_h11_event(
                    h11.InformationalResponse(status_code=100, headers=self.config.response_headers("h11"))
                )
            try:
                event = self.connection.next_event()
            except h11.RemoteProtocolError as error:
                await self._pass_on(held)
                if self.connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
                    await self._send_error_response(error.error_status_hint)
                await self.send(Closed())
                return
            if isinstance(event, h11.EndOfMessage) and isinstance(self.stream, Stream):
                await self.stream.end_body(held or b"")
                held = None
                continue
            await self._pass_on(held)
            held = None
            if isinstance(event, h11.Request):
                await self.send(Updated(idle=False))
                await self._create_stream(event)
            elif event is h11.PAUSED:
                await self.can_read.clear()
                await self.can_read.wait()
            elif isinstance(event, h11.Data) and self.stream is not None:
                held = bytes(event.data)
            else:  # more data is needed, or none will come
                return

    async def _pass_on(self, data: bytes | None) -> None:
        """Pass a part of a body, which more parts follow, to the app."""
        if data is not None and self.stream is not None:
            await self.stream.handle(Body(stream_id=STREAM_ID, data=data))

    async def _send_error_response(self, status_code: int, *, bodiless: bool = False) -> None:
        headers, body = _refusal(status_code)
        await self._send_h11_event(
            h11.Response(status_code=status_code, headers=[*headers, *self.config.response_headers("h11")])
        )
        if not bodiless:
            await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())

    @property
    def awaits_body(self) -> bool:
        """Whether a body has begun and not ended."""
        return self.connection.their_state is h11.SEND_BODY

    @property
    def awaits_head(self) -> bool:
        """Whether a head has begun and not ended."""
        return bool(self.connection.trailing_data[0]) and self.stream is None

    async def refuse_slow(self) -> None:
        """Answer 408, unless a response has begun."""
        if self.connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self._send_error_response(408)


# ── connection ────────────────────────────────────────────────────────────


@define(eq=False)
class ConnectionWrites:
    """The state of a connection's writes: how many `writes` its socket took whole, and whether one is
    `broken`.
    """

    writes: int = 0
    broken: bool = False


@define(eq=False)
class IdleTimer:
    """Hypercorn's timer of an idle connection, as one task for all idle periods, because a task for each
    request costs 80 us. The time in which a head is being sent belongs to the idle period.
    """

    idle: bool = field(default=False, init=False)
    ended: bool = field(default=False, init=False)
    scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _started: bool = field(default=False, init=False)
    _limited: bool = field(default=False, init=False)

    async def restart(self, task_group: TaskGroup, action: Callable[[], Awaitable[None]]) -> None:
        self.idle, self._limited = True, False
        self.scope.deadline = trio.current_time() + KEEP_ALIVE_S
        if not self._started:
            self._started = True
            task_group.spawn(action)

    def limit(self) -> None:
        """Give a head that has begun, or is expected at once, HEAD_S from the first call in an idle
        period.
        """
        if not self._limited:
            self._limited = True
            self.scope.deadline = min(self.scope.deadline, trio.current_time() + HEAD_S)

    async def stop(self) -> None:
        self.idle = False
        self.scope.deadline = math.inf

    def end(self) -> None:
        """Stop the timer for good."""
        self.idle, self.ended = False, True
        self.scope.cancel()


class Connection(TCPServer):
    """Hypercorn's connection, without an idle timer that outlives its client, and with limits on the time
    that a request's head and body take.

    A client that closes as soon as it has its response often leaves before Hypercorn notes the end of the
    response. Hypercorn then starts the idle timer of a closed connection. Measured without this patch: one in
    four such connections stayed open for KEEP_ALIVE_S, until no more were accepted.

    It also counts what the socket took, because Hypercorn's own `send` returns the same for bytes that are
    lost.
    """

    def __init__(
        self,
        app: AppWrapper | DirectApp,
        config: Config,
        context: WorkerContext,
        stream: "trio.SocketStream | trio.SSLStream[trio.SocketStream]",
        place: Place,
    ) -> None:
        state = ConnectionState({SLOT_KEY: place})
        # A direct app or a plain TCP stream is only passed on by the base class, which calls only two methods
        # of the idle timer.
        super().__init__(app, config, context, state, stream)  # type: ignore[arg-type]
        self.idle_task: IdleTimer = IdleTimer()  # type: ignore[assignment]
        self.protocol: Http1Protocol = None  # type: ignore[assignment]
        self._place, self._writes = place, ConnectionWrites()
        self._patience_s = BODY_PAUSE_S

    async def run(self) -> None:
        """Do what Hypercorn does, but after the TLS handshake, if any, and for HTTP/1.1 only."""
        secure = isinstance(self.stream, trio.SSLStream)
        try:
            socket = (self.stream.transport_stream if secure else self.stream).socket
            async with TaskGroup() as task_group:
                self._task_group = task_group
                self.protocol = Http1Protocol(
                    self._writes,
                    self.app,
                    self.config,
                    self.context,
                    task_group,
                    ConnectionState(self.state),
                    secure,
                    parse_socket_addr(socket.family, socket.getpeername()),
                    parse_socket_addr(socket.family, socket.getsockname()),
                    self.protocol_send,
                )
                await self.idle_task.restart(task_group, self._idle_timeout)
                self.idle_task.limit()
                await self._read_data()
        except OSError:
            pass  # the client has left
        finally:
            await self._close()  # noqa: ASYNC102 - closes at once, also when cancelled

    async def _read_data(self) -> None:
        """Do what Hypercorn does, but with larger reads and time limits."""
        more = True
        while more:
            try:
                data = await self._receive()
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                break
            except trio.TooSlowError:
                await self.protocol.refuse_slow()
                break
            more = bool(data)
            await self.protocol.handle(RawData(data))
            # Otherwise the data, 100 KB of a long conversation, stays in memory until the client sends more.
            del data
            if self.idle_task.idle and self.protocol.awaits_head:
                self.idle_task.limit()
        await self.protocol.handle(Closed())
        self.idle_task.end()

    async def _receive(self) -> bytes:
        """Receive the next bytes. Raises TooSlowError for a body that comes too slowly; the time that its app
        takes to read the body does not count.
        """
        if not self.protocol.awaits_body:
            self._patience_s = BODY_PAUSE_S
            return bytes(await self.stream.receive_some(MAX_READ_BYTES))
        began = trio.current_time()
        with trio.fail_after(self._patience_s):
            data = bytes(await self.stream.receive_some(MAX_READ_BYTES))
        self._patience_s += len(data) / BODY_BYTES_PER_S - (trio.current_time() - began)
        self._patience_s = min(max(self._patience_s, 0.0), BODY_PAUSE_S)
        return data

    async def _close(self) -> None:
        """Do what Hypercorn does, but end the sending side before a TLS connection closes too: closing a
        socket that has unread bytes discards an answer that is on its way.
        """
        if isinstance(self.stream, trio.SSLStream):
            with suppress(trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError):
                await self.stream.transport_stream.send_eof()
        await super()._close()

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
                    if self.protocol.awaits_head:
                        await self.protocol.refuse_slow()
                    await self._initiate_server_close()
                return

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Updated):
            if not event.idle:
                self._place.busy = True
            else:
                self._place.rest(trio.current_time())
            if not self.idle_task.ended:
                await super().protocol_send(event)
        else:
            await super().protocol_send(event)

    async def _write(self, data: bytes) -> None:
        """Write as Hypercorn does, shielded from cancellation, and count the write."""
        writes = self._writes
        if not data:
            return  # the end of a body whose length its head says
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            self.send_lock.acquire_nowait()  # a lock that is free costs no checkpoint
        except trio.WouldBlock:
            await self.send_lock.acquire()
        broken = False
        try:
            with trio.CancelScope(shield=True):
                await self.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            broken = writes.broken = True
        else:
            writes.writes += 1
        finally:
            self.send_lock.release()
        if broken:
            await self.protocol.handle(Closed())
