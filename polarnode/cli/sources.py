"""Tasks from sources, the images they need, atomic output files, and `polarnode convert`.

`convert` shows a task as it would be submitted. Invariant: what `run` refuses, `convert` refuses too.
"""

import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

import click
from attrs import evolve, field, frozen
from rich.table import Table

from polarnode.cli.output import fit_table, harmless, open_console
from polarnode.containers.user_namespace import enter_user_namespace
from polarnode.core import codec
from polarnode.core.errors import ConfigError, Refused, boundary
from polarnode.core.task import RuntimeSpec, TaskSpec
from polarnode.node.config import NodeConfig
from polarnode.sources.source import read_source
from polarnode.sources.values import ImageBuild, Kind, Overrides, SourcedTask, UnreadTask

# ── tasks and files ───────────────────────────────────────────────────────────

ANY_CONTEXT = 32_768  # tokens; used for an unknown context length while a task is checked


@frozen(kw_only=True)
class SourceSelection:
    """The sources of a command: paths, their format, and what to change in each task."""

    paths: tuple[Path, ...]
    kind: Kind | None = None
    overrides: Overrides = field(factory=Overrides)

    def items(self) -> Iterator[SourcedTask | UnreadTask]:
        """Every task of every path; a task that cannot be read is an `UnreadTask`."""
        for path in self.paths:
            yield from read_source(path, kind=self.kind, overrides=self.overrides).items()

    def tasks(self) -> list[SourcedTask]:
        """Every task of the paths. Refused at the first that cannot be read, or for a path without tasks."""
        return [
            task
            for path in self.paths
            for task in read_source(path, kind=self.kind, overrides=self.overrides).tasks()
        ]


def checked(task: SourcedTask, *, config: NodeConfig, here: bool) -> SourcedTask:
    """Check a task before anything starts and return it; Refused when a node would refuse it.

    `here`: it will run on a node of this config. Otherwise what depends on the node's settings (judges,
    volumes, egress) is left to that node.
    """
    # This is part of `polarnode[node]`, as is the code that builds images.
    from polarnode.rollouts.admission import admitted

    try:
        admitted(
            task.spec,
            model=Path(config.model).name,
            context_length=config.context_length or ANY_CONTEXT,
            allowed_imports=config.import_paths,
            judges=tuple(config.judges) if here else None,
            volumes=config.volumes if here else None,
            egress=config.egress if here else None,
        )
    except Refused as refused:
        raise Refused(f"{task.origin}: {refused}", path=refused.path) from refused
    return task


def note_lines(tasks: Sequence[SourcedTask]) -> list[str]:
    """The notes of these tasks, each once, with the number of tasks it applies to."""
    counts = Counter(note for task in tasks for note in task.notes)
    return [
        note if count == len(tasks) else f"{note} ({count} of {len(tasks)} tasks)"
        for note, count in counts.items()
    ]


def build_images(tasks: Sequence[SourcedTask], config: NodeConfig, report: Callable[[str], None]) -> None:
    """Build, on this machine, the images of tasks that come with a build folder."""
    builds = [task.build for task in tasks if task.build is not None]
    if builds:
        build_folders(builds, config, report)


def require_images(tasks: Sequence[SourcedTask], config: NodeConfig) -> None:
    """Raise Refused for the first task whose image is neither a recipe nor in this node's store, so that no
    engine starts for minutes in vain.
    """
    import trio

    from polarnode.containers.images import Images
    from polarnode.node.settings import runtimes_settings

    named = {task.spec.runtime.image: task for task in tasks if task.build is None}
    named.pop(RuntimeSpec().image, None)
    if not named:
        return
    log = Path(config.state_dir) / "images.log"
    images = Images(settings=runtimes_settings(config), log=log, report=click.echo)

    async def check_images() -> None:
        for name, task in named.items():
            if (why := await images.refusal(name)) is not None:
                raise Refused(f"{task.origin}: runtime.image: {why}", path="$.runtime.image")

    trio.run(check_images)


def build_folders(
    builds: Sequence[ImageBuild], config: NodeConfig, report: Callable[[str], None], *, again: bool = False
) -> None:
    """Build images in the store of a node, on this machine. If `again` is set, existing images are built
    again.
    """
    import trio

    from polarnode.cli.progress import Steps
    from polarnode.containers.images import build_task_images
    from polarnode.node.settings import runtimes_settings  # slow to import, so only when images are built

    enter_user_namespace()
    settings = evolve(runtimes_settings(config), limits="best_effort")  # a build is not a session
    log = Path(config.state_dir) / "images.log"
    with boundary(ConfigError, f"{log.parent} cannot be written: set POLARNODE_STATE_DIR to another folder"):
        log.parent.mkdir(parents=True, exist_ok=True)
    steps = Steps(report, hint=f"log: {log}")

    async def build() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(steps.show)
            await build_task_images(settings, builds, log=log, report=steps.report, again=again)
            steps.end()

    trio.run(build)


