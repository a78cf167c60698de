"""The parts of `gpu.py`: each takes a bench and gives its figures by name.

A model of some 4 billion random weights serves for speed, because speed does not depend on what they are;
`polarnode-tiny` serves for truth, against transformers.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import kv_real
import trio
from attrs import evolve, frozen

from polarnode.core.conversation import Sampling
from polarnode.core.ports import GenerateOrder
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.protocol import ChangeMemory
from polarnode.engine.settings import EngineSettings, engine_arguments, host_environment
from polarnode.node.config import TINY_MODEL

# of a dense model whose cache takes 144 KiB a token, as Qwen3-4B's and -8B's do
DENSE: Final = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32_768,
    "max_position_embeddings": 65_536,
}
SMALL: Final = {
    **DENSE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4096,
}
ROOT: Final = Path(__file__).parents[1]


class NeedsGpu(Exception):
    """A part that a CPU cannot show anything of; the message says why."""


@frozen
class Bench:
    """Where a part works, what it serves, and whether that is a dry run on the CPU."""

    folder: Path
    model: Path | None
    dry: bool

    def settings(self, model: Path, **more: Any) -> EngineSettings:
        """One engine: on the first GPU, or on the CPU."""
        found = EngineSettings(
            model_path=model,
            device="cpu" if self.dry else "cuda",
            gpus=() if self.dry else (0,),
            state_dir=self.folder / "state",
            context_length=8192 if self.dry else 65_536,
        )
        return evolve(found, **more)

    def speed_model(self, seed: int = 0) -> Path:
        """The model for speed, made where none was given."""
        return self.model if self.model and not seed else random_model(self.folder.parent, seed, self.dry)

    def need_gpu(self, why: str) -> None:
        """Refuse in a dry run."""
        if self.dry:
            raise NeedsGpu(why)


def random_model(folder: Path, seed: int, dry: bool) -> Path:
    """A dense checkpoint of random weights, in bfloat16; made once."""
    path = folder / f"model-{'small' if dry else 'dense'}-{seed}"
    if (path / "config.json").exists():
        return path
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    with torch.device("cpu" if dry else "cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            config = Qwen3Config(**(SMALL if dry else DENSE), tie_word_embeddings=True, eos_token_id=None)
            model = Qwen3ForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
    model.save_pretrained(path)
    return path


def ids(chance: random.Random, count: int) -> "array[int]":
    return array("i", [chance.randrange(300, 1000) for _ in range(count)])


async def ask(engines: Engines, prompt: "array[int]", sample: int) -> tuple[list[int], list[float]]:
    """The sampled ids and their logprobs."""
    order = GenerateOrder(
        request_id=uuid4().hex,
        prompt=prompt,
        sampling=Sampling(max_tokens=sample, temperature=1.0),
        stop_ids=(),
    )
    async with engines.generate(order) as stream:
        chunks = [chunk async for chunk in stream]
    return (
        [token for chunk in chunks for token in chunk.ids],
        [value for chunk in chunks for value in chunk.logprobs],
    )


# ── parts ────────────────────────────────────────────────────────────


async def smoke(bench: Bench) -> dict[str, Any]:
    """The single-GPU test."""
    bench.need_gpu("the smoke test is of the GPU's own kernels: `make gpu-test` on a machine with one")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/test_gpu.py", "-x", "-q", "-p"]
    began = time.perf_counter()
    done = await trio.run_process([*command, "no:cacheprovider"], cwd=ROOT, capture_stdout=True, check=False)
    last = done.stdout.decode(errors="replace").strip().splitlines()[-1]
    if done.returncode:
        print(done.stdout.decode(errors="replace"))
        raise RuntimeError(f"the smoke test failed: {last}")
    return {"tests": last, "seconds": round(time.perf_counter() - began, 1)}


async def start(bench: Bench) -> dict[str, Any]:
    """Seconds until an engine serves, and until it is gone."""
    model = await trio.to_thread.run_sync(bench.speed_model)
    began = time.perf_counter()
    async with open_engines(bench.settings(model)) as engines:
        serving = time.perf_counter()
        ready = engines.statistics().hosts[0]
        tokens = 0 if ready.residency is None else ready.residency.capacity
    ended = time.perf_counter()
    return {
        "start_s": round(serving - began, 1),
        "stop_s": round(ended - serving, 1),
        "kv_tokens": tokens,
    }


async def throughput(bench: Bench) -> dict[str, Any]:
    """Sampled tokens a second of the node's engine host, and of bare SGLang, for agents at once."""
    model = await trio.to_thread.run_sync(bench.speed_model)
    agents = (1, 4) if bench.dry else (1, 32, 128, 256)
    prompt, sample, rounds = (64, 16, 2) if bench.dry else (2048, 256, 2)
    settings, found = bench.settings(model), {}
    async with open_engines(settings) as engines:
        for count in (agents[0], *agents):  # the first is compiled for
            found[f"node_{count}"] = await _speed(
                lambda number: ask(engines, ids(random.Random(number), prompt), sample), count, rounds
            )
    order = {"arguments": engine_arguments(settings, nccl_port=29_731), "agents": agents}
    order |= {"prompt": prompt, "sample": sample, "rounds": rounds}
    bare = await _bare(bench, order)
    for count in agents:
        found[f"bare_{count}"] = bare[str(count)]
        found[f"ratio_{count}"] = round(found[f"node_{count}"] / bare[str(count)], 3)
    return found


