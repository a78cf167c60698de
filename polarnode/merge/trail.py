"""The paths of a session's last requests, so that a history which is only appended to is hashed once and not with every request.

What is kept of a message is a number, not its text: a session's history would otherwise stand in memory between its calls. Two messages
of one number are taken for the same, so whoever edits this keeps all in it that a key holds, and Python's own hash of strings: it is keyed
anew in every process, and nobody who writes a message can aim at another's number.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from attrs import define, field, frozen

from polarnode.conversation import Message

# The harnesses seen interleave up to four agents beside side calls of one request each; a thousand messages are some 100 KB.
_TRAILS: Final = 8

_call = attrgetter("id", "name", "arguments")


@frozen(kw_only=True)
class Trail:
    """A request's path: a number a message, and one key more. `ours` are the places behind assistant messages that were exactly a turn's answer,
    `odd` those of all other assistant messages, both in ascending order.
    """

    root: str
    numbers: "array[int]"
    keys: Sequence[str]
    ours: Sequence[int]
    odd: Sequence[int]

    def last_ours(self, length: int) -> int:
        """How many of the first `length` messages end with the last of our own."""
        found = bisect_right(self.ours, length)
        return self.ours[found - 1] if found else 0


@define(eq=False)
class Trails:
    """The last requests of a session, the latest last."""

    _kept: list[Trail] = field(factory=list)

    def longest(self, root: str, numbers: "array[int]") -> tuple[Trail | None, int]:
        """The trail that goes longest with a request, and how far."""
        best: Trail | None = None
        length = 0
        for trail in reversed(self._kept):
            shared = _shared(trail.numbers, numbers) if trail.root == root else 0
            if shared > length:
                best, length = trail, shared
            if shared == len(numbers):
                break
        return best, length

    def keep(self, trail: Trail) -> None:
        """Remember a request's path, instead of one that it goes on from."""
        grown = (kept for kept in self._kept if kept.root == trail.root and trail.numbers[: len(kept.numbers)] == kept.numbers)
        old = next(grown, None)
        if old is not None:
            self._kept.remove(old)
        self._kept.append(trail)
        del self._kept[:-_TRAILS]


def numbers_of(messages: Sequence[Message]) -> "array[int]":
    """A number for each message, int64: of all that its key holds. Most of a plan's price, so no call of Python's own stands in it."""
    return array(
        "q",
        [hash((message.role, message.text, *map(_call, message.calls)) if message.calls else (message.role, message.text)) for message in messages],
    )


def _shared(one: "array[int]", other: "array[int]") -> int:
    """How many entries two lists begin with in common."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
