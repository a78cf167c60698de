"""`polarnode generate`: offline data from a source of tasks, on a node of its own, in a folder that can be
gone on with.

The rule for whoever edits it: OUT/state is the node's own journal and the only truth of what is done, so that
a `kill -9` at any moment costs the sessions under way and nothing else; everything else in OUT is made from
it anew, in one piece, whenever the command ends.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import trio
from attrs import evolve, frozen
from rich.console import Console

from polarnode.cli.generate_export import Exported, Wanted, export, shown
from polarnode.cli.generate_run import Made, Work, run_work, survey
from polarnode.cli.options import LEFT_BY_FORCE, left_by_force
from polarnode.cli.output import harmless, open_console
from polarnode.cli.sources import Sources, build_images, checked, note_lines, written_whole
from polarnode.core import codec
from polarnode.core.errors import ConfigError, boundary
from polarnode.journal.journal import open_journal
from polarnode.node.config import NodeConfig
from polarnode.offline.acceptance import Acceptance, parse_acceptance
from polarnode.offline.generation import Slot, finished, manifest_of, read_manifest, slots_of
from polarnode.offline.rows import arrow
from polarnode.sources.values import SourcedTask

MANIFEST: Final = "generate.json"
OPTIONS: Final = ("accept", "retry_empty", "by", "held_out_by", "held_out", "rows", "out")


@frozen(kw_only=True)
class Asked:
    """What the command line said of the data; of the tasks it said `sources`."""

    sources: Sources
    out: Path
    acceptance: Acceptance
    retry_empty: int
    wanted: Wanted


def asked(sources: Sources, **given: Any) -> Asked:
    """The command line's words. Refused for an acceptance that is no expression."""
    wanted = Wanted(
        rows=given["rows"], by=given["by"], held_out_by=given["held_out_by"], held_out=given["held_out"]
    )
    return Asked(
        sources=sources,
        out=given["out"],
        acceptance=parse_acceptance(given["accept"]),
        retry_empty=given["retry_empty"],
        wanted=wanted,
    )


def generate(config: NodeConfig, asked: Asked) -> int:
    """Generate, go on, or only look again at what is there; returns the exit code."""
    if asked.wanted.rows != "none":
        arrow()  # asked for now, and not after hours of sessions
    # as in `polarnode run`
    own = evolve(config, import_paths=config.import_paths or ("*",), state_dir=str(asked.out / "state"))
    tasks = [checked(task, config=own, here=True) for task in asked.sources.tasks()]
    console = open_console()
    _begin(asked, own, tasks)
    slots = tuple(slots_of([(task.name, task.spec) for task in tasks]))
    work = trio.run(_work, own, asked, slots)
    made = _generated(own, work, tasks, console) if work.slots else Made(wall_s=0.0, stopped=False)
    if made is None:
        console.print("stopped before any session began")
        return LEFT_BY_FORCE
    exported = trio.run(_export, own, asked, slots)
    return _report(console, asked, exported, made, slots)


def _begin(asked: Asked, config: NodeConfig, tasks: Sequence[SourcedTask]) -> None:
    """The folder, which is begun now, or was begun with the very same."""
    source = ", ".join(map(str, asked.sources.paths))
    now = manifest_of(
        [(task.name, task.spec) for task in tasks], source=source, model=config.model, engine=config.engine
    )
    file = asked.out / MANIFEST
    with boundary(ConfigError, f"--out {asked.out} can not be written"):
        Path(config.state_dir).mkdir(parents=True, exist_ok=True)
    if file.exists():
        read_manifest(codec.read_json(file.read_bytes()), folder=str(asked.out)).check(
            now, folder=str(asked.out)
        )
        return
    with written_whole(file) as out:
        out.write(codec.dump_json(now.json()) + b"\n")


async def _work(config: NodeConfig, asked: Asked, slots: Sequence[Slot]) -> Work:
    """What is still to run, by the journal."""
    async with open_journal(Path(config.state_dir) / "journal.sqlite", now=_no_clock) as journal:
        known = await survey(journal, slots, asked.acceptance)
    todo = [slot for slot in slots if not finished(known[slot], retry_empty=asked.retry_empty)]
    left = frozenset(todo)
    accepted = sum(known[slot][-1].accepted for slot in slots if slot not in left)
    return Work(
        slots=todo,
        acceptance=asked.acceptance,
        retry_empty=asked.retry_empty,
        done=len(slots) - len(todo),
        accepted=accepted,
    )


def _no_clock() -> float:
    """Nothing is written while a journal is only looked at."""
    return 0.0


def _generated(config: NodeConfig, work: Work, tasks: Sequence[SourcedTask], console: Console) -> Made | None:
    """Run what is still to run. None when it was stopped before a session began."""
    log = Path(config.state_dir) / "node.log"
    logging.basicConfig(
        filename=log, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    for line in note_lines(tasks):
        console.print(f"· {harmless(line)}", style="dim")
    console.print(
        f"· {work.done + len(work.slots)} sessions, {work.done} of them done before; the node's log is {log}",
        style="dim",
    )
    build_images(tasks, config, say=lambda text: console.print(f"· {text}", style="dim"))
    try:
        return trio.run(run_work, config, work, console)
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        if left_by_force(error):
            console.print("left at once: the same command goes on where it was")
        raise


async def _export(config: NodeConfig, asked: Asked, slots: Sequence[Slot]) -> Exported:
    async with open_journal(Path(config.state_dir) / "journal.sqlite", now=_no_clock) as journal:
        return await export(
            journal,
            slots,
            acceptance=asked.acceptance,
            wanted=asked.wanted,
            out=asked.out,
            model=Path(config.model),
        )


def _report(console: Console, asked: Asked, exported: Exported, made: Made, slots: Sequence[Slot]) -> int:
    for line in shown(exported, made, asked.acceptance, console):
        console.print(line)
    console.print(asked.out)
    missing = len(slots) - exported.tally.total.attempts
    for sentence in (*exported.notes, *_unfinished(missing, made)):
        console.print(harmless(sentence), style="yellow")
    return int(made.stopped or bool(missing))


def _unfinished(missing: int, made: Made) -> Sequence[str]:
    if not missing and not made.stopped:
        return ()
    return (f"not all sessions ran: {missing} were not begun; the same command goes on where it was",)
