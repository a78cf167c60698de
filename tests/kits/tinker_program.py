"""The Tinker loop with tinker's own types, on a stand-in for its cloud that computes the importance-sampling
loss in torch, and a stand-in for a node that samples with the weights it was given.

In: {"model": a checkpoint's folder}. Out: the steps, with weights that are served (`served`) and with weights
that never reach the node (`frozen`), and of each Datum the positions that got a gradient.
"""

import inspect
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from attrs import asdict
from sampling_node import StandIn
from trainers_kit import (
    group_of,
    make_turn,
    one_row,
    publish,
    session_of_two_rows,
    session_without_rows,
    taught,
)
from trainers_program import taken as cut

from polarnode.integrations import tinker as plugin
from polarnode.integrations.rollout_tasks import PluginSettings

ORACLES = Path(sys.prefix) / "oracles"
COOKBOOK = "tinker_cookbook/weights/"


def taken(name: str, *arguments: Any) -> None:
    """Fails unless tinker's own client has this method with these parameters."""
    from tinker.lib.public_interfaces.training_client import TrainingClient

    inspect.signature(getattr(TrainingClient, name)).bind(None, *arguments)


class Cloud:
    """A TrainingClient: minus the sum over tokens of probability ratio times advantage, as Tinker documents
    `importance_sampling`; AdamW.
    """

    def __init__(self, folder: str, *, lora: bool = False) -> None:
        from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if lora:
            config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
            self.model = get_peft_model(self.model, config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0)
        self.taught: list[dict[str, Any]] = []

    def forward_backward(self, data: list[Any], loss_fn: str, loss_fn_config: Any = None) -> Any:
        from tinker.types import ForwardBackwardOutput, TensorData

        assert loss_fn == "importance_sampling"
        taken("forward_backward", data, loss_fn, loss_fn_config)
        outputs, total = [], 0.0
        for datum in data:
            inputs = {name: tensor.to_torch() for name, tensor in datum.loss_fn_inputs.items()}
            assert set(inputs) == {"target_tokens", "logprobs", "advantages"}  # it refuses others
            logits = self.model(torch.tensor([datum.model_input.to_ints()])).logits[0].log_softmax(-1)
            own = logits.gather(1, inputs["target_tokens"][:, None])[:, 0]
            own.retain_grad()
            loss = -(torch.exp(own - inputs["logprobs"]) * inputs["advantages"]).sum()
            loss.backward()
            total += float(loss)
            gradient = own.grad.nonzero()[:, 0].tolist()
            self.taught.append({"gradient": gradient, "sampled": inputs["logprobs"].nonzero()[:, 0].tolist(), "advantages": inputs["advantages"].tolist()})  # fmt: skip
            outputs.append({"logprobs": TensorData.from_torch(own.detach())})
        found = ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord", loss_fn_outputs=outputs, metrics={"loss:sum": total}
        )
        return SimpleNamespace(result=lambda: found)

    def save_weights_external(self, name: str, ttl_seconds: int | None = None) -> Any:
        taken("save_weights_external", name, ttl_seconds)
        assert ttl_seconds is None or ttl_seconds >= 3600  # Tinker refuses less
        return SimpleNamespace(result=lambda: SimpleNamespace(path=f"tinker://run/external_weights/{name}"))

    def save_weights_for_sampler(self, name: str) -> Any:
        return SimpleNamespace(result=lambda: SimpleNamespace(path=f"tinker://run/sampler_weights/{name}"))

    def optim_step(self, optim_params: Any) -> Any:
        from tinker.types import AdamParams

        assert isinstance(optim_params, AdamParams)
        taken("optim_step", optim_params)
        for group in self.optimizer.param_groups:
            group["lr"] = optim_params.learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return SimpleNamespace(result=lambda: SimpleNamespace(metrics=None))


def looped(folder: str, *, served: bool) -> Any:
    from tinker.types import AdamParams

    node, cloud = StandIn(folder), Cloud(folder)
    plugin.rollout_groups = node.groups  # type: ignore[assignment]

    def weights(client: Cloud, step: int) -> None:
        if served:
            node.push_weights(str(step), client.model.state_dict(), mode="in_place")

    steps = plugin.train(
        cloud,
        [{"prompt": f"task {number}"} for number in range(3)],
        weights=weights,
        steps=3,
        prompts=2,
        samples=4,
        adam=AdamParams(learning_rate=1e-3),
        settings=PluginSettings(template={"harness": {"name": "pi"}}),
    )
    return {"steps": [asdict(step) for step in steps], "taught": cloud.taught, "tasks": node.tasks}


def cookbook_download(saved: list[str], fetched: Any) -> Any:
    """tinker-cookbook's `download`: which checkpoints it refuses, and which it fetches. What it fetches of an export is
    written by `fetched`, and of a training checkpoint nothing is: none is asked for.
    """
    import tinker

    def external(client: Any, path: str, output: Path) -> None:
        saved.append(path)
        fetched(str(output))

    session = SimpleNamespace(close=lambda status: SimpleNamespace(result=lambda: None))
    stand_in = SimpleNamespace(
        ParsedCheckpointTinkerPath=tinker.ParsedCheckpointTinkerPath,
        ServiceClient=lambda: session,
        RestClient=lambda: None,
    )
    return cut(
        COOKBOOK + "_download.py", "download", tinker=stand_in, WeightsDownloadError=PermissionError,
        Path=Path, Literal=Literal, logger=None, _download_external_weights=external, late=True,
    )["download"]  # fmt: skip


