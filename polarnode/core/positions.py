"""A reader's position in a stream: the last event's number, in one journal or in each of a fleet's.

Pure. Positions are a join-semilattice: `join` is commutative, associative and idempotent, so that
acknowledgements may be repeated, reordered, and sent by two readers or over two fronts. A node's position is
written as its number, a fleet's as opaque text of `v` and base64url; readers send back what they read.
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from collections.abc import Iterator, Mapping
from typing import Final

from attrs import field, frozen

from polarnode.core.errors import Refused

JOURNAL: Final = re.compile(r"j[0-9a-f]{16}")  # a journal's id: given at its birth, at random
ID_BYTES: Final = 8
# journals of one position: eight times the fleet this is made for; 7 kB of text fit a request's header
MOST_JOURNALS: Final = 512
ALONE: Final = ""  # the journal of a node that is read by itself, whose position is a number
NUMBER: Final = re.compile(r"[0-9]{1,19}")
MOST_NUMBER: Final = (1 << 63) - 1  # SQLite has 64 bits for it
SENTENCE: Final = "must be a position as the stream's `id:` line has it"


@frozen
class Position:
    """The last event's number by journal id. A journal that is absent has its own default: its consumer's
    position, or the oldest event that is kept.
    """

    parts: Mapping[str, int] = field(factory=dict)

    @classmethod
    def read(cls, text: str, path: str | None = None) -> "Position":
        """The position that was written as `text`. Raises Refused, with the field's `path`."""
        if NUMBER.fullmatch(text) and int(text) <= MOST_NUMBER:
            return cls({ALONE: int(text)})
        try:
            if not text.startswith("v"):
                raise ValueError
            data = urlsafe_b64decode(text[1:] + "=" * (-(len(text) - 1) % 4))
            found = cls(dict(_read(data)))
            if found.text != text or len(found.parts) > MOST_JOURNALS:  # one way to write each position
                raise ValueError
        except (ValueError, Error):
            raise Refused(f"{(path or 'a position').lstrip('?$.')} {SENTENCE}", path=path) from None
        return found

    @property
    def text(self) -> str:
        """As a stream's `id:` line has it."""
        if ALONE in self.parts:
            return str(self.parts[ALONE])
        data = b"".join(bytes.fromhex(each[1:]) + _varint(self.parts[each]) for each in sorted(self.parts))
        return "v" + urlsafe_b64encode(data).decode().rstrip("=")

    def at(self, journal: str, number: int) -> "Position":
        """The position with one journal's number replaced."""
        return Position({**self.parts, journal: number})

    def join(self, other: "Position") -> "Position":
        """The least position that is at or after both."""
        ours, theirs = self.parts, other.parts
        return Position({each: max(ours.get(each, 0), theirs.get(each, 0)) for each in {**ours, **theirs}})

    def covers(self, other: "Position") -> bool:
        """Whether everything up to `other` is up to this one."""
        return all(self.parts.get(each, -1) >= number for each, number in other.parts.items())


def _varint(number: int) -> bytes:
    """LEB128: seven bits a byte, the lowest first."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*found, number))


def _read(data: bytes) -> Iterator[tuple[str, int]]:
    place = 0
    while place < len(data):
        journal, number, shift = data[place : place + ID_BYTES], 0, 0
        place += ID_BYTES
        while True:
            if place >= len(data) or shift > 63:
                raise ValueError("cut off")
            byte = data[place]
            place += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if number > MOST_NUMBER:
            raise ValueError("too large")
        yield "j" + journal.hex(), number
