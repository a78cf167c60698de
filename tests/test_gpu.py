"""The single-GPU smoke test: what a CPU can not show of the embedded engine. `pytest -m gpu`; skips with its
reason where there is no GPU.

It checks, on one GPU: a start on the real kernels with CUDA graphs and overlap scheduling; greedy tokens and
logprobs against transformers; weights updated from disk under requests frozen in place and retracted; ids
refused before they reach the device; a killed scheduler's memory given back; a killed node's engine gone;
aborts under load; deterministic sampling; the experts of a mixture; a bystander process that survives the
shutdown; weights of a trainer by CUDA IPC and, where there are two GPUs, over NCCL; memory lent and taken
again. Not here: several engines, tensor parallelism, hours of soak.
"""

import os
import signal
import subprocess
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import pytest
import trio
from engine_mixture import a_conversation_tells_each_position_once, experts_of, make_mixture
from engine_reference import (
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
from weights_kit import Plane, free_port, open_trainer, open_weights_plane

from polarnode.core.conversation import Sampling
from polarnode.core.errors import EngineError
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.settings import EngineSettings
from polarnode.support.concurrency import group_members

__all__ = ["temporary"]  # a fixture, asked for by name

# nats at bfloat16 against float32, on a model whose logits spread over some 3: rounding of 8 bits of mantissa
# through two layers
NEAR = 0.06
NEAR_EXPERTS = 0.5  # of two experts' logits, which spread over some 20: at bfloat16 the other may be chosen
MANY = 64  # requests at once: several decode batches of a CUDA graph's sizes


def why_not() -> str | None:
    if not Path("/dev/nvidiactl").exists():
        return "no NVIDIA GPU on this machine (/dev/nvidiactl)"
    if find_spec("sgl_kernel") is None:
        return "the engine's GPU kernels are not installed: pip install 'polarnode[gpu]'"
    return None


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.filterwarnings("default"),  # torch and transformers warn of themselves
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("model") / "old", seed=1, device="cuda", head_dim=64)


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("model") / "new", seed=2, device="cuda", head_dim=64)


def on_gpu(reference: Reference, state_dir: Path, **more: object) -> EngineSettings:
    return settings(
        reference,
        state_dir,
        **{"device": "cuda", "gpus": (0,), "dtype": "bfloat16", "mem_fraction": 0.5, **more},
    )


def compute_processes() -> set[int]:
    """Processes that hold memory of a GPU, as the driver sees them."""
    listed = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {int(line) for line in listed.stdout.split()}


@contextmanager
def a_bystander() -> "Iterator[subprocess.Popen[bytes]]":
    """A child of this process, as a sandbox of the node would be: SGLang kills every child it finds in its
    own.
    """
    with subprocess.Popen(["sleep", "3600"]) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_engine_on_one_gpu(
    reference: Reference, updated: Reference, tmp_path: Path, temporary: Path
) -> None:
    with a_bystander() as bystander:
        with trio.fail_after(1800):
            async with open_engines(on_gpu(reference, tmp_path)) as engines:
                shared = shared_memory_of(host_pid(engines))
                await contract(engines)
                await it_samples_what_transformers_does(engines, reference)
                await aborts_under_load_free_the_cache(engines)
                await weights_change_under_requests(engines, updated, mode="in_place", version="1")
                await weights_change_under_requests(engines, reference, mode="retract", version="2")
                await a_killed_scheduler_gives_its_memory_back(engines)
                host = host_pid(engines)
                shared |= shared_memory_of(host)
        assert group_members(host) == []
        assert is_nothing_left(temporary, shared)
        assert bystander.poll() is None


async def it_samples_what_transformers_does(engines: Engines, reference: Reference) -> None:
    for prompt in ([5], [1, 2, 3], list(range(10, 300))):
        chosen = joined(await sample(engines, order(prompt, max_tokens=16)))
        rows = reference.rows(prompt, chosen)
        # ties of bfloat16 may differ
        assert all(float(row.max() - row[token]) < NEAR for row, token in zip(rows, chosen, strict=True))
    for temperature in (1.0, 0.7):
        chunks = await sample(engines, order([7, 11], max_tokens=128, temperature=temperature))
        assert (
            difference(chunks, reference.logprobs([7, 11], joined(chunks), temperature)) < NEAR / temperature
        )


async def aborts_under_load_free_the_cache(engines: Engines) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(MANY):
            nursery.start_soon(sample, engines, order([number, 1], max_tokens=6000, temperature=1.0))
        while engines.statistics().hosts[0].running < MANY // 2:  # noqa: ASYNC110 - it is pushed, not awaited
            await trio.sleep(0.02)
        nursery.cancel_scope.cancel()
    await until_idle(engines)