def refused_checkpoint() -> str:
    """What the cookbook says of a sampler's checkpoint, which this plug-in saved before."""
    try:
        cookbook_download([], None)(tinker_path="tinker://run/sampler_weights/0", output_dir="/nowhere")
    except PermissionError as error:
        return str(error)
    return ""


def flat(folder: str) -> Any:
    """The loop where all sessions of a group have one reward, or none is left to compare with."""
    cloud = Cloud(folder)
    moved: list[int] = []
    cloud.optim_step = lambda params: moved.append(1)  # type: ignore[method-assign, assignment]
    alike = [[one_row(reward=1.0), session_of_two_rows(sample_index=1, reward=1.0)], [one_row(reward=1.0)]]
    plugin.rollout_groups = lambda settings, specs: [  # type: ignore[assignment]
        group_of(*alike.pop(0), lost=[session_without_rows(sample_index=2)])
    ]
    steps = plugin.train(
        cloud,
        [{"prompt": "a task"}],
        weights=lambda client, step: moved.append(step),
        steps=2,
        prompts=1,
        settings=PluginSettings(template={"harness": {"name": "pi"}}),
    )
    return {"rewards": [step.reward for step in steps], "moved": moved, "taught": cloud.taught}


def adapted(folder: str) -> Any:
    """The loop with `adapter_weights`. `download` is the cookbook's own, but for what it fetches; `build_lora_adapter`
    has its parameters, and what it writes is what was fetched: Tinker's export is PEFT's folder here.
    """
    from tinker.types import AdamParams

    node, cloud = StandIn(folder), Cloud(folder, lora=True)
    signature = inspect.signature(
        cut(COOKBOOK + "_adapter.py", "build_lora_adapter", late=True)["build_lora_adapter"]
    )
    plugin.rollout_groups = node.groups  # type: ignore[assignment]
    plugin.PolarnodeClient = lambda *_, **__: node  # type: ignore[assignment, misc]
    saved: list[str] = []

    download = cookbook_download(saved, cloud.model.save_pretrained)

    def build_lora_adapter(*, base_model: str, adapter_path: str, output_path: str) -> None:
        signature.bind(base_model=base_model, adapter_path=adapter_path, output_path=output_path)
        assert (base_model, Path(output_path).exists()) == (folder, False)
        shutil.copytree(adapter_path, output_path)

    weights = SimpleNamespace(download=download, build_lora_adapter=build_lora_adapter)
    sys.modules["tinker_cookbook"] = SimpleNamespace(weights=weights)  # type: ignore[assignment]
    settings = PluginSettings(template={"harness": {"name": "pi"}, "adapter": "words"})
    steps = plugin.train(
        cloud,
        [{"prompt": f"task {number}"} for number in range(3)],
        weights=plugin.adapter_weights(settings, folder),
        steps=2,
        prompts=2,
        samples=4,
        adam=AdamParams(learning_rate=1e-2),
        settings=settings,
    )
    found = {"steps": [asdict(step) for step in steps], "versions": node.versions, "saved": saved}
    return found | {"adapters": [each["adapter"] for each in node.tasks]}


def shapes() -> Any:
    """What becomes of a group of sessions of every shape: experts, slices, two rows, and none."""
    cut = make_turn(0, None, [10, 11, 12], [20, 21])
    turns = [cut, make_turn(1, cut, [13, 14], [22, 23, 24])]
    group = group_of(
        one_row(reward=1.0),
        publish(turns, sample_index=1, reward=0.0, config={"max_row_tokens": 6}),
        session_of_two_rows(sample_index=2, reward=0.5, lineage_rewards={1: 0.75}),
        lost=[session_without_rows(sample_index=3)],
    )
    return [
        {"input": datum.model_input.to_ints(), "advantages": datum.loss_fn_inputs["advantages"].tolist()}
        for datum in plugin.data_of([group])
    ]


def distilled() -> Any:
    """Of a group of equal rewards, whose teacher is surer of every token."""
    group = group_of(taught(one_row()), taught(session_of_two_rows(sample_index=1)))
    data = plugin.data_of([group], kl_penalty_coef=2.0)
    return [datum.loss_fn_inputs["advantages"].tolist() for datum in data]


def main() -> None:
    asked = json.load(sys.stdin)
    output = sys.stdout
    sys.stdout = sys.stderr  # progress bars are not our answer
    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder = asked["model"]
    answer = {
        "served": looped(folder, served=True),
        "frozen": looped(folder, served=False),
        "adapted": adapted(folder),
        "shapes": shapes(),
        "distilled": distilled(),
        "flat": flat(folder),
        "refused": refused_checkpoint(),
    }
    json.dump(answer, output)


if __name__ == "__main__":
    sys.path.append(str(ORACLES))
    main()
