"""A trajectory in a trainer's format, as JSON: by itself, on a stream, as a line of an export.

The rules for whoever edits it: it is made in a reader's thread, one trajectory at a time. A session that a
format can not carry is told on a stream and in an export as one that was `refused`, with the reason, and ends
neither.

GET /v1/export: what is over, as JSON a line, in a trainer's format, as conversations, or as rows of tokens in
a Parquet file.

The rules for whoever edits it: one trajectory is in memory at a time, and for Parquet a row group beside it;
nothing is written to a disk. What is made is made in a reader's thread.
"""

from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Final

import numpy
from attrs import define, evolve, field
from quart import Response

from polarnode.api.query import PARQUET, Query
from polarnode.core.codec.arrays import Arrays
from polarnode.core.codec.json import dump_json, plain
from polarnode.core.conversation import Json
from polarnode.core.errors import ConfigError, Refused
from polarnode.core.trajectory import Trajectory
from polarnode.journal.journal import Journal
from polarnode.journal.values import GONE, KEYS_ALONE, StoredEvent, Telling, as_json
from polarnode.offline.rows import GROUP_TOKENS, ParquetRow, arrow, rows_of, schema, table
from polarnode.offline.sft import sft_lines
from polarnode.trainers import FORMATS, project

# ── formats ────────────────────────────────────────────────────────────


def check_format(query: Query) -> Query:
    """The query, for routes whose formats are trainers' alone."""
    if query.format == PARQUET:
        raise Refused(
            f"format must be one of {', '.join(FORMATS)} here; parquet is a format of GET /v1/export",
            path="?format",
        )
    if query.format is not None and query.turns == "full":
        raise Refused(
            "turns=full is of a trajectory's own JSON: leave it out where format= is said", path="?turns"
        )
    return query


def format_json(name: str, trajectory: Trajectory, arrays: Arrays) -> dict[str, Json]:
    """A trajectory in a trainer's format, and whose it is. Refused where the format can not carry it."""
    return _whose(name, trajectory) | {"value": _plain(project(name, trajectory, arrays="numpy"), arrays)}


def _whose(name: str, trajectory: Trajectory) -> dict[str, Json]:
    return {
        "format": name,
        "session_id": trajectory.session_id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "outcome": plain(trajectory.outcome),
        "reward": trajectory.reward,
        "metadata": plain(trajectory.metadata),
    }


def told(name: str, trajectory: Trajectory, arrays: Arrays) -> bytes:
    """The same as text, where a refusal is told in its place."""
    try:
        return dump_json(format_json(name, trajectory, arrays))
    except Refused as refused:
        return dump_json(_whose(name, trajectory) | {"value": None, "refused": str(refused)})


def _plain(value: Any, arrays: Arrays) -> Any:
    """Arrays as lists, or as their bytes in base64 with what it takes to read them; bytes as base64."""
    match value:
        case numpy.ndarray():
            return (
                value.tolist()
                if arrays == "json"
                else {"dtype": str(value.dtype), "shape": list(value.shape), "data": _base64(value.tobytes())}
            )
        case bytes():
            return _base64(value)
        case dict():
            return {name: _plain(each, arrays) for name, each in value.items()}
        case list():
            return [_plain(each, arrays) for each in value]
    return value


def _base64(data: bytes) -> str:
    return b64encode(data).decode()


# ── events ────────────────────────────────────────────────────────────────────


def telling_of(query: Query) -> Telling:
    """How the trajectories of a stream or an export are written."""
    if query.format is None:
        return as_json(query.arrays, query.turns)
    name, arrays = query.format, query.arrays
    return Telling(name=("format", name, arrays), write=lambda whole: told(name, whole, arrays))


# ── exports ────────────────────────────────────────────────────────────


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
        raise ConfigError(
            "format=parquet needs pyarrow where the node runs: pip install 'polarnode[data]'"
        ) from error


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
    """What is told of each; nothing of one that was pruned meanwhile, or of which there is nothing to
    tell.
    """
    async for event in _finished(journal, query, telling):
        if event.body not in (b"", GONE):
            yield event.body + b"\n"


def _conversations(trajectory: Trajectory) -> bytes:
    """Messages and tools, a line for each main lineage that has words: those that polarnode 0.1 recorded have
    none.
    """
    lines, _ = sft_lines(trajectory)
    return b"\n".join(dump_json(line.body) for line in lines)


SFT: Final = Telling(name="sft", write=_conversations)


async def _parquet(journal: Journal, query: Query) -> AsyncIterator[bytes]:
    """The rows of every session as a Parquet file, sent as it is written: a file that breaks off has no end,
    and no reader takes it.
    """
    file = await journal.read(ParquetFile)
    waiting: list[ParquetRow] = []
    async for event in _finished(journal, query, KEYS_ALONE):
        trajectory = await journal.trajectory(event.key.partition(":")[2])
        waiting += () if trajectory is None else rows_of(trajectory, accepted=True, held_out=False)
        if sum(row.tokens for row in waiting) >= GROUP_TOKENS:
            yield await journal.read(partial(file.written, tuple(waiting)))
            waiting.clear()
    yield await journal.read(lambda: file.written(waiting) + file.ended())


@define(eq=False)
class ParquetFile:
    """A Parquet file that nobody keeps: what was written since is handed out. It is what pyarrow writes to,
    too, in order and never back.
    """

    closed: bool = False
    _place: int = 0
    _pieces: list[bytes] = field(factory=list)
    _writer: Any = None

    def __attrs_post_init__(self) -> None:
        import pyarrow.parquet as pq

        self._writer = pq.ParquetWriter(self, schema(), compression="zstd")

    def written(self, rows: Sequence[ParquetRow]) -> bytes:
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
