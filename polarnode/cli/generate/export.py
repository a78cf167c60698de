"""What a generation leaves in its folder: conversations, rows of tokens, what was accepted and what was not, and the table.

Read from the journal, one trajectory at a time. The rule for whoever edits it: memory is bounded by a row group and one session, however many
there are; a file takes its name when it is whole, so that what an earlier run wrote stays until then.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from attrs import define, evolve, field, frozen

from polarnode import wire
from polarnode.cli.files import written_whole
from polarnode.cli.generate.words import Words, open_words
from polarnode.conversation import Json
from polarnode.offline import Acceptance, Judged, Slot, Split, Tally, judge, sft_lines
from polarnode.offline.rows import GROUP_TOKENS, Row, arrow, rows_of, schema, table
from polarnode.offline.split import split_of
from polarnode.offline.tally import grouping_of
from polarnode.records import Trajectory
from polarnode.shell.journal import Journal

Rows = Literal["accepted", "all", "none"]
Side = Literal["", ".held-out"]
SIDES: Final[tuple[Side, Side]] = ("", ".held-out")
LISTED: Final = 20  # notes shown; the rest is a count


@frozen(kw_only=True)
class Wanted:
    """Which rows are written, by which metadata key the table is grouped (None: the first that is known), and what is held out."""

    rows: Rows = "accepted"
    by: str | None = None
    held_out_by: str | None = None
    held_out: float = 0.1


@frozen(kw_only=True)
class Exported:
    """What was written. `files` by name with their rows; `words` is how the conversations compare with the tokens."""

    tally: Tally
    files: dict[str, int]
    words: Words
    split: Split
    notes: tuple[str, ...]


async def export(journal: Journal, slots: Sequence[Slot], *, acceptance: Acceptance, wanted: Wanted, out: Path, model: Path) -> Exported:
    """Write everything anew from what the journal holds."""
    metadata = [slot.spec.metadata for slot in slots]
    split = split_of(metadata, by=wanted.held_out_by, share=wanted.held_out)
    tally = Tally(by=wanted.by or grouping_of(metadata))
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
    notes = files.notes[:LISTED] + ([f"… and {len(files.notes) - LISTED} more"] if len(files.notes) > LISTED else [])
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
    _waiting: dict[Side, list[Row]] = field(factory=dict)

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

    def write(self, trajectory: Trajectory, judged: Judged) -> None:
        """One session: a line in a listing, and if it is data, its conversations and rows."""
        held_out = self.split.held_out(trajectory.metadata)
        side: Side = ".held-out" if held_out else ""
        self._line("accepted.jsonl" if judged.accepted else "rejected.jsonl", _listed(trajectory, judged, held_out=held_out))
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

    def _keep(self, rows: list[Row], side: Side) -> None:
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

    def tell(self, tally: Tally, acceptance: Acceptance) -> None:
        """The table, for programs."""
        held_out: Json = {"by": self.split.by, "values": list[Json](sorted(self.split.values))}
        files: dict[str, Json] = dict(self.counts)
        said: Json = {"accept": acceptance.text, **tally.json(), "held_out": held_out, "files": files, "words": self.words.json()}
        self._file("table.json").write(wire.dump_json(said) + b"\n")

    def _line(self, name: str, body: dict[str, Json]) -> None:
        self._open[name].write(wire.dump_json(body) + b"\n")
        self.counts[name] += 1

    def _file(self, name: str) -> BinaryIO:
        file = self._open[name] = self.stack.enter_context(written_whole(self.out / name))
        self.counts[name] = 0
        return file


def _parquet(file: BinaryIO) -> Any:
    arrow()
    import pyarrow.parquet as pq

    return pq.ParquetWriter(file, schema(), compression="zstd")


def _listed(trajectory: Trajectory, judged: Judged, *, held_out: bool) -> dict[str, Json]:
    said: dict[str, Json] = {
        "session_id": trajectory.session_id,
        "task_id": trajectory.task_id,
        "sample_index": trajectory.sample_index,
        "reason": judged.reason,
        "because": judged.because,
        "reward": trajectory.reward,
        "outcome": wire.plain(trajectory.outcome),
        "turns": len(trajectory.turns),
        "traces": len(trajectory.traces),
        "sampled_tokens": trajectory.sampled_tokens,
        "run_s": trajectory.timing.run_s,
        "harness": trajectory.harness,
        "held_out": held_out,
        "metadata": wire.plain(trajectory.metadata),
    }
    return said
