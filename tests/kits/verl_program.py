"""The plug-in of verl in the hands of verl 0.9.1: a program of its own, which prints what came of it as JSON.

verl imports Ray, tensordict and more as a whole. So its classes and functions are taken out of the installed
files and run alone: the agent loop's base and output, the V1 worker's postprocessing, GRPO over the rows of a
batch, the policy loss, and the two registries of rollout backends.
"""

import ast
import asyncio
import json
import sys
import typing
from abc import ABC, abstractmethod
from collections import defaultdict
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pydantic
import torch
from attrs import evolve
from trainers_kit import one_row, session_of_two_rows, session_without_rows, taught
from trainers_program import ORACLES, taken

from polarnode.core.task import GroupSpec
from polarnode.core.trajectory import Trajectory
from polarnode.groups import Group, facts_of, judged

AGENT_LOOP = "verl/experimental/agent_loop/agent_loop.py"
V1 = "verl/trainer/ppo/v1/"
ROLLOUT = "verl/workers/rollout/"


class Plain(dict[str, Any]):
    """A configuration whose keys are attributes too, as omegaconf's."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


SETTINGS = {"url": "http://127.0.0.1:9", "task": {"harness": {"name": "pi"}}, "run": "r", "folder": "/steps"}
CONFIG = Plain(
    actor_rollout_ref=Plain(
        rollout=Plain(engine_kwargs={"polarnode": SETTINGS}),
        actor=Plain(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=64),
    ),
    trainer=Plain(v1=Plain(trainer_mode="sync")),
    data=Plain(),
)


def install() -> None:
    """Put modules with verl's own classes where the plug-in imports them."""
    base = {"ABC": ABC, "abstractmethod": abstractmethod, "Any": Any, "torch": torch}
    pydantics: dict[str, Any] = {"BaseModel": pydantic.BaseModel, "Optional": typing.Optional}
    loop = taken(AGENT_LOOP, "AgentLoopMetrics", "AgentLoopOutput", **base, **pydantics)
    loop |= taken(
        AGENT_LOOP, "AgentLoopBase", "register",
        **base, get_event_loop=asyncio.get_running_loop, _agent_loop_registry={}, late=True,
        create_continuous_token_builder=lambda *_, **__: None,
    )  # fmt: skip
    names = {"omega_conf_to_dataclass": lambda value: value, "get_rollout_class": None, "importlib": None}
    adapter = taken(ROLLOUT + "base.py", "BaseRollout", **base, **names, late=True) | {
        "_ROLLOUT_REGISTRY": {}
    }
    replica = taken(
        ROLLOUT + "replica.py", "RolloutMode", "RolloutReplica", "RolloutReplicaRegistry",
        **base, **names, Enum=Enum, asyncio=asyncio, late=True,
    )  # fmt: skip
    modules = {
        "verl.experimental.agent_loop.agent_loop": loop,
        "verl.workers.rollout.base": adapter,
        "verl.workers.rollout.replica": replica,
    }
    for name, found in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        for key, value in found.items():
            if not key.startswith("__"):
                setattr(sys.modules[name], key, value)
        setattr(sys.modules[name.rpartition(".")[0]], parts[-1], sys.modules[name])


def methods(file: str, kind: str, *names: str, **needs: Any) -> dict[str, Any]:
    """The methods of a class, as functions, run with nothing but what they need."""
    [found] = [
        node
        for node in ast.parse((ORACLES / file).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == kind
    ]
    kept = [node for node in found.body if getattr(node, "name", None) in names]
    future = ast.parse("from __future__ import annotations").body
    space = dict(needs)
    exec(compile(ast.Module([*future, *kept], []), file, "exec"), space)
    return space


# ── a prompt through the worker of V1 ─────────────────────────────────────────


class Queue:
    """TransferQueue as a dict: fields and tags by key."""

    def __init__(self) -> None:
        self.fields: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}

    async def async_kv_batch_put(self, keys: Any, fields: Any, tags: Any, partition_id: str) -> None:
        # verl makes columns of the first row's fields
        columns = [{name: row[name] for name in fields[0]} for row in fields]
        self.fields |= dict(zip(keys, columns, strict=True))
        self.tags |= dict(zip(keys, tags, strict=True))


