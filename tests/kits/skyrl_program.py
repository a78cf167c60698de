"""The plug-in of SkyRL in the hands of SkyRL 0.3.0: a program of its own, which prints what came of it as
JSON.

SkyRL imports Ray, jaxtyping and more as a whole. So its classes and functions are taken out of the installed
files and run alone: the generator's interface and output, the validation of an output, and the trainer's own
advantages, step-wise and not.
"""

import asyncio
import json
import sys
import typing
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from attrs import evolve
from trainers_kit import one_row, session_of_two_rows, session_without_rows
from trainers_program import ORACLES, taken
from verl_program import Plain, methods

from polarnode.core.errors import Refused
from polarnode.core.task import GroupSpec
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.groups import Group, facts_of, judged
from polarnode.integrations.rollout_tasks import PluginSettings
from polarnode.node.config import TINY_MODEL

TRAIN = "skyrl/train/"


def install() -> None:
    """Put modules with SkyRL's own classes where the plug-in imports them."""
    typed = {
        name: getattr(typing, name) for name in ("Any", "Dict", "List", "Optional", "Union", "TypedDict")
    }
    base = taken(
        TRAIN + "generators/base.py", "TrajectoryID", "GeneratorInput", "GeneratorOutput", "GeneratorInterface",
        **typed, ABC=ABC, abstractmethod=abstractmethod, torch=torch, dataclass=dataclass, late=True,
    )  # fmt: skip
    plain = {name: type(name, (), {}) for name in ("SkyRLTrainConfig", "BasePPOExp")}
    modules: dict[str, dict[str, Any]] = {
        "ray": {},
        "skyrl.train.config": plain,
        "skyrl.train.entrypoints.main_base": plain,
        "skyrl.train.fully_async_trainer": {"FullyAsyncRayPPOTrainer": type("Async", (), {})},
        "skyrl.train.generators.base": base,
        "skyrl.train.trainer": {"RayPPOTrainer": type("RayPPOTrainer", (), {})},
        "skyrl.train.utils": {"validate_cfg": None},
        "skyrl.train.utils.utils": {"initialize_ray": None},
        "skyrl.backends.skyrl_train.utils": {},
    }
    for name, found in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
            module.__path__ = []
        vars(sys.modules[name]).update({key: each for key, each in found.items() if key[:2] != "__"})


# ── a batch through the generator ─────────────────────────────────────────────


def of(instance: str, *sessions: Trajectory) -> list[Trajectory]:
    return [
        evolve(
            each,
            group_id=instance,
            sample_index=place,
            session_id=f"{instance}-{place}",
            traces=tuple(evolve(trace, routed=None, top=None) for trace in each.traces),
        )
        for place, each in enumerate(sessions)
    ]


def nodes(groups: dict[str, list[Trajectory]], specs: list[Any]) -> Any:
    class Node:
        def __init__(self, settings: PluginSettings) -> None: ...

        async def __aenter__(self) -> "Node":
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def groups(self, tasks: list[Any]) -> list[Group]:
            return [self._group(each) for each in tasks]

        def _group(self, spec: Any) -> Group:
            specs.append(spec)
            held = groups[spec.group_id]
            return judged(
                GroupSpec(), [facts_of(each) for each in held], task_id="t", group_id=spec.group_id
            ).holding(held)

    return Node


