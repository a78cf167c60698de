"""`polarnode generate`: offline data from tasks, run on a temporary node in a folder that can be resumed.

Invariant: the node's journal in OUT/state is the only record of what is done, so that a `kill -9` loses only
running sessions. Every other file in OUT is written again from the journal, atomically, when the command
ends.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import trio
from attrs import evolve, frozen
from rich.console import Console

from polarnode.cli.generate_export import Exported, ExportOptions, export, shown
from polarnode.cli.generate_run import GenerationRun, PendingWork, run_work, survey
from polarnode.cli.options import EXIT_INTERRUPTED, interrupted
from polarnode.cli.output import harmless, open_console
from polarnode.cli.sources import SourceSelection, build_images, checked, note_lines, written_whole
from polarnode.core import codec
from polarnode.core.errors import ConfigError, boundary
from polarnode.journal.journal import open_journal
from polarnode.node.config import NodeConfig
from polarnode.offline.acceptance import Acceptance, parse_acceptance
from polarnode.offline.generation import Slot, finished, manifest_of, read_manifest, slots_of
from polarnode.offline.rows import arrow
from polarnode.sources.values import SourcedTask
from polarnode.support.bounded import open_node_log

MANIFEST: Final = "generate.json"
OPTIONS: Final = ("accept", "retry_empty", "by", "held_out_by", "held_out", "rows", "out")


@frozen(kw_only=True)
class GenerationRequest:
    """The options of the command: which tasks, where the data goes, and which sessions become data."""

    sources: SourceSelection
    out: Path
    acceptance: Acceptance
    retry_empty: int
    export: ExportOptions


def request_of(sources: SourceSelection, **params: Any) -> GenerationRequest:
    """The request in the command's options. Refused if `accept` is no valid expression."""
    return GenerationRequest(
        sources=sources,
        out=params["out"],
        acceptance=parse_acceptance(params["accept"]),
        retry_empty=params["retry_empty"],
        export=ExportOptions(
            rows=params["rows"],
            by=params["by"],
            held_out_by=params["held_out_by"],
            held_out=params["held_out"],
        ),
    )


def generate(config: NodeConfig, request: GenerationRequest) -> int:
    """Run what is missing and write the data; returns the exit code."""
    if request.export.rows != "none":
        arrow()  # fails now if pyarrow is missing, not after hours of sessions
    # as in `polarnode run`: the user may import any code unless the config limits it
    own = evolve(config, import_paths=config.import_paths or ("*",), state_dir=str(request.out / "state"))
    tasks = [checked(task, config=own, here=True) for task in request.sources.tasks()]
    console = open_console()
    _begin(request, own, tasks)
    slots = tuple(slots_of([(task.name, task.spec) for task in tasks]))
    work = trio.run(_work, own, request, slots)
    result = _generated(own, work, tasks, console) if work.slots else GenerationRun(wall_s=0.0, stopped=False)
    if result is None:
        console.print("stopped before any session began")
        return EXIT_INTERRUPTED
    exported = trio.run(_export, own, request, slots)
    return _report(console, request, exported, result, slots)


def _begin(request: GenerationRequest, config: NodeConfig, tasks: Sequence[SourcedTask]) -> None:
    """Create the folder with its manifest, or check that an existing one was begun with the same tasks."""
    source = ", ".join(map(str, request.sources.paths))
    now = manifest_of(
        [(task.name, task.spec) for task in tasks], source=source, model=config.model, engine=config.engine
    )
    file = request.out / MANIFEST
    with boundary(ConfigError, f"--out {request.out} cannot be written"):
        Path(config.state_dir).mkdir(parents=True, exist_ok=True)
    if file.exists():
        read_manifest(codec.read_json(file.read_bytes()), folder=str(request.out)).check(
            now, folder=str(request.out)
        )
        return
    with written_whole(file) as out:
        out.write(codec.dump_json(now.json()) + b"\n")


async def _work(config: NodeConfig, request: GenerationRequest, slots: Sequence[Slot]) -> PendingWork:
    """What is still to run, according to the journal."""
    async with open_journal(Path(config.state_dir) / "journal.sqlite", now=_no_clock) as journal:
        attempts = await survey(journal, slots, request.acceptance)
    todo = [slot for slot in slots if not finished(attempts[slot], retry_empty=request.retry_empty)]
    missing = frozenset(todo)
    accepted = sum(attempts[slot][-1].accepted for slot in slots if slot not in missing)
    return PendingWork(
        slots=todo,
        acceptance=request.acceptance,
        retry_empty=request.retry_empty,
        done=len(slots) - len(todo),
        accepted=accepted,
    )


def _no_clock() -> float:
    """A clock for reading a journal: reading needs none."""
    return 0.0


def _generated(
    config: NodeConfig, work: PendingWork, tasks: Sequence[SourcedTask], console: Console
) -> GenerationRun | None:
    """Run what is missing; None when stopped before any session began."""
    log = Path(config.state_dir) / "node.log"
    with boundary(ConfigError, f"--out {log.parent} cannot be written"):
        open_node_log(log.parent)
    for line in note_lines(tasks):
        console.print(f"· {harmless(line)}", style="dim")
    console.print(
        f"· {work.done + len(work.slots)} sessions, {work.done} of them already done; log: {log}",
        style="dim",
    )
    build_images(tasks, config, report=lambda text: console.print(f"· {text}", style="dim"))
    try:
        return trio.run(run_work, config, work, console)
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        if interrupted(error):
            console.print("exited at once: run the same command again to resume")
        raise


async def _export(config: NodeConfig, request: GenerationRequest, slots: Sequence[Slot]) -> Exported:
    async with open_journal(Path(config.state_dir) / "journal.sqlite", now=_no_clock) as journal:
        return await export(
            journal,
            slots,
            acceptance=request.acceptance,
            options=request.export,
            out=request.out,
            model=Path(config.model),
        )


def _report(
    console: Console,
    request: GenerationRequest,
    exported: Exported,
    result: GenerationRun,
    slots: Sequence[Slot],
) -> int:
    for line in shown(exported, result, request.acceptance, console):
        console.print(line)
    console.print(request.out)
    missing = len(slots) - exported.tally.total.attempts
    for sentence in (*exported.notes, *_unfinished(missing, result)):
        console.print(harmless(sentence), style="yellow")
    return int(result.stopped or bool(missing))


def _unfinished(missing: int, result: GenerationRun) -> Sequence[str]:
    if not missing and not result.stopped:
        return ()
    return (f"{missing} sessions have not run; run the same command again to resume",)
