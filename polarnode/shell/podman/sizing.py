"""How many warm runtimes of a shape are enough: as many as are taken while another one starts, and some for luck.

Pure. By Little's law `rate * start_s` are on their way at any time; takes come in bursts, so as many again as the root of that stand ready (the
square-root rule of staffing). The rule for whoever edits it: never more than may be taken, so that nothing is started for nobody.
"""

import math

from attrs import define

WINDOW_S = 30.0  # seconds over which takes are counted: longer than a start takes on the busiest machine seen, shorter than a group's runs
SMOOTH = 0.3  # of each new start's time in the mean: a start is 0.1 s quiet and 3 s on a busy machine, and it is the last few that tell
FIRST_START_S = 0.5  # seconds a start is thought to take before one was seen


@define(eq=False)
class Pace:
    """Takes of one shape lately, as a count that fades."""

    _count: float = 0.0
    _counted_at: float = -math.inf

    def taken(self, now: float) -> None:
        """One was taken, warm or not."""
        self._count = self._faded(now) + 1.0
        self._counted_at = now

    def rate(self, now: float) -> float:
        """Takes a second."""
        return self._faded(now) / WINDOW_S

    def _faded(self, now: float) -> float:
        return self._count * math.exp((self._counted_at - now) / WINDOW_S)


@define(eq=False)
class Starts:
    """How long starts take, of all shapes: what differs is the load of the machine, not the image."""

    mean_s: float = FIRST_START_S
    _seen: bool = False

    def took(self, seconds: float) -> None:
        """A start took so long."""
        self.mean_s = (1 - SMOOTH) * self.mean_s + SMOOTH * seconds if self._seen else seconds
        self._seen = True


def enough(*, waiting: int, rate: float, start_s: float, most: int) -> int:
    """Warm ones to keep: none for nobody, one for whoever waits, more where they are taken faster than they start."""
    under_way = rate * start_s
    return min(waiting, most, max(1, math.ceil(under_way + math.sqrt(under_way))))
