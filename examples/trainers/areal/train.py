"""GRPO with AReaL on a node's sessions: see docs/trainers/areal.md."""

import sys
from pathlib import Path

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from datasets import Dataset

WORKFLOW = "polarnode.integrations.areal.PolarnodeWorkflow"
SAMPLES = 8  # sessions of a task, which AReaL sees as one episode


def tasks(path: str) -> Dataset:
    """A task in each line of a file; each is merged over task.toml."""
    return Dataset.from_list([{"polarnode": line} for line in Path(path).read_text().splitlines()])


def main(args: list[str]) -> None:
    config, _ = load_expr_config(args, GRPOConfig)
    each = {
        "task": str(Path(__file__).with_name("task.toml")),
        "run": config.trial_name,
        "temperature": config.gconfig.temperature,
        "top_p": config.gconfig.top_p,
        "max_tokens": config.gconfig.max_new_tokens,
    }
    with PPOTrainer(
        config,
        train_dataset=tasks(config.train_dataset.path),
        valid_dataset=tasks(config.valid_dataset.path),
    ) as trainer:
        trainer.train(
            workflow=WORKFLOW,
            workflow_kwargs=each | {"samples": SAMPLES},
            eval_workflow=WORKFLOW,
            eval_workflow_kwargs=each | {"samples": 1, "estimator": "none"},
        )


if __name__ == "__main__":
    main(sys.argv[1:])