async def _speed(
    call: Callable[[int], Awaitable[tuple[list[int], list[float]]]], count: int, rounds: int
) -> float:
    sampled = 0

    async def agent(number: int) -> None:
        nonlocal sampled
        for turn in range(rounds):
            sampled += len((await call(1000 * turn + number))[0])

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(agent, number)
    return round(sampled / (time.perf_counter() - began), 1)


async def _bare(bench: Bench, order: Mapping[str, Any]) -> dict[str, float]:
    """`gpu_bare.py` in a process with the environment of an engine host."""
    file = bench.folder / "bare.json"
    file.write_text(json.dumps(order))
    settings = bench.settings(Path(str(order["arguments"]["model_path"])))
    environment = host_environment(settings, gpus=settings.gpus, scratch=bench.folder, base=os.environ)
    done = await trio.run_process(
        [sys.executable, "-P", str(Path(__file__).parent / "gpu_bare.py"), str(file)],
        env=environment,
        capture_stdout=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


async def kv(bench: Bench) -> dict[str, Any]:
    """The policy of the cache, off and on, at one and at four times what fits."""
    model = await trio.to_thread.run_sync(bench.speed_model)
    scale, tokens, seconds = (1, 6000, 6.0) if bench.dry else (16, 160_000, 60.0)
    kv_real.enlarge(scale)
    fits = tokens / kv_real.mean_session()
    found: dict[str, Any] = {}
    async with open_engines(bench.settings(model, max_total_tokens=tokens)) as engines:
        for load in (1, 4):
            count = max(1, round(load * fits))
            for name, places in (("off", False), ("on", True)):
                figures = await kv_real.really(engines, count, seconds, 1, places=places)
                found[f"{load}x_{name}_tokens_per_s"] = figures["tokens_per_s"]
                found[f"{load}x_{name}_known_from_cache"] = figures["known_from_cache"]
    found["gain_4x"] = round(found["4x_on_tokens_per_s"] / found["4x_off_tokens_per_s"], 2)
    return found


async def weights(bench: Bench) -> dict[str, Any]:
    """An update from disk under load: its seconds, and the longest time without a token."""
    one = await trio.to_thread.run_sync(bench.speed_model)
    other = await trio.to_thread.run_sync(bench.speed_model, 1)
    gaps: list[float] = []
    async with open_engines(bench.settings(one)) as engines:
        last = time.perf_counter()

        async def agent(number: int) -> None:
            nonlocal last
            while True:
                order = GenerateOrder(
                    request_id=uuid4().hex,
                    prompt=ids(random.Random(number), 128),
                    sampling=Sampling(max_tokens=64, temperature=1.0),
                    stop_ids=(),
                )
                async with engines.generate(order) as stream:
                    async for _ in stream:
                        now = time.perf_counter()
                        gaps.append(now - last)
                        last = now

        async with trio.open_nursery() as nursery:
            for number in range(4 if bench.dry else 32):
                nursery.start_soon(agent, number)
            await trio.sleep(2)
            usual = statistics.quantiles(gaps, n=100)[98]
            took = []
            for number, path in enumerate((other, one), start=1):
                gaps.clear()
                began = time.perf_counter()
                await engines.update_weights_from_disk(path, str(number))
                took.append(time.perf_counter() - began)
                await trio.sleep(1)
            longest = max(gaps)
            nursery.cancel_scope.cancel()
    return {
        "update_s": [round(each, 2) for each in took],
        "held_s": round(longest, 2),
        "usual_gap_p99_s": round(usual, 3),
    }


async def logprobs(bench: Bench) -> dict[str, Any]:
    """Recorded logprobs of the tiny policy against a trainer's forward, by position, in nats."""
    import torch
    from transformers import AutoModelForCausalLM

    prompts = [ids(random.Random(number), 200) for number in range(4 if bench.dry else 32)]
    async with open_engines(bench.settings(TINY_MODEL, context_length=4096)) as engines:
        answers = [await ask(engines, prompt, 64 if bench.dry else 512) for prompt in prompts]
    device, found = "cpu" if bench.dry else "cuda", {}
    for kind in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=kind).to(device).eval()
        early, late = [], []
        for prompt, (sampled, recorded) in zip(prompts, answers, strict=True):
            with torch.no_grad():
                row = torch.tensor([[*prompt, *sampled]], device=device)
                logits = model(row).logits[0, len(prompt) - 1 : -1].float()
            theirs = logits.log_softmax(-1).gather(1, row[0, len(prompt) :, None])[:, 0].tolist()
            away = [abs(mine - other) for mine, other in zip(recorded, theirs, strict=True)]
            early += away[: len(away) // 2]
            late += away[len(away) // 2 :]
        name = str(kind).removeprefix("torch.")
        found |= {f"{name}_{part}": _spread(each) for part, each in (("early", early), ("late", late))}
    return found


def _spread(away: Sequence[float]) -> dict[str, float]:
    return {
        "mean": round(statistics.mean(away), 6) if away else 0.0,
        "worst": round(max(away, default=0.0), 5),
    }


async def lora(bench: Bench) -> dict[str, Any]:
    """What versions of adapters cost: `adapters.py`, on this engine."""
    command = [sys.executable, str(Path(__file__).parent / "adapters.py")]
    command += ["--puts", "3", "--tokens", "32"] if bench.dry else ["--gpu", "0"]
    done = await trio.run_process(command, cwd=ROOT, capture_stdout=True)
    lines = [line.partition(": ") for line in done.stdout.decode().splitlines() if ": " in line]
    return {name: value for name, _, value in lines}


async def memory(bench: Bench) -> dict[str, Any]:
    """GPU memory given back and taken again, in MiB as the driver sees it, and seconds."""
    bench.need_gpu("a CPU's engine lends no memory: this part is of GPUs")
    model = await trio.to_thread.run_sync(bench.speed_model)
    found: dict[str, Any] = {}
    async with open_engines(bench.settings(model, memory_saver="backup")) as engines:
        found["used_mib"] = _used()
        await engines.pause("retract")
        for name, release in (("release", True), ("take", False)):
            began = time.perf_counter()
            await engines.order(
                lambda call, _, release=release: ChangeMemory(  # type: ignore[misc]
                    call=call, release=release, tags=["weights", "kv_cache"]
                )
            )
            found[f"{name}_s"] = round(time.perf_counter() - began, 2)
            found[f"after_{name}_mib"] = _used()
        await engines.resume()
        found["samples_again"] = len((await ask(engines, ids(random.Random(1), 100), 16))[0])
    return found


def _used() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


PARTS: Final[Mapping[str, Callable[[Bench], Awaitable[dict[str, Any]]]]] = {
    "smoke": smoke,
    "throughput": throughput,
    "kv": kv,
    "weights": weights,
    "logprobs": logprobs,
    "lora": lora,
    "memory": memory,
    "start": start,
}
