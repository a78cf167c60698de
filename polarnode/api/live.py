"""The changes of live sessions as a stream of server-sent events. Each node of a log serves those of all
nodes.

A node looks at its sessions from time to time, and all readers share the result. A reader is sent the
differences from what it was sent last; each event is of one node. Of the changes that a reader has not taken
yet, only the last one of each session is kept. So a slow reader costs at most one status of each live
session, and a session is sent at most once in LOOK_S. Events have no numbers: a reader that reconnects is
sent all live sessions. A session that began and ended between two looks is missed here; trajectories have
their own stream, which misses nothing.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Final

import trio
from attrs import define, evolve, field, frozen
from quart import Response, request

from polarnode.api.exports import KEEP_ALIVE_S
from polarnode.api.proxy import (
    NODES_INTERVAL_S,
    PASSED_TO,
    MisdirectedRequest,
    OtherNodes,
    pass_failure_response,
)
from polarnode.api.query import read_query
from polarnode.api.service import NodeService
from polarnode.client.requests import query_string
from polarnode.client.scripts import PAUSES, Block, Decoder
from polarnode.client.values import read_answer
from polarnode.core.codec.json import dump_json, plain
from polarnode.core.errors import PolarnodeError
from polarnode.core.status import CaptureStatus, LiveSessionStatus, SessionChanges
from polarnode.http.asgi import GREETING, KEEP_ALIVE, RouteRow, event_response
from polarnode.journal.log.port import NodeRow

LOOK_S: Final = 0.5  # between two looks; a person would not notice a shorter time
SHARE: Final = 20  # looks take at most 1/20 of the time; one at 20,000 sessions holds the loop for 0.1 s
PATH: Final = "/v1/sessions/live"
AT_ONCE: Final = 500  # sessions of one event, 150 kB; more would hold the loop for longer than a look

Found = Mapping[str, LiveSessionStatus]


# ── changes ───────────────────────────────────────────────────────────────────


@define(eq=False)
class SeenSessions:
    """The sessions that one reader was sent last; None before the first time."""

    _sent: Found | None = field(default=None, init=False)

    def changes(self, live: Found, ended: Found) -> list[LiveSessionStatus]:
        """The differences now: sessions that began, that went on, and that are `ended` or no longer live."""
        before = self._sent or {}
        self._sent = live
        went_on = [each for name, each in live.items() if name not in before or _moved(before[name], each)]
        gone = [
            ended.get(name) or evolve(each, phase="ended")
            for name, each in before.items()
            if name not in live
        ]
        return went_on + gone

    @property
    def begun(self) -> bool:
        """Whether the reader was sent anything yet."""
        return self._sent is not None


def _moved(before: LiveSessionStatus, now: LiveSessionStatus) -> bool:
    """Whether anything but the time changed."""
    return (before.phase, before.turns, before.sampled_tokens) != (now.phase, now.turns, now.sampled_tokens)


def pieces(node: str, sessions: Sequence[LiveSessionStatus], *, whole: bool) -> Iterator[SessionChanges]:
    """The changes as events; only the first one can be `whole`. An event without sessions is sent only if it
    is `whole`.
    """
    for place in range(0, max(len(sessions), int(whole)), AT_ONCE):
        shown = tuple(sessions[place : place + AT_ONCE])
        yield SessionChanges(node=node, sessions=shown, whole=whole and place == 0)


def changes_event(changes: SessionChanges) -> bytes:
    return b"event: sessions\ndata: " + dump_json(plain(changes)) + b"\n\n"


# ── the stream ────────────────────────────────────────────────────────────────


@define(eq=False)
class SessionWatch:
    """A node's sessions at the last look: those that are live, and those that ended recently."""

    service: NodeService
    live: Found = field(factory=dict, init=False)
    ended: Found = field(factory=dict, init=False)
    next_s: float = field(default=-inf, init=False)  # the time of the next look

    def look(self) -> None:
        """Look at the sessions again if that is due."""
        began = trio.current_time()
        if began < self.next_s:
            return
        every = [*self.service.sessions(), *map(_of_capture, self.service.captures.list())]
        self.live = {each.session_id: each for each in every if each.outcome is None}
        self.ended = {each.session_id: each for each in every if each.outcome is not None}
        now = trio.current_time()
        self.next_s = now + max(LOOK_S, SHARE * (now - began))


def _of_capture(capture: CaptureStatus) -> LiveSessionStatus:
    return LiveSessionStatus(
        session_id=capture.session_id,
        task_id=capture.task_id,
        harness="capture",
        phase="run",
        turns=capture.turns,
        sampled_tokens=capture.sampled_tokens,
        sample_index=capture.sample_index,
    )


