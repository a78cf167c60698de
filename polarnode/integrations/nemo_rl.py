"""NeMo RL: brings its weights to a node, by the hook that NeMo RL has for this.

Rollouts come through NeMo Gym (`polarnode gym-agent`), which samples from the node's engine. NeMo RL updates
only its own generation workers. Before it does, `refit_policy_generation` (nemo_rl/algorithms/grpo.py at
7ea279a) asks the generation for an attribute `weight_synchronizer` and calls its `sync_weights` instead, in
GRPO and in async GRPO, once after each optimizer step and once before the first rollout. NodeWeights is such
a synchronizer: it saves the policy as a Hugging Face checkpoint, lets NeMo RL update its own workers, and
returns when the node serves the checkpoint.

    python -m polarnode.integrations.nemo_rl examples/nemo_gym/run_grpo_nemo_gym.py --config grpo.yaml

runs a script of NeMo RL's with a NodeWeights on the generation that its `setup` returns. Nothing of NeMo RL
is changed on disk. docs/trainers/nemo_rl.md has the whole configuration.
"""

import os
import runpy
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from polarnode.client import PolarnodeClient
from polarnode.core.errors import ConfigError
from polarnode.core.weights import WeightsStatus

ENVIRONMENT: Final = ("POLARNODE_URL", "POLARNODE_TOKEN", "POLARNODE_WEIGHTS")
KEPT = 2  # checkpoints: the one that is served, and the one that is being written
# NeMo RL's automodel checkpoints: a Hugging Face folder beside the sharded one
# (`Checkpointer.save_model` of nemo_automodel/components/checkpoint/checkpointing.py, 0.7.0)
HF_FOLDER: Final = Path("model", "consolidated")
HF_CHECKPOINT: Final[Mapping[str, Any]] = {
    "model_save_format": "safetensors",
    "save_consolidated": True,
    "is_async": False,  # the folder is read as soon as the call returns
}


@define(eq=False, kw_only=True)
class NodeWeights:
    """NeMo RL's `WeightSynchronizer` (nemo_rl/weight_sync/interfaces.py) for a node at `url`.

    `policy` is its Policy, and `refit` updates its own generation workers as it would have. `folder` is a
    directory that the policy's workers write and the node reads under the same path. `checkpointing` is NeMo
    RL's configuration of that name. Versions are whole numbers: the first is one more than the node's
    highest, or 1. A copy of the generation in another process (async GRPO's collector) has None instead of a
    NodeWeights.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    folder: Path
    policy: Any = field(repr=False)
    refit: Callable[..., Any] = field(repr=False)
    checkpointing: Mapping[str, Any] = field(factory=dict, repr=False)
    version: int = 0  # the last version that was served; 0 for none
    _before: Any = field(default=None, repr=False)

    def sync_weights(self, *, timer: Any = None, kv_scales: Any = None) -> Any:
        """Save the policy, update NeMo RL's own workers, and push the checkpoint to the node. Returns NeMo
        RL's metrics. Raises what any of the three raises; the trainer then stops, so that no policy is
        trained on the samples of another.
        """
        node = PolarnodeClient(self.url, token=self.token)
        version = (self.version or _last_number(node.weights())) + 1
        # The checkpoint is saved first, because a colocated policy leaves the GPU once NeMo RL's own workers
        # have its weights.
        checkpoint = self._save_checkpoint(version)
        metrics = self.refit(timer=timer, kv_scales=kv_scales)
        node.update_weights(str(version), path=checkpoint)
        self.version = version
        for old in sorted(self.folder.glob("version_*"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return metrics

    def _save_checkpoint(self, version: int) -> Path:
        """Save the policy as a Hugging Face checkpoint, with its tokenizer."""
        saved = self.folder / f"version_{version}"
        shutil.rmtree(saved, ignore_errors=True)  # left by a run that was stopped while it saved
        self.policy.save_checkpoint(
            weights_path=str(saved),
            tokenizer_path=str(saved / "tokenizer"),
            checkpointing_cfg={**self.checkpointing, **HF_CHECKPOINT},
        )
        if not (saved / HF_FOLDER / "config.json").is_file():
            raise ConfigError(
                f"NeMo RL wrote no Hugging Face checkpoint into {saved / HF_FOLDER}: set"
                " policy.dtensor_cfg._v2: true, checkpointing.model_save_format: safetensors and"
                " checkpointing.save_consolidated: true"
            )
        return saved / HF_FOLDER

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @property
    def is_stale(self) -> bool:
        """Whether the node has no weights of this run yet."""
        return self.version == 0

    def init_communicator(self) -> None:
        """Do nothing, because each update has a connection of its own."""
        if self._before is not None:
            self._before.init_communicator()

    def shutdown(self) -> None:
        """Close NeMo RL's own synchronizer."""
        if self._before is not None:
            self._before.shutdown()


