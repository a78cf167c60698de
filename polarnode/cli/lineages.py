"""What sessions' lineages came to, as `inspect` prints it: one session's figures in words, or a table of many with their sums.

The rule for whoever edits it: figures come from `metrics.lineage` of a trajectory and are worked out nowhere else; a trajectory of before
there were any shows none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from polarnode.cli.printing import harmless
from polarnode.merge.figures import summed
from polarnode.merge.notes import word_of
from polarnode.records import Trajectory

NAMES = ("session", "thinking")
COUNTS = ("turns", "lineages", "leaves", "tokens_in")
SUMS = ("reused", "edited", "left out")


@frozen
class Counted:
    """A session and its figures."""

    session_id: str
    figures: Mapping[str, Any]


def figures_of(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`metrics.lineage` of a trajectory as JSON; None where there is none."""
    metrics = value.get("metrics")
    found = metrics.get("lineage") if isinstance(metrics, dict) else None
    return found if isinstance(found, dict) else None


def lineage_text(figures: Mapping[str, Any]) -> Text:
    """The figures of a session, or of many, in a few lines."""
    lines = [
        f"lineage: {figures['turns']} turns in {figures['lineages']} lineages with {figures['leaves']} ends, thinking {figures['thinking']}",
        f"  prompts: {figures['tokens_in']} tokens, {_reused(figures)} of them reused from the turn extended; {figures['tokens_sampled']} sampled",
        *(f"  {name}: {_counts(figures.get(name))}" for name in ("kinds", "reasons", "roles")),
        *(f"  {name.replace('_', ' ')}: {_counts(figures.get(name))}" for name in ("notes", "left_out") if figures.get(name)),
    ]
    if figures.get("malformed_calls"):
        lines.append(f"  malformed calls: {figures['malformed_calls']}")
    return Text("\n".join(map(harmless, lines)), style="dim")


def note_lines(rows: Sequence[Mapping[str, Any]]) -> list[Text]:
    """What turns' notes say of their lineage."""
    said = [(row["index"], note) for row in rows for note in row.get("notes", ()) if word_of(note) is not None]
    return [Text(f"turn {index}: {harmless(note)}", style="dim") for index, note in said]


def turn_rewards(trajectory: Trajectory) -> dict[int, float]:
    """By turn, the reward of its own that it has in a trace."""
    return {span.turn: span.reward for trace in trajectory.traces for span in trace.turn_spans if span.reward is not None}


def totals(counted: Sequence[Counted], *, narrow: bool = False) -> Table:
    """One row a session."""
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=narrow, padding=(0, 1))
    for name in (*NAMES, *COUNTS, *SUMS):
        table.add_column(name.replace("_", " "), justify="left" if name in NAMES else "right", no_wrap=name not in NAMES, overflow="fold")
    for one in counted:
        figures = one.figures
        notes, left = figures.get("notes", {}), figures.get("left_out", {})
        sums = (_reused(figures), str(notes.get("edited", 0)), str(sum(left.values())))
        table.add_row(harmless(one.session_id), str(figures.get("thinking")), *(str(figures.get(name)) for name in COUNTS), *sums)
    return table


def summary(counted: Sequence[Counted], table: RenderableType) -> RenderableType:
    """The table, and the sums under it."""
    return Group(table, Text(f"\n{len(counted)} sessions", style="bold"), lineage_text(summed(one.figures for one in counted)))


def _reused(figures: Mapping[str, Any]) -> str:
    return f"{100 * figures.get('prefix_hit_rate', 0.0):.1f} %"


def _counts(counts: Any) -> str:
    return ", ".join(f"{word} {count}" for word, count in counts.items()) if isinstance(counts, dict) and counts else "none"
