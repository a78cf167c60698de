"""What the trainers' own packages make of our projections: a program of its own, because importing them takes
long and changes the process.

JSON in (`{"name of a check": value}`), JSON out, the same names. The packages lie beside the environment
(tools/setup.sh puts them there), each without what it asks for: of those that import Ray or a GPU's libraries
when they are imported whole, the class is taken out of the file and run alone.
"""

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ORACLES = Path(sys.prefix) / "oracles"


def taken(file: str, *names: str, **needs: Any) -> dict[str, Any]:
    """The classes and functions of these names out of an installed file, run with nothing but what
    they need.
    """
    tree = ast.parse((ORACLES / file).read_text())
    kept = [
        node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names
    ]
    assert len(kept) == len(names), f"{file} has not all of {names}"
    found = dict(needs)
    future = ast.parse("from __future__ import annotations").body if needs.pop("late", False) else []
    exec(compile(ast.Module([*future, *kept], []), file, "exec"), found)
    return found


def told(value: Any) -> Any:
    """Tensors as lists with their types."""
    import torch

    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype), "shape": list(value.shape), "data": value.tolist()}
    if isinstance(value, dict):
        return {name: told(each) for name, each in value.items()}
    return [told(each) for each in value] if isinstance(value, list | tuple) else value


def _agent_loop_output() -> Any:
    import typing

    import pydantic
    import torch

    needs: dict[str, Any] = {
        "BaseModel": pydantic.BaseModel,
        "Optional": typing.Optional,
        "Any": Any,
        "torch": torch,
    }
    found = taken(
        "verl/experimental/agent_loop/agent_loop.py", "AgentLoopMetrics", "AgentLoopOutput", **needs
    )
    return found["AgentLoopOutput"]


def verl(rows: list[Any]) -> Any:
    """AgentLoopOutput, strictly, and what verl's own `as_dict` makes of it."""
    kind = _agent_loop_output()
    unknown = {name for row in rows for name in row} - set(kind.model_fields)
    assert not unknown, unknown
    return [told(kind.model_validate(row, strict=True).as_dict()) for row in rows]


def verl_teacher(rows: list[Any]) -> Any:
    """What verl's estimators of the reverse KL read of a batch of these rows: `teacher_logprobs` behind its own
    `as_dict` and its cut to responses, padded with 0.
    """
    import torch

    for row in rows:
        for name, kind in (("teacher_ids", torch.int32), ("teacher_logprobs", torch.float32)):
            row["extra_fields"][name] = torch.tensor(row["extra_fields"][name], dtype=kind)
    fields = [_agent_loop_output().model_validate(row, strict=True).as_dict() for row in rows]
    none = SimpleNamespace(get_non_tensor_data=lambda data, key, default: default)
    needs = {"torch": torch, "F": torch.nn.functional, "tu": none, "TensorDict": dict}
    cut = taken("verl/workers/utils/padding.py", "no_padding_2_padding", **needs)["no_padding_2_padding"]
    names = ("prompts", "responses", "teacher_ids", "teacher_logprobs")
    data = {
        name: torch.nested.as_nested_tensor([each[name] for each in fields], layout=torch.jagged)
        for name in names
    }
    assert not any("teacher" in name for each in fields for name in each["extra_fields"])
    return {name: cut(data[name], data).squeeze(-1).tolist() for name in names[2:]}


def skyrl(output: dict[str, Any]) -> Any:
    """GeneratorOutput as pydantic holds a TypedDict: every field of its type, none unknown but those of later
    versions.
    """
    import typing
    from dataclasses import dataclass

    import pydantic
    import torch
    import typing_extensions

    needs: dict[str, Any] = {
        name: getattr(typing, name) for name in ("Any", "Dict", "List", "Optional", "Union")
    }
    needs |= {"TypedDict": typing_extensions.TypedDict, "torch": torch, "dataclass": dataclass}
    found = taken("skyrl/train/generators/base.py", "TrajectoryID", "GeneratorOutput", **needs)
    kind = found["GeneratorOutput"]
    kind.__pydantic_config__ = pydantic.ConfigDict(arbitrary_types_allowed=True)
    known = set(kind.__annotations__)
    ids = [found["TrajectoryID"](**each) for each in output["trajectory_ids"]]
    whole = dict.fromkeys(("pixel_values", "image_grid_thw")) | output | {"trajectory_ids": ids}
    pydantic.TypeAdapter(kind).validate_python(whole, strict=True)
    return {"fields": sorted(known), "ids": [each.to_string() for each in ids]}


