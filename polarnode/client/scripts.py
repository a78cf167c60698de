"""One stream of events across broken connections and restarts: retries, decoding, and the position to resume
from.

Only transient errors are retried, with growing pauses, until the node has given no sign of life for as long
as the caller allows. The greeting of a new connection is not a sign of life: a node that greets and then
fails each time is given up like an absent one. Bytes are scanned once, because a trajectory is megabytes, and
data that cannot be read is an error. A new connection resumes after the last event that was yielded, so no
event is missed or repeated.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from attrs import define, field, frozen

from polarnode.client.requests import ClientRequest, Close, Open, Read, Script, SleepFor, T, ask
from polarnode.client.values import ClientError, Event, Unreachable
from polarnode.core.backoff import Backoff
from polarnode.core.codec.json import read_json
from polarnode.core.cursors import Cursor
from polarnode.core.errors import Refused

# ── patience ────────────────────────────────────────────────────────────

# between attempts: a restart takes about a second, an absent node is not hammered
PAUSES: Final = Backoff(first_s=0.1, longest_s=5.0)


@define(eq=False)
class RetryPatience:
    """How long one stream or one request is retried: `seconds` since the last sign of life."""

    seconds: float
    now: Callable[[], float]
    _failures: int = field(default=0, init=False)  # since the last sign of life
    _last_life: float = field(init=False)

    @_last_life.default
    def _begins(self) -> float:
        return self.now()

    def renew(self) -> None:
        """Record a sign of life: the pauses and the time limit begin again."""
        self._failures, self._last_life = 0, self.now()

    def pause(self, error: ClientError | Unreachable) -> float:
        """Return the seconds to wait before the next attempt. Raises `error` when it is permanent or the
        patience would end first.
        """
        left = self._last_life + self.seconds - self.now()
        wish = error.retry_after or 0.0 if isinstance(error, ClientError) else 0.0
        if left <= 0 or wish > left or (isinstance(error, ClientError) and not error.passes):
            raise error
        pause = PAUSES.delay(self._failures, at_least_s=wish)
        self._failures += 1
        return min(pause, left)


def patiently(request: ClientRequest[T], patience: RetryPatience) -> Script[T]:
    """Send a request that takes effect once, and retry it after transient errors."""
    while True:
        try:
            return (yield from ask(request))
        except (ClientError, Unreachable) as error:
            yield SleepFor(patience.pause(error))


# ── events ────────────────────────────────────────────────────────────

# of one event: a session may have 256 MiB of token extras beside its tokens, and base64 adds a third
MOST_BYTES = 1 << 30


@define(eq=False)
class Lines:
    """Split bytes into lines; each byte is scanned once. `rest` is the number of bytes after the last line
    end.
    """

    _buffer: bytearray = field(factory=bytearray, init=False)
    _scanned: int = field(default=0, init=False)  # no line ends before this index

    @property
    def rest(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that are complete. Consume all of them before feeding more."""
        self._buffer += data
        while (end := self._buffer.find(b"\n", self._scanned)) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._scanned = 0
            yield line
        self._scanned = len(self._buffer)


@frozen(kw_only=True)
class Block:
    """One event as it stands on the wire."""

    kind: str
    id: str | None
    data: bytes


class SignOfLife:
    """A comment line: the node is alive and has no event."""


SIGN_OF_LIFE: Final = SignOfLife()


@frozen
class StreamBegun:
    """Where a stream begins, on the wire before its first event."""

    position: Cursor


@define(eq=False)
class Decoder:
    """Decodes one body of server-sent events. Bytes after the last blank line were cut off, and are
    dropped.
    """

    _lines: Lines = field(factory=Lines, init=False)
    _held: int = field(default=0, init=False)  # bytes of the block that is not whole yet
    _kind: str = field(default="", init=False)
    _id: str | None = field(default=None, init=False)
    _data: list[bytes] = field(factory=list, init=False)

    def feed(self, data: bytes) -> Iterator[Block | SignOfLife | StreamBegun]:
        """Yield what is complete. Consume all of it before feeding more."""
        for whole in self._lines.feed(data):
            line = whole.removesuffix(b"\r")
            self._held += len(line)
            yield from self._line(line)
        if self._held + self._lines.rest > MOST_BYTES:
            raise Unreachable(
                f"an event of the stream is larger than {MOST_BYTES >> 20} MiB: is this polarnode?"
            )

    def _line(self, line: bytes) -> Iterator[Block | SignOfLife | StreamBegun]:
        if not line:
            yield from self._end_block()
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"":
                yield SIGN_OF_LIFE
            case b"event":
                self._kind = value.decode(errors="replace")
            case b"id":
                self._id = value.decode(errors="replace")
            case b"data":
                self._data.append(value)

    def _end_block(self) -> Iterator[Block | StreamBegun]:
        if self._id is not None and not self._data:
            yield StreamBegun(_cursor_of(self._id))
        if self._data:
            yield Block(
                kind=self._kind or "message",
                id=self._id,
                data=self._data[0] if len(self._data) == 1 else b"\n".join(self._data),
            )
        self._kind, self._id, self._data, self._held = "", None, [], 0


