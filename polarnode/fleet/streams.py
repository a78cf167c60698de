"""One stream of events from all nodes: merged at byte level, with one position for all journals.

Invariants: an event's data is passed on as its node wrote it, and only its `id:` is the reader's position
over all journals; each journal's events keep their order; nothing is acknowledged to a consumer before it is
on that node's disk. A reader holds at most a page of each node, and a node that is slow or gone holds up
nobody: its stream is resumed where it broke, whenever it comes back.
"""

from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final
from urllib.parse import urlencode

import trio
from attrs import define, field, frozen
from quart import Response, request

from polarnode.api.exports import END, KEEP_ALIVE_S, check_format
from polarnode.api.query import FILTERS, Query, read_query
from polarnode.api.routes import Ack
from polarnode.api.service import NotFound, json_response
from polarnode.client.requests import part
from polarnode.client.scripts import Block, Decoder
from polarnode.client.values import ClientError, Unreachable
from polarnode.core.backoff import Backoff
from polarnode.core.codec.json import dump_json, structure
from polarnode.core.conversation import Json
from polarnode.core.errors import Conflict, Refused
from polarnode.core.positions import ALONE, Position
from polarnode.fleet.front import Front
from polarnode.fleet.members import Member
from polarnode.http.asgi import RouteRow, body_json
from polarnode.journal.journal import check_consumer

# of a node's events that wait for their reader: a node's own page, or one event
PAGE_BYTES: Final = 1 << 20
# of a node's events that wait for their reader, as a node's own page; or one event
PAUSES: Final = Backoff(first_s=0.1, longest_s=2.0)  # between tries to open a node's stream again
ENDED_S: Final = 0.5  # between looks whether a task has ended whose nodes have nothing more of it
PASSED: Final = ("consumer", "follow", "kinds", "arrays", "turns", "format", *FILTERS)


@define(eq=False)
class _Source:
    """A node's part of a reader's stream. `sent` is how many bytes of it the reader got."""

    member: Member
    waiting: deque[tuple[str, str, int, bytes]] = field(factory=deque)  # kind, journal, number, data
    size: int = 0
    sent: int = 0
    ended: bool = False
    room: trio.Event = field(factory=trio.Event)


