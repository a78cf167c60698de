"""`polarnode inspect`: shows which tokens of a session are trained and why it ended as it did, or how far a
running session is.

Trainable tokens are green, context is dim, and a turn that is left out shows its reason. Without colour,
trainable tokens stand between « and ». Lineage figures are read from `metrics.lineage` of a trajectory, never
computed here; a trajectory written before they existed shows none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from attrs import frozen
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from polarnode.cli.output import bounded, fit_table, fork_text, harmless, open_console, reward_text
from polarnode.cli.remote import RemoteNode, trajectory_lines
from polarnode.client.values import ClientError
from polarnode.core import codec
from polarnode.core.errors import Refused
from polarnode.core.ports import Tokenizer
from polarnode.core.trajectory import Trace, Trajectory
from polarnode.groups.training_rows import turn_rewards
from polarnode.merge.figures import note_word, summed
from polarnode.node.config import TINY_MODEL
from polarnode.tokens.pieces import text_of

# ── lineage figures ───────────────────────────────────────────────────────────

NAMES = ("session", "thinking")
COUNTS = ("turns", "lineages", "leaves", "tokens_in")
SUM_COLUMNS = ("reused", "edited", "left out")


@frozen
class SessionLineage:
    """A session and its lineage figures."""

    session_id: str
    figures: Mapping[str, Any]


def figures_of(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`metrics.lineage` of a trajectory in JSON form, or None."""
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
            for name in ("notes", "left_out", "left_out_tokens")
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
        if note_word(note) is not None
    ]


def totals(counted: Sequence[SessionLineage], *, narrow: bool = False) -> Table:
    """One row for each session."""
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=narrow, padding=(0, 1))
    for name in (*NAMES, *COUNTS, *SUM_COLUMNS):
        table.add_column(
            name.replace("_", " "),
            justify="left" if name in NAMES else "right",
            no_wrap=name not in NAMES,
            overflow="fold",
        )
    shown, more = bounded(counted)
    for one in shown:
        figures = one.figures
        notes, left_out = figures.get("notes", {}), figures.get("left_out", {})
        sums = (_reused(figures), str(notes.get("edited", 0)), str(sum(left_out.values())))
        table.add_row(
            harmless(one.session_id),
            str(figures.get("thinking")),
            *(str(figures.get(name)) for name in COUNTS),
            *sums,
        )
    for line in more:
        table.add_row(line, style="dim")
    return table


def summary(counted: Sequence[SessionLineage], table: RenderableType) -> RenderableType:
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

TRAINABLE_STYLE = "black on green"
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

SNAPSHOTS = 50  # snapshots shown of one session
MAX_LOG_LINES = 20  # last lines of a log: enough for the traceback of a failed harness
MAX_EVALUATION_CHARS = 2000  # characters of one value: a test's report, not its whole output

TurnRow = dict[str, Any]  # a row of the turns table, as JSON


def print_lineages(file: Path) -> None:
    """Print the lineage figures of each session in a file, and their sums."""
    found = [(str(value.get("session_id")), figures_of(value)) for value in trajectory_lines(file)]
    counted = [SessionLineage(session, figures) for session, figures in found if figures is not None]
    if not counted:
        raise Refused(
            f"none of the {len(found)} trajectories in {file} has lineage figures: name one SESSION to show"
        )
    console = open_console()
    console.print(
        summary(counted, fit_table(console, lambda narrow: totals(counted, narrow=narrow))),
        soft_wrap=not console.is_terminal,
    )
    if len(counted) < len(found):
        console.print(
            f"{len(found) - len(counted)} more sessions have no lineage figures: written by an older node"
        )


def inspect(
    session: str, source: Path | RemoteNode, model: Path | None, *, plain: bool, as_json: bool = False
) -> None:
    """Print one session from a file or from a node; a node's session may still be running."""
    value = _of_node(session, source) if isinstance(source, RemoteNode) else _session_of_file(source, session)
    if as_json:
        click.echo(codec.dump_json(value))
        return
    console = open_console()
    rows: list[Any] = value["turns"]
    kept = (*snapshot_lines(value["snapshots"]), *fork_lines(value["forks"]))
    if value["trajectory"] is None:
        parts = Group(running(value, console=console), *kept)
        console.print(parts, soft_wrap=not console.is_terminal)
        return
    trajectory = codec.read_trajectory({**value["trajectory"], "turns": rows})
    folder = model or (TINY_MODEL if trajectory.model == TINY_MODEL.name else None)
    tokenizer = None if folder is None else _tokenizer(folder)
    whole = shown(trajectory, rows, tokenizer, console=console, plain=plain or not console.is_terminal)
    console.print(Group(whole, *kept), soft_wrap=not console.is_terminal)


