"""What each route takes and gives, for those routes that are the control plane's own.

The rule for whoever edits it: a new route brings its operation; a type stands here, never a copy of its fields.
"""

from collections.abc import Mapping
from typing import Any, Final

from attrs import field, frozen

from polarnode.tasks import TaskSpec
from polarnode.web.control_plane.openapi import answers
from polarnode.web.control_plane.query import FILTERS
from polarnode.web.control_plane.routes import Ack
from polarnode.web.control_plane.service import Submitted
from polarnode.wire.schema import Schema
from polarnode.wire.trajectories import TrajectoryShape

JSON: Final = "application/json"
Where = tuple[str, str]  # method and path, as the route's row has them


@frozen(kw_only=True)
class Operation:
    """One route. `body` and `answer` are types, None where there is none, or where the answer is no JSON; `errors` beside those all can have.

    `again` is the status of the same answer to what was done before; `own` are parameters of its URL that `query` does not read.
    """

    summary: str
    tag: str = "trainer"
    query: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    body: Any = None
    optional_body: bool = False
    status: int = 200
    again: int | None = None
    answer: Any = None
    content: str = JSON
    also: tuple[str, ...] = ()  # what it can be instead
    errors: tuple[int, ...] = ()
    refusal: Any = answers.Refusal
    own: Mapping[str, Schema] = field(factory=dict)
    open: bool = False  # needs no token
    leads_to: Mapping[str, Where] = field(factory=dict)  # by the place of a name in its answer: the routes that take it in their path


_ARRAYS: Final = ("arrays", "turns")

OPERATIONS: Final[Mapping[Where, Operation]] = {
    ("POST", "/v1/tasks"): Operation(
        summary="Submit a task.",
        headers=("Idempotency-Key",),
        body=TaskSpec,
        status=202,
        answer=Submitted,
        errors=(409, 413, 429, 507),
        leads_to={"/task_id": ("GET", "/v1/tasks/<task_id>"), "/session_ids/0": ("GET", "/v1/sessions/<session_id>")},
    ),
    ("GET", "/v1/tasks"): Operation(
        summary="Tasks, newest first.",
        query=("limit", "before"),
        answer=answers.Tasks,
        leads_to={"/tasks/0/task_id": ("DELETE", "/v1/tasks/<task_id>"), "/tasks/0/sessions/0/session_id": ("GET", "/v1/trajectories/<session_id>")},
    ),
    ("GET", "/v1/tasks/<task_id>"): Operation(summary="A task, with its spec and its sessions.", answer=answers.WholeTask, errors=(404,)),
    ("DELETE", "/v1/tasks/<task_id>"): Operation(summary="End a task's sessions with what they have.", answer=answers.Cancelled, errors=(404,)),
    ("GET", "/v1/trajectories/stream"): Operation(
        summary="Events as they come, for ever or until there are no more.",
        query=("consumer", "after", "follow", "kinds", *_ARRAYS, "format", *FILTERS),
        headers=("Last-Event-ID",),
        content="text/event-stream",
    ),
    ("POST", "/v1/trajectories/ack"): Operation(summary="Move a consumer's position forward.", body=Ack, answer=answers.Position, errors=(413,)),
    ("GET", "/v1/consumers"): Operation(
        summary="Who reads the stream under a name, and how far behind.",
        answer=answers.Consumers,
        leads_to={"/consumers/0/consumer": ("DELETE", "/v1/consumers/<path:consumer>")},
    ),
    ("DELETE", "/v1/consumers/<path:consumer>"): Operation(
        summary="Keep nothing for a consumer any more.", answer=answers.Forgotten, errors=(404, 409)
    ),
    ("GET", "/v1/trajectories/<session_id>"): Operation(
        summary="A session that is over.", query=(*_ARRAYS, "format"), answer=TrajectoryShape | answers.Formatted, errors=(404,)
    ),
    ("GET", "/v1/sessions/<session_id>"): Operation(
        summary="All that is known of a session, over or not.", query=("arrays",), answer=answers.WholeSession, errors=(404,)
    ),
    ("GET", "/v1/sessions/<session_id>/artifacts"): Operation(
        summary="A tar of what its task wanted kept.", content="application/x-tar", errors=(404,)
    ),
    ("GET", "/v1/export"): Operation(
        summary="Every trajectory that is over, one a line.",
        query=(*_ARRAYS, "format", "kind", *FILTERS),
        content="application/x-ndjson",
        also=("application/vnd.apache.parquet",),
    ),
    ("GET", "/v1/status"): Operation(summary="The node now.", tag="node", answer=answers.Status),
    ("GET", "/metrics"): Operation(summary="Its numbers, for Prometheus.", tag="node", content="text/plain"),
    ("GET", "/healthz"): Operation(summary="Whether the process serves.", tag="node", answer=answers.Health, open=True),
    ("GET", "/readyz"): Operation(
        summary="Whether tasks are taken and an engine answers.", tag="node", answer=answers.Ready, errors=(503,), open=True
    ),
    ("GET", "/v1/openapi.json"): Operation(summary="This document.", tag="node", answer=dict[str, Any]),
}
