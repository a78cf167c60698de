"""Turns and trajectories as bytes for the journal: msgpack with raw arrays, defaults left out, nothing
stored twice.

How a field is written and read follows from its type in `core.trajectory`. Invariant: `unpack(pack(x)) ==
x`, bit for bit, for everything that was ever written. A new field needs a default and nothing here; any
other change needs a new FORMAT and a reader for the old one. A trace is written as a reference to the turns
it was built from wherever that gives back exactly its arrays, and raw wherever it does not (a user's own
builder may do as it likes).
"""

from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

import attrs
import msgpack  # type: ignore[import-untyped]

from polarnode.core.arrays import Float32Array, Int32Array, floats, ids
from polarnode.core.conversation import Message, Part, TextPart, ThinkingPart, ToolCall
from polarnode.core.errors import JournalError
from polarnode.core.trajectory import (
    Damaged,
    NewMessages,
    Trace,
    Trajectory,
    Turn,
    TurnSpan,
    join_routed_experts,
    join_top_logprobs,
    line_of,
    sequence,
    trained_of,
    with_published_roles,
    without_damaged,
)

PACKED_FORMAT = b"\x01"


def pack_turn(turn: Turn) -> bytes:
    """Pack a turn: 8 bytes for each sampled token, 4 for each prompt token, the token extras, and a few
    hundred bytes for the rest.
    """
    return _pack(_compact_value(turn))


def unpack_turn(packed: bytes) -> Turn:
    """Unpack what `pack_turn` returned. Raises JournalError for another format."""
    turn: Turn = _read(Turn, _unpack(packed))
    return turn


def pack_trajectory(trajectory: Trajectory) -> bytes:
    """Pack a trajectory without its turns, which are packed one by one."""
    turns = {turn.index: turn for turn in trajectory.turns}
    rest = _compact_value(attrs.evolve(trajectory, traces=(), turns=()))
    return _pack(
        rest | {"traces": [_compact_trace(trace, turns) for trace in trajectory.traces], "turns": None}
    )


def unpack_trajectory(
    packed: bytes, turns: Sequence[Turn], *, damaged: tuple[Damaged, ...] = ()
) -> Trajectory:
    """Unpack what `pack_trajectory` returned; `turns` are the trajectory's turns. Where some are missing,
    `damaged` names them, and the traces that need them are missing too.
    """
    found = _unpack(packed)
    by_index = {turn.index: turn for turn in turns}
    kept = [
        _trace(trace, by_index) if not damaged or _is_whole(trace, by_index) else None
        for trace in found["traces"]
    ]
    made = {"traces": tuple(trace for trace in kept if trace is not None), "turns": tuple(turns)}
    trajectory: Trajectory = _read(Trajectory, found, made)
    turns = with_published_roles(turns, trajectory.left_out)
    trajectory = attrs.evolve(trajectory, turns=turns)
    if not damaged:
        return trajectory
    lost = (
        Damaged(part=f"traces[{index}]", reason="a turn that it is made of is damaged")
        for index, trace in enumerate(kept)
        if trace is None
    )
    return without_damaged(trajectory, turns, (*damaged, *lost))


def _is_whole(trace: Mapping[str, Any], turns: Mapping[int, Turn]) -> bool:
    """Whether all turns of a packed trace are present."""
    spans = [span["turn"] for span in trace["turn_spans"]]
    return all(turn in turns for turn in spans) and (not spans or line_of(turns, spans[-1]) is not None)


def _pack(value: Any) -> bytes:
    # The end of a log may contain invalid UTF-8, which must not lose the trajectory: hence surrogatepass.
    packed: bytes = msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass")
    return PACKED_FORMAT + packed


def _unpack(packed: bytes) -> dict[str, Any]:
    if packed[:1] != PACKED_FORMAT:
        raise JournalError(
            f"an entry has format {packed[:1].hex() or 'none'}: it was written by another polarnode, which"
            " can read it"
        )
    found: dict[str, Any] = msgpack.unpackb(
        packed[1:], raw=False, strict_map_key=False, unicode_errors="surrogatepass"
    )
    return found


# ── values to msgpack ─────────────────────────────────────────────────────────


def _compact_value(value: Any) -> Any:
    kind: Any = type(value)
    if kind in PLAIN:
        return value
    compact = COMPACT_WRITERS.get(kind)
    if compact is not None:
        return compact(value)
    if isinstance(value, Mapping):
        return {key: _compact_value(part) for key, part in value.items()}
    return _compact_class(value, _fields(kind)) if attrs.has(kind) else value


