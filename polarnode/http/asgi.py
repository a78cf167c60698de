"""What every ASGI app here uses: request bodies read to a limit, responses sent as they come, and the helpers
of Quart handlers.

Invariants. The status is chosen as late as possible, with the first bytes: a prompt that is too long must
still become a 400. A stream is ended properly or not at all: returning without the last body message makes
Hypercorn cut the connection without the terminal chunk, and logs nothing. Nothing here depends on a route.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, cast

from attrs import define, field, frozen
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, HTTPScope
from quart import Response, request

from polarnode.core.codec.json import read_json
from polarnode.core.conversation import Json
from polarnode.providers.contract import Reply

# ── request bodies ────────────────────────────────────────────────────────────

# a million tokens are 4-6 MB of JSON, and six times that when every character is escaped
BODY_BYTES: Final = 64 << 20
WRITES: Final = "polarnode.writes"  # the key of `ConnectionWrites` in a request's scope["state"]
# for all bodies one endpoint is reading: 1.5 times the longest; a dozen concurrent sub-agents send 4 MB each
RESERVED_BYTES: Final = 96 << 20
# a body over the limit is read up to this size and dropped: a client that is still sending does not read
# its 413
DRAINED_BYTES: Final = 256 << 20


@frozen
class TooLarge:
    """A body over the limit. It was dropped."""


@frozen
class Overloaded:
    """A body over the budget of the bodies that its endpoint is reading. It was dropped."""


@frozen
class ClientDisconnected:
    """The client disconnected before its request was complete."""


@define(eq=False)
class BodyBudget:
    """The bytes that all bodies being read by one endpoint may take together, so that a client that starts
    many requests and completes none cannot fill the memory.
    """

    free: int = RESERVED_BYTES

    @contextmanager
    def reserve(self) -> Iterator["Reservation"]:
        """Open one request's share of the budget, which is returned at the end of the block."""
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            self.free += reservation.bytes


@define(eq=False)
class Reservation:
    """The bytes of the budget taken by one body."""

    budget: BodyBudget
    bytes: int = 0

    def take(self, count: int) -> bool:
        """Take `count` more bytes of the budget. Returns False when they are not free."""
        if count > self.budget.free:
            return False
        self.budget.free -= count
        self.bytes += count
        return True


async def read_body(
    receive: ASGIReceiveCallable, *, reservation: Reservation, limit: int = BODY_BYTES
) -> bytes | TooLarge | Overloaded | ClientDisconnected:
    """Read the request's whole body."""
    parts: list[bytes] = []
    size, fits = 0, True
    while size <= DRAINED_BYTES:
        message = await receive()
        if message["type"] != "http.request":
            return ClientDisconnected()
        size += len(message["body"])
        fits = fits and size <= limit and reservation.take(len(message["body"]))
        if fits:
            parts.append(message["body"])
        else:
            parts.clear()
        if not message["more_body"]:
            break
    if size > limit:
        return TooLarge()
    return b"".join(parts) if fits else Overloaded()


async def wait_disconnected(receive: ASGIReceiveCallable) -> None:
    """Return when the client has disconnected. What it still sends is dropped, so that Hypercorn's reader
    never blocks.
    """
    while (await receive())["type"] != "http.disconnect":
        pass


# ── responses ─────────────────────────────────────────────────────────


@define(eq=False)
class ConnectionWrites:
    """The state of a connection's writes: how many `writes` its socket took whole, and whether one is
    `broken`.

    `hold_next`: the next bytes are held and sent with those that follow.
    """

    writes: int = 0
    broken: bool = False
    hold_next: bool = False


def writes_of(scope: HTTPScope) -> ConnectionWrites | None:
    """The writes of a request's connection; None under a server other than `open_server`'s."""
    return cast("dict[str, ConnectionWrites]", scope.get("state") or {}).get(WRITES)


@define(eq=False)
class Responder:
    """The response to one request. `request_id` is sent as `x-request-id`.

    `delivered`: the last bytes were handed to the socket of a connected client; without `connection`, to the
    server. In a stream these are the last bytes of its dialect: many clients close as soon as they have read
    those, and never read the end of the chunked body.
    """

    send: ASGISendCallable
    request_id: str
    connection: ConnectionWrites | None = None
    opened: bool = field(default=False, init=False)
    delivered: bool = field(default=False, init=False)
    _taken: bool = field(default=False, init=False)  # whether the socket took the last bytes

    async def reply(self, reply: Reply) -> None:
        """Send a whole response."""
        length = ("content-length", str(len(reply.body)))
        await self._start(reply.status, (*reply.headers, length))
        await self._body(reply.body, more=False)
        self.delivered = self._taken

    async def stream(self, data: bytes, content_type: str, *, last: bool = False) -> None:
        """Send bytes of a stream; the first open it. The `last` bytes are sent together with the stream's
        end: call `end` next.
        """
        if not self.opened:
            await self._start(200, (("content-type", content_type), ("cache-control", "no-cache")))
        if last and self.connection:
            self.connection.hold_next = True
        await self._body(data, more=True)

    async def end(self) -> None:
        """End the stream properly."""
        taken = self._taken
        await self._body(b"", more=False)
        self.delivered = taken or self._taken  # `_taken` where the last bytes were held for this

    async def _start(self, status: int, headers: tuple[tuple[str, str], ...]) -> None:
        self.opened = True
        spelled = [
            (name.encode(), value.encode()) for name, value in (*headers, ("x-request-id", self.request_id))
        ]
        if self.connection:
            # head and body in one write: the first bytes of the body follow at once
            self.connection.hold_next = True
        await self.send({"type": "http.response.start", "status": status, "headers": spelled})

    async def _body(self, data: bytes, *, more: bool) -> None:
        before = self.connection.writes if self.connection else 0
        await self.send({"type": "http.response.body", "body": data, "more_body": more})
        self._taken = self.connection is None or (
            self.connection.writes > before and not self.connection.broken
        )


def header_map(headers: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
    """Headers by lower-case name; of several with one name, the last."""
    return {name.decode("latin1").lower(): value.decode("latin1") for name, value in headers}


# ── handlers ────────────────────────────────────────────────────────────

RouteRow = tuple[str, str, Callable[..., Awaitable[Response]]]  # method, path, handler


async def body_bytes() -> bytes:
    body = await request.get_data()
    # Quart's annotation allows text, which only as_text=True gives
    return body if isinstance(body, bytes) else body.encode()


async def body_json() -> Json:
    """The request's body as JSON. Raises Refused; an empty body is not JSON."""
    return read_json(await body_bytes())


async def body_json_or(nothing: Json) -> Json:
    """The request's body as JSON; `nothing` when it is empty."""
    body = await body_bytes()
    return read_json(body) if body.strip() else nothing
