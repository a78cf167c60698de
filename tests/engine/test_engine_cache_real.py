"""The cache of a real SGLang on a CPU, made small, against the simulated engine's: the same calls find the same
tokens. And what SGLang does with sessions that are forgotten.

One engine is started, which takes half of the minute; the sequences are drawn anew in each run.
"""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from cache_calls import CacheCounts, Shape, lives, played, rounds
from engine_reference import TOLERANCE, Reference, difference, settings, temporary
from fakes_engine import joined, order, sample

from polarnode.engine.calls import prefix_name
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.protocol import Forget, Simulation
from polarnode.engine.settings import EngineSettings, SimulatedEngine
from polarnode.node.config import TINY_MODEL
from polarnode.node.settings import simulated_marks
from polarnode.tokens.template import load_model

__all__ = ["temporary"]  # a fixture, asked for by name
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

KV_TOKENS = 6000
# such a CPU's constants, about (benchmarks/kv_real.py measures them): only calls at once depend on them
SMALL = Simulation(
    kv_tokens=KV_TOKENS, kv_page=1, kv_chunk=131_072, kv_past_tokens=800, kv_request_s=0.0014, kv_context_s=3e-7,
    tokens_per_s=260, prefill_tokens_per_s=32_000, max_running=16,
)  # fmt: skip
IN_TURN = {
    "cliff": Shape(sessions=6, turns=5),
    "groups": Shape(sessions=8, turns=4, group=4),
    "sub-agents": Shape(sessions=7, turns=4, children=0.5),
    "few": Shape(sessions=3, turns=5, result=(20, 600), children=0.3),
}
AT_ONCE = {
    "two": Shape(sessions=6, turns=4, at_once=2),
    "three": Shape(sessions=8, turns=4, at_once=3),
    "groups": Shape(sessions=12, turns=3, at_once=4, group=4, children=0.3),
}


@asynccontextmanager
async def simulated(state: Path) -> AsyncIterator[Engines]:
    model = load_model(TINY_MODEL)
    marks, vocabulary = simulated_marks(model.family), model.tokenizer.vocab_size
    async with open_engines(
        EngineSettings(
            model_path=TINY_MODEL,
            device="cuda",
            gpus=(0,),
            state_dir=state,
            context_length=8192,
            residency=False,
            session_cache=True,
            simulated=SimulatedEngine(simulation=SMALL, marks=marks, vocab_size=vocabulary),
        )
    ) as engines:
        yield engines


async def test_real_and_simulated_caches_agree(tmp_path: Path, temporary: Path) -> None:
    reference = Reference(tmp_path / "model", seed=1)
    # sessions of this test never end, so that the policy would hold each call for a place
    small = settings(
        reference, tmp_path / "real", max_total_tokens=KV_TOKENS, session_cache=True, residency=False
    )
    seed = os.urandom(4).hex()
    with trio.fail_after(600):
        async with open_engines(small) as real, simulated(tmp_path / "simulated") as fake:
            ready = real._hosts[0].ready
            assert ready is not None
            assert (ready.max_total_tokens, ready.capacity) == (KV_TOKENS, fake._hosts[0].ready.capacity)  # type: ignore[union-attr]
            await sessions_in_turn_find_the_same(real, fake, seed)
            await sessions_that_end_are_forgotten_alike(real, fake, seed)
            await calls_at_once_find_about_the_same(real, fake, seed)
            await a_forgotten_session_goes_first(real, reference)
            await a_forgotten_session_is_remembered_again(real)


async def sessions_in_turn_find_the_same(real: Engines, fake: Engines, seed: str) -> None:
    for name, shape in IN_TURN.items():
        asked = rounds(shape, f"{name} {seed}")
        one, other = await played(real, asked), await played(fake, asked)
        assert one.prompts == other.prompts
        assert close([one], [other], 0.02), (name, seed, one.cached, other.cached)
        if name == "cliff":
            assert one.share < 0.9, "the cache was too large to lose anything"


async def sessions_that_end_are_forgotten_alike(real: Engines, fake: Engines, seed: str) -> None:
    """Their ends make room for those that still call. Names are new each time, and what the sequence before
    has left is forgotten with it.
    """
    for number in range(2):
        asked = lives(5, 8, f"{number} {seed}")
        figures = [await played(engines, asked, forget=partial(forget, engines)) for engines in (real, fake)]
        assert close([figures[0]], [figures[1]], 0.02), (seed, figures[0].cached, figures[1].cached)


