"""`polarnode run`: run tasks on a temporary node and write their trajectories.

Invariant: each run has its own journal under OUT/state, so that no run sees the sessions of another, and
trajectories.jsonl is replaced atomically when all sessions have ended.
"""

import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio
from attrs import evolve, frozen
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from polarnode import harnesses
from polarnode.cli import output
from polarnode.cli.options import EXIT_INTERRUPTED, interrupted
from polarnode.cli.output import fit_table, harmless, open_console
from polarnode.cli.progress import Steps
from polarnode.cli.sources import (
    SourceSelection,
    build_images,
    checked,
    note_lines,
    require_images,
    written_whole,
)
from polarnode.cli.stopping import StopRequest, stop_on_signals
from polarnode.containers.images import Images
from polarnode.core import codec
from polarnode.core.errors import ConfigError, Refused, RuntimeFault, boundary
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import stopped_early
from polarnode.journal import queries
from polarnode.journal.damage import encode_trajectory
from polarnode.merge.trajectory import violated_invariant
from polarnode.node import checks
from polarnode.node.config import NodeConfig
from polarnode.node.node import Node
from polarnode.node.opening import open_node
from polarnode.node.settings import runtimes_settings
from polarnode.rollouts.services import runtime_of
from polarnode.support.bounded import open_node_log

# ── temporary node ────────────────────────────────────────────────────────────

ResultT = TypeVar("ResultT")


async def on_own_node(
    config: NodeConfig,
    console: Console,
    work: Callable[[Node, StopRequest], Awaitable[ResultT]],
    *,
    specs: Iterable[TaskSpec] = (),
) -> ResultT | None:
    """Open a node, await `work(node, stop)` on it and return its result; None if stopped before the node was
    open. The images of `specs` are built while the engine starts.
    """
    result: ResultT | None = None
    async with trio.open_nursery() as nursery:
        stop = StopRequest(nursery.cancel_scope.cancel)
        await nursery.start(stop_on_signals, stop)
        steps = Steps(
            lambda text: console.print(f"· {text}", style="dim"), console, f"logs: {config.state_dir}"
        )
        nursery.start_soon(steps.show)
        images = Images(
            settings=runtimes_settings(config),
            log=Path(config.state_dir) / "images.log",
            report=lambda text: console.print(f"· {text}", style="dim"),
        )
        nursery.start_soon(_build_beside, images, image_names(specs, config))
        # A run has its own journal, which holds all of it, so a log that other nodes share is not used.
        alone = evolve(config, log=None)
        async with open_node(alone, report=steps.report, images=images) as node:
            steps.end()
            result = await work(node, stop)
        nursery.cancel_scope.cancel()
    return result


def image_names(specs: Iterable[TaskSpec], config: NodeConfig) -> list[str]:
    """The images that the sessions of these tasks begin with, each once."""
    find = partial(harnesses.find, allowed_imports=config.import_paths)
    return list(dict.fromkeys(runtime_of(each, find(each.harness)).image for each in specs))


async def _build_beside(images: Images, names: Sequence[str]) -> None:
    """Build missing images while the engine starts. If a build fails, a session that needs the image builds
    it again and reports why it failed.
    """
    for name in names:
        with suppress(RuntimeFault, Refused):
            await images.ensure(name)


# ── run ───────────────────────────────────────────────────────────────────────

REFRESH_INTERVAL_S = 0.5  # between updates of the live table: quick enough to follow, and cheap
PLAIN_REFRESH_S = 15.0  # between progress lines without a terminal
# The lines of the terminal that are not rows of the live table: its header, its last row and the text above
# it.
FRAME_ROWS = 4

# A sample is (task_id, sample_index). It is stable, while a retry may replace the session that runs it.
Sample = tuple[str, int]


@frozen(kw_only=True)
class RunResult:
    """The number of samples in a run, and the trajectories of those that ended."""

    sessions: int
    trajectories: tuple[Trajectory, ...]


def run(config: NodeConfig, sources: SourceSelection, *, out: Path, expect_reward: bool) -> int:
    """Run the tasks of `sources`; returns the exit code."""
    # Only the user's own tasks run on this node, so they may import any code unless the config limits it.
    own = evolve(config, import_paths=config.import_paths or ("*",))
    tasks = [checked(task, config=own, here=True) for task in sources.tasks()]
    specs = [task.spec for task in tasks]
    checks.refuse_unfit(own, tasks=True)
    require_images(tasks, own)
    console, state = open_console(), make_state_folder(out)
    own = evolve(own, state_dir=str(state))
    with boundary(ConfigError, f"--out {out} cannot be written"):
        open_node_log(state)
    for line in note_lines(tasks):
        console.print(f"· {harmless(line)}", style="dim")
    build_images(tasks, own, report=lambda text: console.print(f"· {text}", style="dim"))
    try:
        result = trio.run(_run, own, specs, console)
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        if interrupted(error):
            console.print(
                f"exited at once: the captured calls are in {state}; a node started with --state-dir {state}"
                " turns them into trajectories"
            )
        raise
    if result is None:
        console.print("stopped before any session began")
        return EXIT_INTERRUPTED
    path = write(out, result.trajectories)
    return report(
        result.trajectories, path, expect_reward=expect_reward, sessions=result.sessions, console=console
    )


def make_state_folder(out: Path) -> Path:
    """Create the folder for this run's journal and logs, named by time and process id."""
    state = out / "state" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    with boundary(ConfigError, f"--out {out} cannot be written"):
        state.mkdir(parents=True)
    return state


async def _run(config: NodeConfig, specs: Sequence[TaskSpec], console: Console) -> RunResult | None:
    """Run the tasks on a temporary node. Returns None if stopped before the node was open."""
    return await on_own_node(
        config, console, lambda node, stop: _sessions(node, specs, stop, console), specs=specs
    )


