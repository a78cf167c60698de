"""Builders make training rows from turns, and slices from rows that are too long.

`prefix_merging` makes one row for each leaf of the turns, `per_request` one for each trained turn. A custom
builder uses `select` (which turns are trained), `line_to`, and `row` or `rows`.

Invariants: a row is, token for token, what the engine was conditioned on, copied from the turns. A sampled
token is trainable in one row only. A trained sample is never cut and lies in one slice. A slice begins where
a turn ended, with at least one token before its first trained one, and slices do not overlap.
`invariants.check` tests every result. Everything here is linear in the output: there is no recursion, and ids
are copied as memory.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Final

from attrs import frozen

from polarnode.core import plugins
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused, boundary
from polarnode.core.task import BuilderSpec
from polarnode.core.trajectory import Built, LeftOut, Trace, Turn, TurnSpan, VersionSpan
from polarnode.merge import ledger
from polarnode.merge.invariants import check_turns
from polarnode.merge.selection import (
    INHERITED_TURNS_SETTING,
    Settings,
    TrainableSelection,
    read_settings,
    select,
)
from polarnode.merge.token_extras import row_extras

# ── slices ────────────────────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Slice:
    """Tokens [start, end) of a row. They are the tokens, all or the last ones, that turns `first` to `last`
    added (positions in the line, inclusive).
    """

    start: int
    end: int
    first: int
    last: int
    part: int = 0
    parts: int = 1
    over_long: bool = False


def slices(line: Sequence[Turn], trained: Collection[int], limit: int | None) -> list[Slice]:
    """The slices of the row that a line of turns makes; a single slice if the row is within the limit.
    `trained` are turn indexes.

    `line` may begin after the root if it still has at least `limit` tokens.
    """
    end, begin = line[-1].end, line[0].begin
    if limit is None or end <= limit:
        return [Slice(start=begin, end=end, first=0, last=len(line) - 1)]
    groups = list(_groups(line, list(_trained_ranges(line, trained)), limit))
    ends = [turn.end for turn in line]
    cut: list[Slice] = []
    for part, (first, last) in enumerate(groups):
        floor = cut[-1].end if cut else begin
        start = _start(line, ends, first, floor=floor, low=max(floor, ends[last] - limit))
        length = ends[last] - start
        inner = bisect_left(ends, start + 1)
        cut.append(
            Slice(
                start=start,
                end=ends[last],
                first=inner,
                last=last,
                part=part,
                parts=len(groups),
                over_long=length > limit,
            )
        )
    return cut


def _trained_ranges(line: Sequence[Turn], trained: Collection[int]) -> Iterator[tuple[int, int]]:
    """The trained turns as position ranges (first, last). A turn that follows a trained sample directly has
    no context of its own, and stays in that sample's range.
    """
    places = [place for place, turn in enumerate(line) if turn.index in trained]
    first = places[0]
    for last, following in pairwise(places):
        if line[following].prompt_length > line[last].end:
            yield first, last
            first = following
    yield first, places[-1]


def _groups(line: Sequence[Turn], units: list[tuple[int, int]], limit: int) -> Iterator[tuple[int, int]]:
    """Join as many ranges as fit, from the left. No other division needs fewer slices."""
    first, last = units[0]
    for unit in units[1:]:
        if line[unit[1]].end - line[first].begin > limit:
            yield first, last
            first = unit[0]
        last = unit[1]
    yield first, last


def _start(line: Sequence[Turn], ends: Sequence[int], first: int, *, floor: int, low: int) -> int:
    """The start of the slice whose first trained turn is at position `first`: not before `low`, and at the
    end of a turn if one is in range.
    """
    sample = line[first].prompt_length
    if low == floor:
        return floor
    if low >= sample:
        # The sample is as long as the limit or longer. One token before it is kept.
        return max(floor, sample - 1)
    end = ends[bisect_left(ends, low)]
    return end if end < sample else low


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────


def prompt_ids(turns: Sequence[Turn], index: int) -> "array[int]":
    """Exactly the ids on which turn `index` was conditioned: a fresh int32[prompt_length]."""
    return ledger.prompt_ids({turn.index: turn for turn in turns}, index)


def line_to(by_index: Mapping[int, Turn], index: int, *, tokens: int | None = None) -> list[Turn]:
    """The turns from a root to `index`. With a number of tokens, only the last turns that together hold at
    least that many.
    """
    return ledger.chain(by_index, index, since=-1 if tokens is None else by_index[index].end - tokens)


def row(line: Sequence[Turn], trained: Collection[int], *, prompt_length: int | None = None) -> Trace:
    """The trace of a line of turns, from its root, with loss on the samples of the turns whose index is in
    `trained`.

    `prompt_length` is where the answer begins; by default that is at the first sample.
    """
    [trace] = rows(line, trained, prompt_length=prompt_length)
    return trace


def rows(
    line: Sequence[Turn],
    trained: Collection[int],
    *,
    limit: int | None = None,
    prompt_length: int | None = None,
) -> Iterator[Trace]:
    """As `row`, but in slices of at most `limit` tokens. Each trained turn must be in the line."""
    for cut in slices(line, trained, limit):
        yield _row(line[cut.first : cut.last + 1], trained, cut, prompt_length)


def _row(line: Sequence[Turn], trained: Collection[int], cut: Slice, prompt_length: int | None) -> Trace:
    leaf, length = line[-1], cut.end - cut.start
    # The mask is made before the arrays, which are eight times as large, because it is copied once.
    mask = _mask(line, trained, cut)
    token_ids, logprobs = array("i", [0]) * length, array("f", [0.0]) * length
    with memoryview(token_ids) as tokens, memoryview(logprobs) as chances:
        for turn in line:
            start, end = turn.prompt_length - cut.start, turn.end - cut.start
            _copy(tokens, turn.prompt_delta, end=start)
            _copy(tokens, turn.sampled, end=end)
            if turn.index in trained:
                chances[start:end] = memoryview(turn.logprobs)
    shown = [turn for turn in line if turn.sampled and turn.prompt_length >= cut.start]
    first = next((turn.prompt_length for turn in shown), cut.end) if prompt_length is None else prompt_length
    extras = row_extras(line, trained, offset=cut.start)
    return Trace(
        lineage=leaf.lineage,
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=logprobs,
        prompt_length=first - cut.start,
        turn_spans=tuple(
            TurnSpan(turn=turn.index, start=turn.prompt_length - cut.start, end=turn.end - cut.start)
            for turn in shown
        ),
        version_spans=tuple(_versions(shown, cut.start)),
        role=leaf.role,
        finish_reason=leaf.finish_reason,
        offset=cut.start,
        part=cut.part,
        parts=cut.parts,
        over_long=cut.over_long,
        top=extras.top,
        routed=extras.routed,
        missing_extras=extras.missing_extras,
    )


def _mask(line: Sequence[Turn], trained: Collection[int], cut: Slice) -> bytes:
    mask = bytearray(cut.end - cut.start)
    for turn in line:
        if turn.index in trained:
            mask[turn.prompt_length - cut.start : turn.end - cut.start] = b"\x01" * len(turn.sampled)
    return bytes(mask)


def _copy(tokens: "memoryview[int]", source: "array[int]", *, end: int) -> None:
    """Copy ids so that they end at `end`. Ids before the first position of the row are left out."""
    start = end - len(source)
    if end > 0:
        tokens[max(start, 0) : end] = memoryview(source)[max(-start, 0) :]


def _versions(shown: Sequence[Turn], start: int) -> Iterator[VersionSpan]:
    for turn in shown:
        at = turn.prompt_length - start
        for span in turn.version_spans:
            yield VersionSpan(version=span.version, start=at + span.start, end=at + span.end)


# ── builders ──────────────────────────────────────────────────────────────────────────────────────

__all__ = [
    "Builder",
    "Settings",
    "TrainableSelection",
    "build",
    "line_to",
    "per_request",
    "prefix_merging",
    "prompt_ids",
    "read_settings",
    "row",
    "rows",
    "select",
]

Builder = Callable[[Sequence[Turn], Mapping[str, Json]], Built]

# The limit on the tokens of one session's traces: 128 rows of 128k. Each row repeats its context, so 400
# short questions about one long prompt would be gigabytes. A trajectory of this size is an event of 160 MB.
MAX_SESSION_TOKENS: Final = 16 << 20
OVERSIZE_REASON: Final = (
    "oversize"  # the reason of a turn that is left out because its row would exceed the limit
)


def build(
    spec: BuilderSpec, turns: Sequence[Turn], *, inherited: int = 0, allowed_imports: tuple[str, ...] = ()
) -> Built:
    """Make the rows of a session with the named builder. Turns with an index below `inherited` are only
    context, which a builder reads in its config as `inherited_turns`. Raises Refused for an unknown name, a
    wrong config or a failing import.

    Raises InvariantViolated if the turns themselves are incomplete, before any row is made. Turns whose rows
    would exceed MAX_SESSION_TOKENS together are left out.
    """
    check_turns(turns)
    if INHERITED_TURNS_SETTING in spec.config:
        raise Refused(
            f"{INHERITED_TURNS_SETTING} is what the node tells a builder about a fork: leave it out of"
            " builder.config, and name the fork in the task's `fork`",
            path=f"$.builder.config.{INHERITED_TURNS_SETTING}",
        )
    config = {**spec.config, INHERITED_TURNS_SETTING: inherited} if inherited else spec.config
    if spec.import_path is not None:
        return _run_custom_builder(spec.import_path, turns, config, allowed_imports)
    builder = _BUILDERS.get(spec.name)
    if builder is None:
        raise Refused(
            f"there is no builder {spec.name!r}: name one of {', '.join(_BUILDERS)}, or give import_path",
            path="$.builder.name",
        )
    return builder(turns, config)


def prefix_merging(
    turns: Sequence[Turn], config: Mapping[str, Json], *, most_tokens: int | None = MAX_SESSION_TOKENS
) -> Built:
    """One row for each leaf of the tree of turns. A turn in several rows is trained in the first of them and
    is context in the others. The first row is chosen, not the longest, because a row then does not change
    when later turns are added; the number of rows and tokens is the same.

    Rows beyond `most_tokens` in total are not made, and their turns are left out if no other row has them.
    """
    selection = select(turns, config)
    limit, room = selection.settings.max_row_tokens, inf if most_tokens is None else most_tokens
    taken: set[int] = set()
    traces: list[Trace] = []
    for leaf in selection.leaves:
        line = line_to(selection.by_index, leaf.index)
        lost = {
            turn.index for turn in line if turn.index in selection.trained_indexes and turn.index not in taken
        }
        tokens = _tokens(line, lost, limit)
        if tokens <= room:
            room -= tokens
            taken |= lost
            traces += rows(line, lost, limit=limit)
    return _make_built(traces, selection, taken)


def per_request(
    turns: Sequence[Turn], config: Mapping[str, Json], *, most_tokens: int | None = MAX_SESSION_TOKENS
) -> Built:
    """One row for each trained turn: its whole prompt as context, its sample with loss. A prompt that is too
    long keeps its end. Turns whose rows would exceed `most_tokens` in total are left out.
    """
    selection = select(turns, config)
    limit, room = selection.settings.max_row_tokens, inf if most_tokens is None else most_tokens
    taken: set[int] = set()
    traces: list[Trace] = []
    for turn in selection.trained:
        needed = None if limit is None else max(limit, len(turn.sampled)) + 1
        line = line_to(selection.by_index, turn.index, tokens=needed)
        tokens = _tokens(line, {turn.index}, limit)
        if tokens <= room:
            room -= tokens
            taken.add(turn.index)
            traces += rows(line, {turn.index}, limit=limit, prompt_length=turn.prompt_length)
    return _make_built(traces, selection, taken)


def _tokens(line: Sequence[Turn], trained: Collection[int], limit: int | None) -> int:
    """The number of tokens in the rows of a line."""
    return sum(cut.end - cut.start for cut in slices(line, trained, limit))


def _make_built(traces: Sequence[Trace], selection: TrainableSelection, taken: Collection[int]) -> Built:
    """The rows, and the turns left out. Every trained turn that is in no row is left out as OVERSIZE."""
    over = [
        LeftOut(turn=index, reason=OVERSIZE_REASON)
        for index in selection.trained_indexes
        if index not in taken
    ]
    left_out = sorted((*selection.left_out, *over), key=lambda each: each.turn)
    return Built(traces=tuple(traces), left_out=tuple(left_out))


_BUILDERS: Final[Mapping[str, Builder]] = {
    "prefix_merging": prefix_merging,
    "per_request": per_request,
}


def _run_custom_builder(
    import_path: str, turns: Sequence[Turn], config: Mapping[str, Json], allowed: tuple[str, ...]
) -> Built:
    builder = plugins.load(import_path, allowed=allowed)
    if not callable(builder):
        raise Refused(
            f"the builder {import_path!r} is not callable: name a function of (turns, config)",
            path="$.builder.import_path",
        )
    with boundary(Refused, f"the builder {import_path!r} failed"):
        built = builder(turns, config)
    if not isinstance(built, Built):
        raise Refused(
            f"the builder {import_path!r} returned {type(built).__name__}: return a Built",
            path="$.builder.import_path",
        )
    return built
