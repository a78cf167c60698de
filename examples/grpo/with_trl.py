"""The same loop in TRL's GRPOTrainer, with the plug-in `polarnode.integrations.trl`.

    make learn-trl        (an environment with TRL beside the node's own, then: python -m examples.grpo.with_trl [--out out/grpo-trl])

TRL decides everything about learning. A prompt is a task's number, because the model's real prompt is the
harness's; the task itself is in the column `polarnode`.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from examples.grpo import tasks
from examples.grpo.__main__ import PACKAGED, mark_of, node, parsed, plan_of, recipe_of
from examples.grpo.curve import smooth, svg
from examples.grpo.learner import Learner, Recipe, optimizer_of
from examples.grpo.train import TRUTH, Plan, Run
from polarnode.client import PolarnodeClient
from polarnode.integrations.trl import PolarnodeRollout, node_reward

ROWS_AT_ONCE = 4  # what TRL computes at once: it reads each harness's prompt again for every row
WORST = "sampling/sampling_logp_difference/max"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(out=Path("out/grpo-trl"))
    given = parsed(arguments, parser)
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    plan, recipe = plan_of(given), recipe_of(given)
    with node(given) as client:
        run = Run(client, Learner(PACKAGED, recipe), plan, given.out, mark=mark_of(given))
        run.begin()
        before = run.evaluate("before") if plan.evaluate else {}
        log = train(client, plan, recipe, given)
        after = run.evaluate("after") if plan.evaluate else {}
    rewards = [line["reward"] for line in log if "reward" in line]
    worst = [line[WORST] for line in log if WORST in line]
    report = {"before": before, "rewards": rewards, "worst_logprob": worst, "after": after, "log": log}
    (given.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    points = list(enumerate(smooth(rewards, plan.window)))
    (given.out / "curve.svg").write_text(
        svg({"TRL, mean of 3 steps": points}, title="Reward of training sessions in TRL", x="step", goal=0.8)
    )
    shown = {"before": before.get("reward"), "rewards": rewards, "after": after.get("reward")}
    print(json.dumps(shown | {"worst_logprob": worst, "load": os.getloadavg()[0]}))
    # every rollout was sampled by the weights that TRL then computes with, or something is wrong
    return int(max(worst) > TRUTH)


def train(
    client: PolarnodeClient, plan: Plan, recipe: Recipe, given: argparse.Namespace
) -> list[dict[str, Any]]:
    """TRL's own loop; what it logged."""
    model = AutoModelForCausalLM.from_pretrained(PACKAGED, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(PACKAGED),
        reward_funcs=node_reward,
        args=config(plan, given),
        train_dataset=Dataset.from_list([row(plan, number) for number in range(plan.steps * plan.prompts)]),
        rollout_func=PolarnodeRollout(
            url=client.base_url, token=client.token, run="trl", importance_sampling=True
        ),
        optimizers=(optimizer_of(model, recipe), None),
    )
    trainer.train()
    log: list[dict[str, Any]] = trainer.state.log_history
    return log


def row(plan: Plan, number: int) -> dict[str, str]:
    """A task: TRL's prompt, and what the node runs."""
    task = tasks.numbered(number, seed=plan.seed, kinds=plan.kinds)
    spec = tasks.spec(task, name=str(number), harness=plan.harness, samples=plan.samples)
    return {"prompt": str(number), "polarnode": json.dumps(spec)}


def config(plan: Plan, given: argparse.Namespace) -> GRPOConfig:
    """A rollout of prompts x samples, then `inner` optimizer steps, each on its share: TRL reads a row's
    whole prompt whenever it reads the row.
    """
    batches = plan.prompts * plan.samples // ROWS_AT_ONCE
    return GRPOConfig(
        output_dir=str(given.out / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=ROWS_AT_ONCE,
        gradient_accumulation_steps=batches // given.inner,
        steps_per_generation=batches,
        num_generations=plan.samples,
        max_steps=plan.steps * given.inner,
        lr_scheduler_type="constant",
        max_grad_norm=given.clip_norm,
        epsilon=given.clip,
        beta=0.0,
        temperature=1.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=plan.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
