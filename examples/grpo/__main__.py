"""Run the whole loop: own node, real harness in Podman, held-out tasks before and after, learning curve.

    python -m examples.grpo [--out out/grpo] [--stop-at 0.8]

Writes OUT/log.jsonl, curve.svg, report.json and the last weights. `--url` trains on a running node. Exit code
1 if the result is below `--expect`.

    python -m examples.grpo --teacher out/grpo --out out/distill --samples 1 --prompts 32 --steps 6

distils from the last weights of that run: no reward is used.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any, get_args

import torch

from examples.grpo.curve import smooth, svg
from examples.grpo.learner import Learner, Recipe
from examples.grpo.own_node import own_node
from examples.grpo.train import Plan, Run
from polarnode.client import PolarnodeClient
from polarnode.core.task import ForkRule

TEACHER = "big"  # the node's name of it
PACKAGED = Path(__file__).parents[2] / "polarnode" / "models" / "tiny"


def main(arguments: Sequence[str] | None = None) -> int:
    given = parsed(arguments)
    # the other core is the engine's and the harnesses'; two threads are no faster on a model of this size
    torch.set_num_threads(1)
    report = run(given, plan_of(given), recipe_of(given))
    print(json.dumps(report["summary"], indent=2))
    # what was not evaluated was not learned
    return int(given.expect is not None and (report["summary"]["after"] or 0.0) < given.expect)


def run(given: argparse.Namespace, plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """Evaluate, train, evaluate; the results are also written to `given.out`."""
    if given.teacher is not None:
        given.teacher = checkpoint(given.teacher).resolve()
        if given.out.resolve() in given.teacher.parents:
            raise SystemExit(
                f"--out {given.out} holds the teacher, and a run empties its folder: name another"
            )
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    load = os.getloadavg()[0]  # of others: the node is not there yet
    began, base = time.monotonic(), digest()
    with node(given) as client:
        one = Run(client, Learner(PACKAGED, recipe), plan, given.out, mark=mark_of(given))
        one.begin()
        before = one.evaluate("before") if plan.evaluate else {}
        started = time.monotonic()
        steps = one.train()
        trained = time.monotonic() - started
        after = one.evaluate("after") if plan.evaluate else {}
    times = {"training_s": trained, "whole_s": time.monotonic() - began, "load_before": load}
    if digest() != base:
        raise RuntimeError(f"the weights under {PACKAGED} have changed: nothing here may do that")
    report = {
        "plan": asdict(plan),
        "recipe": asdict(recipe),
        "summary": {**outcome(before, steps, after, plan), **times},
        "before": before,
        "after": after,
    }
    (given.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (given.out / "curve.svg").write_text(picture(steps, plan, f"{plan.harness}, {plan.builder}"))
    return report


def digest() -> str:
    """Of the checkpoint that training begins with."""
    return sha256((PACKAGED / "model.safetensors").read_bytes()).hexdigest()


def outcome(
    before: dict[str, Any], steps: Sequence[dict[str, Any]], after: dict[str, Any], plan: Plan
) -> dict[str, Any]:
    """A run in a few numbers; `before` and `after` are None where nothing was evaluated."""
    rewards = [line["reward"] for line in steps]
    return {
        "before": before.get("reward"),
        "after": after.get("reward"),
        "last_steps": smooth(rewards, plan.window)[-1] if rewards else 0.0,
        **({"reverse_kl": [line["reverse_kl"] for line in steps]} if plan.teacher else {}),
        "steps": len(steps),
        "updates": sum(line["updates"] for line in steps),
        "sessions": sum(line["sessions"] for line in steps),
        "rows": sum(line["rows"] for line in steps),
        "tokens_trained": sum(line["tokens"] for line in steps),
        "worst_logprob": max((line["worst"] for line in steps), default=0.0),
        "waited_s": sum(line["waited_s"] for line in steps),
        "learned_s": sum(line["learned_s"] for line in steps),
        "pushed_s": sum(line["pushed_s"] for line in steps),
    }


def picture(steps: Sequence[dict[str, Any]], plan: Plan, title: str) -> str:
    minutes, rewards = [line["seconds"] / 60 for line in steps], [line["reward"] for line in steps]
    curves = {
        "mean reward of a step": list(zip(minutes, rewards, strict=True)),
        f"of {plan.window} steps": list(zip(minutes, smooth(rewards, plan.window), strict=True)),
    }
    return svg(curves, title=f"Reward of training sessions: {title}", x="minutes", goal=0.8)


@contextmanager
def node(given: argparse.Namespace) -> Iterator[PolarnodeClient]:
    """The node that is named, or one for this run."""
    if given.url is not None:
        yield PolarnodeClient(given.url, token=os.environ.get("POLARNODE_TOKEN"))
        return
    teachers = {} if given.teacher is None else {TEACHER: checkpoint(given.teacher)}
    with own_node(
        given.out / "node",
        run_limit=given.run_limit,
        teachers=teachers,
        lora_rank=given.lora,
        nodes=given.nodes,
    ) as client:
        yield client


def mark_of(given: argparse.Namespace) -> str:
    """What keeps a run's names apart from those of other runs, on a node that is not its own."""
    return "" if given.url is None else f"{token_hex(3)}-"


