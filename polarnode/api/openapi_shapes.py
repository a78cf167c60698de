"""The request and response types of each route of the control plane.

Add an operation with each new route. Bodies and answers are the types that the code reads and writes. The
classes here describe only the answers that `routes` assembles; tests check real answers against them.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import field, frozen

from polarnode.api.proxy import DrainAnswer, DrainOrder
from polarnode.api.query import FILTER_PARAMETERS, Ack
from polarnode.core.codec.forks import ForkOrder
from polarnode.core.codec.schema import Schema
from polarnode.core.conversation import Json
from polarnode.core.snapshots import SnapshotList
from polarnode.core.status import (
    CaptureStatus,
    Consumers,
    EvaluationStatus,
    ForkList,
    LogPiece,
    Logs,
    OpenedCapture,
    ScoreAnswer,
    ScoreRequest,
    SessionChanges,
    SessionStatus,
    Submitted,
    TaskStatus,
    TimeSeries,
)
from polarnode.core.task import CaptureEnd, CaptureSpec, EvaluationSpec, GroupSpec, TaskSpec
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.core.weights import (
    AdapterReport,
    AdaptersState,
    AdapterState,
    UpdateOpened,
    WeightsReport,
    WeightsState,
    WeightsStatus,
)
from polarnode.engine.weight_values import (
    AdapterOrder,
    BroadcastBucket,
    GroupOrder,
    MemoryOrder,
    PauseOrder,
    TensorBucket,
    UpdateOrder,
)
from polarnode.groups.group import GroupState, MemberShape
from polarnode.journal.log.port import NodeState
from polarnode.journal.values import JournalStatistics
from polarnode.tokens.pieces import TokenPieces

# ── answers ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class TaskWithSpec(TaskStatus):
    """A task with its spec, every default written out; null where its row is damaged."""

    spec: TaskSpec | None


@frozen(kw_only=True)
class TasksAnswer:
    """A page of tasks."""

    tasks: tuple[TaskStatus, ...]


@frozen(kw_only=True)
class CancelAnswer:
    """Whether sessions of the task were under way."""

    task_id: str
    cancelled: bool


@frozen(kw_only=True)
class PositionAnswer:
    """The position of a consumer."""

    consumer: str
    position: int
    id: str
    pending: tuple[str, ...] = ()


@frozen(kw_only=True)
class ForgottenAnswer:
    """A consumer for which nothing is kept any more."""

    consumer: str
    forgotten: bool


@frozen(kw_only=True)
class Formatted:
    """A trajectory in a trainer's format, with its ids. On streams and in exports `refused` is why the format
    cannot represent it.
    """

    format: str
    session_id: str
    task_id: str
    group_id: str
    sample_index: int
    outcome: Outcome
    reward: float | None
    metadata: dict[str, Json]
    value: Any
    refused: str | None = None


@frozen(kw_only=True)
class TrajectoryWithPieces(Trajectory):
    """A trajectory, and with `pieces=true` the text of its tokens."""

    pieces: TokenPieces | None = None


@frozen(kw_only=True)
class FinishedGroup:
    """The body of a `group` event, with when it ended and what its task says."""

    task_id: str
    group_id: str
    state: GroupState | None
    reason: str | None
    usable: int
    sessions: tuple[MemberShape, ...]
    rewards: tuple[float | None, ...] = ()
    advantages: tuple[float | None, ...]
    ended: float
    submitted: float | None
    harness: str
    metadata: dict[str, Json]
    requires: GroupSpec | None = None


@frozen(kw_only=True)
class GroupsAnswer:
    """Finished groups, newest first."""

    groups: tuple[FinishedGroup, ...]


@frozen(kw_only=True)
class WholeSession:
    """A session with its turns in full, and its trajectory without them."""

    session: SessionStatus
    turns: tuple[dict[str, Json], ...]
    trajectory: Trajectory | None


@frozen(kw_only=True)
class LogStatus:
    """The log of the node. `identity` is "" before it was read; `away` is why it does not answer."""

    kind: Literal["sqlite", "postgresql"]
    identity: str
    away: str | None


@frozen(kw_only=True)
class NodeStatus:
    """A node of a shared log. `serving`: its version of the weights by adapter, where "" is the base, and
    "@external" says that its engine is. `draining`: it takes no new places.
    """

    name: str
    url: str
    state: NodeState
    running: int
    draining: bool
    labels: Mapping[str, str]
    serving: Mapping[str, str]
    version: str


@frozen(kw_only=True)
class NodeStatusAnswer:
    """The node now; docs/api.md lists the other fields."""

    node: str
    queued: int
    log: LogStatus
    nodes: tuple[NodeStatus, ...] | None = None
    journal: JournalStatistics


@frozen(kw_only=True)
class HealthAnswer:
    """200 while the process serves."""

    ok: bool


@frozen(kw_only=True)
class ReadyAnswer:
    """503 when it is not ready, with the reason."""

    ready: bool
    reason: str | None = None


@frozen(kw_only=True)
class ErrorBody:
    """What went wrong, and what to do."""

    type: str
    message: str
    path: str | None = None


@frozen(kw_only=True)
class Refusal:
    """The body of every refusal."""

    error: ErrorBody


# ── operations ────────────────────────────────────────────────────────────

JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"
RouteKey = tuple[str, str]  # the method and path of a route, as in the route table


@frozen(kw_only=True)
class UpdateResult:
    """SGLang's answer to an update, and to whatever fails."""

    success: bool
    message: str


