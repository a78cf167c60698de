"""The asynchronous client: the scripts run over httpx2, under Trio or asyncio.

The methods are those of `PolarnodeClient`, with the same parameters; they are documented there, and nothing
is decided here. No cancel scope and no nursery is open while a value is yielded. A script sees a cancelled
wait as a broken connection, so iteration can continue after a deadline. Closing is bounded and shielded.
"""

from collections.abc import AsyncIterator, Container, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

import anyio
import anyio.to_thread
import httpx2
from attrs import define, field

from polarnode.client import api, requests
from polarnode.client.api import (
    END_SILENCE_S,
    LEAVING_S,
    Api,
    CaptureSession,
    Reading,
    exported,
    named,
    specs_of,
)
from polarnode.client.pins import other_certificate, reason_of, split_pin, trust
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
from polarnode.core.status import Consumer, EvaluationStatus, ScoredRow, ScoreRow, Submitted, TaskStatus
from polarnode.core.task import CaptureSpec, EvaluationSpec, EvaluatorSpec, TaskSpec
from polarnode.core.trajectory import Trace, Trajectory
from polarnode.core.weights import (
    AdapterReport,
    AdaptersState,
    AdapterState,
    Backend,
    MemoryTag,
    PauseMode,
    UpdateMode,
    WeightsReport,
    WeightsStatus,
)
from polarnode.groups.group import Group

# ── running scripts ────────────────────────────────────────────────────────────

CLOSE_S = 5.0  # seconds to close a connection; its result is not needed
FAULTS = (
    httpx2.HTTPError,
    httpx2.StreamError,
    httpx2.InvalidURL,
    OSError,
    anyio.ClosedResourceError,
    anyio.BrokenResourceError,
)

V = TypeVar("V")


@define(eq=False, kw_only=True)
class AwaitingHttp:
    """The address and the bearer token of one node, and the connections to it."""

    base_url: str
    token: str | None = field(repr=False)
    certificate: str = ""  # the SHA-256 of the only one that is trusted; "": those of the machine's CAs
    client: httpx2.AsyncClient = field(init=False)
    # the open responses: a loop that ended early may not have closed its own
    reading: "set[_Wire]" = field(factory=set, init=False, repr=False)

    @client.default
    def _make_client(self) -> httpx2.AsyncClient:
        # As http.client: no proxies of the environment, no redirects. No limit on connections: a stream that
        # is read keeps one.
        verify = trust(self.base_url, self.certificate) or False
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=4)
        return httpx2.AsyncClient(verify=verify, trust_env=False, limits=limits)

    async def run(self, script: Script[T]) -> T:
        """Run a script to its end and return its value."""
        running, wire = Running(script), _Wire(self)
        try:
            while (command := running.next()) is not None:
                await wire.step(running, command)
        finally:
            await wire.close()  # noqa: ASYNC102 - shielded and bounded in `_closed`
        return running.value

    def unreachable(self, error: Exception) -> PolarnodeError:
        """The error for what a connection raised: ConfigError for another certificate than the pinned one,
        which no wait mends.
        """
        return other_certificate(error) or Unreachable(
            f"{self.base_url} does not answer ({type(error).__name__}: {reason_of(error)}):"
            " is the node running?"
        )

    async def aclose(self) -> None:
        for wire in tuple(self.reading):
            await wire.close()
        with anyio.move_on_after(CLOSE_S, shield=True), suppress(*FAULTS):
            await self.client.aclose()


@define(eq=False)
class AsyncEvents(Generic[V]):
    """An asynchronous iterator over the values that a script gives.

    Use `async with` or `aclose` to release its connection when a loop ends early. A cancelled wait loses
    nothing: iteration continues over a new connection.
    """

    http: AwaitingHttp
    script: Script[None]
    _running: Running[None] = field(init=False)
    _wire: "_Wire" = field(init=False)
    _over: bool = field(default=False, init=False)

    @_running.default
    def _make_running(self) -> Running[None]:
        return Running(self.script)

    @_wire.default
    def _make_wire(self) -> "_Wire":
        return _Wire(self.http)

    def __aiter__(self) -> AsyncIterator[V]:
        return self

    async def __anext__(self) -> V:
        while not self._over:
            try:
                command = self._running.next()
            except BaseException:
                await self.aclose()
                raise
            if command is None:
                await self.aclose()
            elif isinstance(command, Give):
                self._running.answered(None)
                return command.value  # type: ignore[no-any-return]
            else:
                await self._wire.step(self._running, command)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._over = True
        await self._wire.close()

    async def __aenter__(self) -> "AsyncEvents[V]":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