async def _sessions(node: Node, specs: Sequence[TaskSpec], stop: StopRequest, console: Console) -> RunResult:
    def end() -> None:
        console.print(
            "· stopping: sessions are ended and saved; press Ctrl-C again to exit at once", style="dim"
        )
        node.cancel_all()

    stop.act = end
    samples: dict[Sample, None] = {}  # a task that was submitted twice counts once
    for spec in specs:
        submitted = await node.submit(spec, idempotency_key=None)
        samples |= {(submitted.task_id, index): None for index in range(len(submitted.session_ids))}
    if stop.requested:
        node.cancel_all()
    await _watch(node, frozenset(samples), console)
    await node.journal.writer.flush()
    reader = node.journal.reader
    tasks = [
        await reader.query(queries.task, task_id)
        for task_id in dict.fromkeys(task_id for task_id, _ in samples)
    ]
    found = [
        await reader.query(queries.trajectory, each.session_id)
        for task in tasks
        if task is not None
        for each in task.sessions
    ]
    return RunResult(sessions=len(samples), trajectories=tuple(each for each in found if each is not None))


# ── progress ──────────────────────────────────────────────────────────────────


async def _watch(node: Node, samples: frozenset[Sample], console: Console) -> None:
    """Show the sessions until all have ended: a live table on a terminal, else a line for each ended session
    and a progress line from time to time.
    """
    if not console.is_terminal:
        await _watch_plainly(node, samples, console)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while not samples <= _ended(node):
            table = output.live_table(node.scheduler.sessions(), rows=max(1, console.height - FRAME_ROWS))
            step = node.images.step
            live.update(table if step is None else Group(table, Text(f"· {step}", style="dim")))
            await trio.sleep(REFRESH_INTERVAL_S)


async def _watch_plainly(node: Node, samples: frozenset[Sample], console: Console) -> None:
    printed: set[str] = set()
    last = trio.current_time()
    while True:
        new = [
            status
            for status in node.scheduler.sessions()
            if status.outcome is not None and status.session_id not in printed
        ]
        for status in new:
            reward = "" if status.reward is None else f", reward {status.reward:g}"
            console.print(
                f"· {status.session_id} {status.harness}: {status.outcome}{reward}, {status.turns} turns,"
                f" {status.sampled_tokens} tokens"
            )
            printed.add(status.session_id)
        if samples <= _ended(node):
            return
        if not new and trio.current_time() - last > PLAIN_REFRESH_S:
            console.print(
                progress(
                    len(printed),
                    len(samples),
                    [status.phase for status in node.scheduler.sessions() if status.outcome is None],
                    waits_for=node.images.step,
                )
            )
        if new or trio.current_time() - last > PLAIN_REFRESH_S:
            last = trio.current_time()
        await trio.sleep(REFRESH_INTERVAL_S)


def progress(done: int, sessions: int, phases: Sequence[str], *, waits_for: str | None = None) -> str:
    """A progress line: `· 3 of 8 sessions done; 2 run, 3 init (building mini_swe_agent, 60 s)`."""
    now = ", ".join(f"{phases.count(phase)} {phase}" for phase in dict.fromkeys(phases))
    step = f" ({waits_for})" if waits_for is not None else ""
    return f"· {done} of {sessions} sessions done{f'; {now}' if now else ''}{step}"


def _ended(node: Node) -> frozenset[Sample]:
    return frozenset(
        (status.task_id, status.sample_index)
        for status in node.scheduler.sessions()
        if status.outcome is not None
    )


# ── results ───────────────────────────────────────────────────────────────────


def write(out: Path, trajectories: Sequence[Trajectory]) -> Path:
    """Write the trajectories as JSONL with full turns, so that tokens can be checked; returns the path."""
    path = out / "trajectories.jsonl"
    with written_whole(path) as file:
        for trajectory in trajectories:
            file.write(encode_trajectory(_line, trajectory) + b"\n")
    return path


def _line(trajectory: Trajectory) -> bytes:
    return codec.dump_json(codec.trajectory_json(trajectory, turns="full"))


def report(
    trajectories: Sequence[Trajectory], path: Path, *, expect_reward: bool, sessions: int, console: Console
) -> int:
    """Print the table, the summary and the faults; returns the exit code."""
    console.print(fit_table(console, lambda narrow: output.result_table(trajectories, narrow=narrow)))
    for line in output.endings(trajectories):
        console.print(line)
    console.print(f"\n{output.summary(trajectories)}\n{path}")
    wrong = faults(trajectories, expect_reward=expect_reward, sessions=sessions)
    for sentence in wrong:
        console.print(harmless(sentence), style="red")
    return int(bool(wrong))


def faults(trajectories: Sequence[Trajectory], *, expect_reward: bool, sessions: int) -> list[str]:
    """Why the exit code is 1, one sentence each; empty for exit code 0."""
    found = [
        f"{each.session_id}: error of {each.outcome.boundary}: {each.outcome.reason}"
        for each in trajectories
        if each.outcome.status == "error"
    ]
    if any(violated_invariant(each) for each in trajectories):
        found.append("a token invariant is broken: this is a bug in polarnode")
    if cancelled := sum(
        each.outcome.status == "cancelled" and not stopped_early(each.outcome) for each in trajectories
    ):
        found.append(f"{cancelled} sessions were cancelled before they ended")
    if len(trajectories) < sessions:
        found.append(f"{sessions - len(trajectories)} of {sessions} sessions have no trajectory")
    if expect_reward and not any((each.reward or 0) > 0 for each in trajectories):
        found.append("no session has a reward above 0 (--expect-reward)")
    return found
