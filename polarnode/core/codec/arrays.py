"""Arrays on the wire: as JSON lists, as base64, or as raw bytes; always little-endian int32, float32 and
uint8, and always exact.

The rule for whoever edits it: a float32 written here is read back as the same value. As a JSON number it is
written as the double of the same value; what JSON has no number for is one of three words, which every
language's reader of numbers knows. Polarnode's machines (x86-64, aarch64) are little-endian, so memory is the
wire's order.

Alternatives and routed experts on the wire: as JSON, where their numbers are one flat array each, and as the
journal's bytes.

The rule for whoever edits it: an array says its shape beside it, and what does not fit its shape is refused.
In the journal a trace's rows stand as "those of its turns" wherever they are exactly that, so that a position
is stored once however many traces it is in.
"""

from array import array
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite, nan
from typing import Any, Final, Literal, TypeVar

from attrs import frozen

from polarnode.core.arrays import ExpertType, RoutedExperts, TopLogprobs, floats, ids
from polarnode.core.codec.json import subject
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trace, Turn, TurnSpan

# ── arrays ────────────────────────────────────────────────────────────

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
    # a tenth of what writing them costs
    if isinstance(value, array) and value.typecode == "f" and not isfinite(sum(numbers)):
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


# ── carried ────────────────────────────────────────────────────────────

# ── as JSON ───────────────────────────────────────────────────────────────────


def carried_json(held: Turn | Trace, encode: Encode) -> dict[str, Json]:
    """The two fields that turns and traces share."""
    top, routed = held.top, held.routed
    return {
        "top_logprobs": (
            None if top is None else {"k": top.k, "ids": encode(top.ids), "logprobs": encode(top.logprobs)}
        ),
        "routed_experts": None if routed is None else _routed_json(routed, encode),
    }


def _routed_json(routed: RoutedExperts, encode: Encode) -> dict[str, Json]:
    data = array("h", routed.data) if routed.dtype == "int16" else routed.data
    return {
        "start": routed.start,
        "layers": routed.layers,
        "top_k": routed.top_k,
        "dtype": routed.dtype,
        "data": encode(data),
    }


@frozen(kw_only=True)
class TopShape:
    k: int
    ids: Json
    logprobs: Json


@frozen(kw_only=True)
class RoutedShape:
    start: int
    layers: int
    top_k: int
    dtype: ExpertType
    data: Json


def read_top(shape: TopShape | None, path: str) -> TopLogprobs | None:
    """Refused when the arrays are none, or not of their shape."""
    if shape is None:
        return None
    found = TopLogprobs(
        k=shape.k,
        ids=read_ids(shape.ids, f"{path}.ids"),
        logprobs=read_floats(shape.logprobs, f"{path}.logprobs"),
    )
    if found.k < 1 or len(found.ids) % found.k or len(found.ids) != len(found.logprobs):
        raise Refused(
            f"{subject(path)} has {len(found.ids)} ids and {len(found.logprobs)} logprobs: it must have"
            f" {found.k} of each a row",
            path=path,
        )
    return found


def read_routed(shape: RoutedShape | None, path: str) -> RoutedExperts | None:
    """Refused when the array is none, or not of its shape."""
    if shape is None:
        return None
    data = (read_mask if shape.dtype == "uint8" else read_shorts)(shape.data, f"{path}.data")
    found = RoutedExperts(
        start=shape.start, layers=shape.layers, top_k=shape.top_k, dtype=shape.dtype, data=data
    )
    if found.width < 1 or len(data) % found.width or found.start < 0:
        raise Refused(
            f"{subject(path)} has {len(data)} bytes from {found.start} on: it must have {found.width} a"
            " position",
            path=path,
        )
    return found


# ── as the journal's bytes ────────────────────────────────────────────────────


def unpack_top(found: Mapping[str, Any] | None) -> TopLogprobs | None:
    """What packing made of it: `k`, and two arrays as bytes."""
    return (
        None
        if found is None
        else TopLogprobs(k=found["k"], ids=ids(found["ids"]), logprobs=floats(found["logprobs"]))
    )


def unpack_routed(found: Mapping[str, Any] | None) -> RoutedExperts | None:
    """What packing made of it."""
    return None if found is None else RoutedExperts(**found)


def top_of_turns(trained: Sequence[Turn | None]) -> TopLogprobs | None:
    """What the trained turns of a trace have for their tokens; None when one has nothing, or is not there."""
    found = [turn.top for turn in trained if turn is not None and turn.top is not None]
    return TopLogprobs.joined(found) if len(found) == len(trained) else None


def trained_of(mask: bytes, spans: Sequence[TurnSpan], turns: Mapping[int, Turn]) -> list[Turn | None]:
    """The turns that a trace trains, by its mask."""
    return [turns.get(span.turn) for span in spans if any(mask[span.start : span.end])]


def routed_of_turns(offset: int, line: Sequence[Turn] | None) -> RoutedExperts | None:
    """What a line of turns has for the trace at its end that begins at `offset`; None when a position has
    nothing.
    """
    end = line[-1].end - 1 if line else 0
    return RoutedExperts.joined(
        (turn.routed for turn in line or () if turn.routed is not None), end, start=offset
    )
