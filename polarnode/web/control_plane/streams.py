"""What is long: the stream of events (SSE) and the export (JSONL), read from the journal page by page as the client takes it.

The rules for whoever edits it. No scope and no nursery around a `yield`. A stream is silent for at most KEEP_ALIVE_S. It can be cut at any
byte and resumed at its last `id:`, exactly; so a failure is said as an `error` event and ends the stream, and the client comes again.
"""

from collections.abc import AsyncIterator

import trio

from polarnode.conversation import Json
from polarnode.errors import PolarnodeError
from polarnode.shell.journal import EventPage, Filters, Journal
from polarnode.web.control_plane.errors import error_json
from polarnode.web.control_plane.query import Query
from polarnode.wire import dump_json

KEEP_ALIVE_S = 8.0  # the API promises something every 10 s; two for the way


async def event_stream(journal: Journal, query: Query, start: int) -> AsyncIterator[bytes]:
    """Events after `start` as they come. With follow=false it ends when there is no more: after the task's end when one is named."""
    yield b": polarnode\n\n"  # headers leave at once, so that a client knows it is connected
    seen, spoken = start, trio.current_time()
    while True:
        last_round = not query.follow and await _nothing_to_come(journal, query.task_id)
        page = await _page(journal, query, seen)
        if isinstance(page, PolarnodeError):
            yield _sse("error", dump_json(error_json(page.boundary, str(page))))
            return
        if not page.follows(seen):
            yield _gap(page.first_seq, seen)
            seen = page.first_seq - 1
            continue
        for event in page.events:
            yield _sse(event.kind, event.json, event.seq)
            spoken = trio.current_time()
        seen = page.seen
        if page.events:
            continue
        if last_round:
            return
        with trio.move_on_at(spoken + KEEP_ALIVE_S):
            await journal.wait_after(seen)
        if trio.current_time() >= spoken + KEEP_ALIVE_S:
            yield b": keep-alive\n\n"
            spoken = trio.current_time()


async def _page(journal: Journal, query: Query, seen: int) -> EventPage | PolarnodeError:
    try:
        return await journal.events(seen, filters=query.filters(), arrays=query.arrays, turns=query.turns)
    except PolarnodeError as error:
        return error


async def _nothing_to_come(journal: Journal, task_id: str | None) -> bool:
    """Whether what the journal holds now is all; asked before the page is read, so that an end between the two is not missed."""
    if task_id is None:
        return True
    task = await journal.task(task_id)
    return task is None or task.finished


def _gap(oldest: int, after: int) -> bytes:
    """What lies between was pruned; or `after` is of another journal (its file was replaced), and this one is told from its beginning."""
    body: dict[str, Json] = {"gap": {"after": after, "oldest": oldest}}
    return _sse("gap", dump_json(body), oldest - 1)


def _sse(kind: str, body: bytes, seq: int | None = None) -> bytes:
    number = b"" if seq is None else b"id: %d\n" % seq
    return b"event: %b\n%bdata: %b\n\n" % (kind.encode(), number, body)  # compact JSON has no line breaks


async def export_lines(journal: Journal, query: Query) -> AsyncIterator[bytes]:
    """Every trajectory that is over when this begins, a line each, oldest first."""
    seen, last = 0, journal.last_seq
    filters = Filters(task_id=query.task_id, group_id=query.group_id, outcome=query.outcome, min_reward=query.min_reward, kinds=("trajectory",))
    while seen < last:
        page = await journal.events(seen, filters=filters, arrays=query.arrays, turns=query.turns)
        for event in page.events:
            if event.seq <= last:
                yield event.body + b"\n"
        seen = page.seen
