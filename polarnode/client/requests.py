"""The commands that the client's scripts yield, and the control plane's routes as requests.

A script is a generator: it yields a command, is sent the answer or thrown the error, and returns its value.
It does no I/O itself, so the synchronous and the asynchronous client run the same scripts (`blocking.py`,
`asynchronous.py`). A script has at most one stream open, and every wait is a `SleepFor` that it yields. Each
route is one function here; who sends the request, and how often, is decided elsewhere.
"""

from base64 import b64encode
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from typing import Any, Generic, Literal, TypeVar, cast
from urllib.parse import quote, urlencode

from attrs import define, evolve, field, frozen

from polarnode.client.values import read_answer, read_object, read_text, read_with
from polarnode.core.codec.arrays import Arrays
from polarnode.core.codec.forks import ForkOrder
from polarnode.core.codec.json import dump_json, plain
from polarnode.core.codec.tasks import task_json
from polarnode.core.codec.trajectories import Turns, read_score_answer, read_trajectory
from polarnode.core.conversation import Json
from polarnode.core.cursors import Cursor
from polarnode.core.errors import PolarnodeError, Refused
from polarnode.core.snapshots import SnapshotList
from polarnode.core.status import (
    Consumer,
    Consumers,
    EvaluationStatus,
    ForkList,
    LogFile,
    LogPiece,
    Logs,
    ScoredRow,
    ScoreRow,
    Submitted,
    TaskStatus,
    TimeSeries,
)
from polarnode.core.task import EvaluationSpec, TaskSpec
from polarnode.core.trajectory import Trace, Trajectory
from polarnode.core.weights import AdaptersState, WeightsStatus
from polarnode.groups.group import GroupState

# ── commands ────────────────────────────────────────────────────────────

T = TypeVar("T")

SILENCE_S = 30.0  # on a stream the node sends something every 10 s; three misses are a dead connection


@frozen(kw_only=True)
class ClientRequest(Generic[T]):
    """One request, and how its answer is read. `path` includes the query; `headers` omits authentication."""

    method: str
    path: str
    read: Callable[[bytes], T]
    body: bytes | None = None
    headers: Mapping[str, str] = field(factory=dict)
    silence_s: float = SILENCE_S  # seconds without a byte after which the connection is dead


@frozen
class Ask:
    """Send the request and answer its whole body. Raises ClientError for an error status, Unreachable for no
    complete answer.
    """

    request: ClientRequest[Any]


@frozen
class Open:
    """Send the request and answer its content type; the body is read by Read. Raises as Ask."""

    request: ClientRequest[Any]


@frozen
class Read:
    """Read some bytes of the open body; b"" at its end. Raises Unreachable when the connection breaks or is
    silent for too long.
    """


@frozen
class Close:
    """Close the open body, if there is one."""


@frozen
class SleepFor:
    seconds: float


@frozen
class YieldValue:
    """Yield a value to the caller's loop. It is answered when the next value is requested."""

    value: Any


Command = Ask | Open | Read | Close | SleepFor | YieldValue
Script = Generator[Command, Any, T]


def ask(request: ClientRequest[T]) -> Script[T]:
    """Send one request once and return its answer."""
    body = yield Ask(request)
    return request.read(body)


class Left(Exception):
    """Thrown into a script whose caller takes no more values: it may still send what it owes, and gives
    nothing more.
    """


@define(eq=False)
class Running(Generic[T]):
    """A script in progress: its next command, and the result of the last one."""

    script: Script[T]
    _step: Callable[[], Command] = field(init=False)
    _value: T | None = field(default=None, init=False)

    @_step.default
    def _begin(self) -> Callable[[], Command]:
        return partial(next, self.script)

    def next(self) -> Command | None:
        """Return the next command; None when the script has ended."""
        try:
            return self._step()
        except StopIteration as stop:
            self._value = stop.value
            return None
        except Left:  # a script that owes nothing does not catch it
            return None

    def answered(self, answer: object) -> None:
        self._step = partial(self.script.send, answer)

    def failed(self, error: PolarnodeError) -> None:
        self._step = partial(self.script.throw, error)

    def left(self) -> None:
        """Record that the caller takes no more values. The commands that follow are the script's last."""
        self._step = partial(self.script.throw, Left())

    @property
    def value(self) -> T:
        """The value that the script returned."""
        return cast(T, self._value)


# ── requests ────────────────────────────────────────────────────────────

Method = Literal["GET", "POST", "DELETE"]
JSON_BODY = {"Content-Type": "application/json"}


