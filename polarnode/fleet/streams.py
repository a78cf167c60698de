"""The stream of a fleet: the events of all nodes in one body, acknowledgements for all, and their consumers.

Events are relayed as bytes: only the `id:` line is written anew, as the position in every journal. Laws: the
key and the bytes of an event do not depend on who relays it; each journal's events come in its order; nodes
take turns by bytes, and one that is slow, stopped or gone holds up nobody and is read on when it is back.
Nothing is kept here: a reader that reconnects, to this front or another one, goes on where its `id:` says. A
journal that its position does not name is read from the consumer's position there, or from its oldest event.
Never `yield` inside a cancel scope or nursery: a body is an iterator whose tasks run in the front's nursery.
"""

import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, Protocol, TypeVar

import trio
from attrs import define, field, frozen
from quart import Response, request

from polarnode.api.exports import KEEP_ALIVE_S, WRITE_BYTES, check_format
from polarnode.api.query import FILTERS, Ack, read_query
from polarnode.api.service import NotFound, json_response
from polarnode.client.requests import Acknowledged, part, query_string
from polarnode.client.scripts import MOST_BYTES, PAUSES
from polarnode.client.values import ClientError, Unreachable, read_answer
from polarnode.core.codec.json import dump_json, plain, structure
from polarnode.core.conversation import Json
from polarnode.core.errors import Busy, Conflict, PolarnodeError, Refused
from polarnode.core.fleet import CopyRow, CopyRows
from polarnode.core.positions import ALONE, MOST_NUMBER, Position
from polarnode.core.status import Consumer, Consumers
from polarnode.fleet.link import Link
from polarnode.http.asgi import GREETING, KEEP_ALIVE, RouteRow, body_json, event_response
from polarnode.journal.retention import MOST
from polarnode.journal.values import check_consumer

logger = logging.getLogger(__name__)

# ── what is delivered next ────────────────────────────────────────────────────────────

END: Final = b"\n\n"
# bytes of a node's events that wait for their turn, besides the last one: 64 nodes with events of 300 kB are
# below 40 MB for a reader that stands still
PAGE: Final = 256 << 10
TURN: Final = 64 << 10  # bytes that a node sends before the next one's turn: fair among unlike events


@frozen
class RelayedEvent:
    """One event of a node: its kind, its number, and its line of data without the line end."""

    kind: bytes
    number: int
    data: bytes


@define(eq=False)
class Blocks:
    """Cuts a node's body into events. Comments are dropped, and bytes after the last blank line."""

    _held: bytearray = field(factory=bytearray, init=False)
    _scanned: int = field(default=0, init=False)  # no event ends before this index

    def feed(self, data: bytes) -> Iterator[RelayedEvent]:
        """Yield the events that are complete. Raises Unreachable for an `error` event, and for what is no
        event.
        """
        self._held += data
        while (end := self._held.find(END, self._scanned)) >= 0:
            with memoryview(self._held) as view:
                whole = bytes(view[:end])
            del self._held[: end + len(END)]
            self._scanned = 0
            if whole and not whole.startswith(b":"):
                yield _block(whole)
        self._scanned = max(0, len(self._held) - 1)
        if len(self._held) > MOST_BYTES:
            raise Unreachable(f"an event is larger than {MOST_BYTES >> 20} MiB: is this polarnode?")


def _block(whole: bytes) -> RelayedEvent:
    head, found, data = whole.partition(b"\ndata: ")
    lines = dict(line.split(b": ", 1) for line in head.split(b"\n") if b": " in line)
    if lines.get(b"event") == b"error":
        raise Unreachable(f"it could not continue its stream: {data[:300].decode(errors='replace')}")
    number = lines.get(b"id", b"")
    if not found or not number.isdigit() or b"event" not in lines:
        raise Unreachable("an event of its stream cannot be read: is this polarnode?")
    return RelayedEvent(lines[b"event"], int(number), data)


