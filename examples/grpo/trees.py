"""Forks against flat groups, on one budget of sampled tokens: each arm is the whole loop, on the same tasks.

    python -m examples.grpo.trees [--arms flat,tree] [--seeds 0,1] [--tokens 24000] [--out out/grpo-trees]

`flat`: four sessions of a task. `tree`: two sessions of a task and two forks of each, before the turns where
the policy was least certain; a fork samples the rest of a session alone, so six leaves cost about as many
tokens as four sessions. The tools of these tasks are pure, so forks by replay are exact.

Writes a folder for each arm and seed as `python -m examples.grpo` does, curves.svg over trained tokens, and
table.md. An arm that has a report is not run again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.grpo.ablations import Arms, compare

ARMS: Arms = {"flat": {"samples": 4}, "tree": {"samples": 6, "per_session": 2, "fork_at": "entropy"}}
TOKENS = 24_000  # of each arm: some six steps of 16 tasks, eight minutes on two cores


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = {"out": Path("out/grpo-trees"), "tokens": TOKENS, "steps": 100}
    return compare(ARMS, arguments, parser, over="tokens", **defaults)


if __name__ == "__main__":
    sys.exit(main())
