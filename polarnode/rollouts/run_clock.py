"""The clock of a session's RUN: what calls are held for their place in an engine's cache, or for a snapshot,
costs no budget.

The engine's policy holds a call so that others are not read again. Without this clock it would end sessions
to save tokens; the bound keeps a session from living on holds.
"""

from typing import Final

import trio
from attrs import define, field

# seconds that a run may be longer by what its calls were held for their place in the engine's cache: ten of
# the longest holds, where most sessions have none
HELD_MOST_S: Final = 600.0


@define(eq=False)
class RunClock:
    """`scope`: its deadline is the end of RUN. `before_s`: seconds that were spent before this RUN began, by
    the session that this one goes on with.
    """

    scope: trio.CancelScope = field(factory=trio.CancelScope)
    before_s: float = 0.0
    _began: float | None = field(default=None, init=False)
    _held_s: float = field(default=0.0, init=False)

    @property
    def held_s(self) -> float:
        """Seconds that its calls were held, at least 0."""
        return max(0.0, self._held_s)

    def begin(self, scope: trio.CancelScope, budget_s: float) -> None:
        """RUN begins in `scope`, with what is left of its budget."""
        self.scope, self._began = scope, trio.current_time()
        scope.deadline = self._began + budget_s - self.before_s

    @property
    def spent_s(self) -> float:
        """Seconds of the budget that are spent, those before this RUN too."""
        if self._began is None:
            return self.before_s
        return self.before_s + trio.current_time() - self._began - min(self.held_s, HELD_MOST_S)

    def credit(self, seconds: float) -> None:
        """Move the end of RUN by what a call is held, in seconds; back, where it was held for less."""
        before, self._held_s = self._held_s, self._held_s + seconds
        self.scope.deadline += min(self._held_s, HELD_MOST_S) - min(before, HELD_MOST_S)
