"""The verbs that speak to a node which serves: submit, watch, export.

The rule for whoever edits it: the first word to a node is said without patience, so that a wrong address is one sentence at once; only what
follows waits for a node that restarts.
"""

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import click
from attrs import frozen

from polarnode.cli import tables
from polarnode.cli.files import read_task_file, written_whole
from polarnode.cli.printing import harmless, open_console
from polarnode.client import Event, PolarnodeClient
from polarnode.wire import Turns, dump_json

Filters = Mapping[str, Any]


@frozen(kw_only=True)
class Where:
    """A node that serves."""

    url: str
    token: str | None

    def client(self, *, patience_s: float = 0.0) -> PolarnodeClient:
        return PolarnodeClient(self.url, token=self.token, patience_s=patience_s)


def submit(file: Path, node: Where, *, samples: int | None) -> None:
    """Submit a task file; the task id on stdout, the rest on stderr, so that scripts can use it."""
    submitted = node.client().submit(read_task_file(file, samples=samples))
    click.echo(submitted.task_id)
    known = "" if submitted.created else " (it was there before)"
    click.echo(f"{len(submitted.session_ids)} sessions{known}; follow them with: polarnode watch --task {submitted.task_id}", err=True)


def watch(task_id: str | None, consumer: str | None, node: Where) -> None:
    """One line a trajectory as it comes; with a task, until that task is done."""
    node.client().status() if task_id is None else node.client().task(task_id)
    console = open_console()
    for event in node.client(patience_s=600.0).trajectories(consumer=consumer, task_id=task_id, ack=consumer is not None):
        console.print(line(event), soft_wrap=True, style="yellow" if event.kind == "gap" else "")


def line(event: Event) -> str:
    """An event in one line."""
    match event.kind:
        case "trajectory":
            return _trajectory_line(event)
        case "group":
            rewards = " ".join(tables.reward_text(reward) for reward in event.data["rewards"])
            return f"group {event.data['group_id']} is over: rewards {rewards}"
        case "task":
            counts = ", ".join(f"{count} {status}" for status, count in event.data["counts"].items())
            return f"task {event.data['task_id']} is over: {counts}"
        case "gap":
            return f"what lay between {event.data['after']} and {event.data['oldest']} is no longer kept: read more often, or acknowledge later"
    return f"{event.kind}: this polarnode is older than the node and does not know such events"


def _trajectory_line(event: Event) -> str:
    value, trajectory = event.data, event.trajectory
    trainable = 0 if trajectory is None else tables.trainable_tokens(trajectory)
    head = f"{value['session_id']} {harmless(value['harness']['name'])} {value['outcome']['status']} reward {tables.reward_text(value['reward'])}"
    return f"{head} turns {len(value['turns'])} traces {len(value['traces'])} trainable {trainable}"


def export(filters: Filters, turns: Turns, output: Path | None, node: Where) -> None:
    """Trajectories that are over, one JSON object a line; a file appears when it is whole."""
    count = 0
    with written_whole(output) if output is not None else nullcontext[BinaryIO](sys.stdout.buffer) as out:
        for value in node.client().export(**filters, turns=turns):
            out.write(dump_json(value) + b"\n")
            count += 1
    click.echo(f"{count} trajectories" + (f" in {output}" if output is not None else ""), err=True)
