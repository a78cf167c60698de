"""The commands that send something to a running node or take its data: `submit`, `export` and `evaluate`.

The first request to a node is not retried, so that a wrong address is reported at once. Only later requests
wait for a node that restarts.
"""

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import click
from attrs import frozen
from rich.table import Table

from polarnode.cli import output
from polarnode.cli.output import bounded, harmless, open_console
from polarnode.cli.sources import SourceSelection, build_images, note_lines, written_whole
from polarnode.client.blocking import PolarnodeClient
from polarnode.client.values import NodeStarts
from polarnode.core import codec
from polarnode.core.errors import Refused
from polarnode.core.status import Submitted
from polarnode.core.task import EvaluatorSpec, ForkWay
from polarnode.node.config import NodeConfig
from polarnode.sources.values import SourcedTask

Query = Mapping[str, Any]
# The names of the lines of an export, by its format or kind.
LINES = {"sft": "conversations", "rewards": "rewards"}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Seconds between two requests to a node that is starting, which takes seconds to minutes, and between two
# lines of output.
STARTED_S, START_NOTICE_S = 1.0, 15.0


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

    def wait_started(self) -> None:
        """Wait for a node that is starting, and print that. Raises Unreachable at once if there is no
        node.
        """
        said = -math.inf
        while True:
            try:
                self.client().status()
            except NodeStarts as starting:
                if time.monotonic() - said >= START_NOTICE_S:
                    said = time.monotonic()
                    click.echo(f"· waiting: {harmless(str(starting))}", err=True)
                time.sleep(STARTED_S)
            else:
                return


def submit(sources: SourceSelection, node: RemoteNode, config: NodeConfig) -> None:
    """Submit the tasks of sources. Task ids go to stdout for scripts, everything else to stderr.

    Images that tasks need are built here when the node is on this machine; otherwise the user is told which
    images to build there.
    """
    tasks = sources.tasks()
    node.wait_started()
    for note in note_lines(tasks):
        click.echo(f"· {harmless(note)}", err=True)
    if node.local:
        build_images(tasks, config, report=lambda text: click.echo(f"· {harmless(text)}", err=True))
    else:
        _list_images(tasks)
    submitted = [_submit_task(task, node) for task in tasks]
    sessions = sum(len(each.session_ids) for each in submitted)
    existing = sum(not each.created for each in submitted)
    was = (
        ""
        if not existing
        else " (submitted before)"
        if len(submitted) == 1
        else f" ({existing} tasks were submitted before)"
    )
    which = f" --task {harmless(submitted[0].task_id)}" if len(submitted) == 1 else ""
    count = "" if len(submitted) == 1 else f"{len(submitted)} tasks, "
    click.echo(f"{count}{sessions} sessions{was}; follow them with: polarnode watch{which}", err=True)


def fork(
    session: str,
    node: RemoteNode,
    *,
    turn: int,
    num_samples: int,
    by: ForkWay,
    as_json: bool,
) -> None:
    """Submit a task of forks. Its id goes to stdout for scripts, and the rest to stderr."""
    found = node.client().fork(session, turn, num_samples=num_samples, by=by)
    click.echo(codec.dump_json(codec.plain(found)) if as_json else harmless(found.task_id))
    click.echo(
        f"{len(found.session_ids)} forks of {harmless(session)} before its turn {turn}; follow them with:"
        f" polarnode watch --task {harmless(found.task_id)}",
        err=True,
    )


def _submit_task(task: SourcedTask, node: RemoteNode) -> Submitted:
    submitted = node.client().submit(task.spec)
    click.echo(harmless(submitted.task_id))
    return submitted


def _list_images(tasks: Sequence[SourcedTask]) -> None:
    for build in {task.build.image: task.build for task in tasks if task.build is not None}.values():
        click.echo(
            f"· the node's machine needs the image {build.image}, built from {harmless(str(build.folder))}:"
            " run `polarnode convert --build` on the same tasks there",
            err=True,
        )


def export(query: Query, output: Path | None, node: RemoteNode) -> None:
    """Write the finished trajectories as the node sends them; a file is replaced when it is complete."""
    lines = 0
    if query.get("task_id") is not None:
        node.client().task(query["task_id"])  # an unknown task is refused, instead of giving an empty file
    pieces = node.client().export_bytes(**query)
    next(pieces)  # the node accepted the request; if it refuses, an existing file stays as it is
    with written_whole(output) if output is not None else nullcontext[BinaryIO](sys.stdout.buffer) as out:
        for piece in pieces:
            out.write(piece)
            lines += piece.count(b"\n")
    what = (
        "token rows"
        if query.get("format") == "parquet"
        else f"{lines} {LINES.get(str(query.get('kind')), 'trajectories')}"
    )
    click.echo(what + (f" in {output}" if output is not None else ""), err=True)


def trajectory_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a trajectories.jsonl. Raises Refused, naming the line."""
    content = file.read_bytes()
    if not content.strip():
        raise Refused(f"{file} is empty: it holds no trajectory")
    for number, line in enumerate(content.splitlines(), 1):
        try:
            value = codec.read_json(line)
        except Refused as refused:
            fault = str(refused).replace("the body", "it")
            raise Refused(f"line {number} of {file}: {fault}; give a trajectories.jsonl") from refused
        if isinstance(value, dict) and value.keys() == {"unreadable"}:
            continue  # such a line stands in place of a damaged trajectory
        if not isinstance(value, dict) or not isinstance(value.get("session_id"), str):
            raise Refused(f"line {number} of {file} is no trajectory: give a trajectories.jsonl")
        yield value


# ── evaluations ───────────────────────────────────────────────────────────────


def evaluate(
    sessions: Sequence[str],
    file: Path | None,
    evaluator: Path | None,
    node: RemoteNode,
    *,
    as_json: bool,
    named: Mapping[str, Any],
) -> int:
    """Evaluate finished sessions again and print their rewards; returns the exit code, 1 if a session got no
    reward.
    """
    listed = () if file is None else tuple(str(value.get("session_id")) for value in trajectory_lines(file))
    spec = None
    if evaluator is not None:  # the evaluator's fields, or a task's table of them
        value = codec.read_toml_value(evaluator.read_text())
        spec = codec.structure(value.get("evaluator", value), EvaluatorSpec, forbid_extra=True)
    begun = node.client().evaluate(*sessions, *listed, evaluator=spec, **named)
    click.echo(f"· {begun.evaluation_id}: {len(begun.sessions)} sessions", err=True)
    found = node.client(patience_s=600.0).evaluation(begun.evaluation_id, wait=True)
    if as_json:
        click.echo(codec.dump_json(codec.plain(found)))
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("session", "first reward", "new reward", "why not"):
            table.add_column(name, justify="right" if name.endswith("reward") else "left", overflow="fold")
        shown, more = bounded(found.sessions)
        for each in shown:
            rewards = (output.reward_text(each.first_reward), output.reward_text(each.reward))
            table.add_row(harmless(each.session_id), *rewards, harmless(each.error or ""))
        open_console().print(table, *more, sep="\n")
    return 0 if set(found.counts) == {"evaluated"} else 1
