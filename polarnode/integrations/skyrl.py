"""SkyRL (0.3.0): a generator whose trajectories are sessions of a node, and the entrypoint that trains with
it.

`trainer.override_entrypoint=polarnode.integrations.skyrl` makes SkyRL's own `main` call the one below, which
adds settings under `polarnode.` to SkyRL's configuration. docs/trainers/skyrl.md describes all of it.

A prompt's trajectories are one task, so the node starts, ends and judges them as a group. With
`generator.step_wise_trajectories=true` a session that the machine lost is left out of its group. Otherwise
SkyRL needs a row for it, and gets one that is masked and has the mean reward of its group, never 0.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import anyio.to_thread
import ray
from attrs import evolve
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.generators.base import GeneratorInterface, GeneratorOutput, TrajectoryID
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from polarnode.client import PolarnodeClient
from polarnode.client.tensors import push_adapter, push_tensors
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.task import TaskSpec
from polarnode.groups import Group
from polarnode.integrations.rollout_tasks import NodeRollouts, PluginSettings, plugin_settings, task_of
from polarnode.trainers.rows import Absent, alone
from polarnode.trainers.skyrl import generator_output

OVERRIDE_FLAG: Final = "trainer.override_entrypoint="
# vLLM's sampling parameters that a node has; the others belong to SkyRL's own engines.
SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
# Settings of SkyRL's own generator that have no effect, and what to use in their place.
UNUSED: Final[Mapping[str, str]] = {
    "apply_overlong_filtering": "set polarnode.mask_truncated=true, which masks sessions that a budget ended",
    "zero_reward_on_non_stop": "let the evaluator of the task score what a budget ended",
}
# SkyRL 0.3.0 takes lists of experts, and fails at arrays; what follows it takes arrays, and fails at lists.
EXPERT_ARRAYS: Final = find_spec("skyrl.backends.skyrl_train.utils.routed_experts") is not None
# A name of this launch: a version names one set of weights for ever, and a run that is started again makes
# other weights of the same step.
LAUNCH_ID: Final = token_hex(3)


# ── trajectories ──────────────────────────────────────────────────────────────


class PolarnodeGenerator(GeneratorInterface):  # type: ignore[misc]  # SkyRL is not installed in CI
    """Runs each prompt's trajectories as a task of a node. `placeholder` is the token of a masked row;
    `mask_truncated` masks the rows that a budget or a limit ended, as SkyRL's overlong filtering does.
    """

    def __init__(
        self, settings: PluginSettings, *, step_wise: bool, placeholder: int, mask_truncated: bool = False
    ) -> None:
        self.settings, self.step_wise, self.placeholder = settings, step_wise, placeholder
        self.mask_truncated = mask_truncated

    async def generate(self, input_batch: Mapping[str, Any]) -> GeneratorOutput:
        """The rows, in the order of the input. Raises the node's refusals, with which SkyRL's step fails."""
        ids = input_batch["trajectory_ids"]
        if ids is None:
            raise Refused(
                "a node needs the trajectory_ids of SkyRL's input: they say which samples are a group"
            )
        places: dict[str, list[int]] = {}
        for place, each in enumerate(ids):
            places.setdefault(each.instance_id, []).append(place)
        async with NodeRollouts(self.settings) as rollouts:
            groups = await rollouts.groups([self._task(input_batch, each) for each in places.values()])
        outputs = []
        for group, each in zip(groups, places.values(), strict=True):
            named = [(ids[place].instance_id, ids[place].repetition_id) for place in each]
            lone = self.step_wise and not _is_evaluation(input_batch) and alone(group)
            outputs.append(self._output(group, named, lone=lone))
        found = _joined(outputs)
        if self.mask_truncated:
            pairs = zip(found["loss_masks"], found["stop_reasons"], strict=True)
            found["loss_masks"] = [mask if stop == "stop" else [0] * len(mask) for mask, stop in pairs]
        return found

    def _task(self, input_batch: Mapping[str, Any], places: list[int]) -> TaskSpec:
        first, extras = places[0], input_batch["env_extras"]
        row = {**(extras[first] if extras else {}), "prompt": input_batch["prompts"][first]}
        params = input_batch.get("sampling_params") or {}
        return task_of(
            self.settings,
            row,
            samples=len(places),
            group_id=str(input_batch["trajectory_ids"][first].instance_id),
            sampling={name: params[name] for name in SAMPLING if params.get(name) is not None},
            evaluation=_is_evaluation(input_batch),
        )

    def _output(self, group: Group, ids: list[tuple[str, int]], *, lone: bool) -> dict[str, Any]:
        """`lone`: only one session is left to train. A stand-in with the same reward is put beside it,
        because SkyRL takes the reward of a lone trajectory for its advantage.
        """
        usable = {each.session_id: each for each in group.usable}
        members = list(zip(group.members, ids, strict=True))
        kept = [(usable[member.session_id], each) for member, each in members if member.session_id in usable]
        if self.step_wise and kept and not lone:
            return generator_output(
                [session for session, _ in kept],
                trajectory_ids=[each for _, each in kept],
                absent=Absent(token_id=self.placeholder),
                arrays="native",
            )
        if lone:
            other = next(each for each in members if each[0].session_id not in usable)
            members = [each for each in members if each is other or each[0].session_id in usable]
            group = evolve(group, members=tuple(member for member, _ in members))
        # A group without a usable session keeps its place in the batch and is masked as a whole.
        absent = Absent(token_id=self.placeholder, reward=None if kept else 0.0)
        return generator_output(
            group,
            trajectory_ids=[each for _, each in members],
            step_wise=self.step_wise,
            absent=absent,
            arrays="native",
        )


def _is_evaluation(input_batch: Mapping[str, Any]) -> bool:
    """Whether a batch belongs to SkyRL's evaluation, not to its training."""
    return getattr(input_batch.get("batch_metadata"), "training_phase", "train") == "eval"


