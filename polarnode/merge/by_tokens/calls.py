"""One line of JSON as one model call: ids as int32, logprobs as float32, and a fault as one sentence with line and field.

The rule for whoever edits it: a call that comes out of here is whole (as many logprobs as sampled ids, every number in range), and nothing
costs a Python object an id beyond what the JSON reader makes.
"""

from array import array
from math import isfinite
from typing import Any, Final

import numpy
import orjson
from attrs import frozen

from polarnode.errors import Refused
from polarnode.records import floats, ids

Name = str | int | float
LARGEST_ID: Final = 2**31 - 1


@frozen(kw_only=True)
class Call:
    """One model call. `prompt` int32[P], `sampled` int32[S], `logprobs` float32[S]; `version` is None where no weights were named."""

    line: int
    session_id: str | int
    turn_id: Name
    prompt: "array[int]"
    sampled: "array[int]"
    logprobs: "array[float]"
    version: str | None


def read_call(text: bytes, line: int) -> Call:
    """The call that a line of JSONL says; fields it does not know are passed over. Refused with the line and the field."""
    try:
        said = _object(text)
        return _call(said, line, maybe_bool=b"true" in text or b"false" in text)
    except Refused as refused:
        raise Refused(f"line {line}: {refused}") from refused


def _object(text: bytes) -> dict[str, Any]:
    try:
        said = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Refused(f"it is not JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(said, dict):
        raise Refused("it is no JSON object: a line is one model call, {session_id, turn_id, prompt_ids, sampled_ids, logprobs}")
    return said


def _call(said: dict[str, Any], line: int, *, maybe_bool: bool) -> Call:
    sampled = _ids(said, "sampled_ids", maybe_bool=maybe_bool)
    return Call(
        line=line,
        session_id=_name(said, "session_id", str, int),
        turn_id=_name(said, "turn_id", str, int, float),
        prompt=_ids(said, "prompt_ids", maybe_bool=maybe_bool),
        sampled=sampled,
        logprobs=_logprobs(said, len(sampled), maybe_bool=maybe_bool),
        version=_version(said),
    )


def _given(said: dict[str, Any], field: str) -> Any:
    if field not in said:
        raise Refused(f"{field} is missing: a call has session_id, turn_id, prompt_ids, sampled_ids and logprobs")
    return said[field]


def _name(said: dict[str, Any], field: str, *types: type) -> Any:
    value = _given(said, field)
    if type(value) not in types or value == "":
        raise Refused(f"{field} is {_shown(value)}: give a string{' or a whole number' if float not in types else ' or a number'}")
    return value


def _version(said: dict[str, Any]) -> str | None:
    """Weights are named as SGLang does, by a string; a number is its digits."""
    value = said.get("weight_version")
    if value is not None and type(value) not in (str, int):
        raise Refused(f"weight_version is {_shown(value)}: give a string or a whole number, or leave it out")
    return None if value is None or value == "" else str(value)


def _ids(said: dict[str, Any], field: str, *, maybe_bool: bool) -> "array[int]":
    values = _list(said, field, "token ids")
    try:
        found = ids(values)
    except (TypeError, OverflowError):
        raise Refused(_which_id(field, values)) from None
    negative = bool(found) and int(numpy.frombuffer(found, dtype=numpy.int32).min()) < 0
    if negative or (maybe_bool and _has_bool(values)):
        raise Refused(_which_id(field, values))
    return found


def _which_id(field: str, values: list[Any]) -> str:
    place = next(place for place, value in enumerate(values) if type(value) is not int or not 0 <= value <= LARGEST_ID)
    return f"{field}[{place}] is {_shown(values[place])}: a token id is a whole number from 0 to {LARGEST_ID}"


def _logprobs(said: dict[str, Any], sampled: int, *, maybe_bool: bool) -> "array[float]":
    values = _list(said, "logprobs", "numbers, one a sampled id")
    if len(values) != sampled:
        raise Refused(f"logprobs has {len(values)} numbers for {sampled} sampled_ids: give the engine's logprob of each sampled id")
    try:
        found = floats(values)
    except TypeError:
        raise Refused(_which_logprob(values)) from None
    if not isfinite(sum(found)) or (maybe_bool and _has_bool(values)):
        raise Refused(_which_logprob(values))
    return found


def _which_logprob(values: list[Any]) -> str:
    place = next(place for place, value in enumerate(values) if type(value) not in (int, float) or not isfinite(floats([value])[0]))
    return f"logprobs[{place}] is {_shown(values[place])}: a logprob is a finite float32"


def _list(said: dict[str, Any], field: str, of: str) -> list[Any]:
    values = _given(said, field)
    if not isinstance(values, list):
        raise Refused(f"{field} is {_shown(values)}: give a list of {of}")
    return values


def _has_bool(values: list[Any]) -> bool:
    """JSON's true is Python's 1, and no id."""
    return any(type(value) is bool for value in values)


def _shown(value: Any) -> str:
    match value:
        case dict():
            return "an object"
        case list():
            return "a list"
        case _:
            text = orjson.dumps(value).decode()
            return text if len(text) <= 40 else f"{text[:40]}…"
