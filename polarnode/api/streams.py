"""Long responses: the stream of events (SSE) and a session's artifacts (tar), read piece by piece as the
client consumes them.

A stream is silent for at most KEEP_ALIVE_S. A stream cut at any byte resumes exactly at its last `id:`. A
failure is therefore sent as an `error` event that ends the stream, and the client reconnects. Never `yield`
inside a cancel scope or nursery.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import trio
from attrs import define

from polarnode.api.exports import encoder_of
from polarnode.api.query import Query
from polarnode.api.service import error_json
from polarnode.core.codec.json import dump_json
from polarnode.core.conversation import Json
from polarnode.core.errors import PolarnodeError
from polarnode.journal.journal import Journal
from polarnode.journal.values import EventPage, StoredEvent

# bytes written at once: small events are sent together, and a large one is not copied whole for a slow reader
WRITE_BYTES = 256 << 10
# bytes of a file at a time: one disk read, and little memory for a slow client
PIECE = 1 << 20
END = b"\n\n"
LAST = b"}" + END  # ends an event whose body is written separately
KEEP_ALIVE_S = 8.0  # the API promises a byte every 10 s; two for the network


def event_stream(journal: Journal, query: Query, start: int) -> AsyncIterator[bytes]:
    """Events after `start` as they are published. With follow=false the stream ends when there are no more;
    if a task is named, after that task's end.

    A stream holds at most one page of events: it reads the next when the client has consumed the page.
    """
    events = _events(journal, query, start)
    return (
        events
        if query.consumer is None
        else _Attended(journal=journal, consumer=query.consumer, events=events)
    )


@define(eq=False, kw_only=True)
class _Attended(AsyncIterator[bytes]):
    """A consumer's stream. The journal counts the consumer as reading from the first piece until Quart closes
    the iterator, which Quart does however the client disconnects.
    """

    journal: Journal
    consumer: str
    events: AsyncGenerator[bytes, None]
    _reading: ExitStack | None = None

    async def __anext__(self) -> bytes:
        if self._reading is None:
            self._reading = ExitStack()
            self._reading.enter_context(self.journal.reading(self.consumer))
        return await anext(self.events)

    async def aclose(self) -> None:
        if self._reading is not None:
            self._reading.close()
        await self.events.aclose()


async def _events(journal: Journal, query: Query, start: int) -> AsyncGenerator[bytes, None]:
    yield b": polarnode\n\n"  # send the headers at once, so that the client knows it is connected
    seen, last_write = start, trio.current_time()
    while True:
        last_round = not query.follow and await _nothing_to_come(journal, query.task_id)
        page = await _page(journal, query, seen)
        if isinstance(page, PolarnodeError):
            yield b"event: error\ndata: " + dump_json(error_json(page.boundary, str(page))) + END
            return
        if not page.follows(seen):
            yield _gap(page.first_seq, seen)
            seen = page.first_seq - 1
            continue
        for piece in _pieces(page.events):
            yield piece
            last_write = trio.current_time()
        seen = page.seen
        if page.events:
            continue
        if last_round:
            return
        with trio.move_on_at(last_write + KEEP_ALIVE_S):
            await journal.wait_after(seen)
        if trio.current_time() >= last_write + KEEP_ALIVE_S:
            yield b": keep-alive\n\n"
            last_write = trio.current_time()


async def _page(journal: Journal, query: Query, seen: int) -> EventPage | PolarnodeError:
    try:
        return await journal.events(seen, filters=query.filters(), encoder=encoder_of(query))
    except PolarnodeError as error:
        return error


async def _nothing_to_come(journal: Journal, task_id: str | None) -> bool:
    """Whether the journal already holds all events. Call it before reading the page, so that a task's end
    between the two is not missed.
    """
    if task_id is None:
        return True
    task = await journal.task(task_id)
    return task is None or task.finished


def _gap(oldest: int, after: int) -> bytes:
    """A gap event: the events between were pruned; or `after` belongs to another journal (the file was
    replaced), so this one is sent from its beginning.
    """
    body: dict[str, Json] = {
        "seq": oldest - 1,
        "key": f"gap:{after}-{oldest}",
        "gap": {"after": after, "oldest": oldest},
    }
    return _head("gap", oldest - 1) + dump_json(body) + END


def _pieces(events: Iterable[StoredEvent]) -> Iterator[bytes]:
    """Encoded events in pieces of about WRITE_BYTES."""
    held: list[bytes] = []
    size = 0
    for event in events:
        body = event.body
        parts = [
            _head(event.kind, event.seq) + event.before,
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


def _head(kind: str, seq: int) -> bytes:
    return b"event: %b\nid: %d\ndata: " % (kind.encode(), seq)  # compact JSON has no line breaks


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
