"""Token extras: top logprobs and routed experts, which are recorded beside ids, logprobs and weight versions.

`SessionExtras` decides which extras each call requests, and counts the bytes. `turn_extras` makes what a turn
keeps, `row_extras` what a trace gets. Invariants: a row of a trace is the engine's own bytes, copied as
memory from the turn that has it. Missing extras are never padded but named: by the turn in a note, and by the
trace in `missing_extras`.
"""

import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, Literal

from attrs import define, evolve, field, frozen

from polarnode.core.arrays import RoutedExperts, TopLogprobs, floats, ids
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.task import CarrySpec
from polarnode.core.trajectory import (
    Trace,
    Trajectory,
    Turn,
    join_routed_experts,
    join_top_logprobs,
    line_of,
    sequence,
)

ExtraName = Literal["top_logprobs", "routed_experts"]
MISSING_PREFIX: Final = "not carried: "  # A turn's note on missing extras begins with this.
CUT: Final = "the sample was cut before its end"
SIZE_LIMIT_REASON: Final = "the session has used up the node's carried_mb"


def note(what: ExtraName, why: str) -> str:
    """A turn's note on requested extras that are missing."""
    return f"{MISSING_PREFIX}{what}: {why}"


# ── extras of a row ───────────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class RowExtras:
    """The extras of a trace. The fields are those of `Trace` with the same names."""

    top: TopLogprobs | None = None
    routed: RoutedExperts | None = None
    missing_extras: tuple[str, ...] = ()


def row_extras(line: Sequence[Turn], trained: Collection[int], *, offset: int = 0) -> RowExtras:
    """The extras of a row. `line` are its turns, from the root to the last in the row; `trained` are the
    indexes of the turns with loss.

    `offset` is where a part of a longer row begins.
    """
    if not any(map(_extras_requested, line)):
        return RowExtras()
    top, routed = row_top_logprobs(line, trained), row_routed_experts(line, offset=offset)
    missing = [
        *(_lacking("top_logprobs", _sampled(line, trained)) if top is None else ()),
        *(_lacking("routed_experts", line) if routed is None else ()),
    ]
    return RowExtras(top=top, routed=routed, missing_extras=tuple(missing))


def row_top_logprobs(line: Sequence[Turn], trained: Collection[int]) -> TopLogprobs | None:
    """The top logprobs of each trainable token of a row, in order. None if a token has none."""
    return join_top_logprobs(_sampled(line, trained))


def row_routed_experts(line: Sequence[Turn], *, offset: int = 0) -> RoutedExperts | None:
    """The experts of all positions of a row but the last. None if a position has none. A turn may supply
    positions that an earlier turn is missing.
    """
    return join_routed_experts(offset, line)


def _sampled(line: Sequence[Turn], trained: Collection[int]) -> list[Turn]:
    return [turn for turn in line if turn.index in trained and turn.sampled]


def _extras_requested(turn: Turn) -> bool:
    return (
        turn.top is not None
        or turn.routed is not None
        or any(each.startswith(MISSING_PREFIX) for each in turn.notes)
    )


def _lacking(what: ExtraName, turns: Sequence[Turn]) -> Iterator[str]:
    """The last turn without this extra, and why, if any turn requested the extra."""
    lacking = [
        (turn.index, _why(turn, what))
        for turn in turns
        if (turn.top if what == "top_logprobs" else turn.routed) is None
    ]
    explained = [each for each in lacking if each[1] is not None]
    if explained:
        yield f"{what}: turn {explained[-1][0]} has none: {explained[-1][1]}"
    elif 0 < len(lacking) < len(turns):
        yield f"{what}: turn {lacking[-1][0]} has none"
    elif turns and not lacking:
        yield f"{what}: the rows of its turns do not meet"


def _why(turn: Turn, what: ExtraName) -> str | None:
    begins = note(what, "")
    return next((each.removeprefix(begins) for each in turn.notes if each.startswith(begins)), None)


def versions_of(trace: Trace) -> tuple[tuple[str, ...], "array[int]"]:
    """The weight version of every token: the versions in the order in which they first sampled, and an
    int32[T] of indexes into them, -1 for tokens that none sampled.
    """
    named = {span.version: None for span in trace.version_spans}
    places = {version: place for place, version in enumerate(named)}
    found = array("i", b"\xff" * (4 * len(trace.token_ids)))
    for span in trace.version_spans:
        found[span.start : span.end] = array("i", [places[span.version]]) * (span.end - span.start)
    return tuple(named), found


# ── logprobs of a teacher ─────────────────────────────────────────────────────────────────────────

_TRAINED_RUN: Final = re.compile(rb"\x01+")


def row_to_score(trace: Trace, turns: Mapping[int, Turn]) -> tuple["array[int]", int]:
    """The row of a trace from its very first token to its last trained one, and the position of its first
    trained token (at least 1, because nothing precedes the first token). The row of a slice begins with the
    tokens before its `offset`, which its turns hold. Raises Refused if they are not known.
    """
    before = ids()
    if trace.offset:
        last = trace.turn_spans[-1].turn if trace.turn_spans else -1
        whole = sequence(turns, last) if line_of(turns, last) is not None else ids()
        if whole[trace.offset : trace.offset + len(trace.token_ids)] != trace.token_ids:
            raise Refused(f"the {trace.offset} tokens before its offset are not those of its turns")
        before = whole[: trace.offset]
    row = before + trace.token_ids[: trace.loss_mask.rfind(1) + 1]
    return row, max(1, trace.offset + trace.loss_mask.find(1))


