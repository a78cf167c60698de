"""How the conversations of a generation compare with the tokens they were: rendered by transformers, as an
SFT trainer will render them.

The rule for whoever edits it: it reports and changes nothing. A template that refuses a line, or a checkpoint
that can not be loaded, is said and not raised: the data is there all the same.

What a generation leaves in its folder: conversations, rows of tokens, what was accepted and what was not, and
the table.

Read from the journal, one trajectory at a time. The rule for whoever edits it: memory is bounded by a row
group and one session, however many there are; a file takes its name when it is whole, so that what an earlier
run wrote stays until then.

The table of a generation, for a person. Pure: what was exported in, rich renderables out.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from attrs import define, evolve, field, frozen
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from polarnode.cli.generate_run import Made, duration
from polarnode.cli.output import fitted, harmless
from polarnode.cli.sources import written_whole
from polarnode.core import codec
from polarnode.core.conversation import Json
from polarnode.core.errors import ModelError, boundary
from polarnode.core.trajectory import Trajectory
from polarnode.journal.journal import Journal
from polarnode.offline.acceptance import Acceptance, AcceptanceResult, judge
from polarnode.offline.generation import ALL, GenerationTable, Slot, Split, TableRow, grouping_of, split_of
from polarnode.offline.rows import GROUP_TOKENS, ParquetRow, arrow, rows_of, schema, table
from polarnode.offline.sft import Found, SftLine, compared, sft_lines

# ── words ────────────────────────────────────────────────────────────

MOST: Final = 100  # lines that are rendered: 60 ms for each 100 KB, and the share is known long before
Render = Callable[[SftLine], "list[int]"]


@define(eq=False)
class Words:
    """What was compared: of `seen` lines, `counts` by what was found. `why` is why nothing could be compared,
    or what refused a line.
    """

    render: Render | None
    seen: int = 0
    counts: Counter[Found] = field(factory=Counter)
    why: str | None = None

    def compare(self, line: SftLine) -> None:
        """Render a line and count what came of it, as long as there are few."""
        if self.render is None or self.seen >= MOST:
            return
        self.seen += 1
        try:
            # a template is a checkpoint's own code, and raises what it likes
            with boundary(ModelError, "it can not be rendered"):
                rendered = self.render(line)
        except ModelError as error:
            self.counts["refused"] += 1
            self.why = f"session {line.body['session_id']}: {error}"
            return
        self.counts[compared(line.token_ids, rendered).found] += 1

    def sentence(self) -> str | None:
        """For a person; None where nothing was compared."""
        if not self.seen:
            return self.why
        said = (
            f"of {self.seen} conversations, the chat template renders {self.counts['equal']} to the very"
            " tokens the model had"
        )
        return f"{said}, {self.counts['differs']} otherwise" + (
            f", and refuses {self.counts['refused']}: {self.why}" if self.counts["refused"] else ""
        )

    def json(self) -> dict[str, Json]:
        """As JSON."""
        return {
            "compared": self.seen,
            **{found: self.counts[found] for found in ("equal", "differs", "refused")},
            "why": self.why,
        }


def open_words(model: Path) -> Words:
    """Ready to compare with this checkpoint's template. It is loaded when the first line comes."""
    loaded: list[Any] = []

    def render(line: SftLine) -> list[int]:
        if not loaded:
            from transformers import AutoTokenizer

            loaded.append(AutoTokenizer.from_pretrained(str(model)))
        options = {} if line.thinking is None else {"enable_thinking": line.thinking}
        tools = line.body["tools"] or None
        found = loaded[0].apply_chat_template(
            line.body["messages"], tools=tools, tokenize=True, return_dict=False, **options
        )
        return list(found)

    return Words(render=render)


# ── export ────────────────────────────────────────────────────────────

Rows = Literal["accepted", "all", "none"]
Side = Literal["", ".held-out"]
SIDES: Final[tuple[Side, Side]] = ("", ".held-out")
LISTED: Final = 20  # notes shown; the rest is a count


@frozen(kw_only=True)
class Wanted:
    """Which rows are written, by which metadata key the table is grouped (None: the first that is known), and
    what is held out.
    """

    rows: Rows = "accepted"
    by: str | None = None
    held_out_by: str | None = None
    held_out: float = 0.1


@frozen(kw_only=True)
class Exported:
    """What was written. `files` by name with their rows; `words` is how the conversations compare with the
    tokens.
    """

    tally: GenerationTable
    files: dict[str, int]
    words: Words
    split: Split
    notes: tuple[str, ...]


