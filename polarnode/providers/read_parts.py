"""A cache of the parts of a session's requests as they were read. Each request repeats nearly all parts of
the one before.

A part is an object in a list of the body (a message, a tool). It is recognised by a number over all of its
JSON, which takes a fifth of the time of reading the part. The number uses Python's own hash, whose seed is
random, so a client cannot construct a part with the number of another. Requests share what is kept, so
nothing may change it.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from operator import is_
from types import UnionType
from typing import Any, Final, TypeGuard, TypeVar, Union, cast, get_args, get_origin

import attrs
import orjson
from attrs import define, frozen

from polarnode.core.codec.json import AlreadyRead, structure
from polarnode.core.conversation import Json

T = TypeVar("T")
P = TypeVar("P")
M = TypeVar("M")

# The number of requests whose parts are kept. A request whose parts are all in a later one is dropped.
# Harnesses interleave up to four agents. A part takes some 300 bytes beside its text, which the turns hold
# too.
_MAX_REQUESTS: Final = 4
# The number of parts of one list that are kept. The longest session observed has 1,000 turns.
_MAX_PARTS: Final = 8_192

_NO_PARTS: Final[Mapping[int, Any]] = {}


@define(eq=False)
class PartsCache:
    """Caches the parts that a session's requests repeat. Several threads may read at once, because what is
    kept is replaced as a whole.
    """

    # For each shape, its parts by number, the latest request first.
    _kept: tuple[tuple[object, Mapping[int, AlreadyRead]], ...] = ()
    # For each function, by the identity of its argument: the argument and the result.
    _converted: tuple[tuple[object, Mapping[int, tuple[Any, Any]]], ...] = ()
    # For each function, its results by the number of the JSON that it was given.
    _results_by_json: tuple[tuple[object, Mapping[int, Any]], ...] = ()
    # For each function, the whole list that it was given and the result.
    _lists: tuple[tuple[object, tuple[Any, ...], Any], ...] = ()

    def structure(self, value: dict[str, Json], shape: type[T]) -> T:
        """As `codec.json.structure`, but parts that were read before are not read again. Raises Refused."""
        attributes = _list_attributes(cast(Hashable, shape))
        try:
            numbers = {
                name: _numbers(name, raw)
                for name, raw in value.items()
                if name in attributes and is_list_of_objects(raw)
            }
        except orjson.JSONEncodeError:  # nested more deeply than orjson writes
            return structure(value, shape)
        spelled: dict[str, Any] = dict(value)
        for name, some in numbers.items():
            known = _cached_values(self._kept, shape, some)
            spelled[name] = [old or new for old, new in zip(known, spelled[name], strict=True)]
        found = structure(spelled, shape)
        parts: dict[int, AlreadyRead] = {}
        for name, some in numbers.items():
            read = getattr(found, attributes[name])
            # A shape that joins or drops parts cannot be recalled part by part.
            if isinstance(read, tuple | list) and len(read) == len(some):
                parts.update(_cacheable_parts(some, spelled[name], read))
        self._kept = _with_latest(self._kept, shape, parts)
        return found

    def convert(self, shapes: Iterable[P], function: Callable[[P], M]) -> list[M]:
        """The function's result for each of these shapes. It depends only on the shape, so results for shapes
        of earlier requests are recalled.
        """
        given = list(shapes)
        keys = list(map(id, given))
        pairs = [
            old or (new, function(new))
            for old, new in zip(_cached_values(self._converted, function, keys), given, strict=True)
        ]
        self._converted = _with_latest(self._converted, function, dict(zip(keys, pairs, strict=True)))
        return [made for _, made in pairs]

    def convert_json(
        self, parts: Sequence[dict[str, Json]], function: Callable[[dict[str, Json]], M]
    ) -> list[M]:
        """The function's result for each of these objects, which depends only on their JSON. For objects that
        earlier requests had, the very same values are returned. The function may keep its argument.
        """
        try:
            numbers = _numbers("", parts)
        except orjson.JSONEncodeError:  # nested more deeply than orjson writes
            return list(map(function, parts))
        known = _cached_values(self._results_by_json, function, numbers)
        made = [
            _CachedResult(function(part)) if old is None else old
            for old, part in zip(known, parts, strict=True)
        ]
        self._results_by_json = _with_latest(
            self._results_by_json, function, dict(zip(numbers, made, strict=True))
        )
        return [each.value for each in made]

    def convert_list(self, shapes: Iterable[P], function: Callable[[tuple[P, ...]], M]) -> M:
        """The function's result for a whole list of shapes, which depends only on the list. For a list that
        an earlier request had, the very same value is returned.
        """
        given = tuple(shapes)
        for kind, earlier, made in self._lists:
            if kind is function and len(earlier) == len(given) and all(map(is_, earlier, given)):
                return cast(M, made)
        found = function(given)
        self._lists = ((function, given, found), *self._lists[: _MAX_REQUESTS - 1])
        return found


@frozen
class _CachedResult:
    """The result of a function, which may be None."""

    value: Any


def is_list_of_objects(value: Json) -> TypeGuard[list[dict[str, Json]]]:
    """Whether the parts of a list can be cached: each is an object, and there are not too many."""
    return isinstance(value, list) and len(value) <= _MAX_PARTS and all(type(part) is dict for part in value)


def _numbers(name: str, parts: Any) -> list[int]:
    """A number for each part. It covers all of the part and the list to which it belongs."""
    return [hash((name, orjson.dumps(part))) for part in parts]


def _cached_values(
    kept: tuple[tuple[object, Mapping[int, M]], ...], kind: object, keys: list[int]
) -> list[M | None]:
    """What is kept under each of these keys. Nearly all of it belongs to the latest request."""
    latest, *others = [parts for each, parts in kept if each is kind] or [_NO_PARTS]
    found: list[M | None] = list(map(latest.get, keys))
    for parts in others:
        if all(old is not None for old in found):
            break
        found = [parts.get(key) if old is None else old for key, old in zip(keys, found, strict=True)]
    return found


def _with_latest(
    kept: tuple[tuple[object, Mapping[int, M]], ...], kind: object, parts: Mapping[int, M]
) -> tuple[tuple[object, Mapping[int, M]], ...]:
    """The cache with the parts of the latest request, without those of requests that it repeats."""
    others = [each for each in kept if each[0] is not kind or not each[1].keys() <= parts.keys()]
    return ((kind, parts), *others[: _MAX_REQUESTS - 1])


def _cacheable_parts(
    numbers: Sequence[int], spelled: Sequence[Any], read: Sequence[Any]
) -> Iterable[tuple[int, AlreadyRead]]:
    """The parts of a list to keep. A list with a part that remains JSON is not kept, because that part could
    not be distinguished from one that was read.
    """
    parts = [
        raw if type(raw) is AlreadyRead else AlreadyRead(part)
        for raw, part in zip(spelled, read, strict=True)
    ]
    fresh = (part for raw, part in zip(spelled, read, strict=True) if type(raw) is not AlreadyRead)
    return zip(numbers, parts, strict=True) if all(attrs.has(type(part)) for part in fresh) else ()


@cache
def _list_attributes(shape: Hashable) -> dict[str, str]:
    """Maps the JSON name of each field that may be a list of shapes to its attribute. Other lists remain
    JSON.
    """
    return {
        field.alias: field.name
        for field in attrs.fields(cast(Any, shape))
        if any(get_origin(kind) is tuple and _has_shapes(get_args(kind)[0]) for kind in _members(field.type))
    }


def _has_shapes(kind: Any) -> bool:
    return any(attrs.has(member) for member in _members(kind))


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
