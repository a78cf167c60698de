"""Arrays on the wire: lists or base64 in JSON, raw bytes in the journal; always little-endian int32, float32,
int16 and uint8.

Invariant: a number written here is read back as the same value. JSON has no number for non-finite values, so
three words stand for them, which number parsers of every language accept. Polarnode's machines (x86-64,
aarch64) are little-endian, so memory already has the wire's order.
"""

from array import array
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Mapping
from math import inf, isfinite, nan
from typing import Any, Final, Literal, TypeVar

from polarnode.core.arrays import RoutedExperts, TopLogprobs, floats, ids
from polarnode.core.codec.json import JsonWriter, ValueMismatch, layout
from polarnode.core.conversation import Json

A = TypeVar("A")
Arrays = Literal["json", "base64"]
# Nodes wrote null before the words existed.
WORDS: Final[Mapping[str | None, float]] = {"NaN": nan, "Infinity": inf, "-Infinity": -inf, None: nan}
Encode = Callable[["array[Any] | bytes"], Json]
EXPERTS_SHAPE: Final = layout(RoutedExperts, without=("data",))


# ── writing ───────────────────────────────────────────────────────────────────


def encoder(arrays: Arrays) -> Encode:
    """The function that turns an array (or a mask's bytes) into JSON."""
    return _as_list if arrays == "json" else _as_base64


def _as_list(value: "array[Any] | bytes") -> Json:
    numbers = list(value)
    # The sum costs a tenth of writing the numbers.
    if isinstance(value, array) and value.typecode == "f" and not isfinite(sum(numbers)):
        return [part if isfinite(part) else _word(part) for part in numbers]
    return numbers


def _word(number: float) -> str:
    return "NaN" if number != number else "Infinity" if number > 0 else "-Infinity"


def _as_base64(value: "array[Any] | bytes") -> Json:
    return b64encode(value).decode()


def experts_json(routed: RoutedExperts, write: JsonWriter) -> dict[str, Json]:
    """Routed experts as JSON: `data` is written as numbers of their `dtype`."""
    numbers = array("h", routed.data) if routed.dtype == "int16" else routed.data
    return {**write.fields(routed, EXPERTS_SHAPE), "data": write(numbers)}


# ── reading ───────────────────────────────────────────────────────────────────


def read_ids(value: Any, _: object = None) -> "array[int]":
    """Read an int32 array from a list or base64. Raises Mismatch for anything else."""
    return _read(value, ids, "a list of int32 or base64 of them")


def read_floats(value: Any, _: object = None) -> "array[float]":
    """Read a float32 array from base64 or a list of numbers and WORDS. Raises Mismatch for anything else."""
    if isinstance(value, list):
        value = [WORDS.get(part, part) if part is None or isinstance(part, str) else part for part in value]
    return _read(value, floats, "a list of numbers or base64 of float32")


def read_mask(value: Any, _: object = None) -> bytes:
    """Read a uint8 array from a list or base64. Raises Mismatch for anything else."""
    return _read(value, bytes, "a list of 0 and 1 or base64 of them")


def read_int16_bytes(value: Any, _: object = None) -> bytes:
    """Read an int16 array from a list or base64, as bytes. Raises Mismatch for anything else."""
    return _read(value, lambda numbers: array("h", numbers).tobytes(), "a list of int16 or base64 of them")


def _read(value: Any, make: Callable[[Any], A], expected: str) -> A:
    if not isinstance(value, str | list):
        raise ValueMismatch(f"must be {expected}")
    try:
        return make(b64decode(value, validate=True) if isinstance(value, str) else value)
    except (Base64Error, ValueError, TypeError, OverflowError) as error:
        raise ValueMismatch(f"must be {expected}: {error}") from None


def check_top_logprobs(found: TopLogprobs) -> TopLogprobs:
    """Raise Mismatch when the arrays do not have their shape."""
    if found.k < 1 or len(found.ids) % found.k or len(found.ids) != len(found.logprobs):
        raise ValueMismatch(
            f"has {len(found.ids)} ids and {len(found.logprobs)} logprobs: it must have {found.k} of each"
            " a row"
        )
    return found


def check_routed_experts(found: RoutedExperts) -> RoutedExperts:
    """Raise Mismatch when the array does not have its shape."""
    if found.width < 1 or len(found.data) % found.width or found.start < 0:
        raise ValueMismatch(
            f"has {len(found.data)} bytes from {found.start} on: it must have {found.width} a position"
        )
    return found