@define(eq=False, kw_only=True)
class MergedStream(AsyncIterator[bytes]):
    """The stream of one reader. Its nodes are read by tasks of the front's nursery, until it is closed."""

    front: Front
    query: Query
    parameters: str
    position: Position
    read: dict[str, int] = field(factory=dict)  # by journal: the last number that came from its node
    _sources: dict[str, _Source] = field(factory=dict)
    _news: trio.Event = field(factory=trio.Event)
    _scope: trio.CancelScope = field(factory=trio.CancelScope)
    _begun: bool = False
    _thrown_away: set[str] = field(factory=set)
    _last_write: float = 0.0

    async def __anext__(self) -> bytes:
        if not self._begun:
            self._begun, self._last_write = True, trio.current_time()
            self.read = dict(self.position.parts)
            self.front.nursery.start_soon(self._run)
            return b": polarnode\n\n"
        while True:
            source = self._next()
            if source is not None:
                self._last_write = trio.current_time()
                return self._taken(source)
            if self._over():
                await self.aclose()
                raise StopAsyncIteration
            news = self._news
            with trio.move_on_at(self._last_write + KEEP_ALIVE_S):
                await news.wait()
            if trio.current_time() >= self._last_write + KEEP_ALIVE_S:
                self._last_write = trio.current_time()
                return b": keep-alive\n\n"

    async def aclose(self) -> None:
        """End the reading of the nodes."""
        self._scope.cancel()
        await trio.lowlevel.checkpoint()

    def _next(self) -> _Source | None:
        """The node whose events wait, and that had the fewest bytes."""
        able = [each for each in self._sources.values() if each.waiting]
        return min(able, key=lambda each: each.sent, default=None)

    def _taken(self, source: _Source) -> bytes:
        kind, journal, number, data = source.waiting.popleft()
        source.size -= len(data)
        source.sent += len(data)
        room, source.room = source.room, trio.Event()
        room.set()
        self.position = self.position.at(journal, number)
        head = f"event: {kind}\nid: {self.position.text}\ndata: ".encode()
        return b"".join((head, data, END))

    def _over(self) -> bool:
        return (
            not self.query.follow
            and all(each.ended for each in self._sources.values())
            and bool(self._sources)
        )

    # ── the nodes ─────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        """Read every node that there is, and those that come."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                while True:
                    self._mark_thrown_away()
                    for member in self.front.roster.members.values():
                        # by journal: a new one behind an old address is another source
                        if member.journal and member.journal not in self._sources:
                            source = self._sources[member.journal] = _Source(member)
                            nursery.start_soon(self._read, source, member.journal)
                    await self.front.changed.wait()

    def _mark_thrown_away(self) -> None:
        """A gap for each journal of the position that no node has any more."""
        roster = self.front.roster
        if not roster.known:
            return
        for journal, number in self.position.parts.items():
            if journal != ALONE and roster.of_journal(journal) is None and journal not in self._thrown_away:
                self._thrown_away.add(journal)
                body: dict[str, Json] = {
                    "seq": number,
                    "journal": journal,
                    "key": f"gap:{journal}-{number}",
                    "gap": {"after": number, "oldest": number + 1, "journal": journal},
                }
                source = self._sources[journal] = _Source(next(iter(roster.members.values())), ended=True)
                self._put(source, "gap", journal, number, dump_json(body))

    async def _read(self, source: _Source, journal: str) -> None:
        failures = 0
        while source.member.journal == journal:
            began = self.read.get(journal)
            try:
                await self._pass_on(source, journal)
                if not self.query.follow and await self._ended(source):
                    source.ended = True
                    self._wake()
                    return
                failures = 0
            except (Unreachable, ClientError):
                if not self.query.follow and source.member.state in ("gone", "left"):
                    source.ended = True  # it is read by whoever comes when it is back
                    self._wake()
                    return
            failures = 0 if self.read.get(journal) != began else failures + 1
            await trio.sleep(PAUSES.delay(failures))

    async def _pass_on(self, source: _Source, journal: str) -> None:
        """Read a node's stream until it ends or breaks."""
        after = self.read.get(journal)
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        path = f"/v1/trajectories/stream?{self.parameters}"
        async with source.member.link.stream(path, headers=headers) as pieces:
            decoder = Decoder()
            async for piece in pieces:
                for block in decoder.feed(piece):
                    if isinstance(block, Block):
                        await self._passed(source, journal, block)

    async def _passed(self, source: _Source, journal: str, block: Block) -> None:
        if block.id is None or not block.id.isdigit():  # an `error` event: the node ends the stream after it
            raise Unreachable(f"{source.member.name} could not go on with its stream")
        self._put(source, block.kind, journal, int(block.id), block.data)
        while source.size > PAGE_BYTES:
            await source.room.wait()

    def _put(self, source: _Source, kind: str, journal: str, number: int, data: bytes) -> None:
        source.waiting.append((kind, journal, number, data))
        source.size += len(data)
        self.read[journal] = number
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, trio.Event()
        news.set()

    async def _ended(self, source: _Source) -> bool:
        """Whether nothing more will come from a node: it has no more events, and the task has ended, if one
        is named. It may have moved here meanwhile.
        """
        if self.query.task_id is None:
            return True
        await trio.sleep(ENDED_S)
        path = f"/v1/fleet/tasks?{urlencode({'task_id': self.query.task_id})}"
        for _, answer in await self.front.ask_all("GET", path):
            rows = [] if isinstance(answer, Exception) else answer["tasks"]
            if any(row["role"] != "former" and row["open_places"] for row in rows):
                return False
        return True


