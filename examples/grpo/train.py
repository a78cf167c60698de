"""GRPO against a running node: submit a step's tasks, read their groups, take a step, push the weights.

Everything about the node is in its client, everything about learning in `learner.py`. A step's tasks are
fixed in advance, so runs of one seed differ only by their options and by chance.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from examples.grpo import tasks
from examples.grpo.learner import Learner, Step
from examples.grpo.log import log, summary
from examples.grpo.retold import retold
from examples.grpo.rows import Row
from examples.tiny_policy.tasks import Task
from polarnode.client import PolarnodeClient
from polarnode.core.task import ForkRule
from polarnode.groups import Estimator, Group, forests_of, rows_of, tree_rows_of

# nats: on weights that sampled a token the trainer's own logprob is the recorded one, or something is wrong
TRUTH = 1e-3
ADAPTER = "grpo"  # the name by which tasks ask for the adapter that is trained


@dataclass(frozen=True)
class Plan:
    """What is trained on. `overlap`: the next step's sessions run while this one is trained on, so they are
    one version behind. `teacher`: the node's name of a model whose logprobs are learned from, instead of
    rewards. `per_session`: forks of each session, before the turns that `fork_at` chooses, so that `samples`
    are sessions and forks together. `tokens`: trained tokens after which no further step begins.
    """

    harness: str = "pi"
    kinds: Sequence[str] = ("write", "follow")
    steps: int = 12
    prompts: int = 16
    samples: int = 4
    seed: int = 0
    evaluate: int = 96
    estimator: Estimator = "grpo"
    builder: str = "prefix_merging"
    retokenise: bool = False
    overlap: bool = False
    teacher: str = ""
    per_session: int = 0
    fork_at: ForkRule = "entropy"
    tokens: int | None = None
    stop_at: float | None = None  # a mean reward over the last `window` steps that is enough
    window: int = 3


@dataclass
class Run:
    """One run: a node's client, the policy, and where its log and its checkpoints go."""

    client: PolarnodeClient
    learner: Learner
    plan: Plan
    out: Path
    spec: Callable[..., dict[str, Any]] = tasks.spec
    mark: str = ""  # before the names of tasks and versions, which are unique on a node
    began: float = field(default_factory=time.monotonic)
    curve: list[float] = field(default_factory=list)
    _waiting: dict[str, Group] = field(default_factory=dict)
    _stream: Iterator[Group] | None = None
    _trained: int = 0  # tokens
    _served: str | None = None  # the adapter that tasks name, once the node has it

    def begin(self) -> None:
        """Let a node that ran before this run serve what training begins with: another run may have left its
        own weights.
        """
        if self.learner.adapter is None and self.client.weights().version != "0":
            self.push("0")

    def train(self) -> list[dict[str, Any]]:
        """Run all steps; returns the log record of each."""
        if self.learner.adapter is not None:
            self.push("0")
        lines, ahead = [], 1 if self.plan.overlap else 0
        names = {step: self.submit(step) for step in range(min(ahead, self.plan.steps))}
        for step in range(self.plan.steps):
            if step + ahead < self.plan.steps:
                names[step + ahead] = self.submit(step + ahead)
            lines.append(self.step(step, names[step]))
            if self.enough():
                break
        for name in (each for step in names if step >= len(lines) for each in names[step]):
            self.client.cancel(name)
        return lines

    def step(self, step: int, names: Sequence[str]) -> dict[str, Any]:
        """Wait for a step's groups, learn from them, and let the node serve what was learned."""
        asked = time.monotonic()
        groups = self.collect(names)
        came = time.monotonic()
        rows = self.rows(groups)
        done = self.learner.learn(rows)
        self.check(step, done)
        for group in groups:
            group.ack()
        learned = time.monotonic()
        if done.updates:
            self.push(str(step + 1))
        line = {
            "step": step,
            **summary(groups),
            **asdict(done),
            **({"reverse_kl": reverse_kl(rows)} if self.plan.teacher else {}),
            "waited_s": came - asked,
            "learned_s": learned - came,
        }
        line |= {
            "pushed_s": time.monotonic() - learned,
            "seconds": time.monotonic() - self.began,
            "version": f"{self.mark}{step + 1}",
        }
        self.curve.append(line["reward"])
        self._trained += done.tokens
        return self.log("step", line)

    def enough(self) -> bool:
        if self.plan.tokens is not None and self._trained >= self.plan.tokens:
            return True
        last = self.curve[-self.plan.window :]
        return (
            self.plan.stop_at is not None
            and len(last) == self.plan.window
            and sum(last) / len(last) >= self.plan.stop_at
        )

    def check(self, step: int, done: Step) -> None:
        """Tokens are true: what the engine recorded of them is what the trainer computes of them. Not where
        rows are re-tokenized, or a version behind.
        """
        if not self.plan.retokenise and not (self.plan.overlap and step) and done.worst > TRUTH:
            raise RuntimeError(
                f"step {step}: a recorded logprob is {done.worst:.4f} nats from the policy's own; rows and"
                " weights are not each other's"
            )

    def evaluate(self, title: str) -> dict[str, Any]:
        """How often held-out tasks succeed, at temperature 1, one session each."""
        asked = tasks.held_out(self.plan.evaluate, self.plan.kinds)
        names = [f"{self.mark}{title}-{number}" for number in range(len(asked))]
        for name, task in zip(names, asked, strict=True):
            self.client.submit(self.asked(task, name=name, harness=self.plan.harness, samples=1))
        groups = self.collect(names)
        by_kind = {
            kind: [group for group, task in zip(groups, asked, strict=True) if task.kind == kind]
            for kind in self.plan.kinds
        }
        line = {
            **summary(groups),
            "kinds": {kind: summary(found)["reward"] for kind, found in by_kind.items() if found},
        }
        return self.log(title, line | {"seconds": time.monotonic() - self.began})

    def asked(self, task: Task, **named: Any) -> dict[str, Any]:
        """A task's TaskSpec; sampled by the adapter once there is one."""
        spec = self.spec(task, **named)
        return spec if self._served is None else {**spec, "adapter": self._served}

    def submit(self, step: int) -> list[str]:
        """Submit a step's tasks; returns their names."""
        plan = self.plan
        asked: list[Task] = tasks.of_step(step, seed=plan.seed, prompts=plan.prompts, kinds=plan.kinds)
        names = [f"{self.mark}step-{step}-{number}" for number in range(len(asked))]
        more: dict[str, Any] = {"carry": {"teacher": plan.teacher}} if plan.teacher else {}
        if plan.per_session:
            more["group"] = {"fork": {"at": plan.fork_at, "per_session": plan.per_session}}
        for name, task in zip(names, asked, strict=True):
            spec = self.asked(
                task, name=name, harness=plan.harness, samples=plan.samples, builder=plan.builder
            )
            self.client.submit({**spec, **more})
        return names

    def collect(self, names: Sequence[str]) -> list[Group]:
        """The groups of these tasks, in this order, as soon as all are over. Others that come meanwhile are
        kept.
        """
        if self._stream is None:
            self._stream = self.client.groups(
                consumer="grpo", turns="full" if self.plan.retokenise else "table"
            )
        while any(name not in self._waiting for name in names):
            group = next(self._stream)
            self._waiting[group.task_id] = group
        return [self._waiting.pop(name) for name in names]

    def rows(self, groups: Sequence[Group]) -> list[Row]:
        """What is trained on: each trace as it came, or re-tokenized from its text. With a teacher a token's
        advantage is its teacher's logprob less the recorded one; a row that no teacher scored is left out.
        """
        sessions = {each.session_id: each for group in groups for each in group.usable}
        found = []
        if self.plan.per_session:
            # a fork's parent trains what it inherited: a token has one advantage, and is in one row
            for row in tree_rows_of(forests_of(groups), estimator=self.plan.estimator):
                trace = row.trace
                own = (trace.token_ids, trace.loss_mask, trace.logprobs)
                found.append(Row(*own, row.advantages, row.weight))
            return found
        for row in rows_of(groups, estimator=self.plan.estimator):
            trace = row.trace
            if self.plan.teacher:
                if trace.teacher_logprobs is not None:
                    own = (trace.token_ids, trace.loss_mask, trace.logprobs)
                    found.append(Row(*own, row.teacher_advantages, row.weight))
            elif self.plan.retokenise:
                ids, mask = retold(trace, sessions[row.session_id], self.learner.tokenizer)
                found.append(Row(ids, mask, None, row.advantage, row.weight))
            else:
                found.append(Row(trace.token_ids, trace.loss_mask, trace.logprobs, row.advantage, row.weight))
        return found

    def push(self, version: str) -> None:
        """Save, let the node serve it under this number, and forget the checkpoint before it."""
        folder = self.learner.save(self.out / "weights" / version)
        if self.learner.adapter is None:
            self.client.update_weights(f"{self.mark}{version}", path=folder.absolute(), mode="in_place")
        else:
            name = f"{ADAPTER}-{self.mark}{version}"
            self.client.update_adapter(ADAPTER, name, path=folder.absolute())
            self._served = ADAPTER
        for old in (self.out / "weights").iterdir():
            if old != folder:
                shutil.rmtree(old)

    def log(self, kind: str, line: dict[str, Any]) -> dict[str, Any]:
        log(self.out / "log.jsonl", kind, line)
        return line


def reverse_kl(rows: Sequence[Row]) -> float:
    """Nats a trained token by which the policy finds its own tokens likelier than the teacher does: of tokens
    that the policy sampled, an estimate of the divergence from the policy to the teacher.
    """
    tokens = sum(row.trained for row in rows)
    return -sum(sum(row.advantage) for row in rows if not isinstance(row.advantage, float)) / max(1, tokens)
