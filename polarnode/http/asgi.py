"""What every ASGI app here uses: the guard against web pages of other origins, request bodies that are read
to a limit, responses that are sent as they are produced, and helpers of Quart handlers.

Invariants. The status is chosen as late as possible, together with the first bytes, because a prompt that is
too long must still become a 400. A stream is ended properly or not at all: when an app returns without the
last body message, Hypercorn cuts the connection without the terminal chunk, and logs nothing. Nothing here
depends on a route.
"""

import ipaddress
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, cast

import trio
from attrs import define, field, frozen
from hypercorn.typing import ASGIReceiveCallable, HTTPScope
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import Forbidden, UnsupportedMediaType

from polarnode.core.codec.json import read_json
from polarnode.core.codec.limits import MAX_BODY_VALUES, check_body_size, check_nesting
from polarnode.core.conversation import Json
from polarnode.http.connections import Head, ResponseWriter
from polarnode.http.places import admit
from polarnode.providers.contract import Reply

# ── server-sent events ──────────────────────────────────────────────────

GREETING: Final = b": polarnode\n\n"  # sends the headers at once, so that a reader knows it is connected
KEEP_ALIVE: Final = b": keep-alive\n\n"


def event_response(body: AsyncIterator[bytes]) -> Response:
    """A stream of server-sent events, with headers that keep proxies from buffering it."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return Response(body, 200, headers, content_type="text/event-stream")


# ── browsers ────────────────────────────────────────────────────────────

# These are the values of `Sec-Fetch-Site` for a page of ours, and for an address that the user typed.
OWN_SITES: Final = (None, "", "same-origin", "none")
# The bodies of these methods are JSON. PUT is not among them: no page sends it without asking first.
WRITING_METHODS: Final = ("POST", "PATCH", "DELETE")
_HOST_PATTERN: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]/@\s]+?))\.?(?::\d*)?")


@frozen(kw_only=True)
class BrowserGuard:
    """Refuses what a web page of another origin makes a browser send. Clients that are no browsers send
    neither `Origin` nor `Sec-Fetch-Site`, and pass.

    The guard accepts loopback's names and addresses, the address `bound` (`0.0.0.0` and `::` mean every
    address), and the names `allowed`. The port does not matter, because a tunnel changes it. `*.example.org`
    means every name below `example.org`. A page whose own name was pointed at this machine (DNS rebinding)
    sends that name as `Host`. Such a page has no token, so apps that need a token may set `any_host`.
    """

    bound: str | None = None
    allowed: tuple[str, ...] = ()
    any_host: bool = False

    def refusal(self, *, host: str | None, origin: str | None, site: str | None) -> str | None:
        """Why a request with these headers is refused, as a sentence; None when it is not."""
        if host and not self.any_host and not self._serves(_parse_hostname(host)):
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
        if name == "localhost" or name.endswith(".localhost") or self._allows_name(name):
            return True
        address, bound = _parse_address(name), _parse_address(self.bound or "")
        if address is None:
            return name == self.bound
        return address.is_loopback or address == bound or bound in _EVERY

    def _allows_name(self, name: str) -> bool:
        return any(name == each or (each[:2] == "*." and name.endswith(each[1:])) for each in self.allowed)

    def _own(self, origin: str, host: str | None) -> bool:
        """Whether a page's origin is the address that the request was sent to, or an allowed name."""
        scheme, _, authority = origin.lower().partition("://")
        if scheme not in ("http", "https"):
            return False
        return authority == (host or "").lower() or self._allows_name(_parse_hostname(authority))


_IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_EVERY: Final = (ipaddress.IPv4Address(0), ipaddress.IPv6Address(0))


def _parse_hostname(header: str) -> str:
    """The name or address of a `Host` header, in lower case; empty if it is malformed."""
    found = _HOST_PATTERN.fullmatch(header)
    return "" if found is None else (found[1] or found[2]).lower()


def _parse_address(name: str) -> _IpAddress | None:
    try:
        found = ipaddress.ip_address(name)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def guard_browsers(app: QuartTrio, guard: BrowserGuard, *, open_to_all: bool) -> None:
    """Answer 403 to what the guard refuses, and 415 to a body that is not JSON, because a page may post forms
    and plain text to any site without asking first. Every answer forbids browsers to guess its type.
    `open_to_all`: the app asks for nothing else, so a request that passes admits its connection.
    """

    @app.after_request
    async def close_guesses(response: Response) -> Response:
        # Logs and exports contain what agents wrote. No browser may guess that it is a page or a script.
        await trio.lowlevel.checkpoint()
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    @app.before_request
    async def check_browser() -> None:
        # This is async although it waits for nothing, because Quart would run a plain function in a thread.
        await trio.lowlevel.checkpoint()
        headers = request.headers
        refused = guard.refusal(
            host=headers.get("Host"), origin=headers.get("Origin"), site=headers.get("Sec-Fetch-Site")
        )
        if refused is not None:
            raise Forbidden(refused)
        # A method that the path does not have is answered with 405, whatever its body is.
        writes = request.method in WRITING_METHODS and request.url_rule is not None
        if writes and headers.get("Content-Type") and not request.is_json:
            raise UnsupportedMediaType(
                "bodies are JSON: send 'Content-Type: application/json' (with curl: --json instead of -d)"
            )
        if open_to_all:
            admit_request()


def admit_request() -> None:
    """Record that the current request of a Quart app had the credentials that the app asks for."""
    admit(cast(HTTPScope, request.scope))


