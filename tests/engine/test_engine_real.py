"""Real SGLang on a CPU, through its own process: what it samples, what it says of it, and what is left when
it dies in any way.

Each start takes 12 to 30 seconds, so the steps on a living engine share one. The checkpoint is random and
made here: nothing depends on trained weights. The reference is transformers' own forward pass in float32.
"""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import trio
from engine_reference import (
    CONTEXT,
    TOLERANCE,
    Reference,
    difference,
    host_pid,
    is_nothing_left,
    scheduler_of,
    settings,
    shared_memory_of,
    start_node_process,
    temporary,
)
from fakes_engine import contract, joined, order, sample, until_idle

from polarnode.core.errors import EngineError, Refused
from polarnode.core.ports import Chunk
from polarnode.engine.engines import Engines, open_engines
from polarnode.support.concurrency import group_members

__all__ = ["temporary"]  # a fixture, asked for by name
# torch and transformers warn of themselves
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("model") / "old", seed=1)


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("model") / "new", seed=2)


async def test_real_engine_starts_and_stops(
    reference: Reference, updated: Reference, tmp_path: Path, temporary: Path
) -> None:
    with trio.fail_after(900):
        async with open_engines(settings(reference, tmp_path)) as engines:
            shared = shared_memory_of(host_pid(engines))
            assert shared
            await contract(engines)
            await greedy_is_what_transformers_says(engines, reference)
            await logprobs_are_what_transformers_says(engines, reference)
            await extensions_of_a_cached_prefix_are_exact(engines, reference)
            await eight_at_once(engines)
            await a_pause_freezes_and_resumes(engines)
            await a_pause_can_abort(engines)
            await weights_are_updated_in_flight(engines, reference, updated)
            await a_killed_host_is_replaced(engines, updated)
            await a_killed_scheduler_is_replaced(engines, updated)
            last = host_pid(engines)
            shared |= shared_memory_of(last)
        assert group_members(last) == []
    assert is_nothing_left(temporary, shared)


async def greedy_is_what_transformers_says(engines: Engines, reference: Reference) -> None:
    for prompt in ([5], [1, 2, 3], list(range(10, 300))):
        chunks = await sample(engines, order(prompt, max_tokens=16))
        assert joined(chunks) == reference.greedy(prompt, 16)


async def logprobs_are_what_transformers_says(engines: Engines, reference: Reference) -> None:
    prompt = [7, 11, 13, 17]
    for temperature in (1.0, 0.7, 0.0):
        chunks = await sample(engines, order(prompt, max_tokens=64, temperature=temperature))
        theirs = reference.logprobs(prompt, joined(chunks), temperature or 1.0)
        assert difference(chunks, theirs) < TOLERANCE


async def extensions_of_a_cached_prefix_are_exact(engines: Engines, reference: Reference) -> None:
    """An agent's turns: each prompt is the one before, its sample, and some more. The CPU's attention is ours
    there.
    """
    prompt = [(step * 7) % 900 for step in range(3000)]
    for turn in range(3):
        chunks = await sample(engines, order(prompt, max_tokens=8, temperature=1.0))
        if turn:
            assert chunks[-1].cached_tokens >= 3000
        assert difference(chunks, reference.logprobs(prompt, joined(chunks))) < TOLERANCE
        prompt = [*prompt, *joined(chunks), *(step % 900 for step in range(1200 * turn + 40))][
            : CONTEXT - 100
        ]


async def eight_at_once(engines: Engines) -> None:
    results: dict[int, list[int]] = {}

    async def one(number: int) -> None:
        results[number] = joined(await sample(engines, order([number, 2, 3], max_tokens=40, temperature=1.0)))

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(one, number)
    assert [len(results[number]) for number in range(8)] == [40] * 8
    await until_idle(engines)


async def a_pause_freezes_and_resumes(engines: Engines) -> None:
    async with engines.generate(order(max_tokens=3000, temperature=1.0)) as stream:
        await stream.__anext__()
        await engines.pause("in_place")
        assert engines.statistics().paused == "in_place"
        with trio.move_on_after(1) as quiet:  # what was on its way still comes
            async for _ in stream:
                pass
        with trio.move_on_after(1) as silent:
            await stream.__anext__()
        with trio.move_on_after(0.5) as held:
            await sample(engines, order())
        assert quiet.cancelled_caught
        assert silent.cancelled_caught
        assert held.cancelled_caught
        await engines.resume()
        await stream.__anext__()
    await until_idle(engines)
    assert len(joined(await sample(engines, order()))) == 8


