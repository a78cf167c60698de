"""Merge recorded calls: lines of JSONL in, training rows as JSONL out. The calls of a session form a forest
of turns.

`read_call` reads one line of JSON; a fault is one sentence with line and field. A call that it returns is
whole: as many logprobs as sampled ids, every number in range.

In `TurnForest` a call extends the turn whose prompt and sample form the longest exact prefix of the call's
prompt. Candidates are found by a hash at the lengths at which turns end, and proven by comparing memory, in
time linear in the prompt. Ids lie in lines: a call that extends the last turn of a line is appended to the
line, and any other call begins a new line, so lines are the future rows. Keep this free of recursion, of a
Python object for each id, and of anything that costs turns times tokens.

A session remains open until the input ends, because its calls may be anywhere in it. It holds each id once (4
bytes), a logprob for each sampled one (4 bytes) and some 600 bytes a call. Rows are made one session at a
time, and the session is then released. A bad line never affects another line.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from math import isfinite
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy
import orjson
from attrs import define, field, frozen

from polarnode.core.arrays import floats, ids
from polarnode.core.conversation import Json, Sampling, Usage
from polarnode.core.errors import Refused
from polarnode.core.trajectory import UNKNOWN_VERSION, Trace, Turn, TurnKind, VersionSpan
from polarnode.merge.builders import prefix_merging
from polarnode.merge.invariants import check

# ── recorded calls ────────────────────────────────────────────────────────────────────────────────

Name = str | int | float
MAX_TOKEN_ID: Final = 2**31 - 1


@frozen(kw_only=True)
class RecordedCall:
    """One model call: `prompt` int32[P], `sampled` int32[S], `logprobs` float32[S]. `version` is None if no
    weights were named.
    """

    line: int
    session_id: str | int
    turn_id: Name
    prompt: "array[int]"
    sampled: "array[int]"
    logprobs: "array[float]"
    version: str | None


def read_call(text: bytes, line: int) -> RecordedCall:
    """The call in a line of JSONL. Unknown fields are ignored. Raises Refused with the line and the field."""
    try:
        fields = _object(text)
        return _call(fields, line, maybe_bool=b"true" in text or b"false" in text)
    except Refused as refused:
        raise Refused(f"line {line}: {refused}") from refused


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Refused(f"it is not JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(value, dict):
        raise Refused(
            "it is no JSON object: a line is one model call, {session_id, turn_id, prompt_ids, sampled_ids,"
            " logprobs}"
        )
    return value


def _call(fields: dict[str, Any], line: int, *, maybe_bool: bool) -> RecordedCall:
    sampled = _ids(fields, "sampled_ids", maybe_bool=maybe_bool)
    return RecordedCall(
        line=line,
        session_id=_name(fields, "session_id", str, int),
        turn_id=_name(fields, "turn_id", str, int, float),
        prompt=_ids(fields, "prompt_ids", maybe_bool=maybe_bool),
        sampled=sampled,
        logprobs=_logprobs(fields, len(sampled), maybe_bool=maybe_bool),
        version=_version(fields),
    )


def _required_field(fields: dict[str, Any], field: str) -> Any:
    if field not in fields:
        raise Refused(
            f"{field} is missing: a call has session_id, turn_id, prompt_ids, sampled_ids and logprobs"
        )
    return fields[field]


def _name(fields: dict[str, Any], field: str, *types: type) -> Any:
    value = _required_field(fields, field)
    if type(value) not in types or value == "":
        raise Refused(
            f"{field} is {_shown(value)}: give a"
            f" string{' or a whole number' if float not in types else ' or a number'}"
        )
    return value


def _version(fields: dict[str, Any]) -> str | None:
    """A string names the weights, as in SGLang. A number becomes its digits."""
    value = fields.get("weight_version")
    if value is not None and type(value) not in (str, int):
        raise Refused(f"weight_version is {_shown(value)}: give a string or a whole number, or leave it out")
    return None if value is None or value == "" else str(value)


def _ids(fields: dict[str, Any], field: str, *, maybe_bool: bool) -> "array[int]":
    values = _list(fields, field, "token ids")
    try:
        found = ids(values)
    except (TypeError, OverflowError):
        raise Refused(_wrong_id_text(field, values)) from None
    negative = bool(found) and int(numpy.frombuffer(found, dtype=numpy.int32).min()) < 0
    if negative or (maybe_bool and _has_bool(values)):
        raise Refused(_wrong_id_text(field, values))
    return found


def _wrong_id_text(field: str, values: list[Any]) -> str:
    place = next(
        place
        for place, value in enumerate(values)
        if type(value) is not int or not 0 <= value <= MAX_TOKEN_ID
    )
    return (
        f"{field}[{place}] is {_shown(values[place])}: a token id is a whole number from 0 to {MAX_TOKEN_ID}"
    )


def _logprobs(fields: dict[str, Any], sampled: int, *, maybe_bool: bool) -> "array[float]":
    values = _list(fields, "logprobs", "numbers, one a sampled id")
    if len(values) != sampled:
        raise Refused(
            f"logprobs has {len(values)} numbers for {sampled} sampled_ids: give the engine's logprob of each"
            " sampled id"
        )
    try:
        found = floats(values)
    except TypeError:
        raise Refused(_wrong_logprob_text(values)) from None
    if not isfinite(sum(found)) or (maybe_bool and _has_bool(values)):
        raise Refused(_wrong_logprob_text(values))
    return found


def _wrong_logprob_text(values: list[Any]) -> str:
    place = next(
        place
        for place, value in enumerate(values)
        if type(value) not in (int, float) or not isfinite(floats([value])[0])
    )
    return f"logprobs[{place}] is {_shown(values[place])}: a logprob is a finite float32"


def _list(fields: dict[str, Any], field: str, of: str) -> list[Any]:
    values = _required_field(fields, field)
    if not isinstance(values, list):
        raise Refused(f"{field} is {_shown(values)}: give a list of {of}")
    return values


def _has_bool(values: list[Any]) -> bool:
    """Whether a value is a bool. JSON's true equals 1 in Python, but is no id."""
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


