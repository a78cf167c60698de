"""The laws of a trajectory, checked on every one before it is published; what breaks one is raised with its numbers.

1. For each turn, the trace it lies in starts with that turn's prompt ids followed by its sampled ids.
   A slice of a row that is too long for its task: the same from the slice's offset on.
2. The masks of a session's traces, summed, equal the sampled tokens of its turns; a turn left out is listed with its reason.
3. One float32 logprob and one weight version a sampled token, from the engine, never recomputed.
4. A trace's turn spans and the spans between them, one behind the other, are its ids: no gap, no overlap.
   The slices of a row follow one another, in order, on one line of turns; what lies between two of them is context alone (by law 2).
(5, that no client text becomes a control token, is held where text becomes ids: in tokens/.)

Whoever edits this checks against the turns, never against how a builder works, and proves each check with a mutant that it catches. All is
linear in the traces: ids are compared as memory.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from attrs import frozen

from polarnode.errors import LawBroken
from polarnode.merge.checks.parts import check_lengths, check_parts
from polarnode.merge.checks.traces import check_trace
from polarnode.merge.checks.turns import check_turns, is_whole
from polarnode.records import Built, Trace, Turn

__all__ = ["Counts", "check", "check_lengths", "check_turns", "is_whole"]


@frozen(kw_only=True)
class Counts:
    """What a session's traces hold. `sampled`, `trainable` are tokens; `left_out`, `turns` turns; `traces` rows."""

    sampled: int
    trainable: int
    left_out: int
    turns: int
    traces: int

    @property
    def merged_ratio(self) -> float:
        """Trained turns a row: 1.0 is no merging, 0.0 no row."""
        return (self.turns - self.left_out) / self.traces if self.traces else 0.0


def check(turns: Sequence[Turn], built: Built, *, train_failed: bool = False) -> Counts:
    """Hold the laws on a session's traces. Raises LawBroken with the numbers; returns what was counted.

    `train_failed`: the task trains what was sampled before the engine failed, too.
    """
    check_turns(turns)
    by_index = {turn.index: turn for turn in turns}
    reasons = _left_out(by_index, built)
    for number, trace in enumerate(built.traces):
        check_trace(f"trace {number}", trace, by_index, train_failed=train_failed)
    check_parts(built.traces, by_index)
    trained = _check_masks(by_index, built.traces, reasons)
    return Counts(
        sampled=sum(len(turn.sampled) for turn in turns), trainable=trained, left_out=len(reasons), turns=len(turns), traces=len(built.traces)
    )


def _left_out(by_index: Mapping[int, Turn], built: Built) -> dict[int, str]:
    reasons = {left.turn: left.reason for left in built.left_out}
    twice = [index for index, times in Counter(left.turn for left in built.left_out).items() if times > 1]
    unknown = sorted(set(reasons) - set(by_index))
    silent = [index for index, reason in reasons.items() if not reason]
    if twice or unknown or silent:
        raise LawBroken(f"law 2: of the turns left out, {twice} are listed twice, {unknown} are not of the session, {silent} have no reason")
    return reasons


# ── all traces ────────────────────────────────────────────────────────────────


def _check_masks(by_index: Mapping[int, Turn], traces: Sequence[Trace], reasons: Mapping[int, str]) -> int:
    """Every sampled token once, those of turns left out never. Returns how many tokens are trained."""
    covered: dict[int, int] = dict.fromkeys(by_index, 0)  # a turn's mask bytes, summed over traces, as one number: 128k of them are one addition
    for number, trace in enumerate(traces):
        for span in trace.turn_spans:
            mask = int.from_bytes(trace.loss_mask[span.start : span.end], "little")
            twice = (covered[span.turn] & mask).bit_count()
            if twice:
                raise LawBroken(f"law 2: {twice} tokens of turn {span.turn} are trained in trace {number} and in one before it")
            covered[span.turn] |= mask
    for index, turn in by_index.items():
        _check_share(turn, covered[index].bit_count(), reasons.get(index))
    return sum(mask.bit_count() for mask in covered.values())


def _check_share(turn: Turn, trained: int, reason: str | None) -> None:
    due = len(turn.sampled) if reason is None else 0
    if trained != due:
        why = "it is not left out" if reason is None else f"it is left out: {reason}"
        raise LawBroken(f"law 2: {trained} of the {len(turn.sampled)} sampled tokens of turn {turn.index} are trained, but {why}")
