"""What every ASGI app here uses: the guard against other origins' web pages, request bodies read to a limit,
responses sent as they come, and the helpers of Quart handlers.

Invariants. The status is chosen as late as possible, with the first bytes: a prompt that is too long must
still become a 400. A stream is ended properly or not at all: returning without the last body message makes
Hypercorn cut the connection without the terminal chunk, and logs nothing. Nothing here depends on a route.
"""

import ipaddress
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, cast

import trio
from attrs import define, field, frozen
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, HTTPScope
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import Forbidden, UnsupportedMediaType

from polarnode.core.codec.json import read_json
from polarnode.core.codec.limits import BODY_VALUES, check_body_size, check_nesting
from polarnode.core.conversation import Json
from polarnode.http.connections import DEPARTURE, RESPOND, WRITES, ConnectionWrites, Departure, Head, Respond
from polarnode.http.places import admit
from polarnode.providers.contract import Reply

# ── server-sent events ──────────────────────────────────────────────────

GREETING: Final = b": polarnode\n\n"  # sends the headers at once, so that a reader knows it is connected
KEEP_ALIVE: Final = b": keep-alive\n\n"


def event_response(body: AsyncIterator[bytes]) -> Response:
    """A stream of events, which no proxy is to keep back."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return Response(body, 200, headers, content_type="text/event-stream")


# ── browsers ────────────────────────────────────────────────────────────

# `Sec-Fetch-Site` of a page of ours, and of an address that the user typed
OWN_SITES: Final = (None, "", "same-origin", "none")
# methods whose bodies are JSON; not PUT, which no page sends without asking first
WRITING: Final = ("POST", "PATCH", "DELETE")
_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]/@\s]+?))\.?(?::\d*)?")


@frozen(kw_only=True)
class BrowserGuard:
    """Refuses what a web page of another origin makes a browser send. Clients that are no browsers send
    neither `Origin` nor `Sec-Fetch-Site`, and pass.

    Served are loopback's names and addresses, the address `bound` (`0.0.0.0` and `::` are every address), and
    the names `allowed`, with any port: a tunnel changes it. `*.example.org` is every name below one. A page
    whose own name was pointed at this machine (DNS rebinding) sends that name as `Host`. It has no token, so
    apps that need one may take `any_host`.
    """

    bound: str | None = None
    allowed: tuple[str, ...] = ()
    any_host: bool = False

    def refusal(self, *, host: str | None, origin: str | None, site: str | None) -> str | None:
        """Why a request with these headers is refused, as a sentence; None when it is not."""
        if host and not self.any_host and not self._serves(_hostname(host)):
            return (
                f"the host {host[:100]!r} is not served: use 127.0.0.1 or localhost, or name it in the"
                " setting allowed_hosts (--allowed-host)"
            )
        if origin is not None and not self._own(origin, host):
            return (
                f"a web page of {origin[:100]!r} may not send this: use a program, or a page of this server's"
                " own address; behind a proxy, name its host in allowed_hosts (--allowed-host)"
            )
        if site not in OWN_SITES:
            return (
                f"a web page of another site may not send this (Sec-Fetch-Site: {site[:20]}): use a program,"
                " or a page of this server's own address"
            )
        return None

    def _serves(self, name: str) -> bool:
        if name == "localhost" or name.endswith(".localhost") or self._allows(name):
            return True
        address, bound = _address(name), _address(self.bound or "")
        if address is None:
            return name == self.bound
        return address.is_loopback or address == bound or bound in _EVERY

    def _allows(self, name: str) -> bool:
        return any(name == each or (each[:2] == "*." and name.endswith(each[1:])) for each in self.allowed)

    def _own(self, origin: str, host: str | None) -> bool:
        """Whether a page's origin is the address this was sent to, or a name that is allowed."""
        scheme, _, authority = origin.lower().partition("://")
        if scheme not in ("http", "https"):
            return False
        return authority == (host or "").lower() or self._allows(_hostname(authority))


_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
_EVERY: Final = (ipaddress.IPv4Address(0), ipaddress.IPv6Address(0))


def _hostname(header: str) -> str:
    """The name or address of a `Host` header, in lower case; empty if it is malformed."""
    found = _HOST.fullmatch(header)
    return "" if found is None else (found[1] or found[2]).lower()