@frozen(kw_only=True)
class Operation:
    """One route. `body` and `answer` are types; None means no body, or an answer that is not JSON, `bytes` a
    body that is not JSON. `errors` are the statuses besides those that every route may answer.

    `again` is the status of a repeated request, whose answer is the same. `own` are the URL parameters that
    `query` does not read.
    """

    summary: str
    tag: str = "trainer"
    query: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    body: Any = None
    optional_body: bool = False
    open_body: bool = False  # unknown fields of the body are ignored, not refused
    status: int = 200
    again: int | None = None
    answer: Any = None
    content: str = JSON
    also: tuple[str, ...] = ()  # the content types of alternative answers
    errors: tuple[int, ...] = ()
    refusal: Any = Refusal
    own: Mapping[str, Schema] = field(factory=dict)
    own_headers: Mapping[str, Schema] = field(factory=dict)  # like `own`, for `headers`
    open: bool = False  # the route needs no token
    # OpenAPI links: the routes that take a value of the answer in their path, by the value's place in it
    leads_to: Mapping[str, RouteKey] = field(factory=dict)


_ARRAYS: Final = ("arrays", "turns")

OPERATIONS: Final[Mapping[RouteKey, Operation]] = {
    ("POST", "/v1/tasks"): Operation(
        summary="Submit a task.",
        headers=("Idempotency-Key",),
        body=TaskSpec,
        status=202,
        answer=Submitted,
        errors=(409, 413, 429, 502, 503, 507),
        leads_to={
            "/task_id": ("GET", "/v1/tasks/<task_id>"),
            "/session_ids/0": ("GET", "/v1/sessions/<session_id>"),
        },
    ),
    ("GET", "/v1/tasks"): Operation(
        summary="Tasks, newest first.",
        query=("limit", "before"),
        answer=TasksAnswer,
        leads_to={
            "/tasks/0/task_id": ("DELETE", "/v1/tasks/<task_id>"),
            "/tasks/0/sessions/0/session_id": ("GET", "/v1/trajectories/<session_id>"),
        },
    ),
    ("GET", "/v1/tasks/<task_id>"): Operation(
        summary="A task with its spec and sessions.", answer=TaskWithSpec, errors=(404,)
    ),
    ("DELETE", "/v1/tasks/<task_id>"): Operation(
        summary="End a task's sessions; they keep their turns.", answer=CancelAnswer, errors=(404,)
    ),
    ("GET", "/v1/trajectories/stream"): Operation(
        summary="Stream events as they are published, without end or until there are no more.",
        query=("consumer", "after", "begin", "follow", "kinds", *_ARRAYS, "format", *FILTER_PARAMETERS),
        headers=("Last-Event-ID",),
        content="text/event-stream",
    ),
    ("POST", "/v1/trajectories/ack"): Operation(
        summary="Move a consumer's position forward.", body=Ack, answer=PositionAnswer, errors=(413,)
    ),
    ("GET", "/v1/consumers"): Operation(
        summary="The consumers, and how far each is behind.",
        answer=Consumers,
        leads_to={"/consumers/0/consumer": ("DELETE", "/v1/consumers/<path:consumer>")},
    ),
    ("DELETE", "/v1/consumers/<path:consumer>"): Operation(
        summary="Delete a consumer and its position.", answer=ForgottenAnswer, errors=(404, 409)
    ),
    ("GET", "/v1/trajectories/<session_id>"): Operation(
        summary="A session that is over.",
        query=(*_ARRAYS, "format", "pieces"),
        answer=TrajectoryWithPieces | Formatted,
        errors=(404, 410),
    ),
    ("GET", "/v1/sessions/live"): Operation(
        summary="Stream changes of live sessions, from all that are live now on.",
        query=("follow",),
        answer=SessionChanges,
        content="text/event-stream",
        errors=(429, 502, 503),
    ),
    ("GET", "/v1/sessions/<session_id>"): Operation(
        summary="Everything on disk of a session, over or not.",
        query=("arrays",),
        answer=WholeSession,
        errors=(404, 410, 502, 503),
    ),
    ("GET", "/v1/sessions/<session_id>/artifacts"): Operation(
        summary="A tar of a session's artifacts.", content="application/x-tar", errors=(404, 502, 503)
    ),
    ("GET", "/v1/sessions/<session_id>/snapshots"): Operation(
        summary="The snapshots of a session, running or ended.", answer=SnapshotList, errors=(404, 502, 503)
    ),
    ("GET", "/v1/sessions/<session_id>/forks"): Operation(
        summary="The forks of a session, running or ended.", answer=ForkList, errors=(404,)
    ),
    ("GET", "/v1/sessions/<session_id>/log"): Operation(
        summary="A piece of what a session's harness printed.",
        query=("offset", "tail"),
        answer=LogPiece,
        errors=(404, 410, 502, 503),
    ),
    ("GET", "/v1/export"): Operation(
        summary="Every published trajectory, one per line.",
        query=(*_ARRAYS, "format", "kind", *FILTER_PARAMETERS),
        content="application/x-ndjson",
        also=("application/vnd.apache.parquet",),
    ),
    ("GET", "/v1/logs"): Operation(summary="The node's logs.", tag="node", answer=Logs),
    ("GET", "/v1/logs/<path:name>"): Operation(
        summary="A piece of a log of the node.",
        tag="node",
        query=("offset", "tail"),
        answer=LogPiece,
        errors=(404, 410, 502, 503),
    ),
    ("GET", "/v1/groups"): Operation(
        summary="Finished groups, newest first.",
        query=("limit", "until", "state", "task_id"),
        answer=GroupsAnswer,
    ),
    ("GET", "/v1/timeseries"): Operation(
        summary="What the node did in the last six hours.", tag="node", query=("since",), answer=TimeSeries
    ),
    ("GET", "/ui/"): Operation(summary="The page of this node.", tag="page", content="text/html", open=True),
    ("GET", "/ui/<path:name>"): Operation(
        summary="A file of the page.",
        tag="page",
        content="text/javascript",
        also=("text/css", "text/html", "text/plain", "image/svg+xml"),
        errors=(404,),
        open=True,
    ),
    ("GET", "/v1/status"): Operation(summary="The state of the node.", tag="node", answer=NodeStatusAnswer),
    ("GET", "/metrics"): Operation(summary="Prometheus metrics.", tag="node", content="text/plain"),
    ("POST", "/v1/fleet/drain"): Operation(
        summary="Let a node take no new places, or take some again.",
        tag="node",
        body=DrainOrder,
        answer=DrainAnswer,
        errors=(404, 413, 502, 503),
    ),
    ("GET", "/healthz"): Operation(
        summary="Whether the process serves.", tag="node", answer=HealthAnswer, open=True
    ),
    ("GET", "/readyz"): Operation(
        summary="Whether tasks are accepted and an engine answers.",
        tag="node",
        answer=ReadyAnswer,
        errors=(503,),
        open=True,
    ),
    ("GET", "/v1/openapi.json"): Operation(summary="This document.", tag="node", answer=dict[str, Any]),
}


