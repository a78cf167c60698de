"""Live sessions of all nodes in one stream: each event is of one node, as that node sent it.

A reader has its own connection to each node. What it has not taken yet is kept as the last change of each
session, so a slow reader costs at most one status of each session that is live.
"""

from collections.abc import AsyncIterator, Iterator
from typing import Final

import trio
from attrs import define, evolve, field, frozen
from quart import Response, request

from polarnode.api.exports import KEEP_ALIVE_S
from polarnode.api.live import changes_event, pieces
from polarnode.api.query import read_query
from polarnode.client.requests import query_string
from polarnode.client.scripts import PAUSES, Block, Decoder
from polarnode.client.values import ClientError, Unreachable, read_answer
from polarnode.core.status import LiveSessionStatus, SessionChanges
from polarnode.fleet.link import Link
from polarnode.fleet.streams import ROSTER_S, NodeReaders, Nodes
from polarnode.http.asgi import GREETING, KEEP_ALIVE, RouteRow, event_response

PATH: Final = "/v1/sessions/live"


@define(eq=False)
class PendingChanges:
    """What one reader was not sent yet, by node: whether all before counts no more, and the last change of
    each session.
    """

    _nodes: dict[str, tuple[bool, dict[str, LiveSessionStatus]]] = field(factory=dict, init=False)

    def put(self, changes: SessionChanges) -> None:
        """Add an event of a node."""
        found = {each.session_id: each for each in changes.sessions}
        if changes.whole:
            self._nodes[changes.node] = (True, found)
        else:
            self._nodes.setdefault(changes.node, (False, {}))[1].update(found)

    def take(self) -> list[SessionChanges]:
        """What one node has, as events; none where nothing waits."""
        for node in self._nodes:
            whole, sessions = self._nodes.pop(node)
            return list(pieces(node, list(sessions.values()), whole=whole))
        return []


@define(eq=False, kw_only=True)
class LiveBody(AsyncIterator[bytes]):
    """One reader's body. Its tasks begin with the first piece and end with `aclose`, which Quart calls
    however the reader leaves. A node that is not reached any more has no sessions, until it is reached again.
    """

    roster: Nodes
    nursery: trio.Nursery
    follow: bool
    _pending: PendingChanges = field(factory=PendingChanges, init=False)
    _taken: list[SessionChanges] = field(factory=list, init=False)
    _readers: NodeReaders = field(factory=NodeReaders, init=False)
    _over: set[str] = field(factory=set, init=False)  # nodes that were read to the end, with follow=false
    _scope: trio.CancelScope | None = field(default=None, init=False)
    _news: trio.Event = field(factory=trio.Event, init=False)
    _ended: bool = field(default=False, init=False)

    async def __anext__(self) -> bytes:
        if self._scope is None:
            self._scope = trio.CancelScope()
            self.nursery.start_soon(self._run, self._scope)
            return GREETING
        while True:
            self._taken = self._taken or self._pending.take()
            if self._taken:
                await trio.lowlevel.checkpoint()
                return changes_event(self._taken.pop(0))
            if self._ended:
                raise StopAsyncIteration
            self._news = trio.Event()
            with trio.move_on_after(KEEP_ALIVE_S) as silence:
                await self._news.wait()
            if silence.cancelled_caught:
                return KEEP_ALIVE

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._scope is not None:
            self._scope.cancel()

    async def _run(self, scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                while self.follow or not self._over.issuperset(self.roster.readable()):
                    for journal in self._readers.look(self.roster.readable(), self._read_on, nursery):
                        self._put(_nothing(self.roster.name_of(journal)))
                    await trio.sleep(ROSTER_S)
                nursery.cancel_scope.cancel()
            self._ended = True
            self._news.set()

    def _put(self, changes: SessionChanges) -> None:
        self._pending.put(changes)
        self._news.set()

    async def _read_on(self, journal: str, link: Link) -> None:
        """Read a node, again and again as its connection breaks."""
        failures = 0
        while True:
            name = self.roster.name_of(journal)
            began = trio.current_time()
            try:
                await self._read(name, link)
            except (Unreachable, ClientError):
                self._put(_nothing(name))
            if not self.follow:
                self._over.add(journal)
                return
            failures = 0 if trio.current_time() - began > KEEP_ALIVE_S else failures + 1
            await trio.sleep(PAUSES.delay(failures))

    async def _read(self, name: str, link: Link) -> None:
        decoder = Decoder()
        async with link.stream(PATH + query_string(follow=self.follow)) as body:
            async for piece in body:
                for block in decoder.feed(piece):
                    if isinstance(block, Block):
                        self._put(evolve(read_answer(block.data, SessionChanges), node=name))


def _nothing(name: str) -> SessionChanges:
    return SessionChanges(node=name, sessions=(), whole=True)


@frozen(kw_only=True)
class FleetLiveRoutes:
    """The handler. Bodies of streams run in `nursery`."""

    roster: Nodes
    nursery: trio.Nursery

    def rows(self) -> Iterator[RouteRow]:
        yield ("GET", PATH, self.stream)

    async def stream(self) -> Response:
        await trio.lowlevel.checkpoint()
        follow = read_query(request.args, "follow").follow
        body = LiveBody(roster=self.roster, nursery=self.nursery, follow=follow)
        return event_response(body)
