"""The simulated engine with a cache of `kv_tokens`: what is found again, what it costs, and what it leaves."""

import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve
from cache_calls import Shape, played, rounds
from fakes_engine import joined, order, sample, until_idle

from polarnode.core.errors import ContextTooLong
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.protocol import Simulation
from polarnode.engine.settings import EngineSettings, SimulatedEngine
from polarnode.engine.simulated.cache import RESERVED_TOKENS, RequestProgress, SimulatedCache
from polarnode.node.config import TINY_MODEL
from polarnode.node.settings import simulated_marks
from polarnode.tokens.template import LoadedModel, load_model

SMALL = Simulation(kv_tokens=6000, kv_page=1, tokens_per_s=400, prefill_tokens_per_s=40_000)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(TINY_MODEL)


@asynccontextmanager
async def opened(
    model: LoadedModel, state: Path, simulation: Simulation = SMALL, **more: Any
) -> AsyncIterator[Engines]:
    simulated = SimulatedEngine(
        simulation=simulation, marks=simulated_marks(model.family), vocab_size=model.tokenizer.vocab_size
    )
    settings: dict[str, Any] = {"context_length": 8192, "gpus": (0,), **more}
    async with open_engines(
        EngineSettings(model_path=TINY_MODEL, device="cuda", state_dir=state, simulated=simulated, **settings)
    ) as engines:
        yield engines


# ── without a process ────────────────────────────────────────────────────────────


def run(cache: SimulatedCache, rid: str, prompt: list[int], **more: Any) -> int:
    """One request alone, after all before it: the tokens that the cache had."""
    now = cache.due() or 0.0
    asked: dict[str, Any] = {"salt": "0 ", "session": "", **more}
    moved = cache.submit(rid, array("i", prompt), array("i", [7, 8, 9]), max_new=3, now=now, **asked)
    while (due := cache.due()) is not None:
        moved += cache.advance(due)
    last: RequestProgress = moved[-1]
    assert (last.rid, last.sampled, last.over) == (rid, 3, True)
    return last.cached


def test_other_version_or_adapter_hits_nothing() -> None:
    """The same tokens of another version or adapter are not in the cache."""
    for page in (1, 16):
        cache = SimulatedCache(evolve(SMALL, kv_page=page))
        prompt = list(range(400))
        assert run(cache, "a", prompt) == 0
        assert run(cache, "b", prompt) == 399 // page * page
        assert run(cache, "c", prompt, salt="1 ") == 0
        assert run(cache, "d", prompt, salt="0 adapter") == 0
        assert run(cache, "e", prompt) == 399 // page * page


def test_sample_is_cached_except_last_token() -> None:
    cache = SimulatedCache(SMALL)
    run(cache, "a", list(range(100)))
    assert run(cache, "b", [*range(100), 7, 8, 9, 10]) == 102


def test_forgotten_session_is_evicted_first() -> None:
    for forgotten in ("", "b"):
        cache = SimulatedCache(evolve(SMALL, kv_tokens=1000))
        for name in "ab":
            run(cache, name, [ord(name)] * 400, session=name)
        cache.forget(forgotten)
        run(cache, "c", [3] * 400, session="c")
        lost, kept = ("b", "a") if forgotten else ("a", "b")
        assert run(cache, "d", [ord(kept)] * 400) == 399
        assert run(cache, "e", [ord(lost)] * 400) == 0


def test_pause_delays_simulated_time() -> None:
    cache = SimulatedCache(evolve(SMALL, tokens_per_s=10, kv_request_s=0, kv_context_s=0, speed=10))
    cache.submit("a", array("i", [1]), array("i", [7] * 101), max_new=101, salt="", session="", now=0.0)
    assert cache.advance(0.0) == []
    assert cache.due() == pytest.approx(0.01)  # the read is no shorter than a step
    before = sum(each.sampled for each in cache.advance(0.5))
    assert before == 1 + 48  # the read's own, and whole steps of four
    cache.delay(100)
    assert cache.advance(100.4) == []
    assert max(each.sampled for each in cache.advance(100.98)) == 97
    assert [each.over for each in cache.advance(101.02)] == [True]


def test_unused_cache_is_flushed() -> None:
    cache = SimulatedCache(SMALL)
    run(cache, "a", list(range(100)))
    cache.flush()
    assert run(cache, "b", list(range(100))) == 0