# ── engine ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class JoinedGroupAnswer:
    """A process group that the engine is in."""

    name: str
    world_size: int
    rank_offset: int


@frozen(kw_only=True)
class LeftGroupAnswer:
    """A process group that the engine was in."""

    name: str


@frozen(kw_only=True)
class CapturesAnswer:
    """The open captures."""

    captures: tuple[CaptureStatus, ...]
    limit: int


@frozen(kw_only=True)
class CaptureOpen(CaptureStatus):
    """An open capture."""

    outcome: Literal[None]


@frozen(kw_only=True)
class CaptureOver:
    """How a capture ended, without its tokens. `left_out` and `left_out_tokens` count the turns that no row
    trains, and their sampled tokens, by reason.
    """

    session_id: str
    task_id: str
    group_id: str
    sample_index: int
    outcome: Outcome
    reward: float | None
    turns: int
    traces: int
    sampled_tokens: int
    trainable_tokens: int
    left_out: Mapping[str, int]
    left_out_tokens: Mapping[str, int]


_UPDATE: Final[RouteKey] = ("POST", "/v1/weights/updates/<update_id>/commit")

ENGINE_OPERATIONS: Final[Mapping[RouteKey, Operation]] = {
    ("POST", "/v1/score"): Operation(
        summary="The logprobs of given rows, by the policy or a teacher.",
        tag="score",
        body=ScoreRequest,
        query=("arrays", "model"),
        answer=ScoreAnswer,
        errors=(413, 429, 502, 503),
    ),
    ("POST", "/v1/weights"): Operation(
        summary="Serve new weights, on every engine host as one version.",
        tag="weights",
        body=UpdateOrder,
        status=201,
        again=200,
        answer=WeightsReport,
        errors=(409, 413, 503, 507),
    ),
    ("GET", "/v1/weights"): Operation(
        summary="The weights served now and before.", tag="weights", answer=WeightsStatus
    ),
    ("POST", "/v1/weights/updates"): Operation(
        summary="Begin a weight update sent in several requests.",
        tag="weights",
        body=UpdateOrder,
        status=201,
        answer=UpdateOpened,
        errors=(409, 413, 503, 507),
        leads_to={"/update_id": _UPDATE},
    ),
    ("POST", "/v1/weights/updates/<update_id>/buckets"): Operation(
        summary="Send one bucket of the update.",
        tag="weights",
        body=TensorBucket | BroadcastBucket,
        answer=UpdateOpened,
        errors=(404, 409, 413, 503),
    ),
    _UPDATE: Operation(
        summary="Serve the weights of the update.",
        tag="weights",
        status=201,
        again=200,
        answer=WeightsReport,
        errors=(404, 409, 503, 507),
    ),
    ("DELETE", "/v1/weights/updates/<update_id>"): Operation(
        summary="Abort the update.", tag="weights", answer=WeightsState, errors=(404, 409)
    ),
    ("POST", "/v1/weights/groups"): Operation(
        summary="Join a process group that broadcasts weights.",
        tag="weights",
        body=GroupOrder,
        status=201,
        answer=JoinedGroupAnswer,
        errors=(409, 413, 503),
    ),
    ("DELETE", "/v1/weights/groups/<name>"): Operation(
        summary="Leave a process group.", tag="weights", answer=LeftGroupAnswer, errors=(404, 409, 503)
    ),
    ("POST", "/v1/adapters"): Operation(
        summary="Serve a version of an adapter, from a folder.",
        tag="weights",
        body=AdapterOrder,
        status=201,
        again=200,
        answer=AdapterReport,
        errors=(409, 413, 503, 507),
    ),
    ("GET", "/v1/adapters"): Operation(
        summary="The adapters of the node.", tag="weights", answer=AdaptersState
    ),
    ("PUT", "/v1/adapters/<name>/versions/<version>"): Operation(
        summary="Serve a version of an adapter, sent as a safetensors file.",
        tag="weights",
        body=bytes,
        status=201,
        again=200,
        answer=AdapterReport,
        errors=(409, 503, 507),
    ),
    ("DELETE", "/v1/adapters/<name>"): Operation(
        summary="Forget an adapter.", tag="weights", answer=AdapterState, errors=(404, 409)
    ),
    ("POST", "/v1/engine/pause"): Operation(
        summary="Pause generation.",
        tag="weights",
        body=PauseOrder,
        optional_body=True,
        answer=WeightsState,
        errors=(409, 413, 502, 503),
    ),
    ("POST", "/v1/engine/resume"): Operation(
        summary="Resume generation.", tag="weights", answer=WeightsState, errors=(409, 502, 503)
    ),
    ("POST", "/v1/engine/memory/release"): Operation(
        summary="Release GPU memory.",
        tag="weights",
        body=MemoryOrder,
        optional_body=True,
        answer=WeightsState,
        errors=(409, 413, 503),
    ),
    ("POST", "/v1/engine/memory/resume"): Operation(
        summary="Take GPU memory back.",
        tag="weights",
        body=MemoryOrder,
        optional_body=True,
        answer=WeightsState,
        errors=(409, 413, 503),
    ),
    ("POST", "/v1/sessions/<session_id>/fork"): Operation(
        summary="Fork a session: a task that goes on from one of its states.",
        tag="tasks",
        headers=("Idempotency-Key",),
        body=ForkOrder,
        status=202,
        answer=Submitted,
        errors=(404, 409, 413, 429, 502, 503, 507),
        leads_to={"/task_id": ("GET", "/v1/tasks/<task_id>")},
    ),
    ("POST", "/v1/evaluations"): Operation(
        summary="Evaluate finished sessions again.",
        headers=("Idempotency-Key",),
        body=EvaluationSpec,
        status=202,
        answer=EvaluationStatus,
        errors=(409, 413, 429, 507),
        leads_to={"/evaluation_id": ("GET", "/v1/evaluations/<evaluation_id>")},
    ),
    ("GET", "/v1/evaluations/<evaluation_id>"): Operation(
        summary="An evaluation, and what it gave each session.", answer=EvaluationStatus, errors=(404,)
    ),
    ("POST", "/v1/capture"): Operation(
        summary="Open a session whose harness you run yourself.",
        tag="captures",
        body=CaptureSpec,
        optional_body=True,
        status=201,
        again=200,
        answer=OpenedCapture,
        errors=(409, 413, 429, 502, 503, 507),
        leads_to={"/session_id": ("DELETE", "/v1/capture/<session_id>")},
    ),
    ("GET", "/v1/capture"): Operation(summary="The open captures.", tag="captures", answer=CapturesAnswer),
    ("GET", "/v1/capture/<session_id>"): Operation(
        summary="One capture, open or over.",
        tag="captures",
        answer=CaptureOpen | CaptureOver,
        errors=(404, 502, 503),
    ),
    ("DELETE", "/v1/capture/<session_id>"): Operation(
        summary="End a capture and publish its trajectory.",
        tag="captures",
        body=CaptureEnd,
        optional_body=True,
        answer=CaptureOver,
        errors=(404, 409, 413, 502, 503, 507),
    ),
}
