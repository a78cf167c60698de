"""Where a row that is too long is cut: stretches of it, one behind the other, each within the limit.

The rule for whoever edits it: a trained sample is never cut and lies in one slice; a slice begins where a turn ended, with at least one token
that its first trained one is conditioned on; slices do not overlap, and what lies between two of them is context alone. Fewest slices first,
then as much context as fits. Only lengths are looked at here, no token.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from attrs import frozen

from polarnode.records import Turn


@frozen(kw_only=True)
class Slice:
    """Tokens [start, end) of a row: all or the end of what its turns `first` to `last` (places in the line, both in it) brought."""

    start: int
    end: int
    first: int
    last: int
    part: int = 0
    parts: int = 1
    over_long: bool = False


def slices(line: Sequence[Turn], trained: Collection[int], limit: int | None) -> list[Slice]:
    """The slices of the row that a line of turns makes, its trained ones by index; one, the whole row, where that is within the limit.

    `line` may begin after the root when at least `limit` tokens of it are there.
    """
    end, begin = line[-1].end, line[0].begin
    if limit is None or end <= limit:
        return [Slice(start=begin, end=end, first=0, last=len(line) - 1)]
    groups = list(_groups(line, list(_units(line, trained)), limit))
    ends = [turn.end for turn in line]
    cut: list[Slice] = []
    for part, (first, last) in enumerate(groups):
        floor = cut[-1].end if cut else begin
        start = _start(line, ends, first, floor=floor, low=max(floor, ends[last] - limit))
        length = ends[last] - start
        inner = bisect_left(ends, start + 1)
        cut.append(Slice(start=start, end=ends[last], first=inner, last=last, part=part, parts=len(groups), over_long=length > limit))
    return cut


def _units(line: Sequence[Turn], trained: Collection[int]) -> Iterator[tuple[int, int]]:
    """The trained turns as places (first, last): one that goes on right behind a trained sample has no context of its own, and stays with it."""
    places = [place for place, turn in enumerate(line) if turn.index in trained]
    first = places[0]
    for last, following in pairwise(places):
        if line[following].prompt_length > line[last].end:
            yield first, last
            first = following
    yield first, places[-1]


def _groups(line: Sequence[Turn], units: list[tuple[int, int]], limit: int) -> Iterator[tuple[int, int]]:
    """As many units together as fit, from the left: no other way needs fewer slices."""
    first, last = units[0]
    for unit in units[1:]:
        if line[unit[1]].end - line[first].begin > limit:
            yield first, last
            first = unit[0]
        last = unit[1]
    yield first, last


def _start(line: Sequence[Turn], ends: Sequence[int], first: int, *, floor: int, low: int) -> int:
    """Where a slice begins whose first trained turn is at place `first`: not before `low`, and at a turn's end if one is there."""
    sample = line[first].prompt_length
    if low == floor:
        return floor
    if low >= sample:
        return max(floor, sample - 1)  # a sample as long as the limit or longer: the one token that it can not be without
    end = ends[bisect_left(ends, low)]
    return end if end < sample else low
