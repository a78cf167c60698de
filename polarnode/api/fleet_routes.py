"""The routes by which a fleet's front and other nodes reach a node: /v1/fleet/….

Internal: their bodies are the values of `core.fleet`, and may change with every release. A command of an
earlier term is refused with 409 `superseded`. `rollouts.office` says how long a front holds its term.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Final, Protocol, TypeVar

import trio
from attrs import define, frozen
from quart import Response, request

from polarnode.api.query import read_query
from polarnode.api.routes import task_record_json
from polarnode.api.service import NotFound, json_response
from polarnode.core.codec.json import dump_json, plain, structure
from polarnode.core.codec.tasks import task_json
from polarnode.core.errors import Refused
from polarnode.core.fleet import AdoptOrder, CopyOrder, CopyRows, Epoch, NodeReport, ResumeOrder, TermOrder
from polarnode.core.status import Submitted
from polarnode.http.asgi import RouteRow, body_json, event_response
from polarnode.journal.journal import Journal
from polarnode.rollouts.second_homes import SecondHomes

FEED_S: Final = 2.0  # between reports without news: three misses are a node that is suspected
LOOK_S: Final = 0.1  # between looks for news: ten short tuples a second, while a front reads
FRONT: Final = 64  # characters of a front's id at most

T = TypeVar("T")


class FleetNode(Protocol):
    """A node as its fleet uses it."""

    @property
    def homes(self) -> SecondHomes: ...

    @property
    def journal(self) -> Journal: ...

    def report(self) -> NodeReport: ...

    def drain(self, draining: bool) -> None: ...

    async def submit_copy(self, order: CopyOrder) -> Submitted: ...

    async def cancel(self, task_id: str) -> bool: ...


@frozen(kw_only=True)
class DrainOrder:
    """Body of POST /v1/fleet/drain."""

    draining: bool


@frozen(kw_only=True)
class FleetRoutes:
    """The handlers."""

    node: FleetNode

    def rows(self) -> Iterator[RouteRow]:
        """The rows of the control plane's table."""
        yield from (
            ("GET", "/v1/fleet", self.look),
            ("GET", "/v1/fleet/feed", self.feed),
            ("POST", "/v1/fleet/term", self.take_term),
            ("GET", "/v1/fleet/tasks", self.tasks),
            ("POST", "/v1/fleet/tasks", self.submit),
            ("DELETE", "/v1/fleet/tasks/<task_id>", self.drop),
            ("PUT", "/v1/fleet/tasks/<task_id>/places/<int:place>", self.commit),
            ("PUT", "/v1/fleet/tasks/<task_id>/places/<int:place>/snapshot", self.snapshot),
            ("POST", "/v1/fleet/adopt", self.adopt),
            ("POST", "/v1/fleet/seconds", self.seconds),
            ("POST", "/v1/fleet/resume", self.resume),
            ("POST", "/v1/fleet/cancel/<task_id>", self.cancel),
            ("POST", "/v1/fleet/drain", self.drain),
            ("GET", "/v1/fleet/runs/<path:name>", self.run),
        )

    # ── the node ──────────────────────────────────────────────────────────────

    async def look(self) -> Response:
        read_query(request.args)
        return await self._report()

    async def _report(self) -> Response:
        await trio.lowlevel.checkpoint()
        return json_response(plain(self.node.report()))

    async def feed(self) -> Response:
        """Reports, every FEED_S and when something changed."""
        front = request.args.get("front", "")
        if not 0 < len(front) <= FRONT:
            raise Refused(f"front must be the front's id, 1 to {FRONT} characters", path="?front")
        await trio.lowlevel.checkpoint()
        return event_response(_Feed(self.node, front))

    async def take_term(self) -> Response:
        await self.node.homes.take_term(await _body(TermOrder))
        return await self._report()

    async def drain(self) -> Response:
        self.node.drain((await _body(DrainOrder)).draining)
        return await self._report()

    # ── tasks ─────────────────────────────────────────────────────────────────

    async def tasks(self) -> Response:
        task_id, key = request.args.get("task_id"), request.args.get("key")
        found = await self.node.homes.rows(task_id, key)
        if not found.tasks:
            found = CopyRows(tasks=self.node.homes.ended.find(task_id, key))
        return json_response(plain(found))

    async def submit(self) -> Response:
        """Answer 202 when the task, or the copy, is in the journal."""
        order = await _body(CopyOrder)
        self.node.homes.office.check(order.term)
        if order.role == "home":
            return json_response(plain(await self.node.submit_copy(order)), 202)
        return json_response(plain(await self.node.homes.keep(order)), 202)

    async def drop(self, task_id: str) -> Response:
        self.node.homes.office.check(_number("term"))
        ended = request.args.get("ended") == "1"
        left = await self.node.homes.drop(task_id, _epoch(), ended=ended)
        return json_response(plain(CopyRows(tasks=() if left is None else (left,))))

    async def commit(self, task_id: str, place: int) -> Response:
        # piece by piece: the bodies of PUT are received no faster than they are read
        data = b"".join([piece async for piece in request.body])
        found = await self.node.homes.commit(
            task_id,
            place,
            request.args.get("session", ""),
            _epoch(),
            data,
            staged=request.args.get("staged") == "true",
        )
        return json_response(plain(found))

    async def snapshot(self, task_id: str, place: int) -> Response:
        """A piece of the copy of a snapshot."""
        piece = b"".join([part async for part in request.body])
        session, turn = request.args.get("session", ""), _number("turn")
        await self.node.homes.snapshots.receive(
            task_id,
            place,
            f"{session} {turn}",
            _epoch(),
            offset=_number("offset"),
            size=_number("size"),
            piece=piece,
        )
        return json_response({})

    async def adopt(self) -> Response:
        order = await _body(AdoptOrder)
        self.node.homes.office.check(order.term)
        return json_response(plain(await self.node.homes.adopt(order.tasks)))

    async def seconds(self) -> Response:
        order = await _body(AdoptOrder)
        self.node.homes.office.check(order.term)
        return json_response(plain(await self.node.homes.replace_seconds(order.tasks)))

    async def resume(self) -> Response:
        order = await _body(ResumeOrder)
        self.node.homes.office.check(order.term)
        return json_response(plain(await self.node.homes.resume(order)))

    async def cancel(self, task_id: str) -> Response:
        """Cancel a task: of a home, its sessions; of a second home, what it would begin."""
        row = await self.node.homes.row_or_none(task_id)
        if row is None:
            raise NotFound(f"no copy of task {task_id!r} is here")
        if row.role != "home":
            row = await self.node.homes.cancel_copy(task_id)
        if row.role == "home":  # adopted meanwhile
            await self.node.cancel(task_id)
        return json_response(plain(row))

    async def run(self, name: str) -> Response:
        """The last task of a name that may be used again."""
        found = await self.node.journal.latest_run(name)
        if found is None:
            raise NotFound(f"no task was submitted as {name!r} here")
        spec = task_json(found.spec) if found.damaged is None else None
        return json_response(task_record_json(found) | {"spec": spec})


