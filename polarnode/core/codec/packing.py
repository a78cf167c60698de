"""Turns and trajectories as bytes for the journal: msgpack with raw arrays, defaults left out, nothing stored
twice.

The rule for whoever edits it: `unpack(pack(x)) == x`, bit for bit, for everything that was ever written; a
new field of `records.py` needs a default and then nothing here, any other change needs a new FORMAT and a
reader for the old one. A trace is written as a reference to the turns it was built from wherever that gives
back exactly its arrays, and raw wherever it does not (a builder of one's own may do as it likes).
"""

from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import attrs
import msgpack  # type: ignore[import-untyped]

from polarnode.core.arrays import floats, ids
from polarnode.core.codec.arrays import routed_of_turns, top_of_turns, trained_of, unpack_routed, unpack_top
from polarnode.core.codec.turns import line_of, pack_heard, sequence, unpack_heard
from polarnode.core.conversation import Answer, Part, Sampling, TextPart, ThinkingPart, ToolCall, Usage
from polarnode.core.errors import JournalError
from polarnode.core.trajectory import (
    LeftOut,
    NewMessages,
    Outcome,
    Timing,
    Trace,
    Trajectory,
    Turn,
    TurnSpan,
    VersionSpan,
)

FORMAT = b"\x01"


def pack_turn(turn: Turn) -> bytes:
    """The turn as bytes: 8 a sampled token, 4 a prompt token, what it carries, and some hundreds for the
    rest.
    """
    return _pack(_compact(turn))


def unpack_turn(packed: bytes) -> Turn:
    """What `pack_turn` was given. JournalError when the bytes are of another format."""
    return Turn(**{name: TURN_READERS.get(name, _same)(value) for name, value in _unpack(packed).items()})


def pack_trajectory(trajectory: Trajectory) -> bytes:
    """The trajectory without its turns, which are packed one by one."""
    turns = {turn.index: turn for turn in trajectory.turns}
    rest = _compact(attrs.evolve(trajectory, traces=(), turns=()))
    return _pack(
        rest | {"traces": [_compact_trace(trace, turns) for trace in trajectory.traces], "turns": None}
    )


def unpack_trajectory(packed: bytes, turns: Sequence[Turn]) -> Trajectory:
    """What `pack_trajectory` was given; `turns` are its turns again."""
    found = _unpack(packed)
    by_index = {turn.index: turn for turn in turns}
    traces = tuple(_trace(trace, by_index) for trace in found["traces"])
    rest = {name: TRAJECTORY_READERS.get(name, _same)(value) for name, value in found.items()}
    return Trajectory(**(rest | {"traces": traces, "turns": tuple(turns)}))


def _pack(value: Any) -> bytes:
    # surrogatepass: a log's tail may hold what is no UTF-8, and must not cost the trajectory
    packed: bytes = msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass")
    return FORMAT + packed


def _unpack(packed: bytes) -> dict[str, Any]:
    if packed[:1] != FORMAT:
        raise JournalError(
            f"an entry has format {packed[:1].hex() or 'none'}: it was written by another polarnode, which"
            " can read it"
        )
    found: dict[str, Any] = msgpack.unpackb(
        packed[1:], raw=False, strict_map_key=False, unicode_errors="surrogatepass"
    )
    return found


# ── values to what msgpack knows ──────────────────────────────────────────────


def _compact(value: Any) -> Any:
    kind: Any = type(value)
    if kind in PLAIN:
        return value
    compact = COMPACT.get(kind)
    if compact is not None:
        return compact(value)
    if isinstance(value, Mapping):
        return {key: _compact(part) for key, part in value.items()}
    return _compact_class(value, _fields(kind)) if attrs.has(kind) else value


