"""`polarnode inspect`: one session's turns, lineages and traces, with the tokens that carry loss in colour.

A reader sees at a glance what a trainer will train on: green is trainable, plain is context, and a turn left out says why.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from polarnode import wire
from polarnode.config import TINY_MODEL
from polarnode.ports import Tokenizer
from polarnode.records import Trace, Trajectory, Turn
from polarnode.tokens.tokenizer import load_tokenizer

TRAINABLE = "black on green"
CONTEXT = "dim"

console = Console(highlight=False)


def inspect(session: str, file: Path | None, model: Path | None, url: str, token: str | None) -> None:
    """Print one session, from a file or from a node."""
    trajectory = _from_file(file, session) if file is not None else _from_node(session, url, token)
    console.print(shown(trajectory, load_tokenizer(model or TINY_MODEL) if model or trajectory.model == TINY_MODEL.name else None))


def _from_file(file: Path, session: str) -> Trajectory:
    with file.open() as lines:
        found = [value for value in map(json.loads, lines) if str(value["session_id"]).startswith(session)]
    if len(found) != 1:
        raise click.ClickException(f"{len(found)} sessions in {file} begin with {session}: give one whole id")
    return wire.read_trajectory(found[0])


def _from_node(session: str, url: str, token: str | None) -> Trajectory:
    from polarnode.client import PolarnodeClient

    return PolarnodeClient(url, token=token).trajectory(session, turns="full")


def shown(trajectory: Trajectory, tokenizer: Tokenizer | None) -> RenderableType:
    """A session as rich text; without a tokenizer the traces show ids instead of words."""
    outcome = trajectory.outcome
    head = Text(f"session {trajectory.session_id}  {trajectory.harness} {trajectory.harness_version or ''}  {outcome.status}", style="bold")
    if outcome.reason:
        head.append(f"  {outcome.reason}", style="yellow")
    if trajectory.reward is not None:
        head.append(f"  reward {trajectory.reward:g}")
    parts: list[RenderableType] = [head, turn_table(trajectory)]
    for number, trace in enumerate(trajectory.traces):
        parts.append(
            Text(f"\ntrace {number}: lineage {trace.lineage}, {len(trace.token_ids)} tokens, {trace.loss_mask.count(1)} trainable", style="bold")
        )
        parts.append(trace_text(trace, tokenizer))
    return Group(*parts)


def turn_table(trajectory: Trajectory) -> Table:
    """The turns: which extends which, why, and what became of it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("turn", "lineage", "parent", "kind", "reason", "role", "state", "prompt", "new", "sampled", "finish", "left out"):
        table.add_column(name, justify="right" if name in ("turn", "lineage", "parent", "prompt", "new", "sampled") else "left")
    reasons = {left.turn: left.reason for left in trajectory.left_out}
    for turn in trajectory.turns:
        table.add_row(*_row(turn), reasons.get(turn.index, ""))
    return table


def _row(turn: Turn) -> tuple[str, ...]:
    parent = "–" if turn.parent is None else str(turn.parent)
    lengths = (str(turn.prompt_length), str(len(turn.prompt_delta)), str(len(turn.sampled)))
    return (str(turn.index), str(turn.lineage), parent, turn.kind, turn.reason, turn.role, turn.state, *lengths, turn.finish_reason)


def trace_text(trace: Trace, tokenizer: Tokenizer | None) -> Text:
    """A trace's tokens in order, the trainable ones coloured."""
    text = Text()
    for trainable, words in _runs(trace, tokenizer):
        text.append(words, style=TRAINABLE if trainable else CONTEXT)
    return text


def _runs(trace: Trace, tokenizer: Tokenizer | None) -> Iterator[tuple[bool, str]]:
    """Stretches of tokens with the same mask, as words, or as ids where there is no tokenizer."""
    for mask, run in groupby(zip(trace.loss_mask, trace.token_ids, strict=True), key=lambda pair: pair[0]):
        ids = [token for _, token in run]
        yield bool(mask), _words(ids, tokenizer)


def _words(ids: list[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids)) + " "
    return b"".join(tokenizer.token_bytes(token) for token in ids).decode("utf-8", "replace")
