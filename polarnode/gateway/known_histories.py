"""How long a session's next request takes to read. Each request repeats the session's whole history, so the
request before it tells.

A request is read in the event loop where a thread would not help. Reading holds the GIL, so with a thread the
event loop waits for the GIL's switch interval (5 ms), and each change of threads costs the node some 0.3 ms
under load. How long a body takes to read depends on its content, which only its sender knows. But a body that
begins like an earlier one takes about as long as that one did, and its new part is short. Digests of its
beginnings prove that it does.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from attrs import define, field, frozen

from polarnode.support.bounded import remember

STEP_BYTES: Final = 16 << 10  # The bytes of a body between two digests. A turn of an agent has about 4 KiB.
# The bytes of a body that may be new. They take about 1 ms to read, 10 ms at the worst.
MAX_NEW_BYTES: Final = 32 << 10
# A longer body is read and hashed in a thread. A prompt of 128k tokens is twice as long, and an agent with
# such a prompt runs tools for minutes.
MAX_KNOWN_BYTES: Final = 256 << 10
# The seconds that reading the earlier request may have taken. A body of 256 KiB takes 2 ms.
MAX_READ_S: Final = 0.003
_BYTES: Final = 16  # The length of a digest. Two bodies of a session never share one by chance.
# The number kept for a session, at 300 bytes each. Harnesses interleave up to four agents.
MAX_HISTORIES: Final = 8


@frozen
class BodyDigest:
    """The digests of a body. `steps` identify its beginnings, one for every STEP_BYTES."""

    size: int
    steps: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, body: bytes, operation: str) -> "BodyDigest":
        """The digests of a body for one operation of a dialect. Each operation reads a body in its own way.
        O(bytes).
        """
        # Server processors have instructions for SHA-256, with which it takes half the time of blake2b.
        digest, steps = sha256(f"{operation}\0".encode(), usedforsecurity=False), []
        view = memoryview(body)
        for start in range(0, len(body) // STEP_BYTES * STEP_BYTES, STEP_BYTES):
            digest.update(view[start : start + STEP_BYTES])
            steps.append(digest.digest()[:_BYTES])
        return cls(len(body), tuple(steps))


@define(eq=False)
class KnownHistories:
    """The requests that a session sent last: their steps, and the CPU seconds that reading each took."""

    _kept: dict[bytes, tuple[tuple[bytes, ...], float]] = field(factory=dict, init=False)

    def is_short(self, digest: BodyDigest) -> bool:
        """Whether a request is read quickly enough for the event loop."""
        if digest.size <= MAX_NEW_BYTES:
            return True
        steps, seconds = self._kept.get(digest.steps[0], ((), 0.0))
        return (
            digest.size <= STEP_BYTES * _shared(steps, digest.steps) + MAX_NEW_BYTES and seconds <= MAX_READ_S
        )

    def note(self, digest: BodyDigest, seconds: float) -> None:
        """Remember that reading a request took this many CPU seconds."""
        if digest.steps:
            remember(self._kept, digest.steps[0], (digest.steps, seconds), most=MAX_HISTORIES)


def _shared(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many steps two bodies have in common. The digest of a step covers everything before it."""
    shared = min(len(one), len(other))
    while shared and one[shared - 1] != other[shared - 1]:
        shared -= 1
    return shared
