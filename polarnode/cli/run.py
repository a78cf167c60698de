"""`polarnode run`: tasks from files, on a node of their own, watched to the end."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import trio
from attrs import evolve
from rich.console import Console
from rich.live import Live

from polarnode import wire
from polarnode.cli import tables
from polarnode.cli.files import read_task_file
from polarnode.cli.signals import stop_on_signals
from polarnode.config import NodeConfig
from polarnode.merge.trajectory import broken_laws
from polarnode.node import Node, open_node
from polarnode.records import Trajectory
from polarnode.tasks import TaskSpec

REFRESH_S = 0.5  # the live table's pace: quick enough to follow, cheap enough to leave on
PLAIN_REFRESH_S = 15.0  # between progress lines where there is no terminal

console = Console(highlight=False)


def run(config: NodeConfig, files: Sequence[Path], *, samples: int | None, out: Path, expect_reward: bool) -> int:
    """Run the tasks in `files`; returns the exit code."""
    specs = [read_task_file(file, samples=samples) for file in files]
    out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=out / "node.log", level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # This node lives for these tasks alone: its journal lies beside what it makes, and code may be named by whoever typed the command.
    own = evolve(config, state_dir=str(out / "state"), import_paths=config.import_paths or ("*",))
    trajectories = trio.run(_run, own, specs)
    path = write(out, trajectories)
    return report(trajectories, path, expect_reward=expect_reward)


async def _run(config: NodeConfig, specs: Sequence[TaskSpec]) -> list[Trajectory]:
    async with open_node(config, say=lambda text: console.print(f"· {text}", style="dim")) as node, trio.open_nursery() as nursery:
        await nursery.start(stop_on_signals, node.cancel_all)
        submitted = [await node.submit(spec, idempotency_key=None) for spec in specs]
        ids = [session_id for each in submitted for session_id in each.session_ids]
        await _watch(node, len(ids))
        await node.journal.flushed()
        found = [await node.journal.trajectory(session_id) for session_id in ids]
        nursery.cancel_scope.cancel()
    return [trajectory for trajectory in found if trajectory is not None]


async def _watch(node: Node, expected: int) -> None:
    """Show the sessions until all are over: a live table on a terminal, a line now and then elsewhere."""
    if not console.is_terminal:
        await _watch_plainly(node, expected)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while not _over(node, expected):
            live.update(tables.live_table(node.scheduler.sessions()))
            await trio.sleep(REFRESH_S)


async def _watch_plainly(node: Node, expected: int) -> None:
    said, last = 0, trio.current_time()
    while not _over(node, expected):
        ended = [status for status in node.scheduler.sessions() if status.outcome]
        for status in ended[said:]:
            reward = "" if status.reward is None else f", reward {status.reward:g}"
            console.print(f"· {status.session_id} {status.harness}: {status.outcome}{reward}, {status.turns} turns, {status.sampled_tokens} tokens")
        if len(ended) == said and trio.current_time() - last > PLAIN_REFRESH_S:
            running = sum(status.phase == "run" for status in node.scheduler.sessions())
            console.print(f"· {len(ended)} of {expected} sessions over, {running} running")
        if len(ended) != said or trio.current_time() - last > PLAIN_REFRESH_S:
            last = trio.current_time()
        said = len(ended)
        await trio.sleep(REFRESH_S)


def _over(node: Node, expected: int) -> bool:
    return sum(status.outcome is not None for status in node.scheduler.sessions()) >= expected


def write(out: Path, trajectories: Sequence[Trajectory]) -> Path:
    """The trajectories as JSONL, one a line, whole turns included so that anybody can check the tokens."""
    path = out / "trajectories.jsonl"
    with path.open("w") as file:
        for trajectory in trajectories:
            file.write(json.dumps(wire.trajectory_json(trajectory, turns="full")) + "\n")
    return path


def report(trajectories: Sequence[Trajectory], path: Path, *, expect_reward: bool) -> int:
    """Print the table and what is wrong, if anything; returns the exit code."""
    console.print(tables.result_table(trajectories))
    console.print(f"\n{tables.summary(trajectories)}\n{path}")
    wrong = [f"{each.session_id}: {each.outcome.boundary}: {each.outcome.reason}" for each in trajectories if each.outcome.status == "error"]
    for sentence in wrong:
        console.print(sentence, style="red")
    if any(broken_laws(each) for each in trajectories):
        console.print("a law of tokens was broken: this is a bug of polarnode", style="bold red")
    rewarded = any((each.reward or 0) > 0 for each in trajectories)
    if expect_reward and not rewarded:
        console.print("no session was rewarded", style="red")
    return int(bool(wrong) or not trajectories or (expect_reward and not rewarded))
