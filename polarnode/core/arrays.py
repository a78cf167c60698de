"""Packed numbers that travel with tokens: ids, logprobs, top logprobs and routed experts.

Numbers stay packed from the engine's bytes to the trainer's: a list of Python ints takes twelve times the
memory.
"""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

from attrs import field, frozen

if TYPE_CHECKING:
    Int32Array = array[int]
    Float32Array = array[float]
else:
    # `array` takes no parameters at run time, so an annotation tells the codecs what an array holds.
    Int32Array = Annotated[array, "int32"]
    Float32Array = Annotated[array, "float32"]

ExpertType = Literal["uint8", "int16"]  # int16 only for models with more than 256 experts a layer


def ids(values: Iterable[int] | bytes = ()) -> "array[int]":
    """An int32 array of token ids, from numbers or from little-endian bytes."""
    return array("i", values)


def floats(values: Iterable[float] | bytes = ()) -> "array[float]":
    """A float32 array of logprobs, from numbers or from little-endian bytes."""
    return array("f", values)


@frozen(kw_only=True)
class TopLogprobs:
    """The `k` likeliest tokens of each of N positions: `ids` int32[N * k] and `logprobs` float32[N * k] in
    nats, row by row, likeliest first.
    """

    k: int
    ids: Int32Array
    logprobs: Float32Array

    @property
    def rows(self) -> int:
        """N, the number of positions."""
        return len(self.ids) // self.k

    @property
    def size(self) -> int:
        """Bytes: 8 * k for each row."""
        return 8 * len(self.ids)

    def row(self, place: int) -> tuple[tuple[int, float], ...]:
        """The (id, logprob) pairs of one position."""
        first, last = place * self.k, (place + 1) * self.k
        return tuple(zip(self.ids[first:last], self.logprobs[first:last], strict=True))

    def until(self, rows: int) -> "TopLogprobs":
        """The first `rows` positions."""
        return (
            self
            if rows >= self.rows
            else TopLogprobs(k=self.k, ids=self.ids[: rows * self.k], logprobs=self.logprobs[: rows * self.k])
        )

    def narrowed(self, k: int) -> "TopLogprobs":
        """The same positions with only their `k` likeliest tokens."""
        if k == self.k:
            return self
        found = TopLogprobs(
            k=k, ids=array("i", bytes(4 * k * self.rows)), logprobs=array("f", bytes(4 * k * self.rows))
        )
        for column in range(k):  # copied as memory, one column at a time
            found.ids[column::k] = self.ids[column :: self.k]
            found.logprobs[column::k] = self.logprobs[column :: self.k]
        return found

    @staticmethod
    def joined(parts: "Iterable[TopLogprobs]") -> "TopLogprobs | None":
        """The parts concatenated. None for no parts, and for parts of different width."""
        rows = list(parts)
        if len({part.k for part in rows}) != 1:
            return None
        ids, logprobs = (
            b"".join(map(memoryview, each))
            for each in ([part.ids for part in rows], [part.logprobs for part in rows])
        )
        return TopLogprobs(k=rows[0].k, ids=array("i", ids), logprobs=array("f", logprobs))


@frozen(kw_only=True)
class RoutedExperts:
    """Which experts of each layer computed the tokens at positions [start, start + n) of a prompt and its
    sample.

    `data` has n rows of `layers` * `top_k` numbers of `dtype`, little-endian; a layer without experts has
    zeros. The last token of a sequence has no row: nothing was computed from it.
    """

    start: int
    layers: int
    top_k: int
    dtype: ExpertType
    data: bytes = field(repr=False)

    @property
    def width(self) -> int:
        """Bytes a row."""
        return self.layers * self.top_k * (2 if self.dtype == "int16" else 1)

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + len(self.data) // self.width

    def between(self, start: int, end: int) -> "RoutedExperts":
        """The rows of positions [start, end), as far as they are present."""
        first = min(max(start, self.start), self.end)
        last = max(first, min(end, self.end))
        if (first, last) == (self.start, self.end):
            return self
        data = self.data[(first - self.start) * self.width : (last - self.start) * self.width]
        return RoutedExperts(start=first, layers=self.layers, top_k=self.top_k, dtype=self.dtype, data=data)

    @staticmethod
    def joined(parts: "Iterable[RoutedExperts]", end: int, *, start: int = 0) -> "RoutedExperts | None":
        """The rows of positions [start, end), each from the first part that has it. None when a position has
        no row, or parts differ in shape.
        """
        taken: list[RoutedExperts] = []
        have = start
        for part in parts:
            if part.start <= have < min(part.end, end):
                taken.append(part.between(have, end))
                have = taken[-1].end
        if have < end or len({(part.layers, part.top_k, part.dtype) for part in taken}) != 1:
            return None
        first = taken[0]
        return RoutedExperts(
            start=start,
            layers=first.layers,
            top_k=first.top_k,
            dtype=first.dtype,
            data=b"".join(part.data for part in taken),
        )