def _compact_class(value: Any, fields: "PackedFields") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, key, default in fields:
        part = getattr(value, name)
        if default is attrs.NOTHING or part != default:
            found[key] = part if type(part) in PLAIN else _compact_value(part)
    return found


def _compact_message(message: Message) -> list[Any]:
    """Write a message as short as possible, because most are a role and a text."""
    if not message.calls and message.call_id is None and not message.thinking:
        return [message.role, message.text]
    return [message.role, message.text, _compact_value(message.calls), message.call_id, message.thinking]


PackedFields = tuple[tuple[str, str, Any], ...]


@cache
def _fields(cls: Hashable) -> PackedFields:
    """Each field's name, key and default. A factory's product is made once, for comparison."""
    found: list[tuple[str, str, Any]] = []
    for field in attrs.fields(cast(Any, cls)):
        default: Any = field.default
        key = field.metadata.get("packed", field.name)
        found.append((field.name, key, default.factory() if hasattr(default, "factory") else default))
    return tuple(found)


# By exact type, because a turn is packed on the event loop: 15 µs instead of 75 with a chain of class
# patterns.
PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
COMPACT_WRITERS: Mapping[type, Callable[[Any], Any]] = {
    array: lambda value: value.tobytes(),
    tuple: lambda value: [_compact_value(part) for part in value],
    list: lambda value: [_compact_value(part) for part in value],
    TextPart: lambda part: part.text,
    ThinkingPart: lambda part: [part.text],
    ToolCall: lambda call: [call.id, call.name, call.arguments],
    Message: _compact_message,
    NewMessages: lambda new: {"messages": [], **_compact_class(new, _fields(NewMessages))},
}


# ── msgpack to values ─────────────────────────────────────────────────────────

Reader = Callable[[Any], Any]


def _read(cls: Any, found: dict[str, Any], made: dict[str, Any] | None = None) -> Any:
    """Read an attrs value that `_compact_value` wrote; `made` are the fields that are values already."""
    values = found if made is None else found | made
    for name, key in _renamed(cls):
        if key in values:
            values[name] = values.pop(key)
    for name, reader in _field_readers(cls):
        if name in values and (made is None or name not in made):
            values[name] = reader(values[name])  # in place: the value came from msgpack and has no other user
    return cls(**values)


@cache
def _renamed(cls: Hashable) -> tuple[tuple[str, str], ...]:
    """The fields of a class whose key is not their name."""
    return tuple((name, key) for name, key, _ in _fields(cls) if key != name)


@cache
def _field_readers(cls: Hashable) -> tuple[tuple[str, Reader], ...]:
    """The readers of the fields that msgpack does not return unchanged."""
    readers = ((each.name, _reader(each.type)) for each in attrs.fields(cast(Any, cls)))
    return tuple((name, reader) for name, reader in readers if reader is not None)


def _reader(kind: Any) -> Reader | None:
    """How a value of this type is read; None when msgpack returns it unchanged."""
    if kind in READERS:
        return READERS[kind]
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        return _tuple_reader(_reader(parts[0]))
    if get_origin(kind) in (Union, UnionType):
        inner = next(filter(None, map(_reader, parts)), None)
        return None if inner is None else _optional_reader(inner)
    if not attrs.has(kind):
        return None
    return partial(_read, kind) if _field_readers(kind) else lambda found: kind(**found)


def _tuple_reader(inner: Reader | None) -> Reader:
    return tuple if inner is None else lambda found: tuple(map(inner, found))


def _optional_reader(inner: Reader) -> Reader:
    return lambda found: None if found is None else inner(found)


def _read_part(found: Any) -> Part:
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


def _read_message(found: Sequence[Any]) -> Message:
    role, text, calls, call_id, thinking = found if len(found) > 2 else (*found, (), None, "")
    return Message(
        role=role,
        text=text,
        calls=tuple(ToolCall(id=call, name=name, arguments=text) for call, name, text in calls),
        call_id=call_id,
        thinking=thinking,
    )


READERS: Mapping[Any, Reader] = {
    Int32Array: ids,
    Float32Array: floats,
    Part: _read_part,
    Message: _read_message,
}


# ── traces: by reference where the turns give the same arrays ─────────────────