@define(eq=False)
class _Wire:
    """The response that one script has open."""

    http: AwaitingHttp
    _response: httpx2.Response | None = field(default=None, init=False)
    _pieces: AsyncIterator[bytes] | None = field(default=None, init=False)

    async def step(self, running: Running[Any], command: Command) -> None:
        try:
            answer = await self._obey(command)
        except PolarnodeError as error:
            running.failed(error)
        except BaseException:  # cancelled: the script sees a broken connection when it is resumed
            await self.close()  # noqa: ASYNC102 - shielded and bounded in `_closed`
            if isinstance(command, Sleep | Close | Give):
                running.answered(None)
            else:
                running.failed(Unreachable("the wait was cancelled"))
            raise
        else:
            running.answered(answer)

    async def _obey(self, command: Command) -> object:
        match command:
            case Ask(request):
                return await self._ask(request)
            case Open(request):
                return await self._open(request)
            case Read():
                return await self._read()
            case Close() | Give():
                await self.close()
            case Sleep(seconds):
                await anyio.sleep(seconds)
        return None

    async def _ask(self, request: ClientRequest[Any]) -> bytes:
        response = await self._send(request)
        try:
            return await self._whole(response)
        finally:
            await _closed(response)  # noqa: ASYNC102 - shielded and bounded in `_closed`

    async def _open(self, request: ClientRequest[Any]) -> str:
        await self.close()
        self._response = await self._send(request)
        self._pieces = self._response.aiter_raw()
        self.http.reading.add(self)
        return str(self._response.headers.get("content-type", ""))

    async def _read(self) -> bytes:
        if self._pieces is None:
            return b""
        try:
            return bytes(await anext(self._pieces, b""))
        except FAULTS as error:
            raise self.http.unreachable(error) from error

    async def close(self) -> None:
        response, pieces, self._response, self._pieces = self._response, self._pieces, None, None
        if response is not None:
            self.http.reading.discard(self)
            await _closed(response, pieces)

    async def _send(self, request: ClientRequest[Any]) -> httpx2.Response:
        """Return the response once its head is read. Raises ClientError for a status of 300 or more."""
        mine = {} if self.http.token is None else {"Authorization": f"Bearer {self.http.token}"}
        url = self.http.base_url.rstrip("/") + request.path
        try:
            built = self.http.client.build_request(
                request.method,
                url,
                content=request.body,
                headers={"Accept-Encoding": "identity", **mine, **request.headers},
                timeout=httpx2.Timeout(request.silence_s),
            )
            response = await self.http.client.send(built, stream=True)
        except FAULTS as error:
            raise self.http.unreachable(error) from error
        if response.status_code < 300:
            return response
        try:
            body = await self._whole(response)
        finally:
            await _closed(response)  # noqa: ASYNC102 - shielded and bounded in `_closed`
        raise read_error(response.status_code, response.reason_phrase, dict(response.headers), body)

    async def _whole(self, response: httpx2.Response) -> bytes:
        try:
            # as http.client, not decoded: a small body could expand to a huge one
            return b"".join([piece async for piece in response.aiter_raw()])
        except FAULTS as error:
            raise self.http.unreachable(error) from error


async def _closed(response: httpx2.Response, pieces: AsyncIterator[bytes] | None = None) -> None:
    """Close a response. Bounded, shielded, and without errors, because nothing more is expected of it."""
    with anyio.move_on_after(CLOSE_S, shield=True), suppress(*FAULTS):
        await response.aclose()
        # httpx2 leaves its own generator to the garbage collector in mid-body, and Trio warns about that.
        # Read on, it ends with its connection.
        if pieces is not None:
            async for _ in pieces:
                pass


# ── the client ────────────────────────────────────────────────────────────

if TYPE_CHECKING:
    from polarnode.sources.values import Kind


