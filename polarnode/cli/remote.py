"""The verbs that speak to a node which serves: submit, watch, export.

The rule for whoever edits it: the first word to a node is said without patience, so that a wrong address is
one sentence at once; only what follows waits for a node that restarts.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import click
from attrs import frozen

from polarnode.cli import output
from polarnode.cli.output import harmless, open_console
from polarnode.cli.sources import Sources, build_images, note_lines, written_whole
from polarnode.client.blocking import PolarnodeClient
from polarnode.client.values import Event, Submitted
from polarnode.node.config import NodeConfig
from polarnode.sources.values import SourcedTask

Query = Mapping[str, Any]
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@frozen(kw_only=True)
class Where:
    """A node that serves."""

    url: str
    token: str | None

    @property
    def here(self) -> bool:
        """Whether the node is on this machine."""
        return (urlsplit(self.url).hostname or "") in LOOPBACK

    def client(self, *, patience_s: float = 0.0) -> PolarnodeClient:
        return PolarnodeClient(self.url, token=self.token, patience_s=patience_s)


def submit(sources: Sources, node: Where, config: NodeConfig) -> None:
    """Submit the tasks of sources; the task ids on stdout, the rest on stderr, so that scripts can use them.

    An image that a task's folder is to be built into is built where the node is, which is here when its
    address is this machine's own.
    """
    tasks = sources.tasks()
    node.client().status()
    for note in note_lines(tasks):
        click.echo(f"· {harmless(note)}", err=True)
    if node.here:
        build_images(tasks, config, say=lambda text: click.echo(f"· {text}", err=True))
    else:
        _tell_images(tasks)
    submitted = [_submitted(task, node) for task in tasks]
    sessions, known = (
        sum(len(each.session_ids) for each in submitted),
        sum(not each.created for each in submitted),
    )
    was = (
        ""
        if not known
        else " (it was there before)"
        if len(submitted) == 1
        else f" ({known} tasks were there before)"
    )
    which = f" --task {submitted[0].task_id}" if len(submitted) == 1 else ""
    count = "" if len(submitted) == 1 else f"{len(submitted)} tasks, "
    click.echo(f"{count}{sessions} sessions{was}; follow them with: polarnode watch{which}", err=True)


def _submitted(task: SourcedTask, node: Where) -> Submitted:
    submitted = node.client().submit(task.spec)
    click.echo(submitted.task_id)
    return submitted


def _tell_images(tasks: Sequence[SourcedTask]) -> None:
    for build in {task.build.image: task.build for task in tasks if task.build is not None}.values():
        how = "polarnode convert --build there, on the same folder"
        click.echo(
            f"· the node's machine must have {build.image}, built from {harmless(str(build.folder))}: {how}",
            err=True,
        )


def watch(task_id: str | None, consumer: str | None, node: Where) -> None:
    """One line a trajectory as it comes; with a task, until that task is done."""
    node.client().status() if task_id is None else node.client().task(task_id)
    console = open_console()
    for event in node.client(patience_s=600.0).trajectories(
        consumer=consumer, task_id=task_id, ack=consumer is not None
    ):
        console.print(line(event), soft_wrap=True, style="yellow" if event.kind == "gap" else "")


def line(event: Event) -> str:
    """An event in one line."""
    match event.kind:
        case "trajectory":
            return _trajectory_line(event)
        case "group":
            return _group_line(event.data)
        case "task":
            counts = ", ".join(f"{count} {status}" for status, count in event.data["counts"].items())
            return f"task {event.data['task_id']} is over: {counts}"
        case "gap":
            return (
                f"what lay between {event.data['after']} and {event.data['oldest']} is no longer kept: read"
                " more often, or acknowledge later"
            )
    return f"{event.kind}: this polarnode is older than the node and does not know such events"


def _group_line(data: Mapping[str, Any]) -> str:
    """A node older than this polarnode says no state."""
    rewards = " ".join(output.reward_text(reward) for reward in data["rewards"])
    state, reason = data.get("state"), data.get("reason")
    why = (
        ""
        if state is None
        else f", {harmless(state)}"
        if reason is None
        else f", {harmless(state)} ({harmless(reason)})"
    )
    return f"group {data['group_id']} is over{why}: rewards {rewards}"


def _trajectory_line(event: Event) -> str:
    value, trajectory = event.data, event.trajectory
    trainable = 0 if trajectory is None else trajectory.trainable_tokens
    head = (
        f"{value['session_id']} {harmless(value['harness']['name'])} {value['outcome']['status']} reward"
        f" {output.reward_text(value['reward'])}"
    )
    return f"{head} turns {len(value['turns'])} traces {len(value['traces'])} trainable {trainable}"


def export(query: Query, output: Path | None, node: Where) -> None:
    """What is over as the node sends it; a file appears when it is whole."""
    lines = 0
    pieces = node.client().export_bytes(**query)
    next(pieces)  # it is there: a refusal leaves an older file as it was, and says why
    with written_whole(output) if output is not None else nullcontext[BinaryIO](sys.stdout.buffer) as out:
        for piece in pieces:
            out.write(piece)
            lines += piece.count(b"\n")
    what = (
        "token rows"
        if query.get("format") == "parquet"
        else f"{lines} {'conversations' if query.get('kind') == 'sft' else 'trajectories'}"
    )
    click.echo(what + (f" in {output}" if output is not None else ""), err=True)