def query_string(**parameters: object) -> str:
    """Encode parameters as a URL query; values that are None are omitted."""
    query = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in parameters.items()
        if value is not None
    }
    return f"?{urlencode(query)}" if query else ""


def part(name: str) -> str:
    """Quote a name as one segment of a path."""
    return quote(name, safe="")


def request(
    read: Callable[[bytes], T],
    method: Method,
    path: str,
    body: Mapping[str, Json] | None = None,
    *,
    silence_s: float = SILENCE_S,
) -> ClientRequest[T]:
    """Make a request; `body`, if given, is sent as JSON."""
    sent = None if body is None else dump_json(dict(body))
    return ClientRequest(
        method=method,
        path=path,
        read=read,
        body=sent,
        headers={} if body is None else JSON_BODY,
        silence_s=silence_s,
    )


def json_request(
    method: Method, path: str, body: Mapping[str, Json] | None = None, *, silence_s: float = SILENCE_S
) -> ClientRequest[dict[str, Any]]:
    """A request whose answer is an object, taken as it is."""
    return request(read_object, method, path, body, silence_s=silence_s)


def typed_request(
    shape: type[T],
    method: Method,
    path: str,
    body: Mapping[str, Json] | None = None,
    *,
    silence_s: float = SILENCE_S,
) -> ClientRequest[T]:
    """A request whose answer is read as a `shape`."""
    return request(partial(read_answer, shape=shape), method, path, body, silence_s=silence_s)


# The parts of answers that are read here.
@frozen(kw_only=True)
class _TasksPart:
    tasks: tuple[dict[str, Any], ...]


@frozen(kw_only=True)
class _CancelledPart:
    cancelled: bool


@frozen(kw_only=True)
class Acknowledged:
    """A consumer's position after an acknowledgement, and its text, which names a log that nodes share."""

    position: int
    id: str = ""


# ── tasks ─────────────────────────────────────────────────────────────────────


def submit(spec: TaskSpec | dict[str, Json], *, idempotency_key: str) -> ClientRequest[Submitted]:
    plain = typed_request(
        Submitted, "POST", "/v1/tasks", task_json(spec) if isinstance(spec, TaskSpec) else spec
    )
    return evolve(plain, headers={**plain.headers, "Idempotency-Key": idempotency_key})


def fork(session_id: str, order: ForkOrder, *, idempotency_key: str) -> ClientRequest[Submitted]:
    found = typed_request(Submitted, "POST", f"/v1/sessions/{part(session_id)}/fork", plain(order))
    return evolve(found, headers={**found.headers, "Idempotency-Key": idempotency_key})


def task(task_id: str) -> ClientRequest[dict[str, Any]]:
    return json_request("GET", f"/v1/tasks/{part(task_id)}")


def weights_status() -> ClientRequest[WeightsStatus]:
    return typed_request(WeightsStatus, "GET", "/v1/weights")


def adapters() -> ClientRequest[AdaptersState]:
    return typed_request(AdaptersState, "GET", "/v1/adapters")


def task_status(task_id: str) -> ClientRequest[TaskStatus]:
    return typed_request(TaskStatus, "GET", f"/v1/tasks/{part(task_id)}")


def tasks(*, limit: int, before: str | None) -> ClientRequest[list[dict[str, Any]]]:
    return request(
        lambda body: list(read_answer(body, _TasksPart).tasks),
        "GET",
        "/v1/tasks" + query_string(limit=limit, before=before),
    )


def cancel(task_id: str) -> ClientRequest[bool]:
    return request(
        lambda body: read_answer(body, _CancelledPart).cancelled, "DELETE", f"/v1/tasks/{part(task_id)}"
    )


# ── evaluations ────────────────────────────────────────────────────────────────


def evaluate(spec: EvaluationSpec, *, idempotency_key: str) -> ClientRequest[EvaluationStatus]:
    order = typed_request(EvaluationStatus, "POST", "/v1/evaluations", plain(spec))
    return evolve(order, headers={**order.headers, "Idempotency-Key": idempotency_key})


def evaluation(evaluation_id: str) -> ClientRequest[EvaluationStatus]:
    return typed_request(EvaluationStatus, "GET", f"/v1/evaluations/{part(evaluation_id)}")


# ── trajectories ──────────────────────────────────────────────────────────────


def acknowledge(consumer: str, cursor: Cursor) -> ClientRequest[Acknowledged]:
    # a node of an earlier release takes the number alone
    what: dict[str, Json] = {"id": cursor.text} if cursor.log else {"seq": cursor.position}
    return typed_request(Acknowledged, "POST", "/v1/trajectories/ack", {"consumer": consumer, **what})


