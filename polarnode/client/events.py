"""Bytes of a stream into lines, and lines into events: server-sent events, decoded piece by piece as they come.

The rule for whoever edits it: bytes are looked at once (a trajectory is megabytes), and what can not be read is never passed over in silence.
"""

from collections.abc import Iterator
from typing import Any, Final

from attrs import define, field, frozen

from polarnode.client.errors import Unreachable
from polarnode.client.values import Event
from polarnode.errors import Refused
from polarnode.wire import read_json

MOST_BYTES = 1 << 30  # of one event: a session may carry 256 MiB beside its tokens, which base64 makes a third more


@define(eq=False)
class Lines:
    """Bytes into lines, each byte looked at once. What stands behind the last line's end is `rest` bytes long."""

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
    """A comment: the node speaks, and has nothing to say."""


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
            raise Unreachable(f"an event of the stream is larger than {MOST_BYTES >> 20} MiB: is this a polarnode?")

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
            yield Block(kind=self._kind or "message", id=self._id, data=self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
        self._kind, self._id, self._data, self._held = "", None, [], 0


def read_event(block: Block) -> Event:
    """The event of a block. Unreachable for the node's own `error`, so that we come again, and for what is no event of a polarnode."""
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
        raise _garbled(f"its data does not say {block.kind}")
    key = value.get("key")
    return Event(seq=int(block.id), kind=block.kind, key=key if isinstance(key, str) else block.kind, data=value[block.kind], size=len(block.data))


def _garbled(why: str) -> Unreachable:
    return Unreachable(f"an event of the stream can not be read ({why}): is this a polarnode?")
