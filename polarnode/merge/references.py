"""Signed references: which turn an echoed message came from, proven by fields that harnesses return unread.

A reference is put into tool-call ids and thinking signatures and found again in whatever spelling a harness
returns. It distinguishes twins and proves identity; it never overrides what a client changed. References stay
signed: a model can write any id, and must not be able to write one that is believed.
"""

import hmac
import re
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Iterable
from typing import Final

from attrs import field, frozen

_INDEX_DIGITS: Final = 6  # 16 million turns a session
# 40 bits: a model that guesses once a turn never hits, and an id stays within 40 characters
_SIGNATURE_DIGITS: Final = 10
_REF_DIGITS: Final = _INDEX_DIGITS + _SIGNATURE_DIGITS
PLACE_DIGITS: Final = 2  # at a call id's end: which call of its turn
# Ours are 40 characters at most. Longer opaque fields (real vendors' signatures) are not ours; their head is
# enough to say so.
_LONGEST: Final = 96

_SEPARATORS: Final = re.compile(r"[^0-9A-Za-z]+")
_HEX_RUN: Final = re.compile(rf"[0-9a-f]{{{_REF_DIGITS},}}")


@frozen(kw_only=True)
class Located:
    """A proven reference: the turn, and the digits after it (which call of the turn; empty in a
    signature).
    """

    index: int
    rest: str


@frozen
class References:
    """The references of one session. `secret` is the node's, never shown.

    Only references that `ref` has made are found again. A request may hold ten thousand ids with eighty
    places each where one could stand: signing an index for each place held the event loop for seconds.
    """

    session_id: str
    _secret: bytes = field(repr=False)
    _made: dict[str, int] = field(factory=dict, init=False, repr=False, eq=False)  # one for each turn

    def ref(self, index: int) -> str:
        """16 lower hex characters: 6 of the turn's index, 10 that sign it."""
        payload = f"{self.session_id}:{index}".encode()
        signature = hmac.digest(self._secret, payload, "sha256").hex()
        made = f"{index:0{_INDEX_DIGITS}x}{signature[:_SIGNATURE_DIGITS]}"
        self._made[made] = index
        return made

    def call_id(self, index: int, k: int, prefix: str = "call_") -> str:
        """The id of the turn's k-th tool call, [A-Za-z0-9_], 40 characters at most."""
        return f"{prefix}{self.ref(index)}{k:0{PLACE_DIGITS}x}"

    def signature(self, index: int) -> str:
        """What stands for a thinking block's signature: base64, never empty, the same every time."""
        return b64encode(self.ref(index).encode()).decode()

    def locate(self, opaque: str) -> Located | None:
        """The reference hidden in an opaque field, in any spelling harnesses return; None when there is none
        or it is forged.
        """
        for spelling in _spellings(opaque[:_LONGEST]):
            for run in _HEX_RUN.findall(spelling):
                found = self._in_run(run)
                if found is not None:
                    return found
        return None

    def prove(self, opaque: str) -> int | None:
        """The index of the turn an opaque field names, proven by its signature."""
        located = self.locate(opaque)
        return None if located is None else located.index

    def find_refs(self, opaques: Iterable[str]) -> frozenset[int]:
        """All turns that some opaque fields prove."""
        return frozenset(index for index in map(self.prove, opaques) if index is not None)

    def _in_run(self, run: str) -> Located | None:
        # A prefix may end in hex letters once its separator is stripped ("fc_"), so every place of the run is
        # tried.
        for start in range(len(run) - _REF_DIGITS + 1):
            index = self._made.get(run[start : start + _REF_DIGITS])
            if index is not None:
                return Located(index=index, rest=run[start + _REF_DIGITS :])
        return None


def _spellings(opaque: str) -> Iterable[str]:
    """The field without separators, and what it says if it is base64 of a reference."""
    bare = _SEPARATORS.sub("", opaque)
    yield bare.lower()
    try:
        yield b64decode(bare + "=" * (-len(bare) % 4), validate=True).decode("ascii")
    except (NotBase64, UnicodeDecodeError):
        return