class Node:
    """A node that answers each task with the next session."""

    def __init__(self, sessions: list[Trajectory]) -> None:
        self.sessions, self.specs = sessions, list[Any]()

    async def group(self, spec: Any) -> Group:
        self.specs.append(spec)
        session = self.sessions.pop(0)
        return judged(
            GroupSpec(), [facts_of(session)], task_id=str(spec.task_id), group_id=str(spec.group_id)
        ).holding([session])


def versions(trajectory: Trajectory, prefix: str) -> Trajectory:
    def renamed(trace: Any) -> Any:
        spans = tuple(evolve(span, version=prefix + span.version) for span in trace.version_spans)
        return evolve(trace, version_spans=spans, routed=None, top=None)

    return evolve(trajectory, traces=tuple(renamed(trace) for trace in trajectory.traces))


ROW = {
    "raw_prompt": [{"role": "user", "content": "fix it"}],
    "index": 4,
    "data_source": "swe",
    "reward_model": {"ground_truth": "1"},
    "extra_info": {"polarnode": {"budgets": {"max_turns": 3}}},
    "uid": "u1",
    "global_steps": 9,
}
SAMPLING = {
    "temperature": 0.7, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True,
}  # fmt: skip


def sessions() -> list[Trajectory]:
    """One row, two rows of which one lineage has its own reward, slices, none but a reward, none at all."""
    sliced = {"train_roles": ["main"], "max_row_tokens": 7}
    return [
        versions(one_row(reward=1.0), "r-0a-"),
        versions(taught(session_of_two_rows(reward=0.0, lineage_rewards={1: 5.0})), "r-0a-"),
        versions(one_row(reward=0.25, config=sliced), "r-0a-"),
        evolve(session_without_rows("failed"), reward=0.0),
        session_without_rows("interrupted"),
    ]


# verl's model configurations: none of LoRA, FSDP's, Megatron's, and merged before it is sent
MODELS: tuple[dict[str, Any], ...] = (
    {"lora_rank": 0, "lora": {"rank": 0, "merge": False}},
    {"lora_rank": 8, "lora": {"rank": 0, "merge": False}},
    {"lora_rank": 0, "lora": {"rank": 8}},
    {"lora_rank": 8, "lora": {"merge": True}},
)


async def adapter_of(plug: Any, model: dict[str, Any]) -> Any:
    """The adapter that the tasks of a run name."""
    actor = Plain(CONFIG.actor_rollout_ref) | {"model": Plain(model)}
    config = Plain(CONFIG) | {"actor_rollout_ref": Plain(actor)}
    return agent_loop(plug, Plain(config)).settings.template.get("adapter")


def agent_loop(plug: Any, config: Any) -> Any:
    return plug.PolarnodeAgentLoop(
        trainer_config=SimpleNamespace(config=config), server_manager=None, dataset_cls=None, tools=None,
        tokenizer=SimpleNamespace(pad_token_id=0), processor=None, hf_model_type=None, name="polarnode",
        data_config=SimpleNamespace(config=config.data),
    )  # fmt: skip


def worker_of(queue: Queue) -> tuple[dict[str, Any], Any]:
    """The postprocessing of verl's worker, and what it uses of the worker."""
    space = methods(
        V1 + "agent_loop_tq.py", "AgentLoopWorkerTQ", "_agent_loop_postprocess",
        torch=torch, tq=queue, list_of_dict_to_tensordict=lambda rows: rows,
    )  # fmt: skip

    async def scored(outputs: Any, kwargs: Any) -> None:
        assert outputs[-1].reward_score is not None, "verl's reward manager would be asked"

    async def nothing(*_: Any, **__: Any) -> None:
        return

    worker = SimpleNamespace(
        _compute_score=scored, _compute_teacher_logprobs=nothing,
        _compute_multi_modal_inputs=lambda *_: {},
        _compute_position_ids=lambda _, attention, __: torch.cumsum(attention, 1) - 1,
    )  # fmt: skip
    return space, worker


async def rollouts(plug: Any, queue: Queue, node: Node) -> list[str]:
    """What verl's worker does with each sample of a prompt; the errors of those that raised."""
    space, worker = worker_of(queue)
    errors = []
    for place in range(len(node.sessions)):
        loop = agent_loop(plug, CONFIG)
        try:
            outputs = await loop.run(dict(SAMPLING), session_id=place, **ROW)
        except plug.SessionLost as error:
            errors.append(str(error))
            continue
        await space["_agent_loop_postprocess"](worker, outputs, False, session_id=place, **ROW)
    return errors


# ── advantages and the loss ───────────────────────────────────────────────────


