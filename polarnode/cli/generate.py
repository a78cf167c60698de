"""`polarnode generate`: offline data from tasks, run on a temporary node in a folder that can be resumed.

Invariant: the node's journal in OUT/state is the only record of what is done, so that a `kill -9` loses only
running sessions. Every other file in OUT is written again from the journal, atomically, when the command
ends. Trajectories are read one at a time: memory is bounded by one row group and one session.

Conversations are also rendered with transformers, as an SFT trainer renders them, and compared with the
tokens the model saw. The comparison only reports: a template that refuses a line, or a checkpoint that cannot
be loaded, never fails the export.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import trio
from attrs import define, evolve, field, frozen
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from polarnode.cli.generate_run import GenerationRun, PendingWork, duration, list_attempts, run_work
from polarnode.cli.options import EXIT_INTERRUPTED, interrupted
from polarnode.cli.output import fit_table, harmless, open_console
from polarnode.cli.sources import (
    SourceSelection,
    build_images,
    checked,
    note_lines,
    require_images,
    written_whole,
)
from polarnode.core import codec
from polarnode.core.conversation import Json
from polarnode.core.errors import ConfigError, ModelError, boundary
from polarnode.core.trajectory import Trajectory
from polarnode.journal import queries
from polarnode.journal.journal import open_journal
from polarnode.journal.reader import JournalReader
from polarnode.node import checks
from polarnode.node.config import NodeConfig
from polarnode.offline.acceptance import AcceptanceResult, AcceptanceRule, judge, parse_acceptance
from polarnode.offline.generation import (
    ALL,
    GenerationTable,
    Slot,
    Split,
    TableRow,
    find_grouping,
    finished,
    list_slots,
    make_manifest,
    make_split,
    read_manifest,
)
from polarnode.offline.rows import (
    ROW_GROUP_TOKENS,
    Found,
    ParquetRow,
    SftLine,
    arrow,
    compared,
    rows_of,
    schema,
    sft_lines,
    table,
)
from polarnode.sources.values import SourcedTask
from polarnode.support.bounded import open_node_log

# ── template comparison ───────────────────────────────────────────────────────

MOST: Final = 100  # conversations to render: enough to estimate the share, at 60 ms per 100 KB
Render = Callable[[SftLine], "list[int]"]


@define(eq=False)
class TemplateComparison:
    """The comparison of rendered conversations with the sampled tokens: the number of lines that were `seen`,
    and their `counts` by result.

    `why`: why nothing could be compared, or why the template refused a line.
    """

    render: Render | None
    seen: int = 0
    counts: Counter[Found] = field(factory=Counter)
    why: str | None = None

    def compare(self, line: SftLine) -> None:
        """Render a line and count the result, up to MOST lines."""
        if self.render is None or self.seen >= MOST:
            return
        self.seen += 1
        try:
            # A template is code of the checkpoint and may raise any exception.
            with boundary(ModelError, "it cannot be rendered"):
                rendered = self.render(line)
        except ModelError as error:
            self.counts["refused"] += 1
            self.why = f"session {line.body['session_id']}: {error}"
            return
        self.counts[compared(line.token_ids, rendered).found] += 1

    def sentence(self) -> str | None:
        """The result as a sentence to print; None if nothing was compared."""
        if not self.seen:
            return self.why
        text = (
            f"of {self.seen} conversations, the chat template renders {self.counts['equal']} to exactly the"
            f" model's tokens, {self.counts['differs']} to others"
        )
        return text + (
            f", and refuses {self.counts['refused']}: {self.why}" if self.counts["refused"] else ""
        )

    def json(self) -> dict[str, Json]:
        """The result as it stands in table.json."""
        return {
            "compared": self.seen,
            **{found: self.counts[found] for found in ("equal", "differs", "refused")},
            "why": self.why,
        }


def open_comparison(model: Path) -> TemplateComparison:
    """A comparison with this checkpoint's template, which is loaded at the first line."""
    loaded: list[Any] = []

    def render(line: SftLine) -> list[int]:
        if not loaded:
            from transformers import AutoTokenizer

            loaded.append(AutoTokenizer.from_pretrained(str(model)))
        options = {} if line.thinking is None else {"enable_thinking": line.thinking}
        tools = line.body["tools"] or None
        rendered = loaded[0].apply_chat_template(
            line.body["messages"], tools=tools, tokenize=True, return_dict=False, **options
        )
        return list(rendered)

    return TemplateComparison(render=render)


