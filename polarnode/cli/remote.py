"""The commands that use a running node or what it wrote: `submit`, `watch`, `export` and `inspect`.

The first request to a node is not retried, so that a wrong address is reported at once. Only later requests
wait for a node that restarts. `inspect` shows what a trainer trains on: green is trainable, dim is context,
and a turn that is left out has its reason. Without colour, trainable tokens stand between « and ». Lineage
figures are read from `metrics.lineage` of a trajectory, never computed here; a trajectory written before they
existed shows none.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import click
from attrs import frozen
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from polarnode.cli import output
from polarnode.cli.output import fitted, harmless, open_console
from polarnode.cli.sources import SourceSelection, build_images, note_lines, written_whole
from polarnode.client.blocking import PolarnodeClient
from polarnode.client.values import Event
from polarnode.core import codec
from polarnode.core.errors import Refused
from polarnode.core.ports import Tokenizer
from polarnode.core.status import Submitted
from polarnode.core.task import EvaluatorSpec
from polarnode.core.trajectory import Trace, Trajectory
from polarnode.groups.training_rows import turn_rewards
from polarnode.merge.figures import summed, word_of
from polarnode.node.config import TINY_MODEL, NodeConfig
from polarnode.sources.values import SourcedTask

Query = Mapping[str, Any]
WARNINGS = ("gap", "unreadable")
LINES = {"sft": "conversations", "rewards": "rewards"}  # of an export, by its kind
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@frozen(kw_only=True)
class RemoteNode:
    """The address of a running node."""

    url: str
    token: str | None

    @property
    def local(self) -> bool:
        """Whether the node is on this machine."""
        return (urlsplit(self.url).hostname or "") in LOOPBACK

    def client(self, *, patience_s: float = 0.0) -> PolarnodeClient:
        return PolarnodeClient(self.url, token=self.token, patience_s=patience_s)


def submit(sources: SourceSelection, node: RemoteNode, config: NodeConfig) -> None:
    """Submit the tasks of sources. Task ids go to stdout for scripts, everything else to stderr.

    Images that tasks need are built here when the node is on this machine; otherwise the user is told which
    images to build there.
    """
    tasks = sources.tasks()
    node.client().status()
    for note in note_lines(tasks):
        click.echo(f"· {harmless(note)}", err=True)
    if node.local:
        build_images(tasks, config, report=lambda text: click.echo(f"· {harmless(text)}", err=True))
    else:
        _list_images(tasks)
    submitted = [_submitted(task, node) for task in tasks]
    sessions = sum(len(each.session_ids) for each in submitted)
    existing = sum(not each.created for each in submitted)
    was = (
        ""
        if not existing
        else " (submitted before)"
        if len(submitted) == 1
        else f" ({existing} tasks were submitted before)"
    )
    which = f" --task {harmless(submitted[0].task_id)}" if len(submitted) == 1 else ""
    count = "" if len(submitted) == 1 else f"{len(submitted)} tasks, "
    click.echo(f"{count}{sessions} sessions{was}; follow them with: polarnode watch{which}", err=True)


def _submitted(task: SourcedTask, node: RemoteNode) -> Submitted:
    submitted = node.client().submit(task.spec)
    click.echo(harmless(submitted.task_id))
    return submitted


def _list_images(tasks: Sequence[SourcedTask]) -> None:
    for build in {task.build.image: task.build for task in tasks if task.build is not None}.values():
        click.echo(
            f"· the node's machine needs the image {build.image}, built from {harmless(str(build.folder))}:"
            " run `polarnode convert --build` on the same tasks there",
            err=True,
        )


def watch(task_id: str | None, consumer: str | None, node: RemoteNode) -> None:
    """Print a line for each event as it arrives; with `task_id`, until that task is done."""
    node.client().status() if task_id is None else node.client().task(task_id)
    console = open_console()
    for event in node.client(patience_s=600.0).trajectories(
        consumer=consumer, task_id=task_id, ack=consumer is not None
    ):
        console.print(line(event), soft_wrap=True, style="yellow" if event.kind in WARNINGS else "")


def line(event: Event) -> str:
    """An event as one line of text."""
    match event.kind:
        case "trajectory":
            return _trajectory_line(event)
        case "group":
            return _group_line(event.data)
        case "task":
            counts = ", ".join(f"{count} {status}" for status, count in event.data["counts"].items())
            return f"task {event.data['task_id']} is done: {counts}"
        case "gap":
            return (
                f"events {event.data['after']} to {event.data['oldest']} are no longer kept: read more often"
            )
        case "unreadable":
            return (
                f"event {event.seq} ({harmless(event.key)}) cannot be read: {harmless(event.data['reason'])}"
            )
    return f"{event.kind}: unknown event, this polarnode is older than the node"


def _group_line(data: Mapping[str, Any]) -> str:
    """A group's line; an older node sends no state."""
    rewards = " ".join(output.reward_text(reward) for reward in data["rewards"])
    state, reason = data.get("state"), data.get("reason")
    why = (
        ""
        if state is None
        else f", {harmless(state)}"
        if reason is None
        else f", {harmless(state)} ({harmless(reason)})"
    )
    return f"group {data['group_id']} is done{why}: rewards {rewards}"


