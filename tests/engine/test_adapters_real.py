"""Adapters in real SGLang on a CPU: what it samples under three of them at once is what transformers and peft
compute, a version replaced in the middle leaves two spans that are each right, and a host that dies comes back
with them. One engine for all of it: each start takes 15 seconds of CPU.
"""

import os
import shutil
import signal
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import trio
from adapters_kit import ALL, write_adapter
from engine_reference import TOLERANCE, host_pid, temporary
from fakes_engine import joined, order, sample, until_idle
from plugin_kit import run_program
from safetensors.numpy import load_file, save_file

from polarnode.core.arrays import ids
from polarnode.core.errors import Conflict, EngineError, Refused
from polarnode.core.ports import Chunk, ScoreOrder
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.settings import EngineSettings
from polarnode.node.config import TINY_MODEL

__all__ = ["temporary"]  # a fixture, asked for by name
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

PROMPT = list(range(5, 25))
# of other modules and ranks, so that what one leaves in a slot would show in the next
SHAPES = {"a": (4, ("q_proj", "v_proj")), "b": (8, ALL), "c": (2, ("gate_proj", "down_proj"))}


class Rows:
    """What was sampled, and by which adapter's folder it is to be computed again; "" for the base."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int]]] = []
        self.recorded: list[list[float]] = []

    def add(self, folder: Path | None, prompt: list[int], chunks: list[Chunk]) -> list[float]:
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
        self.asked.append((str(folder or ""), [*prompt, *joined(chunks)]))
        self.recorded.append(logprobs)
        return logprobs

    def check(self) -> None:
        theirs = run_program("peft_program.py", stdin={"model": str(TINY_MODEL), "rows": self.asked})
        for ours, every in zip(self.recorded, theirs, strict=True):
            pairs = zip(ours, every[-len(ours) :], strict=True)
            assert max(abs(one - other) for one, other in pairs) < TOLERANCE


async def test_adapters_on_real_engine(tmp_path: Path, temporary: Path) -> None:
    digest = sha256((TINY_MODEL / "model.safetensors").read_bytes()).hexdigest()
    settings = EngineSettings(
        model_path=TINY_MODEL, device="cpu", state_dir=tmp_path / "state", context_length=4096,
        lora_rank=8, lora_slots=3,
    )  # fmt: skip
    rows = Rows()
    with trio.fail_after(600):
        async with open_engines(settings) as engines:
            plain = await sampled(engines, rows, "", None)
            await three_at_once(engines, rows, tmp_path)
            assert alike(await sampled(engines, rows, "", None), plain)
            await a_replaced_one_leaves_two_spans(engines, rows, tmp_path)
            await what_nobody_needs_is_unloaded(engines, rows, tmp_path)
            await a_frozen_call_holds_up_no_other(engines, tmp_path)
            await a_host_that_dies_has_them_again(engines, rows, tmp_path)
            for name in ("a", "b", "c"):
                engines.adapters.drop(name)
            assert alike(await sampled(engines, rows, "", None), plain)
            await the_base_can_be_updated_without_them(engines, plain, tmp_path)
    rows.check()
    assert sha256((TINY_MODEL / "model.safetensors").read_bytes()).hexdigest() == digest


def alike(one: tuple[list[int], list[float]], other: tuple[list[int], list[float]]) -> bool:
    """The same ids, and logprobs as exact as float32 is over a prompt that is cached or is not."""
    return one[0] == other[0] and one[1] == pytest.approx(other[1], abs=1e-5)


async def sampled(
    engines: Engines, rows: Rows, name: str, folder: Path | None, **more: Any
) -> tuple[list[int], list[float]]:
    chunks = await sample(engines, order(PROMPT, adapter=name, **{"max_tokens": 24, **more}))
    return joined(chunks), rows.add(folder, PROMPT, chunks)


async def three_at_once(engines: Engines, rows: Rows, tmp_path: Path) -> None:
    """In one batch, greedy and sampled, beside the base."""
    for seed, (name, (rank, modules)) in enumerate(SHAPES.items()):
        folder = write_adapter(tmp_path / name, rank=rank, modules=modules, seed=seed)
        await engines.adapters.put(name, f"{name}-1", folder)
    async with trio.open_nursery() as nursery:
        for name in ("", *SHAPES):
            for temperature in (0.0, 1.0):
                nursery.start_soon(one_of_many, engines, rows, name, tmp_path / name, temperature)


async def one_of_many(engines: Engines, rows: Rows, name: str, folder: Path, temperature: float) -> None:
    chunks = await sample(engines, order(PROMPT, max_tokens=40, temperature=temperature, adapter=name))
    rows.add(folder if name else None, PROMPT, chunks)
    assert [(each.version, each.end) for each in chunks[-1].version_spans] == [
        (f"{name}-1" if name else "0", len(joined(chunks)))
    ]
    if temperature == 1.0:  # and it scores its own row as it sampled it
        row = ScoreOrder(
            request_id=uuid4().hex, row=ids([*PROMPT, *joined(chunks)]), start=len(PROMPT), adapter=name
        )
        scores = await engines.score(row)
        assert scores.version == (f"{name}-1" if name else "0")
        recorded = [each for chunk in chunks for each in chunk.logprobs]
        assert list(scores.logprobs) == pytest.approx(recorded, abs=1e-4)


async def a_replaced_one_leaves_two_spans(engines: Engines, rows: Rows, tmp_path: Path) -> None:
    """A session's two calls; the second's prompt is the first with its sample, whose cache is not used."""
    second = write_adapter(tmp_path / "a2", seed=7)
    async with engines.generate(order(PROMPT, max_tokens=400, adapter="a")) as stream:
        chunks = [await stream.__anext__()]
        await engines.adapters.put("a", "a-2", second)
        longer = [*PROMPT, *joined(chunks)]
        after = await sample(engines, order(longer, max_tokens=24, adapter="a"))
        chunks += [chunk async for chunk in stream]
    assert [each.version for each in (*chunks[-1].version_spans, *after[-1].version_spans)] == ["a-1", "a-2"]
    assert after[-1].cached_tokens == 0
    rows.add(tmp_path / "a", PROMPT, chunks)
    rows.add(second, longer, after)


async def what_nobody_needs_is_unloaded(engines: Engines, rows: Rows, tmp_path: Path) -> None:
    """And loaded again by the next call, in fewer slots than there are adapters."""
    await until_idle(engines)
    host = engines._hosts[0]
    while host.adapters.loaded:  # noqa: ASYNC110 - it has no event
        await trio.sleep(0.02)
    engines.adapters.need("b")
    await sampled(engines, rows, "b", tmp_path / "b")
    assert host.adapters.loaded == {"b-1"}
    folder = write_adapter(tmp_path / "d", seed=9)
    (folder / "adapter_model.safetensors").write_bytes(
        (folder / "adapter_model.safetensors").read_bytes()[:-8]
    )
    with pytest.raises(Refused, match="is cut"):
        await engines.adapters.put("b", "b-2", folder)
    with pytest.raises(Conflict, match="delete them first"):
        await engines.update_weights_from_disk(TINY_MODEL, "1")
    assert engines.adapters.versions("b") == ("b-1",)


async def a_frozen_call_holds_up_no_other(engines: Engines, tmp_path: Path) -> None:
    """SGLang ends a frozen request only after the pause, and would let each load wait for that."""
    async with engines.generate(order(PROMPT, max_tokens=3000, adapter="c")) as stream:
        await stream.__anext__()
        await engines.pause("in_place")
    with trio.fail_after(20):
        await engines.adapters.put("a", "a-3", write_adapter(tmp_path / "a3", seed=8))
        await engines.adapters.put("c", "c-2", write_adapter(tmp_path / "c2", seed=9))
    await engines.resume()
    await until_idle(engines)


async def a_host_that_dies_has_them_again(engines: Engines, rows: Rows, tmp_path: Path) -> None:
    os.kill(host_pid(engines), signal.SIGKILL)
    with pytest.raises(EngineError, match="died"):
        await sample(engines, order(PROMPT, max_tokens=3000, adapter="b"))
    await sampled(engines, rows, "c", tmp_path / "c2")
    assert engines._hosts[0].adapters.loaded >= {"b-1", "c-2"}
    await sampled(engines, rows, "b", tmp_path / "b")
    await sampled(engines, rows, "a", tmp_path / "a3")
    engines.adapters.release("b")


async def the_base_can_be_updated_without_them(
    engines: Engines, plain: tuple[list[int], list[float]], tmp_path: Path
) -> None:
    """Its layers are inside of those that apply adapters."""
    changed = tmp_path / "changed"
    shutil.copytree(TINY_MODEL, changed)
    tensors = load_file(changed / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"] *= 1.5
    save_file(tensors, changed / "model.safetensors")
    while engines.adapters.kept:  # noqa: ASYNC110 - it has no event
        await trio.sleep(0.02)
    for version, folder, same in (("1", changed, False), ("2", TINY_MODEL, True)):
        await engines.update_weights_from_disk(folder, version)
        assert alike(await sampled(engines, Rows(), "", None), plain) is same
