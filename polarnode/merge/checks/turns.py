"""The laws that can be held on a session's turns alone, before anything is made of them.

The rule for whoever edits it: a turn is looked at on its own and beside its parent, never beside a trace.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite

from polarnode.errors import LawBroken
from polarnode.records import Turn, VersionSpan


def check_turns(turns: Sequence[Turn]) -> None:
    """Hold what can be held on the turns alone: each is whole, and its prompt begins where its parent ends."""
    by_index: dict[int, Turn] = {}
    for turn in sorted(turns, key=lambda turn: turn.index):
        if turn.index in by_index:
            raise LawBroken(f"law 2: the session has two turns {turn.index}")
        _check_prompt(turn, by_index)
        if turn.state != "failed":
            check_sample(turn)
        by_index[turn.index] = turn


def _check_prompt(turn: Turn, earlier: Mapping[int, Turn]) -> None:
    before = 0
    if turn.parent is not None:
        parent = earlier.get(turn.parent)
        if parent is None or parent.state == "failed":
            raise LawBroken(f"law 1: turn {turn.index} extends turn {turn.parent}, which is no earlier turn that answered")
        before = parent.end
    if turn.prompt_length != before + len(turn.prompt_delta):
        raise LawBroken(
            f"law 1: turn {turn.index} has a prompt of {turn.prompt_length} tokens, but {before} before it and {len(turn.prompt_delta)} of its own"
        )


def check_sample(turn: Turn) -> None:
    sampled = len(turn.sampled)
    if len(turn.logprobs) != sampled:
        raise LawBroken(f"law 3: turn {turn.index} sampled {sampled} tokens with {len(turn.logprobs)} logprobs")
    # The sum is finite only if every one is: float32 values can not overflow a double's sum, and NaN and infinities stay.
    if not isfinite(sum(turn.logprobs)):
        raise LawBroken(f"law 3: turn {turn.index} has a logprob that is not a number")
    if _ends(turn.version_spans) != sampled:
        spans = [(span.start, span.end) for span in turn.version_spans]
        raise LawBroken(f"law 3: turn {turn.index} sampled {sampled} tokens, but its weight versions cover {spans}")


def is_whole(turn: Turn) -> bool:
    """Whether every sampled token of a turn has what a trained one must have."""
    try:
        check_sample(turn)
    except LawBroken:
        return False
    return True


def _ends(spans: Iterable[VersionSpan]) -> int | None:
    """Where spans end that start at 0 and follow one another without gap; None if they do not."""
    end = 0
    for span in spans:
        if span.start != end or span.end <= span.start:
            return None
        end = span.end
    return end
