"""Train without a node: find a recipe in minutes, with sessions at a hundredth of a harness's cost.

    python -m examples.grpo.rehearsal --steps 12 --every 3 [--harness pi] [--lr 3e-5] [--final-lr 3e-2]
    [--inner 4] [--save out/teacher]
    python -m examples.grpo.rehearsal --teacher out/teacher

Tasks, learner and loss are the loop's own; so is what a teacher's logprobs do. The prompt is the harness's,
from a capture (`python -m examples.tiny_policy.capture`), and its tools are simulated. Its results are
indications; they do not replace a run with the harness itself.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from examples.grpo import tasks
from examples.grpo.__main__ import PACKAGED, checkpoint, parsed, plan_of, recipe_of
from examples.grpo.decoder import Decoder
from examples.grpo.learner import Learner
from examples.grpo.rows import Row, batch, micro, shared
from examples.grpo.train import reverse_kl
from examples.tiny_policy.prompts import prompt
from examples.tiny_policy.rollout import understand
from examples.tiny_policy.tasks import Task
from examples.tiny_policy.tools import Submitted, Workbench, use
from examples.tiny_policy.transcript import render, response
from polarnode.groups import advantages_of

LONGEST = 1000  # tokens of a session after its prompt
NAMES = {"pi": "pi", "mini_swe_agent": "mini"}


@dataclass
class Seat:
    """One session under way: `pending` waits to be read, `sampled` is the turn so far."""

    task: Task
    bench: Workbench
    pending: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    turns: int = 0
    over: bool = False

    def take(self, token: int, logprob: float, *, own: bool) -> None:
        self.ids.append(token)
        self.mask.append(int(own))
        self.logprobs.append(logprob)

    @property
    def reward(self) -> float:
        return float(self.bench.passed(self.task))


class Stage:
    """A policy and its harness's prompt."""

    def __init__(self, learner: Learner, harness: str, seed: int) -> None:
        self.learner, self.harness = learner, NAMES[harness]
        self.dice = torch.Generator().manual_seed(seed)
        one, other = (self.encoded(text) for text in ("alpha one", "Beta two"))
        self.head = one[: next(at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b) - 1]

    def encoded(self, instruction: str) -> list[int]:
        return list(self.learner.tokenizer.encode(render(prompt(self.harness, instruction))))

    def play(self, given: Sequence[Task]) -> list[tuple[Row, float]]:
        """A session of each task, all at once, token by token."""
        decoder = Decoder(self.learner.model, self.head, len(given), LONGEST)
        with tempfile.TemporaryDirectory(prefix="bench") as root:
            # the policy's commands run as the user `nobody`, who must be able to enter this folder
            Path(root).chmod(0o711)
            seats = [self.seat(Path(root, str(number)), task) for number, task in enumerate(given)]
            ready = {number: (seat.pending.pop(0), 0.0, False) for number, seat in enumerate(seats)}
            while ready:
                ready = self.beat(decoder, seats, ready)
            return [(self.row(seat), seat.reward) for seat in seats]

    def seat(self, folder: Path, task: Task) -> Seat:
        folder.mkdir()
        return Seat(task, Workbench(folder, task), self.encoded(task.instruction)[len(self.head) :])

    def row(self, seat: Seat) -> Row:
        before = len(self.head)
        return Row(self.head + seat.ids, [0] * before + seat.mask, [0.0] * before + seat.logprobs)

    def beat(
        self, decoder: Decoder, seats: list[Seat], ready: dict[int, tuple[int, float, bool]]
    ) -> dict[int, tuple[int, float, bool]]:
        """Advance every running session by one token. Returns the next token of each, its logprob, and
        whether the policy sampled it.
        """
        places = torch.tensor([len(seats[number].ids) for number in ready])
        logprobs = decoder.step(
            torch.tensor([token for token, _, _ in ready.values()]), places, torch.tensor(list(ready))
        ).log_softmax(-1)
        drawn = torch.multinomial(logprobs.exp(), 1, generator=self.dice)[:, 0]
        sampled = self.sampled(logprobs, drawn)
        after = {}
        for (number, (token, logprob, own)), (next_token, next_logprob) in zip(
            ready.items(), sampled, strict=True
        ):
            seat = seats[number]
            seat.take(token, logprob, own=own)
            if own:
                self.hear(seat, token)
            if seat.over:
                continue
            after[number] = (
                (seat.pending.pop(0), 0.0, False) if seat.pending else (next_token, next_logprob, True)
            )
        return after

    def sampled(self, logprobs: Tensor, drawn: Tensor) -> list[tuple[int, float]]:
        return list(zip(drawn.tolist(), logprobs.gather(1, drawn[:, None])[:, 0].tolist(), strict=True))

    def hear(self, seat: Seat, token: int) -> None:
        """Handle the effect of a sampled token: none, a tool's answer, or the session's end."""
        seat.sampled.append(token)
        seat.over = len(seat.ids) >= LONGEST - 1
        if token != self.learner.tokenizer.eos_token_id and len(seat.sampled) < tasks.MAX_TOKENS:
            return
        answer, seat.sampled, seat.turns = (
            understand(self.learner.tokenizer.decode(seat.sampled)),
            [],
            seat.turns + 1,
        )
        if answer is None or not answer.calls or seat.turns >= tasks.MAX_TURNS:
            seat.over = True
            return
        try:
            seat.pending = list(
                self.learner.tokenizer.encode(response(use(self.harness, seat.bench, answer.calls[0])))
            )
        except Submitted:
            seat.over = True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=3, help="steps between looks at held-out tasks")
    parser.add_argument("--save", type=Path, help="where the last weights go")
    given = parsed(arguments, parser)
    torch.set_num_threads(1)
    plan, learner = plan_of(given), Learner(PACKAGED, recipe_of(given))
    teacher = None if given.teacher is None else Learner(checkpoint(given.teacher), learner.recipe)
    stage = Stage(learner, plan.harness, plan.seed)
    look(stage, 0, plan.evaluate, plan.kinds)
    for step in range(plan.steps):
        began = time.monotonic()
        asked = tasks.of_step(step, seed=plan.seed, prompts=plan.prompts, kinds=plan.kinds)
        played = stage.play([task for task in asked for _ in range(plan.samples)])
        rewards = [reward for _, reward in played]
        weight = 1 / sum(row.trained for row, _ in played)
        rows = [replace(row, weight=weight) for row, _ in played]
        rolled = time.monotonic()
        if teacher is None:
            groups = [rewards[at : at + plan.samples] for at in range(0, len(rewards), plan.samples)]
            advantages = [each for group in groups for each in advantages_of(group, plan.estimator)]
            rows = [replace(row, advantage=one) for row, one in zip(rows, advantages, strict=True)]
        else:
            rows = taught(rows, teacher)
        done = learner.learn(rows)
        spent = f"{rolled - began:.0f} s played, {time.monotonic() - rolled:.0f} s learned"
        print(
            f"step {step} reward {sum(rewards) / len(rewards):.3f} norm {done.norm:.2f} worst"
            f" {done.worst:.1e} {spent}",
            flush=True,
        )
        if (step + 1) % given.every == 0:
            look(stage, (step + 1) * len(played), plan.evaluate, plan.kinds)
    if given.save is not None:
        learner.save(given.save)
    return 0


