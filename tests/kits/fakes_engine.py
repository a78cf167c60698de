"""ScriptedEngine: `ports.Engine` without SGLang, for tests of whatever stands above it. `contract` is what it
and the real one both keep.

The contract runs on the fake in test_engine_fake.py and on a real engine in test_engine_real.py, so that a
test above can trust the fake.
"""

from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol
from uuid import uuid4

import pytest
import trio
from attrs import define, field

from polarnode.core.arrays import RoutedExperts, TopLogprobs, floats, ids
from polarnode.core.conversation import Constraint, FinishReason, Sampling
from polarnode.core.errors import ContextTooLong, EngineError
from polarnode.core.ports import Chunk, Engine, GenerateOrder, LogitSteering
from polarnode.core.trajectory import VersionSpan
from polarnode.engine.calls import check_order, to_generate
from polarnode.engine.routing import EngineStatistics, HostStatistics

Reply = Callable[[GenerateOrder], Sequence[int]]


class WatchedEngine(Engine, Protocol):
    """What the contract needs beside `generate`."""

    def statistics(self) -> EngineStatistics: ...


def counting(order: GenerateOrder) -> Sequence[int]:
    """The default reply: the numbers after the prompt's last, for ever (well, for longer than any
    test asks).
    """
    return [(order.prompt[-1] + step) % 997 for step in range(1, 5000)]


def routes(start: int, end: int, layers: int) -> RoutedExperts:
    """Rows that tell their position."""
    data = b"".join(bytes([place % 251]) * layers for place in range(start, end))
    return RoutedExperts(start=start, layers=layers, top_k=1, dtype="uint8", data=data)


@define(eq=False)
class ScriptedEngine:
    """Answers with `reply(order)`, `chunk` tokens at a time, every logprob -0.5, until a stop id,
    `max_tokens`, or the reply's end ("stop").

    `orders` are all orders taken, `ended` counts how each ended ("abort" when its block was left early).
    `hold`: wait for it before the second chunk, to catch a generation half-way. `fail`: raise it instead of
    the second chunk. `layers`: how many layers of experts it has, each of which reads the token at a position
    p with expert p % 251.
    """

    reply: Reply = counting
    vocab_size: int = 1000
    context_length: int = 4096
    weight_version: str = "0"
    chunk: int = 4
    hold: trio.Event | None = None
    fail: EngineError | None = None
    layers: int = 0
    orders: list[GenerateOrder] = field(factory=list)
    ended: "Counter[str]" = field(factory=Counter)
    _running: int = 0

    @asynccontextmanager
    async def generate(self, order: GenerateOrder) -> AsyncIterator[AsyncIterator[Chunk]]:
        check_order(
            order, vocab_size=self.vocab_size, context_length=self.context_length, routes=self.layers > 0
        )
        await trio.lowlevel.checkpoint()
        self.orders.append(order)
        self._running += 1
        stream = _ScriptedStream(self, order)
        try:
            yield stream
        finally:
            self._running -= 1
            self.ended[stream.finish or "abort"] += 1

    def statistics(self) -> EngineStatistics:
        host = HostStatistics(
            index=0, state="ready", pid=None, gpus=(), in_flight=self._running, running=self._running, waiting=0, token_usage=0.0,
            restarts=0, weight_version=self.weight_version, last_error=None,
        )  # fmt: skip
        return EngineStatistics(
            hosts=(host,),
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            weight_version=self.weight_version,
            paused=None,
        )


@define(eq=False)
class _ScriptedStream:
    _engine: ScriptedEngine
    _order: GenerateOrder
    _given: int = 0
    finish: FinishReason | None = None

    def __aiter__(self) -> "_ScriptedStream":
        return self

    async def __anext__(self) -> Chunk:
        await trio.lowlevel.checkpoint()
        if self.finish is not None:
            raise StopAsyncIteration
        if self._given:
            await self._hold_or_fail()
        sampled, ending = self._whole()
        part = sampled[self._given : self._given + self._engine.chunk]
        self._given += len(part)
        self.finish = ending if self._given == len(sampled) else None
        return Chunk(
            ids=part,
            logprobs=floats([-0.5] * len(part)),
            finish_reason=self.finish,
            version_spans=(VersionSpan(version=self._engine.weight_version, start=0, end=self._given),),
            top_logprobs=self._alternatives(part) if self._order.top_logprobs else None,
            routed=(
                self._routed() if self.finish is not None and self._order.routed_from is not None else None
            ),
        )

    def _alternatives(self, part: Sequence[int]) -> TopLogprobs:
        """Each token itself, and its neighbours after it, each less likely than the one before."""
        steps = range(self._order.top_logprobs)
        others = ids([(token + step) % self._engine.vocab_size for token in part for step in steps])
        return TopLogprobs(
            k=len(steps), ids=others, logprobs=floats([-0.5 * (step + 1) for _ in part for step in steps])
        )

    def _routed(self) -> RoutedExperts:
        return routes(
            self._order.routed_from or 0, len(self._order.prompt) + self._given - 1, self._engine.layers
        )

    async def _hold_or_fail(self) -> None:
        if self._engine.hold is not None:
            await self._engine.hold.wait()
        if self._engine.fail is not None:
            raise self._engine.fail

    def _whole(self) -> "tuple[array[int], FinishReason]":
        limit = int(
            str(
                to_generate(self._order, context_length=self._engine.context_length).sampling[
                    "max_new_tokens"
                ]
            )
        )
        reply = list(self._engine.reply(self._order))
        stops = [place for place, token in enumerate(reply[:limit]) if token in self._order.stop_ids]
        if stops:
            return ids(reply[: stops[0] + 1]), "stop"
        return (ids(reply[:limit]), "length") if len(reply) >= limit else (ids(reply), "stop")


