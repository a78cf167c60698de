"""A low-rank adapter in plain torch: wrap a model's linear layers, train, export as PEFT lays it out.

    adapter = adapt(model, Lora(rank=16, alpha=32.0))
    adapter.save(folder)        # a folder that a node and peft read

The base's weights are frozen and stay as they are; the adapter starts as nothing (B is zero), so that its
first step is the base's own.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."  # of PEFT's names, before the model's own


@dataclass(frozen=True)
class Lora:
    """`alpha` / `rank` scales the product, as in PEFT. `seed` is of A, which begins at random."""

    rank: int
    alpha: float
    modules: tuple[str, ...] = MODULES
    seed: int = 0


class Adapted(nn.Module):
    """A linear layer and its adapter: base(x) + scale · B(A(x))."""

    def __init__(self, base: nn.Linear, lora: Lora, dice: torch.Generator) -> None:
        super().__init__()
        self.base, self.scale = base, lora.alpha / lora.rank
        self.lora_A = nn.Parameter(torch.empty(lora.rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, lora.rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5), generator=dice)  # PEFT's

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.base(given) + self.scale * (given @ self.lora_A.T @ self.lora_B.T)
        return found


class Adapter:
    """The trained part of an adapted model."""

    def __init__(self, lora: Lora, layers: dict[str, Adapted]) -> None:
        self.lora, self.layers = lora, layers

    def parameters(self) -> Iterator[nn.Parameter]:
        for layer in self.layers.values():
            yield from (layer.lora_A, layer.lora_B)

    def tensors(self) -> dict[str, Tensor]:
        """The adapter's matrices by PEFT's names."""
        return {
            f"{PREFIX}{name}.lora_{part}.weight": getattr(layer, f"lora_{part}").detach().contiguous()
            for name, layer in self.layers.items()
            for part in "AB"
        }

    def config(self) -> dict[str, Any]:
        """PEFT's adapter_config.json."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "target_modules": list(self.lora.modules),
            "bias": "none",
        }

    def save(self, folder: Path) -> Path:
        """A folder as PEFT lays it out."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors(), folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(self.config(), indent=2) + "\n")
        return folder


def adapt(model: nn.Module, lora: Lora) -> Adapter:
    """Freeze `model` and wrap its linear layers of these names."""
    model.requires_grad_(False)
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in lora.modules
    }
    layers, dice = {}, torch.Generator().manual_seed(lora.seed)
    for name, module in found.items():
        parent, _, own = name.rpartition(".")
        layers[name] = Adapted(module, lora, dice)
        setattr(model.get_submodule(parent), own, layers[name])
    return Adapter(lora, layers)
