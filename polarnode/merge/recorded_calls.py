"""Merge recorded calls: lines of JSONL in, training rows as JSONL out, with counts.

A session stays open until the input ends, since its calls may lie anywhere in it. It holds each id once (4
bytes), a logprob for each sampled one (4 bytes) and some 600 bytes a call. Rows are made one session at a
time, and the session is then released. A bad line never affects another line.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy
import orjson
from attrs import define, field

from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trace
from polarnode.merge.builders import prefix_merging
from polarnode.merge.invariants import check
from polarnode.merge.token_forest import Began, Forest, Hasher, Name, RecordedCall, read_call

_NO_CONFIG: Final[Mapping[str, Json]] = MappingProxyType({})


@define(kw_only=True)
class Counts:
    """Counts of what was read and made. `rows` = the `first` rows of sessions + `retries` + `broken`. `empty`
    calls sampled nothing and are in no row.
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

    def note(self, began: Began) -> None:
        """Count the reason why a row began, if one began."""
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
    """One session's calls, and the line of each turn."""

    forest: Forest
    lines: dict[Name, int] = field(factory=dict)


@define(eq=False)
class Sessions:
    """Takes the input line by line; gives the rows after the last line."""

    counts: Counts = field(factory=Counts)
    _hasher: Hasher = field(factory=Hasher)
    _open: dict[str | int, _Session] = field(factory=dict)

    def take(self, text: bytes, line: int) -> str | None:
        """Take one line of the input. Returns a sentence on its fault, or None. An empty line is skipped."""
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
        session = _Session(forest=Forest(self._hasher)) if existing is None else existing
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
        """The rows as lines of JSON: sessions in the order they appeared, a session's in the order of
        their last turns.

        InvariantViolated if a session's rows break an invariant: a fault of polarnode, not of the
        input.
        """
        self.counts.sessions = len(self._open)
        while self._open:
            session_id = next(iter(self._open))
            yield from self._rows_of(session_id, self._open.pop(session_id).forest)

    def _rows_of(self, session_id: str | int, forest: Forest) -> Iterator[bytes]:
        turns, names = list(forest.turns(str(session_id))), forest.turn_ids
        built = prefix_merging(turns, _NO_CONFIG, most_tokens=None)
        counted = check(turns, built)
        self.counts.trainable += counted.trainable
        self.counts.rows += counted.traces
        for trace in built.traces:
            yield _row(session_id, trace, names)


def _row(session_id: str | int, trace: Trace, names: list[Name]) -> bytes:
    """A row as JSON. float32 numbers are written in the fewest digits that read back to the same bits."""
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
    """The spans of weight versions, where they were named; adjacent spans of the same version are joined."""
    found: list[dict[str, Json]] = []
    for span in trace.version_spans:
        if found and (found[-1]["version"], found[-1]["end"]) == (span.version, span.start):
            found[-1]["end"] = span.end
        elif span.version:
            found.append({"version": span.version, "start": span.start, "end": span.end})
    return found


def _json(value: Name) -> str:
    return orjson.dumps(value).decode()