# ── forest ────────────────────────────────────────────────────────────────────────────────────────

# What a call did to the rows. It continued one (none), or it began one: as the first call of its session
# (first), because it repeats a prompt (retry), or because its prompt does not contain the previous reply
# (broken).
RowStart = Literal["none", "first", "retry", "broken"]

_NO_SAMPLING: Final = Sampling()
_NO_USAGE: Final = Usage()
Words = numpy.ndarray[Any, numpy.dtype[numpy.uint64]]


@define(eq=False)
class PrefixHasher:
    """Computes the hashes of all prefixes of some ids in one pass. All sessions share it. The hashes have 64
    bits.
    """

    _weights: Words = field(factory=lambda: _hash_weights(1024))

    def of(self, text: "array[int]") -> Words:
        """uint64[len + 1]: entry n is the hash of the first n ids."""
        if len(text) > len(self._weights):
            self._weights = _hash_weights(2 * len(text))
        found = numpy.zeros(len(text) + 1, dtype=numpy.uint64)
        numpy.cumsum(
            (numpy.frombuffer(text, dtype=numpy.int32).astype(numpy.uint64) + _ONE)
            * self._weights[: len(text)],
            out=found[1:],
        )
        return found


_ONE: Final = numpy.uint64(1)


def _hash_weights(count: int) -> Words:
    """splitmix64 of 0, 1, 2 …, made odd so that no difference between two ids vanishes."""
    z = numpy.arange(1, count + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return (z ^ (z >> numpy.uint64(31))) | _ONE


@define(eq=False)
class _IdLine:
    """Consecutive ids, the first at position `start`. The ids before `start` are those of the line
    `before`.
    """

    number: int
    before: "_IdLine | None"
    start: int
    tokens: "array[int]"

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def begins(self, text: bytes, end: int) -> bool:
        """Whether the ids up to `end` are a prefix of `text`."""
        line: _IdLine | None = self
        while line is not None:
            with memoryview(line.tokens) as held, held[: end - line.start] as part:
                if not text.startswith(part, 4 * line.start):
                    return False
            end = line.start
            line = line.before
        return True


@frozen(kw_only=True)
class _PlacedCall:
    """A call, and where its ids lie in its line: the new ids from `start` on, the sample from `prompt_length`
    to `end`.
    """

    index: int
    turn_id: Name
    parent: int | None
    kind: TurnKind
    line: _IdLine
    start: int
    prompt_length: int
    end: int
    logprobs: "array[float]"
    version: str | None


@define(eq=False)
class TurnForest:
    """One session's calls, in the order they came."""

    hasher: PrefixHasher
    _placed: list[_PlacedCall] = field(factory=list)
    _lines: int = 0
    _end_lengths: "array[int]" = field(factory=ids)  # the lengths at which turns end, ascending, each once
    _ends: dict[int, list[_PlacedCall]] = field(
        factory=dict
    )  # turns by the key of their text, the latest last
    _prompts: dict[int, _PlacedCall] = field(
        factory=dict
    )  # the first turn with each prompt, by the prompt's key

    @property
    def turn_ids(self) -> list[Name]:
        """The calls' own names, by turn index."""
        return [placed.turn_id for placed in self._placed]

    def add(self, call: RecordedCall) -> RowStart:
        """Add a call that sampled something. O(ids of the call)."""
        whole = call.prompt + call.sampled
        text, hashes, length = whole.tobytes(), self.hasher.of(whole), len(call.prompt)
        parent = self._extended(text, hashes, length)
        start = 0 if parent is None else parent.end
        goes_on = parent is not None and parent.end == parent.line.end
        prompt_key, before = _key(length, int(hashes[length])), parent.line if parent is not None else None
        began = "none" if goes_on else self._why(prompt_key, text, length)
        placed = _PlacedCall(
            index=len(self._placed),
            turn_id=call.turn_id,
            parent=None if parent is None else parent.index,
            kind="root" if parent is None else "extend" if goes_on else "branch",
            line=parent.line if parent is not None and goes_on else self._begin(before, start),
            start=start,
            prompt_length=length,
            end=len(whole),
            logprobs=call.logprobs,
            version=call.version,
        )
        placed.line.tokens.frombytes(text[4 * start :])
        self._keep(placed, prompt_key, _key(len(whole), int(hashes[-1])))
        return began

    def _extended(self, text: bytes, hashes: Words, length: int) -> _PlacedCall | None:
        """The turn that a prompt of this length extends: the longest that fits. O(length), because turns end
        at no more than that many lengths.
        """
        lengths = self._end_lengths[: bisect_right(self._end_lengths, length)]
        found: list[int] = hashes[numpy.frombuffer(lengths, dtype=numpy.int32)].tolist() if lengths else []
        for end, hashed in zip(reversed(lengths), reversed(found), strict=True):
            twins = self._ends.get(_key(end, hashed))
            if twins and twins[-1].line.begins(text, end):
                # Each of several turns with the same text is extended once, the latest first. The last one
                # that remains takes all further calls.
                return twins.pop() if len(twins) > 1 else twins[0]
        return None

    def _why(self, prompt_key: int, text: bytes, length: int) -> RowStart:
        """Why a row begins with this call."""
        if not self._placed:
            return "first"
        first = self._prompts.get(prompt_key)
        return "retry" if first is not None and first.line.begins(text, length) else "broken"

    def _begin(self, before: _IdLine | None, start: int) -> _IdLine:
        self._lines += 1
        return _IdLine(number=self._lines - 1, before=before, start=start, tokens=ids())

    def _keep(self, placed: _PlacedCall, prompt_key: int, end_key: int) -> None:
        self._placed.append(placed)
        self._prompts.setdefault(prompt_key, placed)
        place = bisect_right(self._end_lengths, placed.end)
        if not place or self._end_lengths[place - 1] != placed.end:
            self._end_lengths.insert(place, placed.end)
        # If two texts share length and hash, the later one is found first and rejected by the comparison.
        # That costs a row and violates no invariant.
        self._ends.setdefault(end_key, []).append(placed)

    def turns(self, session_id: str) -> Iterator[Turn]:
        """The calls as turns. A turn whose call named no weights has the version ""."""
        for placed in self._placed:
            line, held = placed.line, placed.line.tokens
            sampled = held[placed.prompt_length - line.start : placed.end - line.start]
            yield Turn(
                session_id=session_id,
                index=placed.index,
                provider="tokens",
                lineage=line.number,
                parent=placed.parent,
                kind=placed.kind,
                reason="tokens",
                prompt_delta=held[placed.start - line.start : placed.prompt_length - line.start],
                prompt_length=placed.prompt_length,
                sampled=sampled,
                logprobs=placed.logprobs,
                version_spans=(
                    VersionSpan(version=placed.version or UNKNOWN_VERSION, start=0, end=len(sampled)),
                ),
                asked=_NO_SAMPLING,
                used=_NO_SAMPLING,
                usage=_NO_USAGE,
            )


def _key(length: int, hashed: int) -> int:
    return length << 64 | hashed


# ── merging ─────────────────────────────────────────────────────────────────────────────────────────

_NO_CONFIG: Final[Mapping[str, Json]] = MappingProxyType({})


@define(kw_only=True)
class Counts:
    """Counts of what was read and made. `rows` equals `first` (the first rows of sessions) + `retries` +
    `broken`. `empty` calls sampled nothing and are in no row.
    """

    records: int = 0
    sessions: int = 0
    rows: int = 0
    sampled: int = 0
    trainable: int = 0
    first: int = 0
    retries: int = 0
    broken: int = 0
    empty: int = 0
    bad: int = 0

    def note(self, began: RowStart) -> None:
        """Count why a row began, if one began."""
        match began:
            case "first":
                self.first += 1
            case "retry":
                self.retries += 1
            case "broken":
                self.broken += 1
            case "none":
                pass


@define(eq=False)
class _Session:
    """One session's calls, and the input line of each turn."""

    forest: TurnForest
    lines: dict[Name, int] = field(factory=dict)


@define(eq=False)
class Sessions:
    """Reads the input line by line, and yields the rows after the last line."""

    counts: Counts = field(factory=Counts)
    _hasher: PrefixHasher = field(factory=PrefixHasher)
    _open: dict[str | int, _Session] = field(factory=dict)

    def take(self, text: bytes, line: int) -> str | None:
        """Read one line of the input. Returns a sentence on its fault, or None. An empty line is skipped."""
        if not text.strip():
            return None
        self.counts.records += 1
        try:
            self._add(read_call(text, line))
        except Refused as refused:
            self.counts.bad += 1
            return str(refused)
        return None

    def _add(self, call: RecordedCall) -> None:
        existing = self._open.get(call.session_id)
        session = _Session(forest=TurnForest(self._hasher)) if existing is None else existing
        earlier = session.lines.setdefault(call.turn_id, call.line)
        if earlier != call.line:
            sentence = (
                f"line {call.line}: turn_id {_json(call.turn_id)} of session_id {_json(call.session_id)} is"
                f" on line {earlier} already"
            )
            raise Refused(f"{sentence}: give every call of a session its own")
        self._open[call.session_id] = session
        self.counts.sampled += len(call.sampled)
        if call.sampled:
            self.counts.note(session.forest.add(call))
        else:
            self.counts.empty += 1

    def rows(self) -> Iterator[bytes]:
        """The rows as lines of JSON. Sessions are in the order in which they appeared, and the rows of a
        session in the order of their last turns.

        Raises InvariantViolated if the rows of a session violate an invariant: a fault of polarnode, not of
        the input.
        """
        self.counts.sessions = len(self._open)
        while self._open:
            session_id = next(iter(self._open))
            yield from self._rows_of(session_id, self._open.pop(session_id).forest)

    def _rows_of(self, session_id: str | int, forest: TurnForest) -> Iterator[bytes]:
        turns, names = list(forest.turns(str(session_id))), forest.turn_ids
        built = prefix_merging(turns, _NO_CONFIG, most_tokens=None)
        counted = check(turns, built)
        self.counts.trainable += counted.trainable
        self.counts.rows += counted.traces
        for trace in built.traces:
            yield _row(session_id, trace, names)


def _row(session_id: str | int, trace: Trace, names: list[Name]) -> bytes:
    """A row as JSON. float32 numbers have the fewest digits that read back to the same bits."""
    row = {
        "session_id": session_id,
        "token_ids": numpy.frombuffer(trace.token_ids, dtype=numpy.int32),
        "loss_mask": numpy.frombuffer(trace.loss_mask, dtype=numpy.uint8),
        "logprobs": numpy.frombuffer(trace.logprobs, dtype=numpy.float32),
        "turn_spans": [
            {"turn": names[span.turn], "start": span.start, "end": span.end} for span in trace.turn_spans
        ],
        "version_spans": _versions(trace),
    }
    return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _versions(trace: Trace) -> list[dict[str, Json]]:
    """The spans of weight versions that were named. Adjacent spans of the same version are joined."""
    found: list[dict[str, Json]] = []
    for span in trace.version_spans:
        if found and (found[-1]["version"], found[-1]["end"]) == (span.version, span.start):
            found[-1]["end"] = span.end
        elif span.version:
            found.append({"version": span.version, "start": span.start, "end": span.end})
    return found


def _json(value: Name) -> str:
    return orjson.dumps(value).decode()
