"""Real SGLang on a CPU scores rows as transformers does: rows of any length, with a cached beginning, in several
chunks, beside agents, and across new weights and the death of its host.
"""

import os
import random
import signal
from pathlib import Path
from uuid import uuid4

import pytest
import trio
from engine_mixture import Checkpoint
from engine_reference import TOLERANCE, Reference, host_pid, settings, temporary
from fakes_engine import order, sample
from openai import OpenAI

from polarnode.client import PolarnodeClient
from polarnode.core.arrays import ids
from polarnode.core.errors import Refused
from polarnode.core.ports import RowScores, ScoreOrder
from polarnode.core.task import BuilderSpec, CaptureSpec, CarrySpec
from polarnode.core.trajectory import Trajectory, sequence
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.protocol import Simulation
from polarnode.merge.token_extras import row_to_score
from polarnode.node.config import TINY_MODEL, NodeConfig, TeacherConfig
from polarnode.node.opening import open_node
from polarnode.node.serving import serve_control_plane

__all__ = ["temporary"]  # a fixture, asked for by name
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


def row_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


async def scored(engines: Engines, row: list[int], start: int = 1) -> RowScores:
    return await engines.score(ScoreOrder(request_id=uuid4().hex, row=ids(row), start=start))


def differs(reference: Reference, row: list[int], start: int, scores: RowScores) -> float:
    expected = reference.logprobs(row[:start], row[start:])
    return max(abs(one - other) for one, other in zip(expected, scores.logprobs, strict=True))


async def test_scores_match_transformers(tmp_path: Path, temporary: Path) -> None:
    one, two = Reference(tmp_path / "one", 1), Reference(tmp_path / "two", 2)
    # rows of more than 512 tokens are read in chunks
    small = settings(one, tmp_path, extra={"chunked_prefill_size": 512})
    with trio.fail_after(900):
        async with open_engines(small) as engines:
            row = row_of(2000)
            whole = await scored(engines, row)
            assert differs(one, row, 1, whole) < TOLERANCE
            again = await scored(engines, row, start=700)  # its beginning is cached now
            assert differs(one, row, 700, again) < TOLERANCE
            last = await scored(engines, row, start=1999)
            assert (len(last.logprobs), last.version) == (1, "0")
            assert differs(one, [5, 7], 1, await scored(engines, [5, 7])) < TOLERANCE
            with pytest.raises(Refused, match="knows 0 to 999"):
                await scored(engines, [5, 1000])
            with pytest.raises(Refused, match=f"reads {engines.context_length - 1} at most"):
                await scored(engines, row_of(engines.context_length))
            row = row_of(engines.context_length - 1)
            assert differs(one, row, 1, await scored(engines, row)) < TOLERANCE

            async def agent() -> None:
                for turn in range(3):
                    await sample(engines, order(row_of(300, turn), max_tokens=64))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(agent)
                for seed in range(4):
                    beside = row_of(400, seed)
                    assert differs(one, beside, 1, await scored(engines, beside)) < TOLERANCE

            await engines.update_weights_from_disk(two.path, "v2")
            newer = await scored(engines, row[:600])
            assert (newer.version, differs(two, row[:600], 1, newer) < TOLERANCE) == ("v2", True)

            with trio.move_on_after(0.05):  # its reader leaves: the engine reads no more of it
                await scored(engines, row_of(8000, 7))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_kill, host_pid(engines))
                survived = await scored(engines, row_of(8000, 8))  # read again by the next host
            assert differs(two, row_of(8000, 8), 1, survived) < TOLERANCE
            assert engines.restarts == (1,)


@pytest.mark.podman
async def test_teacher_scores_policy_samples(tmp_path: Path, temporary: Path) -> None:
    """A whole node: random answers, and a real teacher with the same vocabulary, polarnode-tiny."""
    from transformers import AutoModelForCausalLM

    tiny = Checkpoint(TINY_MODEL, AutoModelForCausalLM.from_pretrained(TINY_MODEL))
    settings = NodeConfig(
        engine="simulated",
        simulated=Simulation(tokens_per_s=0, first_token_s=0, answer_tokens=40),
        gpus=(0,),
        port=0,
        state_dir=str(tmp_path / "state"),
        warm=0,
        teachers={"tiny": TeacherConfig(model=str(TINY_MODEL), cpu=True)},
    )
    with trio.fail_after(900):
        async with open_node(settings, report=print) as node, serve_control_plane(node) as address:
            url = f"http://127.0.0.1:{address.port}"
            found = await trio.to_thread.run_sync(_session, url)
            client = PolarnodeClient(url)
            under = await trio.to_thread.run_sync(
                lambda: client.score_session(found.session_id, weights="tiny")
            )
    turns, worst = {each.index: each for each in found.turns}, 0.0
    given = {each.turn: each for each in under.tokens}
    for turn in found.turns:  # `polarnode score` finds the same as transformers
        row = list(sequence(turns, turn.index))
        expected = tiny.rows(row[: turn.prompt_length], row[turn.prompt_length :])
        for new, each, token in zip(given[turn.index].new, expected, turn.sampled, strict=True):
            worst = max(worst, abs(new - float(each[token])))
    assert under.total is not None
    assert under.total.tokens == found.sampled_tokens
    assert len(found.traces) > 1  # a row that is cut
    for trace in found.traces:
        assert trace.teacher_logprobs is not None, trace.missing_extras
        row, _ = row_to_score(trace, turns)
        expected = [
            0.0,
            *(float(each[token]) for each, token in zip(tiny.rows(row[:1], row[1:]), row[1:], strict=True)),
        ]
        for place, trained in enumerate(trace.loss_mask):
            due = expected[trace.offset + place] if trained else 0.0
            worst = max(worst, abs(trace.teacher_logprobs[place] - due))
    assert worst < TOLERANCE
    assert found.metrics["teacher"]["versions"] == ["tiny"]  # type: ignore[index,call-overload]


def _session(url: str) -> Trajectory:
    client = PolarnodeClient(url)
    spec = CaptureSpec(carry=CarrySpec(teacher="tiny"), builder=BuilderSpec(config={"max_row_tokens": 120}))
    with client.capture(spec) as session:
        agent, messages = OpenAI(base_url=session.openai_base_url, api_key=session.key), []
        for turn in range(3):
            messages.append({"role": "user", "content": f"Write kiwi to out{turn}.txt, please."})
            answer = agent.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        session.reward = 1.0
    return client.trajectory(session.session_id, turns="full")


async def _kill(pid: int) -> None:
    await trio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
