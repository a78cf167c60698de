"""Live sessions of all nodes: what one reader is sent where nodes come, go and send faster than it reads. The nodes
are in memory; time is virtual.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import trio
from attrs import define, evolve, field
from polarnode.fleet.live import LiveBody, PendingChanges
from trio.testing import MockClock

from polarnode.api.exports import KEEP_ALIVE_S
from polarnode.api.live import changes_event
from polarnode.client.scripts import Block, Decoder
from polarnode.client.values import Unreachable, read_answer
from polarnode.core.status import LiveSessionStatus, SessionChanges
from polarnode.http.asgi import GREETING, KEEP_ALIVE

ONE = LiveSessionStatus(session_id="a", task_id="t", harness="pi", phase="init", turns=0, sampled_tokens=0)
TWO = evolve(ONE, session_id="b")


@define(eq=False)
class FakeLink:
    """A node whose stream gives what is put into it; None breaks the connection."""

    events: list[SessionChanges | None] = field(factory=list)
    url: str = "http://node"
    opened: int = 0

    @asynccontextmanager
    async def stream(self, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        self.opened += 1
        async with aclosing(self._pieces("follow=false" not in path)) as pieces:
            yield pieces

    async def _pieces(self, follow: bool) -> AsyncGenerator[bytes, None]:
        yield GREETING
        while follow or self.events:
            while self.events:
                event = self.events.pop(0)
                if event is None:
                    raise Unreachable("cut")
                whole = changes_event(event)
                for piece in (whole[:7], whole[7:]):
                    yield piece
            await trio.sleep(0.1)


@define(eq=False)
class FakeNodes:
    links: dict[str, Any]

    def readable(self) -> Mapping[str, Any]:
        return dict(self.links)

    def name_of(self, journal: str) -> str:
        return f"name-of-{journal}"


def changes(*sessions: LiveSessionStatus, node: str = "own", whole: bool = False) -> SessionChanges:
    return SessionChanges(node=node, sessions=sessions, whole=whole)


async def read(body: LiveBody) -> SessionChanges:
    """The next event of a body."""
    decoder = Decoder()
    while True:
        for block in decoder.feed(await anext(body)):
            if isinstance(block, Block):
                return read_answer(block.data, SessionChanges)


def test_what_a_slow_reader_was_not_sent_is_the_last_change_of_each_session() -> None:
    pending, runs = PendingChanges(), evolve(ONE, phase="run")
    for each in (changes(ONE, TWO, whole=True), changes(runs), changes(TWO, node="other")):
        pending.put(each)
    assert pending.take() == [changes(runs, TWO, whole=True)]
    assert pending.take() == [changes(TWO, node="other")]
    assert pending.take() == []
    pending.put(changes(ONE))
    pending.put(changes(whole=True))
    assert pending.take() == [changes(whole=True)], "what came before a whole list counts no more"


async def test_nodes_have_the_names_of_the_fleet_and_none_that_is_gone_keeps_sessions(
    autojump_clock: MockClock,
) -> None:
    link = FakeLink([changes(ONE, whole=True)])
    nodes = FakeNodes({"j1": link})
    async with trio.open_nursery() as nursery:
        body = LiveBody(roster=nodes, nursery=nursery, follow=True)  # type: ignore[arg-type]
        assert await anext(body) == GREETING
        assert await read(body) == changes(ONE, node="name-of-j1", whole=True)
        nodes.links["j2"] = FakeLink([changes(TWO, whole=True)])
        assert await read(body) == changes(TWO, node="name-of-j2", whole=True)
        link.events += [None, changes(TWO, whole=True)]
        assert await read(body) == changes(node="name-of-j1", whole=True), "its connection broke"
        assert await read(body) == changes(TWO, node="name-of-j1", whole=True)
        assert link.opened == 2
        del nodes.links["j1"]
        assert await read(body) == changes(node="name-of-j1", whole=True)
        began = trio.current_time()
        assert await anext(body) == KEEP_ALIVE
        assert trio.current_time() - began == KEEP_ALIVE_S
        await body.aclose()


async def test_a_reader_that_does_not_follow_has_every_node_once(autojump_clock: MockClock) -> None:
    nodes = FakeNodes({name: FakeLink([changes(ONE, whole=True)]) for name in ("j1", "j2")})
    async with trio.open_nursery() as nursery:
        body = LiveBody(roster=nodes, nursery=nursery, follow=False)  # type: ignore[arg-type]
        sent = [piece async for piece in body]
    assert sent[0] == GREETING
    found = [block for piece in sent for block in Decoder().feed(piece) if isinstance(block, Block)]
    assert {read_answer(each.data, SessionChanges).node for each in found} == {"name-of-j1", "name-of-j2"}