async def calls_at_once_find_about_the_same(real: Engines, fake: Engines, seed: str) -> None:
    """When a call arrives within a round is a matter of milliseconds, and one that finds a prefix evicted
    loses a thousand tokens: the real engine itself differs by as much from one time to the next. So the sums.
    """
    ones, others = [], []
    for name, shape in AT_ONCE.items():
        for number in range(2):
            asked = rounds(shape, f"{name} {number} {seed}")
            ones.append(await played(real, asked))
            others.append(await played(fake, asked))
    pairs = [(sum(one.cached), sum(other.cached)) for one, other in zip(ones, others, strict=True)]
    assert close(ones, others, 0.08), (seed, pairs)


def close(ones: Sequence[CacheCounts], others: Sequence[CacheCounts], share: float) -> bool:
    real, fake = sum(sum(each.cached) for each in ones), sum(sum(each.cached) for each in others)
    return abs(fake - real) <= share * real


# ── sessions ────────────────────────────────────────────────────────────


def forget(engines: Engines, session: str) -> None:
    engines._hosts[0].process.post(Forget(session=prefix_name(session, "")))


async def cached(engines: Engines, prompt: Sequence[int], session: str) -> int:
    chunks = await sample(engines, order(prompt, affinity=session))
    return chunks[0].cached_tokens


def tokens(session: int, count: int = 1400) -> list[int]:
    """A prompt that begins as no other one's."""
    return [(session * 37 + step * step * 11) % 900 for step in range(count)]


async def a_forgotten_session_goes_first(real: Engines, reference: Reference) -> None:
    """Of four sessions that fill the cache the youngest one is forgotten, and gives its room to a fifth; the
    oldest would have. What is sampled, and its logprobs, are transformers' as ever.
    """
    for number in range(4):
        prompt = tokens(number)
        chunks = await sample(real, order(prompt, max_tokens=8, affinity=f"kept {number}"))
        assert joined(chunks) == reference.greedy(prompt, 8)
        assert difference(chunks, reference.logprobs(prompt, joined(chunks))) < TOLERANCE
    forget(real, "kept 3")
    assert await cached(real, tokens(4), "kept 4") < 10
    for number in (0, 1, 2, 4):
        chunks = await sample(real, order([*tokens(number), 1, 2], affinity=f"kept {number}"))
        assert chunks[0].cached_tokens >= 1400
        prompt = [*tokens(number), 1, 2]
        assert joined(chunks) == reference.greedy(prompt, 8)
        assert difference(chunks, reference.logprobs(prompt, joined(chunks))) < TOLERANCE
    assert await cached(real, tokens(3), "kept 3") < 1400, "it was forgotten, and nobody else was evicted"


async def a_forgotten_session_is_remembered_again(real: Engines) -> None:
    """A session that calls after it was forgotten is one like any other, and so is one that never was."""
    forget(real, "never seen")
    for number in range(5):
        forget(real, f"kept {number}")
    for number in range(10, 14):
        await cached(real, tokens(number), f"kept {number}")
    forget(real, "kept 10")
    assert await cached(real, [*tokens(10), 1], "kept 10") == 1400
    forget(real, "kept 12")
    assert await cached(real, tokens(15), "kept 15") < 10
    for number in (10, 11, 13):
        assert await cached(real, [*tokens(number), 2], f"kept {number}") >= 1400, number


async def test_ended_session_frees_cache_for_others(tmp_path: Path, temporary: Path) -> None:
    """As a node runs it: the policy tells a real engine which session is over. Three fill the cache, the youngest
    ends, and a fourth takes its room; without the setting the oldest would lose its prefix.
    """
    reference = Reference(tmp_path / "model", seed=1)
    small = settings(reference, tmp_path, max_total_tokens=KV_TOKENS, session_cache=True)
    with trio.fail_after(600):
        async with open_engines(small) as real:
            for number in range(3):
                assert real.begin_session(f"s{number}", "pi", f"g{number}", lambda seconds: None) is None
                assert await cached(real, tokens(number, 1500), f"s{number}") < 10
            real.end_session("s2")
            assert real.begin_session("s3", "pi", "g3", lambda seconds: None) is None
            assert await cached(real, tokens(3, 1700), "s3") < 10
            assert [await cached(real, [*tokens(number, 1500), 1], f"s{number}") for number in (0, 1)] == [
                1500
            ] * 2
            assert await cached(real, tokens(2, 1500), "") < 10, "it has ended, and nobody else was evicted"
