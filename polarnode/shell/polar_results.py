"""Results of whole tasks as Polar tells them, piece by piece, so that a group of long sessions is never in memory as a whole.

The rule for whoever edits it: each piece is read, made and written in a thread, and nothing is kept of it; who asks again gets the same bytes.
"""

from collections.abc import AsyncGenerator
from functools import partial

from polarnode.conversation import Json
from polarnode.records import Trajectory
from polarnode.shell.journal import Journal, SessionRecord, TaskRecord
from polarnode.shell.journal.recent import Recent
from polarnode.tasks import TaskSpec
from polarnode.trainers.polar import missing_result, origin_of, session_result, task_word
from polarnode.wire import dump_json


async def session_body(journal: Journal, task: TaskRecord, session: SessionRecord, *, node: str, recent: Recent | None = None) -> bytes:
    """The SessionResult of a session that is over; from `recent` where it was made a moment ago, as bridges poll."""
    found = await journal.trajectory(session.session_id)
    if found is not None:
        made = partial(_made, found, task.spec)
        return await journal.read(made if recent is None else partial(recent.get, session.session_id, made))
    if session.outcome is None:
        return b"null"
    missing = partial(missing_result, session.session_id, task.task_id, session.outcome, task.spec.metadata, node)
    return await journal.read(lambda: dump_json(missing()))


def _made(trajectory: Trajectory, spec: TaskSpec) -> bytes:
    return dump_json(session_result(trajectory, spec))


async def task_body(
    journal: Journal, task: TaskRecord, head: dict[str, Json], *, node: str, results: bool = True, recent: Recent | None = None
) -> AsyncGenerator[bytes, None]:
    """A JSON object: what `head` says, and `results` of the sessions that are over, in order of their samples."""
    yield dump_json({**head, "result_paths": []})[:-1] + b',"results":['
    first = True
    for session in task.sessions if results else ():
        if session.outcome is not None:
            piece = await session_body(journal, task, session, node=node, recent=recent)
            yield piece if first else b"," + piece
            first = False
    yield b"]}"


def result_head(task: TaskRecord) -> dict[str, Json]:
    """What a TaskResult begins with."""
    return {"task_id": polar_id(task), "status": task_word(finished=task.finished, cancelled=task.cancelled is not None)}


def status_head(task: TaskRecord) -> dict[str, Json]:
    """What a TaskStatus begins with."""
    over = sum(session.outcome is not None for session in task.sessions)
    return {**result_head(task), "total_sessions": len(task.sessions), "completed_sessions": over}


def polar_id(task: TaskRecord) -> str:
    """A task's id as whoever submitted it says it."""
    return origin_of(task.spec.metadata).task_id or task.task_id