def _joined(outputs: list[dict[str, Any]]) -> GeneratorOutput:
    """The outputs of several groups as one, in SkyRL's classes."""
    found: dict[str, Any] = {}
    for name, first in outputs[0].items():
        columns = [output[name] for output in outputs]
        if isinstance(first, list) and all(column is not None for column in columns):
            found[name] = [each for column in columns for each in column]
        elif any(column is not None for column in columns):
            raise Refused(
                f"some groups have {name} and some have not, and SkyRL has those of all or of none: give all"
                " tasks the same carry"
            )
        else:
            found[name] = None
    if found["rollout_expert_indices"] is not None and not EXPERT_ARRAYS:
        found["rollout_expert_indices"] = [each.tolist() for each in found["rollout_expert_indices"]]
    found["trajectory_ids"] = [TrajectoryID(**each) for each in found["trajectory_ids"]]
    masked = [stop == "absent" for stop in found["stop_reasons"]]
    found["rollout_metrics"] = {"generate/polarnode_masked_rows": sum(masked)}
    return GeneratorOutput(**found)


# ── weights ───────────────────────────────────────────────────────────────────


class NodeWeights:
    """A mix-in for a trainer of SkyRL: after each step the policy's checkpoint goes to the node, in place of
    the servers that SkyRL would have started.
    """

    polarnode: PluginSettings
    weights: Mapping[str, Any]

    def init_weight_sync_state(self: Any) -> None:
        self.dispatch.save_weights_for_sampler = self.push_weights

    async def push_weights(self: Any, model_id: str | None = None) -> None:
        # The push runs in a thread, because a fully asynchronous trainer goes on sampling meanwhile.
        await anyio.to_thread.run_sync(self._push)

    def _push(self: Any) -> None:
        folder = Path(self.weights["folder"]).absolute()
        exported = folder / f".exported-{LAUNCH_ID}"
        self.dispatch.save_hf_model("policy", str(exported), self.tokenizer)
        settings = self.polarnode
        client = PolarnodeClient(settings.url, token=settings.token, patience_s=settings.patience_s)
        version, adapter = f"{settings.run}-{LAUNCH_ID}-{self.global_step}", exported / "adapter_config.json"
        try:
            if adapter.is_file():  # SkyRL exports a LoRA policy as PEFT does, without its base model
                config = json.loads(adapter.read_text())
                push_adapter(client, settings.run, version, _tensors(exported), config=config)
                return
            push_tensors(
                client,
                version,
                _tensors(exported),
                model=self.cfg.trainer.policy.model.path,
                **{**self.weights, "folder": folder},
            )
        finally:
            shutil.rmtree(exported, ignore_errors=True)


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


class NodeTrainer(NodeWeights, RayPPOTrainer):  # type: ignore[misc]
    """SkyRL's synchronous trainer."""


class FullyAsyncNodeTrainer(NodeWeights, FullyAsyncRayPPOTrainer):  # type: ignore[misc]
    """SkyRL's fully asynchronous trainer."""


# ── the entrypoint ────────────────────────────────────────────────────────────


