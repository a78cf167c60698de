"""What went through a session's proxy, counted for its trajectory.

Pure. Names come from the container, which may make up as many as it likes: only so many are told apart.
"""

from collections import Counter
from collections.abc import Mapping

from attrs import define, field

from polarnode.conversation import Json
from polarnode.shell.egress.rules import name_fault, spelled

TOLD_APART = 64  # names of each kind: an installation meets a handful of hosts, an attack makes them up
OTHERS = "(others)"
NO_NAME = "(no name)"


@define(eq=False)
class EgressFigures:
    """Counts of one session: connections by name, `sent` and `received` bytes of what they carried."""

    allowed: Counter[str] = field(factory=Counter, init=False)
    refused: Counter[str] = field(factory=Counter, init=False)
    failed: Counter[str] = field(factory=Counter, init=False)  # allowed, and not reached
    sent: int = field(default=0, init=False)
    received: int = field(default=0, init=False)

    def count(self, kind: Counter[str], host: str) -> None:
        """One more of a kind."""
        name = spelled(host) if name_fault(host) is None else NO_NAME
        kind[name if name in kind or len(kind) < TOLD_APART else OTHERS] += 1

    def told(self) -> Mapping[str, Json]:
        """As a trajectory's metrics have them."""
        return {
            "allowed": dict(self.allowed),
            "refused": dict(self.refused),
            "failed": dict(self.failed),
            "sent_bytes": self.sent,
            "received_bytes": self.received,
        }
