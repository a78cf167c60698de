"""The asynchronous client, under Trio or asyncio.

The methods are those of `PolarnodeClient`, with the same parameters; they are documented there, and nothing
is decided here.
"""

from collections.abc import AsyncIterator, Container, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import anyio
import anyio.to_thread
from attrs import define, field

from polarnode.client import api, requests, session_scores
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
from polarnode.client.awaiting_http import AsyncEvents, AwaitingHttp, Later
from polarnode.client.pins import node_address
from polarnode.client.requests import Script, T, ask
from polarnode.client.streams import ACK_INTERVAL_S, KEPT_BYTES
from polarnode.client.values import Event
from polarnode.core.codec.arrays import Arrays
from polarnode.core.codec.forks import ForkOrder
from polarnode.core.codec.trajectories import Turns
from polarnode.core.conversation import Json, Sampling
from polarnode.core.snapshots import SnapshotStatus
from polarnode.core.status import (
    Consumer,
    EvaluationStatus,
    LogFile,
    LogPiece,
    ScoredRow,
    ScoreRow,
    SessionChanges,
    SessionStatus,
    Submitted,
    TaskStatus,
    TimeSeries,
)
from polarnode.core.task import (
    Budgets,
    CaptureSpec,
    EvaluationSpec,
    EvaluatorSpec,
    ForkWay,
    GroupSpec,
    TaskSpec,
)
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
from polarnode.groups.group import Group, GroupState
from polarnode.groups.policy_difference import SessionDifference

# ── the client ────────────────────────────────────────────────────────────

if TYPE_CHECKING:
    from polarnode.sources.values import Kind


@define(eq=False)
class AsyncPolarnodeClient:
    """A client of one node's control plane for Trio and asyncio. Its methods are documented at
    `PolarnodeClient`.

    Use `async with` or `aclose` to close its connections. `await group.ack()` sends at once; a `group.ack()`
    that is not awaited is sent with the next group, or when the stream is closed.
    """

    base_url: str = "http://127.0.0.1:8080"
    token: str | None = field(default=None, repr=False)
    patience_s: float = 600.0
    ack_every_s: float = field(default=ACK_INTERVAL_S, kw_only=True)
    _http: AwaitingHttp = field(init=False, repr=False)

    @_http.default
    def _make_http(self) -> AwaitingHttp:
        url, certificate = node_address(self.base_url)
        return AwaitingHttp(base_url=url, token=self.token, certificate=certificate)

    # ── tasks ─────────────────────────────────────────────────────────────────

    async def submit(
        self, spec: TaskSpec | dict[str, Json], *, idempotency_key: str | None = None
    ) -> Submitted:
        return await self._run(self._api.submit(spec, idempotency_key))

    async def fork(
        self,
        session_id: str,
        turn: int,
        *,
        num_samples: int = 1,
        by: ForkWay = "resume",
        task_id: str | None = None,
        sampling: Sampling | None = None,
        budgets: Budgets | None = None,
        group: GroupSpec | None = None,
        evaluator: EvaluatorSpec | None = None,
        metadata: dict[str, Json] | None = None,
        idempotency_key: str | None = None,
    ) -> Submitted:
        order = ForkOrder(
            turn=turn, num_samples=num_samples, by=by, task_id=task_id, sampling=sampling, budgets=budgets,
            group=group, evaluator=evaluator, metadata=metadata,
        )  # fmt: skip
        return await self._run(self._api.fork(session_id, order, idempotency_key))

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
            owes=ack,
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
        script = self._api.groups(reading, skip, kept_bytes, partial(Later, self._http))
        return AsyncEvents(self._http, script, owes=consumer is not None)

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

    async def forks(self, session_id: str) -> tuple[SessionStatus, ...]:
        return (await self._run(ask(requests.forks(session_id)))).forks

    async def snapshots(self, session_id: str) -> tuple[SnapshotStatus, ...]:
        return (await self._run(ask(requests.snapshots(session_id)))).snapshots

    async def log(self, session_id: str, *, offset: int | None = None, tail: int | None = None) -> LogPiece:
        return await self._run(ask(requests.log(session_id, offset=offset, tail=tail)))

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
        return await self._run(ask(requests.weights_status()))

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
        return await self._run(ask(requests.adapters()))

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

    async def score_session(self, session_id: str, *, weights: str = "policy") -> SessionDifference:
        return await self._run(session_scores.score_session(session_id, weights))

    # ── the node ──────────────────────────────────────────────────────────────

    async def score(
        self, rows: Iterable[ScoreRow | Trace], *, engine: str = "policy", adapter: str = ""
    ) -> list[ScoredRow]:
        return await self._run(ask(requests.score(rows, engine, adapter)))

    async def status(self) -> dict[str, Any]:
        return await self._run(ask(requests.status()))

    def live_sessions(self, *, follow: bool = True) -> AsyncEvents[SessionChanges]:
        return AsyncEvents(self._http, self._api.live_sessions(follow=follow))

    async def finished_groups(
        self,
        *,
        limit: int = 100,
        until: float | None = None,
        state: GroupState | None = None,
        task_id: str | None = None,
    ) -> list[dict[str, Any]]:
        found = requests.finished_groups(limit=limit, until=until, state=state, task_id=task_id)
        return await self._run(ask(found))

    async def timeseries(self, *, since: float | None = None) -> TimeSeries:
        return await self._run(ask(requests.timeseries(since=since)))

    async def metrics(self) -> str:
        return await self._run(ask(requests.metrics()))

    async def node_logs(self) -> tuple[LogFile, ...]:
        return await self._run(ask(requests.node_logs()))

    async def node_log(self, name: str, *, offset: int | None = None, tail: int | None = None) -> LogPiece:
        return await self._run(ask(requests.node_log(name, offset=offset, tail=tail)))

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
