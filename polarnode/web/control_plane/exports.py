"""GET /v1/export: what is over, as JSON a line, in a trainer's format, as conversations, or as rows of tokens in a Parquet file.

The rules for whoever edits it: one trajectory is in memory at a time, and for Parquet a row group beside it; nothing is written to a disk. What
is made is made in a reader's thread.
"""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Final

from attrs import define, evolve, field
from quart import Response

from polarnode.errors import ConfigError, Refused
from polarnode.offline import sft_lines
from polarnode.offline.rows import GROUP_TOKENS, Row, arrow, rows_of, schema, table
from polarnode.records import Trajectory
from polarnode.shell.journal import GONE, KEYS_ALONE, Journal, StoredEvent, Telling
from polarnode.web.control_plane.formats import check_format, telling_of
from polarnode.web.control_plane.query import PARQUET, Query
from polarnode.wire import dump_json


def export(journal: Journal, query: Query) -> Response:
    """GET /v1/export, in the shape that was asked for."""
    if query.kind == "sft":
        return _lines(journal, _alone(query), SFT)
    if query.format == PARQUET:
        _check_arrow()
        return Response(_parquet(journal, query), content_type="application/vnd.apache.parquet")
    return _lines(journal, check_format(query), telling_of(query))


def _check_arrow() -> None:
    """Before the first byte: what fails behind it can only break off."""
    try:
        arrow()
    except ConfigError as error:
        raise ConfigError("format=parquet needs pyarrow where the node runs: pip install 'polarnode[data]'") from error


def _lines(journal: Journal, query: Query, telling: Telling) -> Response:
    return Response(_told_lines(journal, query, telling), content_type="application/x-ndjson")


def _alone(query: Query) -> Query:
    if query.format is not None:
        raise Refused("kind=sft is a shape of its own: leave format= out", path="?format")
    return query


async def _finished(journal: Journal, query: Query, telling: Telling) -> AsyncIterator[StoredEvent]:
    """Every trajectory that is over when this begins, oldest first."""
    seen, last = 0, journal.last_seq
    filters = evolve(query.filters(), kinds=("trajectory",))
    while seen < last:
        page = await journal.events(seen, filters=filters, telling=telling)
        for event in page.events:
            if event.seq <= last:
                yield event
        seen = page.seen


async def _told_lines(journal: Journal, query: Query, telling: Telling) -> AsyncIterator[bytes]:
    """What is told of each; nothing of one that was pruned meanwhile, or of which there is nothing to tell."""
    async for event in _finished(journal, query, telling):
        if event.body not in (b"", GONE):
            yield event.body + b"\n"


def _conversations(trajectory: Trajectory) -> bytes:
    """Messages and tools, a line for each main lineage that has words: those that polarnode 0.1 recorded have none."""
    lines, _ = sft_lines(trajectory)
    return b"\n".join(dump_json(line.body) for line in lines)


SFT: Final = Telling(name="sft", write=_conversations)


async def _parquet(journal: Journal, query: Query) -> AsyncIterator[bytes]:
    """The rows of every session as a Parquet file, sent as it is written: a file that breaks off has no end, and no reader takes it."""
    file = await journal.read(ParquetFile)
    waiting: list[Row] = []
    async for event in _finished(journal, query, KEYS_ALONE):
        trajectory = await journal.trajectory(event.key.partition(":")[2])
        waiting += () if trajectory is None else rows_of(trajectory, accepted=True, held_out=False)
        if sum(row.tokens for row in waiting) >= GROUP_TOKENS:
            yield await journal.read(partial(file.written, tuple(waiting)))
            waiting.clear()
    yield await journal.read(lambda: file.written(waiting) + file.ended())


@define(eq=False)
class ParquetFile:
    """A Parquet file that nobody keeps: what was written since is handed out. It is what pyarrow writes to, too, in order and never back."""

    closed: bool = False
    _place: int = 0
    _pieces: list[bytes] = field(factory=list)
    _writer: Any = None

    def __attrs_post_init__(self) -> None:
        import pyarrow.parquet as pq

        self._writer = pq.ParquetWriter(self, schema(), compression="zstd")

    def written(self, rows: Sequence[Row]) -> bytes:
        """The bytes of one more row group, behind whatever came before; none of its own for no rows."""
        if rows:
            self._writer.write_table(table(rows))
        return self._taken()

    def ended(self) -> bytes:
        """The last bytes."""
        self._writer.close()
        return self._taken()

    def _taken(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    def write(self, data: Any) -> int:
        self._pieces.append(bytes(data))
        self._place += len(self._pieces[-1])
        return len(self._pieces[-1])

    def tell(self) -> int:
        return self._place

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False
