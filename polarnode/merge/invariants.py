"""The invariants of a trajectory, which are checked for every one before it is published.

1. For each turn, the trace that holds it begins with that turn's prompt ids followed by its sampled ids. For
   a slice of a row that is too long for its task, the same holds from the slice's offset on.
2. The masks of a session's traces, summed, equal the sampled tokens of its turns. A turn that is left out is
   listed with its reason. A fork's inherited turns, and no others, are left out as `inherited`, and each of
   its traces trains a token. So every token of a tree of forks is trained in the session that sampled it.
3. Each sampled token has one float32 logprob and one weight version, from the engine, never recomputed.
4. A trace's turn spans and the stretches between them are, in order, all of its ids: no gap, no overlap. The
   slices of a row follow one another, in order, on one line of turns. What lies between two of them is only
   context (by invariant 2).

Invariant 5, no client text becomes a control token, holds where text becomes ids: in `tokens`.

The checks use only the turns, never the way in which a builder works. For each check there is a mutant that
it catches. They are linear in the traces, and compare ids and logprobs as memory. `InvariantViolated` names
the place and both numbers.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite

from attrs import evolve, frozen

from polarnode.core.arrays import ids
from polarnode.core.errors import InvariantViolated
from polarnode.core.trajectory import Built, Trace, Turn, TurnSpan, VersionSpan
from polarnode.merge.ledger import chain
from polarnode.merge.token_extras import row_routed_experts, row_top_logprobs

# ── slices of a row ───────────────────────────────────────────────────────────────────────────────


def check_lengths(traces: Sequence[Trace], limit: int | None) -> None:
    """Without a limit rows are whole. With one they are within it, or marked as over long."""
    for number, trace in enumerate(traces):
        _check_length(f"trace {number}", trace, limit)


def _check_length(name: str, trace: Trace, limit: int | None) -> None:
    length = len(trace.token_ids)
    if limit is None and (trace.offset, trace.part, trace.parts, trace.over_long) != (0, 0, 1, False):
        raise InvariantViolated(
            f"invariant 1: {name} is part {trace.part} of {trace.parts} from token {trace.offset} on, where"
            " rows"
            " are whole"
        )
    if limit is not None and (length > limit) != trace.over_long:
        raise InvariantViolated(
            f"invariant 4: {name} has {length} tokens, {limit} are the most, and it is"
            f" {'' if trace.over_long else 'not '}marked as over long"
        )


def check_parts(traces: Sequence[Trace], by_index: Mapping[int, Turn]) -> None:
    """All parts of a row are there, in order, and are slices of one line that do not overlap."""
    before: Trace | None = None
    for number, trace in enumerate(traces):
        _check_part(f"trace {number}", trace, before, by_index)
        before = trace
    if before is not None and before.part != before.parts - 1:
        raise InvariantViolated(f"invariant 4: the last trace is part {before.part} of {before.parts}")


def _check_part(name: str, trace: Trace, before: Trace | None, by_index: Mapping[int, Turn]) -> None:
    done = before is None or before.part == before.parts - 1
    due = (0, trace.parts) if before is None or done else (before.part + 1, before.parts)
    if (trace.part, trace.parts) != due or trace.part >= trace.parts:
        raise InvariantViolated(
            f"invariant 4: {name} is part {trace.part} of {trace.parts}, where part {due[0]} of {due[1]} is"
            " due"
        )
    if trace.offset and trace.loss_mask[0]:
        raise InvariantViolated(
            f"invariant 1: the first token of {name} is trained, and nothing is shown that it was conditioned"
            " on"
        )
    if before is None or done:
        return
    end, last = before.offset + len(before.token_ids), before.turn_spans[-1].turn
    if trace.offset < end or not _is_ancestor(last, trace.turn_spans[0].turn, by_index):
        raise InvariantViolated(
            f"invariant 4: {name} begins at {trace.offset} of its row, and the part before it ends at {end},"
            " with"
            f" turn {last}"
        )


def _is_ancestor(earlier: int, later: int, by_index: Mapping[int, Turn]) -> bool:
    step: int | None = later
    while step is not None and step > earlier:
        step = by_index[step].parent
    return step == earlier


# ── turns ─────────────────────────────────────────────────────────────────────────────────────────


def check_turns(turns: Sequence[Turn]) -> None:
    """Check the turns by themselves: each is complete, and its prompt begins where its parent ends."""
    by_index: dict[int, Turn] = {}
    for turn in sorted(turns, key=lambda turn: turn.index):
        if turn.index in by_index:
            raise InvariantViolated(f"invariant 2: the session has two turns {turn.index}")
        _check_prompt(turn, by_index)
        if turn.state != "failed":
            check_sample(turn)
        by_index[turn.index] = turn


def _check_prompt(turn: Turn, earlier: Mapping[int, Turn]) -> None:
    before = 0
    if turn.parent is not None:
        parent = earlier.get(turn.parent)
        if parent is None or parent.state == "failed":
            raise InvariantViolated(
                f"invariant 1: turn {turn.index} extends turn {turn.parent}, which is no earlier turn that"
                " answered"
            )
        before = parent.end
    if turn.prompt_length != before + len(turn.prompt_delta):
        raise InvariantViolated(
            f"invariant 1: turn {turn.index} has a prompt of {turn.prompt_length} tokens, but {before} before"
            " it"
            f" and {len(turn.prompt_delta)} of its own"
        )


def check_sample(turn: Turn) -> None:
    sampled = len(turn.sampled)
    if len(turn.logprobs) != sampled:
        raise InvariantViolated(
            f"invariant 3: turn {turn.index} sampled {sampled} tokens with {len(turn.logprobs)} logprobs"
        )
    # The sum is finite only if every logprob is: float32 values cannot overflow the sum of doubles, and NaN
    # and infinities persist.
    if not isfinite(sum(turn.logprobs)):
        raise InvariantViolated(f"invariant 3: turn {turn.index} has a logprob that is not a number")
    if _ends(turn.version_spans) != sampled:
        spans = [(span.start, span.end) for span in turn.version_spans]
        raise InvariantViolated(
            f"invariant 3: turn {turn.index} sampled {sampled} tokens, but its weight versions cover {spans}"
        )


def is_whole(turn: Turn) -> bool:
    """Whether every sampled token of a turn has what training needs."""
    try:
        check_sample(turn)
    except InvariantViolated:
        return False
    return True


def _ends(spans: Iterable[VersionSpan]) -> int | None:
    """Where the spans end, if they start at 0 and follow one another without a gap; else None."""
    end = 0
    for span in spans:
        if span.start != end or span.end <= span.start:
            return None
        end = span.end
    return end


# ── one trace ─────────────────────────────────────────────────────────────────────────────────────


def check_trace(name: str, trace: Trace, by_index: Mapping[int, Turn], *, train_failed: bool) -> None:
    if getattr(trace.token_ids, "typecode", "") != "i" or getattr(trace.logprobs, "typecode", "") != "f":
        raise InvariantViolated(
            f"invariant 3: {name} must hold its ids as array('i') and its logprobs as array('f')"
        )
    length = len(trace.token_ids)
    if len(trace.loss_mask) != length or len(trace.logprobs) != length:
        raise InvariantViolated(
            f"invariant 3: {name} has {length} tokens, {len(trace.loss_mask)} mask values and"
            f" {len(trace.logprobs)}"
            " logprobs"
        )
    _check_spans(name, trace, by_index, train_failed=train_failed)
    line = chain(by_index, trace.turn_spans[-1].turn, since=trace.offset or -1)
    _check_line(name, trace, line)
    _check_mask(name, trace)
    _check_logprobs(name, trace, by_index)
    _check_versions(name, trace, line)
    _check_extras(name, trace, line)


def _check_spans(name: str, trace: Trace, by_index: Mapping[int, Turn], *, train_failed: bool) -> None:
    end = 0
    for span in trace.turn_spans:
        if span.turn not in by_index:
            raise InvariantViolated(
                f"invariant 4: {name} names turn {span.turn}, which is not of the session"
            )
        if by_index[span.turn].state == "failed":
            _check_failed(name, by_index[span.turn], train_failed=train_failed)
        if span.start < end or span.end <= span.start:
            raise InvariantViolated(
                f"invariant 4: in {name} turn {span.turn} lies at [{span.start}, {span.end}), the one before"
                " it"
                f" ends at {end}"
            )
        end = span.end
    if not trace.turn_spans or end != len(trace.token_ids):
        raise InvariantViolated(
            f"invariant 4: {name} has {len(trace.token_ids)} tokens, its last sample ends at {end}"
        )


def _check_failed(name: str, turn: Turn, *, train_failed: bool) -> None:
    if not train_failed:
        raise InvariantViolated(f"invariant 2: {name} holds turn {turn.index}, which failed")
    check_sample(turn)


def _check_line(name: str, trace: Trace, line: Sequence[Turn]) -> None:
    """The trace is the line of turns that ends with its last turn: from its offset on, each prompt and each
    sample is in its place.
    """
    expected = [
        _turn_span(turn, trace.offset) for turn in line if turn.sampled and turn.prompt_length >= trace.offset
    ]
    # A turn's reward is no invariant of tokens.
    places = [evolve(span, reward=None) for span in trace.turn_spans]
    if trace.offset < 0 or places != expected:
        conditioned_on = f"its last turn was conditioned on {_shown(expected)}"
        raise InvariantViolated(
            f"invariant 1: {name}, from token {trace.offset} on, has the samples {_shown(trace.turn_spans)},"
            f" {conditioned_on}"
        )
    tokens = trace.token_ids.tobytes()  # Bytes compare as memory, typed views item by item.
    for turn in line:
        start = turn.prompt_length - trace.offset
        _same(
            f"invariant 1: {name}, prompt of turn {turn.index}",
            tokens,
            start - len(turn.prompt_delta),
            turn.prompt_delta,
        )
        _same(f"invariant 1: {name}, sample of turn {turn.index}", tokens, start, turn.sampled)


def _check_mask(name: str, trace: Trace) -> None:
    ones = trace.loss_mask.count(1)
    if ones + trace.loss_mask.count(0) != len(trace.loss_mask):
        raise InvariantViolated(f"invariant 2: the mask of {name} has values other than 0 and 1")
    sampled = sum(trace.loss_mask.count(1, span.start, span.end) for span in trace.turn_spans)
    if ones != sampled:
        raise InvariantViolated(
            f"invariant 2: the mask of {name} has {ones} ones, {sampled} of them on sampled tokens"
        )
    early = trace.loss_mask.count(1, 0, trace.prompt_length)
    if not 0 <= trace.prompt_length <= len(trace.token_ids) or early:
        raise InvariantViolated(
            f"invariant 2: {name} has {len(trace.token_ids)} tokens, a prompt of {trace.prompt_length} and"
            f" {early}"
            " ones in the mask of it"
        )


def _check_logprobs(name: str, trace: Trace, by_index: Mapping[int, Turn]) -> None:
    """The logprobs are the engine's own bytes where the mask is 1, and zero bytes elsewhere."""
    expected = bytearray(4 * len(trace.logprobs))
    for span in trace.turn_spans:
        recorded = memoryview(by_index[span.turn].logprobs).cast("B")
        for start, end in _ones(trace.loss_mask, span):
            expected[4 * start : 4 * end] = recorded[4 * (start - span.start) : 4 * (end - span.start)]
    found = trace.logprobs.tobytes()
    if found != expected:
        place = next(
            at
            for at in range(len(trace.logprobs))
            if found[4 * at : 4 * at + 4] != expected[4 * at : 4 * at + 4]
        )
        raise InvariantViolated(
            f"invariant 3: {name} has the logprob {trace.logprobs[place]} at {place}, where the mask is"
            f" {trace.loss_mask[place]}"
        )


