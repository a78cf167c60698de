"""Real SGLang on a CPU: the alternatives it tells of polarnode-tiny, and the experts it tells of a mixture,
are those of transformers.

The mixture is random and made here; its reference is transformers' own forward pass in float32, router and
all.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from engine_mixture import (
    Checkpoint,
    a_conversation_tells_each_position_once,
    check_experts,
    experts_of,
    make_mixture,
)
from engine_reference import TOLERANCE, difference, settings, temporary
from fakes_engine import joined, order, sample, until_idle

from polarnode.core.arrays import TopLogprobs
from polarnode.core.errors import EngineError
from polarnode.core.ports import Chunk
from polarnode.engine.engines import Engines, open_engines
from polarnode.node.config import TINY_MODEL

__all__ = ["temporary"]  # a fixture, asked for by name
# torch and transformers warn of themselves
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

NEAR = 1e-3  # of two experts' logits: float32 in another order of sums may then choose the other


# ── alternatives ──────────────────────────────────────────────────────────────


async def test_alternatives_match_transformers(tmp_path: Path, temporary: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny = Checkpoint(TINY_MODEL, AutoModelForCausalLM.from_pretrained(TINY_MODEL))
    with trio.fail_after(900):
        async with open_engines(settings(tiny, tmp_path)) as engines:  # type: ignore[arg-type]  # of a reference it reads the path alone
            for temperature in (1.0, 0.7):
                prompt = list(range(300, 360))
                chunks = await sample(
                    engines, order(prompt, max_tokens=48, temperature=temperature, top_logprobs=20)
                )
                check_alternatives(tiny, prompt, chunks, temperature)
            with pytest.raises(EngineError, match="--routed-experts"):
                await sample(engines, order(routed_from=0))


def check_alternatives(
    reference: Checkpoint, prompt: Sequence[int], chunks: Sequence[Chunk], temperature: float
) -> None:
    sampled = joined(chunks)
    theirs = reference.rows(prompt, sampled, temperature)
    assert (
        difference(chunks, [float(row[token]) for row, token in zip(theirs, sampled, strict=True)])
        < TOLERANCE
    )
    top = TopLogprobs.joined(chunk.top_logprobs for chunk in chunks if chunk.top_logprobs is not None)
    assert top is not None
    assert (top.k, top.rows) == (20, len(sampled))
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    for place, token in enumerate(sampled):
        given = dict(top.row(place))
        values, _ = theirs[place].topk(20)
        # in order
        assert (
            max(abs(one - float(other)) for one, other in zip(given.values(), values, strict=True))
            < TOLERANCE
        )
        # each of its own token
        assert max(abs(logprob - float(theirs[place, other])) for other, logprob in given.items()) < TOLERANCE
        if token in given:
            # the token's own is among them as it was told
            assert given[token] == pytest.approx(logprobs[place], abs=1e-5)


# ── routed experts ────────────────────────────────────────────────────────────


async def test_experts_match_transformers(tmp_path: Path, temporary: Path) -> None:
    mixture = make_mixture(tmp_path / "mixture")
    with trio.fail_after(900):
        async with open_engines(settings(mixture, tmp_path, routed_experts=True)) as engines:  # type: ignore[arg-type]
            assert engines.routes
            await a_conversation_tells_each_position_once(engines, mixture, near=NEAR)
            await a_long_prompt_is_told_whole(engines, mixture)
            await requests_side_by_side_tell_their_own(engines, mixture)
            await what_a_cut_one_lacks_is_told_to_the_next(engines, mixture)
            assert not any(chunk.routed or chunk.top_logprobs for chunk in await sample(engines, order()))


async def a_long_prompt_is_told_whole(engines: Engines, mixture: Checkpoint) -> None:
    """Longer than SGLang's buffer would be for a batch of decoding requests alone."""
    prompt = [(11 * step) % 900 for step in range(1000)]
    chunks = await sample(engines, order(prompt, max_tokens=4, routed_from=0, top_logprobs=20))
    check_experts(mixture, [*prompt, *joined(chunks)], experts_of(chunks), near=NEAR)
    check_alternatives(mixture, prompt, chunks, 1.0)


async def requests_side_by_side_tell_their_own(engines: Engines, mixture: Checkpoint) -> None:
    async def one(number: int) -> None:
        prompt = [number, *range(100, 120 + 10 * number)]
        chunks = await sample(engines, order(prompt, max_tokens=10 + number, temperature=1.0, routed_from=0))
        check_experts(mixture, [*prompt, *joined(chunks)], experts_of(chunks), near=NEAR)

    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(one, number)
    await until_idle(engines)


async def what_a_cut_one_lacks_is_told_to_the_next(engines: Engines, mixture: Checkpoint) -> None:
    prompt, got = [5, 4, 3, 2, 1], list[int]()
    async with engines.generate(order(prompt, max_tokens=2000, temperature=1.0, routed_from=0)) as stream:
        while len(got) < 8:
            chunk = await stream.__anext__()
            assert chunk.routed is None
            got += chunk.ids
    after = [*prompt, *got, 9, 8]
    chunks = await sample(engines, order(after, max_tokens=3, routed_from=0))
    check_experts(mixture, [*after, *joined(chunks)], experts_of(chunks), near=NEAR)
