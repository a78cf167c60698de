"""What a trainer imports: submit tasks, read trajectories as they come, acknowledge, look.

Synchronous, and of the standard library: a trainer has its own event loop, or none. The rules for whoever edits it. Reading resumes by itself
after a cut or a restart of the node, at the event after the last one delivered, so that nothing is missed and nothing comes twice in one
iteration. An event is acknowledged only when the next one is asked for: until then it is still being worked on.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from secrets import token_hex
from typing import Any, cast
from urllib.parse import quote, urlencode, urlsplit

from attrs import define, field, frozen

from polarnode.conversation import Json
from polarnode.errors import PolarnodeError, Refused
from polarnode.records import Trajectory
from polarnode.tasks import TaskSpec
from polarnode.wire import Arrays, Turns, dump_json, read_json, read_trajectory, task_json

SILENCE_S = 30.0  # the node speaks at least every 10 s on a stream; three misses are a dead connection
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between attempts: a restart takes about a second, an absent node is not hammered
ACK_EVERY_S = 1.0  # between acknowledgements: each is one request and one commit; what is lost of them is only read again
READ_BYTES = 1 << 16


class ClientError(PolarnodeError):
    """The node answered with an error: its `status`, its `type`, and the `path` of the field when it named one."""

    boundary = "client"

    def __init__(self, message: str, *, status: int, type: str, path: str | None = None) -> None:
        super().__init__(message)
        self.status, self.type, self.path = status, type, path


class Unreachable(PolarnodeError):
    """No answer from the node."""

    boundary = "node"


@frozen(kw_only=True)
class Submitted:
    """A task that is in the node's journal; `created` is False when it was there before."""

    task_id: str
    session_ids: tuple[str, ...]
    created: bool


@frozen(kw_only=True)
class Event:
    """One event of the stream. `kind` is trajectory, group, task or gap; `key` is the same each time an event is delivered; `data` its JSON."""

    seq: int
    kind: str
    key: str
    data: Any

    @property
    def trajectory(self) -> Trajectory | None:
        """The trajectory, read; None for other kinds. Its `turns` are there when the stream was asked for turns="full"."""
        return read_trajectory(self.data) if self.kind == "trajectory" else None


@define(eq=False)
class PolarnodeClient:
    """One node's control plane. `patience_s` is how long a stream tries to find its node again before it raises Unreachable."""

    base_url: str = "http://127.0.0.1:8080"
    token: str | None = field(default=None, repr=False)
    patience_s: float = 600.0

    # ── tasks ─────────────────────────────────────────────────────────────────

    def submit(self, spec: TaskSpec | dict[str, Json], *, idempotency_key: str | None = None) -> Submitted:
        """Submit a task. Tried again when the connection fails, under one key, so that it is taken once."""
        body = dump_json(task_json(spec) if isinstance(spec, TaskSpec) else spec)
        headers = {"Idempotency-Key": idempotency_key or token_hex(16), "Content-Type": "application/json"}
        found = self._patiently("POST", "/v1/tasks", body=body, headers=headers)
        return Submitted(task_id=found["task_id"], session_ids=tuple(found["session_ids"]), created=found["created"])

    def task(self, task_id: str) -> dict[str, Any]:
        """A task's status, counts and sessions."""
        return self._json("GET", f"/v1/tasks/{quote(task_id, safe='')}")

    def tasks(self, *, limit: int = 100, before: str | None = None) -> list[dict[str, Any]]:
        """Tasks, newest first; `before` is the last task_id of the page before."""
        return cast(list[dict[str, Any]], self._json("GET", "/v1/tasks" + _query(limit=limit, before=before))["tasks"])

    def cancel(self, task_id: str) -> bool:
        """End a task's sessions with what they have; False when it was over."""
        return bool(self._json("DELETE", f"/v1/tasks/{quote(task_id, safe='')}")["cancelled"])

    # ── trajectories ──────────────────────────────────────────────────────────

    def trajectories(
        self,
        *,
        consumer: str | None = None,
        after: int | None = None,
        task_id: str | None = None,
        group_id: str | None = None,
        outcome: str | None = None,
        min_reward: float | None = None,
        arrays: Arrays = "base64",
        turns: Turns = "table",
        follow: bool | None = None,
        ack: bool = False,
    ) -> Iterator[Event]:
        """Events in order, for ever; or, with a `task_id` or follow=False, until there are no more.

        Begins after `after`, else where `consumer` last acknowledged, else at the oldest. With `ack` each event is acknowledged for the
        consumer when the next is asked for (at the latest a second later), and the last at the end.
        """
        if ack and consumer is None:
            raise Refused("ack needs a consumer: name whose position moves", path="$.consumer")
        goes_on = task_id is None if follow is None else follow
        filters = {"task_id": task_id, "group_id": group_id, "outcome": outcome, "min_reward": min_reward}
        query = _query(consumer=consumer, follow=goes_on, arrays=arrays, turns=turns, **filters)
        events = self._resumed("/v1/trajectories/stream" + query, after, goes_on)
        return self._acknowledging(events, consumer) if ack and consumer is not None else (event for event in events if event is not None)

    def acknowledge(self, consumer: str, seq: int) -> int:
        """Move a consumer's position forward; returns where it is."""
        body = dump_json({"consumer": consumer, "seq": seq})
        return int(self._json("POST", "/v1/trajectories/ack", body=body)["position"])

    def trajectory(self, session_id: str, *, turns: Turns = "table", arrays: Arrays = "base64") -> Trajectory:
        """One session that is over; with turns="full" its turns are there too."""
        return read_trajectory(self._json("GET", f"/v1/trajectories/{quote(session_id, safe='')}" + _query(turns=turns, arrays=arrays)))

    def session(self, session_id: str) -> dict[str, Any]:
        """All that is known of a session, over or not: its record, its turns in full, its trajectory or None."""
        return self._json("GET", f"/v1/sessions/{quote(session_id, safe='')}")

    def export(
        self,
        *,
        task_id: str | None = None,
        group_id: str | None = None,
        outcome: str | None = None,
        min_reward: float | None = None,
        arrays: Arrays = "json",
        turns: Turns = "table",
    ) -> Iterator[dict[str, Any]]:
        """Every trajectory that is over, oldest first, as JSON."""
        query = _query(task_id=task_id, group_id=group_id, outcome=outcome, min_reward=min_reward, arrays=arrays, turns=turns)
        with self._response("GET", "/v1/export" + query) as response:
            for line in _split(response, b"\n"):
                yield cast(dict[str, Any], read_json(line))

    def status(self) -> dict[str, Any]:
        """The node now."""
        return self._json("GET", "/v1/status")

    # ── the stream: resumed, acknowledged ─────────────────────────────────────

    def _resumed(self, path: str, after: int | None, goes_on: bool) -> Iterator[Event | None]:
        """Events of one stream after another; None is a sign of life."""
        patience = _Patience(self.patience_s)
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        while True:
            try:
                with self._response("GET", path, headers=headers) as response:
                    for event in map(_read_event, _split(response, b"\n\n")):
                        patience.renew()
                        if event is not None:
                            headers = {"Last-Event-ID": str(event.seq)}
                        yield event
                if not goes_on:
                    return
                patience.pause(Unreachable(f"{self.base_url} keeps ending the stream"))
            except Unreachable as error:
                patience.pause(error)

    def _acknowledging(self, events: Iterator[Event | None], consumer: str) -> Iterator[Event]:
        done, said, said_at = 0, 0, time.monotonic()
        for event in events:
            if done > said and time.monotonic() - said_at >= ACK_EVERY_S:
                said, said_at = self.acknowledge(consumer, done), time.monotonic()
            if event is not None:
                yield event
                done = event.seq
        if done > said:
            self.acknowledge(consumer, done)

    # ── HTTP ──────────────────────────────────────────────────────────────────

    def _patiently(self, method: str, path: str, *, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
        patience = _Patience(self.patience_s)
        while True:
            try:
                return self._json(method, path, body=body, headers=headers)
            except Unreachable as error:
                patience.pause(error)

    def _json(self, method: str, path: str, *, body: bytes | None = None, headers: dict[str, str] | None = None) -> dict[str, Any]:
        with self._response(method, path, body=body, headers=headers) as response:
            return cast(dict[str, Any], read_json(response.read()))

    @contextmanager
    def _response(self, method: str, path: str, *, body: bytes | None = None, headers: dict[str, str] | None = None) -> Iterator[HTTPResponse]:
        """An answer of 2xx; ClientError for another, Unreachable when it breaks off."""
        url = urlsplit(self.base_url)
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        connection = kind(url.hostname or "127.0.0.1", url.port, timeout=SILENCE_S)
        try:
            connection.request(method, url.path.rstrip("/") + path, body, {**self._authorization(), **(headers or {})})
            response = connection.getresponse()
            if response.status >= 300:
                raise _error(response)
            yield response
        except (OSError, HTTPException) as error:
            raise Unreachable(f"{self.base_url} does not answer ({type(error).__name__}: {error}): is the node running?") from error
        finally:
            connection.close()

    def _authorization(self) -> dict[str, str]:
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}