def test_unset_gpu_settings_keep_old_timing() -> None:
    """No setting of the cache has an effect without `kv_tokens`, and without any delay time still passes."""
    at_once = SimulatedCache(Simulation(kv_tokens=1000, tokens_per_s=0, prefill_tokens_per_s=0))
    assert run(at_once, "a", list(range(100))) == 0
    assert run(at_once, "b", list(range(100))) == 64
    assert at_once.usage == 0


def test_retracted_request_continues_in_place() -> None:
    """More enter, the longer none has been sent back, until some have to be: none of their tokens comes
    twice.
    """
    cache = SimulatedCache(evolve(SMALL, kv_tokens=8000))
    seen: dict[str, list[int]] = {}

    def note(moved: list[RequestProgress]) -> None:
        for each in moved:
            seen.setdefault(each.rid, []).append(each.sampled)

    sampled = array("i", [7] * 2000)
    for number in range(5):
        prompt = array("i", [number] * 50)
        asked: dict[str, Any] = {"max_new": 2000, "salt": "", "session": "", "now": 2.0 * (number > 2)}
        note(cache.submit(f"{number}", prompt, sampled, **asked))
    while (due := cache.due()) is not None:
        note(cache.advance(due))
    assert cache._model.retracted > 0
    assert len(seen) == 5
    for counts in seen.values():
        assert counts == sorted(set(counts))
        assert counts[-1] == 2000


# ── as a host ────────────────────────────────────────────────────────────


async def test_node_learns_small_cache_size(model: LoadedModel, tmp_path: Path) -> None:
    async with opened(model, tmp_path, evolve(SMALL, kv_page=16, speed=10)) as engines:
        ready = engines._hosts[0].ready
        assert ready is not None
        assert (ready.max_total_tokens, ready.capacity) == (6000, 6000 - RESERVED_TOKENS)
        asked = order([1] * 5900, max_tokens=None, top_logprobs=2)
        chunks = await sample(engines, asked)
        assert (len(joined(chunks)), chunks[-1].finish_reason) == (6000 - RESERVED_TOKENS - 5900, "length")
        assert all(chunk.top_logprobs is not None for chunk in chunks)
        with pytest.raises(ContextTooLong):
            await sample(engines, order([1] * 6000))


async def test_alternating_sessions_lose_their_prefixes(model: LoadedModel, tmp_path: Path) -> None:
    """Sessions in turn lose their prefixes once they do not fit together."""
    async with opened(model, tmp_path, evolve(SMALL, speed=10)) as engines:
        few = await played(engines, rounds(Shape(sessions=2, turns=4), "few"))
        many = await played(engines, rounds(Shape(sessions=12, turns=4), "many"))
    assert few.share == 1.0
    assert many.share < 0.6


async def test_requests_share_one_gpu(model: LoadedModel, tmp_path: Path) -> None:
    """Two prompts are read one after the other, and no token comes before its time."""
    slow = evolve(SMALL, prefill_tokens_per_s=5_000, tokens_per_s=100, chunk_tokens=4, kv_past_tokens=1e9)
    async with opened(model, tmp_path, slow) as engines:
        ends: list[float] = []

        async def one(first: int) -> None:
            chunks = await sample(engines, order([first] * 2000, max_tokens=20))
            assert len(joined(chunks)) == 20
            ends.append(time.monotonic() - began)

        began = time.monotonic()
        async with trio.open_nursery() as nursery:
            for first in (400, 500):
                nursery.start_soon(one, first)
        assert max(ends) >= 2 * 2000 / 5_000 + 19 / 100 - 0.02
        await until_idle(engines)


async def test_leaving_and_pausing_leave_nothing(model: LoadedModel, tmp_path: Path) -> None:
    async with opened(model, tmp_path, evolve(SMALL, tokens_per_s=50, chunk_tokens=1)) as engines:
        async with engines.generate(order([1] * 100, max_tokens=None)) as stream:
            await stream.__anext__()
            await engines.pause("in_place")
            with trio.move_on_after(0.5) as held:
                await sample(engines, order([2]))
            assert held.cancelled_caught
            await engines.resume()
            assert len((await stream.__anext__()).ids) >= 1
        await until_idle(engines)
        async with engines.generate(order([1] * 100, max_tokens=None)) as stream:
            await stream.__anext__()
            await engines.pause("abort")
            assert [chunk.finish_reason async for chunk in stream][-1] == "abort"
        await engines.update_weights_from_disk(TINY_MODEL, "new", "in_place")
        await engines.resume()
        chunks = await sample(engines, order([1] * 100))
        assert (chunks[0].cached_tokens, chunks[0].version_spans[0].version) == (0, "new")
