"""The table of a generation, for a person. Pure: what was exported in, rich renderables out."""

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from polarnode.cli.generate.export import Exported
from polarnode.cli.generate.run import Made, duration
from polarnode.cli.printing import fitted, harmless
from polarnode.offline import Acceptance, Group, Tally
from polarnode.offline.tally import ALL


def shown(exported: Exported, made: Made, acceptance: Acceptance, console: Console) -> Iterator[RenderableType]:
    """The table and a line for each thing beside it."""
    tally, total = exported.tally, exported.tally.total
    yield fitted(console, lambda narrow: acceptance_table(tally, narrow=narrow))
    yield Text("")
    yield Text(f"accepted by {acceptance.text}: {total.accepted} of {total.attempts} sessions ({percent(total)} %)")
    yield Text(
        f"{total.turns} turns, {total.sampled_tokens} sampled tokens; harnesses ran {duration(total.run_s)}, this run took {duration(made.wall_s)}"
    )
    if exported.split.by is not None:
        yield Text(f"held out by {exported.split.by}: {harmless(', '.join(sorted(exported.split.values)))}")
    sentence = exported.words.sentence()
    if sentence is not None:
        yield Text(harmless(sentence))
    for name, count in exported.files.items():
        if name != "table.json":
            yield Text(f"  {name}: {count} {'row' if count == 1 else 'rows'}")


def acceptance_table(tally: Tally, *, narrow: bool = False) -> Table:
    """Attempts, accepted and why not, a row a group and one for all."""
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=narrow, padding=(0, 1))
    table.add_column(tally.by or "", overflow="fold")
    reasons = tally.seen()
    for name in ("attempts", "accepted", "%", *reasons, "turns", "sampled tokens"):
        table.add_column(name.replace(" ", "\n") if narrow else name, justify="right", no_wrap=True)
    for group in tally.rows():
        figures = [str(group.attempts), str(group.accepted), percent(group), *(str(group.reasons[reason] or "–") for reason in reasons)]
        style = "bold" if group.name == ALL else ""
        table.add_row(harmless(group.name), *figures, str(group.turns), str(group.sampled_tokens), style=style)
    return table


def percent(group: Group) -> str:
    """The accepted share, with one digit as in the literature."""
    return f"{100 * group.share:.1f}"