@contextmanager
def written_whole(file: Path) -> Iterator[BinaryIO]:
    """Write a file atomically: it replaces `file` when the block ends without an error. Raises Refused, with
    the reason, if it cannot be written.

    A link is followed: the file that it names is replaced in its place and keeps its permissions. Anything
    but a plain file (a device, a pipe, this program's own stdout) is written to and never replaced.
    """
    try:
        with _replace_plain_file(file.resolve()) if _is_replaceable(file) else _write_into(file) as out:
            yield out
    except OSError as error:
        raise Refused(f"{file} cannot be written: {error.strerror}") from error


def _is_replaceable(file: Path) -> bool:
    """Whether a path is a plain file or does not exist yet, and is not the file that stdout writes to."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(found.st_mode) and not _is_stdout(found)


def _is_stdout(found: os.stat_result) -> bool:
    """Whether a file is the one that stdout writes to: /dev/stdout then appends, as a shell's `>>` does."""
    try:
        return os.path.samestat(found, os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError):  # stdout is closed, or replaced by an object without a file
        return False


@contextmanager
def _write_into(file: Path) -> Iterator[BinaryIO]:
    if _is_stdout(file.stat()):
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with file.open("wb") as out:
        yield out


@contextmanager
def _replace_plain_file(file: Path) -> Iterator[BinaryIO]:
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as out:
            if file.exists():
                os.fchmod(out.fileno(), stat.S_IMODE(file.stat().st_mode))
            yield out
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


# ── convert ───────────────────────────────────────────────────────────────────

NARROW_NAME = 24  # characters of a task's name in the narrow table


def convert(
    sources: SourceSelection, config: NodeConfig, *, out: Path | None, skip: bool, build: bool
) -> int:
    """Show the tasks of `sources` or write them; returns the exit code, 1 if one cannot be converted."""
    # As in `run`, the user may import any code unless the config limits it.
    own = evolve(config, import_paths=config.import_paths or ("*",))
    tasks, refused = _converted(sources, own)
    for each in refused:
        click.echo(f"Error: {harmless(str(each))}", err=True)
    if refused and not skip:
        click.echo(
            f"{len(refused)} of {len(tasks) + len(refused)} tasks cannot be converted; --skip-invalid"
            " continues without them",
            err=True,
        )
        return 1
    if build:
        build_images(tasks, own, report=lambda text: click.echo(f"· {harmless(text)}", err=True))
    _show(tasks) if out is None else _write(tasks, out)
    return int(bool(refused))


def _converted(sources: SourceSelection, config: NodeConfig) -> tuple[list[SourcedTask], list[Refused]]:
    tasks: list[SourcedTask] = []
    refused: list[Refused] = []
    for item in sources.items():
        try:
            if isinstance(item, UnreadTask):
                raise item.refused
            tasks.append(checked(item, config=config, here=False))
        except Refused as error:
            refused.append(error)
    if not tasks and not refused:
        raise Refused(
            f"{', '.join(map(str, sources.paths))}: no task found, or none whose name matches --only"
        )
    return tasks, refused


def _write(tasks: Sequence[SourcedTask], out: Path) -> None:
    dash = str(out) == "-"
    with written_whole(out) if not dash else nullcontext[BinaryIO](sys.stdout.buffer) as file:
        for task in tasks:
            file.write(codec.dump_json(codec.task_json(task.spec)) + b"\n")
    for line in note_lines(tasks):
        click.echo(f"· {harmless(line)}", err=True)
    click.echo(f"{len(tasks)} tasks" + ("" if dash else f" in {out}"), err=True)


def _show(tasks: Sequence[SourcedTask]) -> None:
    console = open_console()
    console.print(fit_table(console, lambda narrow: _table(tasks, narrow=narrow)))
    for number, line in enumerate(_distinct_notes(tasks), start=1):
        console.print(f"note {number}: {harmless(line)}")
    for task in tasks:
        if task.build is not None:
            console.print(f"{task.name}: image is built from {harmless(str(task.build.folder))}")


def _distinct_notes(tasks: Sequence[SourcedTask]) -> list[str]:
    return list(dict.fromkeys(note for task in tasks for note in task.notes))


def _table(tasks: Sequence[SourcedTask], *, narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("task", "harness", "image", "evaluator", "run", "post", "samples", "notes"):
        table.add_column(name, overflow="fold", no_wrap=name in ("run", "post", "samples"))
    notes = _distinct_notes(tasks)
    for task in tasks:
        name = task.name[:NARROW_NAME] if narrow else task.name
        numbers = " ".join(str(notes.index(note) + 1) for note in task.notes)
        table.add_row(*map(harmless, (name, *_cells(task.spec), numbers)))
    return table


def _cells(spec: TaskSpec) -> tuple[str, ...]:
    runtime, evaluator = spec.runtime, spec.evaluator
    evaluators = (
        " + ".join(part.import_path or part.name for part in evaluator.parts)
        or evaluator.import_path
        or evaluator.name
    )
    image = f"{runtime.image} + harness" if runtime.add_harness else runtime.image
    seconds = (f"{spec.budgets.run_s:g} s", f"{spec.budgets.post_s:g} s")
    return (spec.harness.import_path or spec.harness.name, image, evaluators, *seconds, str(spec.num_samples))
