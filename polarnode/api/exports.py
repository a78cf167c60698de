"""Trajectories in trainers' formats, and GET /v1/export: finished sessions as JSON lines, in a trainer's
format, as conversations, or as rows of tokens in a Parquet file. Also the long responses: the stream of
events (SSE) and a session's artifacts (tar), read piece by piece as the client consumes them.

Everything is built in a reader's thread, one trajectory at a time, and nothing is written to disk. Parquet
also holds one row group in memory. A session that a format cannot represent appears on a stream and in an
export as `refused`, with the reason; one that cannot be read appears as `unreadable`. The stream or export
continues.

A stream is silent for at most KEEP_ALIVE_S. A stream cut at any byte resumes exactly at its last `id:`. A
failure is therefore sent as an `error` event that ends the stream, and the client reconnects. Never `yield`
inside a cancel scope or nursery.
"""

from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy
import trio
from attrs import define, evolve, field, frozen
from quart import Response

from polarnode.api.query import PARQUET, Query
from polarnode.api.service import error_json
from polarnode.core.codec.arrays import Arrays
from polarnode.core.codec.json import dump_json, plain
from polarnode.core.conversation import Json
from polarnode.core.cursors import Cursor
from polarnode.core.errors import ConfigError, PolarnodeError, Refused
from polarnode.core.trajectory import Trajectory
from polarnode.http.asgi import GREETING, KEEP_ALIVE
from polarnode.journal.log.news import wait_events
from polarnode.journal.log.patience import retry_until_answered
from polarnode.journal.log.port import Log, LogGap, LogPage, LogUnavailable
from polarnode.journal.values import (
    KEYS_ONLY,
    PRUNED_BODY,
    StoredEvent,
    TrajectoryEncoder,
    json_encoder,
)
from polarnode.offline.rows import ROW_GROUP_TOKENS, ParquetRow, arrow, rows_of, schema, sft_lines, table
from polarnode.trainers import FORMATS, project

Read = Callable[[Callable[[], bytes]], Awaitable[bytes]]  # runs a long pure call in a thread

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
    """The result of `format_json` as JSON bytes, with `refused` in place of the data if the format cannot
    represent the trajectory.
    """
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
                else {
                    "dtype": str(value.dtype),
                    "shape": list(value.shape),
                    "data": _encode_base64(value.tobytes()),
                }
            )
        case bytes():
            return _encode_base64(value)
        case dict():
            return {name: _plain(each, arrays) for name, each in value.items()}
        case list():
            return [_plain(each, arrays) for each in value]
    return value


def _encode_base64(data: bytes) -> str:
    return b64encode(data).decode()


# ── events ────────────────────────────────────────────────────────────────────


def query_encoder(query: Query) -> TrajectoryEncoder:
    """The function that encodes trajectories for a stream or an export."""
    if query.format is None:
        return json_encoder(query.arrays, query.turns)
    name, arrays = query.format, query.arrays
    return TrajectoryEncoder(
        name=("format", name, arrays), encode=lambda whole: format_bytes(name, whole, arrays)
    )


# ── exports ────────────────────────────────────────────────────────────


def export(log: Log, read: Read, query: Query, last: Cursor) -> Response:
    """Yield the body of GET /v1/export in the format that the query names, up to the event at `last`. While
    the log is away, the body waits; then it continues where it stopped.
    """
    if query.kind == "rewards":
        return _lines(log, _alone(query), KEYS_ONLY, last)
    if query.kind == "sft":
        return _lines(log, _alone(query), SFT_ENCODER, last)
    if query.format == PARQUET:
        _check_arrow()
        return Response(_parquet(log, read, query, last), content_type="application/vnd.apache.parquet")
    return _lines(log, check_format(query), query_encoder(query), last)


def _check_arrow() -> None:
    """Check pyarrow before the first byte: a later failure could only cut the response short."""
    try:
        arrow()
    except ConfigError as error:
        raise ConfigError(
            "format=parquet needs pyarrow where the node runs: pip install 'polarnode[data]'"
        ) from error


def _lines(log: Log, query: Query, encoder: TrajectoryEncoder, last: Cursor) -> Response:
    return Response(_encoded_lines(log, query, encoder, last), content_type="application/x-ndjson")


def _alone(query: Query) -> Query:
    if query.format is not None:
        raise Refused(f"kind={query.kind} is a shape of its own: leave format= out", path="?format")
    return query