def read_event(block: Block) -> Event:
    """Read the event of a block. Raises Unreachable for an `error` event, so that the stream is resumed, and
    for data that is not an event.
    """
    try:
        value = read_json(block.data)
    except Refused as refused:
        raise _garbled(str(refused)) from None
    match value:
        case {"error": {"message": str(message)}} if block.kind == "error":
            raise Unreachable(f"the node could not continue the stream: {message}")
        case dict():
            return _event(block, value)
    raise _garbled("its data is not an object")


def _event(block: Block, value: dict[str, Any]) -> Event:
    cursor = _cursor_of(block.id or "")
    if block.kind not in value:
        raise _garbled(f"its data has no {block.kind}")
    key = value.get("key")
    return Event(
        seq=cursor.position,
        kind=block.kind,
        key=key if isinstance(key, str) else block.kind,
        data=value[block.kind],
        journal=cursor.log,
        id=block.id or "",
        size=len(block.data),
    )


def _cursor_of(text: str) -> Cursor:
    try:
        return Cursor.read(text)
    except Refused:
        raise _garbled("it has no number") from None


def _garbled(why: str) -> Unreachable:
    return Unreachable(f"an event of the stream cannot be read ({why}): is this polarnode?")


# ── following ────────────────────────────────────────────────────────────

CONTENT_TYPE = "text/event-stream"


def require_event_stream(content_type: str) -> None:
    """Raise ClientError for an answer that is no stream of events."""
    if not content_type.startswith(CONTENT_TYPE):
        raise ClientError(
            f"the answer is {content_type or 'of no type'}, not the event stream of polarnode",
            status=200,
            type="garbled",
        )


class StreamEnd:
    """The stream has ended for good."""


STREAM_END: Final = StreamEnd()


@frozen(kw_only=True)
class Following:
    """Which stream to read: its `path` with the query; it begins after event `after`. With `goes_on`, an end
    counts as a broken connection.
    """

    path: str
    after: Cursor | None
    goes_on: bool


@define(eq=False)
class StreamFollower:
    """Reads the events of one stream, over as many connections as it needs."""

    following: Following
    patience: RetryPatience
    position: Cursor | None = field(init=False)
    _pieces: Iterator[Block | SignOfLife | StreamBegun] | None = field(
        default=None, init=False
    )  # None while nothing is open
    _decoder: Decoder = field(factory=Decoder, init=False)
    _has_greeted: bool = field(default=False, init=False)

    @position.default
    def _begins(self) -> Cursor | None:
        return self.following.after

    def next(self) -> Script[Event | SignOfLife | StreamEnd]:
        """Return the next event, or a sign of life, so that the caller can act as time passes."""
        while True:
            try:
                if self._pieces is None:
                    yield from self._open()
                if (found := self._decoded()) is not None:
                    return found
                if not (yield from self._more()):
                    return STREAM_END
            except (ClientError, Unreachable) as error:
                self._pieces = None
                yield Close()
                yield SleepFor(self.patience.pause(error))

    def _open(self) -> Script[None]:
        headers = {} if self.position is None else {"Last-Event-ID": self.position.text}
        request: ClientRequest[Any] = ClientRequest(
            method="GET", path=self.following.path, headers=headers, read=bytes
        )
        require_event_stream((yield Open(request)))
        self._decoder, self._pieces, self._has_greeted = Decoder(), iter(()), False

    def _decoded(self) -> Event | SignOfLife | None:
        """Return the next event or sign of life in the bytes read so far; None when more bytes are needed."""
        for piece in self._pieces or ():
            if isinstance(piece, SignOfLife):
                if self._has_greeted:
                    self.patience.renew()
                self._has_greeted = True
                return SIGN_OF_LIFE
            if isinstance(piece, StreamBegun):
                self.position = self.position or piece.position
                continue
            event = read_event(piece)
            # after a gap numbers may begin again lower: it says from where on
            if event.kind == "gap" or self.position is None or event.seq > self.position.position:
                self.patience.renew()
                self.position = event.cursor
                return event
        return None

    def _more(self) -> Script[bool]:
        """Read more bytes; return False at the end of the stream."""
        data = yield Read()
        self._pieces = self._decoder.feed(data)
        if data:
            return True
        if self.following.goes_on:
            raise Unreachable("the node keeps ending the stream")
        yield Close()
        return False