@define(eq=False)
class Merge:
    """The events of all nodes that wait for one reader, and the `position` of this reader after those it was
    given.
    """

    position: Position = field(factory=Position)
    _queues: dict[str, deque[RelayedEvent]] = field(factory=dict, init=False)
    _sizes: dict[str, int] = field(factory=dict, init=False)
    _credit: dict[str, int] = field(factory=dict, init=False)
    _turns: deque[str] = field(factory=deque, init=False)  # journals with events, the next one first

    def put(self, journal: str, block: RelayedEvent) -> None:
        """Add an event; see `full` for when to wait."""
        queue = self._queues.setdefault(journal, deque())
        if not queue:
            self._turns.append(journal)
            self._credit[journal] = 0
        queue.append(block)
        self._sizes[journal] = self._sizes.get(journal, 0) + len(block.data)

    def full(self, journal: str) -> bool:
        return self._sizes.get(journal, 0) >= PAGE

    def take(self) -> tuple[str, bytes, bytes] | None:
        """The next event, as its journal, the lines before its data, and its data; None while none waits."""
        while self._turns:
            journal = self._turns[0]
            queue = self._queues[journal]
            size = len(queue[0].data)
            if self._credit[journal] < size and len(self._turns) > 1:
                self._credit[journal] += TURN
                self._turns.rotate(-1)
                continue
            block = queue.popleft()
            self._credit[journal] = max(0, self._credit[journal] - size)
            self._sizes[journal] -= size
            if not queue:
                self._turns.popleft()
            self.position = self.position.at(journal, block.number)
            head = b"event: %b\nid: %b\ndata: " % (block.kind, self.position.text.encode())
            return journal, head, block.data
        return None

    def forget(self, journal: str) -> None:
        """Leave a journal out of the position, when its last event has been taken."""
        if not self._queues.get(journal):
            parts = self.position.parts
            self.position = Position({each: parts[each] for each in parts if each != journal})


def lost(journal: str, after: int) -> RelayedEvent:
    """A gap: no node of the fleet has this journal any more."""
    body: dict[str, Json] = {
        "seq": 0,
        "journal": journal,
        "key": f"gap:{journal}:{after}",
        "gap": {"after": after, "oldest": 1},
    }
    return RelayedEvent(b"gap", 0, dump_json(body))


def still_open(rows: Collection[CopyRow]) -> bool:
    """Whether a task has events to come, as all nodes that were reached know it: its owner has not finished
    it, or only its second home was reached.
    """
    kept = [row for row in rows if row.role != "former"]
    owner = max(kept, key=lambda row: (row.epoch, row.role == "home"), default=None)
    return owner is not None and not (owner.role == "home" and owner.finished)


# ── a body ────────────────────────────────────────────────────────────────────

ROSTER_S: Final = 0.2  # between looks at the roster: a node that joined is read from then on
ROUND_S: Final = 1.0  # before the nodes are read again for a task that moves
BEGUN: Final = b"id: %b\n\n"  # after it, where a reader begins at the newest event


class Nodes(Protocol):
    """The nodes of the fleet, as its front knows them (`members.Roster`)."""

    def readable(self) -> Mapping[str, Link]:
        """The nodes that are not gone, by journal."""

    def journals(self) -> Collection[str] | None:
        """The journals of all nodes, gone ones too; None while a node has not named its own."""

    @property
    def settled(self) -> bool:
        """Whether every node has answered, or is gone."""

    def name_of(self, journal: str) -> str:
        """The name of the node that has a journal."""

    def newest(self) -> Mapping[str, int]:
        """The number of the last event of each node, as it last reported it, by journal."""


