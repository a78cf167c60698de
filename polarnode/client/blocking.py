"""The synchronous client, of the standard library: for a trainer with its own event loop, or none.

The scripts run over http.client with one connection a request, so threads may share a client and nothing
stays open after a request. Nothing is decided here: each method runs the script that `asynchronous.py` runs
under the same name. Whatever a connection raises leaves this module as ClientError or Unreachable.
"""

import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from attrs import define, field, frozen

from polarnode.client import requests, weights
from polarnode.client.api import Api, CaptureSession, Reading, named
from polarnode.client.requests import (
    Ask,
    ClientRequest,
    Close,
    Command,
    Give,
    Open,
    Read,
    Running,
    Script,
    Sleep,
    T,
    ask,
)
from polarnode.client.streams import ACK_EVERY_S, KEPT_BYTES
from polarnode.client.values import Event, Unreachable, read_error
from polarnode.core.codec.arrays import Arrays
from polarnode.core.codec.trajectories import Turns
from polarnode.core.conversation import Json
from polarnode.core.errors import PolarnodeError
from polarnode.core.status import Consumer, Submitted, TaskStatus
from polarnode.core.task import CaptureSpec, TaskSpec
from polarnode.core.trajectory import Trajectory
from polarnode.core.weights import Backend, MemoryTag, PauseMode, UpdateMode, WeightsReport, WeightsStatus
from polarnode.groups.group import Group

# ── running scripts ────────────────────────────────────────────────────────────

READ_BYTES = 1 << 16


@frozen(kw_only=True)
class BlockingHttp:
    """Where the node is, and the key to it."""

    base_url: str
    token: str | None = field(repr=False)

    def run(self, script: Script[T]) -> T:
        """What the script returns."""
        running = Running(script)
        with closing(_Wire(self)) as wire:
            while (command := running.next()) is not None:
                wire.step(running, command)
        return running.value

    def iterate(self, script: Script[None]) -> Iterator[Any]:
        """What the script gives."""
        running = Running(script)
        with closing(_Wire(self)) as wire:
            while (command := running.next()) is not None:
                if isinstance(command, Give):
                    yield command.value
                    running.answered(None)
                else:
                    wire.step(running, command)

    def unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"{self.base_url} does not answer ({type(error).__name__}: {error}): is the node running?"
        )


@define(eq=False)
class _Wire:
    """The connections of one script: a short one for each Ask, one that stays for what is Open."""

    http: BlockingHttp
    _connection: HTTPConnection | None = field(default=None, init=False)
    _response: HTTPResponse | None = field(default=None, init=False)

    def step(self, running: Running[Any], command: Command) -> None:
        try:
            answer = self._obey(command)
        except PolarnodeError as error:
            running.failed(error)
        else:
            running.answered(answer)

    def _obey(self, command: Command) -> object:
        match command:
            case Ask(request):
                return self._ask(request)
            case Open(request):
                return self._open(request)
            case Read():
                return self._read()
            case Close() | Give():
                self.close()
            case Sleep(seconds):
                time.sleep(seconds)
        return None

    def _ask(self, request: ClientRequest[Any]) -> bytes:
        with closing(self._connect(request)) as connection:
            try:
                return self._send(connection, request).read()
            except (OSError, HTTPException) as error:
                raise self.http.unreachable(error) from error

    def _open(self, request: ClientRequest[Any]) -> str:
        self.close()
        self._connection = self._connect(request)
        try:
            self._response = self._send(self._connection, request)
        except (OSError, HTTPException) as error:
            raise self.http.unreachable(error) from error
        return str(self._response.headers.get("Content-Type", ""))

    def _read(self) -> bytes:
        if self._response is None:
            return b""
        try:
            data = self._response.read1(READ_BYTES)
            # http.client raises nothing for a body shorter than promised
            if not data and self._response.length:
                raise IncompleteRead(b"", self._response.length)
        except (OSError, HTTPException) as error:
            raise self.http.unreachable(error) from error
        return data

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._response = None

    def _connect(self, request: ClientRequest[Any]) -> HTTPConnection:
        url = urlsplit(self.http.base_url)
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        return kind(url.hostname or "127.0.0.1", url.port, timeout=request.silence_s)

    def _send(self, connection: HTTPConnection, request: ClientRequest[Any]) -> HTTPResponse:
        """The head of an answer of 2xx; ClientError for another."""
        mine = {} if self.http.token is None else {"Authorization": f"Bearer {self.http.token}"}
        path = urlsplit(self.http.base_url).path.rstrip("/") + request.path
        connection.request(request.method, path, request.body, {**mine, **request.headers})
        response = connection.getresponse()
        if response.status >= 300:
            headers = {name.lower(): value for name, value in response.headers.items()}
            raise read_error(response.status, response.reason, headers, response.read())
        return response


