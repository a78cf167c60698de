"""The control plane's routes as requests: each a value with how its answer is read.

The rule for whoever edits it: one function a route and use; it says nothing of who sends the request, nor of how often.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal
from urllib.parse import quote, urlencode

from attrs import evolve

from polarnode.client.commands import SILENCE_S, Request, T
from polarnode.client.errors import read_answer, read_object
from polarnode.client.values import Consumer, Consumers, Submitted, TaskStatus
from polarnode.conversation import Json
from polarnode.records import Trajectory
from polarnode.tasks import TaskSpec
from polarnode.wire import Arrays, Turns, dump_json, read_trajectory, task_json

Method = Literal["GET", "POST", "DELETE"]
JSON_BODY = {"Content-Type": "application/json"}


def query(**given: object) -> str:
    """The query of a URL, of what is said."""
    said = {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items() if value is not None}
    return f"?{urlencode(said)}" if said else ""


def part(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="")


def request(
    read: Callable[[bytes], T], method: Method, path: str, body: Mapping[str, Json] | None = None, *, silence_s: float = SILENCE_S
) -> Request[T]:
    """A request, with a body of JSON if it has one."""
    sent = None if body is None else dump_json(dict(body))
    return Request(method=method, path=path, read=read, body=sent, headers={} if body is None else JSON_BODY, silence_s=silence_s)


def asked(method: Method, path: str, body: Mapping[str, Json] | None = None, *, silence_s: float = SILENCE_S) -> Request[dict[str, Any]]:
    """A request whose answer is an object, taken as it is."""
    return request(read_object, method, path, body, silence_s=silence_s)


def answered(shape: type[T], method: Method, path: str, body: Mapping[str, Json] | None = None, *, silence_s: float = SILENCE_S) -> Request[T]:
    """A request whose answer is a `shape`."""
    return request(partial(read_answer, shape=shape), method, path, body, silence_s=silence_s)


# ── tasks ─────────────────────────────────────────────────────────────────────


def submit(spec: TaskSpec | dict[str, Json], *, idempotency_key: str) -> Request[Submitted]:
    plain = answered(Submitted, "POST", "/v1/tasks", task_json(spec) if isinstance(spec, TaskSpec) else spec)
    return evolve(plain, headers={**plain.headers, "Idempotency-Key": idempotency_key})


def task(task_id: str) -> Request[dict[str, Any]]:
    return asked("GET", f"/v1/tasks/{part(task_id)}")


def task_status(task_id: str) -> Request[TaskStatus]:
    return answered(TaskStatus, "GET", f"/v1/tasks/{part(task_id)}")


def tasks(*, limit: int, before: str | None) -> Request[list[dict[str, Any]]]:
    return request(lambda body: list(read_object(body)["tasks"]), "GET", "/v1/tasks" + query(limit=limit, before=before))


def cancel(task_id: str) -> Request[bool]:
    return request(lambda body: bool(read_object(body)["cancelled"]), "DELETE", f"/v1/tasks/{part(task_id)}")


# ── trajectories ──────────────────────────────────────────────────────────────


def acknowledge(consumer: str, seq: int) -> Request[int]:
    return request(lambda body: int(read_object(body)["position"]), "POST", "/v1/trajectories/ack", {"consumer": consumer, "seq": seq})


def trajectory(session_id: str, *, turns: Turns = "table", arrays: Arrays = "base64") -> Request[Trajectory]:
    path = f"/v1/trajectories/{part(session_id)}" + query(turns=turns, arrays=arrays)
    return request(lambda body: read_trajectory(read_object(body)), "GET", path)


def formatted(session_id: str, *, format: str, arrays: Arrays) -> Request[dict[str, Any]]:
    return asked("GET", f"/v1/trajectories/{part(session_id)}" + query(format=format, arrays=arrays))


def session(session_id: str) -> Request[dict[str, Any]]:
    return asked("GET", f"/v1/sessions/{part(session_id)}")


def artifacts(session_id: str) -> Request[bytes]:
    return request(bytes, "GET", f"/v1/sessions/{part(session_id)}/artifacts")


def export(**said: object) -> Request[bytes]:
    return request(bytes, "GET", "/v1/export" + query(**said))


def consumers() -> Request[tuple[Consumer, ...]]:
    return request(lambda body: read_answer(body, Consumers).consumers, "GET", "/v1/consumers")


def forget_consumer(consumer: str) -> Request[dict[str, Any]]:
    return asked("DELETE", f"/v1/consumers/{part(consumer)}")


# ── the node ──────────────────────────────────────────────────────────────────


def status() -> Request[dict[str, Any]]:
    return asked("GET", "/v1/status")


def metrics() -> Request[str]:
    return request(bytes.decode, "GET", "/metrics")