def _compact_trace(trace: Trace, turns: Mapping[int, Turn]) -> dict[str, Any]:
    last = trace.turn_spans[-1].turn if trace.turn_spans else None
    # Arrays are compared as bytes, because comparing them directly creates a number for each item.
    token_ids = trace.token_ids.tobytes()
    by_turn = _row_bytes(turns, last, trace.offset) == token_ids
    by_mask = _logprobs_of(trace.loss_mask, trace.turn_spans, turns)
    packed: dict[str, Any] = _compact_value(attrs.evolve(trace, top=None, routed=None)) | _compact_carried(
        trace, turns
    )
    packed["token_ids"] = last if by_turn else token_ids
    packed["loss_mask"] = _runs(trace.loss_mask)
    packed["logprobs"] = (
        None
        if by_mask is not None and by_mask.tobytes() == trace.logprobs.tobytes()
        else trace.logprobs.tobytes()
    )
    runs, teacher = packed["loss_mask"], trace.teacher_logprobs
    if teacher is not None and isinstance(runs, list):
        # Most tokens of an agent's rows are not trained. Only the trained ones are written, in a list.
        trained = b"".join(teacher[start:end].tobytes() for start, end in _run_pairs(runs))
        if _spread(floats(trained), runs).tobytes() == teacher.tobytes():
            packed["teacher_logprobs"] = [trained]
    return packed


def _compact_carried(trace: Trace, turns: Mapping[int, Turn]) -> dict[str, Any]:
    """The trace's token extras: absent if it has none, True for those the turns hold, else the values."""
    packed: dict[str, Any] = {}
    if trace.top is not None:
        packed["top"] = join_top_logprobs(
            trained_of(trace.loss_mask, trace.turn_spans, turns)
        ) == trace.top or _compact_value(trace.top)
    if trace.routed is not None:
        packed["routed"] = join_routed_experts(
            trace.offset, _line(trace.turn_spans, turns)
        ) == trace.routed or _compact_value(trace.routed)
    return packed


def _line(spans: Sequence[TurnSpan], turns: Mapping[int, Turn]) -> list[Turn] | None:
    return line_of(turns, spans[-1].turn) if spans else None


def _trace(found: dict[str, Any], turns: Mapping[int, Turn]) -> Trace:
    spans, offset = tuple(TurnSpan(**span) for span in found["turn_spans"]), found.get("offset", 0)
    made: dict[str, Any] = {"turn_spans": spans}
    if isinstance(found["token_ids"], bytes):
        count = len(found["token_ids"]) // 4  # int32
    else:
        made["token_ids"] = sequence(turns, found["token_ids"])[offset:]
        count = len(made["token_ids"])
    mask = made["loss_mask"] = _mask(found["loss_mask"], count)
    if found["logprobs"] is None:
        made["logprobs"] = _logprobs_of(mask, spans, turns)
    if found.get("top") is True:
        made["top"] = join_top_logprobs(trained_of(mask, spans, turns))
    if found.get("routed") is True:
        made["routed"] = join_routed_experts(offset, _line(spans, turns))
    if isinstance(found.get("teacher_logprobs"), list):
        made["teacher_logprobs"] = _spread(floats(found["teacher_logprobs"][0]), _runs(mask))
    trace: Trace = _read(Trace, found, made)
    return trace


def _row_bytes(turns: Mapping[int, Turn], last: int | None, offset: int) -> bytes | None:
    try:
        return None if last is None or offset < 0 else sequence(turns, last)[offset:].tobytes()
    except KeyError:
        return None  # the turn's ancestor is not in this trajectory, so the trace is written raw


def _logprobs_of(mask: bytes, spans: Sequence[TurnSpan], turns: Mapping[int, Turn]) -> "array[float] | None":
    """Zero where the mask is 0, else the logprobs of the span's turn. None when the spans do not fit the
    turns.
    """
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


def _run_pairs(runs: Sequence[int]) -> "zip[tuple[int, int]]":
    return zip(runs[1::2], runs[2::2], strict=True)


def _spread(trained: "array[float]", runs: Sequence[int]) -> "array[float]":
    """The values of the positions in these runs, with 0 between them."""
    found, at = floats(bytes(4 * runs[0])), 0
    for start, end in _run_pairs(runs):
        found[start:end] = trained[at : at + end - start]
        at += end - start
    return found


def _mask(found: Any, count: int) -> bytes:
    """The mask of `count` tokens. A damaged row may name any length, so only the length of its ids is
    allocated.
    """
    if isinstance(found, bytes):
        return found
    if found[0] != count or max(found) > count:
        raise ValueError(f"a mask of {found[0]} positions stands beside {count} token ids")
    mask = bytearray(count)
    for start, end in _run_pairs(found):
        mask[start:end] = b"\1" * (end - start)
    return bytes(mask)
