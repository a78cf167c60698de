"""A node that lives for one command: opened, given work, stopped as whoever typed it wants.

`polarnode run`: tasks from sources, on a node of their own, watched to the end.

The rule for whoever edits it: each run has a journal of its own under OUT/state, so that no run sees the
sessions of another, and trajectories.jsonl is replaced in one piece when the sessions are over.
"""

import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import trio
from attrs import evolve, frozen
from rich.console import Console
from rich.live import Live

from polarnode.cli import output
from polarnode.cli.options import LEFT_BY_FORCE, left_by_force
from polarnode.cli.output import fitted, harmless, open_console
from polarnode.cli.serve import Stop, stop_on_signals
from polarnode.cli.sources import Sources, build_images, checked, note_lines, written_whole
from polarnode.core import codec
from polarnode.core.errors import ConfigError, boundary
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import stopped_early
from polarnode.merge.trajectory import violated_invariant
from polarnode.node.config import NodeConfig
from polarnode.node.node import Node
from polarnode.node.opening import open_node

# ── own node ────────────────────────────────────────────────────────────

Made = TypeVar("Made")


async def on_own_node(
    config: NodeConfig, console: Console, work: Callable[[Node, Stop], Awaitable[Made]]
) -> Made | None:
    """What the work gives, done on a node of its own. None when it was stopped before the node was there."""
    made: Made | None = None
    async with trio.open_nursery() as nursery:
        stop = Stop(nursery.cancel_scope.cancel)
        await nursery.start(stop_on_signals, stop)
        async with open_node(config, say=lambda text: console.print(f"· {text}", style="dim")) as node:
            made = await work(node, stop)
        nursery.cancel_scope.cancel()
    return made


# ── run ────────────────────────────────────────────────────────────

REFRESH_S = 0.5  # the live table's pace: quick enough to follow, cheap enough to leave on
PLAIN_REFRESH_S = 15.0  # between progress lines where there is no terminal
# lines of a terminal the live table leaves free: its header, the count of the rest, and what was said above
FRAME_ROWS = 4


Place = tuple[str, int]  # task_id and sample_index: the session that holds it may be replaced


@frozen(kw_only=True)
class Ran:
    """What became of a run: how many places there were, and the trajectories of those that are over."""

    sessions: int
    trajectories: tuple[Trajectory, ...]