async def weights_change_under_requests(
    engines: Engines, wanted: Reference, *, mode: str, version: str
) -> None:
    prompt = list(range(100, 200))
    before = engines.statistics().weight_version
    await sample(engines, order(prompt))  # a cached prefix that must not be found afterwards
    chunks: list[Chunk] = []
    async with engines.generate(order(prompt, max_tokens=4000, temperature=1.0)) as stream:
        chunks.append(await stream.__anext__())
        await engines.update_weights_from_disk(wanted.path, version, mode)  # type: ignore[arg-type]
        chunks += [chunk async for chunk in stream]
    old, new = chunks[-1].version_spans
    assert (old.version, old.start, new.version, new.end) == (before, 0, version, 4000)
    # the cache was filled again by the new weights; frozen in place it is the old one's, by design
    if mode == "retract":
        assert difference(chunks, wanted.logprobs(prompt, joined(chunks)), new) < NEAR
    fresh = await sample(engines, order(prompt, max_tokens=32, temperature=1.0))
    assert difference(fresh, wanted.logprobs(prompt, joined(fresh))) < NEAR


async def a_killed_scheduler_gives_its_memory_back(engines: Engines) -> None:
    host = host_pid(engines)
    scheduler = scheduler_of(host)
    async with engines.generate(order(max_tokens=6000, temperature=1.0)) as stream:
        await stream.__anext__()
        os.kill(scheduler, signal.SIGKILL)
        with pytest.raises(EngineError, match="died"):
            async for _ in stream:
                pass
    assert len(joined(await sample(engines, order([1, 2, 3])))) == 8
    assert engines.statistics().hosts[0].restarts == 1
    assert scheduler not in compute_processes()
    assert group_members(host) == []


def gpu_bytes(index: int = 0) -> int:
    """Of a GPU, in use by anybody."""
    asked = ["nvidia-smi", f"--id={index}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout) << 20


def gpus() -> int:
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


async def serves(plane: Plane, wanted: Reference, version: str) -> None:
    chunks = await sample(plane.engines, order([7, 11], max_tokens=64, temperature=1.0))
    assert chunks[-1].version_spans[0].version == version
    assert difference(chunks, wanted.logprobs([7, 11], joined(chunks))) < NEAR


async def test_weights_over_cuda_ipc(reference: Reference, updated: Reference, tmp_path: Path) -> None:
    """A trainer's process on the same GPU; then half a model, which leaves the one before. CUDA graphs read
    what was copied back in place.
    """
    with trio.fail_after(900), open_trainer(device="cuda") as trainer:
        async with open_weights_plane(
            on_gpu(reference, tmp_path, mem_fraction=0.4), tmp_path / "journal"
        ) as plane:
            names = await trainer.ask(do="load", path=str(updated.path))
            payload = await trainer.ask(do="payload", names=names)
            prompt, chunks = list(range(100, 200)), []
            async with plane.engines.generate(order(prompt, max_tokens=4000, temperature=1.0)) as stream:
                chunks.append(await stream.__anext__())
                await plane.update("1", {"kind": "tensor", "buckets": [{"payloads": [payload]}]}, "retract")
                chunks += [chunk async for chunk in stream]
            assert (
                difference(chunks, updated.logprobs(prompt, joined(chunks)), chunks[-1].version_spans[-1])
                < NEAR
            )
            flat = await trainer.ask(do="payload", names=names, flat=True)
            await plane.update(
                "2", {"kind": "tensor", "buckets": [{"payloads": [flat], "layout": "flattened_bucket"}]}
            )
            await serves(plane, updated, "2")
            names = await trainer.ask(do="load", path=str(reference.path))
            half = await trainer.ask(do="payload", names=names[:-1])
            refused = await plane.node.post(
                "/v1/weights",
                {"version": "3", "source": {"kind": "tensor", "buckets": [{"payloads": [half]}]}},
            )
            assert (refused.status, "is missing" in refused.text) == (400, True), refused.text
            await serves(plane, updated, "2")


@pytest.mark.skipif(gpus() < 2, reason="NCCL joins no two processes on one GPU: this needs two")
async def test_weights_over_nccl(reference: Reference, updated: Reference, tmp_path: Path) -> None:
    with trio.fail_after(900), open_trainer(device="cuda:1") as trainer:
        async with open_weights_plane(on_gpu(reference, tmp_path), tmp_path / "journal") as plane:
            names, port = await trainer.ask(do="load", path=str(updated.path)), free_port()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: trainer.ask(do="join", port=port, backend="nccl"))
                joining = {"address": "127.0.0.1", "port": port, "world_size": 2, "backend": "nccl"}
                assert (await plane.node.post("/v1/weights/groups", joining)).status == 201
            bucket = await trainer.ask(do="bucket", names=names)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: trainer.ask(do="send", names=names))
                await plane.update("1", {"kind": "distributed", "buckets": [bucket]}, "retract")
            await serves(plane, updated, "1")


