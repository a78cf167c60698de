"""The paper's ablations in small: each arm is the whole loop with one change, on the same tasks.

    python -m examples.grpo.ablations [--arms faithful,per_request,retokenised] [--seeds 0,1] [--out
    out/grpo-ablations]

Writes a folder for each arm and seed as `python -m examples.grpo` does, curves.svg with all of them, and
table.md for docs/learning.md. An arm that has a report is not run again, so a table can be made in several
runs.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from examples.grpo.__main__ import parsed, plan_of, recipe_of, run
from examples.grpo.curve import smooth, svg

Arms = Mapping[str, Mapping[str, Any]]  # what an arm changes of the plan
ARMS: Arms = {
    "faithful": {},
    "per_request": {"builder": "per_request"},
    "retokenised": {"retokenise": True},
}
HEAD = (
    "arm",
    "seed",
    "before",
    "last steps",
    "after",
    "steps",
    "sessions",
    "rows",
    "updates",
    "tokens trained",
    "training, s",
    "of it the trainer, s",
    "load",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return compare(ARMS, arguments, parser, over="sessions", out=Path("out/grpo-ablations"))


def compare(
    arms: Arms,
    arguments: Sequence[str] | None,
    parser: argparse.ArgumentParser,
    *,
    over: str,
    **defaults: object,
) -> int:
    """Run all arms; their table, and their curves over `over`, a number in the log of a step. `defaults` of
    options.
    """
    parser.add_argument("--arms", default=",".join(arms))
    parser.add_argument("--seeds", default="0")
    given = parsed(arguments, parser, **defaults)
    torch.set_num_threads(1)
    reports = {}
    for seed in map(int, given.seeds.split(",")):
        for arm in given.arms.split(","):
            reports[arm, seed] = one(given, arm, seed, arms[arm])
    (given.out / "table.md").write_text(table(reports))
    (given.out / "curves.svg").write_text(curves(given.out, list(reports), over))
    print(table(reports))
    return 0


def one(given: argparse.Namespace, arm: str, seed: int, changes: Mapping[str, Any]) -> dict[str, Any]:
    """An arm's report, run now unless it was."""
    folder = given.out / f"{arm}-{seed}"
    if not (folder / "report.json").exists():
        plan = replace(plan_of(given), seed=seed, **changes)
        run(argparse.Namespace(**{**vars(given), "out": folder}), plan, recipe_of(given))
    return dict(json.loads((folder / "report.json").read_text()))


def table(reports: dict[tuple[str, int], dict[str, Any]]) -> str:
    """Markdown, a line an arm and seed."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for (arm, seed), report in reports.items():
        summary = report["summary"]
        shares = (
            "-" if summary[name] is None else f"{summary[name]:.3f}"
            for name in ("before", "last_steps", "after")
        )
        counts = (f"{summary[name]:,}" for name in ("steps", "sessions", "rows", "updates", "tokens_trained"))
        lines.append(
            (
                arm,
                str(seed),
                *shares,
                *counts,
                f"{summary['training_s']:.0f}",
                f"{summary['learned_s']:.0f}",
                f"{summary['load_before']:.1f}",
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def curves(out: Path, arms: Sequence[tuple[str, int]], over: str = "sessions") -> str:
    """All arms in one picture, over sessions or tokens: what they cost in time depends on the machine."""
    found = {}
    for arm, seed in arms:
        steps = [
            line
            for line in map(json.loads, (out / f"{arm}-{seed}" / "log.jsonl").read_text().splitlines())
            if line["kind"] == "step"
        ]
        spent = list(accumulate(line[over] for line in steps))
        found[f"{arm}, seed {seed}"] = list(
            zip(spent, smooth([line["reward"] for line in steps], 3), strict=True)
        )
    return svg(found, title="Reward of training sessions, mean of 3 steps", x=over, goal=0.8)


if __name__ == "__main__":
    sys.exit(main())