def generated(
    plug: Any, groups: dict[str, list[Trajectory]], step_wise: bool, *, phase: str = "train", **how: Any
) -> dict[str, Any]:
    """What the generator gives for the groups, by SkyRL's own validation; and its trainer's advantages."""
    identity = sys.modules["skyrl.train.generators.base"].TrajectoryID
    ids = [identity(name, place) for name, group in groups.items() for place in range(len(group))]
    batch = {
        "prompts": [[{"role": "user", "content": "fix it"}]] * len(ids),
        "env_classes": ["none"] * len(ids),
        "env_extras": [{"extra_info": {"polarnode": '{"budgets": {"max_turns": 3}}'}}] * len(ids),
        "sampling_params": {"temperature": 0.7, "top_k": -1, "max_tokens": 64, "logprobs": 0},
        "trajectory_ids": ids,
        "batch_metadata": SimpleNamespace(global_step=1, training_phase=phase),
    }
    specs: list[Any] = []
    plug.NodeRollouts = nodes(groups, specs)
    settings = PluginSettings(template={"harness": {"name": "pi"}})
    generator = plug.PolarnodeGenerator(settings, step_wise=step_wise, placeholder=0, **how)
    output = asyncio.run(generator.generate(batch))
    checks = taken(
        TRAIN + "utils/trainer_utils.py", "validate_generator_output", "_validate_step_wise_fields",
        np=np, logger=SimpleNamespace(warning=print), late=True,
    )  # fmt: skip
    checks["validate_generator_output"](len(ids), output, step_wise=step_wise)
    [spec, *_] = specs
    return {
        "ids": [each.to_string() for each in output["trajectory_ids"]],
        "rewards": output["rewards"],
        "stops": output["stop_reasons"],
        "trained": [sum(mask) for mask in output["loss_masks"]],
        "advantages": advantages(output, step_wise),
        "metrics": output["rollout_metrics"],
        "task": [spec.group_id, spec.num_samples, spec.budgets.max_turns, spec.sampling.temperature, spec.sampling.max_tokens, spec.sampling.presence_penalty],
    }  # fmt: skip


def advantages(output: Any, step_wise: bool) -> list[list[float]]:
    """The advantages of each row's trained tokens, by the trainer's own method."""
    grpo = taken(
        "skyrl/backends/skyrl_train/utils/ppo_utils.py", "compute_grpo_outcome_advantage",
        torch=torch, np=np, defaultdict=defaultdict, late=True,
        register_advantage_estimator=lambda _: lambda function: function,
        AdvantageEstimator=SimpleNamespace(GRPO="grpo"),
    )["compute_grpo_outcome_advantage"]  # fmt: skip

    def outcome(token_level_rewards: Any, response_mask: Any, index: Any, **_: Any) -> Any:
        return grpo(token_level_rewards, response_mask, index)

    space = methods(
        TRAIN + "trainer.py", "RayPPOTrainer", "compute_advantages_and_returns",
        torch=torch, np=np, ppo_utils=SimpleNamespace(compute_advantages_and_returns=outcome),
        logger=SimpleNamespace(info=lambda _: None),
    )  # fmt: skip

    def padded(rows: Any) -> Any:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

    rewards = [
        [0.0] * (len(ids) - 1) + [reward]
        for ids, reward in zip(output["response_ids"], output["rewards"], strict=True)
    ]

    class Batch(dict[str, Any]):
        metadata: typing.ClassVar[dict[str, Any]] = {
            "uids": [each.instance_id for each in output["trajectory_ids"]],
            "is_last_step": output["is_last_step"],
            "avg_response_length": 1.0,
        }

        def to(self, _: str) -> "Batch":
            return self

    mask = padded(output["loss_masks"])
    algorithm = defaultdict(lambda: None)
    trainer = SimpleNamespace(
        cfg=SimpleNamespace(
            generator=SimpleNamespace(step_wise_trajectories=step_wise),
            trainer=SimpleNamespace(algorithm=Plain(dict.fromkeys(
                ("advantage_estimator", "gamma", "lambd", "grpo_norm_by_std"), algorithm["none"]
            ))),
        ),
        all_metrics={},
    )  # fmt: skip
    data = Batch(
        rewards=padded(rewards), values=None, loss_mask=mask,
        response_mask=padded([[1] * len(ids) for ids in output["response_ids"]]),
    )  # fmt: skip
    made = space["compute_advantages_and_returns"](trainer, data)["advantages"]
    return [
        sorted({round(each, 4) for each in row[kept.bool()].tolist()})
        for row, kept in zip(made, mask, strict=True)
    ]


# ── weights ───────────────────────────────────────────────────────────────────


def export_adapter(model: str, folder: str, tokenizer: Any) -> None:
    """What SkyRL's FSDP strategy does of a policy with LoRA: PEFT's own `save_pretrained`, with all tensors."""
    sys.path.append(str(ORACLES))
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    policy = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    policy.save_pretrained(folder, state_dict=policy.state_dict(), safe_serialization=True)


def settings_of(plug: Any, rank: int, strategy: str) -> Any:
    """The adapter that the tasks of a run name, or why the run is refused."""
    cfg = SimpleNamespace(
        polarnode={"folder": "/steps", "run": "r"},
        trainer=SimpleNamespace(
            placement=SimpleNamespace(colocate_all=False), strategy=strategy,
            policy=SimpleNamespace(model=SimpleNamespace(lora=SimpleNamespace(rank=rank))),
        ),
    )  # fmt: skip
    try:
        return plug.read_settings(cfg)[0].template.get("adapter")
    except Refused as error:
        return str(error)


