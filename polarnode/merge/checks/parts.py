"""The laws of rows that are too long for their task and lie in several traces, one behind the other.

The rule for whoever edits it: what a slice holds is `traces`' matter; here it is where one ends and the next begins.
"""

from collections.abc import Mapping, Sequence

from polarnode.errors import LawBroken
from polarnode.records import Trace, Turn


def check_lengths(traces: Sequence[Trace], limit: int | None) -> None:
    """Rows are whole where there is no limit, and within it, or marked, where there is one."""
    for number, trace in enumerate(traces):
        _check_length(f"trace {number}", trace, limit)


def _check_length(name: str, trace: Trace, limit: int | None) -> None:
    length = len(trace.token_ids)
    if limit is None and (trace.offset, trace.part, trace.parts, trace.over_long) != (0, 0, 1, False):
        raise LawBroken(f"law 1: {name} is part {trace.part} of {trace.parts} from token {trace.offset} on, where rows are whole")
    if limit is not None and (length > limit) != trace.over_long:
        raise LawBroken(f"law 4: {name} has {length} tokens, {limit} are the most, and it is {'' if trace.over_long else 'not '}marked as over long")


def check_parts(traces: Sequence[Trace], by_index: Mapping[int, Turn]) -> None:
    """The parts of a row are all there, in order, and slices of one line that do not overlap."""
    before: Trace | None = None
    for number, trace in enumerate(traces):
        _check_part(f"trace {number}", trace, before, by_index)
        before = trace
    if before is not None and before.part != before.parts - 1:
        raise LawBroken(f"law 4: the last trace is part {before.part} of {before.parts}")


def _check_part(name: str, trace: Trace, before: Trace | None, by_index: Mapping[int, Turn]) -> None:
    done = before is None or before.part == before.parts - 1
    due = (0, trace.parts) if before is None or done else (before.part + 1, before.parts)
    if (trace.part, trace.parts) != due or trace.part >= trace.parts:
        raise LawBroken(f"law 4: {name} is part {trace.part} of {trace.parts}, where part {due[0]} of {due[1]} is due")
    if trace.offset and trace.loss_mask[0]:
        raise LawBroken(f"law 1: the first token of {name} is trained, and nothing is shown that it was conditioned on")
    if before is None or done:
        return
    end, last = before.offset + len(before.token_ids), before.turn_spans[-1].turn
    if trace.offset < end or not _leads(last, trace.turn_spans[0].turn, by_index):
        raise LawBroken(f"law 4: {name} begins at {trace.offset} of its row, and the part before it ends at {end}, with turn {last}")


def _leads(earlier: int, later: int, by_index: Mapping[int, Turn]) -> bool:
    step: int | None = later
    while step is not None and step > earlier:
        step = by_index[step].parent
    return step == earlier
