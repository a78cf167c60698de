"""The laws of a trajectory, checked on every one before it is published; what breaks one is raised with its numbers.

1. For each turn, the trace it lies in starts with that turn's prompt ids followed by its sampled ids.
2. The masks of a session's traces, summed, equal the sampled tokens of its turns; a turn left out is listed with its reason.
3. One float32 logprob and one weight version a sampled token, from the engine, never recomputed.
4. A trace's turn spans and the spans between them, one behind the other, are its ids: no gap, no overlap.
(5, that no client text becomes a control token, is held where text becomes ids: in tokens/.)

Whoever edits this checks against the turns, never against how a builder works, and proves each check with a mutant that it catches. All is
linear in the traces: ids are compared as memory.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite

from attrs import frozen

from polarnode.errors import LawBroken
from polarnode.merge.ledger import chain
from polarnode.records import Built, Trace, Turn, TurnSpan, VersionSpan, ids


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


def check(turns: Sequence[Turn], built: Built) -> Counts:
    """Hold the laws on a session's traces. Raises LawBroken with the numbers; returns what was counted."""
    check_turns(turns)
    by_index = {turn.index: turn for turn in turns}
    reasons = _left_out(by_index, built)
    for number, trace in enumerate(built.traces):
        _check_trace(f"trace {number}", trace, by_index)
    trained = _check_masks(by_index, built.traces, reasons)
    return Counts(
        sampled=sum(len(turn.sampled) for turn in turns), trainable=trained, left_out=len(reasons), turns=len(turns), traces=len(built.traces)
    )


def check_turns(turns: Sequence[Turn]) -> None:
    """Hold what can be held on the turns alone: each is whole, and its prompt begins where its parent ends."""
    by_index: dict[int, Turn] = {}
    for turn in sorted(turns, key=lambda turn: turn.index):
        if turn.index in by_index:
            raise LawBroken(f"law 2: the session has two turns {turn.index}")
        _check_prompt(turn, by_index)
        if turn.state != "failed":
            _check_sample(turn)
        by_index[turn.index] = turn


def _check_prompt(turn: Turn, earlier: Mapping[int, Turn]) -> None:
    before = 0
    if turn.parent is not None:
        parent = earlier.get(turn.parent)
        if parent is None or parent.state == "failed":
            raise LawBroken(f"law 1: turn {turn.index} extends turn {turn.parent}, which is no earlier turn that answered")
        before = parent.prompt_length + len(parent.sampled)
    if turn.prompt_length != before + len(turn.prompt_delta):
        raise LawBroken(
            f"law 1: turn {turn.index} has a prompt of {turn.prompt_length} tokens, but {before} before it and {len(turn.prompt_delta)} of its own"
        )


def _check_sample(turn: Turn) -> None:
    sampled = len(turn.sampled)
    if len(turn.logprobs) != sampled:
        raise LawBroken(f"law 3: turn {turn.index} sampled {sampled} tokens with {len(turn.logprobs)} logprobs")
    # The sum is finite only if every one is: float32 values can not overflow a double's sum, and NaN and infinities stay.
    if not isfinite(sum(turn.logprobs)):
        raise LawBroken(f"law 3: turn {turn.index} has a logprob that is not a number")
    if _ends(turn.version_spans) != sampled:
        spans = [(span.start, span.end) for span in turn.version_spans]
        raise LawBroken(f"law 3: turn {turn.index} sampled {sampled} tokens, but its weight versions cover {spans}")


def _ends(spans: Iterable[VersionSpan]) -> int | None:
    """Where spans end that start at 0 and follow one another without gap; None if they do not."""
    end = 0
    for span in spans:
        if span.start != end or span.end <= span.start:
            return None
        end = span.end
    return end


def _left_out(by_index: Mapping[int, Turn], built: Built) -> dict[int, str]:
    reasons = {left.turn: left.reason for left in built.left_out}
    twice = [index for index, times in Counter(left.turn for left in built.left_out).items() if times > 1]
    unknown = sorted(set(reasons) - set(by_index))
    silent = [index for index, reason in reasons.items() if not reason]
    if twice or unknown or silent:
        raise LawBroken(f"law 2: of the turns left out, {twice} are listed twice, {unknown} are not of the session, {silent} have no reason")
    return reasons


# ── one trace ─────────────────────────────────────────────────────────────────


def _check_trace(name: str, trace: Trace, by_index: Mapping[int, Turn]) -> None:
    if getattr(trace.token_ids, "typecode", "") != "i" or getattr(trace.logprobs, "typecode", "") != "f":
        raise LawBroken(f"law 3: {name} must hold its ids as array('i') and its logprobs as array('f')")
    length = len(trace.token_ids)
    if len(trace.loss_mask) != length or len(trace.logprobs) != length:
        raise LawBroken(f"law 3: {name} has {length} tokens, {len(trace.loss_mask)} mask values and {len(trace.logprobs)} logprobs")
    _check_spans(name, trace, by_index)
    line = chain(by_index, trace.turn_spans[-1].turn)
    _check_line(name, trace, line)
    _check_mask(name, trace)
    _check_logprobs(name, trace, by_index)
    _check_versions(name, trace, line)


