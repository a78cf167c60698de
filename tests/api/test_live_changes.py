"""Changes of live sessions: what a reader is sent, how events are cut, and the stream of a control plane."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from attrs import define, evolve, field
from control_plane_parts import Plane, TaskTaker, open_plane
from trio.testing import MockClock

from polarnode.api.exports import KEEP_ALIVE_S
from polarnode.api.live import (
    AT_ONCE,
    LOOK_S,
    LiveBody,
    PendingChanges,
    SeenSessions,
    SessionWatch,
    changes_event,
    pieces,
)
from polarnode.api.proxy import PASSED_TO, open_others
from polarnode.client import AsyncPolarnodeClient
from polarnode.client.awaiting_http import AsyncEvents
from polarnode.client.scripts import Block, Decoder
from polarnode.client.values import Unreachable, read_answer
from polarnode.core.status import CaptureStatus, LiveSessionStatus, SessionChanges
from polarnode.http.asgi import GREETING
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.port import NodeFacts, NodeRow
from polarnode.journal.log.sqlite import SqliteLog

ONE = LiveSessionStatus(session_id="a", task_id="t", harness="pi", phase="init", turns=0, sampled_tokens=0)


def found(*each: LiveSessionStatus) -> dict[str, LiveSessionStatus]:
    return {status.session_id: status for status in each}


# ── changes ───────────────────────────────────────────────────────────────────


def test_reader_gets_only_differences() -> None:
    seen, two = SeenSessions(), evolve(ONE, session_id="b")
    assert seen.changes(found(ONE, two), {}) == [ONE, two]
    assert seen.changes(found(evolve(ONE, age_s=9.0, phase_s=2.0), two), {}) == [], "time alone is no change"
    runs = evolve(ONE, phase="run", turns=1, sampled_tokens=7)
    assert seen.changes(found(runs, two), {}) == [runs]
    over = evolve(two, phase="ended", outcome="failed")
    assert seen.changes(found(runs), found(over)) == [over]
    assert seen.changes({}, found(over)) == [evolve(runs, phase="ended")], "one that is tried again"
    assert seen.changes({}, found(over)) == []


def test_late_reader_misses_ended_sessions() -> None:
    assert SeenSessions().changes(found(ONE), found(evolve(ONE, session_id="b", outcome="failed"))) == [ONE]


@pytest.mark.parametrize(
    ("count", "whole", "sizes"),
    [
        (0, True, [0]),
        (0, False, []),
        (AT_ONCE + 1, True, [AT_ONCE, 1]),
        (AT_ONCE, False, [AT_ONCE]),
    ],
)
def test_only_first_event_is_whole(count: int, whole: bool, sizes: list[int]) -> None:
    made = list(pieces("n", [evolve(ONE, session_id=str(at)) for at in range(count)], whole=whole))
    assert [len(each.sessions) for each in made] == sizes
    assert [each.whole for each in made] == [whole and at == 0 for at in range(len(made))]


# ── the stream ────────────────────────────────────────────────────────────────


class OneCapture:
    def list(self) -> tuple[CaptureStatus, ...]:
        return (
            CaptureStatus(
                session_id="c",
                task_id="t",
                group_id="t",
                sample_index=3,
                turns=2,
                sampled_tokens=9,
                in_flight=0,
                expires_s=1.0,
            ),
        )


async def test_readers_share_looks_including_captures(journal: Journal, autojump_clock: MockClock) -> None:
    """Readers share a look, and captures are sessions."""
    service = TaskTaker(journal=journal, captures=OneCapture())
    watch = SessionWatch(service)
    watch.look()
    service.listed = (ONE,)
    watch.look()
    assert [(each.harness, each.phase, each.sample_index) for each in watch.live.values()] == [
        ("capture", "run", 3)
    ], "not due yet"
    await trio.sleep(LOOK_S)
    watch.look()
    assert set(watch.live) == {"a", "c"}


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    async with open_journal(tmp_path / "journal.sqlite", now=lambda: 1.0) as opened:
        yield opened


async def test_quiet_stream_sends_signs_of_life(journal: Journal, autojump_clock: MockClock) -> None:
    async with open_others(SqliteLog(journal), name="n0", token=None) as others:
        stream = LiveBody(watch=SessionWatch(TaskTaker(journal=journal)), others=others, follow=True)
        sent = [await anext(stream) for _ in range(2)]
        assert sent[0].startswith(b":")
        assert sent[1] == b'event: sessions\ndata: {"node":"n0","sessions":[],"whole":true}\n\n'
        began = trio.current_time()
        assert await anext(stream) == b": keep-alive\n\n"
        assert KEEP_ALIVE_S <= trio.current_time() - began <= KEEP_ALIVE_S + LOOK_S
        await stream.aclose()


@asynccontextmanager
async def reading(plane: Plane) -> AsyncIterator[AsyncEvents[SessionChanges]]:
    async with AsyncPolarnodeClient(plane.url, "secret") as client, client.live_sessions() as events:
        yield events


async def test_session_is_followed_to_its_end(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal.sqlite") as plane, reading(plane) as events:
        assert await anext(events) == SessionChanges(node="n0", sessions=(), whole=True)
        for status in (
            ONE,
            evolve(ONE, phase="run"),
            evolve(ONE, phase="run", turns=1, sampled_tokens=5),
            evolve(ONE, phase="ended", turns=1, sampled_tokens=5, outcome="completed", reward=1.0),
        ):
            plane.service.listed = (status,)
            assert await anext(events) == SessionChanges(node="n0", sessions=(status,))
        async with reading(plane) as later:
            assert await anext(later) == SessionChanges(node="n0", sessions=(), whole=True)


async def test_unfollowed_stream_ends(tmp_path: Path) -> None:
    """A stream that does not follow ends, and other parameters are refused."""
    async with open_plane(tmp_path / "journal.sqlite") as plane, httpx.AsyncClient() as client:
        plane.service.listed = (ONE,)
        headers = {"Authorization": "Bearer secret"}
        url = f"{plane.url}/v1/sessions/live"
        answer = await client.get(url, params={"follow": "false"}, headers=headers)
        (data,) = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        told: dict[str, Any] = json.loads(data[6:])
        assert [each["session_id"] for each in told["sessions"]] == ["a"]
        refused = await client.get(url, params={"after": "1"}, headers=headers)
        assert refused.json()["error"]["path"] == "?after"
        assert (await client.get(url)).status_code == 401


# ── other nodes ───────────────────────────────────────────────────────────────


@define(eq=False)
class FakeLink:
    """A node whose stream gives what is put into it; None breaks the connection."""

    events: list[SessionChanges | None] = field(factory=list)
    opened: int = 0

    @asynccontextmanager
    async def stream(self, path: str, *, headers: dict[str, str]) -> AsyncIterator[AsyncIterator[bytes]]:
        assert headers[PASSED_TO], "it is asked for its own sessions"
        self.opened += 1
        async with aclosing(self._pieces("follow=false" not in path)) as sent:
            yield sent

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
class FakeOthers:
    """The other nodes of a log, by name; the number of each is its incarnation."""

    nursery: trio.Nursery
    links: dict[tuple[str, int], FakeLink]

    async def alive(self) -> tuple[NodeRow, ...]:
        await trio.lowlevel.checkpoint()
        return tuple(
            NodeRow(incarnation=number, facts=NodeFacts(name=name), state="alive", sign=0)
            for name, number in self.links
        )

    def link(self, row: NodeRow) -> FakeLink:
        return self.links[row.facts.name, row.incarnation]


def changes(*sessions: LiveSessionStatus, node: str = "b", whole: bool = False) -> SessionChanges:
    return SessionChanges(node=node, sessions=sessions, whole=whole)


async def read(body: LiveBody) -> SessionChanges:
    """The next event of a body."""
    decoder = Decoder()
    while True:
        for block in decoder.feed(await anext(body)):
            if isinstance(block, Block):
                return read_answer(block.data, SessionChanges)


def test_slow_reader_gets_last_change() -> None:
    pending, two, runs = PendingChanges(), evolve(ONE, session_id="b"), evolve(ONE, phase="run")
    for each in (changes(ONE, two, whole=True), changes(runs), changes(two, node="c")):
        pending.put(each)
    assert pending.take() == [changes(runs, two, whole=True)]
    assert pending.take() == [changes(two, node="c")]
    assert pending.take() == []
    pending.put(changes(ONE))
    pending.put(changes(whole=True))
    assert pending.take() == [changes(whole=True)], "what came before a whole list counts no more"


async def test_nodes_come_break_and_go(journal: Journal, autojump_clock: MockClock) -> None:
    link, two = FakeLink([changes(ONE, whole=True)]), evolve(ONE, session_id="b")
    async with trio.open_nursery() as nursery:
        others: Any = FakeOthers(nursery, {("b", 2): link})
        body = LiveBody(watch=SessionWatch(TaskTaker(journal=journal)), others=others, follow=True)
        assert await anext(body) == GREETING
        assert await read(body) == changes(node="n0", whole=True)
        assert await read(body) == changes(ONE, whole=True)
        others.links["c", 3] = FakeLink([changes(two, node="c", whole=True)])
        assert await read(body) == changes(two, node="c", whole=True)
        link.events += [None, changes(two, whole=True)]
        assert await read(body) == changes(whole=True), "its connection broke"
        assert await read(body) == changes(two, whole=True)
        assert link.opened == 2
        del others.links["b", 2]
        assert await read(body) == changes(whole=True), "it is gone, and its sessions with it"
        await body.aclose()


async def test_unfollowed_stream_lists_nodes_once(journal: Journal, autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        links = {(name, number): FakeLink([changes(ONE, whole=True)]) for number, name in enumerate("bc")}
        others: Any = FakeOthers(nursery, links)
        watch = SessionWatch(TaskTaker(journal=journal))
        sent = [piece async for piece in LiveBody(watch=watch, others=others, follow=False)]
        alone = [piece async for piece in LiveBody(watch=watch, others=others, follow=False, alone=True)]
    found = [block for piece in sent for block in Decoder().feed(piece) if isinstance(block, Block)]
    assert {read_answer(each.data, SessionChanges).node for each in found} == {"n0", "b", "c"}
    assert len(alone) == 2, "the greeting and this node"