def _last_number(weights: WeightsStatus) -> int:
    """The highest number that the node ever served under. It may not be used again, because a version names
    one set of weights forever.
    """
    return max(int(each) for each in ("0", weights.version, *weights.versions) if each.isdecimal())


def attach(
    generation: Any, policy: Any, config: Any, *, url: str, folder: Path, token: str | None = None
) -> NodeWeights:
    """Put a NodeWeights on a generation that NeMo RL's `setup` returned. `config` is its MasterConfig.

    Raises ConfigError for a policy whose checkpoints the node cannot read.
    """
    from nemo_rl.algorithms.grpo import refit_policy_generation  # type: ignore[import-not-found]

    _check(config.policy)
    before = getattr(generation, "weight_synchronizer", None)
    colocated = bool(config.policy["generation"]["colocated"]["enabled"])

    def refit(*, timer: Any, kv_scales: Any) -> Any:
        if before is not None:
            return before.sync_weights(timer=timer, kv_scales=kv_scales)
        generation.weight_synchronizer = None  # its value without a node
        try:
            return refit_policy_generation(policy, generation, colocated, timer=timer, kv_scales=kv_scales)
        finally:
            generation.weight_synchronizer = found

    found = NodeWeights(
        url=url,
        token=token,
        folder=folder,
        policy=policy,
        refit=refit,
        checkpointing=dict(config.checkpointing),
        before=before,
    )
    generation.weight_synchronizer = found
    return found


def _check(policy: Mapping[str, Any]) -> None:
    dtensor: Mapping[str, Any] = policy.get("dtensor_cfg") or {}
    if not (dtensor.get("enabled") and dtensor.get("_v2")):
        raise ConfigError(
            "a node reads Hugging Face checkpoints, which only NeMo RL's DTensor policy of version 2 writes:"
            " set policy.dtensor_cfg.enabled: true, policy.dtensor_cfg._v2: true and"
            " policy.megatron_cfg.enabled: false"
        )
    if (dtensor.get("lora_cfg") or {}).get("enabled"):
        raise ConfigError(
            "this plug-in pushes whole checkpoints, and NeMo RL writes a LoRA policy in another layout: set"
            " policy.dtensor_cfg.lora_cfg.enabled: false"
        )


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Run a script of NeMo RL's with its weights pushed to a node."""
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(
            "name the script of NeMo RL's and its arguments: python -m polarnode.integrations.nemo_rl"
            " examples/nemo_gym/run_grpo_nemo_gym.py --config grpo.yaml"
        )
    folder = environment.get("POLARNODE_WEIGHTS")
    if not folder:
        raise ConfigError(
            "POLARNODE_WEIGHTS is not set: give a directory that NeMo RL's workers write and the node reads"
            " under the same path"
        )
    from nemo_rl.algorithms import grpo  # type: ignore[import-not-found]

    setup = grpo.setup

    def with_node(config: Any, *rest: Any, **named: Any) -> Any:
        found = setup(config, *rest, **named)
        attach(
            found[1],
            found[0],
            config,
            url=environment.get("POLARNODE_URL", "http://127.0.0.1:8080"),
            token=environment.get("POLARNODE_TOKEN"),
            folder=Path(folder),
        )
        return found

    grpo.setup = with_node
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(str(error))