@define(eq=False)
class PendingChanges:
    """The changes that one reader was not sent yet, by node: whether they replace all that was sent before,
    and the last change of each session.
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
        """Take the waiting changes of one node, as events; none if nothing waits."""
        for node in self._nodes:
            whole, sessions = self._nodes.pop(node)
            return list(pieces(node, list(sessions.values()), whole=whole))
        return []


@define(eq=False, kw_only=True)
class LiveBody(AsyncIterator[bytes]):
    """One reader's body. Its tasks begin with the first piece and end with `aclose`, which Quart calls
    however the reader leaves. A node that cannot be reached any more has no sessions until it is reached
    again. `alone`: only this node's sessions are sent, because another node asks for them.
    """

    watch: SessionWatch
    others: OtherNodes
    follow: bool
    alone: bool = False
    _pending: PendingChanges = field(factory=PendingChanges, init=False)
    _taken: list[SessionChanges] = field(factory=list, init=False)
    _reading: dict[int, tuple[str, trio.CancelScope]] = field(factory=dict, init=False)  # by incarnation
    _over: set[int] = field(factory=set, init=False)  # nodes that were read to their end, with follow=false
    _scope: trio.CancelScope | None = field(default=None, init=False)
    _news: trio.Event = field(factory=trio.Event, init=False)
    _ended: bool = field(default=False, init=False)

    async def __anext__(self) -> bytes:
        if self._scope is None:
            await trio.lowlevel.checkpoint()
            self._scope = trio.CancelScope()
            self.others.nursery.start_soon(self._run, self._scope)
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
                nursery.start_soon(self._watch_own_sessions)
                if not self.alone:
                    await self._read_other_nodes(nursery)
            self._ended = True
            self._news.set()

    def _put(self, changes: SessionChanges) -> None:
        self._pending.put(changes)
        self._news.set()

    async def _watch_own_sessions(self) -> None:
        """Look at this node's sessions, again and again."""
        seen, node = SeenSessions(), self.watch.service.node_id
        while True:
            self.watch.look()
            whole, due = not seen.begun, self.watch.next_s
            found = seen.changes(self.watch.live, self.watch.ended)
            if found or whole:
                self._put(SessionChanges(node=node, sessions=tuple(found), whole=whole))
            if not self.follow:
                return
            await trio.sleep_until(due)

    async def _read_other_nodes(self, nursery: trio.Nursery) -> None:
        """Read every other live node; without `follow`, until each was read to its end."""
        while True:
            rows = {row.incarnation: row for row in await self.others.alive()}
            for incarnation in self._reading.keys() - rows.keys():
                name, scope = self._reading.pop(incarnation)
                scope.cancel()
                if name not in {row.facts.name for row in rows.values()}:
                    self._put(_nothing(name))
            for incarnation, row in rows.items():
                if incarnation not in self._reading:
                    scope = trio.CancelScope()
                    self._reading[incarnation] = row.facts.name, scope
                    nursery.start_soon(_within, scope, self._keep_reading, row)
            if not self.follow and self._over.issuperset(rows):
                return
            await trio.sleep(NODES_INTERVAL_S)

    async def _keep_reading(self, row: NodeRow) -> None:
        """Read a node; when its connection breaks, read it again."""
        failures = 0
        while True:
            began = trio.current_time()
            try:
                await self._read(row)
            # This also covers an address that is not valid, so that one node's row stops no other.
            except PolarnodeError:
                self._put(_nothing(row.facts.name))
            if not self.follow:
                self._over.add(row.incarnation)
                return
            failures = 0 if trio.current_time() - began > KEEP_ALIVE_S else failures + 1
            await trio.sleep(PAUSES.delay(failures))

    async def _read(self, row: NodeRow) -> None:
        decoder, path = Decoder(), PATH + query_string(follow=self.follow)
        async with self.others.link(row).stream(path, headers={PASSED_TO: row.facts.name}) as body:
            async for piece in body:
                for block in decoder.feed(piece):
                    if isinstance(block, Block):
                        self._put(evolve(read_answer(block.data, SessionChanges), node=row.facts.name))


async def _within(
    scope: trio.CancelScope, read_on: Callable[[NodeRow], Awaitable[None]], row: NodeRow
) -> None:
    with scope:
        await read_on(row)


def _nothing(node: str) -> SessionChanges:
    return SessionChanges(node=node, sessions=(), whole=True)


@frozen
class LiveSessionRoutes:
    """The handler."""

    service: NodeService
    others: OtherNodes
    watch: SessionWatch = field(init=False)

    @watch.default
    def _make_watch(self) -> SessionWatch:
        return SessionWatch(self.service)

    def rows(self) -> Iterator[RouteRow]:
        yield ("GET", PATH, self.stream)

    async def stream(self) -> Response:
        """Stream the sessions of all nodes, or only this node's if another node asks for them."""
        await trio.lowlevel.checkpoint()
        follow = read_query(request.args, "follow").follow
        try:
            alone = self.others.was_passed_on()
        except MisdirectedRequest as error:
            return pass_failure_response(error)
        return event_response(LiveBody(watch=self.watch, others=self.others, follow=follow, alone=alone))
