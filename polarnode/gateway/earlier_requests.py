"""What a session keeps of its earlier requests, so that the next one is read quickly and completely.

Each request repeats the session's whole history. So what was parsed of one request is found again for the
next (`PartsCache`), the time that one took tells how long the next takes (`KnownHistories`), and a request
that refers to an earlier answer by its name finds it (`SessionMemory`).
"""

from collections.abc import Sequence
from hashlib import sha256
from sys import getsizeof
from typing import Final

from attrs import define, field, frozen

from polarnode.core.conversation import Json
from polarnode.providers.read_parts import PartsCache
from polarnode.support.bounded import remember

# ── how long the next request takes to read ──────────────────────────────────────

# A request is read in the event loop where a thread would not help. Reading holds the GIL, so with a thread
# the event loop waits for the GIL's switch interval (5 ms), and each change of threads costs the node some
# 0.3 ms under load. How long a body takes to read depends on its content, which only its sender knows. But a
# body that begins like an earlier one takes about as long as that one did, and its new part is short. Digests
# of its beginnings prove that it does.

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


# ── answers that later requests refer to ─────────────────────────────────────────

# The number of answers that a session may refer to by name, more than the longest session observed (1,000
# turns). Each is kept as a difference.
REMEMBERED: Final = 2_000
# The limit on their size: the text of eight conversations of 1M tokens, or two requests with three images of
# 5 MB each.
MAX_REMEMBERED_BYTES: Final = 32 << 20


@define(eq=False)
class SessionMemory:
    """What a session's dialects keep for later requests: the last REMEMBERED values, with
    MAX_REMEMBERED_BYTES together at most. The last two are kept whatever their size: an answer, and the index
    in which the next request looks for it.
    """

    _kept: dict[str, Json] = field(factory=dict, init=False)
    _sizes: dict[str, int] = field(factory=dict, init=False)
    _bytes: int = field(default=0, init=False)

    def recall(self, name: str) -> Json | None:
        """The value kept under a name. None if it was never kept or has been dropped."""
        return self._kept.get(name)

    def keep(self, name: str, value: Json) -> None:
        """Keep a value. Beyond REMEMBERED and MAX_REMEMBERED_BYTES the oldest are dropped."""
        self._drop(name)
        self._kept[name], self._sizes[name] = value, _size(value)
        self._bytes += self._sizes[name]
        while len(self._kept) > REMEMBERED or (self._bytes > MAX_REMEMBERED_BYTES and len(self._kept) > 2):
            self._drop(next(iter(self._kept)))

    def _drop(self, name: str) -> None:
        self._kept.pop(name, None)
        self._bytes -= self._sizes.pop(name, 0)


def _size(value: Json) -> int:
    """The bytes of memory that a value's texts take, which are nearly all of it. The recursion is bounded,
    because dialects build these values, three levels deep.
    """
    match value:
        case dict():
            return sum(map(_size, value.values()))
        case list():
            return sum(map(_size, value))
        case _:
            return getsizeof(value)


# ── what a session keeps ─────────────────────────────────────────────────


@define(eq=False)
class EarlierRequests:
    """What one session keeps of its requests. `large`: one of them took memory that is worth giving back to
    the system when the session is over.
    """

    memory: SessionMemory = field(factory=SessionMemory, init=False)
    parts: PartsCache = field(factory=PartsCache, init=False)
    histories: KnownHistories = field(factory=KnownHistories, init=False)
    large: bool = field(default=False, init=False)
