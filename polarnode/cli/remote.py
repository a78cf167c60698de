"""The commands that use a running node: `submit`, `watch` and `export`.

The first request to a node is not retried, so that a wrong address is reported at once. Only later requests
wait for a node that restarts.
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
from polarnode.cli.sources import SourceSelection, build_images, note_lines, written_whole
from polarnode.client.blocking import PolarnodeClient
from polarnode.client.values import Event
from polarnode.core.status import Submitted
from polarnode.node.config import NodeConfig
from polarnode.sources.values import SourcedTask

Query = Mapping[str, Any]
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@frozen(kw_only=True)
class RemoteNode:
    """The address of a running node."""

    url: str
    token: str | None

    @property
    def local(self) -> bool:
        """Whether the node is on this machine."""
        return (urlsplit(self.url).hostname or "") in LOOPBACK

    def client(self, *, patience_s: float = 0.0) -> PolarnodeClient:
        return PolarnodeClient(self.url, token=self.token, patience_s=patience_s)


def submit(sources: SourceSelection, node: RemoteNode, config: NodeConfig) -> None:
    """Submit the tasks of sources. Task ids go to stdout for scripts, everything else to stderr.

    Images that tasks need are built here when the node is on this machine; otherwise the user is told which
    images to build there.
    """
    tasks = sources.tasks()
    node.client().status()
    for note in note_lines(tasks):
        click.echo(f"· {harmless(note)}", err=True)
    if node.local:
        build_images(tasks, config, report=lambda text: click.echo(f"· {text}", err=True))
    else:
        _list_images(tasks)
    submitted = [_submitted(task, node) for task in tasks]
    sessions = sum(len(each.session_ids) for each in submitted)
    existing = sum(not each.created for each in submitted)
    was = (
        ""
        if not existing
        else " (submitted before)"
        if len(submitted) == 1
        else f" ({existing} tasks were submitted before)"
    )
    which = f" --task {submitted[0].task_id}" if len(submitted) == 1 else ""
    count = "" if len(submitted) == 1 else f"{len(submitted)} tasks, "
    click.echo(f"{count}{sessions} sessions{was}; follow them with: polarnode watch{which}", err=True)


def _submitted(task: SourcedTask, node: RemoteNode) -> Submitted:
    submitted = node.client().submit(task.spec)
    click.echo(submitted.task_id)
    return submitted


def _list_images(tasks: Sequence[SourcedTask]) -> None:
    for build in {task.build.image: task.build for task in tasks if task.build is not None}.values():
        click.echo(
            f"· the node's machine needs the image {build.image}, built from {harmless(str(build.folder))}:"
            " run `polarnode convert --build` on the same tasks there",
            err=True,
        )


def watch(task_id: str | None, consumer: str | None, node: RemoteNode) -> None:
    """Print a line for each event as it arrives; with `task_id`, until that task is done."""
    node.client().status() if task_id is None else node.client().task(task_id)
    console = open_console()
    for event in node.client(patience_s=600.0).trajectories(
        consumer=consumer, task_id=task_id, ack=consumer is not None
    ):
        console.print(line(event), soft_wrap=True, style="yellow" if event.kind == "gap" else "")


def line(event: Event) -> str:
    """An event as one line of text."""
    match event.kind:
        case "trajectory":
            return _trajectory_line(event)
        case "group":
            return _group_line(event.data)
        case "task":
            counts = ", ".join(f"{count} {status}" for status, count in event.data["counts"].items())
            return f"task {event.data['task_id']} is done: {counts}"
        case "gap":
            return (
                f"events {event.data['after']} to {event.data['oldest']} are no longer kept: read more often"
            )
    return f"{event.kind}: unknown event, this polarnode is older than the node"


def _group_line(data: Mapping[str, Any]) -> str:
    """A group's line; an older node sends no state."""
    rewards = " ".join(output.reward_text(reward) for reward in data["rewards"])
    state, reason = data.get("state"), data.get("reason")
    why = (
        ""
        if state is None
        else f", {harmless(state)}"
        if reason is None
        else f", {harmless(state)} ({harmless(reason)})"
    )
    return f"group {data['group_id']} is done{why}: rewards {rewards}"


def _trajectory_line(event: Event) -> str:
    value, trajectory = event.data, event.trajectory
    trainable = 0 if trajectory is None else trajectory.trainable_tokens
    head = (
        f"{value['session_id']} {harmless(value['harness']['name'])} {value['outcome']['status']} reward"
        f" {output.reward_text(value['reward'])}"
    )
    return f"{head} turns {len(value['turns'])} traces {len(value['traces'])} trainable {trainable}"


def export(query: Query, output: Path | None, node: RemoteNode) -> None:
    """Write the finished trajectories as the node sends them; a file is replaced when it is complete."""
    lines = 0
    pieces = node.client().export_bytes(**query)
    next(pieces)  # the node accepted the request; if it refuses, an existing file stays as it is
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
