"""The node's interface with Polar's own routes and JSON, for existing bridges: Polar's rollout server and
gateway in one, on the control plane's socket.

It uses the port `NodeService` and keeps nothing that the log does not keep. A field that Polar documents has
Polar's meaning here, or docs/polar.md says what differs and why.
"""

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

from attrs import evolve, frozen

from polarnode.api.app import Extension
from polarnode.api.callbacks import CallbackFormat
from polarnode.api.openapi_shapes import Operation, Refusal, RouteKey
from polarnode.api.proxy import Asked
from polarnode.api.service import NodeService
from polarnode.core.codec.schema import Schema
from polarnode.integrations.polar.answers import (
    answered,
    callback_refusal,
    result_head,
    session_body,
    task_body,
)
from polarnode.integrations.polar.completions import EventRoutes
from polarnode.integrations.polar.gateway import PolarNodeRoutes, SessionRoutes
from polarnode.integrations.polar.tasks import TaskRoutes
from polarnode.journal.log.port import Log
from polarnode.journal.values import StoredEvent, TaskRecord


@frozen(kw_only=True)
class Misfit:
    """An invalid field, in FastAPI's shape."""

    loc: tuple[str | int, ...]
    msg: str
    type: str


@frozen(kw_only=True)
class Detail:
    """A refusal of Polar's servers."""

    detail: str | tuple[Misfit, ...]


_OBJECT: Final = dict[str, Any]
_TEXT: Final[Schema] = {"schema": {"type": "string"}}
_LIMIT_PARAMETER: Final[Mapping[str, Schema]] = {
    "limit": {"schema": {"type": "integer", "minimum": 1, "maximum": 1000}}
}
_VERSION_PARAMETER: Final[Mapping[str, Schema]] = {"version": {"schema": {"type": "integer", "minimum": 0}}}

# If nodes share a log, requests of these routes go to the node that has the session. A session that its
# sender named is found by its task, whose places any node can cancel.
POLAR_SESSION_ROUTES: Final[Mapping[RouteKey, Asked]] = {
    ("GET", "/sessions/<session_id>"): "live",
    ("GET", "/sessions/<session_id>/completions"): "live",
    ("DELETE", "/sessions/<session_id>"): "live",
}

