"""What the engines are told: arguments, environments, and the sentences for settings that can not work."""

import json
from pathlib import Path
from typing import Any

import pytest

from polarnode.core.errors import EngineError
from polarnode.engine.diagnosis import diagnose
from polarnode.engine.protocol import FamilyMarks, Simulation
from polarnode.engine.settings import (
    CPU_MAX_TOKENS,
    CPU_MIN_TOKENS,
    SESSIONLESS_ARGUMENTS,
    EngineSettings,
    ExternalEngine,
    SimulatedEngine,
    check,
    cpu_tokens,
    engine_arguments,
    gpu_groups,
    host_environment,
    session_cache_refusal,
    token_bytes,
)

TINY = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    return tmp_path / "model"


def make(model: Path, **changes: Any) -> EngineSettings:
    return EngineSettings(
        **{"model_path": model, "device": "cpu", "state_dir": model.parent / "state", **changes}
    )


def test_valid_settings_are_accepted(model: Path) -> None:
    check(make(model))
    check(make(model, device="cuda", gpus=(0, 1, 2, 3), tp=2))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"model_path": Path("/nowhere")}, "--model /nowhere"),
        (
            {"extra": {"dp_size": 8, "stream_interval": 2}},
            "dp_size is the node's own: an engine host is one process",
        ),
        ({"gpus": (0,)}, "--cpu takes neither"),
        ({"tp": 2}, "--cpu takes neither"),
        ({"device": "cuda"}, "--gpus"),
        ({"device": "cuda", "gpus": (0, 1, 2), "tp": 2}, "--tp 2"),
        ({"device": "cuda", "gpus": (0,), "tp": 0}, "--tp 0"),
    ],
)
def test_impossible_setting_names_remedy(model: Path, changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(EngineError, match=remedy) as caught:
        check(make(model, **changes))
    assert not caught.value.retryable


MIXTURE = {**TINY, "num_experts": 128, "num_experts_per_tok": 8}


@pytest.mark.parametrize(
    "config", [MIXTURE, {**TINY, "n_routed_experts": 256}, {**TINY, "text_config": {"num_local_experts": 8}}]
)
def test_mixture_reports_routed_experts(model: Path, config: dict[str, Any]) -> None:
    (model / "config.json").write_text(json.dumps(config))
    asked = make(model, routed_experts=True)
    check(asked)
    arguments = engine_arguments(asked, nccl_port=1)
    assert arguments["enable_return_routed_experts"] is True
    # a prompt in one pass still, but SGLang sizes its buffer by it
    assert arguments["chunked_prefill_size"] == CPU_MAX_TOKENS
    on_gpu = engine_arguments(make(model, routed_experts=True, device="cuda", gpus=(0,)), nccl_port=1)
    assert on_gpu["enable_return_routed_experts"] is True
    assert "chunked_prefill_size" not in on_gpu
    assert "enable_return_routed_experts" not in engine_arguments(make(model), nccl_port=1)


def test_session_cache_is_set_if_requested(model: Path) -> None:
    asked = make(model, session_cache=True)
    check(asked)
    assert engine_arguments(asked, nccl_port=1)["enable_session_radix_cache"] is True
    assert "enable_session_radix_cache" not in engine_arguments(make(model), nccl_port=1)
    with pytest.raises(
        EngineError, match="--engine-arg enable_session_radix_cache is the node's own: use session_cache"
    ):
        check(make(model, extra={"enable_session_radix_cache": True}))
    with pytest.raises(EngineError, match="session_cache is for the node's own engine"):
        check(
            make(
                model,
                session_cache=True,
                external=ExternalEngine(urls=("http://a:1",), vocab_size=9, context_length=9),
            )
        )


@pytest.mark.parametrize("name", SESSIONLESS_ARGUMENTS)
def test_session_cache_conflicting_arguments_are_refused(model: Path, name: str) -> None:
    with pytest.raises(EngineError, match=f"session_cache does not go with --engine-arg {name}"):
        check(make(model, session_cache=True, extra={name: True}))
    check(make(model, extra={name: True}))
    check(make(model, session_cache=True, extra={name: False}))


@pytest.mark.parametrize(
    ("layers", "refused"),
    [
        ({"layer_types": ["sliding_attention"] * 2}, True),
        ({"hybrid_layer_pattern": [1, 1]}, True),
        ({"layer_types": ["sliding_attention", "full_attention"]}, False),
        ({"hybrid_layer_pattern": [1, 0]}, False),
    ],
)
def test_window_only_model_refuses_session_cache(model: Path, layers: dict[str, Any], refused: bool) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **layers}))
    reason = session_cache_refusal(make(model, session_cache=True))
    assert (reason is not None and "all of whose layers attend to a window alone" in reason) == refused