async def a_pause_can_abort(engines: Engines) -> None:
    async with engines.generate(order(max_tokens=3000, temperature=1.0)) as stream:
        await stream.__anext__()
        await engines.pause("abort")
        assert [chunk.finish_reason async for chunk in stream][-1] == "abort"
    await engines.resume()


async def weights_are_updated_in_flight(engines: Engines, reference: Reference, updated: Reference) -> None:
    prompt = list(range(100, 200))
    assert joined(await sample(engines, order(prompt))) == reference.greedy(prompt, 8)
    chunks: list[Chunk] = []
    async with engines.generate(order(prompt, max_tokens=1500, temperature=1.0)) as stream:
        chunks.append(await stream.__anext__())
        await engines.update_weights_from_disk(updated.path, "new", "retract")
        chunks += [chunk async for chunk in stream]
    old, new = chunks[-1].version_spans
    assert (old.version, old.start, new.version, new.end) == ("0", 0, "new", 1500)
    sampled = joined(chunks)
    assert difference(chunks, reference.logprobs(prompt, sampled), old) < TOLERANCE
    assert difference(chunks, updated.logprobs(prompt, sampled), new) < TOLERANCE
    # not the old weights' cache
    assert joined(await sample(engines, order(prompt))) == updated.greedy(prompt, 8)
    with pytest.raises(Refused, match=r"no config\.json under"):
        await engines.update_weights_from_disk(Path("/nowhere/at/all"), "newer", "in_place")
    assert engines.statistics().weight_version == "new"
    assert joined(await sample(engines, order(prompt))) == updated.greedy(prompt, 8)


async def a_killed_host_is_replaced(engines: Engines, updated: Reference) -> None:
    await dies_and_comes_back(engines, host_pid(engines), updated)


async def a_killed_scheduler_is_replaced(engines: Engines, updated: Reference) -> None:
    await dies_and_comes_back(engines, scheduler_of(host_pid(engines)), updated)


async def dies_and_comes_back(engines: Engines, victim: int, updated: Reference) -> None:
    host, restarts = host_pid(engines), engines.statistics().hosts[0].restarts
    async with engines.generate(order(max_tokens=4000, temperature=1.0)) as stream:
        await stream.__anext__()
        os.kill(victim, signal.SIGKILL)
        # long before the 4,000 tokens could come
        with pytest.raises(EngineError, match="died") as caught, trio.fail_after(60):
            async for _ in stream:
                pass
    assert caught.value.retryable
    # waits for the next host, which has the new weights
    assert joined(await sample(engines, order([1, 2, 3]))) == updated.greedy([1, 2, 3], 8)
    assert engines.statistics().hosts[0].restarts == restarts + 1
    assert group_members(host) == []


async def test_failed_start_names_setting(reference: Reference, tmp_path: Path, temporary: Path) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(reference.path, torn)
    os.truncate(torn / "model.safetensors", 4096)
    with pytest.raises(EngineError) as caught, trio.fail_after(300):
        async with open_engines(settings(reference, tmp_path, model_path=torn)):
            pytest.fail("it does not serve")
    assert "the weights under --model cannot be read" in str(caught.value)
    assert "engine-0.log" in str(caught.value)
    assert is_nothing_left(temporary, set())


@pytest.mark.parametrize("moment", ["while SGLang is imported", "while the engine starts", "while it serves"])
async def test_killed_node_leaves_nothing(
    reference: Reference, tmp_path: Path, temporary: Path, moment: str
) -> None:
    parent = start_node_process(reference, tmp_path)
    assert parent.stdout is not None
    with parent.stdout as said, trio.fail_after(300):
        host = int((await trio.to_thread.run_sync(said.readline)).split()[1])
        await the_moment(moment, host, said)
        shared = shared_memory_of(host)
        assert not is_nothing_left(temporary, shared)
        parent.kill()
        parent.wait()
        while group_members(host):  # noqa: ASYNC110 - nobody tells us of a stranger's children
            await trio.sleep(0.05)
    assert is_nothing_left(temporary, shared)


async def the_moment(moment: str, host: int, said: Any) -> None:
    if moment == "while it serves":
        assert await trio.to_thread.run_sync(said.readline) == "ready\n"
    elif moment == "while the engine starts":
        while len(group_members(host)) < 3:  # noqa: ASYNC110 - SGLang's own children: its constructor is at work
            await trio.sleep(0.05)
    else:
        await trio.sleep(2)