def _trajectory_line(event: Event) -> str:
    value, trajectory = event.data, event.trajectory
    trainable = 0 if trajectory is None else trajectory.trainable_tokens
    head = (
        f"{value['session_id']} {harmless(value['harness']['name'])} {value['outcome']['status']} reward"
        f" {output.reward_text(value['reward'])}"
    )
    return f"{head} turns {len(value['turns'])} traces {len(value['traces'])} trainable {trainable}"


def export(query: Query, output: Path | None, node: RemoteNode) -> None:
    """Write the finished trajectories as the node sends them; a file is replaced when it is complete."""
    lines = 0
    pieces = node.client().export_bytes(**query)
    next(pieces)  # the node accepted the request; if it refuses, an existing file stays as it is
    with written_whole(output) if output is not None else nullcontext[BinaryIO](sys.stdout.buffer) as out:
        for piece in pieces:
            out.write(piece)
            lines += piece.count(b"\n")
    what = (
        "token rows"
        if query.get("format") == "parquet"
        else f"{lines} {LINES.get(str(query.get('kind')), 'trajectories')}"
    )
    click.echo(what + (f" in {output}" if output is not None else ""), err=True)


# ── evaluations ───────────────────────────────────────────────────────────────


def evaluate(
    sessions: Sequence[str],
    file: Path | None,
    evaluator: Path | None,
    node: RemoteNode,
    *,
    as_json: bool,
    named: Mapping[str, Any],
) -> int:
    """Evaluate finished sessions again and print what each was given; returns the exit code, 1 where one was
    given nothing.
    """
    listed = () if file is None else tuple(str(value.get("session_id")) for value in _lines(file))
    spec = None
    if evaluator is not None:  # its fields, or a task's table of them
        value = codec.read_toml_value(evaluator.read_text())
        spec = codec.structure(value.get("evaluator", value), EvaluatorSpec, forbid_extra=True)
    begun = node.client().evaluate(*sessions, *listed, evaluator=spec, **named)
    click.echo(f"· {begun.evaluation_id}: {len(begun.sessions)} sessions", err=True)
    found = node.client(patience_s=600.0).evaluation(begun.evaluation_id, wait=True)
    if as_json:
        click.echo(codec.dump_json(codec.plain(found)))
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("session", "first reward", "new reward", "why not"):
            table.add_column(name, justify="right" if name.endswith("reward") else "left", overflow="fold")
        for each in found.sessions:
            rewards = (output.reward_text(each.first_reward), output.reward_text(each.reward))
            table.add_row(harmless(each.session_id), *rewards, harmless(each.error or ""))
        open_console().print(table)
    return 0 if set(found.counts) == {"evaluated"} else 1


