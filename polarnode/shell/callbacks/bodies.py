"""What a callback is sent for an event: the event as the stream has it, or Polar's TaskResult or SessionResult.

The rule for whoever edits it: receivers that know no chunks read `Content-Length`, so that every body has one; a body that is too large to be
held is made twice, once to be measured.
"""

from collections.abc import AsyncGenerator, Callable

from attrs import frozen

from polarnode.shell.journal import Journal, StoredEvent, TaskRecord
from polarnode.shell.polar_results import result_head, session_body, task_body

HELD_BYTES = 8 << 20  # of a body in memory: most groups are smaller


@frozen(kw_only=True)
class Body:
    """`held` in memory, or made again piece by piece; `size` bytes."""

    size: int
    held: bytes | None
    pieces: Callable[[], AsyncGenerator[bytes, None]]


async def body_of(journal: Journal, event: StoredEvent, task: TaskRecord | None, *, node: str) -> Body:
    """The body for an event, as its task wants it. A task that is not kept any more wants the event itself."""
    wanted = "event" if task is None else task.spec.callback_format
    if task is not None and wanted == "polar_task" and event.kind == "task":
        whole = task
        return await _measured(lambda: task_body(journal, whole, result_head(whole), node=node))
    session = None if task is None else next((one for one in task.sessions if event.key == f"trajectory:{one.session_id}"), None)
    if task is not None and wanted == "polar_session" and session is not None:
        return _whole(await session_body(journal, task, session, node=node))
    return _whole(event.json)


def _whole(body: bytes) -> Body:
    async def pieces() -> AsyncGenerator[bytes, None]:
        yield body

    return Body(size=len(body), held=body, pieces=pieces)


async def _measured(pieces: Callable[[], AsyncGenerator[bytes, None]]) -> Body:
    size, kept = 0, list[bytes]()
    async for piece in pieces():
        size += len(piece)
        if size <= HELD_BYTES:
            kept.append(piece)
        else:
            kept.clear()
    return Body(size=size, held=b"".join(kept) if size <= HELD_BYTES else None, pieces=pieces)
