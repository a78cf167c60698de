"""The verbs that speak to a node which serves: submit, watch, export."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import click
from rich.console import Console

from polarnode.cli import tables
from polarnode.cli.files import read_task_file
from polarnode.client import PolarnodeClient

console = Console(highlight=False)


def submit(file: Path, url: str, token: str | None) -> None:
    """Submit a task file; the task id on stdout, the rest on stderr, so that scripts can use it."""
    submitted = PolarnodeClient(url, token=token).submit(read_task_file(file))
    click.echo(submitted.task_id)
    click.echo(f"{len(submitted.session_ids)} sessions; follow them with: polarnode watch --task {submitted.task_id}", err=True)


def watch(task_id: str | None, consumer: str | None, url: str, token: str | None) -> None:
    """One line a trajectory as it comes; with a task, until that task is done."""
    client = PolarnodeClient(url, token=token)
    for event in client.trajectories(consumer=consumer, task_id=task_id, ack=consumer is not None):
        trajectory = event.trajectory
        if trajectory is not None:
            reward = "–" if trajectory.reward is None else f"{trajectory.reward:g}"
            line = f"{trajectory.session_id} {trajectory.harness} {trajectory.outcome.status} reward {reward}"
            console.print(f"{line} turns {len(event.data['turns'])} traces {len(trajectory.traces)} trainable {tables.trainable_tokens(trajectory)}")
        elif event.kind == "gap":
            console.print("some trajectories were dropped before this reader came: see retention", style="yellow")


def export(task_id: str | None, output: Path | None, url: str, token: str | None) -> None:
    """All finished trajectories, one JSON object a line."""
    count = 0
    with output.open("w") if output is not None else nullcontext(sys.stdout) as out:
        for value in PolarnodeClient(url, token=token).export(task_id=task_id):
            out.write(json.dumps(value) + "\n")
            count += 1
    click.echo(f"{count} trajectories", err=True)