# ── export ────────────────────────────────────────────────────────────────────

Rows = Literal["accepted", "all", "none"]
Side = Literal["", ".held-out"]
SPLIT_SIDES: Final[tuple[Side, Side]] = ("", ".held-out")
LISTED: Final = 20  # notes to print; the others are only counted


@frozen(kw_only=True)
class ExportOptions:
    """Which rows to write, the metadata key to group the table by (None: detected), and what to hold out."""

    rows: Rows = "accepted"
    by: str | None = None
    held_out_by: str | None = None
    held_out: float = 0.1


@frozen(kw_only=True)
class ExportResult:
    """What was written: `files` maps a file name to its number of rows; `words` is the comparison of
    conversations with tokens.
    """

    tally: GenerationTable
    files: dict[str, int]
    words: TemplateComparison
    split: Split
    notes: tuple[str, ...]


async def export(
    reader: JournalReader,
    slots: Sequence[Slot],
    *,
    acceptance: AcceptanceRule,
    options: ExportOptions,
    out: Path,
    model: Path,
) -> ExportResult:
    """Write every file from the journal."""
    metadata = [slot.spec.metadata for slot in slots]
    split = make_split(metadata, by=options.held_out_by, share=options.held_out)
    tally = GenerationTable(by=options.by or find_grouping(metadata))
    words = open_comparison(model)
    with ExitStack() as stack:
        files = DatasetFiles(out=out, options=options, split=split, words=words, stack=stack)
        for slot in slots:
            trajectory = await _last(reader, slot)
            if trajectory is not None:
                judged = judge(acceptance, trajectory)
                tally.add(trajectory, judged)
                files.write(trajectory, judged)
        files.flush()
        files.write_table(tally, acceptance)
    notes = files.notes[:LISTED] + (
        [f"… and {len(files.notes) - LISTED} more"] if len(files.notes) > LISTED else []
    )
    return ExportResult(tally=tally, files=dict(files.counts), words=words, split=split, notes=tuple(notes))


async def _last(reader: JournalReader, slot: Slot) -> Trajectory | None:
    """The last ended attempt at a slot, with the ids of the task and sample it stands for."""
    number, ended = 0, None
    while (record := await reader.query(queries.task, slot.named(number))) is not None:
        number += 1
        if record.sessions[0].outcome is not None:
            ended = record.sessions[0].session_id
    trajectory = await reader.query(queries.trajectory, ended) if ended is not None else None
    if trajectory is None:
        return None
    return evolve(trajectory, task_id=slot.task, group_id=slot.group, sample_index=slot.sample)