@define(eq=False)
class _Patience:
    """Pauses that grow, until no sign of life came for too long."""

    seconds: float
    pause_s: float = FIRST_PAUSE_S
    last_life: float = field(factory=time.monotonic)

    def renew(self) -> None:
        self.pause_s, self.last_life = FIRST_PAUSE_S, time.monotonic()

    def pause(self, error: Unreachable) -> None:
        """Sleep, or raise what happened when patience is at its end."""
        if time.monotonic() - self.last_life >= self.seconds:
            raise error
        time.sleep(self.pause_s)
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)


def _query(**given: object) -> str:
    said = {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items() if value is not None}
    return f"?{urlencode(said)}" if said else ""


def _error(response: HTTPResponse) -> PolarnodeError:
    """What the node says; a node that is starting or an intermediary may say nothing of ours."""
    body = response.read()
    try:
        said = cast(dict[str, Any], read_json(body))["error"]
        return ClientError(said["message"], status=response.status, type=said["type"], path=said.get("path"))
    except (Refused, KeyError, TypeError):
        return ClientError(f"the answer is {response.status} {response.reason}, not one of a polarnode", status=response.status, type="http")


def _split(response: HTTPResponse, end: bytes) -> Iterator[bytes]:
    """The pieces of a body as they come, without their ends. A body that is cut raises IncompleteRead; a last piece without an end is dropped."""
    buffer, looked = bytearray(), 0
    while chunk := response.read1(READ_BYTES):
        buffer += chunk
        while (at := buffer.find(end, looked)) >= 0:
            yield bytes(buffer[:at])
            del buffer[: at + len(end)]
            looked = 0
        looked = max(0, len(buffer) - len(end) + 1)  # a trajectory is megabytes: its bytes are looked at once


def _read_event(block: bytes) -> Event | None:
    """One block of server-sent events; None for a comment. An `error` event is the node's trouble: Unreachable, so that we come again."""
    fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
    if not fields:
        return None
    kind, data = fields[b"event"].decode(), cast(dict[str, Any], read_json(fields[b"data"]))
    if kind == "error":
        raise Unreachable(f"the node could not go on: {data['error']['message']}")
    return Event(seq=int(fields[b"id"]), kind=kind, key=data.get("key", kind), data=data[kind])
