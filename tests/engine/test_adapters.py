"""Adapters over simulated hosts: which version samples, what is loaded and when, what is refused at once."""

import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import trio
import trio.testing
from adapters_kit import write_adapter
from attrs import evolve
from engine_reference import host_pid
from fakes_engine import order, sample

from polarnode.core.errors import Conflict, EngineError, Refused
from polarnode.core.trajectory import VersionSpan
from polarnode.core.weights import AdapterState
from polarnode.engine.adapters import EngineAdapters
from polarnode.engine.checkpoints import AdapterLimits, BadCheckpoint, check_adapter, manifest
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.host import HostAdapters
from polarnode.engine.protocol import Done, LoadDisk, Simulation
from polarnode.engine.settings import EngineSettings, SimulatedEngine, check, engine_arguments
from polarnode.node.config import TINY_MODEL
from polarnode.node.settings import simulated_marks
from polarnode.tokens.template import load_model

MODEL = load_model(TINY_MODEL)
Q_V = ("q_proj", "v_proj")


def settings(folder: Path, *, hosts: int = 1, **simulation: Any) -> EngineSettings:
    return EngineSettings(
        model_path=TINY_MODEL,
        device="cuda",
        state_dir=folder / "state",
        gpus=tuple(range(hosts)),
        lora_rank=8,
        simulated=SimulatedEngine(
            simulation=evolve(
                Simulation(tokens_per_s=0, first_token_s=0, prefill_tokens_per_s=0), **simulation
            ),
            marks=simulated_marks(MODEL.family),
            vocab_size=MODEL.tokenizer.vocab_size,
        ),
    )


@asynccontextmanager
async def opened(folder: Path, **changed: Any) -> AsyncIterator[Engines]:
    with trio.fail_after(30):
        async with open_engines(settings(folder, **changed)) as engines:
            yield engines


def spans(chunks: Any) -> list[tuple[str, int, int]]:
    return [(each.version, each.start, each.end) for each in chunks[-1].version_spans]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - it has no event
        await trio.sleep(0.01)


