"""`polarnode convert`: what a source becomes, as a table or as TaskSpecs in JSONL.

The rule for whoever edits it: a task is shown as it would be submitted, with everything that `run` would refuse refused here too.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

import click
from attrs import evolve
from rich.table import Table

from polarnode import wire
from polarnode.cli.files import Sources, build_images, checked, note_lines, written_whole
from polarnode.cli.printing import fitted, harmless, open_console
from polarnode.config import NodeConfig
from polarnode.errors import Refused
from polarnode.sources import SourcedTask, Unread
from polarnode.tasks import TaskSpec

NARROW_NAME = 24  # characters of a name where the whole table has no room


def convert(sources: Sources, config: NodeConfig, *, out: Path | None, skip: bool, build: bool) -> int:
    """Show or write what `sources` become; returns the exit code: 1 when a task can not be had."""
    own = evolve(config, import_paths=config.import_paths or ("*",))  # as `run`: whoever typed the command names the code
    tasks, refused = _converted(sources, own)
    for each in refused:
        click.echo(f"Error: {harmless(str(each))}", err=True)
    if refused and not skip:
        click.echo(f"{len(refused)} of {len(tasks) + len(refused)} tasks can not be converted; --skip goes on without them", err=True)
        return 1
    if build:
        build_images(tasks, own, say=lambda text: click.echo(f"· {text}", err=True))
    _show(tasks) if out is None else _write(tasks, out)
    return int(bool(refused))


def _converted(sources: Sources, config: NodeConfig) -> tuple[list[SourcedTask], list[Refused]]:
    tasks: list[SourcedTask] = []
    refused: list[Refused] = []
    for item in sources.items():
        try:
            if isinstance(item, Unread):
                raise item.refused
            tasks.append(checked(item, config=config, here=False))
        except Refused as error:
            refused.append(error)
    if not tasks and not refused:
        raise Refused(f"{', '.join(map(str, sources.paths))}: no task was found, or none that --only lets through")
    return tasks, refused


def _write(tasks: Sequence[SourcedTask], out: Path) -> None:
    dash = str(out) == "-"
    with written_whole(out) if not dash else nullcontext[BinaryIO](sys.stdout.buffer) as file:
        for task in tasks:
            file.write(wire.dump_json(wire.task_json(task.spec)) + b"\n")
    for line in note_lines(tasks):
        click.echo(f"· {harmless(line)}", err=True)
    click.echo(f"{len(tasks)} tasks" + ("" if dash else f" in {out}"), err=True)


def _show(tasks: Sequence[SourcedTask]) -> None:
    console = open_console()
    console.print(fitted(console, lambda narrow: _table(tasks, narrow=narrow)))
    for number, line in enumerate(_notes(tasks), start=1):
        console.print(f"note {number}: {harmless(line)}")
    for task in tasks:
        if task.build is not None:
            console.print(f"{task.name}: its image is built from {harmless(str(task.build.folder))}")


def _notes(tasks: Sequence[SourcedTask]) -> list[str]:
    return list(dict.fromkeys(note for task in tasks for note in task.notes))


def _table(tasks: Sequence[SourcedTask], *, narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("task", "harness", "image", "evaluator", "run", "post", "samples", "notes"):
        table.add_column(name, overflow="fold", no_wrap=name in ("run", "post", "samples"))
    known = _notes(tasks)
    for task in tasks:
        name = task.name[:NARROW_NAME] if narrow else task.name
        numbers = " ".join(str(known.index(note) + 1) for note in task.notes)
        table.add_row(*map(harmless, (name, *_cells(task.spec), numbers)))
    return table


def _cells(spec: TaskSpec) -> tuple[str, ...]:
    runtime, evaluator = spec.runtime, spec.evaluator
    judged = " + ".join(part.import_path or part.name for part in evaluator.parts) or evaluator.import_path or evaluator.name
    image = f"{runtime.image} + harness" if runtime.add_harness else runtime.image
    seconds = (f"{spec.budgets.run_s:g} s", f"{spec.budgets.post_s:g} s")
    return (spec.harness.import_path or spec.harness.name, image, judged, *seconds, str(spec.num_samples))
