"""What the sessions of a kind become: how many tokens they end with, and so how many those that run now
will have.

Pure. Sessions of one kind, such as those of one harness, grow alike.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy
from attrs import define, field
from numpy import float64
from numpy.typing import NDArray

Tokens = NDArray[float64]

ENDS: Final = 64  # sessions whose sizes are remembered: a step of a trainer
GUESSES: Final = 4  # ends before which a guess makes up the number: one short session must not speak for all
# weight of a look at sub-agents in their mean: that of 25 minutes, for only few sessions have some at once
LEARNED: Final = 0.02
LONGER: Final = 1.25  # of the largest size seen, that a session may yet reach


@define(eq=False)
class SessionSizes:
    """The most tokens that each of the last ENDS sessions of a kind had of its own. `guess`: what stands for
    them before.

    How many reach a size is the estimate of Kaplan and Meier (1958), which takes a session that still runs
    for at least as large as it is. Without it the first to end, the short ones, would speak for all.

    `passing`: tokens of sub-agents that one has on average at any time.
    """

    guess: int
    passing: float = field(default=0.0, init=False)
    _looks: int = field(default=0, init=False)
    _ends: "deque[int]" = field(factory=lambda: deque(maxlen=ENDS), init=False)

    def add(self, tokens: int) -> None:
        """A session ended that had so many."""
        self._ends.append(tokens)

    def passes(self, tokens: float, *, looks: int = 1) -> None:
        """In so many looks at all sessions, their sub-agents have so many tokens on average."""
        self._looks += looks
        self.passing += max(LEARNED, looks / self._looks) * (tokens - self.passing)

    @property
    def ends(self) -> tuple[int, ...]:
        """What is remembered, the latest last."""
        return tuple(self._ends)

    @property
    def largest(self) -> int:
        """The largest size that is known or guessed."""
        return max(self._known())

    def expected(self, running: Sequence[tuple[int, float]], growth: Tokens) -> Tokens:
        """Tokens, float64[G], that sessions are expected to have together when each has grown by `growth`,
        float64[G], those of sub-agents too. One that has ended by then has none. `running`: the tokens of
        each now, without sub-agents, and its weight.
        """
        now, weight = numpy.array(running).T
        ends, sizes = numpy.sort(self._known()), numpy.sort(now)
        at_risk = len(ends) - numpy.arange(len(ends)) + len(sizes) - numpy.searchsorted(sizes, ends)
        # of all sessions, the part that is larger than the first n ends, n from 0 to all
        larger = numpy.concatenate(([1.0], numpy.cumprod(1.0 - 1.0 / at_risk)))
        then = now[:, None] + growth
        reach = larger[numpy.searchsorted(ends, then, "left")]
        reached = larger[numpy.searchsorted(ends, now, "right")][:, None]
        part = numpy.divide(reach, reached, out=numpy.ones_like(reach), where=reached > 0)
        part[then > max(ends[-1], LONGER * sizes[-1])] = 0.0
        found: Tokens = weight @ ((then + self.passing) * numpy.minimum(part, 1.0))
        return found

    def _known(self) -> list[int]:
        return [*self._ends, *[self.guess] * max(0, GUESSES - len(self._ends))]
