"""The arguments of a GPU's engine, as SGLang's own class reads them, and the lock of its environment: no GPU is
needed for either.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from polarnode.engine.settings import SESSIONLESS_ARGUMENTS, EngineSettings, engine_arguments

ROOT = Path(__file__).parents[2]
DENSE = {"model_type": "qwen3", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
MIXTURE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}


def arguments(folder: Path, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    settings = EngineSettings(
        **{"model_path": folder, "device": "cuda", "gpus": (0, 1), "tp": 2, "state_dir": folder, **more}
    )
    return engine_arguments(settings, nccl_port=23_456)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("config", "more"),
    [
        (DENSE, {}),
        (DENSE, {"mem_fraction": 0.8, "max_total_tokens": 350_000, "max_running_requests": 256}),
        (DENSE, {"context_length": 65_536, "dtype": "bfloat16", "weight_version": "7"}),
        (DENSE, {"lora_rank": 32, "lora_slots": 4}),
        (DENSE, {"memory_saver": "backup", "session_cache": True}),
        (DENSE, {"memory_saver": "discard"}),
        (MIXTURE, {"routed_experts": True}),
        (MIXTURE, {"lora_rank": 8, "lora_modules": ("q_proj", "v_proj")}),
        (DENSE, {"host_cache_gb": 40, "session_cache": True}),
        (DENSE, {"extra": {"enable_metrics": True}}),
    ],
    ids=[
        "plain",
        "limits",
        "context",
        "lora",
        "saver",
        "discard",
        "experts",
        "lora of a mixture",
        "host",
        "extra",
    ],
)
def test_sglang_accepts_arguments_and_types(
    tmp_path: Path, config: dict[str, Any], more: dict[str, Any]
) -> None:
    import msgspec
    from sglang.srt.server_args import ServerArgs

    given = arguments(tmp_path, config, **more)
    known = {each.name: each.type for each in msgspec.structs.fields(ServerArgs)}
    assert not set(given) - set(known), "SGLang does not know these"
    for name in given.keys() - {"lora_target_modules"}:  # a set or a list, which msgspec does not read
        msgspec.convert(given[name], known[name])
    found = ServerArgs(**given)
    assert {name: getattr(found, name) for name in given} == given
    assert (found.device, found.tp_size, found.nccl_port) == ("cuda", 2, 23_456)


@pytest.mark.engine
def test_session_cache_setting_matches_sglang() -> None:
    """Why `session_cache` is off unless asked for, and what it is refused with: when SGLang changes that, this
    fails and docs/engines.md is to be read again.
    """
    import msgspec
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import select_tree_core_backend
    from sglang.srt.server_args import ServerArgs

    assert {each.name for each in msgspec.structs.fields(ServerArgs)}.issuperset(SESSIONLESS_ARGUMENTS)

    def core(sessions: bool) -> str:
        return select_tree_core_backend(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=None,
                page_size=1,
                enable_session_radix_cache=sessions,
            )
        )

    assert (core(False), core(True)) == ("rust", "python")


def test_gpu_lock_has_pinned_versions() -> None:
    lock = (ROOT / "tools" / "constraints-gpu.txt").read_text()
    pins = dict(line.split("==") for line in lock.splitlines() if not line.startswith("#"))
    project = (ROOT / "pyproject.toml").read_text()
    for name in ("sglang", "transformers", "tokenizers"):
        assert f'"{name}=={pins[name]}"' in project
    assert len(pins) > 200
    assert {"torch", "sglang-kernel", "flashinfer-python", "nvidia-nccl-cu13"} <= set(pins)
    assert not re.search(r"https?://|@|file:", lock), "no host, no path"


def test_gpu_lock_matches_pip_resolution() -> None:
    """The lock holds what pip would install, except this project itself."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from lock_gpu import lines
    finally:
        sys.path.remove(str(ROOT / "tools"))
    report = {"install": [_package("Zeta_One", "2"), _package("polarnode", "0.1"), _package("alpha", "1.0")]}
    assert lines(report) == ["alpha==1.0", "zeta-one==2"]


def _package(name: str, version: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "version": version}}