# ── request bodies ────────────────────────────────────────────────────────────

# The first bytes of each body, up to this many, are not counted against the budget that endpoints share. Most
# requests are shorter.
MAX_UNSHARED_BYTES: Final = 1 << 20
# A body over the limit is read up to this size and dropped, because a client that is still sending does not
# read its 413.
MAX_DRAINED_BYTES: Final = 256 << 20
# The body of a request without a key is read for this many seconds. One of the usual size arrives together
# with its head.
MAX_DRAIN_S: Final = 2.0
# Seconds for a whole body: 64 MiB through a slow tunnel (5 Mbit/s) take that long. Clients give up after
# minutes.
MAX_BODY_S: Final = 120.0


@frozen
class TooLarge:
    """A body over the limit, which was dropped. `size`: the bytes announced, or those that came if more."""

    size: int


@frozen
class OverBudget:
    """A body over the budget of the bodies that its endpoint is reading. It was dropped."""


@frozen
class TooSlow:
    """A body that was not complete after MAX_BODY_S. It was dropped; the rest of it may still come."""


@frozen
class ClientDisconnected:
    """The client disconnected before its request was complete."""


@define(eq=False)
class BodyBudget:
    """The bytes that all bodies which one endpoint is reading may take together, so that a client that starts
    many requests and completes none cannot fill the memory. `shared` is the budget of all endpoints; it is
    charged for the bytes of a body beyond MAX_UNSHARED_BYTES.
    """

    free: int
    shared: "BodyBudget | None" = None

    @contextmanager
    def reserve(self) -> Iterator["BodyReservation"]:
        """Open one request's share of the budget, which is returned at the end of the block."""
        reservation = BodyReservation(self)
        try:
            yield reservation
        finally:
            reservation.release()


@define(eq=False)
class BodyReservation:
    """The bytes of the budget taken by one body; `shared` of them are taken of the shared budget too."""

    budget: BodyBudget
    bytes: int = 0
    shared: int = 0

    def take(self, count: int) -> bool:
        """Take `count` more bytes of the budget. Returns False when they are not free."""
        budget = self.budget
        shared = max(0, self.bytes + count - MAX_UNSHARED_BYTES) - self.shared if budget.shared else 0
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


Body = bytes | TooLarge | OverBudget | TooSlow | ClientDisconnected


async def read_body(
    receive: ASGIReceiveCallable, *, reservation: BodyReservation, limit: int, announced: int = 0
) -> Body:
    """Read the request's whole body. Nothing is kept of one whose `announced` length is over the limit."""
    with trio.move_on_after(MAX_BODY_S):
        return await _read_body(receive, reservation=reservation, limit=limit, announced=announced)
    return TooSlow()


async def _read_body(
    receive: ASGIReceiveCallable, *, reservation: BodyReservation, limit: int, announced: int
) -> Body:
    parts: list[bytes] = []
    size, fits = 0, announced <= limit
    while size <= MAX_DRAINED_BYTES:
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
    return b"".join(parts) if fits else OverBudget()


async def drained(receive: ASGIReceiveCallable) -> bool:
    """Drop the body of a request that is refused whatever its body says. Return False when the body is longer
    than MAX_UNSHARED_BYTES or takes longer than MAX_DRAIN_S; the caller then closes the connection.
    """
    size = 0
    with trio.move_on_after(MAX_DRAIN_S):
        while size <= MAX_UNSHARED_BYTES:
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


# ── responses ─────────────────────────────────────────────────────────


@define(eq=False)
class ResponseSender:
    """The response to one request. `request_id` is sent as `x-request-id`.

    `delivered`: the socket of a connected client took the last bytes. In a stream these are the last bytes of
    its dialect: many clients close as soon as they have read those, and never read the end of the chunked
    body.
    """

    writer: ResponseWriter
    request_id: str
    opened: bool = field(default=False, init=False)
    delivered: bool = field(default=False, init=False)
    _taken: bool = field(default=False, init=False)  # whether the socket took the last bytes of a stream
    # the last bytes of a stream, which are sent together with its end
    _last: tuple[Head | None, bytes] = field(default=(None, b""), init=False)

    async def reply(self, reply: Reply) -> None:
        """Send a whole response."""
        headers = (*reply.headers, ("content-length", str(len(reply.body))))
        self.delivered = await self.writer.write(self._head(reply.status, headers), reply.body, end=True)

    async def stream(self, data: bytes, content_type: str, *, last: bool = False) -> None:
        """Send bytes of a stream; the first bytes open it. The `last` bytes are sent together with the
        stream's end, so call `end` next.
        """
        headers = (("content-type", content_type), ("cache-control", "no-cache"))
        head = None if self.opened else self._head(200, headers)
        if last:
            self._last, self._taken = (head, data), False
        else:
            self._taken = await self.writer.write(head, data, end=False)

    async def end(self) -> None:
        """End the stream properly."""
        head, data = self._last
        taken = await self.writer.write(head, data, end=True)
        self.delivered = taken or self._taken

    def _head(self, status: int, headers: tuple[tuple[str, str], ...]) -> Head:
        self.opened = True
        return status, [
            (name.encode(), value.encode()) for name, value in (*headers, ("x-request-id", self.request_id))
        ]


def header_map(headers: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
    """Headers by lower-case name. If several have the same name, the last one counts."""
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
    if len(body) > MAX_BODY_VALUES:  # a smaller one has fewer values
        await trio.to_thread.run_sync(check_body_size, body)
    value = read_json(body)
    check_nesting(value)
    return value