async def _body(shape: type[T]) -> T:
    read_query(request.args)
    return structure(await body_json(), shape)


def _number(name: str) -> int:
    text = request.args.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise Refused(f"{name} must be a number", path=f"?{name}")
    return int(text)


def _epoch() -> Epoch:
    return Epoch(_number("epoch_term"), _number("epoch_number"))


# ── the feed ────────────────────────────────────────────────────────────


@define(eq=False)
class _Feed(AsyncIterator[bytes]):
    """A front's feed. It counts as open from the first piece until Quart closes it, which Quart does however
    the front disconnects.
    """

    node: FleetNode
    front: str
    _reports: AsyncGenerator[bytes, None] | None = None

    async def __anext__(self) -> bytes:
        if self._reports is None:
            self._reports = _reports(self.node)
            self._count(1)
        return await anext(self._reports)

    async def aclose(self) -> None:
        if self._reports is not None:
            await self._reports.aclose()
            self._reports = None
            self._count(-1)

    def _count(self, change: int) -> None:
        feeds = self.node.homes.office.feeds
        feeds[self.front] = feeds.get(self.front, 0) + change
        if not feeds[self.front]:
            del feeds[self.front]


async def _reports(node: FleetNode) -> AsyncGenerator[bytes, None]:
    while True:
        report = node.report()
        yield b"data: " + dump_json(plain(report)) + b"\n\n"
        news, until = _news(report), trio.current_time() + FEED_S
        while trio.current_time() < until:
            await trio.sleep(LOOK_S)
            if _news(node.report()) != news:
                break


def _news(report: NodeReport) -> tuple[object, ...]:
    """What a front is told at once. The other figures change with every turn."""
    known = (report.ready, report.draining, report.term, report.challenged, report.front, report.version)
    return (*known, report.load.busy, report.tasks_digest, report.load.slots)
