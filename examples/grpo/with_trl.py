"""The same loop in TRL's GRPOTrainer: `rollout_func` calls a node, a callback pushes each step's weights.

    make learn-trl        (an environment with TRL beside the node's own, then: python -m examples.grpo.with_trl [--out out/grpo-trl])

TRL decides everything about learning. Its prompts are names of tasks, because the model's real prompt is the
harness's.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.grpo import tasks
from examples.grpo.__main__ import PACKAGED, node, parsed, plan_of, recipe_of
from examples.grpo.curve import smooth, svg
from examples.grpo.learner import Learner, optimizer_of
from examples.grpo.train import Plan, Run
from polarnode.core.trajectory import Trajectory
from polarnode.groups import Group
from polarnode.trainers.rows import Absent
from polarnode.trainers.trl import rollout_output

ROWS_AT_ONCE = 4  # what TRL computes at once: it reads each harness's prompt again for every row


class Rollouts:
    """What TRL calls for completions: equal prompts that stand together are one task of so many samples."""

    def __init__(self, run: Run, pad: int) -> None:
        self.run, self._pad = run, pad
        self.rewards: list[float] = []

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        wanted = [(name, len(list(same))) for name, same in groupby(prompts)]
        version = len(self.rewards)
        names = [f"trl-{version}-{name}" for name, _ in wanted]
        for name, (prompt, count) in zip(names, wanted, strict=True):
            task = tasks.numbered(int(prompt), seed=self.run.plan.seed, kinds=self.run.plan.kinds)
            self.run.client.submit(
                self.run.spec(task, name=name, harness=self.run.plan.harness, samples=count)
            )
        groups = self.run.collect(names)
        found = [member.reward for group in groups for member in group.members if member.reward is not None]
        self.rewards.append(sum(found) / max(1, len(found)))
        return rollout_output(
            [each for group in groups for each in whole(group)], absent=Absent(token_id=self._pad)
        )


def whole(group: Group) -> tuple[Trajectory, ...]:
    """Every member, with one row at most: TRL has room for one completion a prompt, and the last is what the
    harness went on with.
    """
    if len(group.trajectories) != len(group.members):
        raise RuntimeError(
            f"{group.task_id}: {len(group.trajectories)} of {len(group.members)} trajectories came"
        )
    return tuple(evolve(each, traces=each.traces[-1:]) for each in group.trajectories)


class Push(TrainerCallback):  # type: ignore[misc]
    """The node serves each step's weights before the next rollout."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.run.push(str(state.global_step))


def reward(completions: list[Any], reward: list[float | None], **_: Any) -> list[float | None]:
    """The node's own, of each completion."""
    return reward


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(out=Path("out/grpo-trl"))
    given = parsed(arguments, parser)
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    plan = plan_of(given)
    with node(given) as client:
        run = Run(client, Learner(PACKAGED, recipe_of(given)), plan, given.out)
        before = run.evaluate("before") if plan.evaluate else {}
        rewards = train(run, plan, given)
        after = run.evaluate("after") if plan.evaluate else {}
    report = {"before": before, "rewards": rewards, "after": after, "load": os.getloadavg()[0]}
    (given.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    points = list(enumerate(smooth(rewards, plan.window)))
    (given.out / "curve.svg").write_text(
        svg({"TRL, mean of 3 steps": points}, title="Reward of training sessions in TRL", x="step", goal=0.8)
    )
    print(json.dumps({"before": before.get("reward"), "rewards": rewards, "after": after.get("reward")}))
    return 0


def train(run: Run, plan: Plan, given: argparse.Namespace) -> list[float]:
    """TRL's own loop; the mean reward of each of its rollouts."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(PACKAGED),
        AutoModelForCausalLM.from_pretrained(PACKAGED, dtype=torch.float32),
    )
    run.learner.model = model  # what is pushed is TRL's
    rollouts = Rollouts(run, tokenizer.pad_token_id)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=config(plan, given),
        train_dataset=Dataset.from_dict(
            {"prompt": [str(number) for number in range(plan.steps * plan.prompts)]}
        ),
        rollout_func=rollouts,
        callbacks=[Push(run)],
        optimizers=(optimizer_of(model, run.learner.recipe), None),
    )
    trainer.train()
    return rollouts.rewards


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
