"""One row: the turns of a line, copied one behind the other, whole or a slice of it at a time.

The rule for whoever edits it: what is copied is what the engine was given and gave, as memory; a row is never made whole to be cut.
"""

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence

from polarnode.merge import ledger
from polarnode.merge.builders.slices import Slice, slices
from polarnode.merge.carried import carried_of
from polarnode.records import Trace, Turn, TurnSpan, VersionSpan


def prompt_ids(turns: Sequence[Turn], index: int) -> "array[int]":
    """The ids turn `index` was conditioned on, exactly, int32[prompt_length]. A fresh array."""
    return ledger.prompt_ids({turn.index: turn for turn in turns}, index)


def line_to(by_index: Mapping[int, Turn], index: int, *, tokens: int | None = None) -> list[Turn]:
    """The turns from a root to `index`, or as many of the last of them as hold at least that many tokens."""
    return ledger.chain(by_index, index, since=-1 if tokens is None else by_index[index].end - tokens)


def row(line: Sequence[Turn], trained: Collection[int], *, prompt_length: int | None = None) -> Trace:
    """What a line of turns makes, from its root on, with loss on the samples of the turns whose index is in `trained`.

    `prompt_length` says where what was asked ends and the answer begins; the first sample unless said.
    """
    [trace] = rows(line, trained, prompt_length=prompt_length)
    return trace


def rows(line: Sequence[Turn], trained: Collection[int], *, limit: int | None = None, prompt_length: int | None = None) -> Iterator[Trace]:
    """The same in slices of at most `limit` tokens; each trained turn must be of the line."""
    for cut in slices(line, trained, limit):
        yield _row(line[cut.first : cut.last + 1], trained, cut, prompt_length)


def _row(line: Sequence[Turn], trained: Collection[int], cut: Slice, prompt_length: int | None) -> Trace:
    leaf, length = line[-1], cut.end - cut.start
    mask = _mask(line, trained, cut)  # first, while the arrays that are eight times as large are not there: it is copied once
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
    carried = carried_of(line, trained, offset=cut.start)
    return Trace(
        lineage=leaf.lineage,
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=logprobs,
        prompt_length=first - cut.start,
        turn_spans=tuple(TurnSpan(turn=turn.index, start=turn.prompt_length - cut.start, end=turn.end - cut.start) for turn in shown),
        version_spans=tuple(_versions(shown, cut.start)),
        role=leaf.role,
        finish_reason=leaf.finish_reason,
        offset=cut.start,
        part=cut.part,
        parts=cut.parts,
        over_long=cut.over_long,
        top=carried.top,
        routed=carried.routed,
        lacks=carried.lacks,
    )


def _mask(line: Sequence[Turn], trained: Collection[int], cut: Slice) -> bytes:
    mask = bytearray(cut.end - cut.start)
    for turn in line:
        if turn.index in trained:
            mask[turn.prompt_length - cut.start : turn.end - cut.start] = b"\x01" * len(turn.sampled)
    return bytes(mask)


def _copy(tokens: "memoryview[int]", given: "array[int]", *, end: int) -> None:
    """Put ids where they end; those before the row's first are cut."""
    start = end - len(given)
    if end > 0:
        tokens[max(start, 0) : end] = memoryview(given)[max(-start, 0) :]


def _versions(shown: Sequence[Turn], start: int) -> Iterator[VersionSpan]:
    for turn in shown:
        at = turn.prompt_length - start
        for span in turn.version_spans:
            yield VersionSpan(version=span.version, start=at + span.start, end=at + span.end)