def unused(plug: Any) -> list[str]:
    """Why a run is refused whose settings SkyRL's own generator would follow."""
    said = []
    for generator, kind in (
        ("apply_overlong_filtering", None),
        ("zero_reward_on_non_stop", None),
        ("", "replace"),
        ("", "filter"),
    ):
        lora = SimpleNamespace(model=SimpleNamespace(lora=SimpleNamespace(rank=0)))
        cfg = SimpleNamespace(
            polarnode={"folder": "/steps", "mask_truncated": True},
            generator=SimpleNamespace(**{generator: True}) if generator else SimpleNamespace(),
            trainer=SimpleNamespace(
                placement=SimpleNamespace(colocate_all=False), strategy="fsdp", policy=lora,
                algorithm=SimpleNamespace(dynamic_sampling=SimpleNamespace(type=kind)),
            ),
        )  # fmt: skip
        try:
            plug.read_settings(cfg)
            said.append("")
        except Refused as error:
            said.append(str(error))
    return said


def weights(plug: Any) -> dict[str, Any]:
    """The trainer's hook: what its dispatch exports goes to the node."""
    found: dict[str, Any] = {}
    trainer = plug.NodeTrainer()

    def export(model: str, folder: str, tokenizer: Any) -> None:
        found["exported"] = [model, tokenizer]
        Path(folder).mkdir(parents=True)

    def push(client: Any, version: str, named: Any, **settings: Any) -> None:
        found["pushed"] = [client.base_url if hasattr(client, "base_url") else "", version, list(named)]
        found["settings"] = {name: str(each) for name, each in settings.items()}

    plug.push_tensors = push
    folder = Path(sys.argv[1])
    trainer.dispatch = SimpleNamespace(save_hf_model=export)
    trainer.tokenizer, trainer.global_step = "tokenizer", 4
    trainer.cfg = SimpleNamespace(
        trainer=SimpleNamespace(policy=SimpleNamespace(model=SimpleNamespace(path="/model")))
    )
    trainer.polarnode, trainer.weights = PluginSettings(run="r"), {"folder": str(folder)}
    trainer.init_weight_sync_state()
    asyncio.run(trainer.dispatch.save_weights_for_sampler())
    trainer.dispatch.save_hf_model = export_adapter
    plug.push_adapter = lambda client, name, version, named, *, config: found.update(
        adapter=[name, version, [name for name, _ in named], config["r"]]
    )
    trainer._push()
    return found | {"left": [each.name for each in folder.iterdir()]}


def main() -> None:
    install()
    import polarnode.integrations.skyrl as plug

    lost, sliced = session_without_rows("interrupted"), {"train_roles": ["main"], "max_row_tokens": 7}
    several = {
        "10": of("10", one_row(reward=1.0), session_of_two_rows(reward=0.0, lineage_rewards={1: 5.0}), lost),
        "11": of("11", one_row(reward=0.5, config=sliced), session_of_two_rows(reward=-1.0), lost),
        "12": of("12", lost, lost, lost),
    }
    single = {
        "10": of("10", one_row(reward=1.0), one_row(reward=0.0), lost),
        "11": of("11", one_row(reward=0.5), one_row(reward=0.5), one_row(reward=-1.0)),
    }
    over = evolve(one_row(reward=0.0), outcome=Outcome(status="timeout", clock="run"))
    alone = {"10": of("10", lost, lost, session_of_two_rows(reward=1.0), lost)}
    ended = {"10": of("10", one_row(reward=1.0), over)}
    said = {
        "lone": [
            generated(plug, alone, True),
            generated(plug, alone, True, phase="eval"),
            generated(plug, {"10": of("10", lost, lost, one_row(reward=1.0))}, False),
        ],
        "truncated": [generated(plug, ended, True, mask_truncated=mask) for mask in (False, True)],
        "unused": unused(plug),
        "step_wise": generated(plug, several, True),
        "rows": generated(plug, single, False),
        "weights": weights(plug),
        "adapters": [settings_of(plug, *each) for each in ((0, "megatron"), (2, "fsdp"), (2, "megatron"))],
    }
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
