"""One request's two directions in ASGI: its body read to a limit, its answer sent as it comes.

The rules for whoever edits it. The status is chosen as late as possible, with the first bytes: a prompt that
is too long must still become a 400. A stream is ended properly or not at all: returning without the last body
message makes Hypercorn cut the connection without the terminal chunk, and logs nothing. Signs of life are the
dialect's own data, never SSE comments.

What the handlers of every Quart app here are written with: the rows of its table, and the body of a request.

The rule for whoever edits it: nothing here knows a route, or what a body means.
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

# ── stream ────────────────────────────────────────────────────────────

# a million tokens are 4-6 MB of JSON, and six times that when every letter is escaped
BODY_BYTES: Final = 64 << 20
WIRE: Final = "polarnode.wire"  # where a request's scope["state"] holds its connection's Wire
# of all bodies one door is reading: the longest and half as much again; a dozen sub-agents at once send 4 MB
# each
HELD_BYTES: Final = 96 << 20
# read and dropped beyond that, because a client that is still sending does not read its 413
DRAINED_BYTES: Final = 256 << 20


@frozen
class TooLarge:
    """A body over the limit; it was dropped."""


@frozen
class Crowded:
    """A body that found no room beside the others its door is reading; it was dropped."""


@frozen
class Left:
    """The client went before its request was whole."""


@define(eq=False)
class Room:
    """What the bodies of one door may take together until they are read: a client that begins many and ends
    none fills no machine.
    """

    free: int = HELD_BYTES

    @contextmanager
    def hold(self) -> Iterator["Hold"]:
        """One request's share of it, given back at the end."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            self.free += hold.bytes


@define(eq=False)
class Hold:
    """How much of its door's room a body has taken."""

    room: Room
    bytes: int = 0

    def takes(self, count: int) -> bool:
        """Take so much more of the room; False when it is not there."""
        if count > self.room.free:
            return False
        self.room.free -= count
        self.bytes += count
        return True


async def read_body(
    receive: ASGIReceiveCallable, *, hold: Hold, limit: int = BODY_BYTES
) -> bytes | TooLarge | Crowded | Left:
    """The request's whole body."""
    parts: list[bytes] = []
    size, fits = 0, True
    while size <= DRAINED_BYTES:
        message = await receive()
        if message["type"] != "http.request":
            return Left()
        size += len(message["body"])
        fits = fits and size <= limit and hold.takes(len(message["body"]))
        if fits:
            parts.append(message["body"])
        else:
            parts.clear()
        if not message["more_body"]:
            break
    if size > limit:
        return TooLarge()
    return b"".join(parts) if fits else Crowded()


async def wait_left(receive: ASGIReceiveCallable) -> None:
    """Return when the client is gone. What it still sends is dropped, so that Hypercorn's reader is never
    stuck.
    """
    while (await receive())["type"] != "http.disconnect":
        pass


@define(eq=False)
class Wire:
    """What became of a connection's bytes: `writes` that its socket took whole, and whether one was `broken`
    off.

    `holds`: the next bytes leave with those behind them.
    """

    writes: int = 0
    broken: bool = False
    holds: bool = False


def wire_of(scope: HTTPScope) -> Wire | None:
    """The wire of a request's connection; None where another server than ours serves it."""
    return cast("dict[str, Wire]", scope.get("state") or {}).get(WIRE)


@define(eq=False)
class Responder:
    """The answer of one request. `request_id` is the client's word for it in our records.

    `delivered`: the last bytes were handed to the socket of a client that had not left. Without a wire, that
    they were handed to the server. A stream's are its dialect's own last ones: many clients close as soon as
    they have read those, and never see the end of the chunks.
    """

    send: ASGISendCallable
    request_id: str
    wire: Wire | None = None
    opened: bool = field(default=False, init=False)
    delivered: bool = field(default=False, init=False)
    _taken: bool = field(default=False, init=False)  # what was sent last

    async def reply(self, reply: Reply) -> None:
        """A whole answer."""
        length = ("content-length", str(len(reply.body)))
        await self._start(reply.status, (*reply.headers, length))
        await self._body(reply.body, more=False)
        self.delivered = self._taken

    async def stream(self, data: bytes, content_type: str, *, last: bool = False) -> None:
        """Some bytes of a stream, which the first ones open. The `last` leave with its end, which is called
        for next.
        """
        if not self.opened:
            await self._start(200, (("content-type", content_type), ("cache-control", "no-cache")))
        if last and self.wire:
            self.wire.holds = True
        await self._body(data, more=True)

    async def end(self) -> None:
        """The stream is whole."""
        taken = self._taken
        await self._body(b"", more=False)
        self.delivered = taken or self._taken  # the second, where the last bytes were held for this

    async def _start(self, status: int, headers: tuple[tuple[str, str], ...]) -> None:
        self.opened = True
        spelled = [
            (name.encode(), value.encode()) for name, value in (*headers, ("x-request-id", self.request_id))
        ]
        if self.wire:
            # one write a plain answer, not two: the first bytes of the body come at once
            self.wire.holds = True
        await self.send({"type": "http.response.start", "status": status, "headers": spelled})

    async def _body(self, data: bytes, *, more: bool) -> None:
        before = self.wire.writes if self.wire else 0
        await self.send({"type": "http.response.body", "body": data, "more_body": more})
        self._taken = self.wire is None or (self.wire.writes > before and not self.wire.broken)


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
    """The request's body, or `Refused`: an empty one is no JSON."""
    return read_json(await body_bytes())


async def body_json_or(nothing: Json) -> Json:
    """The request's body; `nothing` where there is none."""
    body = await body_bytes()
    return read_json(body) if body.strip() else nothing
