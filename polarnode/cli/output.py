"""How the verbs print: a console as wide as its reader, tables that give way before their figures do, and
foreign text made harmless.

The rule for whoever edits it: what is printed may hold anything a model or a harness wrote, so nothing is
read as markup, and no control character reaches the terminal.

Tables and colours: sessions as they run, trajectories when they are done. Pure: values in, rich renderables
out.

The rule for whoever edits it: figures are never folded or cut. Where a table is too wide for its terminal,
ids become short and names fold.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polarnode.core.trajectory import Trajectory
from polarnode.rollouts.scheduler import LiveSessionStatus

# ── printing ────────────────────────────────────────────────────────────

# columns where there is no terminal: nothing is folded, so that a log is searched line by line and a table
# cut by column
PLAIN_WIDTH = 4096
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # all but tab and line feed
CONTROLS_8_BIT = re.compile(r"[\x80-\x9f]")


def open_console(*, stderr: bool = False) -> Console:
    """A console on the stream as it is now: coloured and fitted on a terminal, plain and wide elsewhere."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr,
        highlight=False,
        markup=False,
        emoji=False,
        width=None if stream.isatty() else PLAIN_WIDTH,
    )


def fitted(console: Console, make: Callable[[bool], Table]) -> Table:
    """`make(False)`, the whole table; `make(True)`, the narrow one, where the console has no room for the
    whole.
    """
    whole = make(False)
    # measured at its own width it is never too wide
    asked = console.measure(whole, options=console.options.update_width(PLAIN_WIDTH)).maximum
    return whole if asked <= console.width else make(True)


def harmless(text: str) -> str:
    """`text` with its control characters shown as signs: a tool's output must not move the reader's cursor or
    set a title.
    """
    shown = CONTROLS.sub(lambda found: "␡" if found[0] == "\x7f" else chr(0x2400 + ord(found[0])), text)
    return CONTROLS_8_BIT.sub("\ufffd", shown)


# ── tables ────────────────────────────────────────────────────────────

OUTCOME_STYLE = {
    "completed": "green",
    "timeout": "yellow",
    "failed": "yellow",
    "cancelled": "yellow",
    "interrupted": "yellow",
    "error": "red",
}
SHORT_ID = 8  # characters of an id on a narrow terminal, or more where two sessions share them
NAMES = ("session", "harness", "outcome")
FIGURES = ("reward", "turns", "traces", "sampled tokens", "trainable", "merged ratio")


def live_table(sessions: Sequence[LiveSessionStatus], *, rows: int) -> Table:
    """Sessions on their way, at most `rows` of them, those that run first; the rest as a count."""
    table = _table(("session", "harness", "phase"), ("turns", "tokens", "reward"), narrow=False)
    ordered = sorted(sessions, key=lambda status: (status.outcome is not None, status.phase != "run"))
    for status in ordered[:rows]:
        phase = (
            outcome_text(status.outcome)
            if status.outcome
            else Text(status.phase, style="cyan" if status.phase == "run" else "dim")
        )
        table.add_row(
            status.session_id,
            status.harness,
            phase,
            str(status.turns),
            str(status.sampled_tokens),
            reward_text(status.reward, ""),
        )
    if len(ordered) > rows:
        over = sum(status.outcome is not None for status in ordered)
        table.add_row(
            f"… {len(ordered) - rows} more", "", f"{over} of {len(ordered)} over", "", "", "", style="dim"
        )
    return table


def result_table(trajectories: Sequence[Trajectory], *, narrow: bool = False) -> Table:
    """What came out, one row a session."""
    table = _table(NAMES, FIGURES, narrow=narrow)
    length = _distinct([each.session_id for each in trajectories]) if narrow else None
    for trajectory in trajectories:
        table.add_row(
            trajectory.session_id[:length],
            harmless(trajectory.harness),
            outcome_text(trajectory.outcome.status),
            reward_text(trajectory.reward),
            str(len(trajectory.turns)),
            str(len(trajectory.traces)),
            str(trajectory.sampled_tokens),
            str(trajectory.trainable_tokens),
            merged_ratio(trajectory),
        )
    return table


def outcome_text(status: str) -> Text:
    """An outcome in its colour."""
    return Text(status, style=OUTCOME_STYLE.get(status, ""))


def reward_text(reward: float | None, none: str = "–") -> str:
    """A reward in few digits."""
    return none if reward is None else f"{reward:g}"


def merged_ratio(trajectory: Trajectory) -> str:
    """Turns per training sequence: 1 is no merging, more is fewer and longer rows."""
    turns = len({span.turn for trace in trajectory.traces for span in trace.turn_spans})
    return f"{turns / len(trajectory.traces):.1f}×" if trajectory.traces else "–"


def summary(trajectories: Sequence[Trajectory]) -> str:
    """One line for a group of sessions."""
    rewarded = sum((trajectory.reward or 0) > 0 for trajectory in trajectories)
    sampled, trainable = (
        sum(each.sampled_tokens for each in trajectories),
        sum(each.trainable_tokens for each in trajectories),
    )
    rows, turns = (
        sum(len(each.traces) for each in trajectories),
        sum(len(each.turns) for each in trajectories),
    )
    return (
        f"{len(trajectories)} sessions, {rewarded} rewarded; {turns} turns in {rows} training sequences;"
        f" {trainable} of {sampled} sampled tokens trainable"
    )


def endings(trajectories: Sequence[Trajectory]) -> list[Text]:
    """Why sessions did not complete: each reason once, with how many it ended and, for one that failed, the
    harness's last line.
    """
    counted = Counter(
        (each.outcome.status, _why(each)) for each in trajectories if each.outcome.status != "completed"
    )
    return [
        Text(f"{count} × {status}: {why}", style=OUTCOME_STYLE.get(status, ""))
        for (status, why), count in counted.most_common()
    ]


def _why(trajectory: Trajectory) -> str:
    outcome = trajectory.outcome
    whose = outcome.boundary or outcome.clock
    last_words = (outcome.log_tail or "").strip().rpartition("\n")[2] if outcome.status == "failed" else ""
    said = [
        f"({whose})" if whose else "",
        outcome.reason or "no reason was given",
        f"· its last line: {last_words}" if last_words else "",
    ]
    return harmless(" ".join(filter(None, said)))


def _distinct(ids: Sequence[str]) -> int:
    """How many characters tell these ids apart."""
    longest = max(map(len, ids), default=SHORT_ID)
    return next(
        (
            length
            for length in range(SHORT_ID, longest)
            if len({each[:length] for each in ids}) == len(set(ids))
        ),
        longest,
    )


def _table(names: Sequence[str], figures: Sequence[str], *, narrow: bool) -> Table:
    """Names to the left, figures to the right. The narrow one has headers of two lines, one blank between
    columns, and folds names.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=narrow, padding=(0, 1))
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=not narrow or name == "session")
    for name in figures:
        table.add_column(name.replace(" ", "\n") if narrow else name, justify="right", no_wrap=True)
    return table