async def _finished(
    log: Log, query: Query, encoder: TrajectoryEncoder, last: Cursor
) -> AsyncIterator[StoredEvent]:
    """Every trajectory or reward that was published before the export began, oldest first."""
    seen = Cursor(log=last.log)
    filters = evolve(query.filters(), kinds=("reward",) if query.kind == "rewards" else ("trajectory",))
    while seen.position < last.position:
        look = partial(log.events, seen, filters=filters, encoder=encoder)
        found = await retry_until_answered(look, meanwhile="an export waits")
        for event in found.page.events:
            if event.seq <= last.position:
                yield event
        if found.page.seen == seen.position:  # the log ends earlier: a promoted standby lacks the rest
            return
        seen = Cursor(position=found.page.seen, log=found.log)


async def _encoded_lines(
    log: Log, query: Query, encoder: TrajectoryEncoder, last: Cursor
) -> AsyncIterator[bytes]:
    """One or more lines for each trajectory; none for one that was pruned meanwhile or encodes to nothing. A
    trajectory that cannot be read has a line of its own, except among conversations, where only node.log
    names it.
    """
    async for event in _finished(log, query, encoder, last):
        if event.kind == "unreadable":
            if encoder is not SFT_ENCODER:
                yield b'{"unreadable":' + event.body + b"}\n"
        elif event.body not in (b"", PRUNED_BODY):
            yield event.body + b"\n"


def _conversations(trajectory: Trajectory) -> bytes:
    """Messages and tools, one line for each main lineage that has them. Trajectories of polarnode 0.1 have
    none.
    """
    lines, _ = sft_lines(trajectory)
    return b"\n".join(dump_json(line.body) for line in lines)


SFT_ENCODER: Final = TrajectoryEncoder(name="sft", encode=_conversations)


async def _parquet(log: Log, read: Read, query: Query, last: Cursor) -> AsyncIterator[bytes]:
    """The rows of every session as a Parquet file, sent as it is written. A truncated file has no footer, so
    readers refuse it.
    """
    file = await trio.to_thread.run_sync(ParquetFile)
    waiting: list[ParquetRow] = []
    async for event in _finished(log, query, KEYS_ONLY, last):
        if event.kind == "unreadable":
            continue  # node.log names it
        look = partial(log.trajectory, event.key.partition(":")[2])
        trajectory = await retry_until_answered(look, meanwhile="an export waits")
        waiting += () if trajectory is None else rows_of(trajectory, accepted=True, held_out=False)
        if sum(row.tokens for row in waiting) >= ROW_GROUP_TOKENS:
            yield await read(partial(file.written, tuple(waiting)))
            waiting.clear()
    yield await read(lambda: file.written(waiting) + file.ended())


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


# ── streams of events ───────────────────────────────────────────────────────────────────────────────

# The bytes written at once. Small events are sent together, and a large event is not copied whole for a slow
# reader.
WRITE_BYTES = 256 << 10
# The bytes of a file that are read at a time: one disk read, and little memory for a slow client.
PIECE = 1 << 20
END = b"\n\n"
LAST = b"}" + END  # the end of an event whose body is written separately
KEEP_ALIVE_S = 8.0  # the API promises a byte every 10 s; 2 s are left for the network


AWAY_S = 1.0  # between two tries to read a log that is away


def event_stream(log: Log, query: Query, start: Cursor, *, resumes: bool) -> AsyncIterator[bytes]:
    """Yield the events after `start` as they are published; `resumes` says that `start` is the consumer's
    position. With follow=false the stream ends when there are no more events; if a task is named, it ends
    after that task's end.

    A stream holds at most one page of events: it reads the next when the client has consumed the page. While
    the log is away, the stream stays open; then it continues where it stopped.
    """
    events = _events(log, query, start, resumes=resumes)
    return (
        events if query.consumer is None else _ConsumerStream(log=log, consumer=query.consumer, events=events)
    )


@define(eq=False, kw_only=True)
class _ConsumerStream(AsyncIterator[bytes]):
    """A consumer's stream. The log counts the consumer as reading from the first piece until Quart closes the
    iterator, which it does whichever way the client disconnects.
    """

    log: Log
    consumer: str
    events: AsyncGenerator[bytes, None]
    _reads: bool = False

    async def __anext__(self) -> bytes:
        if not self._reads:
            self._reads = True
            self.log.track_stream(self.consumer, 1)
        return await anext(self.events)

    async def aclose(self) -> None:
        if self._reads:
            self._reads = False
            self.log.track_stream(self.consumer, -1)
        await self.events.aclose()