@dataclass
class PolarnodeConfig(SkyRLTrainConfig):  # type: ignore[misc]
    """SkyRL's configuration, and `polarnode`: url, task, run, patience_s; folder, mode of the weights;
    mask_truncated.
    """

    polarnode: dict[str, Any] = field(default_factory=dict)


class PolarnodeExp(BasePPOExp):  # type: ignore[misc]
    """SkyRL's experiment with the generator above, and with the weights sent to the node."""

    def __init__(
        self, cfg: Any, settings: PluginSettings, weights: Mapping[str, Json], *, mask_truncated: bool
    ) -> None:
        self.settings, self.weights, self.mask_truncated = settings, weights, mask_truncated
        super().__init__(cfg)

    def get_inference_client(self) -> Any:
        return None  # SkyRL starts no servers, because the node samples

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> PolarnodeGenerator:
        token = tokenizer.pad_token_id
        return PolarnodeGenerator(
            self.settings,
            step_wise=cfg.generator.step_wise_trajectories,
            placeholder=tokenizer.eos_token_id if token is None else token,
            mask_truncated=self.mask_truncated,
        )

    def get_trainer(self, **given: Any) -> Any:
        kind = FullyAsyncNodeTrainer if self.cfg.trainer.fully_async.enabled else NodeTrainer
        trainer = kind(**given)
        trainer.polarnode, trainer.weights = self.settings, self.weights
        return trainer


def read_settings(cfg: Any) -> tuple[PluginSettings, dict[str, Any]]:
    """The settings of the tasks and of the weights. Refused if SkyRL would wait for servers of its own."""
    given = {name: value for name, value in dict(cfg.polarnode).items() if name != "mask_truncated"}
    weights = {name: given.pop(name) for name in ("folder", "mode") if given.get(name) is not None}
    if "folder" not in weights:
        raise Refused(
            "polarnode.folder is where the policy's checkpoints are written for the node: set it to a folder"
            " that both machines see under the same path",
            path="$.folder",
        )
    if cfg.trainer.placement.colocate_all:
        raise Refused(
            "trainer.placement.colocate_all shares GPUs with servers of SkyRL's own, and there are none: set"
            " it to false",
            path="$.trainer.placement.colocate_all",
        )
    _check_unused(cfg)
    settings, lora = plugin_settings(given), cfg.trainer.policy.model.lora
    if lora.rank > 0:
        if cfg.trainer.strategy != "fsdp":
            raise Refused(
                "trainer.policy.model.lora with trainer.strategy=megatron exports what a node was never tried"
                " with: use trainer.strategy=fsdp, or set rank to 0",
                path="$.trainer.strategy",
            )
        # The tasks are sampled by the adapter that `_push` serves.
        settings = evolve(settings, template={**settings.template, "adapter": settings.run})
    return settings, weights


def _check_unused(cfg: Any) -> None:
    """Refuse settings that only SkyRL's own generator obeys, and settings that are right only with as many
    rows as samples.
    """
    for name, instead in UNUSED.items():
        if getattr(getattr(cfg, "generator", None), name, False):
            raise Refused(
                f"generator.{name} would do nothing: it is of SkyRL's own generator, and a node's sessions"
                f" go through another. Set it to false, and {instead}",
                path=f"$.generator.{name}",
            )
    sampling = getattr(getattr(cfg.trainer, "algorithm", None), "dynamic_sampling", None)
    if getattr(sampling, "type", None) == "replace":
        raise Refused(
            "trainer.algorithm.dynamic_sampling.type=replace puts the rows of one prompt in the places of"
            " another's, one for one, and sessions have different numbers of rows: use type=filter",
            path="$.trainer.algorithm.dynamic_sampling.type",
        )


def run(cfg: Any, settings: PluginSettings, weights: Mapping[str, Json], mask_truncated: bool) -> None:
    PolarnodeExp(cfg, settings, weights, mask_truncated=mask_truncated).run()


def main() -> None:
    """What SkyRL's own `main` calls; `python -m polarnode.integrations.skyrl` does the same."""
    cfg = PolarnodeConfig.from_cli_overrides(
        [each for each in sys.argv[1:] if not each.startswith(OVERRIDE_FLAG)]
    )
    validate_cfg(cfg)
    settings, weights = read_settings(cfg)
    mask_truncated = bool(cfg.polarnode.get("mask_truncated"))
    cfg.polarnode = {}  # SkyRL prints its configuration, and a token may be in it
    initialize_ray(cfg)
    # This does not run on the head node, as in SkyRL's own entrypoint.
    ray.get(ray.remote(num_cpus=1)(run).remote(cfg, settings, weights, mask_truncated))


if __name__ == "__main__":
    main()
