"""Make `polarnode-tiny` from scratch: record the harnesses, demonstrate, learn a tokenizer, train a policy.

    python -m examples.tiny_policy.train --out DIR [--round 2]

Copying exercises come first, because copying must form before anything else; then demonstrations, under short
prompts and then whole ones; then some careless ones, for variety; then careful ones again.
"""

import argparse
import itertools
import math
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from examples.tiny_policy import model as shape
from examples.tiny_policy import tokenizer as spelling
from examples.tiny_policy.batch import Batch, batch, drills, loss
from examples.tiny_policy.data import Lesson, lessons, orders

HARNESSES = ("pi", "mini")
TASKS_A_STEP = {"pi": 16, "mini": 4}  # under whole prompts, which mini-swe-agent's tasks cannot share
BRIEF_TASKS_A_STEP = 20
DRILLS_A_STEP = 48
# tokens: no gradient flows through a longer prompt that all tasks share, for it would cost more than they
LONG = 600


@dataclass(frozen=True)
class Stage:
    """A stretch of training: how long, how careless the demonstrations, how often their prompts are cut
    short.
    """

    steps: int
    noise: float = 0.0
    brief: float = 0.0


@dataclass(frozen=True)
class Round:
    """Stages that share an optimizer and a learning rate that falls from `peak` towards `horizon` steps."""

    peak: float
    horizon: int
    stages: Mapping[str, Stage]


FIRST = {
    "copying": Stage(120),
    "short": Stage(100, brief=1.0),
    "careful": Stage(120, brief=0.3),
    "careless": Stage(120, noise=1.0, brief=0.2),
}
# The first round is fast and leaves the policy rough; the second, gentler, makes it copy better, and stops
# early: a policy that always succeeds has nothing to learn.
ROUNDS = (Round(2e-3, 460, FIRST), Round(1e-3, 300, {"careful again": Stage(200, brief=0.6)}))


def rate(step: int, steps: int, peak: float) -> float:
    """The learning rate: a cosine to a twentieth."""
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def course(pool: Pool, stage: Stage, rng: random.Random) -> Iterator[tuple[list[Lesson], bool]]:
    """The lessons of a stage, harness by harness in turn, and whether their prompts are cut short."""
    seed = rng.randrange(1_000_000)
    supplies = {
        h: lessons(orders(h, stage.steps * BRIEF_TASKS_A_STEP // 2 + 20, stage.noise, seed), pool)
        for h in HARNESSES
    }
    for step in range(stage.steps):
        harness, brief = HARNESSES[step % 2], rng.random() < stage.brief
        count = BRIEF_TASKS_A_STEP if brief else TASKS_A_STEP[harness]
        yield list(itertools.islice(supplies[harness], count)), brief


def batches(
    name: str, stage: Stage, tokenizer: PreTrainedTokenizerBase, pool: Pool, seed: int
) -> Iterator[tuple[str, Batch]]:
    """What the policy is taught in stage `name`, each step with a name."""
    rng = random.Random(f"{name} {seed}")
    if name == "copying":
        for _ in range(stage.steps):
            yield name, drills(tokenizer, rng, DRILLS_A_STEP)
        return
    for given, brief in course(pool, stage, rng):
        yield f"{name} {given[0].harness} {'brief' * brief}", batch(tokenizer, given, rng, brief)


class Teacher:
    """A policy in training and its optimizer, for one round."""

    def __init__(self, model: Qwen3ForCausalLM, plan: Round) -> None:
        self.model, self.plan, self.done = model, plan, 0
        self._optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)

    def teach(self, given: Batch) -> float:
        """One step; the first thirty are gentle, because the optimizer knows nothing yet."""
        warm = min(1.0, (self.done + 1) / 30)
        for group in self._optimizer.param_groups:
            group["lr"] = warm * rate(self.done, self.plan.horizon, self.plan.peak)
        value = loss(self.model, given, through=len(given.heads) > 1 or given.heads.shape[1] < LONG)
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.done += 1
        return value.item()


def train(
    model: Qwen3ForCausalLM,
    number: int,
    tokenizer: PreTrainedTokenizerBase,
    pool: Pool,
    options: argparse.Namespace,
) -> None:
    """Train the policy for one round, stage by stage; print progress and save after each stage."""
    began, plan = time.monotonic(), ROUNDS[number]
    teacher = Teacher(model, plan)
    for name, stage in plan.stages.items():
        for step, (title, given) in enumerate(batches(name, stage, tokenizer, pool, options.seed)):
            value = teacher.teach(given)
            if step % 10 < 2:
                print(
                    f"{time.monotonic() - began:6.0f}s {title:25} step {step:4} loss {value:.4f}", flush=True
                )
        shape.save(model, options.out)


def learn_tokenizer(folder: Path, seed: int, pool: Pool) -> PreTrainedTokenizerBase:
    """The tokenizer, learned on a few hundred demonstrations of both kinds."""
    wanted = itertools.chain.from_iterable(
        orders(harness, 300, noise, seed) for harness in HARNESSES for noise in (0.0, 1.0)
    )
    spelling.save(spelling.learn(list(lessons(wanted, pool))), folder)
    return AutoTokenizer.from_pretrained(folder)


def main() -> None:
    """Read the options and run both parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--round", type=int, default=1, choices=(1, 2), help="2: continue from the policy in --out"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with get_context("fork").Pool(2) as pool:
        make(pool, options)


def make(pool: Pool, options: argparse.Namespace) -> None:
    """Tokenizer, then policy; `pool` demonstrates meanwhile."""
    torch.set_num_threads(options.threads)
    if options.round > 1:
        tokenizer = AutoTokenizer.from_pretrained(options.out)
        model = AutoModelForCausalLM.from_pretrained(options.out, dtype=torch.float32)
    else:
        tokenizer = learn_tokenizer(options.out, options.seed, pool)
        model = shape.fresh(tokenizer, options.seed)
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(tokenizer)} tokens",
        flush=True,
    )
    for number in range(options.round - 1, len(ROUNDS)):
        train(model, number, tokenizer, pool, options)


if __name__ == "__main__":
    main()
