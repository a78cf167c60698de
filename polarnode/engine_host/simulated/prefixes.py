"""Which part of a prompt a real engine would have in its cache. Pure: a set of hashes, of every BLOCK tokens with all that is before them.

Rule for whoever edits it: it is asked for every request, and reads each prompt once; the hashes alone are kept.
"""

from collections import OrderedDict
from hashlib import blake2b

from attrs import define, field

BLOCK = 256  # tokens: a prompt of 30 000 is 120 hashes, some 0.2 ms
KEPT = 1 << 16  # blocks, the latest used: 16 million tokens, more than the cache of any one GPU


@define(eq=False)
class Prefixes:
    """The prompts of late. Those of other weights must be forgotten by `clear`."""

    _known: "OrderedDict[bytes, None]" = field(factory=OrderedDict, init=False)

    def cached(self, prompt: bytes) -> int:
        """How many tokens of an int32 prompt were there before; it is known from now on. At least one token is always read."""
        size, digest, leading, found = 4 * BLOCK, blake2b(digest_size=8), True, 0
        for start in range(0, len(prompt) - size, size):
            digest.update(prompt[start : start + size])
            key = digest.digest()
            leading = leading and key in self._known
            found += BLOCK if leading else 0
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return found

    def clear(self) -> None:
        self._known.clear()
