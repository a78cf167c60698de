"""AReaL's own actor on rows of ours: its advantages, its mini-batches, its packing and its loss, on CPU tensors.
A program of its own, because importing it changes the process.

areal 1.0.4 lies in .venv/oracles without what it imports; `--root` names another checkout of it (run by hand on
areal-project/AReaL cbff54d64). Of modules that are not installed, and of AReaL's packages whose `__init__` starts
engines, an empty one stands in; every function that works on tensors is AReaL's.

JSON in: {"rollouts": [what `areal.rollout` returned, as lists], "turns": bool}. JSON out, see `main`.
"""

import importlib
import json
import logging
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

VOCABULARY = 128
MISSING = {"torchdata", "hydra", "omegaconf", "ray", "numba", "lark"}
EMPTY = ("areal", "areal.infra", "areal.trainer", "areal.trainer.ppo", "areal.experimental", "areal.engine")
TYPES = {
    "loss_mask": torch.int64,
    "input_ids": torch.int64,
    "versions": torch.int64,
    "turn_ids": torch.int32,
    "attention_mask": torch.bool,
}


class Anything(ModuleType):
    """A module with every name: its loaded submodules, else classes and mocks."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        loaded = sys.modules.get(f"{self.__name__}.{name}")
        if loaded is not None:
            return loaded
        return type(name, (), {}) if name[:1].isupper() else MagicMock(name=name)


class Absent(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in MISSING else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it has every name."""


def areal(root: Path) -> tuple[Any, Any, Any]:
    """(its actor module, its configuration's, its data's)."""
    sys.path.append(str(root))
    sys.meta_path.append(Absent())
    for name in EMPTY:
        package = Anything(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package
    log = sys.modules["areal.utils.logging"] = Anything("areal.utils.logging")
    log.getLogger, log.Logger = logging.getLogger, logging.Logger  # type: ignore[attr-defined]
    names = ("areal.trainer.ppo.actor", "areal.api.cli_args", "areal.utils.data")
    actor, config, data = (importlib.import_module(name) for name in names)
    return actor, config, data


class Engine:
    """A model whose logits are leaves: which of them a loss moves can be read from them."""

    def __init__(self, data: Any) -> None:
        self.data, self.seen = data, []

    def train(self) -> None:
        """As a model's."""

    def get_version(self) -> int:
        return 9

    def train_batch(self, batch: dict[str, Any], *, loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
        packed = self.data.pack_tensor_dict(dict(batch))
        labels = torch.roll(packed["input_ids"], -1, -1)
        logits = torch.zeros(len(labels), VOCABULARY, requires_grad=True)
        logprobs = torch.log_softmax(logits, -1).gather(-1, labels[:, None]).squeeze(-1)
        packed["logprobs"] = logprobs.detach() * packed["loss_mask"]  # the ratio is 1, so nothing is clipped
        packed["prox_logp"] = packed["logprobs"]
        loss_fn(logprobs, torch.zeros_like(logprobs), packed).backward()
        assert logits.grad is not None
        moved = logits.grad.abs().sum(-1) > 0
        trained = packed["loss_mask"].bool()
        self.seen.append(
            {
                "weight": int(loss_weight_fn(packed)),
                "tokens": labels[trained].tolist(),
                "moved": labels[moved].tolist(),
                "moved_untrained": int((moved & ~trained).sum()),
            }
        )
        return {}


def tensors(rollout: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.tensor(value, dtype=TYPES.get(name, torch.float32)) for name, value in rollout.items()
    }


def main() -> None:
    given = json.load(sys.stdin)
    default = Path(sys.prefix) / "oracles"
    root = Path(sys.argv[sys.argv.index("--root") + 1]) if "--root" in sys.argv else default
    actor, config, data = areal(root)
    plain = {"experiment_name": "e", "trial_name": "t", "kl_ctl": 0.0, "recompute_logprob": False}
    settings = config.PPOActorConfig(
        **plain, reward_norm=None, adv_norm=None, use_decoupled_loss=False, ppo_n_minibatches=2
    )
    if given["turns"]:
        settings.gae_timestep_unit = "turn"
    engine = Engine(data)
    ppo = actor.PPOActor(settings, engine)
    rollouts = ppo.compute_advantages([tensors(each) for each in given["rollouts"]])
    advantages = [
        [row[mask.bool()].tolist() for row, mask in zip(each["advantages"], each["loss_mask"], strict=True)]
        for each in rollouts
    ]
    ppo.ppo_update(rollouts)
    json.dump({"advantages": advantages, "batches": engine.seen}, sys.stdout)


if __name__ == "__main__":
    main()
