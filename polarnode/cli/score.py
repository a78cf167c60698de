"""`polarnode score`: the logprobs of a finished session's tokens under other weights, turn by turn."""

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from polarnode.cli.node_view import print_json
from polarnode.cli.output import bounded, harmless, open_console
from polarnode.cli.remote import RemoteNode
from polarnode.groups.policy_difference import (
    DifferenceStatistics,
    SessionDifference,
    SpanDifference,
    TokenDifferences,
)

FIGURES = ("tokens", "mean new-old", "mean |new-old|", "KL k1", "KL k3", "outside 0.8–1.2")
TOKENS = ("turn", "token", "id", "old", "new", "new-old")


def score(session: str, weights: str, node: RemoteNode, *, tokens: bool, as_json: bool) -> None:
    """Print how far `weights` are from the weights that sampled the session."""
    found = node.client().score_session(session, weights=weights)
    if as_json:
        print_json(_difference_json(found))
    else:
        open_console().print(Group(*_difference_view(found, tokens=tokens)))


def _difference_json(found: SessionDifference) -> dict[str, Any]:
    """The figures with lists in place of arrays."""
    tokens = [
        {"turn": each.turn, "token_ids": list(each.token_ids), "old": list(each.old), "new": list(each.new)}
        for each in found.tokens
    ]
    names = ("session_id", "engine", "adapter", "scored_by", "total", "versions", "spans", "left_out")
    return {name: getattr(found, name) for name in names} | {"tokens": tokens}


def _difference_view(found: SessionDifference, *, tokens: bool) -> Iterator[RenderableType]:
    by = ", ".join(found.scored_by) or "none"
    name = found.adapter or found.engine
    yield Text(
        harmless(f"session {found.session_id} under {name} (weights {by}); logprobs in nats"), style="bold"
    )
    if found.spans:
        yield _spans_table(found)
    else:
        yield Text("no sampled token can be compared")
    for each in found.left_out:
        yield Text(harmless(f"turn {each.turn} is left out: {each.reason}"), style="yellow")
    if any(each.figures.k1 is None for each in found.spans):
        yield Text(
            "KL is – where the sample was cut (greedy, top_p, top_k, min_p): it has no such estimate",
            style="dim",
        )
    if tokens:
        yield _tokens_table(found.tokens)


def _table(names: tuple[str, ...], left: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place < left else "right", overflow="fold")
    return table


def _spans_table(found: SessionDifference) -> Table:
    """A table with a row for each turn, or two if an update of the weights cut the turn; then one row for
    each version, and one for all.
    """
    table = _table(("turn", "sampled by", *FIGURES), 2)
    shown, more = bounded(found.spans, more=": --json has them")
    for each in shown:
        table.add_row(str(each.turn), harmless(_version(each)), *_cells(each.figures))
    for line in more:
        table.add_row(line, style="dim")
    for version, figures in found.versions.items() if len(found.versions) > 1 else ():
        table.add_row("all", harmless(version or "unknown"), *_cells(figures), style="bold")
    if found.total is not None:
        table.add_row("all", "", *_cells(found.total), style="bold")
    return table


def _version(span: SpanDifference) -> str:
    return span.version or "unknown"


def _cells(figures: DifferenceStatistics) -> tuple[str, ...]:
    kl = ("–" if each is None else f"{each:.4g}" for each in (figures.k1, figures.k3))
    means = (f"{figures.mean:+.4g}", f"{figures.mean_absolute:.4g}")
    return (str(figures.tokens), *means, *kl, f"{100 * figures.outside:.1f} %")


def _tokens_table(tokens: tuple[TokenDifferences, ...]) -> Table:
    """A table with a row for each token. It is not shortened, because a user who asks for tokens wants
    all.
    """
    table = _table(TOKENS, 0)
    for each in tokens:
        for place, values in enumerate(zip(each.token_ids, each.old, each.new, strict=True)):
            token, old, new = values
            cells = (f"{old:.4f}", f"{new:.4f}", f"{new - old:+.4f}")
            table.add_row(str(each.turn), str(place), str(token), *cells)
    return table