async def _events(log: Log, query: Query, start: Cursor, *, resumes: bool) -> AsyncGenerator[bytes, None]:
    yield GREETING
    if query.begin == "newest":  # a reader that reconnects before its first event begins here again
        yield b"id: %b\n\n" % cursor_text(log, start).encode()
    seen, last_write = start, trio.current_time()
    while True:
        news = log.event_news
        found = await _look(log, query, seen)
        if isinstance(found, LogUnavailable):
            await wait_events(log, news, AWAY_S)
        elif isinstance(found, PolarnodeError):
            yield b"event: error\ndata: " + dump_json(error_json(found.boundary, str(found))) + END
            return
        elif resumes and (further := await _later_position(log, query.consumer, found)) is not None:
            # The last acknowledgements of a killed reader may arrive after its restarted self opened this
            # stream.
            seen = further
            continue
        else:
            page = found.answer.page
            for piece in _pieces(log, found.answer):
                yield piece
                last_write = trio.current_time()
            seen = Cursor(position=page.seen, log=found.answer.log)
            if page.events or found.answer.gap is not None:
                continue
            if found.is_last:
                return
            with trio.move_on_at(last_write + KEEP_ALIVE_S):
                await wait_events(log, news, KEEP_ALIVE_S)
        if trio.current_time() >= last_write + KEEP_ALIVE_S:
            yield KEEP_ALIVE
            last_write = trio.current_time()


@frozen
class _FoundPage:
    """A page, and whether the log holds no more for a reader that does not follow."""

    answer: LogPage
    is_last: bool


async def _look(log: Log, query: Query, seen: Cursor) -> _FoundPage | PolarnodeError:
    """Read the next page. Whether it is the last one is determined before the page is read, so that a task's
    end between the two is not missed.
    """
    try:
        is_last = not query.follow and await _is_log_complete(log, query.task_id)
        answer = await log.events(seen, filters=query.filters(), encoder=query_encoder(query))
        return _FoundPage(answer, is_last)
    except PolarnodeError as error:
        return error


async def _is_log_complete(log: Log, task_id: str | None) -> bool:
    """Whether the log already holds all events."""
    if task_id is None:
        return True
    task = await log.task(task_id)
    return task is None or task.finished


async def _later_position(log: Log, consumer: str | None, found: _FoundPage) -> Cursor | None:
    """The present position of a consumer whose stream missed events, if it had acknowledged these before."""
    gap = found.answer.gap
    if gap is None or consumer is None:
        return None
    with suppress(LogUnavailable):
        position = await log.consumer_cursor(consumer)
        return position if position.position > gap.asked.position else None
    return None


def cursor_text(log: Log, cursor: Cursor) -> str:
    """A position in the form that readers get: a number, with the log's name if nodes share the log."""
    return (cursor if log.shared else Cursor(position=cursor.position)).text


def _gap_event(log: Log, gap: LogGap) -> bytes:
    """A gap event. It says that events are missing from this log, for the stated `reason`; or that `after`
    belongs to another log (the file was replaced), and this log is sent from its beginning.
    """
    after, oldest = gap.asked.position, gap.position + 1
    body: dict[str, Json] = {
        "seq": gap.position,
        "journal": gap.log,
        "key": f"gap:{after}-{oldest}",
        "gap": {"after": after, "oldest": oldest, "reason": gap.reason},
    }
    return _head(log, "gap", Cursor(position=gap.position, log=gap.log)) + dump_json(body) + END


def _pieces(log: Log, found: LogPage) -> Iterator[bytes]:
    """The pieces of a page, of about WRITE_BYTES each: a gap if there is one, then the encoded events."""
    held: list[bytes] = [] if found.gap is None else [_gap_event(log, found.gap)]
    size = 0
    for event in found.page.events:
        body = event.body
        head = _head(log, event.kind, Cursor(position=event.seq, log=found.log))
        parts = [
            head + event.json_prefix(found.log),
            *(body[place : place + WRITE_BYTES] for place in range(0, len(body), WRITE_BYTES)),
            LAST,
        ]
        for part in parts:
            held.append(part)
            size += len(part)
            if size >= WRITE_BYTES:
                yield b"".join(held)
                held, size = [], 0
    if held:
        yield b"".join(held)


def _head(log: Log, kind: str, cursor: Cursor) -> bytes:
    # Compact JSON has no line breaks.
    return b"event: %b\nid: %b\ndata: " % (kind.encode(), cursor_text(log, cursor).encode())


async def file_pieces(path: Path, size: int) -> AsyncIterator[bytes]:
    """A file's first `size` bytes. The file is opened for each piece, so a client that disconnects in between
    leaves nothing open.
    """
    for place in range(0, size, PIECE):
        yield await trio.to_thread.run_sync(_piece, path, place, min(PIECE, size - place))


def _piece(path: Path, place: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(place)
        return file.read(length)