def masked_logprobs(mask: bytes, logprobs: "array[float]", *, begin: int) -> "array[float]":
    """float32[len(mask)]: the logprob where the mask is 1, and 0 elsewhere and before `begin`. The first of
    `logprobs` is that of position `begin`.
    """
    found = floats(bytes(4 * len(mask)))
    for run in _TRAINED_RUN.finditer(mask):
        first = max(run.start(), begin)
        found[first : run.end()] = logprobs[first - begin : run.end() - begin]
    return found


def add_teacher_logprobs(trace: Trace, begin: int, scored: "array[float] | str") -> Trace:
    """The trace with its teacher's logprobs, the first of which is that of position `begin`, or with the
    reason why there are none.
    """
    if isinstance(scored, str):
        return evolve(trace, missing_extras=(*trace.missing_extras, f"teacher_logprobs: {scored}"))
    return evolve(trace, teacher_logprobs=masked_logprobs(trace.loss_mask, scored, begin=begin))


def unscored(trajectory: Trajectory, why: str) -> Trajectory:
    """The trajectory, with the reason why no teacher scored it on each trace that has trained tokens."""
    traces = (
        add_teacher_logprobs(each, 0, why) if 1 in each.loss_mask else each for each in trajectory.traces
    )
    return evolve(trajectory, traces=tuple(traces))


# ── extras of a session ───────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class CallExtras:
    """The extras that one call requests: `top_logprobs` for each token, the experts from position
    `routed_from` on, at most `room` bytes.

    `notes` say why this is less than the task requested.
    """

    top_logprobs: int = 0
    routed_from: int | None = None
    room: int = 0
    notes: tuple[str, ...] = ()


@frozen(kw_only=True)
class TurnExtras:
    """The extras of a turn (the fields of `Turn` with the same names), and its notes on missing ones."""

    top: TopLogprobs | None = None
    routed: RoutedExperts | None = None
    notes: tuple[str, ...] = ()


def turn_extras(
    carry: CallExtras, *, sampled: int, top: Sequence[TopLogprobs], routed: RoutedExperts | None
) -> TurnExtras:
    """The extras of a turn of `sampled` tokens, from what the engine returned. A cut sample has no experts,
    because SGLang returns them at the end of a sample.
    """
    if not sampled:
        return TurnExtras()
    rows, notes = TopLogprobs.joined(top), list(carry.notes)
    if carry.top_logprobs and (rows is None or rows.rows != sampled):
        rows = None
        notes.append(note("top_logprobs", "the engine reported fewer tokens than it sampled"))
    if carry.routed_from is not None and routed is None:
        notes.append(note("routed_experts", CUT))
    if extras_bytes(rows, routed) > carry.room:
        lost: tuple[ExtraName, ...] = () if rows is None else ("top_logprobs",)
        lost = lost if routed is None else (*lost, "routed_experts")
        return TurnExtras(notes=(*notes, *(note(what, SIZE_LIMIT_REASON) for what in lost)))
    return TurnExtras(top=rows, routed=routed, notes=tuple(notes))


@define(eq=False)
class SessionExtras:
    """The extras of one session's turns and their size. Once they reach `limit` bytes, later turns get none,
    with a note.
    """

    spec: CarrySpec
    limit: int
    size: int = field(default=0, init=False)  # bytes
    without: int = field(default=0, init=False)  # the number of turns with missing extras
    # maps a turn to the number of positions, from 0 on without a gap, whose experts are known
    _covered_by_turn: dict[int, int] = field(factory=dict, init=False)

    def carry(self, parent: int | None) -> CallExtras:
        """The extras that a call requests that extends `parent`. Its experts begin where those of its
        ancestors end.
        """
        if not self._requested:
            return CallExtras()
        if self.size >= self.limit:
            return CallExtras(notes=tuple(note(what, SIZE_LIMIT_REASON) for what in self._requested))
        routed_from = self.covered(parent) if self.spec.routed_experts else None
        return CallExtras(
            top_logprobs=self.spec.top_logprobs, routed_from=routed_from, room=self.limit - self.size
        )

    def covered(self, index: int | None) -> int:
        """The number of first positions of a turn whose experts are recorded, in it or in an ancestor."""
        return 0 if index is None else self._covered_by_turn.get(index, 0)

    def add(self, turn: Turn) -> None:
        """Count a turn that ended."""
        have = self.covered(turn.parent)
        if turn.routed is not None and turn.routed.start <= have:
            have = max(have, turn.routed.end)
        self._covered_by_turn[turn.index] = have
        self.size += extras_bytes(turn.top, turn.routed)
        self.without += any(each.startswith(MISSING_PREFIX) for each in turn.notes)

    def metrics(self) -> Mapping[str, Json]:
        """Sizes for the trajectory's metrics; empty when no extras were requested."""
        return {"carried_bytes": self.size, "uncarried_turns": self.without} if self._requested else {}

    @property
    def _requested(self) -> tuple[ExtraName, ...]:
        top: tuple[ExtraName, ...] = ("top_logprobs",) if self.spec.top_logprobs else ()
        return (*top, "routed_experts") if self.spec.routed_experts else top


def extras_bytes(top: TopLogprobs | None, routed: RoutedExperts | None) -> int:
    """The bytes of both extras together."""
    return (0 if top is None else top.size) + (0 if routed is None else len(routed.data))