def _ones(mask: bytes, span: TurnSpan) -> Iterator[tuple[int, int]]:
    """The stretches of a span where the mask is 1. Usually there is one, the whole span."""
    start = mask.find(1, span.start, span.end)
    while start >= 0:
        stop = mask.find(0, start, span.end)
        end = span.end if stop < 0 else stop
        yield start, end
        start = mask.find(1, end, span.end)


def _check_versions(name: str, trace: Trace, line: Sequence[Turn]) -> None:
    expected = [
        (
            span.version,
            turn.prompt_length - trace.offset + span.start,
            turn.prompt_length - trace.offset + span.end,
        )
        for turn in line
        for span in turn.version_spans
        if turn.sampled and turn.prompt_length >= trace.offset
    ]
    found = [(span.version, span.start, span.end) for span in trace.version_spans]
    if found != expected:
        wrong = next(
            (pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]),
            (len(found), len(expected)),
        )
        raise InvariantViolated(
            f"invariant 3: {name} has the weight versions {wrong[0]} where the engine reported {wrong[1]}"
        )


def _check_extras(name: str, trace: Trace, line: Sequence[Turn]) -> None:
    """The top logprobs and experts of a trace are those of its turns, row for row. A trace may have none."""
    trained = {span.turn for span in trace.turn_spans if trace.loss_mask.find(1, span.start, span.end) >= 0}
    if trace.top is not None and trace.top != row_top_logprobs(line, trained):
        raise InvariantViolated(
            f"invariant 3: the {trace.top.rows} rows of alternatives that {name} carries are not those of its"
            " trained turns"
        )
    if trace.routed is not None and trace.routed != row_routed_experts(line, offset=trace.offset):
        raise InvariantViolated(
            f"invariant 3: the experts of {name}, from position {trace.routed.start} to {trace.routed.end},"
            " are not"
            " those its turns carry"
        )


