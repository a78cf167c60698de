"""The laws of one trace: its ids, mask, logprobs and spans are those of the line of turns that its last one ends.

The rule for whoever edits it: ids and logprobs are compared as memory, and every sentence has the place and both numbers.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve

from polarnode.errors import LawBroken
from polarnode.merge.carried import routed_of, top_of
from polarnode.merge.checks.turns import check_sample
from polarnode.merge.ledger import chain
from polarnode.records import Trace, Turn, TurnSpan, ids


def check_trace(name: str, trace: Trace, by_index: Mapping[int, Turn], *, train_failed: bool) -> None:
    if getattr(trace.token_ids, "typecode", "") != "i" or getattr(trace.logprobs, "typecode", "") != "f":
        raise LawBroken(f"law 3: {name} must hold its ids as array('i') and its logprobs as array('f')")
    length = len(trace.token_ids)
    if len(trace.loss_mask) != length or len(trace.logprobs) != length:
        raise LawBroken(f"law 3: {name} has {length} tokens, {len(trace.loss_mask)} mask values and {len(trace.logprobs)} logprobs")
    _check_spans(name, trace, by_index, train_failed=train_failed)
    line = chain(by_index, trace.turn_spans[-1].turn, since=trace.offset or -1)
    _check_line(name, trace, line)
    _check_mask(name, trace)
    _check_logprobs(name, trace, by_index)
    _check_versions(name, trace, line)
    _check_carried(name, trace, line)


def _check_spans(name: str, trace: Trace, by_index: Mapping[int, Turn], *, train_failed: bool) -> None:
    end = 0
    for span in trace.turn_spans:
        if span.turn not in by_index:
            raise LawBroken(f"law 4: {name} names turn {span.turn}, which is not of the session")
        if by_index[span.turn].state == "failed":
            _check_failed(name, by_index[span.turn], train_failed=train_failed)
        if span.start < end or span.end <= span.start:
            raise LawBroken(f"law 4: in {name} turn {span.turn} lies at [{span.start}, {span.end}), the one before it ends at {end}")
        end = span.end
    if not trace.turn_spans or end != len(trace.token_ids):
        raise LawBroken(f"law 4: {name} has {len(trace.token_ids)} tokens, its last sample ends at {end}")


def _check_failed(name: str, turn: Turn, *, train_failed: bool) -> None:
    if not train_failed:
        raise LawBroken(f"law 2: {name} holds turn {turn.index}, which failed")
    check_sample(turn)


def _check_line(name: str, trace: Trace, line: Sequence[Turn]) -> None:
    """The trace is the line of turns that its last one ends, each prompt and sample in its place; from its offset on."""
    expected = [_span(turn, trace.offset) for turn in line if turn.sampled and turn.prompt_length >= trace.offset]
    places = [evolve(span, reward=None) for span in trace.turn_spans]  # what a turn is worth is no law of tokens
    if trace.offset < 0 or places != expected:
        said = f"its last turn was conditioned on {_shown(expected)}"
        raise LawBroken(f"law 1: {name}, from token {trace.offset} on, has the samples {_shown(trace.turn_spans)}, {said}")
    tokens = trace.token_ids.tobytes()  # bytes compare as memory, typed views item by item
    for turn in line:
        start = turn.prompt_length - trace.offset
        _same(f"law 1: {name}, prompt of turn {turn.index}", tokens, start - len(turn.prompt_delta), turn.prompt_delta)
        _same(f"law 1: {name}, sample of turn {turn.index}", tokens, start, turn.sampled)


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


def _ones(mask: bytes, span: TurnSpan) -> Iterator[tuple[int, int]]:
    """The stretches of a span where the mask is 1. Most often one: the whole span."""
    start = mask.find(1, span.start, span.end)
    while start >= 0:
        stop = mask.find(0, start, span.end)
        end = span.end if stop < 0 else stop
        yield start, end
        start = mask.find(1, end, span.end)


def _check_versions(name: str, trace: Trace, line: Sequence[Turn]) -> None:
    expected = [
        (span.version, turn.prompt_length - trace.offset + span.start, turn.prompt_length - trace.offset + span.end)
        for turn in line
        for span in turn.version_spans
        if turn.sampled and turn.prompt_length >= trace.offset
    ]
    found = [(span.version, span.start, span.end) for span in trace.version_spans]
    if found != expected:
        wrong = next((pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]), (len(found), len(expected)))
        raise LawBroken(f"law 3: {name} has the weight versions {wrong[0]} where the engine said {wrong[1]}")


def _check_carried(name: str, trace: Trace, line: Sequence[Turn]) -> None:
    """The alternatives and the experts of a trace are its turns', row for row; it may have none."""
    trained = {span.turn for span in trace.turn_spans if trace.loss_mask.find(1, span.start, span.end) >= 0}
    if trace.top is not None and trace.top != top_of(line, trained):
        raise LawBroken(f"law 3: the {trace.top.rows} rows of alternatives that {name} carries are not those of its trained turns")
    if trace.routed is not None and trace.routed != routed_of(line, offset=trace.offset):
        raise LawBroken(f"law 3: the experts of {name}, from position {trace.routed.start} to {trace.routed.end}, are not those its turns carry")


def _span(turn: Turn, offset: int) -> TurnSpan:
    start = turn.prompt_length - offset
    return TurnSpan(turn=turn.index, start=start, end=start + len(turn.sampled))


def _shown(spans: Sequence[TurnSpan]) -> str:
    shown = [f"{span.turn}@[{span.start}, {span.end})" for span in spans[:8]]
    return " ".join(shown) + (f" and {len(spans) - 8} more" if len(spans) > 8 else "")


def _same(what: str, tokens: bytes, start: int, expected: "array[int]") -> None:
    """Those of the expected ids that lie in the trace, where they begin at `start`, are there. What lies before a slice is not shown."""
    due = expected if start >= 0 else expected[-start:]
    start = max(start, 0)
    if not tokens.startswith(due.tobytes(), 4 * start):
        found = ids(tokens[4 * start : 4 * (start + len(due))])
        place = next(at for at, pair in enumerate(zip(found, due, strict=True)) if pair[0] != pair[1])
        raise LawBroken(f"{what}: token {place} of {len(due)} is {found[place]}, the engine's was {due[place]}")
