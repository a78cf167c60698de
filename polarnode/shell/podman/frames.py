"""The output of an exec: frames of stdout and stderr, cut from a stream of bytes, and kept within a bound.

Pure. A frame is a stream's number, three zero bytes, the length as four bytes (big-endian), and that many bytes.
"""

from collections import deque
from collections.abc import Iterator
from typing import Literal

from attrs import define, field

from polarnode.errors import RuntimeFault

HEADER = 8
STDOUT, STDERR = 1, 2
Channel = Literal["stdout", "stderr"]


@define(eq=False)
class Frames:
    """Told bytes as they come; gives pieces of stdout and stderr. A frame is given on piece by piece, so its length is no bound on memory."""

    _header: bytearray = field(factory=bytearray, init=False)
    _left: int = field(default=0, init=False)
    _channel: Channel = field(default="stdout", init=False)

    def feed(self, data: bytes) -> Iterator[tuple[Channel, bytes]]:
        """The pieces in these bytes, in order."""
        view = memoryview(data)
        while view:
            if self._left:
                piece, view = view[: self._left], view[self._left :]
                self._left -= len(piece)
                yield self._channel, bytes(piece)
            else:
                missing = HEADER - len(self._header)
                self._header += view[:missing]
                view = view[missing:]
                self._read_header()

    def _read_header(self) -> None:
        if len(self._header) < HEADER:
            return
        number = self._header[0]
        if number not in (STDOUT, STDERR):
            raise RuntimeFault(f"podman: an exec's stream has a frame of kind {number}")
        self._channel = "stdout" if number == STDOUT else "stderr"
        self._left = int.from_bytes(self._header[4:], "big")
        self._header.clear()


@define(eq=False)
class Tail:
    """The last `limit` bytes of what was written."""

    limit: int
    dropped: int = field(default=0, init=False)
    _pieces: "deque[bytes]" = field(factory=deque, init=False)
    _kept: int = field(default=0, init=False)

    def write(self, piece: bytes) -> None:
        """Take a piece and let go of what is now too old."""
        self._pieces.append(piece)
        self._kept += len(piece)
        while self._kept - len(self._pieces[0]) >= self.limit:
            self._drop(len(self._pieces.popleft()))

    def _drop(self, count: int) -> None:
        self._kept -= count
        self.dropped += count

    def value(self) -> bytes:
        """At most `limit` bytes, the end of all; `dropped` counts the others."""
        whole = b"".join(self._pieces)
        surplus = max(0, len(whole) - self.limit)
        self._pieces = deque([whole[surplus:]])
        self._drop(surplus)
        return self._pieces[0]