# ── lineage figures ───────────────────────────────────────────────────────────

NAMES = ("session", "thinking")
COUNTS = ("turns", "lineages", "leaves", "tokens_in")
SUMS = ("reused", "edited", "left out")


@frozen
class SessionFigures:
    """A session and its lineage figures."""

    session_id: str
    figures: Mapping[str, Any]


def figures_of(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`metrics.lineage` of a trajectory in JSON form; None where there is none."""
    metrics = value.get("metrics")
    found = metrics.get("lineage") if isinstance(metrics, dict) else None
    return found if isinstance(found, dict) else None


def lineage_text(figures: Mapping[str, Any]) -> Text:
    """The figures of one session, or of many summed, as a few lines."""
    lines = [
        (
            f"lineage: {figures['turns']} turns in {figures['lineages']} lineages with {figures['leaves']}"
            f" leaves, thinking {figures['thinking']}"
        ),
        (
            f"  prompts: {figures['tokens_in']} tokens, {_reused(figures)} of them reused from the turn"
            f" extended; {figures['tokens_sampled']} sampled"
        ),
        *(f"  {name}: {_counts(figures.get(name))}" for name in ("kinds", "reasons", "roles")),
        *(
            f"  {name.replace('_', ' ')}: {_counts(figures.get(name))}"
            for name in ("notes", "left_out")
            if figures.get(name)
        ),
    ]
    if figures.get("malformed_calls"):
        lines.append(f"  malformed calls: {figures['malformed_calls']}")
    return Text("\n".join(map(harmless, lines)), style="dim")


def lineage_notes(rows: Sequence[Mapping[str, Any]]) -> list[Text]:
    """The notes of turns that concern their lineage."""
    return [
        Text(f"turn {row['index']}: {harmless(note)}", style="dim")
        for row in rows
        for note in row.get("notes", ())
        if word_of(note) is not None
    ]


def totals(counted: Sequence[SessionFigures], *, narrow: bool = False) -> Table:
    """One row for each session."""
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=narrow, padding=(0, 1))
    for name in (*NAMES, *COUNTS, *SUMS):
        table.add_column(
            name.replace("_", " "),
            justify="left" if name in NAMES else "right",
            no_wrap=name not in NAMES,
            overflow="fold",
        )
    for one in counted:
        figures = one.figures
        notes, left_out = figures.get("notes", {}), figures.get("left_out", {})
        sums = (_reused(figures), str(notes.get("edited", 0)), str(sum(left_out.values())))
        table.add_row(
            harmless(one.session_id),
            str(figures.get("thinking")),
            *(str(figures.get(name)) for name in COUNTS),
            *sums,
        )
    return table


def summary(counted: Sequence[SessionFigures], table: RenderableType) -> RenderableType:
    """The table and the sums below it."""
    return Group(
        table,
        Text(f"\n{len(counted)} sessions", style="bold"),
        lineage_text(summed(one.figures for one in counted)),
    )


def _reused(figures: Mapping[str, Any]) -> str:
    return f"{100 * figures.get('prefix_hit_rate', 0.0):.1f} %"


def _counts(counts: Any) -> str:
    return (
        ", ".join(f"{word} {count}" for word, count in counts.items())
        if isinstance(counts, dict) and counts
        else "none"
    )


# ── sessions ──────────────────────────────────────────────────────────────────

TRAINABLE = "black on green"
CONTEXT = "dim"
FIGURES = ("turn", "lineage", "parent", "matched", "prompt", "new", "sampled")
COLUMNS = (
    "turn",
    "lineage",
    "parent",
    "kind",
    "reason",
    "role",
    "state",
    "matched",
    "prompt",
    "new",
    "sampled",
    "finish",
    "left out",
)

TurnRow = dict[str, Any]  # a row of the turns table, as JSON


def summarise(file: Path) -> None:
    """Print the lineage figures of each session in a file, and their sums."""
    found = [(str(value.get("session_id")), figures_of(value)) for value in _lines(file)]
    counted = [SessionFigures(session, figures) for session, figures in found if figures is not None]
    if not counted:
        raise Refused(
            f"none of the {len(found)} trajectories in {file} has lineage figures: name one SESSION to show"
        )
    console = open_console()
    console.print(
        summary(counted, fitted(console, lambda narrow: totals(counted, narrow=narrow))),
        soft_wrap=not console.is_terminal,
    )
    if len(counted) < len(found):
        console.print(
            f"{len(found) - len(counted)} more sessions have no lineage figures: written by an older node"
        )


def inspect(session: str, source: Path | RemoteNode, model: Path | None, *, plain: bool) -> None:
    """Print one session, from a file or from a node."""
    trajectory, rows = (
        _from_node(session, source) if isinstance(source, RemoteNode) else _from_file(source, session)
    )
    console = open_console()
    folder = model or (TINY_MODEL if trajectory.model == TINY_MODEL.name else None)
    tokenizer = None if folder is None else _tokenizer(folder)
    console.print(
        shown(trajectory, rows, tokenizer, console=console, plain=plain or not console.is_terminal),
        soft_wrap=not console.is_terminal,
    )


def _tokenizer(folder: Path) -> Tokenizer:
    from polarnode.tokens.tokenizer import load_tokenizer  # of `polarnode[node]`

    return load_tokenizer(folder)


def _from_file(file: Path, session: str) -> tuple[Trajectory, Sequence[TurnRow]]:
    found = [value for value in _lines(file) if str(value.get("session_id")).startswith(session)]
    if len(found) != 1:
        raise Refused(
            f"{len(found)} sessions in {file} begin with {session}: give "
            + ("a longer prefix or the full id" if found else "the id of a session in it")
        )
    return codec.read_trajectory(found[0]), found[0].get("turns", [])


def _lines(file: Path) -> Iterator[TurnRow]:
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            value = codec.read_json(line)
        except Refused as refused:
            raise Refused(f"line {number} of {file}: {refused}") from refused
        if not isinstance(value, dict):
            raise Refused(f"line {number} of {file} is no trajectory: give a trajectories.jsonl")
        yield value


def _from_node(session: str, node: RemoteNode) -> tuple[Trajectory, Sequence[TurnRow]]:
    trajectory = node.client().trajectory(session, turns="full")
    rows: list[Any] = codec.turns_json(trajectory.turns, left_out=trajectory.left_out)
    return trajectory, rows


def shown(
    trajectory: Trajectory,
    rows: Sequence[TurnRow],
    tokenizer: Tokenizer | None,
    *,
    console: Console,
    plain: bool,
) -> RenderableType:
    """A session as rich text; without a tokenizer the traces show token ids."""
    rewards = turn_rewards(trajectory)
    parts: list[RenderableType] = [
        _head(trajectory),
        fitted(console, lambda narrow: turn_table(rows, narrow=narrow, rewards=rewards)),
    ]
    parts += lineage_notes(rows)
    parts += [
        Text(f"turn {omitted.turn} is left out: {harmless(omitted.reason)}", style="yellow")
        for omitted in trajectory.left_out
    ]
    figures = figures_of({"metrics": dict(trajectory.metrics)})
    parts += [] if figures is None else [Text(""), lineage_text(figures)]
    parts.append(Text(_legend(plain, tokenizer), style="dim"))
    for number, trace in enumerate(trajectory.traces):
        parts += [
            Text(f"\ntrace {number}: {', '.join(_facts(trace, trajectory.reward))}", style="bold"),
            trace_text(trace, tokenizer, plain=plain),
        ]
    return Group(*parts)


def _facts(trace: Trace, session_reward: float | None) -> Iterator[str]:
    yield f"lineage {trace.lineage}"
    yield f"{len(trace.token_ids)} tokens"
    yield f"{trace.loss_mask.count(1)} trainable"
    if trace.reward is not None and trace.reward != session_reward:
        yield f"reward {trace.reward:g}"
    if trace.parts > 1:
        yield f"part {trace.part + 1} of {trace.parts}"
    if trace.offset:
        yield f"preceded by {trace.offset} tokens that are not shown"
    if trace.over_long:
        yield "longer than its task's max_row_tokens"
    yield from map(harmless, trace.missing_extras)


def _head(trajectory: Trajectory) -> Text:
    outcome = trajectory.outcome
    harness = harmless(f"{trajectory.harness} {trajectory.harness_version or ''}".strip())
    head = Text(f"session {trajectory.session_id}  {harness}  {outcome.status}", style="bold")
    if outcome.reason:
        head.append(f"  {harmless(outcome.reason)}", style="yellow")
    if trajectory.reward is not None:
        head.append(f"  reward {trajectory.reward:g}")
    return head


def _legend(plain: bool, tokenizer: Tokenizer | None) -> str:
    mark = "between « and »" if plain else "green"
    hint = "" if tokenizer is not None else "; tokens are shown as ids: give --model FOLDER to decode them"
    return f"\ntrainable tokens are {mark}{hint}"


def turn_table(
    rows: Sequence[TurnRow], *, narrow: bool = False, rewards: Mapping[int, float] | None = None
) -> Table:
    """The turns: which turn each extends, why, and how it ended. `rewards`, if any, adds a column."""
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=narrow, padding=(0, 1))
    for name in (*COLUMNS, "reward") if rewards else COLUMNS:
        table.add_column(
            name,
            justify="right" if name in (*FIGURES, "reward") else "left",
            no_wrap=name in (*FIGURES, "reward") or not narrow,
            overflow="fold",
        )
    ends = {row["index"]: row["prompt_length"] + row["sampled_length"] for row in rows}
    for row in rows:
        own = (_reward(rewards.get(row["index"])),) if rewards else ()
        table.add_row(*map(harmless, _cells(row, before=ends.get(row["parent"], 0))), *own)
    return table


def _reward(reward: float | None) -> str:
    return "–" if reward is None else f"{reward:g}"


def _cells(row: TurnRow, *, before: int) -> tuple[str, ...]:
    """The cells of a row. `before`: tokens of its prompt that its parent has too. `matched` counts messages
    of the request.
    """
    parent = "–" if row["parent"] is None else str(row["parent"])
    words = tuple(str(row[name]) for name in ("kind", "reason", "role", "state"))
    matched = "–" if row.get("matched") is None else f"{row['matched']}/{row['messages']}"
    lengths = (str(row["prompt_length"]), str(row["prompt_length"] - before), str(row["sampled_length"]))
    return (
        str(row["index"]),
        str(row["lineage"]),
        parent,
        *words,
        matched,
        *lengths,
        str(row["finish_reason"]),
        row["left_out"] or "",
    )


def trace_text(trace: Trace, tokenizer: Tokenizer | None, *, plain: bool) -> Text:
    """The tokens of a trace in order, trainable ones coloured, or between « and ».

    Text is not escaped: only the ids distinguish a mark from a « in the text itself.
    """
    text = Text()
    for trainable, words in _runs(trace, tokenizer):
        text.append(f"«{words}»" if plain and trainable else words, style=TRAINABLE if trainable else CONTEXT)
        text.append(" " if tokenizer is None else "")
    return text


def _runs(trace: Trace, tokenizer: Tokenizer | None) -> Iterator[tuple[bool, str]]:
    """Runs of tokens with the same mask, decoded, or as ids without a tokenizer."""
    for mask, run in groupby(zip(trace.loss_mask, trace.token_ids, strict=True), key=lambda pair: pair[0]):
        yield bool(mask), _words([token for _, token in run], tokenizer)


def _words(ids: list[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids))
    return harmless(b"".join(tokenizer.token_bytes(token) for token in ids).decode("utf-8", "replace"))
