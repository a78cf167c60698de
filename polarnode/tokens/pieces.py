"""Ids of long texts that come again: the sessions of a group begin with the same system prompt and tools, 50 to 80 KB of them.

The rule for whoever edits it: no lock can be held here, and several threads use one cache. What is shared is only read, put in whole or
replaced whole, so that two threads that meet do a piece of work twice and never a wrong one.
"""

import sys
from array import array
from collections.abc import Callable, Iterable
from typing import Final

from attrs import define, field

from polarnode.records import ids

SHORTEST: Final = 1_000  # letters: a shorter piece takes less than 0.2 ms to encode, and there are too many of them
KEPT_BYTES: Final = 32 << 20  # texts and ids: a harness's whole head takes 0.2 MB, so a hundred tasks' heads stay with room for long histories


@define(eq=False)
class Pieces:
    """Texts and their ids, the oldest dropped first: in two generations, of which a text that is asked for moves to the younger."""

    kept_bytes: int = KEPT_BYTES
    _young: "dict[str, array[int]]" = field(factory=dict, init=False)
    _old: "dict[str, array[int]]" = field(factory=dict, init=False)
    _young_bytes: int = field(default=0, init=False)

    def ids(self, text: str, encode: Callable[[str], Iterable[int]]) -> "array[int]":
        """What `encode` gives for a text, int32; nobody changes it."""
        found = self._young.get(text)
        if found is not None:
            return found
        found = self._old.get(text)
        if found is None:
            found = ids(encode(text))
        self._keep(text, found)
        return found

    def _keep(self, text: str, found: "array[int]") -> None:
        size = sys.getsizeof(text) + sys.getsizeof(found)
        if 2 * size > self.kept_bytes:
            return
        if 2 * (self._young_bytes + size) > self.kept_bytes:
            self._old, self._young, self._young_bytes = self._young, {}, 0
        self._young[text] = found
        self._young_bytes += size
