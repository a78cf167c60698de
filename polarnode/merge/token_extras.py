"""Token extras: top logprobs and routed experts, recorded beside ids, logprobs and weight versions.

`SessionExtras` says what each call requests and counts the bytes, `turn_extras` makes what a turn keeps,
`row_extras` what a trace gets. Invariants: a row of a trace is the engine's own bytes, copied as memory from
the turn that has it; missing extras are never padded but named, by the turn in a note and by the trace in
`missing_extras`.
"""

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, Literal

from attrs import define, field, frozen

from polarnode.core.arrays import RoutedExperts, TopLogprobs
from polarnode.core.conversation import Json
from polarnode.core.task import CarrySpec
from polarnode.core.trajectory import Trace, Turn, routed_of_turns, top_of_turns

ExtraName = Literal["top_logprobs", "routed_experts"]
MISSING_PREFIX: Final = "not carried: "  # first words of a turn's note on why extras are missing
CUT: Final = "the sample was cut before its end"
LIMIT: Final = "the session has used up the node's carried_mb"


def note(what: ExtraName, why: str) -> str:
    """A turn's note on requested extras that are missing."""
    return f"{MISSING_PREFIX}{what}: {why}"


# ── extras of a row ───────────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class RowExtras:
    """The extras of a trace: the fields of `Trace` of the same names."""

    top: TopLogprobs | None = None
    routed: RoutedExperts | None = None
    missing_extras: tuple[str, ...] = ()


def row_extras(line: Sequence[Turn], trained: Collection[int], *, offset: int = 0) -> RowExtras:
    """The extras of a row. `line` is its turns, root first, to the last in it; `trained` the indexes of
    those with loss.

    `offset` is where a part of a longer row begins.
    """
    if not any(map(_extras_requested, line)):
        return RowExtras()
    top, routed = top_of(line, trained), routed_of(line, offset=offset)
    missing = [
        *(_lacking("top_logprobs", _sampled(line, trained)) if top is None else ()),
        *(_lacking("routed_experts", line) if routed is None else ()),
    ]
    return RowExtras(top=top, routed=routed, missing_extras=tuple(missing))


def top_of(line: Sequence[Turn], trained: Collection[int]) -> TopLogprobs | None:
    """The top logprobs of each trainable token of a row, in order; None when a token has none."""
    return top_of_turns(_sampled(line, trained))


def routed_of(line: Sequence[Turn], *, offset: int = 0) -> RoutedExperts | None:
    """The experts of all positions of a row but the last; None when a position has none. A turn may
    supply positions that one before it is missing.
    """
    return routed_of_turns(offset, line)


def _sampled(line: Sequence[Turn], trained: Collection[int]) -> list[Turn]:
    return [turn for turn in line if turn.index in trained and turn.sampled]


def _extras_requested(turn: Turn) -> bool:
    return (
        turn.top is not None
        or turn.routed is not None
        or any(each.startswith(MISSING_PREFIX) for each in turn.notes)
    )


def _lacking(what: ExtraName, turns: Sequence[Turn]) -> Iterator[str]:
    """The last turn without this extra, and why, if any turn requested it."""
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
    """The weight version of every token: the versions in the order they first sampled, and int32[T] of
    indexes into them, -1 where none sampled.
    """
    named = {span.version: None for span in trace.version_spans}
    places = {version: place for place, version in enumerate(named)}
    found = array("i", b"\xff" * (4 * len(trace.token_ids)))
    for span in trace.version_spans:
        found[span.start : span.end] = array("i", [places[span.version]]) * (span.end - span.start)
    return tuple(named), found


# ── extras of a session ───────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class CallExtras:
    """The extras that one call requests: `top_logprobs` of each token, the experts from position
    `routed_from` on, `room` bytes at most.

    `notes` say why it is less than the task requested.
    """

    top_logprobs: int = 0
    routed_from: int | None = None
    room: int = 0
    notes: tuple[str, ...] = ()


@frozen(kw_only=True)
class TurnExtras:
    """The extras of a turn: the fields of `Turn` of the same names, and its notes of missing ones."""

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
    if size_of(rows, routed) > carry.room:
        lost: tuple[ExtraName, ...] = () if rows is None else ("top_logprobs",)
        lost = lost if routed is None else (*lost, "routed_experts")
        return TurnExtras(notes=(*notes, *(note(what, LIMIT) for what in lost)))
    return TurnExtras(top=rows, routed=routed, notes=tuple(notes))


@define(eq=False)
class SessionExtras:
    """The extras of one session's turns and their size. At most `limit` bytes; later turns get none,
    with a note.
    """

    spec: CarrySpec
    limit: int
    size: int = field(default=0, init=False)  # bytes
    without: int = field(default=0, init=False)  # turns with missing extras
    # by turn: how many positions have their experts, from 0 on, without a gap
    _covered: dict[int, int] = field(factory=dict, init=False)

    def carry(self, parent: int | None) -> CallExtras:
        """The extras that a call requests that extends `parent`. Its rows begin where those of its
        ancestors end.
        """
        if not self._requested:
            return CallExtras()
        if self.size >= self.limit:
            return CallExtras(notes=tuple(note(what, LIMIT) for what in self._requested))
        routed_from = self.covered(parent) if self.spec.routed_experts else None
        return CallExtras(
            top_logprobs=self.spec.top_logprobs, routed_from=routed_from, room=self.limit - self.size
        )

    def covered(self, index: int | None) -> int:
        """How many positions of a turn have their experts, in it or before it."""
        return 0 if index is None else self._covered.get(index, 0)

    def add(self, turn: Turn) -> None:
        """Count a turn that ended."""
        have = self.covered(turn.parent)
        if turn.routed is not None and turn.routed.start <= have:
            have = max(have, turn.routed.end)
        self._covered[turn.index] = have
        self.size += size_of(turn.top, turn.routed)
        self.without += any(each.startswith(MISSING_PREFIX) for each in turn.notes)

    def metrics(self) -> Mapping[str, Json]:
        """Sizes for the trajectory's metrics; empty when no extras were requested."""
        return {"carried_bytes": self.size, "uncarried_turns": self.without} if self._requested else {}

    @property
    def _requested(self) -> tuple[ExtraName, ...]:
        top: tuple[ExtraName, ...] = ("top_logprobs",) if self.spec.top_logprobs else ()
        return (*top, "routed_experts") if self.spec.routed_experts else top


def size_of(top: TopLogprobs | None, routed: RoutedExperts | None) -> int:
    """The bytes of both."""
    return (0 if top is None else top.size) + (0 if routed is None else len(routed.data))
