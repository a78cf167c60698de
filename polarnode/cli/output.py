"""What the commands print: consoles, escaped text, and the tables of sessions and trajectories.

Output may contain any text of a model or a harness. Invariant: nothing is read as markup, and no control
character reaches the terminal. Numbers are never folded or cut: where a table is too wide for its terminal,
ids are shortened and names fold.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from polarnode.core.conversation import Json
from polarnode.core.trajectory import ForkedFrom, Outcome, Trajectory

if TYPE_CHECKING:
    from polarnode.core.status import LiveSessionStatus

V = TypeVar("V")

# ── console ───────────────────────────────────────────────────────────────────

# The columns if stdout is not a terminal. No line is folded, so that grep and cut work on the output.
PLAIN_WIDTH = 4096
CONTROL_CHARS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # all control characters but tab and line feed
CONTROL_CHARS_8_BIT = re.compile(r"[\x80-\x9f]")


class _SafeConsole(Console):
    """A console that escapes whatever it prints, except what rich itself sends to control the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)


def open_console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr: coloured and as wide as the terminal, or plain and wide without one."""
    stream = sys.stderr if stderr else sys.stdout
    return _SafeConsole(
        stderr=stderr,
        highlight=False,
        markup=False,
        emoji=False,
        width=None if stream.isatty() else PLAIN_WIDTH,
    )


def fit_table(console: Console, make: Callable[[bool], Table]) -> Table:
    """The table `make(narrow=False)` if the console is wide enough for it, else `make(narrow=True)`."""
    whole = make(False)
    # The table is measured without the limit of the console's own width.
    needed = console.measure(whole, options=console.options.update_width(PLAIN_WIDTH)).maximum
    return whole if needed <= console.width else make(True)


def harmless(text: str) -> str:
    """`text` with its control characters replaced by visible symbols, so that it cannot control the
    terminal.
    """
    shown = CONTROL_CHARS.sub(lambda found: "␡" if found[0] == "\x7f" else chr(0x2400 + ord(found[0])), text)
    return CONTROL_CHARS_8_BIT.sub("\ufffd", shown)


# ── tables ────────────────────────────────────────────────────────────

OUTCOME_STYLE = {
    "completed": "green",
    "timeout": "yellow",
    "failed": "yellow",
    "cancelled": "yellow",
    "interrupted": "yellow",
    "error": "red",
}
MAX_ROWS = 50  # rows of a table: a screen or two, however many samples a task has
SHORT_ID_CHARS = 8  # characters of an id on a narrow terminal; more where two sessions share them
NAMES = ("session", "harness", "outcome")
FIGURES = ("reward", "turns", "traces", "sampled tokens", "trainable", "merged ratio")


def live_table(sessions: Sequence["LiveSessionStatus"], *, rows: int) -> Table:
    """The first `rows` live sessions, running ones first, and the number of the others."""
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
            f"… {len(ordered) - rows} more", "", f"{over} of {len(ordered)} done", "", "", "", style="dim"
        )
    return table


def bounded(rows: Sequence[V], *, more: str = "") -> tuple[Sequence[V], tuple[str, ...]]:
    """The first MAX_ROWS rows of a table, and a line that counts the others, if any; `more` says where to
    find them.
    """
    left = len(rows) - MAX_ROWS
    # One more row takes no more space than the line that would count it.
    return (rows, ()) if left <= 1 else (rows[:MAX_ROWS], (f"… {left} more{more}",))


def result_table(trajectories: Sequence[Trajectory], *, narrow: bool = False) -> Table:
    """A table with a row for each trajectory, at most MAX_ROWS. If there are more, those that did not
    complete come first.
    """
    table = _table(NAMES, FIGURES, narrow=narrow)
    if len(bounded(trajectories)[0]) < len(trajectories):
        trajectories = sorted(trajectories, key=lambda each: each.outcome.status == "completed")
    shown, more = bounded(trajectories)
    length = _distinct_length([each.session_id for each in shown]) if narrow else None
    for trajectory in shown:
        table.add_row(
            harmless(trajectory.session_id)[:length],
            harmless(trajectory.harness),
            outcome_text(trajectory.outcome.status),
            reward_text(trajectory.reward),
            str(len(trajectory.turns)),
            str(len(trajectory.traces)),
            str(trajectory.sampled_tokens),
            str(trajectory.trainable_tokens),
            merged_ratio(trajectory),
        )
    for line in more:
        table.add_row(line, style="dim")
    return table


def outcome_text(status: str) -> Text:
    """An outcome status in its colour."""
    return Text(status, style=OUTCOME_STYLE.get(status, ""))


def reward_text(reward: float | None, none: str = "–") -> str:
    """A reward in up to six digits; `none` if there is none."""
    return none if reward is None else f"{reward:g}"


def fork_text(fork: ForkedFrom) -> str:
    """Where a fork began: its parent, the turn and the way; and, if it left the record before that turn,
    where and why.
    """
    differs = f", in another state from turn {fork.got} on: {fork.differs}" if fork.differs else ""
    return f"{fork.session_id} before turn {fork.turn} by {fork.by}{differs}"


def left_out_tokens(trajectory: Trajectory | None) -> dict[str, Json]:
    """The sampled tokens that no row of a session trains, by reason. Empty if all are trained, or if an older
    node did not count them.
    """
    figures = None if trajectory is None else trajectory.metrics.get("lineage")
    tokens = figures.get("left_out_tokens") if isinstance(figures, dict) else None
    return tokens if isinstance(tokens, dict) else {}


def merged_ratio(trajectory: Trajectory) -> str:
    """Turns per training sequence: 1.0× is no merging; a higher ratio means fewer, longer rows."""
    turns = len({span.turn for trace in trajectory.traces for span in trace.turn_spans})
    return f"{turns / len(trajectory.traces):.1f}×" if trajectory.traces else "–"


def summary(trajectories: Sequence[Trajectory]) -> str:
    """One line with the sums over these trajectories."""
    rewarded = sum((trajectory.reward or 0) > 0 for trajectory in trajectories)
    sampled = sum(each.sampled_tokens for each in trajectories)
    trainable = sum(each.trainable_tokens for each in trajectories)
    rows = sum(len(each.traces) for each in trajectories)
    turns = sum(len(each.turns) for each in trajectories)
    return (
        f"{len(trajectories)} sessions, {rewarded} rewarded; {turns} turns in {rows} training sequences;"
        f" {trainable} of {sampled} sampled tokens trainable"
    )


# Podman adds this after the reason why a program could not be started.
PODMANS_OWN: Final = "Error: read unixpacket @->"


def endings(trajectories: Sequence[Trajectory]) -> list[Text]:
    """Why sessions did not complete: each reason once, with its count and, for a failed session, the last
    line of the harness's log.
    """
    counted = Counter(
        (each.outcome.status, why(each.outcome))
        for each in trajectories
        if each.outcome.status != "completed"
    )
    return [
        Text(f"{count} × {status}: {why}", style=OUTCOME_STYLE.get(status, ""))
        for (status, why), count in counted.most_common()
    ]


def why(outcome: Outcome) -> str:
    """Why a session did not complete: the part or budget at fault, the reason and, for a failed session, the
    last line of the harness's log.
    """
    origin = outcome.boundary or outcome.clock
    tail = (outcome.log_tail or "").strip().split("\n") if outcome.status == "failed" else []
    while len(tail) > 1 and tail[-1].startswith(PODMANS_OWN):
        tail.pop()
    last_line = tail[-1] if tail else ""
    parts = [
        f"({origin})" if origin else "",
        outcome.reason or "no reason was given",
        f"· last log line: {last_line}" if last_line else "",
    ]
    return harmless(" ".join(filter(None, parts)))


def _distinct_length(ids: Sequence[str]) -> int:
    """The length of the shortest prefix by which these ids differ."""
    longest = max(map(len, ids), default=SHORT_ID_CHARS)
    return next(
        (
            length
            for length in range(SHORT_ID_CHARS, longest)
            if len({each[:length] for each in ids}) == len(set(ids))
        ),
        longest,
    )


def _table(names: Sequence[str], figures: Sequence[str], *, narrow: bool) -> Table:
    """An empty table: names aligned left, figures right. The narrow form has two-line headers and folds
    names.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=narrow, padding=(0, 1))
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=not narrow or name == "session")
    for name in figures:
        table.add_column(name.replace(" ", "\n") if narrow else name, justify="right", no_wrap=True)
    return table
