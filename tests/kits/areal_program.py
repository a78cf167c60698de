"""The workflow for AReaL in AReaL's own code, on a stand-in for a node: its import path, its check of what a
workflow returns, its groups, then its actor's advantages, mini-batches, packing and loss, on CPU tensors. A
program of its own, because importing it changes the process.

areal 1.0.4 lies in .venv/oracles without what it imports; `--root` names another checkout of it (run by hand on
areal-project/AReaL cbff54d64, with `--turns` for its turn-level advantages). Of modules that are not installed,
and of AReaL's packages whose `__init__` starts engines, an empty one stands in; every function that works on
rows or tensors is AReaL's.
"""

import asyncio
import importlib
import json
import logging
import sys
from collections.abc import Collection
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from attrs import evolve
from trainers_kit import (
    group_of,
    make_turn,
    one_row,
    publish,
    session_of_two_rows,
    session_without_rows,
    taught,
)

from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trajectory
from polarnode.groups import Group
from polarnode.integrations.rollout_tasks import SessionLost

VOCABULARY = 128
MISSING = {"torchdata", "hydra", "omegaconf", "ray", "numba", "lark"}
EMPTY = ("areal", "areal.infra", "areal.trainer", "areal.trainer.ppo", "areal.experimental", "areal.engine")


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
    """Finds empty modules for these top-level names."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it has every name."""


