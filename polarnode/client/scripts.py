"""One stream of events, read through cuts and restarts: retries, decoding, and where to go on.

Only errors that can pass are retried, with growing pauses, and only until the node gave no sign of life for
as long as the caller allows. A connection that only greets is no sign of life: a node that greets and fails,
again and again, is given up like one that is not there. Bytes are looked at once (a trajectory is
megabytes), and what cannot be read is an error. Reading goes on after the last event that was handed out, so
none is missed and none comes twice.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from attrs import define, field, frozen

from polarnode.client.requests import ClientRequest, Close, Open, Read, Script, Sleep, T, ask
from polarnode.client.values import ClientError, Event, Unreachable
from polarnode.core.backoff import Backoff
from polarnode.core.codec.json import read_json
from polarnode.core.errors import Refused

# ── patience ────────────────────────────────────────────────────────────

# between attempts: a restart takes about a second, an absent node is not hammered
PAUSES: Final = Backoff(first_s=0.1, longest_s=5.0)


@define(eq=False)
class Patience:
    """Of one stream, or of one request."""

    seconds: float
    now: Callable[[], float]
    _failures: int = field(default=0, init=False)  # since the last sign of life
    _last_life: float = field(init=False)

    @_last_life.default
    def _begins(self) -> float:
        return self.now()

    def renew(self) -> None:
        """A sign of life: what follows is a new trouble."""
        self._failures, self._last_life = 0, self.now()

    def pause(self, error: ClientError | Unreachable) -> float:
        """Seconds to wait before the next attempt. Raises `error` when it does not pass, or not before
        patience is at its end.
        """
        left = self._last_life + self.seconds - self.now()
        wish = error.retry_after or 0.0 if isinstance(error, ClientError) else 0.0
        if left <= 0 or wish > left or (isinstance(error, ClientError) and not error.passes):
            raise error
        pause = PAUSES.delay(self._failures, at_least_s=wish)
        self._failures += 1
        return min(pause, left)


def patiently(request: ClientRequest[T], patience: Patience) -> Script[T]:
    """One request that may be sent more than once: again when it was not answered, or when there was
    no room.
    """
    while True:
        try:
            return (yield from ask(request))
        except (ClientError, Unreachable) as error:
            yield Sleep(patience.pause(error))


# ── events ────────────────────────────────────────────────────────────

# of one event: a session may carry 256 MiB beside its tokens, which base64 makes a third more
MOST_BYTES = 1 << 30


@define(eq=False)
class Lines:
    """Bytes into lines, each byte looked at once. What stands behind the last line's end is `rest` bytes
    long.
    """

    _buffer: bytearray = field(factory=bytearray, init=False)
    _looked: int = field(default=0, init=False)  # so far there is no line's end

    @property
    def rest(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What is whole now. Take all of it before more is fed."""
        self._buffer += data
        while (end := self._buffer.find(b"\n", self._looked)) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._looked = 0
            yield line
        self._looked = len(self._buffer)


@frozen(kw_only=True)
class Block:
    """One event as it stands on the wire."""

    kind: str
    id: str | None
    data: bytes


class Life:
    """A comment: the node is alive and has no event."""


LIFE: Final = Life()


@define(eq=False)
class Decoder:
    """One body's bytes. Whatever follows the last blank line when the body ends was cut, and is dropped."""

    _lines: Lines = field(factory=Lines, init=False)
    _held: int = field(default=0, init=False)  # bytes of the block that is not whole yet
    _kind: str = field(default="", init=False)
    _id: str | None = field(default=None, init=False)
    _data: list[bytes] = field(factory=list, init=False)

    def feed(self, data: bytes) -> Iterator[Block | Life]:
        """What is whole now. Take all of it before more is fed."""
        for whole in self._lines.feed(data):
            line = whole.removesuffix(b"\r")
            self._held += len(line)
            yield from self._line(line)
        if self._held + self._lines.rest > MOST_BYTES:
            raise Unreachable(
                f"an event of the stream is larger than {MOST_BYTES >> 20} MiB: is this a polarnode?"
            )

    def _line(self, line: bytes) -> Iterator[Block | Life]:
        if not line:
            yield from self._block()
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"":
                yield LIFE
            case b"event":
                self._kind = value.decode(errors="replace")
            case b"id":
                self._id = value.decode(errors="replace")
            case b"data":
                self._data.append(value)

    def _block(self) -> Iterator[Block]:
        if self._data:
            yield Block(
                kind=self._kind or "message",
                id=self._id,
                data=self._data[0] if len(self._data) == 1 else b"\n".join(self._data),
            )
        self._kind, self._id, self._data, self._held = "", None, [], 0