def test_evicted_cache_moves_to_memory(model: Path) -> None:
    """Main memory takes what the cache of a GPU evicts."""
    asked = make(model, device="cuda", gpus=(0,), host_cache_gb=40)
    check(asked)
    found = engine_arguments(asked, nccl_port=1)
    assert (found["enable_hierarchical_cache"], found["hicache_size"]) == (True, 40)
    assert found["hicache_write_policy"] == "write_back"
    assert "enable_hierarchical_cache" not in engine_arguments(make(model), nccl_port=1)
    with pytest.raises(EngineError, match="host_cache_gb takes what the KV cache of a GPU evicts"):
        check(make(model, host_cache_gb=40))
    with pytest.raises(EngineError, match="--engine-arg hicache_ratio is the node's own: use host_cache_gb"):
        check(make(model, extra={"hicache_ratio": 2.0}))
    advice = diagnose("ValueError: Not enough host memory available. Requesting 40.00 GB").advice
    assert "lower host_cache_gb" in advice


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Qwen3-8B: 36 layers, 8 KV heads of 128: 147,456 bytes in bf16
        (
            {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
            147_456,
        ),
        # DeepSeek-V3: 61 layers of 512 + 64 numbers
        ({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 70_272),
    ],
)
def test_cache_bytes_per_token(config: dict[str, Any], expected: int) -> None:
    assert token_bytes(config, size=2) == expected


def test_dense_model_refuses_routed_experts(model: Path) -> None:
    with pytest.raises(EngineError, match="--routed-experts: the model model is dense"):
        check(make(model, routed_experts=True))
    simulated = SimulatedEngine(simulation=Simulation(), marks=FamilyMarks(turn_end=1), vocab_size=9)
    with pytest.raises(EngineError, match="--routed-experts: the simulated engine's answers are random"):
        check(make(model, routed_experts=True, simulated=simulated))


def test_one_host_per_gpu_group(model: Path) -> None:
    """One host runs per GPU, or per group of tp_size GPUs."""
    assert gpu_groups(make(model)) == ((),)
    assert gpu_groups(make(model, device="cuda", gpus=(0, 1, 2, 3))) == ((0,), (1,), (2,), (3,))
    assert gpu_groups(make(model, device="cuda", gpus=(0, 1, 4, 5), tp=2)) == ((0, 1), (4, 5))


def test_cpu_engine_uses_float32_and_torch(model: Path) -> None:
    arguments = engine_arguments(make(model), nccl_port=22_001)
    assert arguments["dtype"] == "float32"
    assert arguments["attention_backend"] == "torch_native"
    assert arguments["nccl_port"] == 22_001
    assert arguments["skip_tokenizer_init"] is True
    assert "context_length" not in arguments
    assert engine_arguments(make(model, dtype="bfloat16"), nccl_port=1)["dtype"] == "bfloat16"


def test_explicit_settings_override_our_defaults(model: Path) -> None:
    """Explicit settings override our defaults, and extra arguments override all."""
    said = make(
        model,
        context_length=512,
        mem_fraction=0.5,
        max_total_tokens=999,
        max_running_requests=3,
        extra={"stream_interval": 1},
    )
    arguments = engine_arguments(said, nccl_port=1)
    picked = [
        arguments[name]
        for name in (
            "context_length",
            "mem_fraction_static",
            "max_total_tokens",
            "max_running_requests",
            "stream_interval",
        )
    ]
    assert picked == [512, 0.5, 999, 3, 1]


def test_gpu_engine_uses_sglang_defaults(model: Path) -> None:
    """A GPU engine leaves memory and kernels to SGLang."""
    arguments = engine_arguments(make(model, device="cuda", gpus=(0, 1), tp=2), nccl_port=1)
    assert arguments["tp_size"] == 2
    assert not {"attention_backend", "max_total_tokens", "mem_fraction_static", "dp_size"} & set(arguments)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (TINY, CPU_MAX_TOKENS),  # 2 KB a token: the cap
        # SmolLM2-135M
        (
            {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
            (2 << 30) // 46_080,
        ),
        # no grouping: too large, the floor
        ({"num_hidden_layers": 80, "num_attention_heads": 64, "head_dim": 128}, CPU_MIN_TOKENS),
        ({}, CPU_MIN_TOKENS),  # a config that says nothing is taken for a 7B
    ],
)
def test_cpu_cache_follows_model_size(config: dict[str, int], tokens: int) -> None:
    assert cpu_tokens(config) == tokens


def test_host_sees_own_gpus_and_folder(model: Path) -> None:
    settings = make(model, device="cuda", gpus=(0, 1), tp=2)
    environment = host_environment(
        settings, gpus=(1, 0), scratch=Path("/tmp/s"), base={"PATH": "/bin", "SGLANG_PLATFORM": "x"}
    )
    assert environment["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert environment["TMPDIR"] == "/tmp/s"
    assert environment["PATH"] == "/bin"
    assert "SGLANG_PLATFORM" not in environment


def test_cpu_host_sees_no_gpu(model: Path) -> None:
    environment = host_environment(
        make(model), gpus=(), scratch=Path("/tmp/s"), base={"CUDA_VISIBLE_DEVICES": "3"}
    )
    assert environment["SGLANG_PLATFORM"] == "polarnode_cpu"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_gpu_numbers_index_visible_devices(model: Path) -> None:
    settings = make(model, device="cuda", gpus=(1,))
    assert (
        host_environment(settings, gpus=(1,), scratch=Path("/s"), base={"CUDA_VISIBLE_DEVICES": "4,GPU-abc"})[
            "CUDA_VISIBLE_DEVICES"
        ]
        == "GPU-abc"
    )
    with pytest.raises(EngineError, match="shows this node only 1"):
        host_environment(settings, gpus=(1,), scratch=Path("/s"), base={"CUDA_VISIBLE_DEVICES": "4"})
