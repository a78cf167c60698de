"""The port `NodeService`, which the control plane and the integrations call, and the mapping of errors to
responses.

All refusals have the same shape: `{"error": {"type", "message", "path"?}}`; the message is one sentence with
a remedy. The control plane never answers HTML or a bare status. A bug of the node is reported only as a bug;
the log has the details.
"""

from collections.abc import Iterable
from math import ceil
from typing import TYPE_CHECKING, Protocol

import trio
from quart import Response
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from polarnode.core.codec.json import dump_json
from polarnode.core.conversation import Json
from polarnode.core.errors import (
    Busy,
    Conflict,
    DiskFull,
    JournalDamaged,
    PolarnodeError,
    Refused,
    Unreadable,
)
from polarnode.core.status import (
    CaptureStatus,
    LiveSessionStatus,
    OpenedCapture,
    SessionRecord,
    Submitted,
)
from polarnode.core.task import CaptureEnd, CaptureSpec, TaskSpec
from polarnode.core.trajectory import Trajectory, Turn
from polarnode.journal import queries
from polarnode.journal.log.port import Log, LogUnavailable

if TYPE_CHECKING:
    from polarnode.api.metrics import Figures
    from polarnode.engine.weight_values import PauseOrder
    from polarnode.journal.journal import Journal

# ── the port ────────────────────────────────────────────────────────────

__all__ = ["Busy", "Conflict", "DiskFull", "NodeService", "Submitted"]


class CapturesService(Protocol):
    """Captures: sessions whose harness is run by the caller."""

    async def begin(self, spec: CaptureSpec) -> OpenedCapture: ...

    async def end(self, session_id: str, end: CaptureEnd, /) -> Trajectory | None: ...

    def list(self) -> tuple[CaptureStatus, ...]: ...


class GenerationControl(Protocol):
    """Pauses and resumes generation."""

    async def pause(self, order: "PauseOrder") -> object: ...

    async def resume(self) -> object: ...


class NodeService(Protocol):
    """A node as its trainers see it, or a stand-in that runs tasks in its place."""

    @property
    def node_id(self) -> str:
        """The node's id in results."""

    @property
    def model_name(self) -> str:
        """The name of the served model."""

    @property
    def volumes(self) -> tuple[str, ...]:
        """Folders of this machine that tasks may mount."""

    @property
    def journal(self) -> "Journal":
        """The journal of the node's own sessions."""

    @property
    def log(self) -> Log:
        """The log of tasks, events and consumers' positions, which other nodes may share."""

    @property
    def generation(self) -> GenerationControl: ...

    @property
    def captures(self) -> CapturesService: ...

    async def submit(self, spec: TaskSpec, *, idempotency_key: str | None) -> Submitted:
        """Accept a task. Raises Refused, Conflict, Busy or DiskFull."""

    async def cancel(self, task_id: str) -> bool:
        """End a task's sessions; each keeps its turns. False when none is live."""

    def sessions(self) -> Iterable[LiveSessionStatus]:
        """Sessions that have their own container, including recently ended ones."""

    def end_session(self, session_id: str) -> bool:
        """End one session; it keeps its turns. False when it is not live."""

    def status(self) -> dict[str, Json]:
        """The node's part of GET /v1/status; the route adds the journal's and the log's."""

    def figures(self) -> "Figures":
        """The node's numbers for GET /metrics: immutable values, which a thread may read."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token of the served model. Raises ModelError outside its vocabulary."""

    def ready(self) -> bool:
        """Whether the engine answers and tasks are accepted."""

    def unready(self) -> str | None:
        """Why it is not ready, in one sentence; None when it is."""


async def turns_of(service: NodeService, session: SessionRecord) -> tuple[Turn, ...]:
    """The turns of a session. If the session is over, the log has all of them. Before that they are in the
    journal of the node that runs the session, which other nodes ask (`proxy`).
    """
    if session.outcome is not None:
        return await service.log.turns(session.session_id)
    return await service.journal.reader.query(queries.turns, session.session_id)


# ── errors ────────────────────────────────────────────────────────────

# Types and messages for the errors that Quart and Werkzeug raise; None: the error's own message.
SENTENCES: dict[int, tuple[str, str | None]] = {
    404: ("not_found", "nothing is served at this path: see docs/api.md for the routes of the control plane"),
    405: (
        "method_not_allowed",
        "this path does not take this method: see docs/api.md for the routes of the control plane",
    ),
    413: (
        "too_large",
        "the body is larger than the control plane takes: put large files in the runtime's image",
    ),
    403: ("forbidden", None),
    415: ("not_json", None),
    500: ("internal", "this is a bug of polarnode: its log has the details"),
}


class NotFound(PolarnodeError):
    """There is no such task, session or trajectory. 404."""

    boundary = "client"


class Unauthorized(PolarnodeError):
    """The request has no token, or a wrong one. 401."""

    boundary = "client"


def json_response(value: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump_json(value), status, headers, content_type="application/json")


def readiness_response(reason: str | None) -> Response:
    """The answer to a probe: 503 with the reason if the node is not ready."""
    if reason is None:
        return json_response({"ready": True})
    return json_response({"ready": False, "reason": reason}, 503)


def error_json(kind: str, message: str, path: str | None = None) -> dict[str, Json]:
    where: dict[str, Json] = {} if path is None else {"path": path}
    return {"error": {"type": kind, "message": message, **where}}


def error_answer(error: PolarnodeError) -> tuple[str, int, dict[str, str]]:
    """The type name, status and extra headers with which an error is answered."""
    match error:
        case Refused():
            return "invalid_request", 400, {}
        case Unauthorized():
            return "unauthorized", 401, {"WWW-Authenticate": "Bearer"}
        case NotFound():
            return "not_found", 404, {}
        case Conflict():
            return "conflict", 409, {}
        case LogUnavailable():
            return "log_away", 503, {"Retry-After": str(ceil(error.retry_after))}
        case Busy():
            return "busy", 429, {"Retry-After": str(ceil(error.retry_after))}
        case JournalDamaged():
            return "journal", 507, {}
        case DiskFull():
            return "disk_full", 507, {}
        case Unreadable():
            return "unreadable", 410, {}
    return error.boundary, 500, {}


async def answer_error(error: Exception) -> Response:
    """The app's error handler, for the node's own errors and for those that Quart raises."""
    # This function is async although it waits for nothing, because Quart would run a plain function in a
    # thread.
    await trio.lowlevel.checkpoint()
    match error:
        case PolarnodeError():
            kind, status, headers = error_answer(error)
            return json_response(
                error_json(kind, str(error), error.path if isinstance(error, Refused) else None),
                status,
                headers,
            )
        case HTTPException():
            kind, sentence = SENTENCES.get(error.code or 500, ("http", None))
            allowed = (
                {"Allow": ", ".join(error.valid_methods or ())}
                if isinstance(error, MethodNotAllowed)
                else None
            )
            message = sentence or error.description or error.name
            return json_response(error_json(kind, message), error.code or 500, allowed)
    raise error