def read_event(block: Block) -> Event:
    """The event of a block. Unreachable for the node's own `error`, so that we come again, and for what is no
    event of a polarnode.
    """
    try:
        value = read_json(block.data)
    except Refused as refused:
        raise _garbled(str(refused)) from None
    match value:
        case {"error": {"message": str(message)}} if block.kind == "error":
            raise Unreachable(f"the node could not go on: {message}")
        case dict():
            return _event(block, value)
    raise _garbled("its data is not an object")


def _event(block: Block, value: dict[str, Any]) -> Event:
    if block.id is None or not (block.id.isascii() and block.id.isdigit()):
        raise _garbled("it has no number")
    if block.kind not in value:
        raise _garbled(f"its data has no {block.kind}")
    key = value.get("key")
    return Event(
        seq=int(block.id),
        kind=block.kind,
        key=key if isinstance(key, str) else block.kind,
        data=value[block.kind],
        size=len(block.data),
    )


def _garbled(why: str) -> Unreachable:
    return Unreachable(f"an event of the stream cannot be read ({why}): is this a polarnode?")


# ── following ────────────────────────────────────────────────────────────

CONTENT_TYPE = "text/event-stream"


class Over:
    """There is no more, and there will be no more."""


OVER: Final = Over()


@frozen(kw_only=True)
class Following:
    """Which stream: its `path` with its query; it begins behind `after`. `goes_on`: its end is a cut like any
    other.
    """

    path: str
    after: int | None
    goes_on: bool


@define(eq=False)
class Follower:
    """Hands out the events of one stream after another."""

    following: Following
    patience: Patience
    position: int | None = field(init=False)
    _pieces: Iterator[Block | Life] | None = field(default=None, init=False)  # None while nothing is open
    _decoder: Decoder = field(factory=Decoder, init=False)
    _greeted: bool = field(default=False, init=False)

    @position.default
    def _begins(self) -> int | None:
        return self.following.after

    def next(self) -> Script[Event | Life | Over]:
        """The next event; or a sign of life, so that the caller can act as time goes by."""
        while True:
            try:
                if self._pieces is None:
                    yield from self._open()
                if (found := self._decoded()) is not None:
                    return found
                if not (yield from self._more()):
                    return OVER
            except (ClientError, Unreachable) as error:
                self._pieces = None
                yield Close()
                yield Sleep(self.patience.pause(error))

    def _open(self) -> Script[None]:
        headers = {} if self.position is None else {"Last-Event-ID": str(self.position)}
        request: ClientRequest[Any] = ClientRequest(
            method="GET", path=self.following.path, headers=headers, read=bytes
        )
        found = yield Open(request)
        if not found.startswith(CONTENT_TYPE):
            raise ClientError(
                f"the answer is {found or 'of no type'}, not the stream of a polarnode",
                status=200,
                type="garbled",
            )
        self._decoder, self._pieces, self._greeted = Decoder(), iter(()), False

    def _decoded(self) -> Event | Life | None:
        """What the bytes read so far hold; None when more are needed."""
        for piece in self._pieces or ():
            if isinstance(piece, Life):
                if self._greeted:
                    self.patience.renew()
                self._greeted = True
                return LIFE
            event = read_event(piece)
            if event.kind == "gap" or self.position is None or event.seq > self.position:
                self.patience.renew()
                self.position = event.seq
                return event
        return None

    def _more(self) -> Script[bool]:
        """Read on; False at the end of the stream."""
        data = yield Read()
        self._pieces = self._decoder.feed(data)
        if data:
            return True
        if self.following.goes_on:
            raise Unreachable("the node keeps ending the stream")
        yield Close()
        return False
