"""TRL's two GRPO trainers with the plug-in, on a stand-in for a node that samples with whatever weights it was
given: a program of its own, because importing TRL takes long and changes the process.

In: {"model": a checkpoint's folder}. Out: what each trainer logged, the tasks that the node got, and the
tokens of which async GRPO computed a loss. `frozen` is a GRPOTrainer that pushes nothing. AsyncGRPOTrainer is
for GPUs alone: here its attention kernel is the same attention in torch, and it counts no flops.
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from sampling_node import StandIn

from polarnode.client import tensors
from polarnode.groups import Group
from polarnode.integrations import trl as plugin

ORACLES = Path(sys.prefix) / "oracles"


def main() -> None:
    asked = json.load(sys.stdin)
    output = sys.stdout
    sys.stdout = sys.stderr  # what the trainers print is not our answer
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        answer = {
            "stock": stock(asked["model"], f"{folder}/stock", "disk"),
            "frozen": stock(asked["model"], f"{folder}/frozen", "none"),
            "adapter": stock(asked["model"], f"{folder}/adapter", "disk", adapter=True),
            "asynchronous": asynchronous(asked["model"], f"{folder}/async"),
        }
        json.dump(answer, output)


def stock(model: str, folder: str, weights: str, *, adapter: bool = False) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if adapter else None
    node = StandIn(model)
    plugin.rollout_groups = node.groups  # type: ignore[assignment]
    plugin.PolarnodeClient = lambda *_, **__: node  # type: ignore[assignment, misc]
    rows = [
        {"prompt": [{"role": "user", "content": f"task {number}"}], "polarnode": json.dumps({"instruction": f"do {number}"})}
        for number in range(4)
    ]  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=plugin.node_reward,
        rollout_func=plugin.PolarnodeRollout(
            task={"harness": {"name": "pi"}}, weights=weights, importance_sampling=True
        ),
        train_dataset=Dataset.from_list(rows),
        peft_config=lora,
        # a rollout of two groups of four, and two optimizer steps of two micro-batches on it
        args=GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to=[], num_generations=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            steps_per_generation=4, max_steps=4, learning_rate=1e-3, lr_scheduler_type="constant", logging_steps=1, disable_tqdm=True,
            save_strategy="no", temperature=0.9, top_p=0.95, gradient_checkpointing=False,
        ),
    )  # fmt: skip
    trainer.train()
    ended = trainer.model.state_dict()
    served = node.adapters["trainer"][0] if adapter else node.model
    same = all(torch.equal(each, ended[name]) for name, each in served.state_dict().items())
    left = sorted(path.name for path in Path(folder, plugin.FOLDER).glob("*"))
    found = {"log": trainer.state.log_history, "tasks": node.tasks, "served_at_the_end": same}
    return found | {"folders": left, "adapters": node.versions}


# ── async GRPO ────────────────────────────────────────────────────────────────


def asynchronous(model: str, folder: str) -> Any:
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    packing._flash_attn = lambda: Attention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    node = StandIn(model)
    worker = plugin.NodeWorker(
        [{"prompt": "do it"}], samples=4, groups=1, weights="tensor", task={"harness": {"name": "pi"}}
    )
    plugin.PolarnodeClient = lambda *_, **__: node  # type: ignore[assignment, misc]
    tensors.buckets = lambda named, **_: dict(named)  # type: ignore[assignment]

    class Rollouts:
        def __init__(self, settings: Any) -> None:
            pass

        async def __aenter__(self) -> "Rollouts":
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def group(self, spec: Any) -> Group:
            return node.group(spec)

    plugin.NodeRollouts = Rollouts  # type: ignore[assignment, misc]
    trainer = AsyncGRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=[{"prompt": "do it"}],
        rollout_worker=worker,
        weight_transfer=worker.weight_transfer,
        args=AsyncGRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to=[], per_device_train_batch_size=4, gradient_accumulation_steps=1, max_steps=3,
            learning_rate=1e-3, lr_scheduler_type="constant", logging_steps=1, token_budget=-1, disable_tqdm=True, save_strategy="no",
            gradient_checkpointing=False, dtype="float32", num_generations=4, max_staleness=9,
        ),
    )  # fmt: skip
    seen: list[dict[str, Any]] = []
    compute = trainer.compute_loss

    def watched(model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        seen.append({name: inputs[name].flatten().tolist() for name in ("old_log_probs", "advantages")})
        return compute(model, inputs, *more, **named)

    trainer.compute_loss = watched
    trainer.train()
    return {"log": trainer.state.log_history, "seen": seen, "sent": worker.weight_transfer.sent}


class Attention:
    """flash_attn_varlen_func in torch: causal from the end of each segment's keys."""

    @staticmethod
    def flash_attn_varlen_func(
        query: Any, key: Any, value: Any, ends_q: Any, ends_k: Any, *_: Any, softmax_scale: float, **__: Any
    ) -> Any:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        found = torch.empty_like(query)
        for number in range(len(ends_q) - 1):
            q, k = (slice(int(ends[number]), int(ends[number + 1])) for ends in (ends_q, ends_k))
            scores = torch.einsum("qhd,khd->hqk", query[q], key[k]) * softmax_scale
            length_q, length_k = scores.shape[1:]
            hidden = torch.ones(length_q, length_k).triu(1 + length_k - length_q).bool()
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            found[q] = torch.einsum("hqk,khd->qhd", weights, value[k])
        return found


if __name__ == "__main__":
    sys.path.append(str(ORACLES))
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    warnings.simplefilter("ignore")
    main()
