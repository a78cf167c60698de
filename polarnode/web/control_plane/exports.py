"""GET /v1/export: what is over, as JSON a line, in a trainer's format, as conversations, or as rows of tokens in a Parquet file.

The rules for whoever edits it: one trajectory is in memory at a time, and for Parquet a row group beside it; nothing is written to a disk. What
is made is made in a reader's thread.
"""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from attrs import define, field
from quart import Response

from polarnode.errors import ConfigError, Refused
from polarnode.offline import sft_lines
from polarnode.offline.rows import GROUP_TOKENS, Row, arrow, rows_of, schema, table
from polarnode.records import Trajectory
from polarnode.shell.journal import Filters, Journal
from polarnode.web.control_plane.formats import check_format, session_of, told
from polarnode.web.control_plane.query import PARQUET, Query
from polarnode.web.control_plane.streams import export_lines
from polarnode.wire import dump_json


def export(journal: Journal, query: Query) -> Response:
    """GET /v1/export, in the shape that was asked for."""
    if query.kind == "sft":
        return _lines(_sft_lines(journal, _alone(query)))
    if query.format is None:
        return _lines(export_lines(journal, query))
    if query.format == PARQUET:
        _check_arrow()
        return Response(_parquet(journal, query), content_type="application/vnd.apache.parquet")
    return _lines(_format_lines(journal, check_format(query), query.format))


def _check_arrow() -> None:
    """Before the first byte: what fails behind it can only break off."""
    try:
        arrow()
    except ConfigError as error:
        raise ConfigError("format=parquet needs pyarrow where the node runs: pip install 'polarnode[data]'") from error


def _lines(lines: AsyncIterator[bytes]) -> Response:
    return Response(lines, content_type="application/x-ndjson")


def _alone(query: Query) -> Query:
    if query.format is not None:
        raise Refused("kind=sft is a shape of its own: leave format= out", path="?format")
    return query


async def _finished(journal: Journal, query: Query) -> AsyncIterator[Trajectory]:
    """Every trajectory that is over when this begins, oldest first."""
    seen, last = 0, journal.last_seq
    filters = Filters(task_id=query.task_id, group_id=query.group_id, outcome=query.outcome, min_reward=query.min_reward, kinds=("trajectory",))
    while seen < last:
        page = await journal.events(seen, filters=filters, arrays="base64")
        for event in page.events:
            found = await journal.trajectory(session_of(event)) if event.seq <= last else None
            if found is not None:
                yield found
        seen = page.seen


async def _format_lines(journal: Journal, query: Query, name: str) -> AsyncIterator[bytes]:
    async for trajectory in _finished(journal, query):
        yield await journal.read(partial(told, name, trajectory, query.arrays)) + b"\n"


async def _sft_lines(journal: Journal, query: Query) -> AsyncIterator[bytes]:
    """Messages and tools, a line for each main lineage that has words: those that polarnode 0.1 recorded have none."""
    async for trajectory in _finished(journal, query):
        if body := await journal.read(partial(_conversations, trajectory)):
            yield body


def _conversations(trajectory: Trajectory) -> bytes:
    lines, _ = sft_lines(trajectory)
    return b"".join(dump_json(line.body) + b"\n" for line in lines)


async def _parquet(journal: Journal, query: Query) -> AsyncIterator[bytes]:
    """The rows of every session as a Parquet file, sent as it is written: a file that breaks off has no end, and no reader takes it."""
    file = await journal.read(ParquetFile)
    waiting: list[Row] = []
    async for trajectory in _finished(journal, query):
        waiting += rows_of(trajectory, accepted=True, held_out=False)
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