def _address(name: str) -> _Ip | None:
    try:
        found = ipaddress.ip_address(name)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def guard_browsers(app: QuartTrio, guard: BrowserGuard, *, open_to_all: bool) -> None:
    """Answer 403 to what the guard refuses, and 415 to a body that is not JSON: forms and plain text are what
    a page may post to any site without asking first. Every answer says that its type is not to be guessed.
    `open_to_all`: the app asks for nothing else, so the connection is admitted.
    """

    @app.after_request
    async def close_guesses(response: Response) -> Response:
        # what agents wrote is in logs and exports: no browser may guess that it is a page or a script
        await trio.lowlevel.checkpoint()
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    @app.before_request
    async def check_browser() -> None:
        # async though it waits for nothing: Quart would run a plain function in a thread
        await trio.lowlevel.checkpoint()
        headers = request.headers
        refused = guard.refusal(
            host=headers.get("Host"), origin=headers.get("Origin"), site=headers.get("Sec-Fetch-Site")
        )
        if refused is not None:
            raise Forbidden(refused)
        # a method that the path does not have is 405, whatever it brings
        writes = request.method in WRITING and request.url_rule is not None
        if writes and headers.get("Content-Type") and not request.is_json:
            raise UnsupportedMediaType(
                "bodies are JSON: send 'Content-Type: application/json' (with curl: --json instead of -d)"
            )
        if open_to_all:
            admit_request()


def admit_request() -> None:
    """Record that the current request of a Quart app had what the app asks for."""
    admit(cast(HTTPScope, request.scope))


# ── request bodies ────────────────────────────────────────────────────────────

# of each body, not counted against the budget that its endpoint shares: most requests are shorter
UNSHARED_BYTES: Final = 1 << 20
# a body over the limit is read up to this size and dropped: a client that is still sending does not read
# its 413
DRAINED_BYTES: Final = 256 << 20
# for the body of a request without a key: one of the usual size is there with its head
DRAINED_S: Final = 2.0
# seconds for a whole body: 64 MiB through a slow tunnel (5 Mbit/s); clients give up after minutes
BODY_S: Final = 120.0


@frozen
class TooLarge:
    """A body over the limit. It was dropped. `size`: the bytes announced, or those that came."""

    size: int


@frozen
class Overloaded:
    """A body over the budget of the bodies that its endpoint is reading. It was dropped."""


@frozen
class TooSlow:
    """A body that was not complete after BODY_S. It was dropped; the rest of it may still come."""


@frozen
class ClientDisconnected:
    """The client disconnected before its request was complete."""


@define(eq=False)
class BodyBudget:
    """The bytes that all bodies being read by one endpoint may take together, so that a client that starts
    many requests and completes none cannot fill the memory. `shared` is the budget of all endpoints, for what
    a body has beyond UNSHARED_BYTES.
    """

    free: int
    shared: "BodyBudget | None" = None

    @contextmanager
    def reserve(self) -> Iterator["Reservation"]:
        """Open one request's share of the budget, which is returned at the end of the block."""
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            reservation.release()


@define(eq=False)
class Reservation:
    """The bytes of the budget taken by one body; `shared` of them are taken of the shared budget too."""

    budget: BodyBudget
    bytes: int = 0
    shared: int = 0

    def take(self, count: int) -> bool:
        """Take `count` more bytes of the budget. Returns False when they are not free."""
        budget = self.budget
        shared = max(0, self.bytes + count - UNSHARED_BYTES) - self.shared if budget.shared else 0
        if count > budget.free or (budget.shared and shared > budget.shared.free):
            return False
        self._move(count, shared)
        return True

    def release(self) -> None:
        """Return all that was taken."""
        self._move(-self.bytes, -self.shared)

    def _move(self, count: int, shared: int) -> None:
        self.budget.free -= count
        self.bytes += count
        self.shared += shared
        if self.budget.shared is not None:
            self.budget.shared.free -= shared


Body = bytes | TooLarge | Overloaded | TooSlow | ClientDisconnected


async def read_body(
    receive: ASGIReceiveCallable, *, reservation: Reservation, limit: int, announced: int = 0
) -> Body:
    """Read the request's whole body. Nothing is kept of one whose `announced` length is over the limit."""
    with trio.move_on_after(BODY_S):
        return await _read_body(receive, reservation=reservation, limit=limit, announced=announced)
    return TooSlow()


