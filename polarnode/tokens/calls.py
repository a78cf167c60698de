"""Strict JSON for tool calls: what a call's body must be, and the exact text of its arguments.

Strict, because a repaired call is one the model never made: one object, no duplicate keys, no NaN or infinity, no half of a surrogate pair.
Whoever edits this changes what counts as malformed, and so what is trained as a call; keep the tests' list of refusals.
"""

import json
import math
from typing import Final, NoReturn

from attrs import frozen

from polarnode.conversation import Json

_SPACE: Final = " \t\n\r"  # JSON's own; str.strip() would take more


@frozen
class ReadCall:
    """A call as sampled: the name, and the source text of the arguments object."""

    name: str
    arguments: str


def read_call(body: str) -> ReadCall | None:
    """The call between a call's marks, None if it is malformed.

    The body is one object of exactly `name`, a non-empty string, and `arguments`, an object. Arguments written as a string that itself is an
    object (models trained on doubly encoded calls do that) are taken as that object's text: the harness would parse it so anyway.
    """
    value = read_object(body)
    if value is None or value.keys() != {"name", "arguments"}:
        return None
    name, arguments = value["name"], value["arguments"]
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        return None if read_object(arguments) is None else ReadCall(name, arguments.strip(_SPACE))
    return ReadCall(name, _source(body, "arguments")) if isinstance(arguments, dict) else None


def read_object(text: str) -> dict[str, Json] | None:
    """The JSON object a text is, keys in their order; None for anything else, or anything not strict."""
    try:
        value: Json = _DECODER.decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair can be written in JSON, and is no text
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _source(body: str, name: str) -> str:
    """The exact text of one member's value in an object already known to be well formed."""
    at = body.index("{") + 1
    while True:
        key, at = _DECODER.raw_decode(body, _skip(body, at))
        start = _skip(body, _skip(body, at) + 1)  # over the colon
        _, end = _DECODER.raw_decode(body, start)
        if key == name:
            return body[start:end]
        at = _skip(body, end) + 1  # over the comma


def _skip(text: str, at: int) -> int:
    while text[at] in _SPACE:
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


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)
