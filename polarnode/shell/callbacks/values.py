"""What is known of callbacks from outside, and how long whoever failed is left alone. The rule for whoever edits it: every number has its reason."""

import random
from collections.abc import Mapping

import trio
from attrs import define, field, frozen

FIRST_PAUSE_S = 1.0  # after a first failure; each later one is followed by twice as long a pause
LONGEST_PAUSE_S = 60.0  # a trainer that is back is told within a minute or so
JITTER = 0.25  # of a pause: what failed together need not come back together
DOUBLINGS = 30  # far beyond the longest pause: a float has an end too


@frozen(kw_only=True)
class CallbackStatistics:
    """Since the node's start: events `taken`, attempts that `failed`. Since there is this journal: events that went with its retention before they
    were taken (`expired`).

    Now: `owed` events as of the last look, POSTs `under_way`, `urls` looked after, `trouble` by URL (without its query): what its last failed
    attempt met, of the last few.
    """

    taken: int = 0
    failed: int = 0
    expired: int = 0
    owed: int = 0
    under_way: int = 0
    urls: int = 0
    trouble: Mapping[str, str] = field(factory=dict)


@define(eq=False)
class Pause:
    """How long somebody is left alone. `url` is whose it is, where it is a task's."""

    url: str = ""
    failures: int = 0
    until: float = 0.0

    @property
    def resting(self) -> bool:
        return self.until > trio.current_time()

    def longer(self) -> None:
        """It failed again."""
        usual = min(FIRST_PAUSE_S * 2.0**self.failures, LONGEST_PAUSE_S)
        self.failures = min(self.failures + 1, DOUBLINGS)
        self.until = trio.current_time() + usual * (1 + JITTER * random.random())
