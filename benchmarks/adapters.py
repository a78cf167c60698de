"""How long an adapter takes to be served, what it costs the calls beside it, and what room for adapters costs the
base: `python benchmarks/adapters.py`, with real SGLang on the CPU and polarnode-tiny, some three minutes.

Put: from `EngineAdapters.put` to its return, checks included. Tokens a second: eight calls at once of 200 tokens.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import trio
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kits"))
from adapters_kit import ALL, write_adapter
from fakes_engine import joined, order, sample

from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.settings import EngineSettings
from polarnode.node.config import TINY_MODEL

PUTS, CALLS, TOKENS = 20, 8, 200


async def speed(engines: Engines, names: tuple[str, ...]) -> float:
    """Sampled tokens a second of CALLS calls at once, which take their adapters from `names` in turn."""
    sampled = 0

    async def call(name: str) -> None:
        nonlocal sampled
        asked = order(list(range(5, 25)), max_tokens=TOKENS, temperature=1.0, adapter=name)
        sampled += len(joined(await sample(engines, asked)))

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for number in range(CALLS):
            nursery.start_soon(call, names[number % len(names)])
    return sampled / (time.perf_counter() - began)


async def puts(engines: Engines, name: str, rank: int, folder: Path) -> None:
    found = []
    for number in range(PUTS):
        adapter = write_adapter(folder / f"{name}-{number}", rank=rank, modules=ALL, seed=number)
        began = time.perf_counter()
        await engines.adapters.put(name, f"{name}-{number}", adapter)
        found.append(1000 * (time.perf_counter() - began))
    print(f"put, rank {rank}: p50 {median(found):.1f} ms, max {max(found):.1f} ms of {PUTS}", flush=True)


async def main(gpu: int | None) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plain = EngineSettings(
            model_path=TINY_MODEL,
            device="cpu" if gpu is None else "cuda",
            gpus=() if gpu is None else (gpu,),
            state_dir=folder / "state",
            context_length=4096,
        )
        async with open_engines(plain) as engines:
            await speed(engines, ("",))
            print(f"base, no room for adapters: {await speed(engines, ('',)):.0f} tokens/s", flush=True)
        async with open_engines(evolve(plain, lora_rank=64)) as engines:
            await speed(engines, ("",))
            print(f"base, lora_rank 64: {await speed(engines, ('',)):.0f} tokens/s", flush=True)
            await puts(engines, "a", 8, folder)
            await puts(engines, "b", 64, folder)
            for name in ("a", "b"):
                engines.adapters.need(name)
            for names in (("a",), ("", "a", "b")):
                print(f"adapters {names}: {await speed(engines, names):.0f} tokens/s", flush=True)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(speed, engines, ("", "a", "b"))
                await trio.sleep(0.2)
                await puts(engines, "c", 64, folder)


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--gpu", type=int, help="the GPU of the engine; on the CPU without it")
    options.add_argument("--puts", type=int, default=PUTS)
    options.add_argument("--tokens", type=int, default=TOKENS)
    given = options.parse_args()
    PUTS, TOKENS = given.puts, given.tokens
    trio.run(main, given.gpu)
