"""Strict JSON for tool calls: what a call is once it is read, and the exact text that was written.

One object, no duplicate keys, no NaN or infinity, no half of a surrogate pair: a repaired call is one that
the model never made. A change here changes what counts as malformed in every syntax, and so what is trained
as a call.
"""

import json
import math
from collections.abc import Mapping
from typing import Final, NoReturn

from attrs import frozen

from polarnode.core.conversation import Json

SPACE: Final = " \t\n\r"  # JSON's own blanks; str.strip() would remove more


@frozen
class ReadCall:
    """A call as sampled: the name, the text of the arguments object, and the model's own id for it,
    where its syntax has one.
    """

    name: str
    arguments: str
    model_id: str | None = None


def read_value(text: str) -> Json:
    """The JSON value of a text, keys in their order. ValueError for anything that is not strict."""
    try:
        value: Json = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check(value, text)
    return value


def read_object(text: str) -> dict[str, Json] | None:
    """The JSON object of a text, keys in their order; None for anything else, or anything not strict."""
    try:
        value = read_value(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_first(text: str, at: int) -> tuple[dict[str, Json], int] | None:
    """The JSON object that begins at a place of a text, and where it ends; None if there is no strict one."""
    try:
        value, end = _DECODER.raw_decode(text, at)
        _check(value, text[at:end])
    except (ValueError, RecursionError):
        return None
    return (value, end) if isinstance(value, dict) else None


def arguments_of(value: Mapping[str, Json], text: str, key: str) -> str | None:
    """The source text of a call's arguments, the member `key` of the object in `text`; None if they are no
    object.

    For arguments written as a string that contains an object (as models trained on doubly encoded calls do),
    the text of that object, as the harness would parse it.
    """
    match value[key]:
        case dict():
            return _source(text, key)
        case str() as inner if read_object(inner) is not None:
            return inner.strip(SPACE)
        case _:
            return None


def _check(value: Json, text: str) -> None:
    if "\\u" in text:
        # JSON can spell half a surrogate pair, which is not text
        json.dumps(value, ensure_ascii=False).encode()


def _source(text: str, name: str) -> str:
    """The exact text of one member's value in an object already known to be well formed."""
    at = text.index("{") + 1
    while True:
        key, at = _DECODER.raw_decode(text, _skip(text, at))
        start = _skip(text, _skip(text, at) + 1)  # over the colon
        _, end = _DECODER.raw_decode(text, start)
        if key == name:
            return text[start:end]
        at = _skip(text, end) + 1  # over the comma


def _skip(text: str, at: int) -> int:
    while text[at] in SPACE:
        at += 1
    return at


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is written twice")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond a float's range")
    return number


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant
)
