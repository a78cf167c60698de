"""The parts of a session's requests, as they were read: each request repeats nearly all of those of the one
before.

A part is an object in a list of the body (a message, a tool). It is recognised by a number over all of its
JSON, which takes a fifth of the time of reading it. The number uses Python's own hash, whose seed is random:
a client cannot aim at another part's number. What is kept is only read, so requests share it.
"""

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, Final, TypeVar, cast

import attrs
import orjson
from attrs import define

from polarnode.core.codec.json import AlreadyRead, structure
from polarnode.core.conversation import Json

T = TypeVar("T")

# Requests whose parts are kept, unless another holds them all: harnesses interleave up to four agents. A part
# is some 300 bytes beside its text, which the turns hold too.
_REQUESTS: Final = 4
# of one list that are kept: the longest session observed has 1,000 turns
_PARTS: Final = 8_192


@define(eq=False)
class ReadParts:
    """What a session's requests repeat. Threads may read at once: what is kept is replaced as a whole."""

    _kept: tuple[tuple[type[Any], Mapping[int, Any]], ...] = ()  # the latest request first

    def structure(self, value: dict[str, Json], shape: type[T]) -> T:
        """As `codec.json.structure`, but what was read before is not read again. Raises Refused."""
        try:
            numbers = {name: _numbers(name, raw) for name, raw in value.items() if _is_list_of_objects(raw)}
        except orjson.JSONEncodeError:  # nested more deeply than orjson writes
            return structure(value, shape)
        known = [parts for kind, parts in self._kept if kind is shape]
        spelled: dict[str, Any] = dict(value)
        for name, some in numbers.items():
            spelled[name] = [
                _recalled(known, number, part) for number, part in zip(some, spelled[name], strict=True)
            ]
        found = structure(spelled, shape)
        names = _attributes(cast(Hashable, shape))
        parts: dict[int, Any] = {}
        for name, some in numbers.items():
            read = getattr(found, names[name]) if name in names else ()
            # A shape that joins or drops parts cannot be recalled part by part. A part that stays JSON was
            # not read, and could not be told from one that was.
            whole = isinstance(read, tuple | list) and len(read) == len(some)
            if whole and all(attrs.has(type(part)) for part in read):
                parts.update(zip(some, read, strict=True))
        others = [each for each in self._kept if each[0] is not shape or not each[1].keys() <= parts.keys()]
        self._kept = ((shape, parts), *others[: _REQUESTS - 1])
        return found


def _is_list_of_objects(value: Json) -> bool:
    return isinstance(value, list) and len(value) <= _PARTS and all(type(part) is dict for part in value)


def _numbers(name: str, parts: Any) -> list[int]:
    """A number for each part, covering all of it and the list that it stands in."""
    return [hash((name, orjson.dumps(part))) for part in parts]


def _recalled(known: list[Mapping[int, Any]], number: int, part: Json) -> Any:
    for parts in known:
        found = parts.get(number)
        if found is not None:
            return AlreadyRead(found)
    return part


@cache
def _attributes(shape: Hashable) -> dict[str, str]:
    """The attribute of each field's JSON name."""
    return {field.alias: field.name for field in attrs.fields(cast(Any, shape))}