async def test_each_call_uses_its_adapter(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines:
        for name in ("a", "b"):
            reports = await engines.adapters.put(name, f"{name}-1", write_adapter(tmp_path / name))
            assert [report.index for report in reports] == [0]
        for name, version in (("", "0"), ("a", "a-1"), ("b", "b-1"), ("", "0")):
            assert spans(await sample(engines, order(max_tokens=9, adapter=name))) == [(version, 0, 9)]
        with pytest.raises(EngineError, match="there is no adapter 'c': send it first") as caught:
            await sample(engines, order(adapter="c"))
        assert not caught.value.retryable


async def test_running_call_keeps_its_version(tmp_path: Path) -> None:
    """A call in progress ends by the version with which it began."""
    async with opened(tmp_path, tokens_per_s=200, chunk_tokens=1) as engines:
        adapters = engines.adapters
        await adapters.put("a", "a-1", write_adapter(tmp_path / "1"))
        async with engines.generate(order(max_tokens=60, adapter="a")) as stream:
            first = await stream.__anext__()
            await adapters.put("a", "a-2", write_adapter(tmp_path / "2", seed=2))
            assert spans(await sample(engines, order(max_tokens=2, adapter="a"))) == [("a-2", 0, 2)]
            chunks = [first] + [chunk async for chunk in stream]
        assert chunks[-1].version_spans == (VersionSpan(version="a-1", start=0, end=60),)
        assert adapters.versions("a") == ("a-1", "a-2")


async def test_missing_adapter_slots_name_setting(tmp_path: Path) -> None:
    """A node without room for adapters says which setting gives it."""
    with pytest.raises(Conflict, match="start it with the setting lora_rank"):
        await EngineAdapters(evolve(settings(tmp_path), lora_rank=0)).put("a", "a-1", tmp_path)
    with pytest.raises(Conflict, match="the engine is external"):
        await EngineAdapters().put("a", "a-1", tmp_path)


# ── which version, on which hosts ─────────────────────────────────────────────


async def test_version_refused_by_one_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that one host refuses is served by none."""
    async with opened(tmp_path, hosts=2) as engines:
        await engines.adapters.put("a", "a-1", write_adapter(tmp_path / "1"))
        with monkeypatch.context() as patch:
            patch.setattr(HostAdapters, "load", refused_by(1))
            with pytest.raises(Refused, match=r"'a-2' was not loaded, .*engine host 1: no room"):
                await engines.adapters.put("a", "a-2", write_adapter(tmp_path / "2"))
        assert [host.adapters.loaded for host in engines._hosts] == [{"a-1"}, {"a-1"}]
        assert engines.adapters.versions("a") == ("a-1",)
        # the same name again, with other files, is those files
        await engines.adapters.put("a", "a-2", write_adapter(tmp_path / "3"))
        for session in ("one", "two"):
            chunks = await sample(engines, order(max_tokens=2, adapter="a", affinity=session))
            assert spans(chunks) == [("a-2", 0, 2)]


def refused_by(index: int) -> Any:
    ask = HostAdapters.load

    async def load(adapters: HostAdapters, version: str, folder: Path) -> Done:
        return (
            Done(call=0, ok=False, message="no room")
            if adapters.index == index
            else await ask(adapters, version, folder)
        )

    return load


async def test_host_death_keeps_previous_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that dies while it loads leaves the version before on all hosts."""
    ask = HostAdapters.load

    async with opened(tmp_path, hosts=2) as engines:

        async def dying(adapters: HostAdapters, version: str, folder: Path) -> Done:
            pid = engines._hosts[1].process.pid
            if adapters.index == 1 and pid is not None:
                os.kill(pid, signal.SIGKILL)
            return await ask(adapters, version, folder)

        await engines.adapters.put("a", "a-1", write_adapter(tmp_path / "1"))
        with monkeypatch.context() as patch:
            patch.setattr(HostAdapters, "load", dying)
            with pytest.raises(EngineError, match="engine host 1"):
                await engines.adapters.put("a", "a-2", write_adapter(tmp_path / "2"))
        await until(lambda: all(host.state == "ready" for host in engines._hosts))
        assert [host.adapters.loaded for host in engines._hosts] == [{"a-1"}, {"a-1"}]
        assert spans(await sample(engines, order(max_tokens=2, adapter="a"))) == [("a-1", 0, 2)]


async def killed(engines: Engines) -> None:
    """Until another process serves in its place."""
    host = engines._hosts[0]
    os.kill(host_pid(engines), signal.SIGKILL)
    await until(lambda: host.restarts == 1 and host.state == "ready")


async def test_restarted_host_loads_adapters_first(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines:
        for name in ("a", "b"):
            await engines.adapters.put(name, f"{name}-1", write_adapter(tmp_path / name))
        await killed(engines)
        assert engines._hosts[0].adapters.loaded == {"a-1", "b-1"}
        assert spans(await sample(engines, order(max_tokens=2, adapter="b"))) == [("b-1", 0, 2)]


async def test_host_serves_despite_missing_files(tmp_path: Path) -> None:
    """Its calls fail; those of the others, and of the base, do not."""
    async with opened(tmp_path) as engines:
        for name in ("a", "b"):
            await engines.adapters.put(name, f"{name}-1", write_adapter(tmp_path / name))
        shutil.rmtree(tmp_path / "a")
        await killed(engines)
        for name, version in (("", "0"), ("b", "b-1")):
            assert spans(await sample(engines, order(max_tokens=2, adapter=name))) == [(version, 0, 2)]
        with pytest.raises(EngineError, match="'a-1' was not loaded"):
            await sample(engines, order(adapter="a"))


async def test_unused_adapter_is_unloaded_and_reloaded(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines:
        adapters, host = engines.adapters, engines._hosts[0]
        await adapters.put("a", "a-1", write_adapter(tmp_path / "1"))
        assert host.adapters.loaded == {"a-1"}  # for the sessions that come next
        for loads in (1, 2):
            adapters.need("a")
            adapters.need("a")
            await sample(engines, order(max_tokens=2, adapter="a"))
            adapters.release("a")
            await trio.testing.wait_all_tasks_blocked(0.1)
            assert adapters.status()[0] == AdapterState(
                name="a",
                version="a-1",
                loaded=True,
                sessions=1,
                loads=loads,
                seconds=adapters.status()[0].seconds,
                versions=("a-1",),
            )
            adapters.release("a")
            await until(lambda: not host.adapters.loaded)
            assert not adapters.status()[0].loaded


async def test_abandoned_put_leaves_nothing(tmp_path: Path) -> None:
    """The load itself is not interrupted: what the hosts hold is known at any time."""
    async with opened(tmp_path) as engines:

        async def leave() -> None:
            scope.cancel()
            await trio.lowlevel.checkpoint()

        with trio.CancelScope() as scope:
            await engines.adapters.put("a", "a-1", write_adapter(tmp_path / "1"), loaded=leave)
        assert scope.cancelled_caught
        await until(lambda: not engines._hosts[0].adapters.loaded)
        assert engines.adapters.status() == ()
        await engines.adapters.put("a", "a-1", write_adapter(tmp_path / "2"))


async def test_version_stays_loaded_during_put(tmp_path: Path) -> None:
    """It is nobody's yet, and must not be taken for what nobody needs."""
    async with opened(tmp_path) as engines:

        async def written() -> None:
            engines.adapters.wake()
            await trio.testing.wait_all_tasks_blocked(0.1)
            assert engines._hosts[0].adapters.loaded == {"a-1"}

        await engines.adapters.put("a", "a-1", write_adapter(tmp_path / "1"), loaded=written)
        assert engines._hosts[0].adapters.loaded == {"a-1"}


async def test_taken_names_and_base_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path, tokens_per_s=100) as engines:
        adapters = engines.adapters
        await adapters.put("a", "a-1", write_adapter(tmp_path / "1"))
        for name, version, whose in (
            ("b", "a-1", "adapter 'a'"),
            ("a", "a-1", "adapter 'a'"),
            ("a", "0", "the base"),
        ):
            with pytest.raises(Conflict, match=f"version '{version}' is one of {whose}"):
                await adapters.put(name, version, tmp_path / "1")
        adapters.need("a")
        with pytest.raises(Conflict, match="1 sessions sample by adapter 'a'"):
            adapters.drop("a")
        adapters.release("a")
        with pytest.raises(Conflict, match=r"while adapters exist \(a\): delete them first"):
            await engines.update_weights_from_disk(TINY_MODEL, "1")
        async with engines.generate(order(max_tokens=200, adapter="a")) as stream:
            await stream.__anext__()
            adapters.drop("a")
            with pytest.raises(Conflict, match="calls sample by adapters yet"):
                await engines.update_weights_from_disk(TINY_MODEL, "1")
        await until(lambda: not adapters.kept)
        async with engines.updating("in_place") as update:
            with pytest.raises(Conflict, match="base weights are being updated"):
                await adapters.put("a", "a-2", tmp_path / "1")
            await update.load(lambda call, _: LoadDisk(call=call, path=str(TINY_MODEL)))
        for refused in (lambda: adapters.need("a"), lambda: adapters.drop("a")):
            with pytest.raises(Refused, match="there is no adapter 'a': send it first"):
                refused()


# ── what is refused at once ───────────────────────────────────────────────────

LIMITS = AdapterLimits(rank=8, modules=Q_V)
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def tensor(*shape: int, dtype: str = "float32") -> Any:
    return numpy.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"rank": 9}, r"r is 9, the rank, and this node takes 1 to 8: .* larger lora_rank"),
        ({"r": 2}, r"q_proj.lora_A has shape \[4, 128\], and r is 2"),
        (
            {"modules": ("q_proj", "v_proj", "o_proj")},
            "target_modules has 'o_proj', and .* q_proj, v_proj: train",
        ),
        ({"modules": ("q_proj",)}, "q_proj has an adapter and .*v_proj has none"),
        ({"target_modules": ".*_proj"}, r"target_modules is '\.\*_proj': give a list"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3': only LORA"),
        ({"lora_alpha": None}, "lora_alpha is None: give a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan: give a number"),
        ({"use_dora": True}, "use_dora is True, which the engine does not compute"),
        ({"use_rslora": True}, "use_rslora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights is 'pissa_niter_4', which changes the base",
        ),
        (
            {"tensors": {f"{Q}.lora_A.weight": tensor(4, 64)}},
            r"has shape \[4, 64\], .* \[128, 128\]: .* another base",
        ),
        ({"tensors": {f"{Q}.lora_B.weight": tensor(128, 5)}}, r"has shape \[128, 5\], and r is 4"),
        ({"tensors": {f"{Q}.lora_B.weight": tensor(128, 4, dtype="int32")}}, "is I32: save it as float32"),
        (
            {"tensors": {f"{Q}.lora_B.weight": tensor(128, 4) + numpy.nan}},
            "values that are no finite numbers",
        ),
        (
            {"tensors": {f"{Q}.lora_B.weight": tensor(128, 4, dtype="float16") + numpy.float16("inf")}},
            "no finite",
        ),
        ({"tensors": {Q.replace("0", "9") + ".lora_A.weight": tensor(4, 128)}}, "has lora_A alone"),
        ({"tensors": {"base_model.model.lm_head.weight": tensor(4, 128)}}, "is no tensor of a LoRA adapter"),
    ],
)
def test_inexact_adapter_is_refused(changed: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", **{"modules": Q_V, **changed})
    with pytest.raises(BadCheckpoint, match=sentence):
        check_adapter(folder, manifest(TINY_MODEL), LIMITS)


def test_adapter_of_larger_model_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", modules=Q_V)
    model = {name: kind for name, kind in manifest(TINY_MODEL).items() if ".layers.3." not in name}
    with pytest.raises(
        BadCheckpoint, match=r"layers\.3\..* is not in the model: the adapter is for another base"
    ):
        check_adapter(folder, model, LIMITS)
    check_adapter(folder, manifest(TINY_MODEL), LIMITS)


@pytest.mark.parametrize("config", [None, b"{", b"[]"])
def test_folder_without_peft_config_is_refused(config: bytes | None, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_config.json").unlink()
    if config is not None:
        (folder / "adapter_config.json").write_bytes(config)
    with pytest.raises(BadCheckpoint, match=r"no adapter_config|no JSON|peft_type is None"):
        check_adapter(folder, manifest(TINY_MODEL), LIMITS)


async def test_refusal_changes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines:
        await engines.adapters.put("a", "a-1", write_adapter(tmp_path / "1"))
        with pytest.raises(Refused, match="the adapter cannot be served: r is 16"):
            await engines.adapters.put("a", "a-2", write_adapter(tmp_path / "2", rank=16))
        assert spans(await sample(engines, order(max_tokens=2, adapter="a"))) == [("a-1", 0, 2)]


def test_lora_settings_become_engine_arguments(tmp_path: Path) -> None:
    real = evolve(settings(tmp_path), simulated=None, lora_modules=Q_V, lora_slots=3)
    arguments = engine_arguments(real, nccl_port=1)
    assert {name: value for name, value in arguments.items() if "lora" in name} == {
        "enable_lora": True, "max_lora_rank": 8, "lora_target_modules": list(Q_V), "max_loras_per_batch": 4,
    }  # fmt: skip
    on_cpu = engine_arguments(evolve(real, device="cpu", gpus=()), nccl_port=1)
    assert on_cpu["lora_backend"] == "torch_native"
    assert not [name for name in engine_arguments(evolve(real, lora_rank=0), nccl_port=1) if "lora" in name]


def test_settings_without_adapter_support(tmp_path: Path) -> None:
    mixture = tmp_path / "mixture"
    mixture.mkdir()
    (mixture / "config.json").write_text('{"num_experts": 8}')
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    (quantised / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    for changed, sentence in (
        ({"model_path": quantised}, "the model quantised is quantised: start from its full weights"),
        ({"lora_modules": ("q_proj", "lm_head")}, "lora_modules may not hold lm_head"),
        ({"simulated": None, "memory_saver": "discard"}, "discard.* loses the base weights"),
        ({"simulated": None, "model_path": mixture}, r"is a mixture, .* give lora_modules = \["),
    ):
        with pytest.raises(EngineError, match=sentence):
            check(evolve(settings(tmp_path), **changed))
    check(evolve(settings(tmp_path), simulated=None, model_path=mixture, lora_modules=Q_V))
