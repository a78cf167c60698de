"""A control plane on a real socket over a real journal. The node behind it is a stand-in that only takes
tasks; its tests have the real one.
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import h11
import trio
from attrs import define, field, frozen

from polarnode.api.app import Extension, control_plane
from polarnode.api.fork_routes import ForkRoutes
from polarnode.api.live import LiveSessionRoutes
from polarnode.api.logs import LogRoutes
from polarnode.api.metrics import Figures
from polarnode.api.proxy import DrainRoutes, OtherNodes, PassingRoutes, open_others
from polarnode.api.routes import (
    AdapterRoutes,
    CaptureRoutes,
    ControlRoutes,
    EvaluationRoutes,
    ScoreRoutes,
    WeightsRoutes,
)
from polarnode.api.service import Submitted
from polarnode.api.timeseries import History
from polarnode.core.conversation import Json
from polarnode.core.errors import Conflict, DiskFull, PolarnodeError
from polarnode.core.status import CaptureStatus, LiveSessionStatus
from polarnode.core.task import TaskSpec
from polarnode.engine.routing import EngineStatistics
from polarnode.engine.scoring import ScoringEngines
from polarnode.http.asgi import RouteRow
from polarnode.http.server import Address, open_server
from polarnode.integrations.polar.extension import polar_extension
from polarnode.integrations.sglang import sglang_extension
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.port import Log
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.journal.values import RetentionLimits
from polarnode.rollouts.session import MAX_HARNESS_LOG_BYTES
from polarnode.support.metrics import NodeCounters


@define(eq=False)
class NoCaptures:
    """Stands where the node's captures do: none is open."""

    def list(self) -> tuple[CaptureStatus, ...]:
        return ()


@define(eq=False)
class TaskTaker:
    """Takes tasks into the journal as the node does, and runs nothing."""

    journal: Journal
    is_ready: bool = True
    has_a_bug: bool = False
    refuses: PolarnodeError | None = None
    live: set[str] = field(factory=set)
    tally: NodeCounters = field(factory=NodeCounters)
    node_id: str = "n0"
    model_name: str = "tiny"
    volumes: tuple[str, ...] = ()
    generation: Any = None
    captures: Any = field(factory=NoCaptures)
    listed: tuple[LiveSessionStatus, ...] = ()
    log: Log = field()

    @log.default
    def _alone(self) -> Log:
        return SqliteLog(self.journal)

    def sessions(self) -> tuple[LiveSessionStatus, ...]:
        return self.listed

    def end_session(self, session_id: str) -> bool:
        return session_id in self.live

    async def submit(self, spec: TaskSpec, *, idempotency_key: str | None) -> Submitted:
        if self.refuses is not None:
            raise self.refuses
        known = await self.log.task_of_key(idempotency_key) if idempotency_key else None
        known = known or (await self.log.task(spec.task_id) if spec.task_id else None)
        if known is not None and known.spec != spec:
            raise Conflict(
                f"another task has the id or key {spec.task_id or idempotency_key!r}: choose a new one"
            )
        if known is not None:
            return Submitted(
                task_id=known.task_id,
                session_ids=tuple(one.session_id for one in known.sessions),
                created=False,
            )
        if self.journal.health.statistics().refuses_tasks:
            raise DiskFull("the disk is full: make room")
        task_id = spec.task_id or f"task-{len(self.live)}"
        sessions = tuple(f"{task_id}-{index}" for index in range(spec.num_samples))
        await self.log.submit(
            spec,
            task_id=task_id,
            session_ids=sessions,
            idempotency_key=idempotency_key,
            submitted=self.journal.now(),
        )
        self.live.add(task_id)
        return Submitted(task_id=task_id, session_ids=sessions)

    async def cancel(self, task_id: str) -> bool:
        await trio.lowlevel.checkpoint()
        found = task_id in self.live
        self.live.discard(task_id)
        return found

    def status(self) -> dict[str, Json]:
        if self.has_a_bug:
            raise ZeroDivisionError
        return {"node": "stand-in"}

    def figures(self) -> Figures:
        engine = EngineStatistics(hosts=(), vocab_size=1, context_length=1, weight_version="0", paused=None)
        return Figures(
            tally=self.tally.copied(),
            engine=engine,
            stages={},
            live=len(self.live),
            journal_bytes=1,
            journal_backlog=0,
        )

    def token_bytes(self, token: int) -> bytes:
        return chr(token + 97).encode()

    def ready(self) -> bool:
        return self.is_ready

    def unready(self) -> str | None:
        return None if self.is_ready else "the journal's disk is full"