def _turn_span(turn: Turn, offset: int) -> TurnSpan:
    start = turn.prompt_length - offset
    return TurnSpan(turn=turn.index, start=start, end=start + len(turn.sampled))


def _shown(spans: Sequence[TurnSpan]) -> str:
    shown = [f"{span.turn}@[{span.start}, {span.end})" for span in spans[:8]]
    return " ".join(shown) + (f" and {len(spans) - 8} more" if len(spans) > 8 else "")


def _same(what: str, tokens: bytes, start: int, expected: "array[int]") -> None:
    """The expected ids are in the trace, where they begin at `start`. A negative `start` means that the first
    of them lie before a slice, and are not in it.
    """
    due = expected if start >= 0 else expected[-start:]
    start = max(start, 0)
    if not tokens.startswith(due.tobytes(), 4 * start):
        found = ids(tokens[4 * start : 4 * (start + len(due))])
        place = next(at for at, pair in enumerate(zip(found, due, strict=True)) if pair[0] != pair[1])
        raise InvariantViolated(
            f"{what}: token {place} of {len(due)} is {found[place]}, the engine's was {due[place]}"
        )


# ── a session ─────────────────────────────────────────────────────────────────────────────────────

__all__ = ["Counts", "check", "check_lengths", "check_turns", "is_whole"]