# ── routes ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class StreamRoutes:
    """The handlers of the stream and of its consumers."""

    front: Front

    def rows(self) -> Iterator[RouteRow]:
        yield from (
            ("GET", "/v1/trajectories/stream", self.stream),
            ("POST", "/v1/trajectories/ack", self.acknowledge),
            ("GET", "/v1/consumers", self.consumers),
            ("DELETE", "/v1/consumers/<path:consumer>", self.forget_consumer),
        )

    async def stream(self) -> Response:
        """Every node's events from the reader's position on; its consumer's, where it names none."""
        await trio.lowlevel.checkpoint()
        after = request.headers.get("Last-Event-ID") or request.args.get("after")
        position = Position() if not after or after == "0" else Position.read(after, "?after")
        if ALONE in position.parts:
            raise Refused(
                "after is a node's number: give a fleet's own position, as its `id:` line has it",
                path="?after",
            )
        found = {name: value for name, value in request.args.items() if name != "after"}
        query = check_format(read_query(found, *PASSED))
        stream = MergedStream(front=self.front, query=query, parameters=urlencode(found), position=position)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return Response(stream, 200, headers, content_type="text/event-stream")

    async def acknowledge(self) -> Response:
        """Answered when it is on the disks of all nodes but those that are named as pending."""
        ack = structure(await body_json(), Ack, forbid_extra=True)
        position = Position.read(ack.id or "", "$.id")
        if ALONE in position.parts:
            raise Refused("id is a node's number: send the `id:` line of the fleet's stream", path="$.id")
        consumer, moved, pending = check_consumer(ack.consumer), dict[str, int](), list[str]()

        async def move(member: Member | None, journal: str, number: int) -> None:
            if member is None:  # thrown away, or not known yet
                pending.extend([] if self.front.roster.known else [journal])
                return
            try:
                body = {"consumer": consumer, "seq": number}
                answer = await member.link.call("POST", "/v1/trajectories/ack", value=body)
                moved[journal] = int(answer["position"])
            except (Unreachable, ClientError):
                pending.append(member.name)

        async with trio.open_nursery() as nursery:
            for journal, number in position.parts.items():
                nursery.start_soon(move, self.front.roster.of_journal(journal), journal, number)
        body: dict[str, Json] = {
            "consumer": consumer,
            "id": Position(moved).text,
            "pending": list[Json](sorted(pending)),
        }
        return json_response(body)

    async def consumers(self) -> Response:
        read_query(request.args)
        found: dict[str, dict[str, Any]] = {}
        for member, answer in await self.front.ask_all("GET", "/v1/consumers"):
            if not isinstance(answer, Exception):
                for each in answer["consumers"]:
                    _join(found.setdefault(each["consumer"], {}), each, member.journal)
        shown = [{**each, "position": Position(each["position"]).text} for _, each in sorted(found.items())]
        return json_response({"consumers": list[Json](shown)})

    async def forget_consumer(self, consumer: str) -> Response:
        read_query(request.args)
        answers = await self.front.ask_all("DELETE", f"/v1/consumers/{part(consumer)}")
        errors = [answer for _, answer in answers if isinstance(answer, ClientError)]
        if any(error.status == 409 for error in errors):
            raise Conflict(f"a stream of consumer {consumer!r} is open: end it first")
        if len(errors) == len(answers):
            raise NotFound(f"there is no consumer {consumer!r}: look at GET /v1/consumers")
        return json_response({"consumer": consumer, "forgotten": True})


def _join(whole: dict[str, Any], one: dict[str, Any], journal: str) -> None:
    """Add one node's word of a consumer to the fleet's."""
    whole.setdefault("consumer", one["consumer"])
    whole.setdefault("position", {})[journal] = one["position"]
    for name in ("behind_events", "behind_bytes", "missed"):
        whole[name] = whole.get(name, 0) + one[name]
    for name in ("moved", "heard", "connected"):
        whole[name] = max(whole.get(name, 0), one[name])
    whole["holds"] = whole.get("holds", False) or one["holds"]
