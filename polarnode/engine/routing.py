"""Which host serves a call, whether a dead one is restarted, and the statistics of all hosts. Pure.

A session's prompts extend one another, so the host that holds its prefix is worth far more than an even load.
The statistics are frozen values, served at `/v1/status`.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Literal

from attrs import define, field, frozen

from polarnode.core.backoff import Backoff

# calls a session's host may have more than the least loaded: filling 20-30 thousand tokens again costs about
# what they do
SLACK = 16
REMEMBERED = 65_536  # sessions: some 10 MB, and a hundred times what one machine runs at once
DEATHS = 5  # within WINDOW: then the cause is not chance, and a restart only hides it
WINDOW = 600.0  # seconds
# before the second restart of a window and those after it; the first restart is at once
RESTART_PAUSES = Backoff(first_s=1.0, longest_s=WINDOW)


@define(eq=False)
class Router:
    """A session stays with its host while that is ready and not overloaded; other calls go to the host with
    the fewest calls.
    """

    _homes: "OrderedDict[str, int]" = field(factory=OrderedDict, init=False)

    def choose(self, affinity: str, loads: Mapping[int, int]) -> int:
        """A host of `loads` (calls in flight by ready host; never empty). An empty affinity belongs to no
        session.
        """
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
    """When a host died, within the last WINDOW seconds."""

    _times: "deque[float]" = field(factory=deque, init=False)

    def note(self, now: float) -> float | None:
        """Seconds to wait before the next start, or None to give up. `now` in seconds of any steady clock."""
        self._times.append(now)
        while now - self._times[0] > WINDOW:
            self._times.popleft()
        if len(self._times) >= DEATHS:
            return None
        return 0.0 if len(self._times) == 1 else RESTART_PAUSES.delay(len(self._times) - 2)


# stale: waits for weights; dead: about to be restarted; failed: given up
HostState = Literal["starting", "ready", "stale", "dead", "failed"]


@frozen(kw_only=True)
class HostStatistics:
    """One engine host. `in_flight` counts our calls, aborting ones included; `running` and `waiting` are the
    scheduler's own counts, at most 0.25 s old.
    """

    index: int
    state: HostState
    pid: int | None
    gpus: tuple[int, ...]
    in_flight: int
    running: int
    waiting: int
    token_usage: float
    restarts: int
    weight_version: str
    last_error: str | None


@frozen(kw_only=True)
class EngineStatistics:
    """All hosts. `context_length` is the most tokens one request may hold; `weight_version` is the node's; a
    `simulated` engine's answers are random.
    """

    hosts: tuple[HostStatistics, ...]
    vocab_size: int
    context_length: int
    weight_version: str
    paused: str | None
    kind: Literal["sglang", "simulated"] = "sglang"