@frozen(kw_only=True)
class Counts:
    """What a session's traces hold. `sampled` and `trainable` count tokens, `left_out` and `turns` count
    turns, `traces` counts rows.
    """

    sampled: int
    trainable: int
    left_out: int
    turns: int
    traces: int

    @property
    def merged_ratio(self) -> float:
        """Trained turns per row: 1.0 means that nothing was merged, 0.0 that there is no row."""
        return (self.turns - self.left_out) / self.traces if self.traces else 0.0


def check(turns: Sequence[Turn], built: Built, *, train_failed: bool = False, inherited: int = 0) -> Counts:
    """Check the invariants of a session's traces and return the counts. Raises InvariantViolated, with
    numbers.

    `train_failed`: the task also trains what was sampled before the engine failed. `inherited`: turns with a
    lower index are the parent's.
    """
    check_turns(turns)
    by_index = {turn.index: turn for turn in turns}
    reasons = _left_out(by_index, built)
    _check_inherited(by_index, built.traces, reasons, inherited)
    for number, trace in enumerate(built.traces):
        check_trace(f"trace {number}", trace, by_index, train_failed=train_failed)
    check_parts(built.traces, by_index)
    trained = _check_masks(by_index, built.traces, reasons)
    return Counts(
        sampled=sum(len(turn.sampled) for turn in turns if turn.index >= inherited),
        trainable=trained,
        left_out=len(reasons),
        turns=len(turns),
        traces=len(built.traces),
    )