@define(eq=False)
class NodeReaders:
    """The tasks of one reader's body that read nodes: one for each node that is there, and no other."""

    _reading: dict[str, tuple[Link, trio.CancelScope]] = field(factory=dict, init=False)

    def look(
        self,
        nodes: Mapping[str, Link],
        read_on: Callable[[str, Link], Awaitable[None]],
        nursery: trio.Nursery,
        *,
        done: Collection[str] = (),
    ) -> list[str]:
        """Begin to read, with `read_on`, the nodes that came, but those that are `done`, and end it for those
        that went, or are reached by another link now; the journals of these.
        """
        gone = [journal for journal, (link, _) in self._reading.items() if nodes.get(journal) is not link]
        for journal in gone:
            self._reading.pop(journal)[1].cancel()
        for journal, link in nodes.items():
            if journal not in self._reading and journal not in done:
                scope = trio.CancelScope()
                self._reading[journal] = link, scope
                nursery.start_soon(_read_within, scope, read_on, journal, link)
        return gone

    def forget(self, journal: str) -> None:
        """It has ended by itself; it may be read again."""
        del self._reading[journal]


async def _read_within(
    scope: trio.CancelScope, read_on: Callable[[str, Link], Awaitable[None]], journal: str, link: Link
) -> None:
    with scope:
        await read_on(journal, link)