@define(eq=False)
class AsyncPolarnodeClient:
    """A client of one node's control plane for Trio and asyncio. Its methods are documented at
    `PolarnodeClient`.

    Use `async with` or `aclose` to close its connections.
    """

    base_url: str = "http://127.0.0.1:8080"
    token: str | None = field(default=None, repr=False)
    patience_s: float = 600.0
    ack_every_s: float = field(default=ACK_EVERY_S, kw_only=True)
    _http: AwaitingHttp = field(init=False, repr=False)

    @_http.default
    def _make_http(self) -> AwaitingHttp:
        url, certificate = split_pin(self.base_url)
        return AwaitingHttp(base_url=url, token=self.token, certificate=certificate)

    # ── tasks ─────────────────────────────────────────────────────────────────

    async def submit(
        self, spec: TaskSpec | dict[str, Json], *, idempotency_key: str | None = None
    ) -> Submitted:
        return await self._run(self._api.submit(spec, idempotency_key))

    async def submit_source(
        self, path: str | Path, *, kind: "Kind | None" = None, **overrides: Any
    ) -> list[Submitted]:
        specs = await anyio.to_thread.run_sync(specs_of, path, kind, overrides)
        return [await self.submit(spec) for spec in specs]

    async def task(self, task_id: str) -> dict[str, Any]:
        return await self._run(ask(requests.task(task_id)))

    async def task_status(self, task_id: str) -> TaskStatus:
        return await self._run(ask(requests.task_status(task_id)))

    async def tasks(self, *, limit: int = 100, before: str | None = None) -> list[dict[str, Any]]:
        return await self._run(ask(requests.tasks(limit=limit, before=before)))

    async def cancel(self, task_id: str) -> bool:
        return await self._run(ask(requests.cancel(task_id)))

    async def evaluate(
        self,
        *sessions: str,
        task_id: str | None = None,
        group_id: str | None = None,
        evaluator: EvaluatorSpec | None = None,
        reason: str | None = None,
        idempotency_key: str | None = None,
        wait: bool = False,
    ) -> EvaluationStatus:
        spec = EvaluationSpec(
            sessions=sessions, task_id=task_id, group_id=group_id, evaluator=evaluator, reason=reason
        )
        return await self._run(self._api.evaluate(spec, idempotency_key, wait=wait))

    async def evaluation(self, evaluation_id: str, *, wait: bool = False) -> EvaluationStatus:
        return await self._run(self._api.evaluation(evaluation_id, wait=wait))

    # ── trajectories and groups ───────────────────────────────────────────────

    def trajectories(
        self,
        *,
        consumer: str | None = None,
        after: int | str | None = None,
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
    ) -> AsyncEvents[Event]:
        reading = Reading(consumer, after, task_id, group_id, follow, ack, arrays, turns)
        return AsyncEvents(
            self._http,
            self._api.trajectories(reading, kinds, outcome=outcome, min_reward=min_reward, format=format),
        )

    def groups(
        self,
        *,
        consumer: str | None = None,
        after: int | str | None = None,
        task_id: str | None = None,
        group_id: str | None = None,
        arrays: Arrays = "base64",
        turns: Turns = "table",
        follow: bool | None = None,
        ack: bool = False,
        skip: Container[str] = (),
        kept_bytes: int = KEPT_BYTES,
    ) -> AsyncEvents[Group]:
        reading = Reading(consumer, after, task_id, group_id, follow, ack, arrays, turns)
        return AsyncEvents(self._http, self._api.groups(reading, skip, kept_bytes))

    async def acknowledge(self, consumer: str, position: int | str) -> int | str:
        return await self._run(self._api.acknowledge(consumer, position))

    async def trajectory(
        self, session_id: str, *, turns: Turns = "table", arrays: Arrays = "base64"
    ) -> Trajectory:
        return await self._run(self._api.trajectory(session_id, turns, arrays))

    async def formatted(self, session_id: str, format: str, *, arrays: Arrays = "base64") -> dict[str, Any]:
        return await self._run(ask(requests.formatted(session_id, format=format, arrays=arrays)))

    async def session(self, session_id: str) -> dict[str, Any]:
        return await self._run(ask(requests.session(session_id)))

    async def artifacts(self, session_id: str, to: str | Path) -> int:
        async with AsyncEvents[bytes](self._http, self._api.artifacts(session_id)) as pieces:
            await anext(pieces)  # the node has the archive: create the file only now
            async with await anyio.open_file(to, "wb") as file:
                return sum([await file.write(piece) async for piece in pieces])

    def export(
        self,
        *,
        task_id: str | None = None,
        group_id: str | None = None,
        outcome: str | None = None,
        min_reward: float | None = None,
        arrays: Arrays = "json",
        turns: Turns = "table",
    ) -> AsyncEvents[dict[str, Any]]:
        query = exported(task_id, group_id, outcome, min_reward, arrays, turns)
        return AsyncEvents(self._http, self._api.export(**query))

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
    ) -> AsyncEvents[bytes]:
        query = exported(task_id, group_id, outcome, min_reward, arrays, turns)
        return AsyncEvents(self._http, self._api.export_bytes(**query, format=format, kind=kind))

    # ── consumers ─────────────────────────────────────────────────────────────

    async def consumers(self) -> tuple[Consumer, ...]:
        return await self._run(ask(requests.consumers()))

    async def forget_consumer(self, consumer: str) -> None:
        await self._run(ask(requests.forget_consumer(consumer)))

    # ── weights ───────────────────────────────────────────────────────────────

    async def update_weights(
        self,
        version: str,
        *,
        path: str | Path | None = None,
        source: Mapping[str, Json] | None = None,
        mode: UpdateMode = "in_place",
    ) -> WeightsReport:
        return await self._run(
            self._api.update_weights(version, None if path is None else str(path), source, mode)
        )

    async def push_weights(
        self,
        version: str,
        buckets: Iterable[Mapping[str, Json]],
        *,
        kind: Literal["tensor", "distributed"] = "tensor",
        group: str | None = None,
        mode: UpdateMode = "in_place",
    ) -> WeightsReport:
        return await self._run(self._api.push_weights(version, buckets, kind, group, mode))

    async def join_weights_group(
        self,
        *,
        address: str,
        port: int,
        world_size: int,
        rank_offset: int = 1,
        backend: Backend = "nccl",
        name: str = "weights",
    ) -> None:
        await self._run(ask(api.join_group(name, address, port, world_size, rank_offset, backend)))

    async def leave_weights_group(self, name: str = "weights") -> None:
        await self._run(ask(api.leave_group(name)))

    async def weights(self) -> WeightsStatus:
        return await self._run(ask(api.weights_status()))

    async def pause(self, mode: PauseMode = "in_place") -> WeightsStatus:
        return await self._run(ask(api.pause(mode)))

    async def resume(self) -> WeightsStatus:
        return await self._run(ask(api.resume()))

    async def release_memory(self, tags: Sequence[MemoryTag] | None = None) -> WeightsStatus:
        return await self._run(ask(api.memory("release", tags)))

    async def resume_memory(self, tags: Sequence[MemoryTag] | None = None) -> WeightsStatus:
        return await self._run(ask(api.memory("resume", tags)))

    # ── adapters ──────────────────────────────────────────────────────────────

    async def update_adapter(self, name: str, version: str, *, path: str | Path) -> AdapterReport:
        return await self._run(self._api.patiently(api.update_adapter(name, version, str(path))))

    async def send_adapter(self, name: str, version: str, body: bytes) -> AdapterReport:
        return await self._run(self._api.patiently(api.send_adapter(name, version, body)))

    async def adapters(self) -> AdaptersState:
        return await self._run(ask(api.adapters()))

    async def delete_adapter(self, name: str) -> AdapterState:
        return await self._run(ask(api.delete_adapter(name)))

    # ── captures ──────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def capture(
        self,
        spec: CaptureSpec | None = None,
        *,
        task_id: str | None = None,
        group_id: str | None = None,
        sample_index: int | None = None,
        num_samples: int | None = None,
        adapter: str | None = None,
        metadata: Mapping[str, Json] | None = None,
    ) -> AsyncIterator[CaptureSession]:
        requested = named(
            spec,
            task_id=task_id,
            group_id=group_id,
            sample_index=sample_index,
            num_samples=num_samples,
            adapter=adapter,
            metadata=metadata,
        )
        session = CaptureSession(opened=await self._run(self._api.begin_capture(requested)))
        try:
            yield session
        except BaseException as error:
            # the capture is ended even when the caller is cancelled
            with anyio.move_on_after(LEAVING_S + END_SILENCE_S, shield=True):
                await self._run(self._api.leave_capture(session, error))
            raise
        session.result = await self._run(self._api.end_capture(session))

    # ── the node ──────────────────────────────────────────────────────────────

    async def score(
        self, rows: Iterable[ScoreRow | Trace], *, engine: str = "policy", adapter: str = ""
    ) -> list[ScoredRow]:
        return await self._run(ask(requests.score(rows, engine, adapter)))

    async def status(self) -> dict[str, Any]:
        return await self._run(ask(requests.status()))

    async def metrics(self) -> str:
        return await self._run(ask(requests.metrics()))

    # ── running ───────────────────────────────────────────────────────────────────

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def _api(self) -> Api:
        return Api(patience_s=self.patience_s, ack_every_s=self.ack_every_s)

    async def _run(self, script: Script[T]) -> T:
        return await self._http.run(script)
