"""The clock of a session's RUN. The time that calls are held for their place in an engine's cache, or for a
snapshot, costs no budget.

The engine's policy holds a call so that the prompts of other calls need not be computed again. Without this
clock it would end sessions to save tokens. The limit on that time keeps a session from living on holds.
"""

from typing import Final

import trio
from attrs import define, field

# The seconds by which a run may be longer because its calls were held for their place in the engine's cache.
# They are ten of the longest holds; most sessions have none.
MAX_HELD_S: Final = 600.0


@define(eq=False)
class RunClock:
    """The deadline of `scope` is the end of RUN. `before_s` are the seconds of the budget that were spent
    before this RUN began, by the session from which this one goes on.
    """

    scope: trio.CancelScope = field(factory=trio.CancelScope)
    before_s: float = 0.0
    _began: float | None = field(default=None, init=False)
    _held_s: float = field(default=0.0, init=False)

    @property
    def held_s(self) -> float:
        """The seconds that the session's calls were held, at least 0."""
        return max(0.0, self._held_s)

    def begin(self, scope: trio.CancelScope, budget_s: float) -> None:
        """Begin RUN in `scope`, with the rest of its budget."""
        self.scope, self._began = scope, trio.current_time()
        scope.deadline = self._began + budget_s - self.before_s

    @property
    def spent_s(self) -> float:
        """The seconds of the budget that are spent, including those before this RUN."""
        if self._began is None:
            return self.before_s
        return self.before_s + trio.current_time() - self._began - min(self.held_s, MAX_HELD_S)

    def credit(self, seconds: float) -> None:
        """Move the end of RUN by the seconds that a call is held; back, if the call was held for less."""
        before, self._held_s = self._held_s, self._held_s + seconds
        self.scope.deadline += min(self._held_s, MAX_HELD_S) - min(before, MAX_HELD_S)
