"""What the sessions of a kind become: how many tokens they end with, and so how many those that run now
will have.

Pure. Sessions of one kind, such as those of one harness, grow alike, and those of one group, which have one
task, often more so.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy
from attrs import define, field
from numpy import float64
from numpy.typing import NDArray

Tokens = NDArray[float64]
# a session that runs: its tokens now without sub-agents, its weight, and its group
Running = tuple[int, float, str]

ENDS: Final = 64  # independent sessions whose sizes count: a step of a trainer
# sessions whose sizes are remembered: those of groups of 8 that are alike are worth a sixth of that
MOST_ENDS: Final = 256
GUESSES: Final = 4  # guesses beside the first ends, which are those of short sessions
# standard deviations by which groups must differ, and a trend from none, beyond what chance does
CHANCE: Final = 2.0
# natural logarithm of how often a size is multiplied for its age: a line through a sudden change is steeper
MOST_GROWTH: Final = 1.0
MOST_ALIKE: Final = 0.9  # what members of a group tell is never all
# weight of a look at sub-agents in their mean: that of 25 minutes, for only few sessions have some at once
LEARNED: Final = 0.02
LONGER: Final = 1.25  # of the largest size seen, that a session may yet reach


@define(eq=False)
class SessionSizes:
    """The most tokens that each of the last ENDS sessions of a kind had of its own. `guess`: what stands for
    them before.

    How many reach a size is the estimate of Kaplan and Meier (1958), which takes a session that still runs
    for at least as large as it is. Without it the first to end, the short ones, would speak for all.

    `passing`: tokens of sub-agents that one has on average at any time. `alike`: the part of the variance of
    sizes that is between groups, which is the correlation of two members. `trend`: by how much sizes grow
    from one end to the next, as a natural logarithm: what is trained grows longer or shorter by the hour.
    """

    guess: int
    passing: float = field(default=0.0, init=False)
    alike: float = field(default=0.0, init=False)
    trend: float = field(default=0.0, init=False)
    _looks: int = field(default=0, init=False)
    _counted: int = field(default=ENDS, init=False)  # of the last ends
    _ends: "deque[tuple[int, str]]" = field(factory=lambda: deque(maxlen=MOST_ENDS), init=False)

    def add(self, tokens: int, group: str = "") -> None:
        """A session of `group` ended that had so many; "" where its group is not known."""
        self._ends.append((tokens, group))
        self._compare()
        self._follow()

    def passes(self, tokens: float, *, looks: int = 1) -> None:
        """In so many looks at all sessions, their sub-agents have so many tokens on average."""
        self._looks += looks
        self.passing += max(LEARNED, looks / self._looks) * (tokens - self.passing)

    @property
    def ends(self) -> tuple[int, ...]:
        """The last ENDS, the latest last."""
        return tuple(tokens for tokens, _ in self._ends)[-ENDS:]

    @property
    def largest(self) -> int:
        """The largest size that is known or guessed."""
        return max(self._known())[0]

    def expected(self, running: Sequence[Running], growth: Tokens) -> tuple[Tokens, Tokens]:
        """Tokens, float64[G], that sessions are expected to have together when each has grown by `growth`,
        float64[G], those of sub-agents too, and the variance of that, float64[G]: by who of them gets so far,
        which members of a group do together. One that has ended by then has none.
        """
        now = numpy.array([tokens for tokens, _, _ in running], dtype=float64)
        weight = numpy.array([each for _, each, _ in running])[:, None]
        known = sorted(self._known())
        ends = numpy.array([tokens for tokens, _ in known], dtype=float64)
        groups = list(dict.fromkeys(group for _, _, group in running)) if self.alike else []
        at = numpy.array([groups.index(group) if groups else 0 for _, _, group in running])
        # of all sessions of a group, the part that is larger than the first n ends, n from 0 to all
        larger = _larger(ends, now)[None, :]
        if groups:
            own = numpy.array(
                [[bool(group) and each == group for _, each in known] for group in groups], dtype=float64
            )
            is_of = (at == numpy.arange(len(groups))[:, None]).astype(float64)
            larger = self._posterior(larger, own, is_of @ (now[:, None] >= ends))
        then = now[:, None] + growth
        reach = larger[at[:, None], numpy.searchsorted(ends, then, "left")]
        reached = larger[at, numpy.searchsorted(ends, now, "right")][:, None]
        part = numpy.divide(reach, reached, out=numpy.ones_like(reach), where=reached > 0)
        part[then > max(ends[-1], LONGER * now.max())] = 0.0
        part = numpy.minimum(part, 1.0)
        tokens = weight * (then + self.passing)
        mean: Tokens = (tokens * part).sum(axis=0)
        deviations = tokens * numpy.sqrt(part * (1.0 - part))
        variance: Tokens = (deviations**2).sum(axis=0)
        if groups:
            together = (is_of @ deviations) ** 2 - is_of @ deviations**2
            variance += (together / (1.0 / self.alike + own.sum(axis=1))[:, None]).sum(axis=0)
        return mean, variance

    def _posterior(self, larger: Tokens, own: Tokens, reached: Tokens) -> Tokens:
        """`larger` of all sessions, float64[1, E + 1], for each group, float64[N, E + 1], after what its
        members told: `own`, float64[N, E], is 1 for each end of one, `reached`, float64[N, E], is how many
        that run came so far. The estimate of Susarla and Van Ryzin (1976): a Dirichlet process that is worth
        (1 - alike) / alike members has two members correlate by `alike`.
        """
        prior = (1.0 - self.alike) * larger
        reached = reached + numpy.cumsum(own[:, ::-1], axis=1)[:, ::-1]
        ended = prior[:, :-1] - prior[:, 1:] + self.alike * own
        hazard = ended / (prior[:, :-1] + self.alike * reached)
        left = numpy.cumprod(numpy.maximum(0.0, 1.0 - hazard), axis=1)
        return numpy.concatenate((numpy.ones((len(own), 1)), left), axis=1)

    def _compare(self) -> None:
        """How alike members of a group are: by the analysis of variance over the last ENDS, less what chance
        does. Members that are alike tell less than as many others, by the design effect (Kish 1965): so many
        more of them count, for else a few short groups in a row would speak for all.
        """
        by_group: dict[str, list[int]] = {}
        for tokens, group in itertools.islice(reversed(self._ends), ENDS):
            if group:
                by_group.setdefault(group, []).append(tokens)
        groups = [numpy.array(each, dtype=float64) for each in by_group.values() if len(each) > 1]
        self.alike, self._counted = 0.0, ENDS
        if len(groups) < 2:
            return
        sizes = numpy.array([len(each) for each in groups])
        means, every = numpy.array([each.mean() for each in groups]), numpy.concatenate(groups)
        between, within = len(groups) - 1, len(every) - len(groups)
        apart = float(sizes @ (means - every.mean()) ** 2) / between
        inside = float(sum(((each - each.mean()) ** 2).sum() for each in groups)) / within
        chance = 1.0 + CHANCE * (2.0 / between + 2.0 / within) ** 0.5
        more = apart / max(inside, 1.0) / chance - 1.0
        if more > 0.0:
            size = float(len(every) - (sizes**2).sum() / len(every)) / between
            self.alike = min(MOST_ALIKE, more / (more + size))
            self._counted = min(MOST_ENDS, round(ENDS * (1.0 + (size - 1.0) * self.alike)))

    def _follow(self) -> None:
        """The trend: the least squares' slope of the logarithms of sizes, by their place among the ends that
        count, less what chance does. While fewer have ended, the long ones are yet to end, which is no trend.
        """
        self.trend = 0.0
        if len(self._ends) < self._counted:
            return
        logs = numpy.log(numpy.array([tokens for tokens, _ in self._last()], dtype=float64))
        place = numpy.arange(len(logs)) - (len(logs) - 1) / 2
        spread = float(place @ place)
        slope = float(place @ logs) / spread
        residual = logs - logs.mean() - slope * place
        # members that are alike tell less: the design effect again
        error = float(residual @ residual) / (len(logs) - 2) / spread * (self._counted / ENDS)
        if slope:
            self.trend = slope * max(0.0, 1.0 - CHANCE**2 * error / slope**2)

    def _last(self) -> list[tuple[int, str]]:
        return list(self._ends)[-self._counted :]

    def _known(self) -> list[tuple[int, str]]:
        """Sizes and groups that count, each as the trend would have it today, and guesses: the fewer, the
        more sessions have ended.
        """
        missing = max(0, self._counted - len(self._ends))
        last = self._last()
        if self.trend:
            growth = numpy.clip(self.trend * numpy.arange(len(last))[::-1], -MOST_GROWTH, MOST_GROWTH)
            last = [
                (round(tokens * each), group)
                for (tokens, group), each in zip(last, numpy.exp(growth), strict=True)
            ]
        return [*last, *[(self.guess, "")] * -(-GUESSES * missing // self._counted)]


def _larger(ends: Tokens, sizes: Tokens) -> Tokens:
    """Of all sessions, the part that is larger than the first n of the sorted `ends`, n from 0 to all, where
    those that run have the `sizes`.
    """
    running = len(sizes) - numpy.searchsorted(numpy.sort(sizes), ends)
    at_risk = len(ends) - numpy.arange(len(ends)) + running
    found: Tokens = numpy.concatenate(([1.0], numpy.cumprod(1.0 - 1.0 / at_risk)))
    return found
