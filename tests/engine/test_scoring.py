"""Whose row an engine host reads next, and what becomes of rows whose host dies or whose answer cannot be used.
The engines are simulated; real ones are in test_scoring_real.py.
"""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import trio
import trio.lowlevel
from fakes_engine import order, sample

from polarnode.core.arrays import floats, ids
from polarnode.core.errors import EngineError, Refused
from polarnode.core.ports import RowScores, ScoreOrder
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.protocol import RowLogprobs, Simulation
from polarnode.engine.scoring import REST, ROWS_WHEN_IDLE, ScoreCall, ScoreTurns
from polarnode.engine.settings import EngineSettings, SimulatedEngine
from polarnode.engine.simulated.answers import simulated_scores
from polarnode.node.config import TINY_MODEL
from polarnode.node.settings import simulated_marks
from polarnode.tokens.template import load_model

ROW = list(range(300, 340))


@asynccontextmanager
async def opened(tmp_path: Path, **simulation: Any) -> AsyncIterator[Engines]:
    model = load_model(TINY_MODEL)
    simulated = SimulatedEngine(
        simulation=Simulation(**{"first_token_s": 0.0, "prefill_tokens_per_s": 0, **simulation}),
        marks=simulated_marks(model.family),
        vocab_size=model.tokenizer.vocab_size,
    )
    settings = EngineSettings(model_path=TINY_MODEL, device="cpu", state_dir=tmp_path, simulated=simulated)
    with trio.fail_after(120):
        async with open_engines(settings) as engines:
            yield engines


def to_score(row: list[int], start: int = 1) -> ScoreOrder:
    return ScoreOrder(request_id=uuid4().hex, row=ids(row), start=start)


async def test_simulated_score_is_repeatable(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines:
        found = await engines.score(to_score(ROW, start=7))
        assert found == RowScores(logprobs=simulated_scores(ids(ROW), 7), version="0")
        assert len(found.logprobs) == len(ROW) - 7
        for bad, words in (
            (to_score([1]), "cannot be scored from token 1 on"),
            (to_score([1, 2], start=0), "from token 0 on"),
            (to_score([1, engines.vocab_size]), "this model knows 0 to"),
            (to_score([1, -1]), "this model knows 0 to"),
            (to_score([1] * engines.context_length), f"reads {engines.context_length - 1} at most"),
        ):
            with pytest.raises(Refused, match=words):
                await engines.score(bad)


async def test_row_moves_from_dead_host(tmp_path: Path) -> None:
    async with opened(tmp_path, first_token_s=0.5) as engines:
        async with trio.open_nursery() as nursery:

            async def kill() -> None:
                await trio.sleep(0.2)
                pid = engines.statistics().hosts[0].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)

            nursery.start_soon(kill)
            found = await engines.score(to_score(ROW))
        assert found.logprobs == simulated_scores(ids(ROW), 1)
        assert engines.restarts == (1,)
        with trio.move_on_after(0.1):  # one that leaves
            await engines.score(to_score(ROW))
        assert engines.statistics().hosts[0].in_flight <= 1
        assert await engines.score(to_score(ROW)) == found  # after it, as ever


async def test_new_weights_wait_or_rescore(tmp_path: Path) -> None:
    """New weights wait for a row, or the row is scored again."""
    async with opened(tmp_path, first_token_s=0.3) as engines:
        found: list[RowScores] = []

        async def score() -> None:
            found.append(await engines.score(to_score(ROW)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(score)
            await trio.sleep(0.1)
            await engines.update_weights_from_disk(TINY_MODEL, "v2", "drain")
            await score()
        assert [each.version for each in found] == ["0", "v2"]


# ── turns ─────────────────────────────────────────────────────────────────────


async def test_rows_rest_while_agents_sample(autojump_clock: Any) -> None:
    """Beside agents one row is read at a time, with rests."""
    sampling = True
    turns, read = ScoreTurns(samples=lambda: sampling), []

    async def row(number: int) -> None:
        async with turns.turn():
            began = trio.current_time()
            await trio.sleep(1)
            read.append((number, began))

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(row, number)
            await trio.lowlevel.checkpoint()
            await trio.sleep(0.01)
    starts = [began for _, began in read]
    assert [number for number, _ in read] == [0, 1, 2]
    assert starts[1] - starts[0] == starts[2] - starts[1] == pytest.approx(1 + REST)
    sampling, began = False, trio.current_time()
    async with trio.open_nursery() as nursery:
        for number in range(2 * ROWS_WHEN_IDLE):
            nursery.start_soon(row, number)
    assert trio.current_time() - began == pytest.approx(2)  # eight at once, and no rest
    assert turns.waiting == 0


async def test_cancelled_row_blocks_nobody(autojump_clock: Any) -> None:
    turns = ScoreTurns(samples=lambda: True)
    async with turns.turn():
        with trio.move_on_after(1):
            async with turns.turn():
                raise AssertionError("it is not its turn")
    began = trio.current_time()
    async with turns.turn():
        assert trio.current_time() - began == pytest.approx(REST, abs=0.1)


async def test_agents_sample_while_rows_wait(tmp_path: Path) -> None:
    async with (
        opened(tmp_path, first_token_s=0.2, tokens_per_s=0, answer_tokens=4) as engines,
        trio.open_nursery() as nursery,
    ):
        for _ in range(20):
            nursery.start_soon(engines.score, to_score(ROW))
        with trio.fail_after(10):
            for _ in range(3):
                await sample(engines, order([5], max_tokens=4))
        nursery.cancel_scope.cancel()


# ── answers ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("values", [[-1.0], [-1.0, -2.0, -3.0], [-1.0, float("nan")]])
async def test_invalid_answer_fails_its_row(values: list[float]) -> None:
    call = ScoreCall(2)
    call.take(RowLogprobs(rid="r", logprobs=floats(values).tobytes(), version="1"))
    with pytest.raises(EngineError, match="or some that are no numbers"):
        await call.result()


async def test_impossible_token_has_infinite_logprob() -> None:
    """A token that cannot be sampled has the logprob minus infinity."""
    call = ScoreCall(2)
    call.take(RowLogprobs(rid="r", logprobs=floats([-1.0, -float("inf")]).tobytes(), version="1"))
    assert list((await call.result()).logprobs) == [-1.0, -float("inf")]