# ── the client ────────────────────────────────────────────────────────────

if TYPE_CHECKING:
    from polarnode.sources.values import Kind


@define(eq=False)
class PolarnodeClient:
    """One node's control plane. `patience_s` is how long a node that is away or full is waited for, before
    ClientError or Unreachable is raised.

    Waited for are streams, submissions, acknowledgements, trajectories by their id, weights, and captures:
    docs/client.md. Threads may share it.
    """

    base_url: str = "http://127.0.0.1:8080"
    token: str | None = field(default=None, repr=False)
    patience_s: float = 600.0
    ack_every_s: float = field(default=ACK_EVERY_S, kw_only=True)

    # ── tasks ─────────────────────────────────────────────────────────────────

    def submit(self, spec: TaskSpec | dict[str, Json], *, idempotency_key: str | None = None) -> Submitted:
        """Submit a task. Tried again, under one key, when the connection fails or the node has no room: it is
        taken once.
        """
        return self._run(self._api.submit(spec, idempotency_key))

    def submit_source(
        self, path: str | Path, *, kind: "Kind | None" = None, **overrides: Any
    ) -> list[Submitted]:
        """Submit every task of a source, read whole before the first goes: a task file, JSONL, a Harbor
        directory, a dataset, Polar's files.

        `overrides` are the fields of `polarnode.sources.values.Overrides`, such as harness="pi", samples=8,
        over={"budgets": {"run_s": 900}}. An image that a task's folder would be built into must be on the
        node's machine: `polarnode convert --build` there.
        """
        return [self.submit(spec) for spec in specs_of(path, kind, overrides)]

    def task(self, task_id: str) -> dict[str, Any]:
        """A task's status, counts, sessions and spec, as JSON."""
        return self._run(ask(requests.task(task_id)))

    def task_status(self, task_id: str) -> TaskStatus:
        """A task's status, counts and sessions."""
        return self._run(ask(requests.task_status(task_id)))

    def tasks(self, *, limit: int = 100, before: str | None = None) -> list[dict[str, Any]]:
        """Tasks, newest first; `before` is the last task_id of the page before."""
        return self._run(ask(requests.tasks(limit=limit, before=before)))

    def cancel(self, task_id: str) -> bool:
        """End a task's sessions with what they have; False when it was over."""
        return self._run(ask(requests.cancel(task_id)))

    # ── trajectories and groups ───────────────────────────────────────────────

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
        kinds: Sequence[str] = (),
        format: str | None = None,
    ) -> Iterator[Event]:
        """Events in order, for ever; or, with a `task_id` or follow=False, until there are no more.

        Begins after `after`, else where `consumer` last acknowledged, else at the oldest. With `ack` each
        event is acknowledged for the consumer when the next is asked for (at most once a second), and the
        last at the end. `kinds`, where given, are all; only so comes `attempt`. With a trainer's `format`
        (docs/trainers.md) the data of a trajectory is that, under `value`.
        """
        reading = Reading(
            consumer=consumer,
            after=after,
            task_id=task_id,
            group_id=group_id,
            follow=follow,
            ack=ack,
            arrays=arrays,
            turns=turns,
        )
        return self._http.iterate(
            self._api.trajectories(reading, kinds, outcome=outcome, min_reward=min_reward, format=format)
        )

    def groups(
        self,
        *,
        consumer: str | None = None,
        after: int | None = None,
        task_id: str | None = None,
        group_id: str | None = None,
        arrays: Arrays = "base64",
        turns: Turns = "table",
        follow: bool | None = None,
        ack: bool = False,
        skip: Container[str] = (),
        kept_bytes: int = KEPT_BYTES,
    ) -> Iterator[Group]:
        """Groups as they end, each with its trajectories; for ever, or as `trajectories` until there are no
        more.

        With `ack` a group is acknowledged when the next is asked for, and only up to what no unfinished group
        still needs: after a crash every group that was not worked on to its end comes again, whole, and
        others may: `skip` holds the task ids of those that need not. Up to `kept_bytes` of trajectories are
        kept until their group is over; the others are fetched again.
        """
        reading = Reading(
            consumer=consumer,
            after=after,
            task_id=task_id,
            group_id=group_id,
            follow=follow,
            ack=ack,
            arrays=arrays,
            turns=turns,
        )
        return self._http.iterate(self._api.groups(reading, skip, kept_bytes))

    def acknowledge(self, consumer: str, seq: int) -> int:
        """Move a consumer's position forward; returns where it is."""
        return self._run(self._api.acknowledge(consumer, seq))

    def trajectory(self, session_id: str, *, turns: Turns = "table", arrays: Arrays = "base64") -> Trajectory:
        """One session that is over; with turns="full" its turns are there too."""
        return self._run(self._api.trajectory(session_id, turns, arrays))

    def formatted(self, session_id: str, format: str, *, arrays: Arrays = "base64") -> dict[str, Any]:
        """One session in a trainer's format, under `value`: docs/trainers.md. ClientError 400 where that can
        not carry it.
        """
        return self._run(ask(requests.formatted(session_id, format=format, arrays=arrays)))

    def session(self, session_id: str) -> dict[str, Any]:
        """All that is known of a session, over or not: its record, its turns in full, its trajectory
        or None.
        """
        return self._run(ask(requests.session(session_id)))

    def artifacts(self, session_id: str, to: str | Path) -> int:
        """Write the tar of what a session's task wanted kept to a file; its bytes. ClientError 404 where
        there is none.
        """
        pieces = self._http.iterate(self._api.artifacts(session_id))
        next(pieces)  # it is there: only now is there a file
        with Path(to).open("wb") as file:
            return sum(map(file.write, pieces))

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
        query = {
            "task_id": task_id,
            "group_id": group_id,
            "outcome": outcome,
            "min_reward": min_reward,
            "arrays": arrays,
            "turns": turns,
        }
        return self._http.iterate(self._api.export(**query))

    def export_bytes(
        self,
        *,
        task_id: str | None = None,
        group_id: str | None = None,
        outcome: str | None = None,
        min_reward: float | None = None,
        arrays: Arrays | None = None,
        turns: Turns | None = None,
        format: str | None = None,
        kind: str | None = None,
    ) -> Iterator[bytes]:
        """An export as the node sends it, piece by piece: first b"", when it is known to be there.

        `format` is a trainer's, or parquet; kind="sft" gives conversations (docs/offline-data.md).
        """
        query = {
            "task_id": task_id,
            "group_id": group_id,
            "outcome": outcome,
            "min_reward": min_reward,
            "arrays": arrays,
            "turns": turns,
        }
        return self._http.iterate(self._api.export_bytes(**query, format=format, kind=kind))

    # ── consumers ─────────────────────────────────────────────────────────────

    def consumers(self) -> tuple[Consumer, ...]:
        """Who reads, how far each is, and for whom anything is kept."""
        return self._run(ask(requests.consumers()))

    def forget_consumer(self, consumer: str) -> None:
        """Keep nothing for it any more."""
        self._run(ask(requests.forget_consumer(consumer)))

    # ── weights ───────────────────────────────────────────────────────────────

    def update_weights(
        self,
        version: str,
        *,
        path: str | Path | None = None,
        source: Mapping[str, Json] | None = None,
        mode: UpdateMode = "in_place",
    ) -> WeightsReport:
        """Serve new weights as `version` on every engine: of a checkpoint's folder on the node's machine, or
        of another `source` (docs/weights.md).
        """
        return self._run(self._api.update_weights(version, None if path is None else str(path), source, mode))

    def push_weights(
        self,
        version: str,
        buckets: Iterable[Mapping[str, Json]],
        *,
        kind: Literal["tensor", "distributed"] = "tensor",
        group: str | None = None,
        mode: UpdateMode = "in_place",
    ) -> WeightsReport:
        """Serve new weights as `version`, sent in buckets of `polarnode.client.tensors`; with
        kind="distributed" over a `group` that was joined.
        """
        return self._run(self._api.push_weights(version, buckets, kind, group, mode))

    def join_weights_group(
        self,
        *,
        address: str,
        port: int,
        world_size: int,
        rank_offset: int = 1,
        backend: Backend = "nccl",
        name: str = "weights",
    ) -> None:
        """Let the node's engines join a process group of the trainer's; answers when all of it have."""
        self._run(ask(weights.join(name, address, port, world_size, rank_offset, backend)))

    def leave_weights_group(self, name: str = "weights") -> None:
        """Let them leave it."""
        self._run(ask(weights.leave(name)))

    def weights(self) -> WeightsStatus:
        """The version that is served, and how it came to that."""
        return self._run(ask(weights.status()))

    def pause(self, mode: PauseMode = "in_place") -> WeightsStatus:
        """Hold generation: calls under way and new ones wait."""
        return self._run(ask(weights.pause(mode)))

    def resume(self) -> WeightsStatus:
        """Let generation go on."""
        return self._run(ask(weights.resume()))

    def release_memory(self, tags: Sequence[MemoryTag] | None = None) -> WeightsStatus:
        """Lend the engines' memory to a trainer on the same GPUs: all of it, or what `tags` name."""
        return self._run(ask(weights.memory("release", tags)))

    def resume_memory(self, tags: Sequence[MemoryTag] | None = None) -> WeightsStatus:
        """Take it back."""
        return self._run(ask(weights.memory("resume", tags)))

    # ── captures ──────────────────────────────────────────────────────────────

    @contextmanager
    def capture(
        self,
        spec: CaptureSpec | None = None,
        *,
        task_id: str | None = None,
        group_id: str | None = None,
        sample_index: int | None = None,
        num_samples: int | None = None,
        metadata: Mapping[str, Json] | None = None,
    ) -> Iterator[CaptureSession]:
        """A session around an agent of your own, in this process or any other of the node's machine; what it
        samples becomes a trajectory.

        Set `reward` before the block ends. An exception ends the session as failed, and goes on.
        """
        asked = named(
            spec,
            task_id=task_id,
            group_id=group_id,
            sample_index=sample_index,
            num_samples=num_samples,
            metadata=metadata,
        )
        session = CaptureSession(opened=self._run(self._api.begin_capture(asked)))
        try:
            yield session
        except BaseException as error:
            self._run(self._api.leave_capture(session, error))
            raise
        session.result = self._run(self._api.end_capture(session))

    # ── the node ──────────────────────────────────────────────────────────────

    def status(self) -> dict[str, Any]:
        """The node now."""
        return self._run(ask(requests.status()))

    def metrics(self) -> str:
        """Prometheus text."""
        return self._run(ask(requests.metrics()))

    # ── how ───────────────────────────────────────────────────────────────────

    @property
    def _api(self) -> Api:
        return Api(patience_s=self.patience_s, ack_every_s=self.ack_every_s)

    @property
    def _http(self) -> BlockingHttp:
        return BlockingHttp(base_url=self.base_url, token=self.token)

    def _run(self, script: Script[T]) -> T:
        return self._http.run(script)


def specs_of(path: str | Path, kind: "Kind | None", overrides: Mapping[str, Any]) -> list[TaskSpec]:
    """The tasks of a source, all of them. Its room is imported by who needs it: it is half of what importing
    the client would take.
    """
    from polarnode.sources.source import read_source
    from polarnode.sources.values import Overrides

    return [task.spec for task in read_source(path, kind=kind, overrides=Overrides(**overrides)).tasks()]