@define(eq=False)
class NoWeights:
    """Stands where the node's weights do; its routes are all that is looked at."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def log_routes(service: TaskTaker, folder: Path) -> Iterator[RouteRow]:
    """The logs of a folder, and those of sessions in it."""
    return LogRoutes(service=service, state=folder, sessions_dir=folder, ring=MAX_HARNESS_LOG_BYTES).rows()


def other_room_extensions(journal: Journal) -> Iterator[Extension]:
    """What other rooms add, for tests of every route of the control plane."""
    nobody: Any = NoWeights()
    yield Extension(
        rows=(
            *WeightsRoutes(weights=NoWeights(), control=NoWeights()).rows(),  # type: ignore[arg-type]
            *AdapterRoutes(store=NoWeights()).rows(),  # type: ignore[arg-type]
            *CaptureRoutes(captures=NoCaptures()).rows(),  # type: ignore[arg-type]
            *ForkRoutes(service=TaskTaker(journal=journal)).rows(),
            *EvaluationRoutes(evaluations=NoWeights()).rows(),  # type: ignore[arg-type]
            *ScoreRoutes(scoring=ScoringEngines()).rows(),
            *log_routes(TaskTaker(journal=journal), Path()),
            *LiveSessionRoutes(TaskTaker(journal=journal), nobody).rows(),
            *DrainRoutes(nobody, nobody).rows(),
            *History(figures=TaskTaker(journal=journal).figures, now=lambda: 1.0).rows(),
        )
    )
    yield polar_extension(TaskTaker(journal=journal))
    nothing: Any = NoWeights()
    yield sglang_extension(
        TaskTaker(journal=journal), weights=nothing, control=nothing, adapters=nothing, memory_saver=False
    )


@frozen(kw_only=True)
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    text: str
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.text)


@define(eq=False)
class Exchange:
    """One request on a connection of its own, over h11 alone, so that nothing stands between a test and the
    wire.
    """

    socket: trio.SocketStream
    wire: h11.Connection

    async def head(self) -> h11.Response:
        found = await self.part()
        assert isinstance(found, h11.Response)
        return found

    async def part(self) -> h11.Event:
        while not isinstance(found := self.wire.next_event(), h11.Event):
            assert found is h11.NEED_DATA
            self.wire.receive_data(await self.socket.receive_some())
        return found

    async def answer(self) -> Answer:
        head, body = await self.head(), b""
        while isinstance(part := await self.part(), h11.Data):
            body += part.data
        headers = {name.decode(): value.decode() for name, value in head.headers}
        return Answer(status=head.status_code, headers=headers, text=body.decode(errors="replace"), body=body)


@asynccontextmanager
async def open_exchange(
    url: str, method: str, path: str, headers: dict[str, str], params: dict[str, Any], body: bytes = b""
) -> AsyncIterator[Exchange]:
    host, _, port = url.removeprefix("http://").partition(":")
    async with await trio.open_tcp_stream(host, int(port)) as socket:
        wire = h11.Connection(h11.CLIENT)
        said = {"Host": host, "Content-Length": str(len(body)), "Connection": "close"} | headers
        target = f"{path}?{urlencode(params)}" if params else path
        start = wire.send(
            h11.Request(
                method=method,
                target=target,
                headers=[(name.encode(), value.encode()) for name, value in said.items()],
            )
        )
        await socket.send_all(
            (start or b"") + (wire.send(h11.Data(data=body)) or b"") + (wire.send(h11.EndOfMessage()) or b"")
        )
        yield Exchange(socket, wire)


@frozen(kw_only=True)
class Caller:
    """Speaks to one control plane."""

    url: str
    token: str = "secret"

    async def call(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, Any] | None = None,
        json_body: Any = None,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
    ) -> Answer:
        content = body if json_body is None else json.dumps(json_body).encode()
        async with open_exchange(
            self.url, method, path, self._headers(headers), params or {}, content
        ) as exchange:
            return await exchange.answer()

    async def get(self, path: str, **params: Any) -> Answer:
        return await self.call("GET", path, params=params)

    async def post(self, path: str, json_body: Any, **headers: str) -> Answer:
        return await self.call(
            "POST",
            path,
            json_body=json_body,
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )

    @asynccontextmanager
    async def stream(self, headers: dict[str, str] | None = None, **params: Any) -> "AsyncIterator[Stream]":
        """GET /v1/trajectories/stream."""
        async with open_exchange(
            self.url, "GET", "/v1/trajectories/stream", self._headers(headers), params
        ) as exchange:
            head = await exchange.head()
            assert head.status_code == 200
            assert (b"content-type", b"text/event-stream") in head.headers
            yield Stream(exchange)

    def _headers(self, more: dict[str, str] | None) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} | (more or {})


@define(eq=False)
class Stream:
    """A stream being read, a block at a time."""

    exchange: Exchange
    text: str = ""
    over: bool = False

    async def block(self) -> dict[str, Any]:
        """The next block: its fields, `comment` for a comment; {} at the end."""
        while "\n\n" not in self.text and not self.over:
            part = await self.exchange.part()
            self.over = not isinstance(part, h11.Data)
            self.text += part.data.decode() if isinstance(part, h11.Data) else ""
        head, _, self.text = self.text.partition("\n\n")
        pairs = (line.split(": ", 1) for line in head.splitlines())
        return {name or "comment": json.loads(value) if name == "data" else value for name, value in pairs}

    async def event(self) -> dict[str, Any]:
        while (found := await self.block()) and "event" not in found:
            pass
        return found

    async def rest(self) -> list[str]:
        """The keys of all events to the end."""
        keys = []
        while found := await self.event():
            keys.append(found["data"]["key"])
        return keys


@frozen(kw_only=True)
class Plane:
    url: str
    journal: Journal
    service: TaskTaker
    history: History


@asynccontextmanager
async def open_plane(
    path: Path,
    *,
    token: str | None = "secret",
    port: int = 0,
    retention: RetentionLimits | None = None,
    connections: int | None = None,
    log: Log | None = None,
) -> AsyncIterator[Plane]:
    """`log`: one that other nodes have too, in place of the journal."""
    async with open_journal(path, now=lambda: 1.0, retention=retention) as journal:
        service = TaskTaker(journal=journal, log=log or SqliteLog(journal))
        history = History(figures=service.figures, now=lambda: 1.0)

        def rows(others: OtherNodes) -> Iterator[RouteRow]:
            yield from ControlRoutes(service=service, sessions_dir=path.parent).rows()
            yield from ForkRoutes(service=service).rows()
            yield from log_routes(service, path.parent)
            yield from LiveSessionRoutes(service, others).rows()
            yield from history.rows()

        async with (
            open_others(service.log, name=service.node_id, token=token) as others,
            open_server(
                control_plane(PassingRoutes(others).rows(rows(others)), token=token),
                Address(host="127.0.0.1", port=port),
                connections=connections,
            ) as address,
        ):
            yield Plane(
                url=f"http://127.0.0.1:{address.port}", journal=journal, service=service, history=history
            )
