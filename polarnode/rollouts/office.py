"""Which front commands this node.

Pure: the caller gives the time. The front in office holds its term while its feed is open, but a machine that
lost its power closes nothing, and neither does a process that hangs. So a second front that asks for a term
is a challenge: the report tells the one in office, which gives its term again; when it does not within
ANSWER_S, the other one gets the next term.
"""

from math import inf
from typing import Final

from attrs import define, field

from polarnode.core.errors import Superseded
from polarnode.core.fleet import TermOrder

# to answer a challenge: as long as a node may be silent before it is gone, less the seconds of a new front
ANSWER_S: Final = 8.0
CALM_S: Final = 8.0  # after an answer: a second front that asks each second costs one answer in so long


@define(eq=False)
class Office:
    """A node's front. `feeds`: open feeds by front."""

    term: int = 0
    front: str = ""
    feeds: dict[str, int] = field(factory=dict)
    _asked: float | None = field(default=None, init=False)  # the first time since the last answer
    _answered: float = field(default=-inf, init=False)

    @property
    def challenged(self) -> bool:
        """Whether the front in office has to give its term again."""
        return self._asked is not None

    def take(self, order: TermOrder, now: float) -> bool:
        """A front takes office, or gives its term again. Whether that changed anything. Raises Superseded."""
        same = order.front == self.front
        if order.term < self.term or (order.term == self.term and not same):
            raise Superseded(f"term {self.term} is held here: take a higher one than {order.term}")
        if not same and self.feeds.get(self.front):
            self._challenge(now)
        self._asked, self._answered = None, now
        changed = (order.term, order.front) != (self.term, self.front)
        self.term, self.front = order.term, order.front
        return changed

    def _challenge(self, now: float) -> None:
        """Raise Superseded, unless the front in office was asked ANSWER_S ago and has not answered."""
        if self._asked is None and now - self._answered >= CALM_S:
            self._asked = now
        if self._asked is None or now - self._asked < ANSWER_S:
            raise Superseded(
                f"the front of term {self.term} reads this node's feed: end that front first, or wait until"
                f" it has not answered for {ANSWER_S:g} s"
            )

    def check(self, term: int) -> None:
        """Raise Superseded for a command of an earlier term."""
        if term < self.term:
            raise Superseded(f"the command has term {term} and this node is in term {self.term}")