class Batch:
    """The part of DataProto that GRPO over rows of several outputs uses."""

    def __init__(self, batch: dict[str, Any], uid: Any) -> None:
        self.batch, self.non_tensor_batch = batch, {"uid": uid}

    def select_idxs(self, places: list[int]) -> "Batch":
        return Batch(
            {name: each[places] for name, each in self.batch.items()}, self.non_tensor_batch["uid"][places]
        )

    def __len__(self) -> int:
        return len(self.non_tensor_batch["uid"])


def core() -> dict[str, Any]:
    masked: dict[str, Any] = {"torch": torch}
    masked |= taken("verl/utils/torch_functional.py", "masked_sum", "masked_mean", torch=torch, late=True)

    def named(_: Any) -> Any:
        return lambda function: function

    return taken(
        "verl/trainer/ppo/core_algos.py",
        "agg_loss", "compute_grpo_outcome_advantage", "compute_policy_loss_vanilla",
        verl_F=SimpleNamespace(**{name: masked[name] for name in ("masked_sum", "masked_mean")}),
        torch=torch, np=np, defaultdict=defaultdict, register_adv_est=named, register_policy_loss=named,
        AdvantageEstimator=SimpleNamespace(GRPO="grpo"), AlgoConfig=type(None), late=True,
    )  # fmt: skip


def advantages(rows: dict[str, dict[str, Any]]) -> tuple[Any, Any]:
    """V1's GRPO over these rows by key, and the mask of their trained tokens; both [rows, longest]."""
    algos = core()

    def padded(name: str) -> Any:
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows.values()], batch_first=True)

    def grpo(data: Batch, **_: Any) -> Batch:
        found = algos["compute_grpo_outcome_advantage"](
            data.batch["token_level_rewards"], data.batch["response_mask"], data.non_tensor_batch["uid"]
        )
        data.batch["advantages"] = found[0]
        return data

    names = {"compute_advantage": grpo, "torch": torch}
    estimator = SimpleNamespace(AdvantageEstimator=SimpleNamespace(GRPO="grpo"))
    together = taken(
        V1 + "utils.py", "compute_advantage_for_multi_trajectories", **names, core_algos=estimator, late=True
    )
    data = Batch(
        {"token_level_rewards": padded("rm_scores"), "response_mask": padded("response_mask")},
        np.array([row["uid"] for row in rows.values()], dtype=object),
    )
    together["compute_advantage_for_multi_trajectories"](data, list(rows), "grpo")
    return data.batch["advantages"], data.batch["response_mask"].bool()


def trained(queue: Queue) -> dict[str, Any]:
    """Each row's advantage, and where the gradient of the loss is."""
    found, mask = advantages(queue.fields)
    rows = [row["rollout_log_probs"] for row in queue.fields.values()]
    old = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    new = old.clone().requires_grad_(True)
    config = Plain(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, global_batch_info={})
    loss, _ = core()["compute_policy_loss_vanilla"](old, new, found, mask, config=config)
    loss.backward()
    return {
        "advantages": {
            key: sorted({round(each, 4) for each in row[kept].tolist()})
            for key, row, kept in zip(queue.fields, found, mask, strict=True)
        },
        "gradient": (new.grad != 0).int().tolist(),
        "sampled": (mask & (found != 0)).int().tolist(),
        # V1's metrics make integers of these
        "staleness": np.array([tag["min_global_steps"] for tag in queue.tags.values()], dtype=int).tolist(),
    }


# ── weights ───────────────────────────────────────────────────────────────────


