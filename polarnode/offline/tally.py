"""The table of what was generated: attempts, how many were accepted, and why the others were not, by group of tasks.

The rule for whoever edits it: a row's reasons add up to its attempts, and the rows to the last one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from attrs import define, field

from polarnode.conversation import Json
from polarnode.offline.accept import REASONS, Judged, Reason
from polarnode.records import Trajectory

GROUPING: Final = ("repo", "dataset", "source")  # metadata that tells tasks' origin, the first that any task has
ALL: Final = "all"
OTHER: Final = "(none)"


@define(eq=False)
class Group:
    """One row."""

    name: str
    reasons: Counter[Reason] = field(factory=Counter)
    turns: int = 0
    sampled_tokens: int = 0
    run_s: float = 0.0

    @property
    def attempts(self) -> int:
        return self.reasons.total()

    @property
    def accepted(self) -> int:
        return self.reasons["accepted"]

    @property
    def share(self) -> float:
        """Of its attempts, so many were accepted; 0 for none."""
        return self.accepted / self.attempts if self.attempts else 0.0

    def add(self, trajectory: Trajectory, judged: Judged) -> None:
        """Count one session."""
        self.reasons[judged.reason] += 1
        self.turns += len(trajectory.turns)
        self.sampled_tokens += trajectory.sampled_tokens
        self.run_s += trajectory.timing.run_s


@define(eq=False)
class Tally:
    """All rows. `by` is the metadata key that tells them apart; None puts everything into one."""

    by: str | None
    total: Group = field(factory=lambda: Group(ALL))
    groups: dict[str, Group] = field(factory=dict)

    def add(self, trajectory: Trajectory, judged: Judged) -> None:
        """Count one session, in its row and in the sum."""
        if self.by is not None:
            name = group_name(trajectory.metadata, self.by)
            self.groups.setdefault(name, Group(name)).add(trajectory, judged)
        self.total.add(trajectory, judged)

    def rows(self) -> list[Group]:
        """The rows, the largest share first as in the literature, and the sum last."""
        ordered = sorted(self.groups.values(), key=lambda group: (-group.share, group.name))
        return [*ordered, self.total]

    def seen(self) -> list[Reason]:
        """The reasons that occurred besides acceptance, in their order."""
        return [reason for reason in REASONS if reason != "accepted" and self.total.reasons[reason]]

    def json(self) -> dict[str, Json]:
        """As JSON."""
        rows: list[Json] = [_row_json(group) for group in self.rows()]
        return {"by": self.by, "rows": rows}


def _row_json(group: Group) -> dict[str, Json]:
    return {
        "name": group.name,
        "attempts": group.attempts,
        "accepted": group.accepted,
        "share": round(group.share, 4),
        "reasons": {reason: count for reason, count in group.reasons.items() if reason != "accepted"},
        "turns": group.turns,
        "sampled_tokens": group.sampled_tokens,
        "run_s": round(group.run_s, 3),
    }


def group_name(metadata: Mapping[str, Json], key: str) -> str:
    """The name of a task's group."""
    value = metadata.get(key)
    return OTHER if value is None else value if isinstance(value, str) else str(value)


def grouping_of(tasks: Sequence[Mapping[str, Json]]) -> str | None:
    """The first key of GROUPING that some task's metadata has."""
    return next((key for key in GROUPING if any(metadata.get(key) is not None for metadata in tasks)), None)