_PLAIN: Final[Mapping[RouteKey, Operation]] = {
    ("POST", "/rollout/task/submit"): Operation(
        summary="A TaskRequest.", body=_OBJECT, answer=_OBJECT, errors=(409, 413, 422, 429, 507)
    ),
    ("GET", "/rollout/task/<task_id>"): Operation(
        summary="TaskStatus, with the results that are in.",
        answer=_OBJECT,
        errors=(404,),
        own={"results": _TEXT},
    ),
    ("DELETE", "/rollout/task/<task_id>"): Operation(
        summary="End its sessions with what they have.",
        answer=_OBJECT,
        errors=(404,),
        own={"register_if_missing": _TEXT},
    ),
    ("GET", "/rollout/status"): Operation(summary="Statuses of the newest tasks.", answer=_OBJECT),
    ("GET", "/tasks"): Operation(
        summary="Tasks, newest first.",
        answer=_OBJECT,
        errors=(422,),
        own={"status": _TEXT, "harness": _TEXT, "since": {"schema": {"type": "number"}}, **_LIMIT_PARAMETER},
    ),
    ("GET", "/tasks/<task_id>/sessions"): Operation(
        summary="A task's sessions.", answer=_OBJECT, errors=(404,)
    ),
    ("GET", "/events"): Operation(
        summary="Changes of sessions, for dashboards.", content="text/event-stream"
    ),
    ("GET", "/health"): Operation(summary="The node's health and load.", answer=_OBJECT),
    ("GET", "/nodes"): Operation(
        summary="The nodes: this one.",
        answer=list[_OBJECT],  # type: ignore[valid-type]
    ),
    ("GET", "/nodes/<node_id>"): Operation(summary="A node.", answer=_OBJECT, errors=(404,)),
    ("GET", "/sessions"): Operation(
        summary="Sessions that are not over.",
        answer=_OBJECT,
        errors=(422,),
        own={"status": _TEXT, "task_id": _TEXT, **_LIMIT_PARAMETER},
    ),
    ("POST", "/sessions"): Operation(
        summary="Dispatch a session, or open a capture.",
        body=_OBJECT,
        answer=_OBJECT,
        errors=(409, 413, 422, 429, 507),
    ),
    ("GET", "/sessions/<session_id>"): Operation(
        summary="A session, with its result when it is over.", answer=_OBJECT, errors=(404,)
    ),
    ("GET", "/sessions/<session_id>/completions"): Operation(
        summary="Its model calls.", answer=_OBJECT, errors=(404,)
    ),
    ("DELETE", "/sessions/<session_id>"): Operation(
        summary="End it with what it has.", answer=_OBJECT, errors=(404,)
    ),
    ("GET", "/admin/inference/status"): Operation(summary="Whether generation is held.", answer=_OBJECT),
    ("POST", "/admin/inference/pause"): Operation(
        summary="Hold generation.", answer=_OBJECT, errors=(409, 503)
    ),
    ("POST", "/admin/inference/resume"): Operation(
        summary="Let generation go on.", answer=_OBJECT, errors=(409, 503)
    ),
    ("POST", "/admin/policy_version"): Operation(
        summary="The version that the engine serves.", answer=_OBJECT, errors=(422,), own=_VERSION_PARAMETER
    ),
    ("POST", "/rollout/admin/inference/pause"): Operation(
        summary="Hold generation; as of all gateways.", answer=_OBJECT, errors=(409, 503)
    ),
    ("POST", "/rollout/admin/inference/resume"): Operation(
        summary="Let generation go on; as of all gateways.", answer=_OBJECT, errors=(409, 503)
    ),
    ("POST", "/rollout/admin/policy_version"): Operation(
        summary="Whether the engine serves this version; as of all gateways.",
        answer=_OBJECT,
        errors=(422,),
        own=_VERSION_PARAMETER,
    ),
}

OPERATIONS: Final[Mapping[RouteKey, Operation]] = {
    where: evolve(each, tag="polar", refusal=Refusal | Detail) for where, each in _PLAIN.items()
}


__all__ = ["callback_formats", "polar_extension"]


def polar_extension(service: NodeService) -> Extension:
    """All of Polar's routes. Polar's bridges send the control plane's token in a header of their own, but
    poll without it; for polling it is the password in the URL that they are given.
    """
    tasks = TaskRoutes(service)
    routes = (
        tasks,
        SessionRoutes(service=service, tasks=tasks),
        PolarNodeRoutes(service=service),
        EventRoutes(service=service),
    )
    return Extension(
        rows=tuple(
            (method, path, answered(handler)) for each in routes for method, path, handler in each.rows()
        ),
        operations=OPERATIONS,
        token_headers=("X-Polar-Control-Token",),
        basic=True,
    )


def callback_formats(*, node: str) -> Mapping[str, CallbackFormat]:
    """Polar's values of `callback_format`: `polar_task`, the TaskResult when a task ends, and
    `polar_session`, a SessionResult for each session. `node` is the node's id in results.
    """

    def task_result(log: Log, event: StoredEvent, task: TaskRecord) -> AsyncGenerator[bytes, None]:
        return task_body(log, task, result_head(task), node=node)

    async def one_session(log: Log, event: StoredEvent, task: TaskRecord) -> AsyncGenerator[bytes, None]:
        session = next((one for one in task.sessions if event.key == f"trajectory:{one.session_id}"), None)
        if session is None:  # the session lost its place in the group and has no SessionResult
            yield event.json(await log.log_name())
        else:
            yield await session_body(log, task, session, node=node)

    return {
        "polar_task": CallbackFormat(kinds=("task",), body=task_result, refusal=callback_refusal),
        "polar_session": CallbackFormat(kinds=("trajectory",), body=one_session, refusal=callback_refusal),
    }
