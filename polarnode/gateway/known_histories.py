"""What a session's requests repeat: each brings its whole history again, so what it takes to read one is
known from the request before.

A request is read in place where a thread would not help. Reading holds the GIL, so a thread lets the loop go
on only after the GIL's switch interval (5 ms), and each change of threads costs the node some 0.3 ms under
load. What a body takes to read depends on what stands in it, which only its sender knows; but a body that
begins as an earlier one takes about as long as that did, and its new part is short. Digests of its beginnings
prove it.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from attrs import define, field, frozen

from polarnode.support.bounded import remember

STEP_BYTES: Final = 16 << 10  # of a body between two digests: a turn of an agent has about 4 KiB
NEW_BYTES: Final = 32 << 10  # of a body that were never read: about 1 ms, 10 ms at the worst
# a longer body is hashed in a thread too: a prompt of 128k tokens is twice as long, and its tools run minutes
KNOWN_BYTES: Final = 256 << 10
KNOWN_S: Final = 0.003  # that reading the earlier request took: of 256 KiB it is 2 ms
_BYTES: Final = 16  # of a digest: two bodies of a session never share it by chance
HISTORIES: Final = 8  # kept for a session: harnesses interleave up to four agents; 300 bytes each


@frozen
class BodyDigest:
    """The digests of a body: `steps` identify its beginnings, one of each STEP_BYTES."""

    size: int
    steps: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, body: bytes, operation: str) -> "BodyDigest":
        """Of a body for one operation of a dialect, which reads it in its own way. O(bytes)."""
        # the processors of servers have instructions for it, with which it takes half of blake2b's time
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
        """Whether a request is read in place."""
        if digest.size <= NEW_BYTES:
            return True
        steps, seconds = self._kept.get(digest.steps[0], ((), 0.0))
        return digest.size <= STEP_BYTES * _shared(steps, digest.steps) + NEW_BYTES and seconds <= KNOWN_S

    def note(self, digest: BodyDigest, seconds: float) -> None:
        """A request was read, which took so many seconds of CPU."""
        if digest.steps:
            remember(self._kept, digest.steps[0], (digest.steps, seconds), most=HISTORIES)


def _shared(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many steps two bodies have in common. A step's digest covers all before it."""
    shared = min(len(one), len(other))
    while shared and one[shared - 1] != other[shared - 1]:
        shared -= 1
    return shared
