"""Google: the two spellings of a field's name, and the fields nobody reads.

Proto JSON takes `systemInstruction` and `system_instruction` alike, and clients send both. So names are put into one spelling before a shape
is made of the JSON; what stands in a field we only pass on (arguments, results, schemas) keeps its own names. The rule for whoever edits it:
no value is changed here, and a field that is spelled twice keeps the first spelling's value, as proto does.
"""

import re
from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

import attrs

from polarnode.conversation import Json

_SNAKE = re.compile(r"_([a-z0-9])")
# Lists that grow with the conversation: an unknown field in each of their items is reported once.
_MANY = frozenset({"contents", "parts"})


def camel(name: str) -> str:
    """`system_instruction` as `systemInstruction`."""
    return _SNAKE.sub(lambda found: found[1].upper(), name)


def respelled(value: Json, shape: type[Any]) -> tuple[Json, tuple[str, ...]]:
    """The JSON with every field a `shape` knows under its alias, and the paths of those it does not know, each once."""
    unknown: dict[str, None] = {}
    found = _value(value, shape, "$", unknown)
    return found, tuple(unknown)


def _value(value: Json, shape: Any, path: str, unknown: dict[str, None]) -> Json:
    cls, inner = _parts(shape)
    if isinstance(value, dict) and cls is not None:
        return _object(value, cls, path, unknown)
    if isinstance(value, list) and inner is not None:
        many = path.rpartition(".")[2] in _MANY
        return [_value(item, inner, f"{path}[{'*' if many else index}]", unknown) for index, item in enumerate(value)]
    return value


def _object(value: dict[str, Json], cls: Any, path: str, unknown: dict[str, None]) -> Json:
    known = _fields(cls)
    found: dict[str, Json] = {}
    for name, said in value.items():
        alias = name if name in known else camel(name)
        if alias not in known:
            if said is not None:
                unknown[f"{path}.{alias}"] = None
        elif alias not in found:
            shape = known[alias]
            found[alias] = said if shape is None else _value(said, shape, f"{path}.{alias}", unknown)
    return found


@cache
def _fields(cls: Any) -> dict[str, Any]:
    """The shape of every field by its alias; None where there is nothing below it to spell."""
    return {field.alias: None if _parts(field.type) == (None, None) else field.type for field in attrs.fields(cls)}


@cache
def _parts(shape: Any) -> tuple[Any, Any]:
    """The class an object is read as, and the type of a list's items; None where a shape has none."""
    cls: Any = None
    inner: Any = None
    for member in _members(shape):
        if attrs.has(member):
            cls = member
        elif get_origin(member) is tuple and _parts(get_args(member)[0]) != (None, None):
            inner = get_args(member)[0]
    return cls, inner


def _members(shape: Any) -> Iterator[Any]:
    yield from get_args(shape) if get_origin(shape) in (Union, UnionType) else (shape,)
