"""Which nodes have been silent for too long, by the clock of the node that watches them.

This module is pure: the caller gives the time of its own monotonic clock. Silence counts only while the
watcher itself reads at short intervals. A pause between two reads means that the watcher was stopped or that
the log was away. In that time the others may have been unable to give a sign, so all are watched anew from
that read on.
"""

from collections.abc import Mapping
from typing import Final

from attrs import define, field

SIGN_LEASE_S: Final = (
    4.0  # without a sign: a node gives one each second, and three in a row may be late on a busy disk
)
# Longest pause between two reads. A watcher reads each second; after a longer pause it does not know what
# happened meanwhile.
MAX_READ_PAUSE_S: Final = 2.5


@define(eq=False)
class SilenceWatch:
    """A watcher's own view of the signs of others."""

    lease_s: float = SIGN_LEASE_S
    pause_s: float = MAX_READ_PAUSE_S
    _signs_since: dict[int, tuple[int, float]] = field(factory=dict, init=False)  # the sign, and since when
    _last_read: float | None = field(default=None, init=False)

    def find_silent(
        self, signs: Mapping[int, int], *, asked: float, now: float
    ) -> tuple[tuple[int, int], ...]:
        """Note the signs that were read. The read began at `asked`, and its answer came at `now`. Returns the
        incarnations that were silent for longer than the lease, each with its last sign.
        """
        paused = self._last_read is None or now - self._last_read > self.pause_s
        self._last_read = now
        before = {} if paused else self._signs_since
        # A sign that this read sees first may be as young as the read, so its silence begins at the read's
        # end.
        self._signs_since = {
            incarnation: before[incarnation]
            if incarnation in before and before[incarnation][0] == sign
            else (sign, now)
            for incarnation, sign in signs.items()
        }
        # An answer that took long may be as old as its question, so silence counts only up to `asked`.
        return tuple(
            (incarnation, sign)
            for incarnation, (sign, since) in self._signs_since.items()
            if asked - since > self.lease_s
        )
