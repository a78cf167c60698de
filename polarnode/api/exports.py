"""Trajectories in trainers' formats, and GET /v1/export: finished sessions as JSON lines, in a trainer's
format, as conversations, or as rows of tokens in a Parquet file.

Everything is built in a reader's thread, one trajectory at a time, and nothing is written to disk. Parquet
also holds one row group in memory. A session that a format cannot represent appears on a stream and in an
export as `refused`, with the reason; one that cannot be read appears as `unreadable`. The stream or export
continues.
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
from polarnode.journal.values import KEYS_ALONE, PRUNED, StoredEvent, TrajectoryEncoder, json_encoder
from polarnode.offline.rows import GROUP_TOKENS, ParquetRow, arrow, rows_of, schema, table
from polarnode.offline.sft import sft_lines
from polarnode.trainers import FORMATS, project

# ── formats ────────────────────────────────────────────────────────────


def check_format(query: Query) -> Query:
    """Check the query of a route that serves only trainers' formats. Raises Refused for any other format."""
    if query.format == PARQUET:
        raise Refused(
            f"format must be one of {', '.join(FORMATS)} here; parquet is a format of GET /v1/export",
            path="?format",
        )
    if query.format is not None and query.turns == "full":
        raise Refused(
            "turns=full is for a trajectory's own JSON: leave it out where format= is given", path="?turns"
        )
    return query


def format_json(name: str, trajectory: Trajectory, arrays: Arrays) -> dict[str, Json]:
    """A trajectory in a trainer's format, with its ids. Raises Refused if the format cannot represent it."""
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


def format_bytes(name: str, trajectory: Trajectory, arrays: Arrays) -> bytes:
    """The same as JSON bytes, with `refused` in place of the data if the format cannot represent it."""
    try:
        return dump_json(format_json(name, trajectory, arrays))
    except Refused as refused:
        return dump_json(_whose(name, trajectory) | {"value": None, "refused": str(refused)})


def _plain(value: Any, arrays: Arrays) -> Any:
    """Arrays as lists, or as base64 with dtype and shape; bytes as base64."""
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


def encoder_of(query: Query) -> TrajectoryEncoder:
    """The function that encodes trajectories for a stream or an export."""
    if query.format is None:
        return json_encoder(query.arrays, query.turns)
    name, arrays = query.format, query.arrays
    return TrajectoryEncoder(
        name=("format", name, arrays), encode=lambda whole: format_bytes(name, whole, arrays)
    )


# ── exports ────────────────────────────────────────────────────────────


def export(journal: Journal, query: Query) -> Response:
    """Yield the body of GET /v1/export in the format that the query names."""
    if query.kind == "sft":
        return _lines(journal, _alone(query), SFT)
    if query.format == PARQUET:
        _check_arrow()
        return Response(_parquet(journal, query), content_type="application/vnd.apache.parquet")
    return _lines(journal, check_format(query), encoder_of(query))


def _check_arrow() -> None:
    """Check pyarrow before the first byte: a later failure could only cut the response short."""
    try:
        arrow()
    except ConfigError as error:
        raise ConfigError(
            "format=parquet needs pyarrow where the node runs: pip install 'polarnode[data]'"
        ) from error


def _lines(journal: Journal, query: Query, encoder: TrajectoryEncoder) -> Response:
    return Response(_encoded_lines(journal, query, encoder), content_type="application/x-ndjson")


def _alone(query: Query) -> Query:
    if query.format is not None:
        raise Refused("kind=sft is a shape of its own: leave format= out", path="?format")
    return query


async def _finished(journal: Journal, query: Query, encoder: TrajectoryEncoder) -> AsyncIterator[StoredEvent]:
    """Every trajectory that was published before the export began, oldest first."""
    seen, last = 0, journal.last_seq
    filters = evolve(query.filters(), kinds=("trajectory",))
    while seen < last:
        page = await journal.events(seen, filters=filters, encoder=encoder)
        for event in page.events:
            if event.seq <= last:
                yield event
        seen = page.seen


async def _encoded_lines(journal: Journal, query: Query, encoder: TrajectoryEncoder) -> AsyncIterator[bytes]:
    """One or more lines for each trajectory; none for one that was pruned meanwhile or encodes to nothing. A
    trajectory that cannot be read has a line of its own, except among conversations: the log names it.
    """
    async for event in _finished(journal, query, encoder):
        if event.kind == "unreadable":
            if encoder is not SFT:
                yield b'{"unreadable":' + event.body + b"}\n"
        elif event.body not in (b"", PRUNED):
            yield event.body + b"\n"


def _conversations(trajectory: Trajectory) -> bytes:
    """Messages and tools, one line for each main lineage that has them. Trajectories of polarnode 0.1 have
    none.
    """
    lines, _ = sft_lines(trajectory)
    return b"\n".join(dump_json(line.body) for line in lines)


SFT: Final = TrajectoryEncoder(name="sft", encode=_conversations)


async def _parquet(journal: Journal, query: Query) -> AsyncIterator[bytes]:
    """The rows of every session as a Parquet file, sent as it is written. A truncated file has no footer, so
    readers refuse it.
    """
    file = await journal.read(ParquetFile)
    waiting: list[ParquetRow] = []
    async for event in _finished(journal, query, KEYS_ALONE):
        if event.kind == "unreadable":
            continue  # the log names it
        trajectory = await journal.trajectory(event.key.partition(":")[2])
        waiting += () if trajectory is None else rows_of(trajectory, accepted=True, held_out=False)
        if sum(row.tokens for row in waiting) >= GROUP_TOKENS:
            yield await journal.read(partial(file.written, tuple(waiting)))
            waiting.clear()
    yield await journal.read(lambda: file.written(waiting) + file.ended())


@define(eq=False)
class ParquetFile:
    """A Parquet file in memory whose bytes are drained as they are written. It is also the file object that
    pyarrow writes to, in order and without seeking.
    """

    closed: bool = False
    _place: int = 0
    _pieces: list[bytes] = field(factory=list)
    _writer: Any = None

    def __attrs_post_init__(self) -> None:
        import pyarrow.parquet as pq

        self._writer = pq.ParquetWriter(self, schema(), compression="zstd")

    def written(self, rows: Sequence[ParquetRow]) -> bytes:
        """Write one more row group and return all bytes not returned yet. Without rows no row group is
        written.
        """
        if rows:
            self._writer.write_table(table(rows))
        return self._taken()

    def ended(self) -> bytes:
        """Close the file and return its last bytes."""
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