def run(config: NodeConfig, sources: Sources, *, out: Path, expect_reward: bool) -> int:
    """Run the tasks of `sources`; returns the exit code."""
    # This node lives for these tasks alone, so code may be named by whoever typed the command.
    own = evolve(config, import_paths=config.import_paths or ("*",))
    tasks = [checked(task, config=own, here=True) for task in sources.tasks()]
    specs = [task.spec for task in tasks]
    console, state = open_console(), new_state(out)
    own = evolve(own, state_dir=str(state))
    logging.basicConfig(
        filename=state / "node.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    for line in note_lines(tasks):
        console.print(f"· {harmless(line)}", style="dim")
    build_images(tasks, own, say=lambda text: console.print(f"· {text}", style="dim"))
    try:
        ran = trio.run(_run, own, specs, console)
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        if left_by_force(error):
            console.print(
                f"left at once: what was captured lies in {state}; a node with --state-dir {state} makes"
                " trajectories of it"
            )
        raise
    if ran is None:
        console.print("stopped before any session began")
        return LEFT_BY_FORCE
    path = write(out, ran.trajectories)
    return report(ran.trajectories, path, expect_reward=expect_reward, sessions=ran.sessions, console=console)


def new_state(out: Path) -> Path:
    """A folder for this run's journal and logs, new. Runs of the same second differ by their process."""
    state = out / "state" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    with boundary(ConfigError, f"--out {out} can not be written"):
        state.mkdir(parents=True)
    return state


async def _run(config: NodeConfig, specs: Sequence[TaskSpec], console: Console) -> Ran | None:
    """None when it was stopped before its node was there."""
    return await on_own_node(config, console, lambda node, stop: _sessions(node, specs, stop, console))


async def _sessions(node: Node, specs: Sequence[TaskSpec], stop: Stop, console: Console) -> Ran:
    def end() -> None:
        console.print("· stopping: sessions end with what they have; once more to leave at once", style="dim")
        node.cancel_all()

    stop.act = end
    places: dict[Place, None] = {}  # a task that is named twice has them once
    for spec in specs:
        submitted = await node.submit(spec, idempotency_key=None)
        places |= {(submitted.task_id, index): None for index in range(len(submitted.session_ids))}
    if stop.asked:
        node.cancel_all()
    await _watch(node, frozenset(places), console)
    await node.journal.flushed()
    tasks = [await node.journal.task(task_id) for task_id in dict.fromkeys(task_id for task_id, _ in places)]
    found = [
        await node.journal.trajectory(each.session_id)
        for task in tasks
        if task is not None
        for each in task.sessions
    ]
    return Ran(sessions=len(places), trajectories=tuple(each for each in found if each is not None))


# ── while they run ────────────────────────────────────────────────────────────


async def _watch(node: Node, places: frozenset[Place], console: Console) -> None:
    """Show the sessions until all are over: a live table on a terminal, a line for each and now and then
    elsewhere.
    """
    if not console.is_terminal:
        await _watch_plainly(node, places, console)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while not places <= _over(node):
            live.update(
                output.live_table(node.scheduler.sessions(), rows=max(1, console.height - FRAME_ROWS))
            )
            await trio.sleep(REFRESH_S)


async def _watch_plainly(node: Node, places: frozenset[Place], console: Console) -> None:
    said: set[str] = set()
    last = trio.current_time()
    while True:
        new = [
            status
            for status in node.scheduler.sessions()
            if status.outcome is not None and status.session_id not in said
        ]
        for status in new:
            reward = "" if status.reward is None else f", reward {status.reward:g}"
            console.print(
                f"· {status.session_id} {status.harness}: {status.outcome}{reward}, {status.turns} turns,"
                f" {status.sampled_tokens} tokens"
            )
            said.add(status.session_id)
        if places <= _over(node):
            return
        if not new and trio.current_time() - last > PLAIN_REFRESH_S:
            console.print(
                progress(
                    len(said),
                    len(places),
                    [status.phase for status in node.scheduler.sessions() if status.outcome is None],
                )
            )
        if new or trio.current_time() - last > PLAIN_REFRESH_S:
            last = trio.current_time()
        await trio.sleep(REFRESH_S)


def progress(over: int, sessions: int, phases: Sequence[str]) -> str:
    """A line of how far the sessions are: `· 3 of 8 sessions over; 2 run, 3 init`."""
    now = ", ".join(f"{phases.count(phase)} {phase}" for phase in dict.fromkeys(phases))
    return f"· {over} of {sessions} sessions over" + (f"; {now}" if now else "")


def _over(node: Node) -> frozenset[Place]:
    return frozenset(
        (status.task_id, status.sample_index)
        for status in node.scheduler.sessions()
        if status.outcome is not None
    )


# ── when they are over ────────────────────────────────────────────────────────


def write(out: Path, trajectories: Sequence[Trajectory]) -> Path:
    """The trajectories as JSONL, one a line, whole turns included so that anybody can check the tokens."""
    path = out / "trajectories.jsonl"
    with written_whole(path) as file:
        for trajectory in trajectories:
            file.write(codec.dump_json(codec.trajectory_json(trajectory, turns="full")) + b"\n")
    return path


def report(
    trajectories: Sequence[Trajectory], path: Path, *, expect_reward: bool, sessions: int, console: Console
) -> int:
    """Print the table and what is wrong, if anything; returns the exit code."""
    console.print(fitted(console, lambda narrow: output.result_table(trajectories, narrow=narrow)))
    for line in output.endings(trajectories):
        console.print(line)
    console.print(f"\n{output.summary(trajectories)}\n{path}")
    wrong = faults(trajectories, expect_reward=expect_reward, sessions=sessions)
    for sentence in wrong:
        console.print(harmless(sentence), style="red")
    return int(bool(wrong))


def faults(trajectories: Sequence[Trajectory], *, expect_reward: bool, sessions: int) -> list[str]:
    """Why the exit code is 1: one sentence each, none when all is well."""
    found = [
        f"{each.session_id}: error of {each.outcome.boundary}: {each.outcome.reason}"
        for each in trajectories
        if each.outcome.status == "error"
    ]
    if any(violated_invariant(each) for each in trajectories):
        found.append("a law of tokens was broken: this is a bug of polarnode")
    if cancelled := sum(
        each.outcome.status == "cancelled" and not stopped_early(each.outcome) for each in trajectories
    ):
        found.append(f"{cancelled} sessions were stopped before their end")
    if len(trajectories) < sessions:
        found.append(f"{sessions - len(trajectories)} of {sessions} sessions have no trajectory")
    if expect_reward and not any((each.reward or 0) > 0 for each in trajectories):
        found.append("no session was rewarded")
    return found
