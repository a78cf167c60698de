"""TRL's GRPOTrainer with the plug-in at the URL of a node or a fleet that runs: a program of its own, because
importing TRL takes long and changes the process.

In: {"model": a checkpoint's folder, "url", "token", "folder": for its checkpoints, "tasks": TaskSpecs, "run"}. Out:
what the trainer logged. Each optimizer step has a rollout of two groups of two.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from polarnode.integrations.trl import PolarnodeRollout, node_reward

ORACLES = Path(sys.prefix) / "oracles"
STEPS, GROUPS, SAMPLES = 2, 2, 2


def main() -> None:
    asked = json.load(sys.stdin)
    output = sys.stdout
    sys.stdout = sys.stderr  # what the trainer prints is not our answer
    torch.manual_seed(0)
    torch.set_num_threads(1)
    json.dump(trained(asked), output)


def trained(asked: dict[str, Any]) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    rows = [
        {"prompt": f"task {number}", "polarnode": json.dumps(task)}
        for number, task in enumerate(asked["tasks"])
    ]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        reward_funcs=node_reward,
        rollout_func=PolarnodeRollout(
            url=asked["url"], token=asked["token"], run=asked["run"], importance_sampling=True
        ),
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir=asked["folder"], use_cpu=True, bf16=False, report_to=[], num_generations=SAMPLES,
            per_device_train_batch_size=SAMPLES, gradient_accumulation_steps=GROUPS, steps_per_generation=GROUPS, max_steps=STEPS,
            learning_rate=1e-3, lr_scheduler_type="constant", logging_steps=1, disable_tqdm=True, save_strategy="no", temperature=1.0,
            gradient_checkpointing=False, beta=0.0, shuffle_dataset=False,
        ),
    )  # fmt: skip
    trainer.train()
    return trainer.state.log_history


if __name__ == "__main__":
    sys.path.append(str(ORACLES))
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    warnings.simplefilter("ignore")
    main()
