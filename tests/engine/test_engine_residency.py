"""Sessions on engines whose caches are counted: with simulated engines of few tokens, processes of their own."""

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from attrs import evolve
from fakes_engine import order, until

from polarnode.core.ports import GenerateOrder
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.protocol import Simulation
from polarnode.engine.residency import ResidencyStatistics
from polarnode.engine.settings import EngineSettings, ExternalEngine, SimulatedEngine
from polarnode.node.config import TINY_MODEL
from polarnode.node.settings import simulated_marks
from polarnode.tokens.template import load_model

CAPACITY = 40_000
SMALL_CACHE = Simulation(kv_tokens=CAPACITY, speed=200.0)


def settings(folder: Path, *, gpus: tuple[int, ...] = (0,), residency: bool = True) -> EngineSettings:
    model = load_model(TINY_MODEL)
    return EngineSettings(
        model_path=TINY_MODEL,
        device="cuda",
        gpus=gpus,
        state_dir=folder,
        residency=residency,
        simulated=SimulatedEngine(
            simulation=SMALL_CACHE,
            marks=simulated_marks(model.family),
            vocab_size=model.tokenizer.vocab_size,
        ),
    )


@asynccontextmanager
async def engines(
    folder: Path, *, gpus: tuple[int, ...] = (0,), residency: bool = True
) -> AsyncIterator[Engines]:
    with trio.fail_after(120):
        async with open_engines(settings(folder, gpus=gpus, residency=residency)) as found:
            yield found


def call(session: str, tokens: int, *, seed: int = 1) -> GenerateOrder:
    base = order(max_tokens=8)
    prompt = array("i", [(seed * 31 + place * 7) % 200 + 10 for place in range(tokens)])
    return evolve(base, prompt=prompt, affinity=session, chain="0")


async def sampled(found: Engines, asked: GenerateOrder) -> int:
    """Tokens of the prompt that were cached."""
    cached = 0
    async with found.generate(asked) as chunks:
        async for chunk in chunks:
            cached = max(cached, chunk.cached_tokens)
    return cached


def of(found: Engines, index: int = 0) -> ResidencyStatistics:
    statistics = found.statistics().hosts[index].residency
    assert statistics is not None
    return statistics


def begin(found: Engines, session: str, group: str = "g", credits: list[float] | None = None) -> str | None:
    return found.begin_session(session, "pi", group, (credits if credits is not None else []).append)


async def test_session_size_counts_engine_reads(tmp_path: Path) -> None:
    """A session's size is counted by what the engine read of it."""
    async with engines(tmp_path) as found:
        assert begin(found, "a") is None
        assert await sampled(found, call("a", 6_000)) == 0
        assert await sampled(found, call("a", 7_000)) > 5_800
        figures = of(found)
        assert (figures.capacity, figures.idle, figures.busy) == (CAPACITY, 1, 0)
        assert figures.tokens == 7_008
        assert figures.reread_unplanned < 128, "the last page is read again"
        found.end_session("a")
        assert of(found).tokens == 0


async def test_sessions_begin_within_cache_size(tmp_path: Path) -> None:
    async with engines(tmp_path) as found:
        begun = 0
        while (why := begin(found, f"s{begun}")) is None:
            begun += 1
            assert begun < 100
        assert begun == 4, "0.75 of the cache, in sessions of a sixth of it"
        assert why == "engine: its cache has no room for what another session would become"
        found.end_session("s0")
        assert begin(found, "another") is None


async def test_unqueued_session_begins_without_place(tmp_path: Path) -> None:
    """A session that does not wait begins without a place."""
    async with engines(tmp_path) as found:
        begun = 0
        while begin(found, f"s{begun}") is None:
            begun += 1
        assert found.begin_session("capture", "capture", "g", [].append, waits=False) is None
        assert (of(found).busy + of(found).idle, of(found).displaced) == (begun, 1)
        found.end_session("capture")
        assert of(found).displaced == 0


async def test_displaced_session_call_is_held(tmp_path: Path) -> None:
    """The call of a displaced session is held until another session ends."""
    credits: list[float] = []
    async with engines(tmp_path) as found:
        for name in ("a", "b"):
            assert begin(found, name, name, credits if name == "b" else None) is None
        for number, name in enumerate(("a", "b")):
            await sampled(found, call(name, 21_000 - number, seed=number))
        assert of(found).displaced == 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sampled, found, call("b", 21_100, seed=1))
            await until(lambda: of(found).held == 1)
            await trio.sleep(0.3)
            assert of(found).held == 1
            found.end_session("a")
        assert (of(found).held, of(found).displaced, of(found).idle) == (0, 0, 1)
    assert 0.3 <= sum(credits) < 30