def areal(calls: list[Any]) -> Any:
    """A chain of model calls as AReaL's own interactions put it into tensors: each call is {input, output,
    logprobs, versions}, and the reward.
    """
    import torch

    tree = ast.parse((ORACLES / "areal/experimental/openai/types.py").read_text())
    [method] = [
        node
        for each in tree.body
        if isinstance(each, ast.ClassDef)
        for node in each.body
        if getattr(node, "name", "") == "to_tensor_dict"
    ]
    found: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([method], []), "types.py", "exec"), found)
    parent = None
    for call in calls:
        reply = SimpleNamespace(
            input_tokens=call["input"], output_tokens=call["output"], input_len=len(call["input"]), output_len=len(call["output"]),
            output_logprobs=call["logprobs"], output_versions=call["versions"],
        )  # fmt: skip
        interaction = SimpleNamespace(
            _cache=None,
            model_response=reply,
            chat_template_type="concat",
            parent=parent,
            reward=call["reward"],
        )
        interaction.to_tensor_dict = (lambda one: lambda: found["to_tensor_dict"](one))(interaction)
        parent = interaction
    assert parent is not None
    return told(parent.to_tensor_dict())


def tinker(rows: list[Any]) -> Any:
    from tinker.types import Datum, ModelInput, TensorData

    made = [
        Datum(
            model_input=ModelInput.model_validate(row["model_input"]),
            loss_fn_inputs={name: TensorData(**tensor) for name, tensor in row["loss_fn_inputs"].items()},
        )
        for row in rows
    ]
    return [
        {
            "input": one.model_input.to_ints(),
            **{name: tensor.to_numpy().tolist() for name, tensor in one.loss_fn_inputs.items()},
        }
        for one in made
    ]


def atropos(groups: list[dict[str, Any]]) -> Any:
    """Each group as its class holds it, and what its API answers to the POST of one environment's group."""
    from atroposlib.api import server
    from fastapi.testclient import TestClient

    for data in groups:
        unknown = set(data) - set(server.ScoredData.model_fields)
        assert not unknown, unknown
    api = TestClient(server.app)
    trainer = {
        "wandb_group": "g",
        "wandb_project": "p",
        "batch_size": 4,
        "max_token_len": 64,
        "checkpoint_dir": "c",
    }
    more = {"save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 1}
    api.post("/register", json=trainer | more).raise_for_status()
    api.get("/batch").raise_for_status()  # a trainer asked: environments may register
    environment = {"max_token_length": 64, "desired_name": "n", "weight": 1.0, "group_size": 2}
    api.post("/register-env", json=environment).raise_for_status()
    answers = [api.post("/scored_data", json=data).json() for data in groups]
    return {
        "held": [server.ScoredData.model_validate(data, strict=True).model_dump() for data in groups],
        "answers": [each["status"] for each in answers],
        "queued": [len(each["tokens"]) for each in server.app.state.queue],
    }


def trl_async(rows: dict[str, Any]) -> Any:
    """Async GRPO's own dataclasses, and what its own chaining makes of our turns."""
    from trl.experimental.async_grpo.async_rollout_worker import (
        RolloutSample,
        TrainingSequence,
        TurnRecord,
        _chain_to_sequences,
    )

    for each in rows["samples"]:
        RolloutSample(**each)
    given = [TrainingSequence(**each) for each in rows["sequences"]]
    chained = [
        _chain_to_sequences([TurnRecord(**turn) for turn in turns], "s0", 0) for turns in rows["turns"]
    ]
    assert all(tally["fork"] == tally["realign"] == 0 for _, tally in chained), chained
    return {
        "given": [vars(each) for each in given],
        "chained": [vars(each) for sequences, _ in chained for each in sequences],
    }


def trl_distillation(rows: list[Any]) -> Any:
    """What `AsyncDistillationTrainer` reads with `beta=1.0`: the teacher's logprob of each sampled token, and
    where it says one. JSON has no infinity, so a row's come as null.
    """
    import torch
    from trl.experimental.async_distillation import async_distillation_trainer as trainer
    from trl.experimental.async_distillation.async_rollout_worker import RolloutSample

    found = []
    for row in rows:
        sample = RolloutSample(**row)
        ids, logprobs = (
            torch.tensor(sample.teacher_topk_ids),
            torch.tensor(
                [
                    [-torch.inf if each is None else each for each in place]
                    for place in sample.teacher_topk_logprobs
                ]
            ),
        )
        _, said, valid = trainer._narrow_top1_actual_support(
            ids, logprobs, torch.tensor(sample.input_ids), ids != -1, 1.0
        )
        found.append({"logprobs": said[valid].tolist(), "places": valid[:, 0].int().tolist()})
    return found


CHECKS: dict[str, Callable[[Any], Any]] = {
    "verl": verl, "verl_teacher": verl_teacher, "skyrl": skyrl, "areal": areal, "tinker": tinker,
    "atropos": atropos, "trl_async": trl_async, "trl_distillation": trl_distillation,
}  # fmt: skip


def main() -> None:
    sys.path.append(str(ORACLES))
    asked = json.load(sys.stdin)
    json.dump({name: CHECKS[name](value) for name, value in asked.items()}, sys.stdout)


if __name__ == "__main__":
    main()
