"""Count the results of a harness's sessions and format the lines of the tables.

Every share is printed with its total.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

# nats: what the engine's kernels and transformers' may differ by; float32 on one machine stays a thousand
# times below
TOLERANCE = 2e-2


@dataclass
class Differences:
    """|recorded - recomputed| of the trained tokens that are there to be compared; `lost` are those that are
    not.
    """

    worst: float = 0.0
    total: float = 0.0
    count: int = 0
    off: int = 0
    lost: int = 0

    def add(self, recorded: Iterable[float], own: Iterable[float]) -> None:
        for one, other in zip(recorded, own, strict=True):
            away = abs(one - other)
            self.worst, self.total, self.count, self.off = (
                max(self.worst, away),
                self.total + away,
                self.count + 1,
                self.off + (away > TOLERANCE),
            )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def tokens(self) -> int:
        return self.count + self.lost


@dataclass
class Retellings:
    """Results of one way to make rows from text: counts of rows, turns and tokens."""

    rows: int = 0
    broken_rows: int = 0
    turns: int = 0
    broken_turns: int = 0
    differences: Differences = field(default_factory=Differences)

    def line(self) -> list[str]:
        found = self.differences
        worst, mean = (f"{found.worst:.2f}", f"{found.mean:.4f}") if found.count else ("–", "–")
        tokens = [share(found.lost, found.tokens), share(found.off, found.tokens), worst, mean]
        return [share(self.broken_rows, self.rows), share(self.broken_turns, self.turns), *tokens]


@dataclass
class Tally:
    """All of one harness. `unmatched` turns have no recorded request that is surely theirs."""

    sessions: int = 0
    rows: int = 0
    turns: int = 0
    longest: int = 0
    unmatched: int = 0
    kept: Differences = field(default_factory=Differences)
    in_place: Retellings = field(default_factory=Retellings)
    rendered: Retellings = field(default_factory=Retellings)
    compared_rows: int = 0  # of those that a gateway which joins exact prefixes can be compared with
    pieces: int = 0  # rows it makes of them

    def faithful(self) -> list[str]:
        return [
            str(self.sessions),
            str(self.turns),
            str(self.longest),
            str(self.rows),
            f"{self.kept.count}",
            f"{self.kept.worst:.1e}",
            f"{self.kept.mean:.1e}",
        ]


def share(part: int, whole: int) -> str:
    return f"{part} of {whole}" if whole else "–"


FAITHFUL = ("harness", "sessions", "turns", "most turns", "rows", "trained tokens", "max Δ", "mean Δ")
RETOLD = (
    "harness",
    "rows broken",
    "turns broken",
    "tokens lost",
    f"tokens off by more than {TOLERANCE:g}",
    "max Δ",
    "mean Δ",
)


def tables(tallies: dict[str, Tally]) -> str:
    """Markdown: as they are; samples decoded and encoded; conversations rendered again, with the rows of a
    gateway that joins exact prefixes.
    """
    named = sorted(tallies.items())
    as_they_are = table(FAITHFUL, [[name, *each.faithful()] for name, each in named])
    in_place = table(RETOLD, [[name, *each.in_place.line()] for name, each in named])
    heads = (*RETOLD, "rows by exact prefixes")
    again = table(
        heads,
        [[name, *each.rendered.line(), f"{each.pieces} for {each.compared_rows}"] for name, each in named],
    )
    parts = [
        "As they are:",
        as_they_are,
        "Samples decoded and encoded in place:",
        in_place,
        "Conversations rendered again, as the harness gave them back:",
        again,
    ]
    return "\n\n".join(parts)


def table(head: tuple[str, ...], lines: list[list[str]]) -> str:
    rows = [list(head), ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