@define(eq=False)
class DatasetFiles:
    """The files being written; each replaces its old version when `stack` closes."""

    out: Path
    options: ExportOptions
    split: Split
    words: TemplateComparison
    stack: ExitStack
    counts: dict[str, int] = field(factory=dict)
    notes: list[str] = field(factory=list)
    _open: dict[str, BinaryIO] = field(factory=dict)
    _parquet: dict[Side, Any] = field(factory=dict)
    _waiting: dict[Side, list[ParquetRow]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """Open every file, also those that stay empty, so that no file of an earlier run remains."""
        self._file("accepted.jsonl")
        self._file("rejected.jsonl")
        for side in SPLIT_SIDES[: 2 if self.split.by else 1]:
            self._file(f"sft{side}.jsonl")
            if self.options.rows != "none":
                file = self._file(f"rows{side}.parquet")
                self._parquet[side] = self.stack.enter_context(_parquet(file))
                self._waiting[side] = []

    def write(self, trajectory: Trajectory, judged: AcceptanceResult) -> None:
        """Write one session: its line in a listing and, if it is data, its conversations and rows."""
        held_out = self.split.held_out(trajectory.metadata)
        side: Side = ".held-out" if held_out else ""
        self._line(
            "accepted.jsonl" if judged.accepted else "rejected.jsonl",
            _listed(trajectory, judged, held_out=held_out),
        )
        if judged.accepted:
            lines, missing = sft_lines(trajectory)
            self.notes += missing
            for line in lines:
                self.words.compare(line)
                self._line(f"sft{side}.jsonl", line.body)
        if self.options.rows == "all" or (judged.accepted and self.options.rows == "accepted"):
            self._keep(rows_of(trajectory, accepted=judged.accepted, held_out=held_out), side)

    def _keep(self, rows: list[ParquetRow], side: Side) -> None:
        waiting = self._waiting[side]
        for row in rows:
            waiting.append(row)
            if sum(each.tokens for each in waiting) >= ROW_GROUP_TOKENS:
                self._flush(side)

    def flush(self) -> None:
        """Write the rows that wait for a full row group."""
        for side in self._waiting:
            self._flush(side)

    def _flush(self, side: Side) -> None:
        waiting = self._waiting[side]
        if waiting:
            self._parquet[side].write_table(table(waiting))
            self.counts[f"rows{side}.parquet"] += len(waiting)
            waiting.clear()

    def write_table(self, tally: GenerationTable, acceptance: AcceptanceRule) -> None:
        """Write the table as table.json."""
        held_out: Json = {"by": self.split.by, "values": list[Json](sorted(self.split.values))}
        files: dict[str, Json] = dict(self.counts)
        body: Json = {
            "accept": acceptance.text,
            **tally.json(),
            "held_out": held_out,
            "files": files,
            "words": self.words.json(),
        }
        self._file("table.json").write(codec.dump_json(body) + b"\n")

    def _line(self, name: str, body: dict[str, Json]) -> None:
        self._open[name].write(codec.dump_json(body) + b"\n")
        self.counts[name] += 1

    def _file(self, name: str) -> BinaryIO:
        file = self._open[name] = self.stack.enter_context(written_whole(self.out / name))
        self.counts[name] = 0
        return file


def _parquet(file: BinaryIO) -> Any:
    arrow()
    import pyarrow.parquet as pq

    return pq.ParquetWriter(file, schema(), compression="zstd")


def _listed(trajectory: Trajectory, judged: AcceptanceResult, *, held_out: bool) -> dict[str, Json]:
    return {
        "session_id": trajectory.session_id,
        "task_id": trajectory.task_id,
        "sample_index": trajectory.sample_index,
        "reason": judged.reason,
        "because": judged.because,
        "reward": trajectory.reward,
        "outcome": codec.plain(trajectory.outcome),
        "turns": len(trajectory.turns),
        "traces": len(trajectory.traces),
        "sampled_tokens": trajectory.sampled_tokens,
        "run_s": trajectory.timing.run_s,
        "harness": trajectory.harness,
        "held_out": held_out,
        "metadata": codec.plain(trajectory.metadata),
    }


# ── table ─────────────────────────────────────────────────────────────────────


def shown(
    exported: ExportResult, result: GenerationRun, acceptance: AcceptanceRule, console: Console
) -> Iterator[RenderableType]:
    """The table, the totals and the files, to print."""
    tally, total = exported.tally, exported.tally.total
    yield fit_table(console, lambda narrow: acceptance_table(tally, narrow=narrow))
    yield Text("")
    yield Text(
        f"accepted by {acceptance.text}: {total.accepted} of {total.attempts} sessions ({percent(total)} %)"
    )
    yield Text(
        f"{total.turns} turns, {total.sampled_tokens} sampled tokens; harness time {duration(total.run_s)},"
        f" this run took {duration(result.wall_s)}"
    )
    if exported.split.by is not None:
        yield Text(f"held out by {exported.split.by}: {harmless(', '.join(sorted(exported.split.values)))}")
    sentence = exported.words.sentence()
    if sentence is not None:
        yield Text(harmless(sentence))
    for name, count in exported.files.items():
        if name != "table.json":
            yield Text(f"  {name}: {count} {'row' if count == 1 else 'rows'}")


def acceptance_table(tally: GenerationTable, *, narrow: bool = False) -> Table:
    """Attempts, acceptances and reasons of rejection: one row for each group and one for all."""
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=narrow, padding=(0, 1))
    table.add_column(tally.by or "", overflow="fold")
    reasons = tally.seen()
    for name in ("attempts", "accepted", "%", *reasons, "turns", "sampled tokens"):
        table.add_column(name.replace(" ", "\n") if narrow else name, justify="right", no_wrap=True)
    for group in tally.rows():
        figures = [
            str(group.attempts),
            str(group.accepted),
            percent(group),
            *(str(group.reasons[reason] or "–") for reason in reasons),
        ]
        style = "bold" if group.name == ALL else ""
        table.add_row(
            harmless(group.name), *figures, str(group.turns), str(group.sampled_tokens), style=style
        )
    return table


