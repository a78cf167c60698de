"""What TRL's GRPOTrainer makes of a `rollout_func`'s answer: a program of its own, because importing TRL
takes long and changes the process.

In: {"output": what rollout_func returns, "model": a checkpoint's folder, "generations": rollouts of the one
prompt}. Out: the tensors the trainer makes of it (`inputs`), the rewards it computed, and what its reward
function was given. Nothing is trained.
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ORACLES = Path(sys.prefix) / "oracles"


def main() -> None:
    sys.path.append(str(ORACLES))
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    warnings.simplefilter("ignore")
    asked = json.load(sys.stdin)
    said = sys.stdout
    sys.stdout = sys.stderr  # what the trainer prints is not our answer
    with tempfile.TemporaryDirectory() as folder:
        json.dump(tried(asked, folder), said)


def tried(asked: dict[str, Any], folder: str) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    seen: dict[str, Any] = {}

    def reward(reward: list[float | None], **more: Any) -> list[float | None]:
        seen.update(more, reward=reward)
        return reward

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(asked["model"]),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        reward_funcs=reward,
        rollout_func=lambda prompts, trainer: asked["output"],
        train_dataset=Dataset.from_list([{"prompt": "do it"}]),
        args=GRPOConfig(
            output_dir=folder, use_cpu=True, report_to=[], num_generations=asked["generations"], per_device_train_batch_size=asked["generations"],
            gradient_accumulation_steps=1, disable_tqdm=True,
        ),
    )  # fmt: skip
    trainer.model.train()
    made = trainer._generate_and_score_completions([{"prompt": "do it"} for _ in range(asked["generations"])])
    inputs = {name: value.tolist() for name, value in made.items() if hasattr(value, "tolist")}
    names = ("reward", "session_id", "group_id")
    return {
        "inputs": inputs,
        "seen": {name: seen[name] for name in names},
        "pad": trainer._tokenizer.pad_token_id,
    }


if __name__ == "__main__":
    main()