def trajectory(
    session_id: str, *, turns: Turns = "table", arrays: Arrays = "base64"
) -> ClientRequest[Trajectory]:
    path = f"/v1/trajectories/{part(session_id)}" + query_string(turns=turns, arrays=arrays)
    return request(partial(read_with, read_trajectory), "GET", path)


def formatted(session_id: str, *, format: str, arrays: Arrays) -> ClientRequest[dict[str, Any]]:
    return json_request(
        "GET", f"/v1/trajectories/{part(session_id)}" + query_string(format=format, arrays=arrays)
    )


def session(session_id: str) -> ClientRequest[dict[str, Any]]:
    return json_request("GET", f"/v1/sessions/{part(session_id)}")


def artifacts(session_id: str) -> ClientRequest[bytes]:
    return request(bytes, "GET", f"/v1/sessions/{part(session_id)}/artifacts")


def forks(session_id: str) -> ClientRequest[ForkList]:
    return typed_request(ForkList, "GET", f"/v1/sessions/{part(session_id)}/forks")


def snapshots(session_id: str) -> ClientRequest[SnapshotList]:
    return typed_request(SnapshotList, "GET", f"/v1/sessions/{part(session_id)}/snapshots")


def live_changes(*, follow: bool) -> ClientRequest[bytes]:
    return request(bytes, "GET", "/v1/sessions/live" + query_string(follow=follow))


def finished_groups(
    *, limit: int, until: float | None, state: GroupState | None, task_id: str | None
) -> ClientRequest[list[dict[str, Any]]]:
    query = query_string(limit=limit, until=until, state=state, task_id=task_id)
    return request(lambda body: list(read_object(body)["groups"]), "GET", f"/v1/groups{query}")


def timeseries(*, since: float | None) -> ClientRequest[TimeSeries]:
    return typed_request(TimeSeries, "GET", "/v1/timeseries" + query_string(since=since))


def log(session_id: str, *, offset: int | None, tail: int | None) -> ClientRequest[LogPiece]:
    query = query_string(offset=offset, tail=tail)
    return typed_request(LogPiece, "GET", f"/v1/sessions/{part(session_id)}/log{query}")


def node_logs() -> ClientRequest[tuple[LogFile, ...]]:
    return request(lambda body: read_answer(body, Logs).logs, "GET", "/v1/logs")


def node_log(name: str, *, offset: int | None, tail: int | None) -> ClientRequest[LogPiece]:
    query = query_string(offset=offset, tail=tail)
    return typed_request(LogPiece, "GET", f"/v1/logs/{part(name)}{query}")


def export(**query: object) -> ClientRequest[bytes]:
    return request(bytes, "GET", "/v1/export" + query_string(**query))


def consumers() -> ClientRequest[tuple[Consumer, ...]]:
    return request(lambda body: read_answer(body, Consumers).consumers, "GET", "/v1/consumers")


def forget_consumer(consumer: str) -> ClientRequest[dict[str, Any]]:
    return json_request("DELETE", f"/v1/consumers/{part(consumer)}")


# ── scoring ───────────────────────────────────────────────────────────────────

# the longest that a request may be in the queue of a busy engine: a teacher reads 4 million tokens in minutes
SCORE_SILENCE_S = 1800.0


def score(rows: Iterable[ScoreRow | Trace], engine: str, adapter: str) -> ClientRequest[list[ScoredRow]]:
    """Raises Refused for a slice, whose row is longer than it."""
    body: dict[str, Json] = {
        "rows": [_score_row(row) for row in rows],
        "engine": engine,
        "adapter": adapter,
    }

    def read(answer: bytes) -> list[ScoredRow]:
        return list(read_with(read_score_answer, answer).rows)

    return request(read, "POST", "/v1/score?arrays=base64", body, silence_s=SCORE_SILENCE_S)


def _score_row(row: ScoreRow | Trace) -> dict[str, Json]:
    if isinstance(row, Trace) and row.offset:
        raise Refused(f"a slice is scored after the {row.offset} tokens before it: send them in a ScoreRow")
    return {
        "token_ids": b64encode(row.token_ids).decode(),
        "loss_mask": None if row.loss_mask is None else b64encode(row.loss_mask).decode(),
        "start": 0 if isinstance(row, Trace) else row.start,
    }


# ── the node ──────────────────────────────────────────────────────────────────


def status() -> ClientRequest[dict[str, Any]]:
    return json_request("GET", "/v1/status")


def metrics() -> ClientRequest[str]:
    return request(read_text, "GET", "/metrics")