@torch.no_grad()
def taught(rows: Sequence[Row], teacher: Learner) -> list[Row]:
    """The rows with the teacher's logprob of each trained token less the recorded one as its advantage."""
    found, at = [], shared(rows)
    for few in micro(rows, teacher.recipe.micro):
        given = batch(few, at)
        gaps = torch.zeros(given.logprobs.shape)
        gaps[:, 1:] = (teacher.own(given) - given.logprobs[:, 1:]) * given.mask[:, 1:]
        for row, gap in zip(few, gaps, strict=True):
            found.append(replace(row, advantage=[0.0] * at + gap[: len(row.ids) - at].tolist()))
    print(f"reverse KL {reverse_kl(found):.4f} nats a token", flush=True)
    return found


def look(stage: Stage, sessions: int, count: int, kinds: Sequence[str]) -> None:
    asked = tasks.held_out(count, kinds)
    rewards = [reward for _, reward in stage.play(asked)]
    by_kind = {
        kind: [reward for reward, task in zip(rewards, asked, strict=True) if task.kind == kind]
        for kind in kinds
    }
    by_task = " ".join(f"{kind} {sum(found):.0f}/{len(found)}" for kind, found in by_kind.items())
    print(f"held out after {sessions} sessions: {sum(rewards) / len(rewards):.3f} ({by_task})", flush=True)


if __name__ == "__main__":
    sys.exit(main())
