"""Which nodes have been silent for too long, by the clock of whoever watches them.

Pure: the caller gives the time of its own monotonic clock. Silence counts only while the watcher itself
read, one read soon after another. A pause between two reads means that the watcher was stopped or that the
log was away, and in that time the others may have been unable to give a sign: everything is watched again
from that read on.
"""

from collections.abc import Mapping
from typing import Final

from attrs import define, field

LEASE_S: Final = (
    4.0  # without a sign: a node signs each second, and three in a row may be late on a busy disk
)
# between two reads: a watcher reads each second; after a longer pause it does not know what happened
# meanwhile
PAUSE_S: Final = 2.5


@define(eq=False)
class SilenceWatch:
    """A watcher's own view of the signs of others."""

    lease_s: float = LEASE_S
    pause_s: float = PAUSE_S
    _seen: dict[int, tuple[int, float]] = field(factory=dict, init=False)  # the sign, and since when
    _read: float | None = field(default=None, init=False)

    def read(self, signs: Mapping[int, int], *, asked: float, now: float) -> tuple[tuple[int, int], ...]:
        """Note what was read: the read began at `asked` and its answer is here at `now`. Gives the
        incarnations, with the sign each had, that were silent for longer than the lease.
        """
        paused = self._read is None or now - self._read > self.pause_s
        self._read = now
        before = {} if paused else self._seen
        # a sign that is seen first in this read may be as young as the read: its silence begins when it ends
        self._seen = {
            incarnation: before[incarnation]
            if incarnation in before and before[incarnation][0] == sign
            else (sign, now)
            for incarnation, sign in signs.items()
        }
        # an answer that was long under way says how things stood when it was asked for, at the latest
        return tuple(
            (incarnation, sign)
            for incarnation, (sign, since) in self._seen.items()
            if asked - since > self.lease_s
        )