async def _read_body(
    receive: ASGIReceiveCallable, *, reservation: Reservation, limit: int, announced: int
) -> Body:
    parts: list[bytes] = []
    size, fits = 0, announced <= limit
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
    if max(size, announced) > limit:
        return TooLarge(max(size, announced))
    return b"".join(parts) if fits else Overloaded()


async def drained(receive: ASGIReceiveCallable) -> bool:
    """Drop the body of a request that is refused whatever it says. False when it is longer than
    UNSHARED_BYTES, or slower than DRAINED_S: the connection is then closed.
    """
    size = 0
    with trio.move_on_after(DRAINED_S):
        while size <= UNSHARED_BYTES:
            message = await receive()
            if message["type"] != "http.request":
                return False
            size += len(message["body"])
            if not message["more_body"]:
                return True
    return False


def announced_length(headers: Mapping[str, str]) -> int:
    """The length of the body as its headers state it; 0 when they do not."""
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) < 20 else 0  # the server checked it


async def wait_disconnected(receive: ASGIReceiveCallable) -> None:
    """Return when the client has disconnected. What it still sends is dropped, so that Hypercorn's reader
    never blocks.
    """
    while (await receive())["type"] != "http.disconnect":
        pass


# ── responses ─────────────────────────────────────────────────────────


def writes_of(scope: HTTPScope) -> ConnectionWrites | None:
    """The writes of a request's connection; None under a server other than `open_server`'s."""
    return cast("dict[str, ConnectionWrites]", scope.get("state") or {}).get(WRITES)


def departure_of(scope: HTTPScope) -> Departure | None:
    """The departure of a request's client; None under a server other than `open_server`'s."""
    return cast("dict[str, Departure]", scope.get("state") or {}).get(DEPARTURE)


def respond_of(scope: HTTPScope) -> Respond | None:
    """What writes a request's response past ASGI; None under a server other than `open_server`'s."""
    return cast("dict[str, Respond]", scope.get("state") or {}).get(RESPOND)


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
    respond: Respond | None = None  # writes the response past ASGI, where its server offers that
    opened: bool = field(default=False, init=False)
    delivered: bool = field(default=False, init=False)
    _taken: bool = field(default=False, init=False)  # whether the socket took the last bytes
    # of a stream, which leave with its end
    _last: tuple[Head | None, bytes] = field(default=(None, b""), init=False)

    async def reply(self, reply: Reply) -> None:
        """Send a whole response."""
        headers = (*reply.headers, ("content-length", str(len(reply.body))))
        await self._send(self._head(reply.status, headers), reply.body, end=True)
        self.delivered = self._taken

    async def stream(self, data: bytes, content_type: str, *, last: bool = False) -> None:
        """Send bytes of a stream; the first open it. The `last` bytes are sent together with the stream's
        end: call `end` next.
        """
        headers = (("content-type", content_type), ("cache-control", "no-cache"))
        head = None if self.opened else self._head(200, headers)
        if last and self.respond is not None:
            self._last, self._taken = (head, data), False
        else:
            await self._send(head, data, end=False)

    async def end(self) -> None:
        """End the stream properly."""
        taken = self._taken
        await self._send(*self._last, end=True)
        self.delivered = taken or self._taken  # `_taken` where the last bytes were held for this

    def _head(self, status: int, headers: tuple[tuple[str, str], ...]) -> Head:
        self.opened = True
        return status, [
            (name.encode(), value.encode()) for name, value in (*headers, ("x-request-id", self.request_id))
        ]

    async def _send(self, head: Head | None, data: bytes, *, end: bool) -> None:
        if self.respond is None and head is not None:
            await self.send({"type": "http.response.start", "status": head[0], "headers": head[1]})
        before = self.connection.writes if self.connection else 0
        if self.respond is not None:
            await self.respond(head, data, end=end)
        else:
            await self.send({"type": "http.response.body", "body": data, "more_body": not end})
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
    return await _parsed(await body_bytes())


async def body_json_or(nothing: Json) -> Json:
    """The request's body as JSON; `nothing` when it is empty."""
    body = await body_bytes()
    return await _parsed(body) if body.strip() else nothing


async def _parsed(body: bytes) -> Json:
    if len(body) > BODY_VALUES:  # a smaller one has fewer values
        await trio.to_thread.run_sync(check_body_size, body)
    value = read_json(body)
    check_nesting(value)
    return value