def load(root: Path) -> None:
    """Make `areal` importable from this folder."""
    sys.path.append(str(root))
    sys.meta_path.append(Absent(MISSING))
    for name in EMPTY:
        package = Anything(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package
    log = sys.modules["areal.utils.logging"] = Anything("areal.utils.logging")
    log.getLogger, log.Logger = logging.getLogger, logging.Logger  # type: ignore[attr-defined]


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
        teacher = packed.get("teacher_logp")
        self.seen.append(
            {
                "weight": int(loss_weight_fn(packed)),
                "tokens": labels[trained].tolist(),
                "moved": labels[moved].tolist(),
                "moved_untrained": int((moved & ~trained).sum()),
                "teacher": None if teacher is None else teacher[trained].tolist(),
                "up": [
                    float(-logits.grad[place, label]) for place, label in enumerate(labels) if trained[place]
                ],
            }
        )
        return {}


# ── the node ──────────────────────────────────────────────────────────────────


def fork(**more: Any) -> Trajectory:
    """Two continuations of one turn: the second row has it as context, sampled and not trained there."""
    first = make_turn(0, None, [10, 11, 12], [20, 21])
    one = make_turn(1, first, [13], [22, 23], versions=[("", 2)])
    other = make_turn(2, first, [14], [24, 25, 26], kind="branch", versions=[("8", 3)])
    return publish([first, one, other], **more)


def sliced(**more: Any) -> Trajectory:
    """A row of five turns, cut where it would be longer than nine tokens."""
    turns = [make_turn(0, None, [10, 11, 12], [20, 21])]
    for index in range(1, 5):
        turns.append(make_turn(index, turns[-1], [13, 14], [30 + index, 40 + index, 50 + index]))
    return publish(turns, config={"train_roles": ["main"], "max_row_tokens": 9}, **more)


def groups() -> dict[str, Group]:
    """By instruction. Of the first one session was lost, of the second a lineage has a reward of its own."""
    lost = session_without_rows(sample_index=3, status="interrupted")
    one = [one_row(), session_of_two_rows(sample_index=1, reward=0.0), fork(sample_index=2, reward=0.25)]
    two = [sliced(), session_of_two_rows(sample_index=1, reward=0.5, lineage_rewards={1: 0.0})]
    return {
        "one": group_of(*one, lost=[lost]),
        "two": group_of(*two),
        "taught": group_of(taught(one_row()), taught(session_of_two_rows(sample_index=1))),
        "nothing": group_of(lost=[lost]),
        "dropped": evolve(group_of(*two), state="dropped", reason="uniform reward"),
    }


class Client:
    """The node's versions: it serves "8" after its first task."""

    version = "7"

    async def weights(self) -> Any:
        return SimpleNamespace(version=self.version)


class StandIn:
    """A node for `shared_rollouts`, with the groups above."""

    tasks: list[Any] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.client = Client()

    async def group(self, spec: Any) -> Group:
        self.tasks.append(spec)
        Inference.version = 101
        self.client.version = "8"
        if spec.instruction == "lost":
            raise SessionLost("the machine lost it")
        return groups()[spec.instruction]


class Inference:
    """AReaL's side of the engines: it knows the number of the weights."""

    version = 100

    def get_version(self) -> int:
        return self.version


# ── AReaL's side ──────────────────────────────────────────────────────────────


async def episodes(executor: Any, remote: Any, context: Any, workflow: Any) -> dict[str, Any]:
    """What AReaL gets of each row, checked by its own function; of "one" also through its own group."""
    found = {}
    for instruction in ("one", "two", "nothing", "dropped", "lost"):
        context.set(context.WorkflowContext(is_eval=False, task_id=1))
        found[instruction] = await workflow.arun_episode(Inference(), {"prompt": instruction})
        assert executor.check_trajectory_format(found[instruction], logger=logging.getLogger())
    grouped = remote.GroupedRolloutWorkflow(workflow, 2, logging.getLogger())
    found["grouped"] = await grouped.arun_episode(Inference(), {"prompt": "one"})
    context.set(context.WorkflowContext(is_eval=True, task_id=1))
    found["eval"] = await workflow.arun_episode(Inference(), {"prompt": "one"})
    return found


def trained_by(actor: Any, config: Any, data: Any, rollouts: list[Any], *, turns: bool) -> dict[str, Any]:
    """The advantages that AReaL's actor computes, and which tokens its loss moves."""
    plain = {"experiment_name": "e", "trial_name": "t", "kl_ctl": 0.0, "recompute_logprob": False}
    settings = config.PPOActorConfig(
        **plain, reward_norm=None, adv_norm=None, use_decoupled_loss=False, ppo_n_minibatches=2
    )
    if turns:
        settings.gae_timestep_unit = "turn"
    engine = Engine(data)
    ppo = actor.PPOActor(settings, engine)
    computed = ppo.compute_advantages(rollouts)
    advantages = [
        row[mask.bool()].tolist()
        for each in computed
        for row, mask in zip(each["advantages"], each["loss_mask"], strict=True)
    ]
    ppo.ppo_update(computed)
    return {"advantages": advantages, "batches": engine.seen}


def main() -> None:
    output, sys.stdout = sys.stdout, sys.stderr  # what AReaL prints is not our answer
    default = Path(sys.prefix) / "oracles"
    root = Path(sys.argv[sys.argv.index("--root") + 1]) if "--root" in sys.argv else default
    load(root)
    modules = (
        "api.workflow_api infra.workflow_context utils.stats_tracker infra.workflow_executor"
        " infra.remote_inf_engine trainer.ppo.actor api.cli_args utils.data utils.dynamic_import"
    )
    of = {name: importlib.import_module(f"areal.{name}") for name in modules.split()}
    kind = of["utils.dynamic_import"].import_from_string("polarnode.integrations.areal.PolarnodeWorkflow")
    assert issubclass(kind, of["api.workflow_api"].RolloutWorkflow)
    plugin = importlib.import_module("polarnode.integrations.areal")
    node = StandIn()
    plugin.shared_rollouts = lambda settings: node  # type: ignore[attr-defined]
    workflow = kind(task={"harness": {"name": "pi"}}, samples=4, temperature=0.5)
    refusals = []
    for wrong in ({"samples": 1}, {"samples": 2, "estimator": "mean"}, {"samples": 2, "adress": "x"}):
        try:
            kind(**wrong)
        except Refused as refused:
            refusals.append(refused.path)
    context = of["infra.workflow_context"]
    found = asyncio.run(
        episodes(of["infra.workflow_executor"], of["infra.remote_inf_engine"], context, workflow)
    )
    # before the others: AReaL compares what a batch logs with the first batch that it ever logged
    weighed = kind(
        task={"harness": {"name": "pi"}},
        samples=4,
        temperature=0.5,
        rl_loss_weight=0.0,
        distill_loss_weight=1.0,
    )
    context.set(context.WorkflowContext(is_eval=False, task_id=2))
    rows = asyncio.run(weighed.arun_episode(Inference(), {"prompt": "taught"}))
    assert of["infra.workflow_executor"].check_trajectory_format(rows, logger=logging.getLogger())
    distilled = trained_by(
        of["trainer.ppo.actor"], of["api.cli_args"], of["utils.data"], [rows], turns="--turns" in sys.argv
    )
    rollouts = [dict(found["one"]), dict(found["two"])]
    trained = trained_by(
        of["trainer.ppo.actor"], of["api.cli_args"], of["utils.data"], rollouts, turns="--turns" in sys.argv
    )
    scopes = [of["utils.stats_tracker"].get(scope).stats for scope in ("rollout", "eval-rollout")]
    answer = {
        "none": sorted(name for name, each in found.items() if each is None),
        "refusals": refusals,
        "versions": found["one"]["versions"].tolist(),
        "eval": found["eval"]["rewards"].tolist(),
        "grouped": len(found["grouped"]["input_ids"]),
        "rewards": [{key: list(value) for key, value in each.items()} for each in scopes],
        "tasks": [
            (each.num_samples, each.sampling.temperature, each.sampling.frequency_penalty)
            for each in StandIn.tasks
        ],
        "distilled": distilled["batches"],
        **trained,
    }
    json.dump(answer, output)


if __name__ == "__main__":
    main()