def _check_spans(name: str, trace: Trace, by_index: Mapping[int, Turn]) -> None:
    end = 0
    for span in trace.turn_spans:
        if span.turn not in by_index:
            raise LawBroken(f"law 4: {name} names turn {span.turn}, which is not of the session")
        if by_index[span.turn].state == "failed":
            raise LawBroken(f"law 2: {name} holds turn {span.turn}, which failed")
        if span.start < end or span.end <= span.start:
            raise LawBroken(f"law 4: in {name} turn {span.turn} lies at [{span.start}, {span.end}), the one before it ends at {end}")
        end = span.end
    if not trace.turn_spans or end != len(trace.token_ids):
        raise LawBroken(f"law 4: {name} has {len(trace.token_ids)} tokens, its last sample ends at {end}")


def _check_line(name: str, trace: Trace, line: Sequence[Turn]) -> None:
    """The trace is the line of turns that its last one ends, each prompt and sample in its place."""
    expected = [_span(turn) for turn in line if turn.sampled]
    if list(trace.turn_spans) != expected:
        raise LawBroken(f"law 1: {name} has the samples {_shown(trace.turn_spans)}, its last turn was conditioned on {_shown(expected)}")
    tokens = trace.token_ids.tobytes()  # bytes compare as memory, typed views item by item
    for turn in line:
        _same(f"law 1: {name}, prompt of turn {turn.index}", tokens, turn.prompt_length - len(turn.prompt_delta), turn.prompt_delta)
        _same(f"law 1: {name}, sample of turn {turn.index}", tokens, turn.prompt_length, turn.sampled)


def _check_mask(name: str, trace: Trace) -> None:
    ones = trace.loss_mask.count(1)
    if ones + trace.loss_mask.count(0) != len(trace.loss_mask):
        raise LawBroken(f"law 2: the mask of {name} has values other than 0 and 1")
    sampled = sum(trace.loss_mask.count(1, span.start, span.end) for span in trace.turn_spans)
    if ones != sampled:
        raise LawBroken(f"law 2: the mask of {name} has {ones} ones, {sampled} of them on sampled tokens")
    early = trace.loss_mask.count(1, 0, trace.prompt_length)
    if not 0 <= trace.prompt_length <= len(trace.token_ids) or early:
        raise LawBroken(f"law 2: {name} has {len(trace.token_ids)} tokens, a prompt of {trace.prompt_length} and {early} ones in the mask of it")


def _check_logprobs(name: str, trace: Trace, by_index: Mapping[int, Turn]) -> None:
    """The engine's own bytes where the mask is 1, zero bytes elsewhere."""
    expected = bytearray(4 * len(trace.logprobs))
    for span in trace.turn_spans:
        given = memoryview(by_index[span.turn].logprobs).cast("B")
        for start, end in _ones(trace.loss_mask, span):
            expected[4 * start : 4 * end] = given[4 * (start - span.start) : 4 * (end - span.start)]
    found = trace.logprobs.tobytes()
    if found != expected:
        place = next(at for at in range(len(trace.logprobs)) if found[4 * at : 4 * at + 4] != expected[4 * at : 4 * at + 4])
        raise LawBroken(f"law 3: {name} has the logprob {trace.logprobs[place]} at {place}, where the mask is {trace.loss_mask[place]}")


def _ones(mask: bytes, span: TurnSpan) -> Iterable[tuple[int, int]]:
    """The stretches of a span where the mask is 1. Most often one: the whole span."""
    start = mask.find(1, span.start, span.end)
    while start >= 0:
        stop = mask.find(0, start, span.end)
        end = span.end if stop < 0 else stop
        yield start, end
        start = mask.find(1, end, span.end)


def _check_versions(name: str, trace: Trace, line: Sequence[Turn]) -> None:
    expected = [
        (span.version, turn.prompt_length + span.start, turn.prompt_length + span.end) for turn in line for span in turn.version_spans if turn.sampled
    ]
    found = [(span.version, span.start, span.end) for span in trace.version_spans]
    if found != expected:
        wrong = next((pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]), (len(found), len(expected)))
        raise LawBroken(f"law 3: {name} has the weight versions {wrong[0]} where the engine said {wrong[1]}")


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


def _span(turn: Turn) -> TurnSpan:
    return TurnSpan(turn=turn.index, start=turn.prompt_length, end=turn.prompt_length + len(turn.sampled))


def _shown(spans: Sequence[TurnSpan]) -> str:
    shown = [f"{span.turn}@[{span.start}, {span.end})" for span in spans[:8]]
    return " ".join(shown) + (f" and {len(spans) - 8} more" if len(spans) > 8 else "")


def _same(what: str, tokens: bytes, start: int, expected: "array[int]") -> None:
    if not tokens.startswith(expected.tobytes(), 4 * start):
        found = ids(tokens[4 * start : 4 * (start + len(expected))])
        place = next(at for at, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
        raise LawBroken(f"{what}: token {place} of {len(expected)} is {found[place]}, the engine's was {expected[place]}")
