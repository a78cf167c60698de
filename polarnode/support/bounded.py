"""Bounded memory: a log file that keeps its beginning and its end, and a table that keeps its latest entries.

A log's beginning says how a program was started and its end why it ended. The second half of the file is a
ring until it is closed; then it is put in order, with one line that says how much is missing. Everything is
on disk as soon as it is written, so the log of a killed node can be read too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

from attrs import define, field


@define(eq=False)
class BoundedLog:
    """Writes at most `limit` bytes (and one line) to an open file."""

    sink: BinaryIO
    limit: int
    written: int = field(default=0, init=False)

    @property
    def head(self) -> int:
        return self.limit // 2

    @property
    def ring(self) -> int:
        return self.limit - self.head

    def write(self, piece: bytes) -> None:
        """Append, over the oldest bytes of the ring when it is full."""
        while piece:
            place, room = self._place()
            self.sink.seek(place)
            self.sink.write(piece[:room])
            self.written += min(room, len(piece))
            piece = piece[room:]
        self.sink.flush()

    def _place(self) -> tuple[int, int]:
        """Where the next byte goes, and how many may follow it there."""
        if self.written < self.head:
            return self.written, self.head - self.written
        within = (self.written - self.head) % self.ring
        return self.head + within, self.ring - within

    def finish(self) -> None:
        """Put the ring in order."""
        missing = self.written - self.limit
        if missing <= 0:
            return
        self.sink.seek(self.head)
        ring = self.sink.read(self.ring)
        cut = (self.written - self.head) % self.ring
        self.sink.seek(self.head)
        self.sink.write(b"\n... %d bytes left out ...\n" % missing + ring[cut:] + ring[:cut])
        self.sink.flush()


@contextmanager
def open_bounded_log(path: Path, limit: int) -> Iterator[BoundedLog]:
    """A new log of at most `limit` bytes; its folder is made when it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w+b") as sink:
        log = BoundedLog(sink, limit)
        try:
            yield log
        finally:
            log.finish()


K = TypeVar("K")
V = TypeVar("V")


def remember(kept: dict[K, V], name: K, value: V, *, most: int) -> None:
    """Store a value as the latest entry of a table; with more than `most` entries the oldest is dropped."""
    kept.pop(name, None)
    kept[name] = value
    while len(kept) > most:
        del kept[next(iter(kept))]