def _compact_class(value: Any, fields: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    said = ((name, getattr(value, name), default) for name, default in fields)
    return {
        name: _compact(part) for name, part, default in said if default is attrs.NOTHING or part != default
    }


# By exact type, because a turn is packed on the event loop: 15 µs instead of 75 with a chain of class
# patterns.
PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
COMPACT: Mapping[type, Callable[[Any], Any]] = {
    array: lambda value: value.tobytes(),
    tuple: lambda value: [_compact(part) for part in value],
    list: lambda value: [_compact(part) for part in value],
    TextPart: lambda part: part.text,
    ThinkingPart: lambda part: [part.text],
    ToolCall: lambda call: [call.id, call.name, call.arguments],
    NewMessages: pack_heard,
}


@cache
def _fields(cls: Hashable) -> tuple[tuple[str, Any], ...]:
    """Each field's name and default; a factory's product is made once, to compare with."""
    found: list[tuple[str, Any]] = []
    for field in attrs.fields(cast(Any, cls)):
        default: Any = field.default
        found.append((field.name, default.factory() if hasattr(default, "factory") else default))
    return tuple(found)


# ── and back ──────────────────────────────────────────────────────────────────


def _same(value: Any) -> Any:
    return value


def _spans(kind: Callable[..., Any]) -> Callable[[list[dict[str, Any]]], tuple[Any, ...]]:
    return lambda found: tuple(kind(**span) for span in found)


def _sampling(found: dict[str, Any]) -> Sampling:
    return Sampling(**(found | {"stop": tuple(found.get("stop", ()))}))


def _answer(found: dict[str, Any] | None) -> Answer | None:
    return (
        None
        if found is None
        else Answer(**(found | {"parts": tuple(_part(part) for part in found["parts"])}))
    )


def _part(found: Any) -> Part:
    match found:
        case str():
            return TextPart(found)
        case [text]:
            return ThinkingPart(text)
        case [call_id, name, arguments]:
            return ToolCall(id=call_id, name=name, arguments=arguments)
    raise JournalError(
        f"a part of an answer has an unknown form ({type(found).__name__}): the journal is damaged"
    )


TURN_READERS: Mapping[str, Callable[[Any], Any]] = {
    "prompt_delta": ids,
    "sampled": ids,
    "logprobs": floats,
    "version_spans": _spans(VersionSpan),
    "answer": _answer,
    "asked": _sampling,
    "used": _sampling,
    "usage": lambda found: Usage(**found),
    "notes": tuple,
    "heard": unpack_heard,
    "top": unpack_top,
    "routed": unpack_routed,
}
TRAJECTORY_READERS: Mapping[str, Callable[[Any], Any]] = {
    "outcome": lambda found: Outcome(**found),
    "left_out": _spans(LeftOut),
    "timing": lambda found: Timing(**found),
}


# ── traces: by reference where the turns give the same arrays ─────────────────


def _compact_trace(trace: Trace, turns: Mapping[int, Turn]) -> dict[str, Any]:
    last = trace.turn_spans[-1].turn if trace.turn_spans else None
    token_ids = trace.token_ids.tobytes()  # compared as bytes: comparing arrays makes a number of every item
    by_turn = _chain(turns, last, trace.offset) == token_ids
    by_mask = _logprobs_of(trace.loss_mask, trace.turn_spans, turns)
    packed: dict[str, Any] = _compact(attrs.evolve(trace, top=None, routed=None)) | _compact_carried(
        trace, turns
    )
    packed["token_ids"] = last if by_turn else token_ids
    packed["loss_mask"] = _runs(trace.loss_mask)
    packed["logprobs"] = (
        None
        if by_mask is not None and by_mask.tobytes() == trace.logprobs.tobytes()
        else trace.logprobs.tobytes()
    )
    return packed


def _compact_carried(trace: Trace, turns: Mapping[int, Turn]) -> dict[str, Any]:
    """Nothing for nothing, True for what the turns tell."""
    packed: dict[str, Any] = {}
    if trace.top is not None:
        packed["top"] = top_of_turns(
            trained_of(trace.loss_mask, trace.turn_spans, turns)
        ) == trace.top or _compact(trace.top)
    if trace.routed is not None:
        packed["routed"] = routed_of_turns(
            trace.offset, _line(trace.turn_spans, turns)
        ) == trace.routed or _compact(trace.routed)
    return packed


def _line(spans: Sequence[TurnSpan], turns: Mapping[int, Turn]) -> list[Turn] | None:
    return line_of(turns, spans[-1].turn) if spans else None


def _trace(found: dict[str, Any], turns: Mapping[int, Turn]) -> Trace:
    token_ids, logprobs, spans = found["token_ids"], found["logprobs"], _spans(TurnSpan)(found["turn_spans"])
    mask, top, routed = _mask(found["loss_mask"]), found.get("top"), found.get("routed")
    restored = {
        "token_ids": (
            ids(token_ids)
            if isinstance(token_ids, bytes)
            else sequence(turns, token_ids)[found.get("offset", 0) :]
        ),
        "loss_mask": mask,
        "logprobs": _logprobs_of(mask, spans, turns) if logprobs is None else floats(logprobs),
        "turn_spans": spans,
        "version_spans": _spans(VersionSpan)(found["version_spans"]),
        "top": top_of_turns(trained_of(mask, spans, turns)) if top is True else unpack_top(top),
        "routed": (
            routed_of_turns(found.get("offset", 0), _line(spans, turns))
            if routed is True
            else unpack_routed(routed)
        ),
        "lacks": tuple(found.get("lacks", ())),
    }
    return Trace(**(found | restored))


def _chain(turns: Mapping[int, Turn], last: int | None, offset: int) -> bytes | None:
    try:
        return None if last is None or offset < 0 else sequence(turns, last)[offset:].tobytes()
    except KeyError:
        return None  # a turn whose ancestor is not of this trajectory: written raw


def _logprobs_of(mask: bytes, spans: Sequence[TurnSpan], turns: Mapping[int, Turn]) -> "array[float] | None":
    """Zero where the mask is 0, else what the span's turn says; None when the spans do not fit the turns."""
    found = floats(bytes(4 * len(mask)))
    for span in spans:
        turn = turns.get(span.turn)
        if (
            turn is None
            or not 0 <= span.start <= span.end <= len(mask)
            or len(turn.logprobs) != span.end - span.start
        ):
            return None
        if any(mask[span.start : span.end]):
            found[span.start : span.end] = turn.logprobs
    return found


def _runs(mask: bytes) -> Any:
    """Where the mask is 1, as [start, end, start, end …]; the mask itself when it has other values."""
    if mask.translate(None, b"\0\1"):
        return mask
    runs: list[int] = []
    at = mask.find(1)
    while at >= 0:
        end = mask.find(0, at)
        end = len(mask) if end < 0 else end
        runs += (at, end)
        at = mask.find(1, end)
    return [len(mask), *runs]


def _mask(found: Any) -> bytes:
    if isinstance(found, bytes):
        return found
    mask = bytearray(found[0])
    for start, end in zip(found[1::2], found[2::2], strict=True):
        mask[start:end] = b"\1" * (end - start)
    return bytes(mask)