def weights(plug: Any) -> dict[str, Any]:
    """Updates as verl's actor orders them: on both ranks, and one that the node refuses."""
    found: dict[str, Any] = {"pushed": [], "gathered": []}

    def push(client: Any, version: str, named: Any, **settings: Any) -> None:
        first = next(named)
        if version.endswith("-2"):
            raise RuntimeError("refused")
        found["pushed"].append([version, [first[0], *(name for name, _ in named)], settings])

    def tensors(rank: int) -> Any:
        for name in ("a", "b", "c"):
            found["gathered"].append([rank, name])
            yield name, None

    async def update(rank: int, step: int, config: Any = None, base: bool = True) -> None:
        mesh = SimpleNamespace(get_rank=lambda: rank)
        rollout = plug.NodeWeights(
            Plain(engine_kwargs={"polarnode": SETTINGS}), SimpleNamespace(local_path="/model"), mesh
        )
        await rollout.resume(["weights"])
        await rollout.update_weights(
            tensors(rank), peft_config=config, base_sync_done=base, global_steps=step
        )

    def push_adapter(client: Any, name: str, version: str, named: Any, *, config: Any) -> None:
        found["adapter"] = [name, version, list(named), config]

    plug.push_tensors, plug.push_adapter = push, push_adapter
    asyncio.run(update(0, 1))
    asyncio.run(update(1, 1))
    asyncio.run(update(0, 1, {"r": 8}, False))  # verl sends the base before its first adapter
    assert "adapter" not in found
    asyncio.run(update(0, 1, {"r": 8}))
    found["before"] = len(found["gathered"])
    try:
        asyncio.run(update(0, 2))
    except RuntimeError as error:
        found["refused"] = str(error)
    base, replica = sys.modules["verl.workers.rollout.base"], sys.modules["verl.workers.rollout.replica"]
    found["registered"] = {
        "rollout": base._ROLLOUT_REGISTRY["polarnode", "async"],
        "replica": replica.RolloutReplicaRegistry.get("polarnode").__name__,
        "loop": sys.modules["verl.experimental.agent_loop.agent_loop"]._agent_loop_registry,
    }
    return found


def main() -> None:
    install()
    import polarnode.integrations.verl as plug

    queue, node = Queue(), Node(sessions())
    plug.shared_rollouts = lambda settings: node  # type: ignore[assignment]
    errors = asyncio.run(rollouts(plug, queue, node))
    [spec, *_] = node.specs
    said = {
        "adapters": [asyncio.run(adapter_of(plug, each)) for each in MODELS],
        "errors": errors,
        "task": [
            spec.group_id,
            spec.instruction,
            spec.budgets.max_turns,
            spec.sampling.temperature,
            spec.sampling.top_k,
            spec.sampling.frequency_penalty,
        ],
        "tags": queue.tags,
        "fields": {
            key: {
                name: each.tolist() if isinstance(each, torch.Tensor) else each for name, each in row.items()
            }
            for key, row in queue.fields.items()
        },
        "trained": trained(queue),
        "weights": weights(plug),
        "unknown_versions": asyncio.run(unknown_versions(plug)),
        "refused": asyncio.run(refused(plug)),
        "refused_first": [replica(plug, **each) for each in REFUSED],
    }
    json.dump(said, sys.stdout)


class Branch(Plain):
    """A node of omegaconf's: it knows the whole configuration."""

    def _get_root(self) -> Any:
        return self["root"]


REFUSED: list[dict[str, Any]] = [
    {},
    {"algorithm": {"adv_estimator": "rloo"}},
    {"reward": {"sandbox_fusion": {"url": "http://x"}}},
    {"group": {"min_usable": 2}},
]


def replica(plug: Any, group: Any = None, **whole: Any) -> str:
    """What the driver's side says of a run as it begins."""
    settings = SETTINGS | {"task": SETTINGS["task"] | ({"group": group} if group else {})}  # type: ignore[operator]
    sizes = {f"{name}_parallel_size": 1 for name in ("tensor_model", "data", "pipeline_model")}
    rollout = Branch(engine_kwargs={"polarnode": settings}, **sizes)
    rollout["root"] = Plain(whole | {"actor_rollout_ref": Plain(rollout=rollout)})
    try:
        plug.NodeReplica(0, rollout, None)
    except Exception as error:
        return str(error)
    return ""


async def refused(plug: Any) -> str:
    """What the agent loop says of an estimator that compares rows."""
    try:
        agent_loop(plug, Plain(CONFIG | {"algorithm": {"adv_estimator": "rloo"}}))
    except Exception as error:
        return str(error)
    return ""


async def unknown_versions(plug: Any) -> dict[str, Any]:
    """Versions that are no steps: of the sync trainer, whose samples are all of one step, and of another."""
    found: dict[str, Any] = {}
    for mode in ("sync", "colocate_async"):
        CONFIG["trainer"]["v1"]["trainer_mode"] = mode
        queue, node = Queue(), Node([versions(one_row(), "unknown")])
        plug.shared_rollouts = lambda settings, node=node: node
        try:
            await rollouts(plug, queue, node)
            found[mode] = [tag["max_global_steps"] for tag in queue.tags.values()]
        except Exception as error:
            found[mode] = str(error)
    return found


if __name__ == "__main__":
    main()
