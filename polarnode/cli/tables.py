"""Tables and colours: sessions as they run, trajectories when they are done. Pure: values in, rich renderables out."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from polarnode.records import Trajectory
from polarnode.shell.scheduler import SessionStatus

OUTCOME_STYLE = {
    "completed": "green",
    "timeout": "yellow",
    "failed": "yellow",
    "cancelled": "yellow",
    "interrupted": "yellow",
    "error": "red",
}


def live_table(sessions: Sequence[SessionStatus]) -> Table:
    """Sessions on their way, one row each."""
    table = _table(("session", "left"), ("harness", "left"), ("phase", "left"), ("turns", "right"), ("tokens", "right"), ("reward", "right"))
    for status in sessions:
        phase = outcome_text(status.outcome) if status.outcome else Text(status.phase, style="cyan" if status.phase == "run" else "dim")
        reward = "" if status.reward is None else f"{status.reward:g}"
        table.add_row(status.session_id, status.harness, phase, str(status.turns), str(status.sampled_tokens), reward)
    return table


def result_table(trajectories: Sequence[Trajectory]) -> Table:
    """What came out, one row a session."""
    columns = [("session", "left"), ("harness", "left"), ("outcome", "left"), ("reward", "right"), ("turns", "right"), ("traces", "right")]
    table = _table(*columns, ("sampled", "right"), ("trainable", "right"), ("merged", "right"))
    for trajectory in trajectories:
        reward = "–" if trajectory.reward is None else f"{trajectory.reward:g}"
        table.add_row(
            trajectory.session_id,
            trajectory.harness,
            outcome_text(trajectory.outcome.status),
            reward,
            str(len(trajectory.turns)),
            str(len(trajectory.traces)),
            str(sampled_tokens(trajectory)),
            str(trainable_tokens(trajectory)),
            merged_ratio(trajectory),
        )
    return table


def outcome_text(status: str) -> Text:
    """An outcome in its colour."""
    return Text(status, style=OUTCOME_STYLE.get(status, ""))


def sampled_tokens(trajectory: Trajectory) -> int:
    """Tokens the model sampled in this session."""
    return sum(len(turn.sampled) for turn in trajectory.turns)


def trainable_tokens(trajectory: Trajectory) -> int:
    """Tokens that carry loss, over all traces."""
    return sum(trace.loss_mask.count(1) for trace in trajectory.traces)


def merged_ratio(trajectory: Trajectory) -> str:
    """Turns per training sequence: 1 is no merging, more is fewer and longer rows."""
    turns = len({span.turn for trace in trajectory.traces for span in trace.turn_spans})
    return f"{turns / len(trajectory.traces):.1f}×" if trajectory.traces else "–"


def summary(trajectories: Sequence[Trajectory]) -> str:
    """One line for a group of sessions."""
    rewarded = sum((trajectory.reward or 0) > 0 for trajectory in trajectories)
    sampled, trainable = sum(map(sampled_tokens, trajectories)), sum(map(trainable_tokens, trajectories))
    rows, turns = sum(len(each.traces) for each in trajectories), sum(len(each.turns) for each in trajectories)
    return f"{len(trajectories)} sessions, {rewarded} rewarded; {turns} turns in {rows} training sequences; {trainable} of {sampled} sampled tokens trainable"


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
    return table
