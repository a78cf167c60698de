"""The pauses between attempts at what may succeed later.

Pure arithmetic: the caller supplies the clock and the randomness, so the client's scripts and the node's
background services use the same schedule.
"""

from collections.abc import Iterator

from attrs import frozen


@frozen(kw_only=True)
class Backoff:
    """Exponential pauses with a cap. All times are seconds.

    The first pause is `first_s`; each later one is `factor` times longer, up to `longest_s`. `jitter` is the
    largest part of a pause that is added to it at random (0.2: up to 20 % more), so that clients that failed
    together do not retry together.
    """

    first_s: float
    longest_s: float
    factor: float = 2.0
    jitter: float = 0.0

    def delay(self, attempt: int, *, at_least_s: float = 0.0, draw: float = 0.0) -> float:
        """Seconds to wait after failed attempt number `attempt`, counted from 0.

        `at_least_s` is a lower bound set by the other side (a Retry-After header); it may exceed `longest_s`.
        `draw` is a random number in [0, 1) that decides the share of `jitter`; 0 adds none.
        """
        try:
            pause = min(self.first_s * self.factor**attempt, self.longest_s)
        except OverflowError:  # after thousands of attempts
            pause = self.longest_s
        return max(pause, at_least_s) * (1.0 + self.jitter * draw)

    def delays(self) -> Iterator[float]:
        """The pauses in order, without jitter and without an end."""
        attempt = 0
        while True:
            yield self.delay(attempt)
            attempt += 1