@define(eq=False, kw_only=True)
class Merged(AsyncIterator[bytes]):
    """One reader's body. Its tasks begin with the first piece and end with `aclose`, which Quart calls
    however the reader leaves.
    """

    roster: Nodes
    nursery: trio.Nursery
    path: str
    start: Position
    follow: bool = True
    task_id: str | None = None
    announced: bool = False  # whether the reader is sent where it begins
    _merge: Merge = field(factory=Merge, init=False)
    _seen: dict[str, int] = field(factory=dict, init=False)  # the last number read, by journal
    _readers: NodeReaders = field(factory=NodeReaders, init=False)
    _done: set[str] = field(factory=set, init=False)  # whose streams have ended, with follow=false
    _room: dict[str, trio.Event] = field(factory=dict, init=False)
    _pieces: Iterator[bytes] = field(factory=lambda: iter(()), init=False)
    _scope: trio.CancelScope | None = field(default=None, init=False)
    _news: trio.Event = field(factory=trio.Event, init=False)
    _ended: bool = field(default=False, init=False)

    async def __anext__(self) -> bytes:
        if self._scope is None:
            self._scope = trio.CancelScope()
            self._seen = {each: number for each, number in self.start.parts.items() if each != ALONE}
            self._merge.position = Position(dict(self._seen))
            self.nursery.start_soon(self._run, self._scope)
            begun = BEGUN % self._merge.position.text.encode() if self.announced else b""
            return GREETING + begun
        while True:
            piece = next(self._pieces, None) or self._take()
            if piece is not None:
                await trio.lowlevel.checkpoint()
                return piece
            if self._ended:
                raise StopAsyncIteration
            with trio.move_on_after(KEEP_ALIVE_S) as silence:
                await self._news.wait()
            if silence.cancelled_caught:
                return KEEP_ALIVE

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._scope is not None:
            self._scope.cancel()

    def _take(self) -> bytes | None:
        """The first piece of the next event; `_pieces` has the others."""
        found = self._merge.take()
        if found is None:
            self._news = trio.Event()
            return None
        journal, head, data = found
        if not self._merge.full(journal) and journal in self._room:
            self._room.pop(journal).set()
        if len(data) <= WRITE_BYTES:
            return b"".join((head, data, END))
        with_end = (data[place : place + WRITE_BYTES] for place in range(0, len(data), WRITE_BYTES))
        self._pieces = iter((*with_end, END))
        return head

    async def _run(self, scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                while not await self._over():
                    self._look(nursery)
                    await trio.sleep(ROSTER_S)
                nursery.cancel_scope.cancel()
            self._ended = True
            self._news.set()

    async def _over(self) -> bool:
        """Whether there is nothing more to come, which only a reader with follow=false wants to know."""
        nodes = self.roster.readable()
        if self.follow or not nodes or not self.roster.settled or not self._done.issuperset(nodes):
            return False
        if self.task_id is None or not await self._moves(self.task_id, nodes):
            return True
        self._done.clear()
        await trio.sleep(ROUND_S)
        return False

    async def _moves(self, task_id: str, nodes: Mapping[str, Link]) -> bool:
        """Whether the reader's task is between two homes: its events come from the next one."""
        path = "/v1/fleet/tasks" + query_string(task_id=task_id)
        found, failed = await everywhere(nodes, dict.fromkeys(nodes, ("GET", path, None)), CopyRows)
        return bool(failed) or still_open([row for each in found.values() for row in each.tasks])

    def _look(self, nursery: trio.Nursery) -> None:
        """Read the nodes that are there, and leave out journals that no node has."""
        self._readers.look(self.roster.readable(), self._read_on, nursery, done=self._done)
        known = self.roster.journals()
        if known is not None:
            for journal in [each for each in self._merge.position.parts if each not in known]:
                self._pass(journal)

    def _pass(self, journal: str) -> None:
        """Leave out a journal that no node has. A reader that comes with its number is sent a gap."""
        after = self._seen.pop(journal, 0)
        if after and self.start.parts.get(journal) == after:
            self._put(journal, lost(journal, after))
        self._merge.forget(journal)

    def _put(self, journal: str, block: RelayedEvent) -> None:
        self._merge.put(journal, block)
        self._news.set()

    async def _read_on(self, journal: str, link: Link) -> None:
        """Read a node's events, again and again as its connection breaks."""
        failures = 0
        while True:
            before = self._seen.get(journal)
            try:
                await self._read(journal, link)
                why = "it ended the stream"
                if not self.follow:
                    self._done.add(journal)
                    self._readers.forget(journal)
                    return
            except (Unreachable, ClientError) as error:
                why = str(error)
            failures = 0 if self._seen.get(journal) != before else failures + 1
            if failures <= 1:
                logger.info("the stream of node %s broke and is opened again: %s", link.url, why)
            await trio.sleep(PAUSES.delay(failures))

    async def _read(self, journal: str, link: Link) -> None:
        after = self._seen.get(journal, self.start.parts.get(ALONE))
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        blocks = Blocks()
        async with link.stream(self.path, headers=headers) as pieces:
            async for piece in pieces:
                for block in blocks.feed(piece):
                    self._put(journal, block)
                    self._seen[journal] = block.number
                    if self._merge.full(journal):
                        await self._room.setdefault(journal, trio.Event()).wait()


# ── all nodes at once ─────────────────────────────────────────────────────────

T = TypeVar("T")
Call = tuple[str, str, object]  # method, path, and what is sent as JSON

# for a node's answer: its disk takes a commit in milliseconds, and a stopped node must not hold up a reader
ASK_S: Final = 2.0


async def everywhere(
    nodes: Mapping[str, Link], calls: Mapping[str, Call], shape: type[T]
) -> tuple[dict[str, T], dict[str, PolarnodeError]]:
    """What nodes answer to a call for each, by journal, and what was wrong with the others."""
    found: dict[str, T] = {}
    failed: dict[str, PolarnodeError] = {}

    async def one(journal: str, method: str, path: str, value: object) -> None:
        failed[journal] = Unreachable(f"{nodes[journal].url} does not answer within {ASK_S:g} s")
        try:
            with trio.move_on_after(ASK_S):
                answer = await nodes[journal].ask(method, path, value=value, timeout_s=ASK_S)
                if answer.status >= 300:
                    raise answer.error
                found[journal] = read_answer(answer.body, shape)
                del failed[journal]
        except (Unreachable, ClientError) as error:
            failed[journal] = error

    async with trio.open_nursery() as nursery:
        for journal, call in calls.items():
            nursery.start_soon(one, journal, *call)
    return found, failed


def _raise_refusals(failed: Mapping[str, PolarnodeError]) -> None:
    """Raise what a node refuses: sent again, it would be refused again."""
    for error in failed.values():
        if isinstance(error, ClientError) and error.status == 409:
            raise Conflict(str(error))
        if isinstance(error, ClientError) and error.status == 400:
            raise Refused(str(error), path=error.path)


def joined(records: Mapping[str, Consumer]) -> Consumer:
    """One consumer, as the journals know it."""
    every = tuple(records.values())
    return Consumer(
        consumer=every[0].consumer,
        position=Position({journal: int(each.position) for journal, each in records.items()}).text,
        behind_events=sum(each.behind_events for each in every),
        behind_bytes=sum(each.behind_bytes for each in every),
        missed=sum(each.missed for each in every),
        moved=max(each.moved for each in every),
        last_seen=max(each.last_seen for each in every),
        connected=max(each.connected for each in every),  # one stream here is one at each node
        holds=any(each.holds for each in every),
    )


# ── routes ────────────────────────────────────────────────────────────────────

# that a node's confirmation is remembered: it saves a request a node for each acknowledgement, and a consumer
# that another front deleted is created again after it
CONFIRMED_S: Final = 60.0


@define(eq=False, kw_only=True)
class StreamRoutes:
    """The handlers. Bodies of streams run in `nursery`."""

    roster: Nodes
    nursery: trio.Nursery
    # the numbers that nodes have on disk, by consumer and journal
    _confirmed: dict[str, dict[str, int]] = field(factory=dict, init=False)
    _since: float = field(default=0.0, init=False)

    def rows(self) -> Iterator[RouteRow]:
        """The rows of the front's table."""
        yield from (
            ("GET", "/v1/trajectories/stream", self.stream),
            ("POST", "/v1/trajectories/ack", self.acknowledge),
            ("GET", "/v1/consumers", self.consumers),
            ("DELETE", "/v1/consumers/<path:consumer>", self.forget_consumer),
        )

    async def stream(self) -> Response:
        await trio.lowlevel.checkpoint()
        given = dict(request.args.items())
        after = given.pop("after", None)
        options = ("consumer", "after", "begin", "follow", "kinds", "arrays", "turns", "format", *FILTERS)
        query = check_format(read_query(given, *options))
        # before `after`: a browser repeats the first URL and adds the header
        last = request.headers.get("Last-Event-ID")
        start = _position(last, "?Last-Event-ID") if last else _position(after or "v", "?after")
        if after is not None and query.begin == "newest":
            raise Refused("begin cannot go with after: send one of them", path="?begin")
        newest = query.begin == "newest" and not last
        if newest and (query.consumer is None or await self._is_new(query.consumer)):
            start = await self._newest()
        given.pop("begin", None)  # nodes are sent numbers
        body = Merged(
            roster=self.roster,
            nursery=self.nursery,
            path=request.path + query_string(**given),
            start=start,
            follow=query.follow,
            task_id=query.task_id,
            announced=newest,
        )
        return event_response(body)

    async def _is_new(self, consumer: str) -> bool:
        """Whether no node knows a consumer. Then it is created on each, after the node's newest event. Raises
        Busy where a node does not answer: it may know the consumer.
        """
        known, failed = await self._consumers()
        if consumer in known:
            return False
        nodes = self.roster.readable()
        if not failed:
            # a number beyond a journal's last event is taken as that event's
            body = {"consumer": consumer, "seq": MOST_NUMBER}
            calls: dict[str, Call] = dict.fromkeys(nodes, ("POST", "/v1/trajectories/ack", body))
            _, failed = await everywhere(nodes, calls, Acknowledged)
            _raise_refusals(failed)
        if failed:
            raise Busy(f"a node does not answer: {next(iter(failed.values()))}", retry_after=ASK_S)
        return True

    async def _newest(self) -> Position:
        """The last event of each node now; of one that does not answer, as it last reported it."""
        nodes = self.roster.readable()
        calls: dict[str, Call] = dict.fromkeys(nodes, ("GET", "/v1/status", None))
        found, _ = await everywhere(nodes, calls, dict)
        now = {journal: int(each["journal"]["last_seq"]) for journal, each in found.items()}
        return Position({**self.roster.newest(), **now})

    async def acknowledge(self) -> Response:
        """Answer when every node that is reached has it on disk; the others are `pending`."""
        ack = structure(await body_json(), Ack, forbid_extra=True)
        consumer, given = check_consumer(ack.consumer), ack.position
        nodes, known = self.roster.readable(), self.roster.journals()
        wanted = given.parts if ALONE not in _checked(given, "$.id").parts else dict.fromkeys(nodes, 0)
        if known is not None:  # a journal that nobody has any more keeps nothing for anybody
            wanted = {journal: wanted[journal] for journal in wanted if journal in known}
        confirmed = self._confirmed_of(consumer)
        news = [each for each in wanted if each in nodes and confirmed.get(each, -1) < wanted[each]]
        path = "/v1/trajectories/ack"
        calls: dict[str, Call] = {
            each: ("POST", path, {"consumer": consumer, "seq": wanted[each]}) for each in news
        }
        found, failed = await everywhere(nodes, calls, Acknowledged)
        _raise_refusals(failed)
        for journal, answer in found.items():
            confirmed[journal] = max(answer.position or 0, confirmed.get(journal, 0))
        reached = {each: confirmed[each] for each in wanted if confirmed.get(each, -1) >= wanted[each]}
        # an acknowledgement beyond a journal's last event is taken up to it
        reached |= {each: confirmed[each] for each in found}
        answer = Acknowledged(
            id=Position(reached).text,
            pending=tuple(self.roster.name_of(each) for each in wanted if each not in reached),
        )
        return json_response({"consumer": consumer, **plain(answer)})

    def _confirmed_of(self, consumer: str) -> dict[str, int]:
        if trio.current_time() > self._since + CONFIRMED_S or len(self._confirmed) > MOST:
            self._since = trio.current_time()
            self._confirmed.clear()
        return self._confirmed.setdefault(consumer, {})

    async def consumers(self) -> Response:
        read_query(request.args)
        found, failed = await self._consumers()
        every: list[Json] = [plain(joined(each)) for each in found.values()]
        return json_response({"consumers": every, "pending": self._names(failed)})

    def _names(self, journals: Iterable[str]) -> list[Json]:
        return [self.roster.name_of(each) for each in sorted(journals)]

    async def _consumers(self) -> tuple[dict[str, dict[str, Consumer]], dict[str, PolarnodeError]]:
        """Every consumer, by name and journal, and what was wrong with nodes that do not answer."""
        nodes = self.roster.readable()
        calls: dict[str, Call] = dict.fromkeys(nodes, ("GET", "/v1/consumers", None))
        answers, failed = await everywhere(nodes, calls, Consumers)
        found: dict[str, dict[str, Consumer]] = {}
        for journal, answer in answers.items():
            for each in answer.consumers:
                found.setdefault(each.consumer, {})[journal] = each
        return found, failed

    async def forget_consumer(self, consumer: str) -> Response:
        """Delete a consumer on every node, or on none: where it stayed, it would read on in the middle."""
        read_query(request.args)
        known, missing = await self._consumers()
        if missing:
            raise Busy(f"a node does not answer: {next(iter(missing.values()))}", retry_after=ASK_S)
        whose = known.get(consumer, {})
        if any(each.connected for each in whose.values()):
            raise Conflict(f"a stream of consumer {consumer!r} is open: end it first")
        if not whose:
            raise NotFound(f"there is no consumer {consumer!r}: look at GET /v1/consumers")
        call = ("DELETE", f"/v1/consumers/{part(consumer)}", None)
        _, failed = await everywhere(self.roster.readable(), dict.fromkeys(whose, call), dict)
        self._confirmed.pop(consumer, None)
        _raise_refusals(failed)
        return json_response({"consumer": consumer, "forgotten": True, "pending": self._names(failed)})


def _position(text: str, path: str) -> Position:
    return _checked(Position.read(text, path), path)


def _checked(position: Position, path: str) -> Position:
    """A position that a fleet has: any vector, or 0 for the oldest event of every journal."""
    if position.parts.get(ALONE, 0):
        raise Refused(
            f"{path.lstrip('?$.')} is a node's number: send the `id:` line of this fleet's stream, or 0",
            path=path,
        )
    return position
