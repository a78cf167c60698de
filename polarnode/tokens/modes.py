"""Which ids mean something to a reader of samples, by what is being written; all others are text there.

The rule for whoever edits it: a mark means something only where it can, and what it means is said by `Family.after` or, for Harmony, by the
parser. Inside a call every control token is told apart, because a tag is one only where it was sampled as one.
"""

from collections.abc import Iterable, Mapping

from polarnode.tokens.family import Family, HarmonyMarks, Mode

_PLAIN: tuple[Mode, ...] = ("text", "thinking", "call", "between")


def watched(family: Family, control: Iterable[int]) -> Mapping[Mode, frozenset[int]]:
    """For every mode the ids that are no text in it; `control` are all control tokens of the model."""
    stops, every = frozenset(family.stop_ids), frozenset(control)
    if family.harmony is not None:
        return _harmony(family.harmony, stops, every)
    marks = (family.think_open, family.think_close, family.call_open, family.call_close, family.section_open, family.section_close)
    found = {mode: stops.union(mark for mark in marks if mark is not None and family.after(mode, mark) != mode) for mode in _PLAIN}
    return found | {"call": found["call"] | every, "header": stops}


def _harmony(marks: HarmonyMarks, stops: frozenset[int], every: frozenset[int]) -> Mapping[Mode, frozenset[int]]:
    over = stops | {marks.end}
    header = over | every | {marks.start, marks.channel, marks.message, marks.constrain}
    return {"text": over, "thinking": over, "call": over | every, "header": header, "between": stops | {marks.start, marks.channel}}