async def export(
    journal: Journal, slots: Sequence[Slot], *, acceptance: Acceptance, wanted: Wanted, out: Path, model: Path
) -> Exported:
    """Write everything anew from what the journal holds."""
    metadata = [slot.spec.metadata for slot in slots]
    split = split_of(metadata, by=wanted.held_out_by, share=wanted.held_out)
    tally = GenerationTable(by=wanted.by or grouping_of(metadata))
    words = open_words(model)
    with ExitStack() as stack:
        files = Files(out=out, wanted=wanted, split=split, words=words, stack=stack)
        for slot in slots:
            trajectory = await _last(journal, slot)
            if trajectory is not None:
                judged = judge(acceptance, trajectory)
                tally.add(trajectory, judged)
                files.write(trajectory, judged)
        files.flush()
        files.tell(tally, acceptance)
    notes = files.notes[:LISTED] + (
        [f"… and {len(files.notes) - LISTED} more"] if len(files.notes) > LISTED else []
    )
    return Exported(tally=tally, files=dict(files.counts), words=words, split=split, notes=tuple(notes))


async def _last(journal: Journal, slot: Slot) -> Trajectory | None:
    """The last attempt at a slot that ended, as the sample of its task that it is."""
    number, found = 0, None
    while (record := await journal.task(slot.named(number))) is not None:
        number += 1
        if record.sessions[0].outcome is not None:
            found = record.sessions[0].session_id
    trajectory = await journal.trajectory(found) if found is not None else None
    if trajectory is None:
        return None
    return evolve(trajectory, task_id=slot.task, group_id=slot.group, sample_index=slot.sample)


@define(eq=False)
class Files:
    """The files that are being written; each takes its name when the stack is left."""

    out: Path
    wanted: Wanted
    split: Split
    words: Words
    stack: ExitStack
    counts: dict[str, int] = field(factory=dict)
    notes: list[str] = field(factory=list)
    _open: dict[str, BinaryIO] = field(factory=dict)
    _parquet: dict[Side, Any] = field(factory=dict)
    _waiting: dict[Side, list[ParquetRow]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """All files exist, empty ones too: one that an earlier run left must not seem to be of this."""
        self._file("accepted.jsonl")
        self._file("rejected.jsonl")
        for side in SIDES[: 2 if self.split.by else 1]:
            self._file(f"sft{side}.jsonl")
            if self.wanted.rows != "none":
                file = self._file(f"rows{side}.parquet")
                self._parquet[side] = self.stack.enter_context(_parquet(file))
                self._waiting[side] = []

    def write(self, trajectory: Trajectory, judged: AcceptanceResult) -> None:
        """One session: a line in a listing, and if it is data, its conversations and rows."""
        held_out = self.split.held_out(trajectory.metadata)
        side: Side = ".held-out" if held_out else ""
        self._line(
            "accepted.jsonl" if judged.accepted else "rejected.jsonl",
            _listed(trajectory, judged, held_out=held_out),
        )
        if judged.accepted:
            self._say(trajectory, side)
        if self.wanted.rows == "all" or (judged.accepted and self.wanted.rows == "accepted"):
            self._keep(rows_of(trajectory, accepted=judged.accepted, held_out=held_out), side)

    def _say(self, trajectory: Trajectory, side: Side) -> None:
        lines, missing = sft_lines(trajectory)
        self.notes += missing
        for line in lines:
            self.words.compare(line)
            self._line(f"sft{side}.jsonl", line.body)

    def _keep(self, rows: list[ParquetRow], side: Side) -> None:
        waiting = self._waiting[side]
        for row in rows:
            waiting.append(row)
            if sum(each.tokens for each in waiting) >= GROUP_TOKENS:
                self._flush(side)

    def flush(self) -> None:
        """Write the rows that wait for a full group."""
        for side in self._waiting:
            self._flush(side)

    def _flush(self, side: Side) -> None:
        waiting = self._waiting[side]
        if waiting:
            self._parquet[side].write_table(table(waiting))
            self.counts[f"rows{side}.parquet"] += len(waiting)
            waiting.clear()

    def tell(self, tally: GenerationTable, acceptance: Acceptance) -> None:
        """The table, for programs."""
        held_out: Json = {"by": self.split.by, "values": list[Json](sorted(self.split.values))}
        files: dict[str, Json] = dict(self.counts)
        said: Json = {
            "accept": acceptance.text,
            **tally.json(),
            "held_out": held_out,
            "files": files,
            "words": self.words.json(),
        }
        self._file("table.json").write(codec.dump_json(said) + b"\n")

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
    said: dict[str, Json] = {
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
    return said


# ── table ────────────────────────────────────────────────────────────


def shown(
    exported: Exported, made: Made, acceptance: Acceptance, console: Console
) -> Iterator[RenderableType]:
    """The table and a line for each thing beside it."""
    tally, total = exported.tally, exported.tally.total
    yield fitted(console, lambda narrow: acceptance_table(tally, narrow=narrow))
    yield Text("")
    yield Text(
        f"accepted by {acceptance.text}: {total.accepted} of {total.attempts} sessions ({percent(total)} %)"
    )
    yield Text(
        f"{total.turns} turns, {total.sampled_tokens} sampled tokens; harnesses ran {duration(total.run_s)},"
        f" this run took {duration(made.wall_s)}"
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
    """Attempts, accepted and why not, a row a group and one for all."""
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
    """The accepted share, with one digit as in the literature."""
    return f"{100 * group.share:.1f}"