# ── the contract ──────────────────────────────────────────────────────────────


def order(
    prompt: Sequence[int] = (1, 2, 3), *, max_tokens: int | None = 8, temperature: float = 0.0, **more: Any
) -> GenerateOrder:
    """`more` are GenerateOrder's own."""
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
    return GenerateOrder(
        **{"request_id": uuid4().hex, "prompt": ids(prompt), "sampling": sampling, "stop_ids": (), **more}
    )


async def sample(engine: Engine, asked: GenerateOrder) -> list[Chunk]:
    async with engine.generate(asked) as stream:
        return [chunk async for chunk in stream]


def joined(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


async def contract(engine: WatchedEngine) -> None:
    """What every Engine keeps."""
    await _samples_are_whole(engine)
    await _a_stop_id_ends_and_stays(engine)
    await _the_room_left_is_the_limit(engine)
    await _alternatives_are_the_likeliest(engine)
    await _bad_orders_are_refused(engine)
    await _leaving_the_block_aborts(engine)


async def _samples_are_whole(engine: WatchedEngine) -> None:
    chunks = await sample(engine, order(max_tokens=9))
    assert len(joined(chunks)) == 9
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    length = 0
    for chunk in chunks:
        length += len(chunk.ids)
        assert len(chunk.logprobs) == len(chunk.ids)
        assert all(logprob <= 0 for logprob in chunk.logprobs)
        assert [chunk.version_spans[0].start, chunk.version_spans[-1].end] == [0, length]
    assert chunks[-1].version_spans == (
        VersionSpan(version=engine.statistics().weight_version, start=0, end=9),
    )
    assert joined(await sample(engine, order(max_tokens=9))) == joined(chunks)  # temperature 0


async def _a_stop_id_ends_and_stays(engine: WatchedEngine) -> None:
    free = joined(await sample(engine, order(max_tokens=12)))
    stop = free[7]
    chunks = await sample(engine, order(max_tokens=12, stop_ids=(stop,)))
    assert joined(chunks) == free[: free.index(stop) + 1]
    assert chunks[-1].finish_reason == "stop"


async def _the_room_left_is_the_limit(engine: WatchedEngine) -> None:
    context = engine.statistics().context_length
    nearly_full = [1] * (context - 3)
    for asked in (1_000_000, None):
        chunks = await sample(engine, order(nearly_full, max_tokens=asked))
        assert len(joined(chunks)) == 3
        assert chunks[-1].finish_reason == "length"
    with pytest.raises(ContextTooLong) as caught:
        await sample(engine, order([1] * context))
    assert (caught.value.prompt_tokens, caught.value.limit) == (context, context)


async def _alternatives_are_the_likeliest(engine: WatchedEngine) -> None:
    """At temperature 0 the token itself is the first of them, at every length of a chunk."""
    chunks = await sample(engine, order(max_tokens=9, top_logprobs=3))
    for chunk in chunks:
        assert chunk.top_logprobs is not None
        assert (chunk.top_logprobs.k, chunk.top_logprobs.rows) == (3, len(chunk.ids))
        for place, (token, logprob) in enumerate(zip(chunk.ids, chunk.logprobs, strict=True)):
            others = chunk.top_logprobs.row(place)
            assert others[0][0] == token
            assert others[0][1] == pytest.approx(logprob, abs=1e-5)
            assert sorted((each[1] for each in others), reverse=True) == [each[1] for each in others]
    assert not any(chunk.top_logprobs or chunk.routed for chunk in await sample(engine, order(max_tokens=9)))


async def _bad_orders_are_refused(engine: WatchedEngine) -> None:
    vocab_size = engine.statistics().vocab_size
    short_id = GenerateOrder(request_id="turn-1", prompt=ids([1]), sampling=Sampling(), stop_ids=())
    both = order(
        constraint=Constraint(kind="regex", text="a"), steering=LogitSteering(processor="", parameters={})
    )
    for bad in (
        order([]),
        order([1, vocab_size]),
        order([-1]),
        order(max_tokens=0),
        short_id,
        order(top_logprobs=99),
        both,
    ):
        with pytest.raises(EngineError) as caught:
            await sample(engine, bad)
        assert not caught.value.retryable
    assert len(await sample(engine, order(max_tokens=1))) == 1  # and the engine lives


async def _leaving_the_block_aborts(engine: WatchedEngine) -> None:
    async with engine.generate(order(max_tokens=3000, temperature=1.0)) as stream:
        assert (await stream.__anext__()).finish_reason is None
        assert engine.statistics().hosts[0].in_flight == 1
    with trio.CancelScope() as scope:
        async with engine.generate(order(max_tokens=3000, temperature=1.0)) as stream:
            async for _ in stream:
                scope.cancel()
    assert scope.cancelled_caught
    await until_idle(engine)


async def until_idle(engine: WatchedEngine) -> None:
    """Until nothing runs or waits; the test's own timeout ends a wait in vain."""
    while any(host.in_flight or host.running or host.waiting for host in engine.statistics().hosts):  # noqa: ASYNC110 - it has no event
        await trio.sleep(0.05)


async def until(holds: Callable[[], bool]) -> None:
    """Until a condition holds that has no event; the test's own timeout ends a wait in vain."""
    while not holds():  # noqa: ASYNC110
        await trio.sleep(0.01)