def percent(group: TableRow) -> str:
    """The accepted share in percent, with one decimal."""
    return f"{100 * group.share:.1f}"


# ── the command ─────────────────────────────────────────────────────────────────────────────────────

MANIFEST_FILE: Final = "generate.json"
REQUEST_OPTIONS: Final = ("accept", "retry_empty", "by", "held_out_by", "held_out", "rows", "out")


@frozen(kw_only=True)
class GenerationRequest:
    """The options of the command: which tasks run, where the data goes, and which sessions become data."""

    sources: SourceSelection
    out: Path
    acceptance: AcceptanceRule
    retry_empty: int
    export: ExportOptions


def make_request(sources: SourceSelection, **params: Any) -> GenerationRequest:
    """The request that the command's options make. Raises Refused if `accept` is not a valid expression."""
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
    """Run the missing sessions and write the data; returns the exit code."""
    if request.export.rows != "none":
        arrow()  # if pyarrow is missing, this fails now and not after hours of sessions
    # As in `polarnode run`, the user may import any code unless the config limits it.
    own = evolve(config, import_paths=config.import_paths or ("*",), state_dir=str(request.out / "state"))
    tasks = [checked(task, config=own, here=True) for task in request.sources.tasks()]
    console = open_console()
    _begin(request, own, tasks)
    slots = tuple(list_slots([(task.name, task.spec) for task in tasks]))
    work = trio.run(_work, own, request, slots)
    result = (
        _run_missing(own, work, tasks, console) if work.slots else GenerationRun(wall_s=0.0, stopped=False)
    )
    if result is None:
        console.print("stopped before any session began")
        return EXIT_INTERRUPTED
    exported = trio.run(_export_journal, own, request, slots)
    return _report(console, request, exported, result, slots)


def _begin(request: GenerationRequest, config: NodeConfig, tasks: Sequence[SourcedTask]) -> None:
    """Create the folder with its manifest, or check that an existing one was begun with the same tasks."""
    source = ", ".join(map(str, request.sources.paths))
    now = make_manifest(
        [(task.name, task.spec) for task in tasks], source=source, model=config.model, engine=config.engine
    )
    file = request.out / MANIFEST_FILE
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
    """The work that is still to be run, according to the journal."""
    async with open_journal(Path(config.state_dir) / "journal.sqlite", now=_no_clock) as journal:
        attempts = await list_attempts(journal.reader, slots, request.acceptance)
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
    """A clock for a journal that is only read, which never asks for the time."""
    return 0.0


def _run_missing(
    config: NodeConfig, work: PendingWork, tasks: Sequence[SourcedTask], console: Console
) -> GenerationRun | None:
    """Run the missing sessions. Returns None if stopped before any session began."""
    checks.refuse_unfit(config, tasks=True)
    require_images(tasks, config)
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


async def _export_journal(
    config: NodeConfig, request: GenerationRequest, slots: Sequence[Slot]
) -> ExportResult:
    async with open_journal(Path(config.state_dir) / "journal.sqlite", now=_no_clock) as journal:
        return await export(
            journal.reader,
            slots,
            acceptance=request.acceptance,
            options=request.export,
            out=request.out,
            model=Path(config.model),
        )


def _report(
    console: Console,
    request: GenerationRequest,
    exported: ExportResult,
    result: GenerationRun,
    slots: Sequence[Slot],
) -> int:
    for line in shown(exported, result, request.acceptance, console):
        console.print(line)
    console.print(request.out)
    missing = len(slots) - exported.tally.total.attempts
    for sentence in (*exported.notes, *_unfinished_notes(missing, result)):
        console.print(harmless(sentence), style="yellow")
    return int(result.stopped or bool(missing))


def _unfinished_notes(missing: int, result: GenerationRun) -> Sequence[str]:
    if not missing and not result.stopped:
        return ()
    return (f"{missing} sessions have not run; run the same command again to resume",)
