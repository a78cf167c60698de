"""The generation calls of one engine host, without a process: when each is sent, and how each ends."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from attrs import define, field
from fakes_engine import order

from polarnode.core.arrays import floats, ids
from polarnode.core.errors import EngineError, EngineRefusal
from polarnode.core.ports import GenerateOrder
from polarnode.engine.calls import WHOLE_PIECE_TOKENS, Call
from polarnode.engine.host_calls import HostCalls
from polarnode.engine.protocol import Abort, Generate, Piece, Ready, ToHost
from polarnode.engine.residents import ResidencyGate

READY = Ready(
    vocab_size=100,
    context_length=60,
    capacity=60,
    max_total_tokens=600,
    weight_version="0",
    sglang_version="0",
)


@define(eq=False)
class Bench:
    """Calls, what they post, and how often they said that something changed."""

    calls: HostCalls = field(init=False)
    posted: list[ToHost] = field(factory=list)
    ready: Ready | None = READY
    changes: int = 0

    def __attrs_post_init__(self) -> None:
        gate = ResidencyGate(0, lambda name: None, Path("/nowhere"))
        self.calls = HostCalls(
            gate, post=self.posted.append, serving=lambda: self.ready, on_change=self._on_change
        )

    def _on_change(self) -> None:
        self.changes += 1

    async def begin(self, asked: GenerateOrder, adapter: str = "") -> Call:
        call = await self.calls.begin(asked, context_length=60, adapter=adapter)
        assert call is not None
        return call


def piece(rid: str, *tokens: int, last: bool = False) -> Piece:
    sampled, logprobs = ids(tokens), floats([-0.5] * len(tokens))
    return Piece(
        rid=rid,
        ids=sampled.tobytes(),
        logprobs=logprobs.tobytes(),
        version="0",
        finish="stop" if last else None,
    )


@asynccontextmanager
async def waiting(bench: Bench, asked: GenerateOrder) -> AsyncIterator[list[Call | None]]:
    """A call that cannot be sent yet. The list has what `begin` returned, once it has."""
    returned: list[Call | None] = []

    async def begin() -> None:
        returned.append(await bench.calls.begin(asked, context_length=60))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(begin)
        await trio.testing.wait_all_tasks_blocked()
        yield returned


async def test_call_is_sent_and_ended_by_last_piece() -> None:
    bench = Bench()
    asked = order()
    await bench.begin(asked)
    assert [type(message) for message in bench.posted] == [Generate]
    bench.calls.take(piece(asked.request_id, 1, 2))
    assert bench.calls.in_flight == 1
    bench.calls.take(piece(asked.request_id, 3, last=True))
    assert (bench.calls.in_flight, bench.changes) == (0, 1)


@pytest.mark.parametrize(("whole", "tokens"), [(True, WHOLE_PIECE_TOKENS), (False, 0)])
async def test_whole_answers_come_in_large_pieces(whole: bool, tokens: int) -> None:
    bench = Bench()
    await bench.begin(order(whole=whole))
    (sent,) = bench.posted
    assert isinstance(sent, Generate)
    assert sent.piece_tokens == tokens


async def test_used_request_id_is_refused() -> None:
    bench = Bench()
    asked = order()
    await bench.begin(asked)
    with pytest.raises(EngineError, match="is in use"):
        await bench.begin(asked)


async def test_call_waits_until_host_serves() -> None:
    bench = Bench(ready=None)
    async with waiting(bench, order()) as returned:
        assert (bench.posted, returned) == ([], [])
        bench.ready = READY
        bench.calls.admit()
    assert len(bench.posted) == 1
    assert isinstance(returned[0], Call)


async def test_unsent_call_learns_of_death() -> None:
    """A call that was never sent may go to another host."""
    bench = Bench(ready=None)
    async with waiting(bench, order()) as returned:
        bench.calls.end_all("engine host 0 died: it was killed")
    assert returned == [None]


async def test_sent_call_fails_by_death() -> None:
    bench = Bench()
    call = await bench.begin(order())
    bench.calls.end_all("engine host 0 died: it was killed")
    with pytest.raises(EngineError, match="it was killed"):
        await anext(call)
    assert bench.calls.in_flight == 0


async def test_refused_call_is_over() -> None:
    bench = Bench()
    asked = order()
    call = await bench.begin(asked)
    bench.calls.fail(asked.request_id, EngineRefusal("the engine refused the request"))
    bench.calls.fail("unknown", EngineError("nothing happens"))
    with pytest.raises(EngineRefusal):
        await anext(call)
    assert bench.calls.in_flight == 0


async def test_call_that_is_left_is_aborted_and_counted() -> None:
    """It is in the engine until the host has sent its last message about it."""
    bench = Bench()
    asked = order()
    bench.calls.end(await bench.begin(asked))
    assert bench.posted[1:] == [Abort(rid=asked.request_id)]
    assert bench.calls.in_flight == 1
    bench.calls.take(piece(asked.request_id, last=True))
    assert bench.calls.in_flight == 0


async def test_piece_that_does_not_fit_is_aborted() -> None:
    bench = Bench()
    asked = order()
    call = await bench.begin(asked)
    bench.calls.take(piece(asked.request_id, 100))
    with pytest.raises(EngineError, match="outside the vocabulary"):
        await anext(call)
    assert bench.posted[1:] == [Abort(rid=asked.request_id)]
    assert bench.calls.in_flight == 0


async def test_adapter_call_is_counted_and_told() -> None:
    bench = Bench()
    first, second = order(), order()
    await bench.begin(first, "a@1")
    await bench.begin(second)
    assert (bench.calls.samples_by("a@1"), bench.calls.samples_by("a@2")) == (1, 0)
    bench.calls.take(piece(first.request_id, last=True))
    assert bench.changes == 1, "the version may not be needed any more, though other calls run"
