"""The asynchronous client, under Trio and asyncio: the methods of `PolarnodeClient`, by the same names and with the same parameters.

The rule for whoever edits it: nothing is decided here; each method hands a script to what obeys it, as `blocking.py` does with the same script.
What a method is for is told there.
"""

from collections.abc import AsyncIterator, Container, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import anyio
import anyio.to_thread
from attrs import define, field

from polarnode.client import requests, weights
from polarnode.client.acks import ACK_EVERY_S
from polarnode.client.api import Api, Reading
from polarnode.client.awaiting_http import AsyncEvents, AwaitingHttp
from polarnode.client.blocking import specs_of
from polarnode.client.capturing import END_SILENCE_S, LEAVING_S, CaptureSession, named
from polarnode.client.collecting import KEPT_BYTES
from polarnode.client.commands import Script, T, ask
from polarnode.client.values import Consumer, Event, Submitted, TaskStatus
from polarnode.client.weights import Backend, MemoryTag, Mode, PauseMode, WeightsReport, WeightsStatus
from polarnode.conversation import Json
from polarnode.groups import Group
from polarnode.records import Trajectory
from polarnode.tasks import CaptureSpec, TaskSpec
from polarnode.wire import Arrays, Turns

if TYPE_CHECKING:
    from polarnode.sources import Kind


@define(eq=False)
class AsyncPolarnodeClient:
    """One node's control plane, as `PolarnodeClient`. `async with` it, or `aclose` it, to be done with its connections."""

    base_url: str = "http://127.0.0.1:8080"
    token: str | None = field(default=None, repr=False)
    patience_s: float = 600.0
    ack_every_s: float = field(default=ACK_EVERY_S, kw_only=True)
    _http: AwaitingHttp = field(init=False, repr=False)

    @_http.default
    def _make_http(self) -> AwaitingHttp:
        return AwaitingHttp(base_url=self.base_url, token=self.token)

    # ── tasks ─────────────────────────────────────────────────────────────────

    async def submit(self, spec: TaskSpec | dict[str, Json], *, idempotency_key: str | None = None) -> Submitted:
        return await self._run(self._api.submit(spec, idempotency_key))

    async def submit_source(self, path: str | Path, *, kind: "Kind | None" = None, **overrides: Any) -> list[Submitted]:
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
    ) -> AsyncEvents[Event]:
        reading = Reading(consumer=consumer, after=after, task_id=task_id, group_id=group_id, follow=follow, ack=ack, arrays=arrays, turns=turns)
        return AsyncEvents(self._http, self._api.trajectories(reading, kinds, outcome=outcome, min_reward=min_reward, format=format))

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
    ) -> AsyncEvents[Group]:
        reading = Reading(consumer=consumer, after=after, task_id=task_id, group_id=group_id, follow=follow, ack=ack, arrays=arrays, turns=turns)
        return AsyncEvents(self._http, self._api.groups(reading, skip, kept_bytes))

    async def acknowledge(self, consumer: str, seq: int) -> int:
        return await self._run(self._api.acknowledge(consumer, seq))

    async def trajectory(self, session_id: str, *, turns: Turns = "table", arrays: Arrays = "base64") -> Trajectory:
        return await self._run(self._api.trajectory(session_id, turns, arrays))

    async def formatted(self, session_id: str, format: str, *, arrays: Arrays = "base64") -> dict[str, Any]:
        return await self._run(ask(requests.formatted(session_id, format=format, arrays=arrays)))

    async def session(self, session_id: str) -> dict[str, Any]:
        return await self._run(ask(requests.session(session_id)))

    async def artifacts(self, session_id: str, to: str | Path) -> int:
        async with AsyncEvents[bytes](self._http, self._api.artifacts(session_id)) as pieces:
            await anext(pieces)  # it is there: only now is there a file
            async with await anyio.open_file(to, "wb") as file:
                async for piece in pieces:
                    await file.write(piece)
                return await file.tell()

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
        query = {"task_id": task_id, "group_id": group_id, "outcome": outcome, "min_reward": min_reward, "arrays": arrays, "turns": turns}
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
        query = {"task_id": task_id, "group_id": group_id, "outcome": outcome, "min_reward": min_reward, "arrays": arrays, "turns": turns}
        return AsyncEvents(self._http, self._api.export_bytes(**query, format=format, kind=kind))

    # ── consumers ─────────────────────────────────────────────────────────────

    async def consumers(self) -> tuple[Consumer, ...]:
        return await self._run(ask(requests.consumers()))

    async def forget_consumer(self, consumer: str) -> None:
        await self._run(ask(requests.forget_consumer(consumer)))

    # ── weights ───────────────────────────────────────────────────────────────

    async def update_weights(
        self, version: str, *, path: str | Path | None = None, source: Mapping[str, Json] | None = None, mode: Mode = "in_place"
    ) -> WeightsReport:
        return await self._run(self._api.update_weights(version, None if path is None else str(path), source, mode))

    async def push_weights(
        self,
        version: str,
        buckets: Iterable[Mapping[str, Json]],
        *,
        kind: Literal["tensor", "distributed"] = "tensor",
        group: str | None = None,
        mode: Mode = "in_place",
    ) -> WeightsReport:
        return await self._run(self._api.push_weights(version, buckets, kind, group, mode))

    async def join_weights_group(
        self, *, address: str, port: int, world_size: int, rank_offset: int = 1, backend: Backend = "nccl", name: str = "weights"
    ) -> None:
        await self._run(ask(weights.join(name, address, port, world_size, rank_offset, backend)))

    async def leave_weights_group(self, name: str = "weights") -> None:
        await self._run(ask(weights.leave(name)))

    async def weights(self) -> WeightsStatus:
        return await self._run(ask(weights.status()))

    async def pause(self, mode: PauseMode = "in_place") -> WeightsStatus:
        return await self._run(ask(weights.pause(mode)))

    async def resume(self) -> WeightsStatus:
        return await self._run(ask(weights.resume()))

    async def release_memory(self, tags: Sequence[MemoryTag] | None = None) -> WeightsStatus:
        return await self._run(ask(weights.memory("release", tags)))

    async def resume_memory(self, tags: Sequence[MemoryTag] | None = None) -> WeightsStatus:
        return await self._run(ask(weights.memory("resume", tags)))

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
        metadata: Mapping[str, Json] | None = None,
    ) -> AsyncIterator[CaptureSession]:
        asked = named(spec, task_id=task_id, group_id=group_id, sample_index=sample_index, num_samples=num_samples, metadata=metadata)
        session = CaptureSession(opened=await self._run(self._api.begin_capture(asked)))
        try:
            yield session
        except BaseException as error:
            with anyio.move_on_after(LEAVING_S + END_SILENCE_S, shield=True):  # whoever is cancelled still says so
                await self._run(self._api.leave_capture(session, error))
            raise
        session.result = await self._run(self._api.end_capture(session))

    # ── the node ──────────────────────────────────────────────────────────────

    async def status(self) -> dict[str, Any]:
        return await self._run(ask(requests.status()))

    async def metrics(self) -> str:
        return await self._run(ask(requests.metrics()))

    # ── how ───────────────────────────────────────────────────────────────────

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
