"""The tasks of a run as TaskSpecs: those of `examples.tiny_policy.tasks`, scored by their own check.

Keep this a pure function of its arguments: a step's tasks do not depend on what was learned, so runs can be
compared.
"""

from collections.abc import Sequence
from typing import Any

from examples.tiny_policy.tasks import Task, make
from polarnode.integrations.rollout_tasks import UNCUT

MAX_TURNS = 8  # a task takes two to four; a policy that goes round in circles is a failure, and costs time
MAX_TOKENS = 256  # of a turn: they have 20 to 50
RUN_S = 120.0
BY_STEP = 1_000_003  # seeds of different runs do not meet


def numbered(number: int, *, seed: int, kinds: Sequence[str]) -> Task:
    """A training task; the kinds take turns."""
    return make(seed * BY_STEP + number, kinds[number % len(kinds)], test=False)


def of_step(step: int, *, seed: int, prompts: int, kinds: Sequence[str]) -> list[Task]:
    """A step's training tasks."""
    return [
        numbered(number, seed=seed, kinds=kinds) for number in range(step * prompts, (step + 1) * prompts)
    ]


def held_out(count: int, kinds: Sequence[str]) -> list[Task]:
    """Tasks to evaluate with: their answers in their files are in no training task."""
    return [make(10_000 + number, kinds[number % len(kinds)]) for number in range(count)]


def spec(
    task: Task,
    *,
    name: str,
    harness: str,
    samples: int,
    builder: str = "prefix_merging",
) -> dict[str, Any]:
    """A TaskSpec as JSON."""
    return {
        "task_id": name,
        "instruction": task.instruction,
        "num_samples": samples,
        "harness": {"name": harness},
        "runtime": {"files": [{"path": path, "text": text} for path, text in task.files.items()]},
        "evaluator": {"name": "command", "config": {"script": task.check}},
        "builder": {"name": builder},
        "budgets": {"run_s": RUN_S, "max_turns": MAX_TURNS},
        "sampling": {**UNCUT, "temperature": 1.0, "max_tokens": MAX_TOKENS},
        "metadata": {"kind": task.kind},
    }
