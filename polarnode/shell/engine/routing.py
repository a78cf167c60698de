"""Which host serves a call, and whether a dead one is started again. Two small machines that are told the time and the loads; nothing waits.

Rule for whoever edits it: a session's prompts extend one another, so the host that holds its prefix is worth far more than an even load.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping

from attrs import define, field

SLACK = 16  # calls a session's host may have more than the least loaded: filling 20-30 thousand tokens again costs about what they do
REMEMBERED = 65_536  # sessions: some 10 MB, and a hundred times what one machine runs at once
DEATHS = 5  # within WINDOW: then the cause is not chance, and starting again only hides it
WINDOW = 600.0  # seconds
FIRST_DELAY = 1.0  # seconds before the second restart of a window; it doubles from there, the first restart is at once


@define(eq=False)
class Router:
    """Sessions stay with their host while it is ready and not overloaded; others go where the fewest calls are."""

    _homes: "OrderedDict[str, int]" = field(factory=OrderedDict, init=False)

    def choose(self, affinity: str, loads: Mapping[int, int]) -> int:
        """A host among `loads` (ready host to its calls in flight; never empty). An empty affinity belongs to no session."""
        least = min(loads, key=lambda index: (loads[index], index))
        home = self._homes.get(affinity)
        if home is None or home not in loads or loads[home] > loads[least] + SLACK:
            home = least
        if affinity:
            self._homes[affinity] = home
            self._homes.move_to_end(affinity)
            if len(self._homes) > REMEMBERED:
                self._homes.popitem(last=False)
        return home


@define(eq=False)
class Deaths:
    """The times a host died lately."""

    _times: "deque[float]" = field(factory=deque, init=False)

    def note(self, now: float) -> float | None:
        """Seconds to wait before the next start, or None to give up. `now` in seconds of any steady clock."""
        self._times.append(now)
        while now - self._times[0] > WINDOW:
            self._times.popleft()
        if len(self._times) >= DEATHS:
            return None
        return 0.0 if len(self._times) == 1 else FIRST_DELAY * 2 ** (len(self._times) - 2)