def _tokenizer(folder: Path) -> Tokenizer:
    from polarnode.tokens.tokenizer import load_tokenizer  # part of `polarnode[node]`

    return load_tokenizer(folder)


def _session_of_file(file: Path, session: str) -> dict[str, Any]:
    """A session of a file, in the form in which a node gives it."""
    found = [value for value in trajectory_lines(file) if str(value.get("session_id")).startswith(session)]
    if len(found) != 1:
        raise Refused(
            f"{len(found)} sessions in {file} begin with {session}: give "
            + ("a longer prefix or the full id" if found else "the id of a session in it")
        )
    turns = found[0].pop("turns", [])
    nothing: dict[str, Any] = {"session": None, "log": None, "live": None, "snapshots": [], "forks": []}
    return {**nothing, "turns": turns, "trajectory": found[0]}


def _of_node(session: str, node: RemoteNode) -> dict[str, Any]:
    """A session of a node with the end of its log, and with its state if it is running."""
    client = node.client()
    value, live, log = client.session(session), None, None
    if value["trajectory"] is None:
        every = (each for changes in client.live_sessions(follow=False) for each in changes.sessions)
        live = next((codec.plain(each) for each in every if each.session_id == session), None)
    try:
        log = client.log(session, tail=MAX_LOG_LINES).text
    except ClientError as error:
        if error.status != 404:  # the session has no log, or the node is of an earlier release
            raise
    snapshots, forks = _listed(client.snapshots, session), _listed(client.forks, session)
    return {**value, "log": log, "live": live, "snapshots": snapshots, "forks": forks}


def _listed(read: Callable[[str], Sequence[Any]], session: str) -> list[dict[str, Any]]:
    try:
        return [codec.plain(each) for each in read(session)]
    except ClientError as error:
        if error.status != 404:  # the node is of an earlier release
            raise
        return []