async def test_held_call_ends_with_client(tmp_path: Path) -> None:
    """A held call ends with its client, and with a host that dies."""
    async with engines(tmp_path) as found:
        for name in ("a", "b"):
            assert begin(found, name, name) is None
        for number, name in enumerate(("a", "b")):
            await sampled(found, call(name, 21_000 - number, seed=number))
        with trio.move_on_after(0.3) as scope:
            await sampled(found, call("b", 21_100, seed=1))
        assert scope.cancelled_caught
        assert of(found).held == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sampled, found, call("b", 21_100, seed=1))
            await until(lambda: of(found).held == 1)
            found._hosts[0].process.restart_with_reason("killed by the test")
        assert found.restarts == (1,)
        assert of(found).tokens == 21_108, "read by the host that came back"


async def test_session_keeps_host_of_group(tmp_path: Path) -> None:
    """A session keeps its host, and a group comes together."""
    async with engines(tmp_path, gpus=(0, 1)) as found:
        for name, group in (("a", "one"), ("b", "two"), ("c", "one")):
            assert begin(found, name, group) is None
        at = {name: [host.index for host in found._hosts if host.residents.has(name)] for name in "abc"}
        assert at["a"] == at["c"]
        for name in "abc":
            await sampled(found, call(name, 3_000))
        after = {name: [host.index for host in found._hosts if host.residents.has(name)] for name in "abc"}
        assert after == at


async def test_new_weights_plan_next_read(tmp_path: Path) -> None:
    """New weights make the next read of a session a planned one."""
    async with engines(tmp_path) as found:
        assert begin(found, "a") is None
        await sampled(found, call("a", 6_000))
        await found.update_weights_from_disk(TINY_MODEL, "1")
        assert await sampled(found, call("a", 6_100)) == 0
        figures = of(found)
        assert figures.reread_unplanned == 0
        assert figures.reread_planned > 5_900


def begun(found: Engines) -> int:
    """How many sessions may begin."""
    for number in range(50):
        if begin(found, f"new{number}") is not None:
            return number
    return 50


async def test_restarted_node_has_learned_sizes(tmp_path: Path) -> None:
    async with engines(tmp_path) as found:
        assert begun(found) == 4, "a sixth of the cache each is the guess"
        for number in range(4):
            await sampled(found, call(f"new{number}", 64, seed=number))
            await sampled(found, call(f"new{number}", 1_500, seed=number))
            found.end_session(f"new{number}")
        learned = begun(found)
        assert learned > 4, "they ended with 1,500, and four guesses still count"
    async with engines(tmp_path) as found:
        assert begun(found) == learned
    (tmp_path / "engine-0.sizes.json").write_text("{")
    async with engines(tmp_path) as found:
        assert begun(found) == 4, "a damaged file is as none"


async def test_disabled_residency_begins_every_session(tmp_path: Path) -> None:
    async with engines(tmp_path, residency=False) as found:
        assert [begin(found, f"s{number}") for number in range(50)] == [None] * 50
        await sampled(found, call("s0", 6_000))
        assert found.statistics().hosts[0].residency is None


def test_unbounded_cache_is_not_counted(tmp_path: Path) -> None:
    """A cache without bounds and an external engine's cache are not counted."""
    mine = settings(tmp_path)
    assert mine.has_residency
    assert mine.simulated is not None
    unbounded = evolve(mine.simulated, simulation=Simulation())
    assert not evolve(mine, simulated=unbounded).has_residency
    servers = ExternalEngine(urls=("http://127.0.0.1:1",), vocab_size=1, context_length=1)
    assert not evolve(mine, simulated=None, external=servers).has_residency


@pytest.mark.parametrize("session", ["", "unknown"])
async def test_unregistered_calls_are_served(tmp_path: Path, session: str) -> None:
    async with engines(tmp_path) as found:
        assert await sampled(found, call(session, 2_000)) == 0
        found.end_session(session)
        assert of(found).tokens == 0