@pytest.mark.parametrize("kept", ["discard", "backup"])
async def test_memory_is_lent_and_reclaimed(kept: str, reference: Reference, tmp_path: Path) -> None:
    if find_spec("torch_memory_saver") is None:
        pytest.skip("torch_memory_saver is not installed: the engine can not lend memory without it")
    with trio.fail_after(900):
        async with open_weights_plane(
            on_gpu(reference, tmp_path, memory_saver=kept), tmp_path / "journal", keeps=kept == "backup"
        ) as plane:
            node, before = plane.node, gpu_bytes()
            async with plane.engines.generate(order([1, 2, 3], max_tokens=4000, temperature=1.0)) as stream:
                await stream.__anext__()
                await node.post("/v1/engine/pause", {"mode": "in_place"})
                assert (await node.call("POST", "/v1/engine/memory/release")).status == 409
                await node.post("/v1/engine/pause", {"mode": "retract"})
                released = await node.call("POST", "/v1/engine/memory/release")
                assert (released.status, len(released.json()["released"])) == (200, 3), released.text
                # of what is left most is CUDA's own and the test's reference
                assert gpu_bytes() < before * 0.5
                assert (await node.call("POST", "/v1/engine/resume")).status == 409
                assert (
                    await node.post(
                        "/v1/weights",
                        {"version": "1", "source": {"kind": "disk", "path": str(reference.path)}},
                    )
                ).status == 409
                assert (await node.call("POST", "/v1/engine/memory/resume")).json()["released"] == []
                if kept == "discard":
                    # there are no weights
                    assert (await node.call("POST", "/v1/engine/resume")).status == 409
                    await plane.update("1", {"kind": "disk", "path": str(reference.path)}, "retract")
                assert (await node.call("POST", "/v1/engine/resume")).status == 200
                assert len([chunk async for chunk in stream]) > 1
            await serves(plane, reference, "1" if kept == "discard" else "0")


async def test_seed_gives_same_sample_in_batch(reference: Reference, tmp_path: Path) -> None:
    """A seed gives the same sample alone and in a crowd."""

    def seeded(seed: int) -> GenerateOrder:
        sampling = Sampling(temperature=1.0, seed=seed, max_tokens=64)
        return GenerateOrder(
            request_id=uuid4().hex, prompt=array("i", [1, 2, 3]), sampling=sampling, stop_ids=()
        )

    found: dict[int, list[int]] = {}

    async def one(engines: Engines, seed: int) -> None:
        found[seed] = joined(await sample(engines, seeded(seed)))

    with trio.fail_after(900):
        async with open_engines(
            on_gpu(reference, tmp_path, extra={"enable_deterministic_inference": True})
        ) as engines:
            alone = joined(await sample(engines, seeded(7)))
            async with trio.open_nursery() as nursery:
                for seed in range(MANY):
                    nursery.start_soon(one, engines, seed)
    assert found[7] == alone
    assert found[8] != alone


async def test_mixture_returns_routed_experts(tmp_path: Path) -> None:
    """On the real kernels, with CUDA graphs and overlap: (prompt + sample - 1) x layers x experts a token,
    each position once.
    """
    mixture = make_mixture(tmp_path / "mixture", head_dim=64, device="cuda")
    with trio.fail_after(900):
        async with open_engines(on_gpu(mixture, tmp_path, routed_experts=True)) as engines:  # type: ignore[arg-type]  # it reads the path alone
            await a_conversation_tells_each_position_once(engines, mixture, near=NEAR_EXPERTS)
            prompt = [(11 * step) % 900 for step in range(6000)]  # more than one of SGLang's chunks
            chunks = await sample(engines, order(prompt, max_tokens=40, routed_from=5990))
            assert (experts_of(chunks).start, experts_of(chunks).end) == (5990, 6039)


async def test_killed_node_frees_the_gpu(reference: Reference, tmp_path: Path, temporary: Path) -> None:
    """A killed node leaves no engine on the GPU."""
    parent = start_node_process(reference, tmp_path, "cuda")
    assert parent.stdout is not None
    with parent.stdout as said, trio.fail_after(900):
        host = int((await trio.to_thread.run_sync(said.readline)).split()[1])
        assert await trio.to_thread.run_sync(said.readline) == "ready\n"
        shared, members = shared_memory_of(host), set(group_members(host))
        parent.kill()
        parent.wait()
        while group_members(host):  # noqa: ASYNC110 - nobody tells us of a stranger's children
            await trio.sleep(0.05)
    assert not members & compute_processes()
    assert is_nothing_left(temporary, shared)