def snapshot_lines(snapshots: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """One line for each snapshot of a session: where the session can be forked, or why it cannot."""
    for each in snapshots[:SNAPSHOTS]:
        why = "" if each["resumable"] else f"; no harness can be resumed from it: {each['why_not']}"
        what = f"{each['files']} files, {each['bytes'] / 1e6:.1f} MB, its call held {each['seconds']:.2f} s"
        yield Text(harmless(f"snapshot before turn {each['turn']}: {what}{why}"), style="dim")
    if len(snapshots) > SNAPSHOTS:
        yield Text(f"and {len(snapshots) - SNAPSHOTS} more snapshots", style="dim")


def fork_lines(forks: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """One line for each fork of a session: where it began, and how it ended."""
    shown, more = bounded(forks)
    for each in shown:
        fork, reward = each["forked_from"], reward_text(each["reward"])
        where = f"before turn {fork['turn']} by {fork['by']}"
        yield Text(f"fork {each['session_id']} {where}: {each['status']}, reward {reward}", style="dim")
    yield from (Text(line, style="dim") for line in more)


def running(value: Mapping[str, Any], *, console: Console) -> RenderableType:
    """A session that is not over: its phase, its turns so far and the end of its log."""
    record, live = value["session"], value["live"] or {}
    rows = value["turns"]
    phase = live.get("phase", "not over")
    head = Text(f"session {record['session_id']}  {harmless(live.get('harness', ''))}  ", style="bold")
    head.append(str(phase), style="cyan")
    sampled = sum(row["sampled_length"] for row in rows)
    head.append(f"  {len(rows)} turns, {sampled} tokens sampled")
    if record["attempt"]:
        head.append(f"  attempt {record['attempt']}")
    if fork := record.get("forked_from"):
        head.append(f"  fork of {fork['session_id']} before turn {fork['turn']}")
    parts: list[RenderableType] = [head]
    if rows:
        parts.append(fit_table(console, lambda narrow: turn_table(rows, narrow=narrow)))
    return Group(*parts, *_log_lines(value["log"]))


def _log_lines(log: str | None) -> Iterator[Text]:
    lines = (log or "").splitlines()[-MAX_LOG_LINES:]
    if lines:
        yield Text(f"\nthe last {len(lines)} lines of its log:", style="bold")
        yield Text(harmless("\n".join(lines)), style="dim")


def _session_details(trajectory: Trajectory) -> Iterator[Text]:
    """The facts of a session: its time by phase, the artifacts of its evaluator, and its place among the
    attempts.
    """
    spent = {"init": "init_s", "waiting to run": "ready_s", "run": "run_s", "post": "post_s"}
    times = {name: getattr(trajectory.timing, field) for name, field in spent.items()}
    if any(times.values()):
        text = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in times.items())
        held = f", of it held {trajectory.timing.held_s:.1f} s" if trajectory.timing.held_s else ""
        yield Text(f"time: {text}{held}", style="dim")
    evaluation = trajectory.metrics.get("evaluation")
    if isinstance(evaluation, dict) and evaluation:
        yield Text("evaluation:")
        for name, value in evaluation.items():
            text = value if isinstance(value, str) else codec.dump_json(value).decode()
            cut = text if len(text) <= MAX_EVALUATION_CHARS else f"{text[:MAX_EVALUATION_CHARS]} …"
            yield Text(harmless(f"  {name}: {cut}"))
    if (fork := trajectory.forked_from) is not None:
        yield Text(harmless(f"fork of {fork_text(fork)}"), style="dim")
    if trajectory.attempt or trajectory.retried_as:
        again = f", tried again as {trajectory.retried_as}" if trajectory.retried_as else ""
        yield Text(harmless(f"attempt {trajectory.attempt}{again}"), style="dim")


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
        fit_table(console, lambda narrow: turn_table(rows, narrow=narrow, rewards=rewards)),
    ]
    parts += lineage_notes(rows)
    parts += [
        Text(f"turn {omitted.turn} is left out: {harmless(omitted.reason)}", style="yellow")
        for omitted in trajectory.left_out
    ]
    figures = figures_of({"metrics": dict(trajectory.metrics)})
    parts += [] if figures is None else [Text(""), lineage_text(figures)]
    parts += _session_details(trajectory)
    parts.append(Text(_legend_text(plain, tokenizer), style="dim"))
    for number, trace in enumerate(trajectory.traces):
        parts += [
            Text(f"\ntrace {number}: {', '.join(_facts(trace, trajectory.reward))}", style="bold"),
            trace_text(trace, tokenizer, plain=plain),
        ]
    if trajectory.outcome.status != "completed":
        parts += _log_lines(trajectory.outcome.log_tail)
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


def _legend_text(plain: bool, tokenizer: Tokenizer | None) -> str:
    mark = "between « and »" if plain else "green"
    hint = "" if tokenizer is not None else "; tokens are shown as ids: give --model FOLDER to decode them"
    return f"\ntrainable tokens are {mark}{hint}"


def turn_table(
    rows: Sequence[TurnRow], *, narrow: bool = False, rewards: Mapping[int, float] | None = None
) -> Table:
    """The table of turns: which turn each one extends, why, and how it ended. `rewards`, if any, adds a
    column.
    """
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
    """The cells of a turn's row. `before`: the number of prompt tokens that the extended turn has too.
    `matched`: the number of messages of the request that matched.
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
        text.append(
            f"«{words}»" if plain and trainable else words, style=TRAINABLE_STYLE if trainable else CONTEXT
        )
        text.append(" " if tokenizer is None else "")
    return text


def _runs(trace: Trace, tokenizer: Tokenizer | None) -> Iterator[tuple[bool, str]]:
    """Runs of tokens with the same mask, decoded, or as ids without a tokenizer."""
    for mask, run in groupby(zip(trace.loss_mask, trace.token_ids, strict=True), key=lambda pair: pair[0]):
        yield bool(mask), _words([token for _, token in run], tokenizer)


def _words(ids: list[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids))
    return harmless(text_of(ids, tokenizer.token_bytes))
