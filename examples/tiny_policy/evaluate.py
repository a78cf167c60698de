"""How often the policy succeeds, at temperature 1, on tasks it was never shown.

    python -m examples.tiny_policy.evaluate --model DIR [--episodes 40] [--real 6]

`--real` runs that many tasks of each kind of harness through the unmodified harness itself; the rest use the
simulated tools, which answer in the same words.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from examples.tiny_policy.endpoint import endpoint
from examples.tiny_policy.harness import find, run
from examples.tiny_policy.rollout import Episode, Policy, Speaker, attempt
from examples.tiny_policy.tasks import KINDS, Task, make
from examples.tiny_policy.tools import Workbench

HARNESSES = ("pi", "mini")
PACKAGED = Path(__file__).parents[2] / "polarnode" / "models" / "tiny"


def real_attempt(policy: Policy, harness: str, task: Task, seed: int) -> Episode:
    """One attempt in the unmodified harness."""
    speaker = Speaker(policy, seed)
    with tempfile.TemporaryDirectory() as root, endpoint(speaker) as (url, _):
        folder = Path(root, "work")
        folder.mkdir()
        for name, content in task.files.items():
            (folder / name).write_text(content)
        done = run(harness, find(harness), task.instruction, folder, Path(root, "home"), url)
        passed = Workbench(folder, replace(task, files={}), trusted=True).passed(task)
    return Episode(harness, task, passed, speaker.malformed > 0, speaker.sampled, done.output)


def tasks(count: int, seed: int) -> list[Task]:
    """Held-out tasks, of all kinds in turn."""
    kinds = list(KINDS)
    return [make(seed + number, kinds[number % len(kinds)]) for number in range(count)]


def report(title: str, episodes: Iterable[Episode]) -> None:
    """Print success by kind, and how long the attempts were."""
    groups: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        groups[episode.task.kind].append(episode)
        groups["all"].append(episode)
    for kind, group in sorted(groups.items()):
        turns = [n for e in group for n in e.sampled]
        print(
            f"{title:9} {kind:7} passed {sum(e.passed for e in group):3}/{len(group):<3}"
            f" {sum(e.passed for e in group) / len(group):.2f}  malformed {sum(e.malformed for e in group):2}"
            f"  turns {len(turns) / len(group):.1f} (at most {max(len(e.sampled) for e in group)})  tokens a"
            f" turn {sum(turns) / len(turns):.0f} (at most {max(turns)})",
            flush=True,
        )


def main() -> None:
    """Evaluate a policy in both harnesses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=PACKAGED)
    parser.add_argument("--episodes", type=int, default=40, help="simulated attempts a harness")
    parser.add_argument("--real", type=int, default=0, help="attempts in the real harness, each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="print the text of this many attempts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    policy = Policy.load(options.model)
    for harness in HARNESSES:
        simulated = [
            attempt(policy, harness, task, options.seed + i)
            for i, task in enumerate(tasks(options.episodes, options.seed))
        ]
        for episode in simulated[: options.show]:
            print(episode.task.instruction, dict(episode.task.files), episode.passed, episode.text, sep="\n")
        if simulated:
            report(f"{harness} (sim)", simulated)
        real = [
            real_attempt(policy, harness, task, options.seed + i)
            for i, task in enumerate(tasks(options.real, options.seed + 10_000))
        ]
        if real:
            report(f"{harness} real", real)


if __name__ == "__main__":
    main()
