"""The answers of Polar's routes and callbacks: results of sessions and tasks, refusals, and the ids in them.

Results are made piece by piece in threads, and only those in `ByteCache` are kept, so that a group of long
sessions is never in memory as a whole. Refusals have the shape of Polar's own servers, which are FastAPI's
(`{"detail": …}`): bridges raise for a status and log the detail.

One of our ids is used only once, but one of Polar's may be used again when its task is over. So each use of
an id is a task of its own here, named by the id and a number; an id that is not allowed as one of our names
is replaced by its digest.
"""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial, wraps
from hashlib import sha256
from typing import ParamSpec

import trio
from quart import Response, request

from polarnode.api.service import NodeService, error_answer, json_response
from polarnode.core.codec.json import dump_json, read_json
from polarnode.core.codec.tasks import NAME
from polarnode.core.conversation import Json
from polarnode.core.errors import PolarnodeError, Refused, Unreadable
from polarnode.core.status import LiveSessionStatus, SessionRecord
from polarnode.http.asgi import body_json
from polarnode.journal.damage import encode_trajectory
from polarnode.journal.entries import RUN_SEPARATOR
from polarnode.journal.log.port import QueriesPort
from polarnode.journal.queries import ByteCache
from polarnode.journal.values import TaskRecord
from polarnode.trainers.polar import missing_result, origin_of, session_result, task_word

P = ParamSpec("P")

# ── results ────────────────────────────────────────────────────────────


async def session_body(
    log: QueriesPort, task: TaskRecord, session: SessionRecord, *, node: str, recent: ByteCache | None = None
) -> bytes:
    """The SessionResult of a session as JSON, `null` while it runs. It is taken from `recent` if it was made
    a moment ago, because bridges poll.
    """
    found = await log.trajectory(session.session_id)
    if session.outcome is None:
        return b"null"
    missing = partial(missing_result, session.session_id, task.task_id, session.outcome, node=node)
    if found is None:
        return await trio.to_thread.run_sync(lambda: dump_json(missing(metadata=task.spec.metadata)))
    make = partial(encode_trajectory, lambda whole: dump_json(session_result(whole, task.spec)), found)
    try:
        return await trio.to_thread.run_sync(
            make if recent is None else partial(recent.get, session.session_id, make)
        )
    except Unreadable as error:
        return dump_json(missing(metadata={}, error=str(error)))


async def task_body(
    log: QueriesPort,
    task: TaskRecord,
    head: dict[str, Json],
    *,
    node: str,
    results: bool = True,
    recent: ByteCache | None = None,
) -> AsyncGenerator[bytes, None]:
    """A JSON object: the fields of `head`, and `results` of the sessions that are over, in order of their
    samples.
    """
    yield dump_json({**head, "result_paths": []})[:-1] + b',"results":['
    first = True
    for session in task.sessions if results else ():
        if session.outcome is not None:
            piece = await session_body(log, task, session, node=node, recent=recent)
            yield piece if first else b"," + piece
            first = False
    yield b"]}"


def result_head(task: TaskRecord) -> dict[str, Json]:
    """The first fields of a TaskResult."""
    return {
        "task_id": polar_id(task),
        "status": task_word(finished=task.finished, cancelled=task.cancelled is not None),
    }


def status_head(task: TaskRecord) -> dict[str, Json]:
    """The first fields of a TaskStatus."""
    over = sum(session.outcome is not None for session in task.sessions)
    return {**result_head(task), "total_sessions": len(task.sessions), "completed_sessions": over}


REASON_CHARACTERS = 200  # characters of a receiver's own message in the log


def callback_refusal(reply: bytes) -> str | None:
    """Why a bridge did not take a result that it answered with 200; None if it took it. Its listener answers
    `{"ok": false, "reason": …}` for a body that its own classes refuse (NVIDIA-NeMo/ProRL-Agent-Server,
    src/slime_bridge/rollout.py at 01bc72d, `on_task_result`).
    """
    try:
        found = read_json(reply)
    except Refused:
        return None  # a receiver that is not Polar's answers with the status alone
    if not isinstance(found, dict) or found.get("ok") is not False:
        return None
    return f"it answered {{'ok': false}}, {str(found.get('reason'))[:REASON_CHARACTERS]!r}"


# ── requests and refusals ─────────────────────────────────────────────────────

STEP = re.compile(r"\.([A-Za-z_][\w-]*)|\[(\d+)\]|\['([^']*)'\]")


def answered(handler: Callable[P, Awaitable[Response]]) -> Callable[P, Awaitable[Response]]:
    """A handler whose errors are answered as Polar's servers answer them."""

    @wraps(handler)
    async def answer(*args: P.args, **kwargs: P.kwargs) -> Response:
        try:
            return await handler(*args, **kwargs)
        except PolarnodeError as error:
            return refusal(error)

    return answer


def refusal(error: PolarnodeError) -> Response:
    """An error in FastAPI's shape."""
    if isinstance(error, Refused):
        return json_response(
            {"detail": [{"loc": _error_location(error.path), "msg": str(error), "type": "value_error"}]}, 422
        )
    _, status, headers = error_answer(error)
    return json_response({"detail": str(error)}, status, headers)


def _error_location(path: str | None) -> list[Json]:
    """`$.agent.env['A B']` as `["body", "agent", "env", "A B"]`; `?limit` as `["query", "limit"]`."""
    if path is None or path.startswith("?"):
        return ["body"] if path is None else ["query", path[1:]]
    steps: list[Json] = [int(number) if number else name or odd for name, number, odd in STEP.findall(path)]
    return ["body", *steps]


async def body_object() -> dict[str, Json]:
    """The JSON object of the request's body."""
    found = await body_json()
    if not isinstance(found, dict):
        raise Refused("the body is no JSON object: send one", path="$")
    return found


def count(name: str, default: int, *, most: int) -> int:
    """A whole number of the URL's query, from 1 to `most`."""
    text = request.args.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise Refused(f"{name} must be 1 to {most}, not {text!r}", path=f"?{name}")
    return int(text)


def moment(seconds: float) -> str:
    """Seconds since the epoch as Polar writes times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def live_sessions(service: NodeService) -> Mapping[str, LiveSessionStatus]:
    """Sessions that are not over, by id."""
    return {status.session_id: status for status in service.sessions() if status.outcome is None}


# ── names ────────────────────────────────────────────────────────────

LONGEST_NAME = 128 - len(RUN_SEPARATOR) - 9  # leaves characters for the number of a run


def polar_id(task: TaskRecord) -> str:
    """A task's id as its submitter knows it."""
    return origin_of(task.spec.metadata).task_id or task.task_id


def task_name(polar_id: str) -> str:
    """The name of an id's first task."""
    return _name(polar_id, "polar-")


def dispatch_name(session_id: str) -> str:
    """The name of the task of one session, whose id its sender chose."""
    return _name(f"session:{session_id}", "polar-session-")


def run_name(first: str, run: int) -> str:
    """The name of a later task of the same id."""
    return first if run == 1 else f"{first}{RUN_SEPARATOR}{run}"


def _name(polar_id: str, prefix: str) -> str:
    if NAME.fullmatch(polar_id) and len(polar_id) <= LONGEST_NAME and RUN_SEPARATOR not in polar_id:
        return polar_id
    return prefix + sha256(polar_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]