def _left_out(by_index: Mapping[int, Turn], built: Built) -> dict[int, str]:
    reasons = {each.turn: each.reason for each in built.left_out}
    twice = [index for index, times in Counter(each.turn for each in built.left_out).items() if times > 1]
    unknown = sorted(set(reasons) - set(by_index))
    silent = [index for index, reason in reasons.items() if not reason]
    if twice or unknown or silent:
        raise InvariantViolated(
            f"invariant 2: of the turns left out, {twice} are listed twice, {unknown} are not of the session,"
            f" {silent} have no reason"
        )
    return reasons


def _check_inherited(
    by_index: Mapping[int, Turn], traces: Sequence[Trace], reasons: Mapping[int, str], inherited: int
) -> None:
    """The turns of a fork's parent are left out as inherited, and no other turn is. No trace consists only of
    them.
    """
    wrong = [index for index in by_index if (reasons.get(index) == "inherited") != (index < inherited)]
    if wrong:
        raise InvariantViolated(
            f"invariant 2: turns below {inherited} are inherited, but turn {wrong[0]} is"
            f" {reasons.get(wrong[0]) or 'not left out'}"
        )
    idle = [number for number, trace in enumerate(traces) if inherited and 1 not in trace.loss_mask]
    if idle:
        raise InvariantViolated(f"invariant 2: trace {idle[0]} of a fork trains no token")


# ── all traces ────────────────────────────────────────────────────────────────────────────────────


def _check_masks(by_index: Mapping[int, Turn], traces: Sequence[Trace], reasons: Mapping[int, str]) -> int:
    """Every sampled token is trained once, and the tokens of turns that are left out never. Returns the
    number of trained tokens.
    """
    # The mask bytes of each turn, combined over all traces, as one number: 128k of them are one operation.
    covered: dict[int, int] = dict.fromkeys(by_index, 0)
    for number, trace in enumerate(traces):
        for span in trace.turn_spans:
            mask = int.from_bytes(trace.loss_mask[span.start : span.end], "little")
            twice = (covered[span.turn] & mask).bit_count()
            if twice:
                raise InvariantViolated(
                    f"invariant 2: {twice} tokens of turn {span.turn} are trained in trace {number} and in"
                    " one"
                    " before it"
                )
            covered[span.turn] |= mask
    for index, turn in by_index.items():
        _check_share(turn, covered[index].bit_count(), reasons.get(index))
    return sum(mask.bit_count() for mask in covered.values())


def _check_share(turn: Turn, trained: int, reason: str | None) -> None:
    due = len(turn.sampled) if reason is None else 0
    if trained != due:
        why = "it is not left out" if reason is None else f"it is left out: {reason}"
        raise InvariantViolated(
            f"invariant 2: {trained} of the {len(turn.sampled)} sampled tokens of turn {turn.index} are"
            " trained,"
            f" but {why}"
        )