def checkpoint(folder: Path) -> Path:
    """The folder itself, or the last weights of the run that wrote it."""
    if (folder / "config.json").exists():
        return folder
    found = sorted(folder.glob("weights/*/config.json"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise SystemExit(f"{folder} has no weights: make a teacher with `make learn`, or name a checkpoint")
    return found[-1].parent


def plan_of(given: argparse.Namespace) -> Plan:
    wanted = {name: getattr(given, name) for name in Plan.__dataclass_fields__ if hasattr(given, name)}
    teacher = "" if given.teacher is None else TEACHER
    return Plan(**{**wanted, "kinds": tuple(given.kinds.split(",")), "teacher": teacher})


def recipe_of(given: argparse.Namespace) -> Recipe:
    return Recipe(
        **{name: getattr(given, name) for name in Recipe.__dataclass_fields__ if hasattr(given, name)}
    )


def parsed(
    arguments: Sequence[str] | None, parser: argparse.ArgumentParser | None = None, **defaults: object
) -> argparse.Namespace:
    """The options of a run; a command with more of them, or other defaults, hands its own in."""
    parser = parser or argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/grpo"))
    parser.add_argument("--url", help="of a node or a fleet that runs; POLARNODE_TOKEN is its token")
    parser.add_argument("--run-limit", type=int, default=10, help="sessions at once, on a node of its own")
    parser.add_argument("--nodes", type=int, default=1, help="of a fleet of its own, instead of one node")
    parser.add_argument(
        "--expect", type=float, help="exit with 1 unless held-out tasks then succeed so often"
    )
    parser.add_argument(
        "--teacher", type=Path, help="learn from its logprobs: a checkpoint, or the folder of a run"
    )
    plan, recipe = Plan(), Recipe()
    parser.add_argument("--kinds", default=",".join(plan.kinds))
    parser.add_argument("--harness", default=plan.harness, choices=("pi", "mini_swe_agent"))
    parser.add_argument("--builder", default=plan.builder, choices=("prefix_merging", "per_request"))
    parser.add_argument("--stop-at", type=float, default=plan.stop_at)
    parser.add_argument(
        "--overlap", action="store_true", help="roll the next step out while this one is trained on"
    )
    parser.add_argument(
        "--per-session", type=int, default=0, help="forks of each session; --samples counts both"
    )
    parser.add_argument("--fork-at", default=plan.fork_at, choices=get_args(ForkRule))
    parser.add_argument("--tokens", type=int, help="begin no step after so many trained tokens")
    parser.add_argument(
        "--retokenise", action="store_true", help="train on rows re-tokenized from their text"
    )
    for name in ("steps", "prompts", "samples", "seed", "evaluate"):
        parser.add_argument(f"--{name}", type=int, default=getattr(plan, name))
    for name in ("lr", "scale_lr", "final_lr", "clip", "cap", "clip_norm", "alpha", "lora_lr"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(recipe, name))
    parser.add_argument("--inner", type=int, default=recipe.inner)
    parser.add_argument("--lora", type=int, default=recipe.lora, help="rank of an adapter to train instead")
    parser.set_defaults(**defaults)
    given = parser.parse_args(arguments)
    if not 1 <= given.nodes <= 64:  # what a fleet is made for
        parser.error(f"--nodes must be 1 to 64, not {given.nodes}")
    if given.per_session and (given.overlap or given.retokenise or given.teacher):
        parser.error("--per-session goes without --overlap, --retokenise and --teacher")
    if given.nodes > 1 and given.url is not None:
        parser.error("--nodes starts a fleet of its own: leave it out with --url")
    return given


if __name__ == "__main__":
    sys.exit(main())
