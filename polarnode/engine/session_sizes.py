"""What the sessions of a kind become: how many tokens they end with, and so how many those that run now will
have.

Pure. Sessions of one kind, such as those of one harness, grow alike. Those of one group, which have one task,
are often even more alike.
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
# A running session: its tokens now without sub-agents, its weight, and its group.
Running = tuple[int, float, str]

ENDS: Final = 64  # independent sessions whose sizes count: those of one step of a trainer
# Sessions whose sizes are remembered. In groups of 8 that are alike, they are worth a sixth of that number.
MAX_ENDS: Final = 256
GUESS_COUNT: Final = 4  # guesses added to the first ends, which are those of short sessions
# Standard deviations beyond chance by which groups must differ from each other, and a trend from none.
CHANCE_DEVIATIONS: Final = 2.0
# Natural logarithm of the largest factor by which a size is corrected for its age, because a line through a
# sudden change is steeper.
MAX_LOG_GROWTH: Final = 1.0
MAX_CORRELATION: Final = 0.9  # members of a group never say everything about each other
# Weight of a look at sub-agents in their mean, which is that of 25 minutes, because only few sessions have
# some at once.
LEARNED: Final = 0.02
LONGER: Final = 1.25  # factor of the largest size seen, up to which a session may still grow


@define(eq=False)
class SessionSizes:
    """The most tokens that each of the last ENDS sessions of a kind had of its own. `guess` stands for them
    before any ended.

    How many sessions reach a size is the estimate of Kaplan and Meier (1958), which takes a session that
    still runs for at least as large as it is. Without it the first sessions to end, which are the short ones,
    would speak for all.

    `passing` are the tokens of sub-agents that a session has on average at any time. `alike` is the part of
    the variance of sizes that is between groups, which is the correlation of two members. `trend` is how much
    sizes grow from one end to the next, as a natural logarithm, because the sessions of a model in training
    grow longer or shorter by the hour.
    """

    guess: int
    passing: float = field(default=0.0, init=False)
    alike: float = field(default=0.0, init=False)
    trend: float = field(default=0.0, init=False)
    _looks: int = field(default=0, init=False)
    _counted: int = field(default=ENDS, init=False)  # how many of the last ends count
    _ends: "deque[tuple[int, str]]" = field(factory=lambda: deque(maxlen=MAX_ENDS), init=False)

    def add(self, tokens: int, group: str = "") -> None:
        """A session of `group` ended with so many tokens. The group is "" where it is not known."""
        self._ends.append((tokens, group))
        self._compare()
        self._follow()

    def passes(self, tokens: float, *, looks: int = 1) -> None:
        """In so many looks at all sessions, their sub-agents had so many tokens on average."""
        self._looks += looks
        self.passing += max(LEARNED, looks / self._looks) * (tokens - self.passing)

    @property
    def ends(self) -> tuple[int, ...]:
        """The last ENDS sizes, the latest last."""
        return tuple(tokens for tokens, _ in self._ends)[-ENDS:]

    @property
    def largest(self) -> int:
        """The largest size that is known or guessed."""
        return max(self._known())[0]

    def expected(self, running: Sequence[Running], growth: Tokens) -> tuple[Tokens, Tokens]:
        """Tokens, float64[G], that sessions are expected to have together when each has grown by `growth`,
        float64[G], with those of sub-agents, and the variance of that, float64[G]. The variance comes from
        which of them get so far, which members of a group do together. A session that has ended by then has
        no tokens.
        """
        now = numpy.array([tokens for tokens, _, _ in running], dtype=float64)
        weight = numpy.array([each for _, each, _ in running])[:, None]
        known = sorted(self._known())
        ends = numpy.array([tokens for tokens, _ in known], dtype=float64)
        groups = list(dict.fromkeys(group for _, _, group in running)) if self.alike else []
        at = numpy.array([groups.index(group) if groups else 0 for _, _, group in running])
        # Of all sessions of a group, the part that is larger than the first n ends, for n from 0 to all.
        larger = _larger_shares(ends, now)[None, :]
        if groups:
            own = numpy.array(
                [[bool(group) and each == group for _, each in known] for group in groups], dtype=float64
            )
            is_of = (at == numpy.arange(len(groups))[:, None]).astype(float64)
            larger = self._group_posterior(larger, own, is_of @ (now[:, None] >= ends))
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

    def _group_posterior(self, larger: Tokens, own: Tokens, reached: Tokens) -> Tokens:
        """`larger` of all sessions, float64[1, E + 1], becomes one row for each group, float64[N, E + 1],
        updated by what its members showed. `own`, float64[N, E], is 1 for each end of a member; `reached`,
        float64[N, E], is how many running members came so far. This is the estimate of Susarla and Van Ryzin
        (1976): with a Dirichlet process that is worth (1 - alike) / alike members, two members correlate by
        `alike`.
        """
        prior = (1.0 - self.alike) * larger
        reached = reached + numpy.cumsum(own[:, ::-1], axis=1)[:, ::-1]
        ended = prior[:, :-1] - prior[:, 1:] + self.alike * own
        hazard = ended / (prior[:, :-1] + self.alike * reached)
        left = numpy.cumprod(numpy.maximum(0.0, 1.0 - hazard), axis=1)
        return numpy.concatenate((numpy.ones((len(own), 1)), left), axis=1)

    def _compare(self) -> None:
        """Compute how alike members of a group are: by the analysis of variance over the last ENDS, less what
        chance does. Members that are alike say less than as many independent sessions, by the design effect
        (Kish 1965). So many more of them count, because else a few short groups in a row would speak for all.
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
        chance = 1.0 + CHANCE_DEVIATIONS * (2.0 / between + 2.0 / within) ** 0.5
        more = apart / max(inside, 1.0) / chance - 1.0
        if more > 0.0:
            size = float(len(every) - (sizes**2).sum() / len(every)) / between
            self.alike = min(MAX_CORRELATION, more / (more + size))
            self._counted = min(MAX_ENDS, round(ENDS * (1.0 + (size - 1.0) * self.alike)))

    def _follow(self) -> None:
        """Compute the trend: the least squares' slope of the logarithms of sizes, by their place among the
        ends that count, less what chance does. While fewer have ended, the long sessions are yet to end,
        which is no trend.
        """
        self.trend = 0.0
        if len(self._ends) < self._counted:
            return
        logs = numpy.log(numpy.array([tokens for tokens, _ in self._last()], dtype=float64))
        place = numpy.arange(len(logs)) - (len(logs) - 1) / 2
        spread = float(place @ place)
        slope = float(place @ logs) / spread
        residual = logs - logs.mean() - slope * place
        # Members that are alike say less: this is the design effect again.
        error = float(residual @ residual) / (len(logs) - 2) / spread * (self._counted / ENDS)
        if slope:
            self.trend = slope * max(0.0, 1.0 - CHANCE_DEVIATIONS**2 * error / slope**2)

    def _last(self) -> list[tuple[int, str]]:
        return list(self._ends)[-self._counted :]

    def _known(self) -> list[tuple[int, str]]:
        """Sizes and groups that count, each as the trend would have it today, and guesses. The more sessions
        have ended, the fewer guesses there are.
        """
        missing = max(0, self._counted - len(self._ends))
        last = self._last()
        if self.trend:
            growth = numpy.clip(self.trend * numpy.arange(len(last))[::-1], -MAX_LOG_GROWTH, MAX_LOG_GROWTH)
            last = [
                (round(tokens * each), group)
                for (tokens, group), each in zip(last, numpy.exp(growth), strict=True)
            ]
        return [*last, *[(self.guess, "")] * -(-GUESS_COUNT * missing // self._counted)]


def _larger_shares(ends: Tokens, sizes: Tokens) -> Tokens:
    """Of all sessions, the part that is larger than the first n of the sorted `ends`, for n from 0 to all,
    where those that run have the `sizes`.
    """
    running = len(sizes) - numpy.searchsorted(numpy.sort(sizes), ends)
    at_risk = len(ends) - numpy.arange(len(ends)) + running
    found: Tokens = numpy.concatenate(([1.0], numpy.cumprod(1.0 - 1.0 / at_risk)))
    return found
