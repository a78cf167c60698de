"""Adapters in PEFT's layout, made of plain tensors: what `LoraConfig(...)` and `save_pretrained` would write."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import save_file

from polarnode.engine.checkpoints import Manifest, manifest
from polarnode.node.config import TINY_MODEL

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted(model: Manifest, modules: Sequence[str]) -> Iterator[str]:
    """The weights of a model that adapters of these modules change."""
    return (name for name in model if name.split(".")[-2] in modules)


def write_adapter(
    folder: Path,
    *,
    rank: int = 4,
    alpha: float = 8,
    modules: Sequence[str] = ALL,
    seed: int = 0,
    size: float = 0.2,
    model: Path = TINY_MODEL,
    tensors: Mapping[str, "numpy.ndarray[Any, Any]"] | None = None,
    **config: Any,
) -> Path:
    """A folder with a random adapter for `model`. `tensors` replace or add to its own, `config` its config."""
    chance, shapes = numpy.random.default_rng(seed), manifest(model)
    found = {}
    for name in adapted(shapes, modules):
        rows, columns = shapes[name].shape
        base = f"base_model.model.{name.removesuffix('.weight')}"
        found[f"{base}.lora_A.weight"] = chance.normal(0, size, (rank, columns)).astype("float32")
        found[f"{base}.lora_B.weight"] = chance.normal(0, size, (rows, rank)).astype("float32")
    folder.mkdir(parents=True)
    save_file({**found, **(tensors or {})}, folder / "adapter_model.safetensors")
    body = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(modules),
        "bias": "none",
        "base_model_name_or_path": str(model),
        "task_type": "CAUSAL_LM",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(body))
    return folder
