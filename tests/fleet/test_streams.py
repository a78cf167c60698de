"""The stream of a fleet: every event once and in its journal's order over broken connections, acknowledgements
that join, and nodes that hold up nobody. The nodes are in memory; time is virtual.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from itertools import count, cycle
from typing import Any

import pytest
import trio
import trio.testing
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st
from quart_trio import QuartTrio

from polarnode.api.service import answer_error
from polarnode.client.scripts import Block as Received
from polarnode.client.scripts import Decoder, read_event
from polarnode.client.values import Event, Unreachable
from polarnode.core.errors import PolarnodeError
from polarnode.core.fleet import CopyRow, Epoch
from polarnode.core.positions import Position
from polarnode.fleet.link import NodeAnswer
from polarnode.fleet.streams import PAGE, Blocks, Merge, Merged, RelayedEvent, StreamRoutes, still_open

# ── nodes in memory ───────────────────────────────────────────────────────────


def name(number: int) -> str:
    return f"j{number:016x}"


@define(eq=False)
class FakeNode:
    """A journal that is read as a node's is. `chop` gives the sizes of the pieces, `cuts` the bytes after
    which connections break.
    """

    journal: str
    sizes: list[int] = field(factory=list)
    chop: Iterator[int] = field(factory=lambda: count(1000, 0))
    cuts: list[int] = field(factory=list)
    acked: dict[str, int] = field(factory=dict)
    gone: bool = False
    stopped: bool = False
    url: str = "http://node"
    opened: int = 0
    given: int = 0
    grown: trio.Event = field(factory=trio.Event)

    def data(self, seq: int) -> bytes:
        body = {"seq": seq, "journal": self.journal, "key": f"task:{self.journal}-{seq}"}
        return json.dumps({**body, "task": "x" * self.sizes[seq - 1]}, separators=(",", ":")).encode()

    def add(self, *sizes: int) -> None:
        self.sizes += sizes
        self.grown.set()
        self.grown = trio.Event()

    @asynccontextmanager
    async def stream(self, path: str, *, headers: Mapping[str, str]) -> AsyncIterator[AsyncIterator[bytes]]:
        await trio.lowlevel.checkpoint()
        self.opened += 1
        if self.gone:
            raise Unreachable("gone")
        consumer = path.partition("consumer=")[2].partition("&")[0]
        if consumer:
            self.acked.setdefault(consumer, 0)
        seen = int(headers.get("Last-Event-ID", self.acked.get(consumer, 0)))
        async with aclosing(self._pieces(seen, follow="follow=false" not in path)) as pieces:
            yield pieces

    async def _pieces(self, seen: int, *, follow: bool) -> AsyncGenerator[bytes, None]:
        left = self.cuts.pop() if self.cuts else None
        yield b": polarnode\n\n"
        while follow or seen < len(self.sizes):
            if self.stopped:
                await trio.sleep_forever()
            if seen >= len(self.sizes):
                with trio.move_on_after(8):
                    await self.grown.wait()
                yield b": keep-alive\n\n"
                continue
            seen += 1
            self.given = seen
            whole = b"event: task\nid: %d\ndata: %b\n\n" % (seen, self.data(seen))
            place = 0
            while place < len(whole):
                size = next(self.chop)
                piece = whole[place : place + size]
                place += size
                if left is not None and (left := left - len(piece)) <= 0:
                    raise Unreachable("cut")
                await trio.lowlevel.checkpoint()
                yield piece

    async def ask(self, method: str, path: str, *, value: Any = None, timeout_s: float) -> NodeAnswer:
        await trio.lowlevel.checkpoint()
        if self.gone:
            raise Unreachable("gone")
        if self.stopped:
            await trio.sleep_forever()
        status, body = 200, self._answer(method, path, value)
        return NodeAnswer(status=status, headers={}, body=json.dumps(body).encode())

    def _answer(self, method: str, path: str, value: Any) -> Any:
        if path == "/v1/trajectories/ack":
            whose, seq = value["consumer"], min(value["seq"], len(self.sizes))
            self.acked[whose] = max(seq, self.acked.get(whose, 0))
            return {"position": self.acked[whose], "id": str(self.acked[whose]), "pending": []}
        if path.startswith("/v1/fleet/tasks"):
            return {"tasks": []}
        if path == "/v1/status":
            return {"journal": {"last_seq": len(self.sizes)}}
        if method == "DELETE":
            return {"forgotten": self.acked.pop(path.rpartition("/")[2], None) is not None}
        return {"consumers": [{"consumer": each, "position": at} for each, at in self.acked.items()]}


@define(eq=False)
class FakeRoster:
    nodes: dict[str, Any]
    removed: set[str] = field(factory=set)

    def readable(self) -> Mapping[str, Any]:
        return {each: node for each, node in self.nodes.items() if each not in self.removed}

    def journals(self) -> Collection[str] | None:
        return set(self.nodes) - self.removed

    @property
    def settled(self) -> bool:
        return True

    def name_of(self, journal: str) -> str:
        return journal

    def newest(self) -> Mapping[str, int]:
        return {each: len(node.sizes) for each, node in self.nodes.items()}


@define(eq=False)
class Front:
    """A front in memory: its app, and readers of its stream."""

    roster: FakeRoster
    app: QuartTrio
    streams: StreamRoutes
    nursery: trio.Nursery

    async def read(self, *, most: int, query: str = "", last: str | None = None) -> list[Event]:
        """At most so many events; all with follow=false."""
        headers = {} if last is None else {"Last-Event-ID": last}
        found: list[Event] = []
        decoder = Decoder()
        async with self.app.test_request_context("/v1/trajectories/stream" + query, headers=headers):
            answer = await self.streams.stream()
            body = answer.response.iter
            try:
                with trio.fail_after(100):  # virtual seconds
                    while len(found) < most:
                        for each in decoder.feed(await anext(body)):
                            found += [read_event(each)] if isinstance(each, Received) else []
            except StopAsyncIteration:
                pass
            finally:
                await body.aclose()
        return found[:most]

    async def ack(self, consumer: str, position: Position | str) -> dict[str, Any]:
        text = position if isinstance(position, str) else position.text
        answer = await self.app.test_client().post(
            "/v1/trajectories/ack", json={"consumer": consumer, "id": text}
        )
        found = json.loads(await answer.get_data())
        return {"status": answer.status_code, **found}


@asynccontextmanager
async def front(*nodes: FakeNode) -> AsyncIterator[Front]:
    roster = FakeRoster({each.journal: each for each in nodes})
    app = QuartTrio("front")
    app.register_error_handler(PolarnodeError, answer_error)
    async with trio.open_nursery() as nursery:
        streams = StreamRoutes(roster=roster, nursery=nursery)
        for method, path, handler in streams.rows():
            app.add_url_rule(path, f"{method} {path}", handler, methods=[method])
        yield Front(roster, app, streams, nursery)
        nursery.cancel_scope.cancel()


def in_virtual_time(work: Callable[[], Awaitable[None]]) -> None:
    trio.run(work, clock=trio.testing.MockClock(autojump_threshold=0))


# ── laws ──────────────────────────────────────────────────────────────────────

sizes = st.lists(st.integers(0, 3000), max_size=12)


@st.composite
def nodes(draw: st.DrawFn) -> FakeNode:
    pieces = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=6))
    return FakeNode(
        "",
        draw(sizes),
        chop=cycle(pieces),
        cuts=draw(st.lists(st.integers(1, 20_000), max_size=4)),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(nodes(), min_size=1, max_size=4), st.lists(st.integers(1, 10), max_size=4), st.booleans())
def test_readers_that_resume_get_every_event_once_and_in_order(
    made: list[FakeNode], visits: list[int], other_front: bool
) -> None:
    for number, node in enumerate(made):
        node.journal = name(number)

    async def run() -> None:
        found: list[Event] = []
        async with front(*made) as one, front(*made) as two:
            last = None
            for turn, most in enumerate(visits):
                chosen = two if other_front and turn % 2 else one
                left = sum(len(node.sizes) for node in made) - len(found)
                found += await chosen.read(most=min(most, left), last=last)
                last = found[-1].id if found else None
            found += await one.read(most=10_000, query="?follow=false", last=last)
        for node in made:
            ours = [each for each in found if each.journal == node.journal]
            assert [each.seq for each in ours] == [*range(1, len(node.sizes) + 1)]
            assert [each.key for each in ours] == [
                f"task:{node.journal}-{seq + 1}" for seq in range(len(ours))
            ]
        position = Position()
        for each in found:  # each `id:` is the one before with one journal's number replaced
            position = position.at(each.journal, each.seq)
            assert each.position == position

    in_virtual_time(run)


vectors = st.dictionaries(st.integers(0, 4).map(name), st.integers(0, 9)).map(Position)


@settings(max_examples=60, deadline=None)
@given(st.lists(vectors, max_size=6), st.sets(st.integers(0, 3)), st.integers(0, 10**6))
def test_acknowledgements_join_and_settle_no_more_than_they_name(
    sent: list[Position], away: set[int], order: int
) -> None:
    made = [FakeNode(name(number), [1] * 5, gone=number in away) for number in range(4)]

    async def run() -> None:
        async with front(*made) as one, front(*made) as two:
            for turn, each in enumerate(sent + sent[::-1]):
                answer = await (two if order >> turn & 1 else one).ack("trainer", each)
                assert answer["status"] == 200
                assert answer["position"] is None
                # the journal 4 is nobody's: it keeps nothing
                assert set(answer["pending"]) == {name(number) for number in away} & set(each.parts)
                reached = Position.read(answer["id"])
                assert set(reached.parts) == set(each.parts) - {name(4)} - set(answer["pending"])
        for number, node in enumerate(made):
            told = [each.parts[name(number)] for each in sent if name(number) in each.parts]
            if number in away or not told:
                assert node.acked == {}
            else:
                assert node.acked == {"trainer": min(5, max(told))}

    in_virtual_time(run)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4 * PAGE)), max_size=40))
def test_nodes_take_turns_by_bytes_and_lose_nothing(events: list[tuple[int, int]]) -> None:
    merge = Merge()
    for number, (node, size) in enumerate(events):
        merge.put(name(node), RelayedEvent(b"task", number + 1, b"x" * size))
    taken = []
    while (found := merge.take()) is not None:
        taken.append((found[0], len(found[2])))
    for node in range(4):
        assert [size for whose, size in taken if whose == name(node)] == [
            size for whose, size in events if whose == node
        ]
        assert not merge.full(name(node))


def test_a_node_of_large_events_leaves_as_many_bytes_to_the_others() -> None:
    merge = Merge()
    for number in range(1, 41):
        merge.put(name(1), RelayedEvent(b"task", number, b"x" * PAGE))
    for number in range(1, 401):
        merge.put(name(2), RelayedEvent(b"task", number, b"x" * (PAGE // 10)))
    given_to = {name(1): 0, name(2): 0}
    for _ in range(220):
        found = merge.take()
        assert found is not None
        given_to[found[0]] += len(found[2])
        assert abs(given_to[name(1)] - given_to[name(2)]) <= 3 * PAGE


@given(st.binary(max_size=400), st.integers(1, 50))
def test_whatever_a_node_sends_is_events_or_unreachable(data: bytes, size: int) -> None:
    blocks = Blocks()
    try:
        for place in range(0, len(data), size):
            assert all(b"\n\n" not in each.data for each in blocks.feed(data[place : place + size]))
    except Unreachable:
        pass


# ── nodes that are stopped, gone, new or lost ─────────────────────────────────────────


async def test_a_dead_node_holds_up_nobody_and_is_read_on_in_mid_stream(autojump_clock: Any) -> None:
    quick, dead = FakeNode(name(1), [10] * 3), FakeNode(name(2), [10] * 2, gone=True)
    async with front(quick, dead) as fleet, trio.open_nursery() as nursery:
        found: list[Event] = []

        async def read() -> None:
            found.extend(await fleet.read(most=6, query="?consumer=trainer"))

        nursery.start_soon(read)
        await trio.sleep(20)
        assert quick.opened == 1
        dead.gone = False
        await trio.sleep(6)
        quick.add(10)
    assert sorted((each.journal, each.seq) for each in found) == [
        *((name(1), seq) for seq in (1, 2, 3, 4)),
        *((name(2), seq) for seq in (1, 2)),
    ]
    assert found[-1].position == Position({name(1): 4, name(2): 2})


async def test_a_stopped_node_is_pending_and_the_others_are_settled(autojump_clock: Any) -> None:
    ready, stopped = FakeNode(name(1), [1] * 3), FakeNode(name(2), [1] * 3, stopped=True)
    async with front(ready, stopped) as fleet:
        began = trio.current_time()
        answer = await fleet.ack("trainer", Position({name(1): 2, name(2): 3}))
        assert answer["pending"] == [name(2)]
        assert answer["id"] == Position({name(1): 2}).text
        assert trio.current_time() - began < 5
        stopped.stopped = False
        answer = await fleet.ack("trainer", Position({name(1): 2, name(2): 3}))
        assert (answer["pending"], stopped.acked, ready.acked) == ([], {"trainer": 3}, {"trainer": 2})


async def test_a_journal_that_nobody_has_any_more_is_a_gap_for_it_alone(autojump_clock: Any) -> None:
    async with front(FakeNode(name(1), [1] * 3)) as fleet:
        last = Position({name(1): 1, name(9): 7}).text
        found = await fleet.read(most=3, last=last)
        assert sorted((each.kind, each.journal, each.seq) for each in found) == [
            ("gap", name(9), 0),
            ("task", name(1), 2),
            ("task", name(1), 3),
        ]
        found = await fleet.read(most=9, last=found[-1].id, query="?follow=false")
        assert found == []


async def test_a_node_that_joins_is_read_from_its_oldest_event(autojump_clock: Any) -> None:
    first, joins = FakeNode(name(1), [1]), FakeNode(name(2), [1, 1])
    async with front(first, joins) as fleet:
        fleet.roster.removed.add(name(2))
        async with trio.open_nursery() as nursery:
            found: list[Event] = []

            async def read() -> None:
                found.extend(await fleet.read(most=3, last=Position({name(1): 0}).text))

            nursery.start_soon(read)
            await trio.sleep(3)
            fleet.roster.removed.clear()
    assert [(each.journal, each.seq) for each in found] == [(name(1), 1), (name(2), 1), (name(2), 2)]


async def test_a_reader_that_stands_still_costs_a_page_a_node(autojump_clock: Any) -> None:
    made = [FakeNode(name(number), [PAGE // 4] * 40) for number in range(3)]
    async with front(*made) as fleet:
        body = Merged(roster=fleet.roster, nursery=fleet.nursery, path="", start=Position())
        await anext(body)
        await trio.sleep(5)
        assert [each.given for each in made] == [4, 4, 4]
        await body.aclose()


@pytest.mark.parametrize(
    ("query", "headers", "field_name"),
    [
        ("?after=7", {}, "?after"),
        ("?after=v!", {}, "?after"),
        ("", {"Last-Event-ID": "12"}, "?Last-Event-ID"),
        ("?kinds=nothing", {}, "?kinds"),
    ],
)
async def test_a_node_s_number_is_refused(query: str, headers: dict[str, str], field_name: str) -> None:
    async with front(FakeNode(name(1))) as fleet:
        answer = await fleet.app.test_client().get("/v1/trajectories/stream" + query, headers=headers)
        assert answer.status_code == 400
        assert json.loads(await answer.get_data())["error"]["path"] == field_name
        assert (await fleet.ack("trainer", "12"))["error"]["path"] == "$.id"
        assert (await fleet.ack("trainer", "0"))["pending"] == []


async def test_consumers_are_joined_and_forgotten_everywhere(autojump_clock: Any) -> None:
    made = [FakeNode(name(number), [1] * 9) for number in range(3)]
    async with front(*made) as fleet:
        client = fleet.app.test_client()
        await fleet.ack("trainer", Position({name(0): 4, name(2): 9}))
        found = json.loads(await (await client.get("/v1/consumers")).get_data())
        assert found["pending"] == []
        (consumer,) = found["consumers"]
        assert consumer["consumer"] == "trainer"
        assert consumer["position"] == Position({name(0): 4, name(2): 9}).text
        made[1].gone = True
        assert (await client.delete("/v1/consumers/trainer")).status_code == 429
        made[1].gone = False
        assert (await client.delete("/v1/consumers/trainer")).status_code == 200
        assert [each.acked for each in made] == [{}, {}, {}]
        assert (await client.delete("/v1/consumers/trainer")).status_code == 404


def test_a_task_that_moves_has_events_to_come() -> None:
    def row(role: Any, number: int, *, finished: bool = False) -> CopyRow:
        return CopyRow(
            task_id="t", role=role, epoch=Epoch(1, number), home=name(1), second=name(2), finished=finished
        )

    assert not still_open([])
    assert still_open([row("home", 0), row("second", 0)])
    assert not still_open([row("home", 0, finished=True), row("second", 0)])
    assert still_open([row("second", 0)])
    assert not still_open([row("former", 0), row("home", 1, finished=True)])
