"""Calls that wait for their session's place: how they are let go, how they give up, and what it costs a clock."""

from array import array
from pathlib import Path

import pytest
import trio
import trio.testing

from polarnode.core.conversation import Sampling
from polarnode.core.ports import GenerateOrder
from polarnode.engine.calls import Call
from polarnode.engine.protocol import Piece
from polarnode.engine.residency import HOLD_S
from polarnode.engine.residents import ResidencyGate

CAPACITY = 100_000
NOWHERE = Path("/nonexistent/engine-0.sizes.json")


def order(session: str, tokens: int, *, number: int = 0) -> GenerateOrder:
    return GenerateOrder(
        request_id=f"{session}-{number}",
        prompt=array("i", [1]) * tokens,
        sampling=Sampling(),
        stop_ids=(),
        affinity=session,
        chain="0",
    )


def play(found: ResidencyGate, asked: GenerateOrder, *, cached: int = 0) -> None:
    """The engine serves a call that has its place."""
    call = Call(
        rid=asked.request_id,
        session=asked.affinity,
        chain=asked.chain,
        sent=trio.current_time() - 2.0,  # a read of no time would lend every place
        prompt_tokens=len(asked.prompt),
    )
    assert call.take(Piece(rid=call.rid, ids=b"", logprobs=b"", cached_tokens=cached, version="0"))
    found.read(call)
    found.ended(call)


class Room:
    """A host with two sessions that do not fit together: b is displaced."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []
        self.credits: list[float] = []
        self.found = ResidencyGate(0, self.forgotten.append, NOWHERE)

    async def fill(self) -> None:
        self.found.open(CAPACITY, 50_000)
        for session, tokens in (("a", 60_000), ("b", 50_000)):
            self.found.begin(session, "pi", "group", self.credits.append)
            assert await self.found.enter(order(session, tokens))
            play(self.found, order(session, tokens))
        assert self.forgotten == ["b/0"], "the engine may drop the smaller one's prefix first"


@pytest.fixture
async def room() -> Room:
    found = Room()
    await found.fill()
    return found


async def test_every_call_passes_without_capacity() -> None:
    found = ResidencyGate(0, lambda session: None, NOWHERE)
    assert found.may_begin("pi", "g", 0.0)
    assert await found.enter(order("a", 10))
    assert found.statistics is None


async def test_held_call_goes_when_session_ends(room: Room, autojump_clock: trio.abc.Clock) -> None:
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(room.found.enter, order("b", 50_100))
        await trio.sleep(5)
        figures = room.found.statistics
        assert figures is not None
        assert (figures.held, figures.displaced, figures.oldest_held_s) == (1, 1, 5.0)
        room.found.over("a")
    assert trio.current_time() - began == pytest.approx(5)
    assert room.credits == [HOLD_S, pytest.approx(5 - HOLD_S)], (
        "moved by what it may wait, then by what it did"
    )


async def test_held_call_goes_at_time_limit(room: Room, autojump_clock: trio.abc.Clock) -> None:
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(room.found.run)
        assert await room.found.enter(order("b", 50_100))
        nursery.cancel_scope.cancel()
    assert HOLD_S <= trio.current_time() - began < HOLD_S + 1
    assert sum(room.credits) == pytest.approx(HOLD_S, abs=1)


async def test_client_leaving_while_held_leaves_nothing(room: Room, autojump_clock: trio.abc.Clock) -> None:
    with trio.move_on_after(3) as scope:
        await room.found.enter(order("b", 50_100))
    assert scope.cancelled_caught
    figures = room.found.statistics
    assert figures is not None
    assert figures.held == 0
    assert sum(room.credits) == pytest.approx(3)
    room.found.over("a")
    assert await room.found.enter(order("b", 50_100))


async def test_two_held_calls_credit_clock_once(room: Room, autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(lambda number=number: room.found.enter(order("b", 50_100, number=number)))
        await trio.sleep(5)
        room.found.over("a")
    assert sum(room.credits) == pytest.approx(5)


async def test_dead_host_sends_calls_elsewhere(room: Room, autojump_clock: trio.abc.Clock) -> None:
    async def ask() -> None:
        assert not await room.found.enter(order("b", 50_100)), "another host is to be asked"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        room.found.lost()
    assert not room.found.has("a")


async def test_unsent_call_returns_its_place(room: Room, autojump_clock: trio.abc.Clock) -> None:
    assert await room.found.enter(order("a", 60_100))
    figures = room.found.statistics
    assert figures is not None
    assert figures.busy == 1
    room.found.left(order("a", 60_100))
    figures = room.found.statistics
    assert figures is not None
    assert figures.busy == 0


async def test_ended_session_releases_held_calls(room: Room, autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(room.found.enter, order("b", 50_100))
        await trio.testing.wait_all_tasks_blocked()
        room.found.over("b")
    assert room.forgotten == ["b/0", "b/0"]


async def test_undecided_reread_is_logged(
    autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading again without a decision is logged with a remedy."""
    found = ResidencyGate(3, lambda session: None, NOWHERE)
    found.open(10**6, 50_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.run)
        for number in range(19):  # the second warning would come at 1,200 s
            asked = order("a", 20_000 + number, number=number)
            assert await found.enter(asked)
            play(found, asked)
            await trio.sleep(60)
        nursery.cancel_scope.cancel()
    (line,) = {record.message for record in caplog.records if record.levelname == "WARNING"}
    assert "engine host 3 read" in line
    assert "mem_fraction" in line
