"""Arrays on the wire: as JSON lists, as base64, or as raw bytes; always little-endian int32, float32 and uint8, and always exact.

The rule for whoever edits it: a float32 written here is read back as the same value. As a JSON number it is written as the double of the
same value; what JSON has no number for is one of three words, which every language's reader of numbers knows. Polarnode's machines (x86-64,
aarch64) are little-endian, so memory is the wire's order.
"""

from array import array
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Mapping
from math import inf, isfinite, nan
from typing import Any, Final, Literal, TypeVar

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.records import floats, ids
from polarnode.wire.core import subject

A = TypeVar("A")
Arrays = Literal["json", "base64"]
# null: as it was written before there were words
WORDS: Final[Mapping[str | None, float]] = {"NaN": nan, "Infinity": inf, "-Infinity": -inf, None: nan}
Encode = Callable[["array[Any] | bytes"], Json]


def encoder(arrays: Arrays) -> Encode:
    """How an array (or a mask's bytes) becomes JSON."""
    return _as_list if arrays == "json" else _as_base64


def _as_list(value: "array[Any] | bytes") -> Json:
    numbers = list(value)
    if isinstance(value, array) and value.typecode == "f" and not isfinite(sum(numbers)):  # a tenth of what writing them costs
        return [part if isfinite(part) else _word(part) for part in numbers]
    return numbers


def _word(number: float) -> str:
    return "NaN" if number != number else "Infinity" if number > 0 else "-Infinity"


def _as_base64(value: "array[Any] | bytes") -> Json:
    return b64encode(value).decode()


def read_ids(value: Json, path: str) -> "array[int]":
    """int32 from a list or base64; Refused with `path`."""
    return _read(value, path, ids, "a list of int32 or base64 of them")


def read_floats(value: Json, path: str) -> "array[float]":
    """float32 from a list (of numbers and WORDS) or base64; Refused with `path`."""
    if isinstance(value, list):
        value = [WORDS.get(part, part) if part is None or isinstance(part, str) else part for part in value]
    return _read(value, path, floats, "a list of numbers or base64 of float32")


def read_mask(value: Json, path: str) -> bytes:
    """uint8 from a list or base64; Refused with `path`."""
    return _read(value, path, bytes, "a list of 0 and 1 or base64 of them")


def read_shorts(value: Json, path: str) -> bytes:
    """int16 from a list or base64, as bytes; Refused with `path`."""
    return _read(value, path, lambda said: array("h", said).tobytes(), "a list of int16 or base64 of them")


def _read(value: Json, path: str, make: Callable[[Any], A], expected: str) -> A:
    if not isinstance(value, str | list):
        raise Refused(f"{subject(path)} must be {expected}", path=path)
    try:
        return make(b64decode(value, validate=True) if isinstance(value, str) else value)
    except (Base64Error, ValueError, TypeError, OverflowError) as error:
        raise Refused(f"{subject(path)} must be {expected}: {error}", path=path) from None
