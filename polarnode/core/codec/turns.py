"""What the deltas of a session's turns add up to: whole sequences, digests of prompts, and the token extras
of a trace.
"""

from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from polarnode.core.arrays import RoutedExperts, TopLogprobs, ids
from polarnode.core.trajectory import Turn, TurnSpan, VersionSpan


def sequence(turns: Mapping[int, Turn], index: int) -> "array[int]":
    """Everything turn `index` was conditioned on and then its sample: int32[prompt_length + S]. KeyError when
    an ancestor is not there.
    """
    line = line_of(turns, index)
    if line is None:
        raise KeyError(index)
    whole = ids()
    for turn in line:
        whole.extend(turn.prompt_delta)
        whole.extend(turn.sampled)
    return whole


def line_of(turns: Mapping[int, Turn], index: int, *, since: int = -1) -> list[Turn] | None:
    """The turns from a root to `index`, in that order; None when an ancestor is not there.

    `since`: not from the root on, but from the turn that brought the token at that place of the row.
    """
    line: list[Turn] = []
    at: int | None = index
    while at is not None:
        turn = turns.get(at)
        if turn is None:
            return None
        line.append(turn)
        at = None if turn.begin <= since else turn.parent
    line.reverse()
    return line


def prompt_digests(turns: Sequence[Turn]) -> dict[int, str]:
    """By turn index: the SHA-256, in hex, of the turn's whole prompt as little-endian int32. A turn whose
    ancestor is missing has none.
    """
    digests: dict[int, str] = {}
    # the hash of prompt and sample, copied for each child: every token is hashed once, however long the
    # session
    after: dict[int, Any] = {}
    for turn in sorted(turns, key=lambda turn: turn.index):
        if turn.parent is not None and turn.parent not in after:
            continue
        state = sha256() if turn.parent is None else after[turn.parent].copy()
        state.update(turn.prompt_delta)
        digests[turn.index] = state.hexdigest()
        state.update(turn.sampled)
        after[turn.index] = state
    return digests


def weight_versions(spans: Sequence[VersionSpan]) -> list[str]:
    """Each version once, in the order it first sampled."""
    return list(dict.fromkeys(span.version for span in spans))


def top_of_turns(trained: Sequence[Turn | None]) -> TopLogprobs | None:
    """What the trained turns of a trace have for their tokens; None when one has nothing, or is not there."""
    found = [turn.top for turn in trained if turn is not None and turn.top is not None]
    return TopLogprobs.joined(found) if len(found) == len(trained) else None


def trained_of(mask: bytes, spans: Sequence[TurnSpan], turns: Mapping[int, Turn]) -> list[Turn | None]:
    """The turns that a trace trains, by its mask."""
    return [turns.get(span.turn) for span in spans if any(mask[span.start : span.end])]


def routed_of_turns(offset: int, line: Sequence[Turn] | None) -> RoutedExperts | None:
    """What a line of turns has for the trace at its end that begins at `offset`; None when a position has
    nothing.
    """
    end = line[-1].end - 1 if line else 0
    return RoutedExperts.joined(
        (turn.routed for turn in line or () if turn.routed is not None), end, start=offset
    )
