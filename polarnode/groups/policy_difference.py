"""How other weights differ from those that sampled a session, token by token. This measures staleness.

Pure. `rows_to_score` returns the rows to send to POST /v1/score, in which each sampled token is scored once.
`compared` computes statistics from the answer. For each sampled token, d = new - old logprob, in nats, and
r = exp(d).

Sources. The estimators of KL(old, new) over tokens that the old weights sampled are k1 = mean of -d, and k3 =
mean of r - 1 - d, which is never negative: Schulman, "Approximating KL Divergence" (2020,
joschu.net/blog/kl-approx.html). `outside` is the share of tokens whose r PPO would clip: Schulman et al.,
"Proximal Policy Optimization" (arXiv 1707.06347), with its epsilon of 0.2.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import exp, fsum
from typing import Final

from attrs import field, frozen

from polarnode.core.arrays import floats
from polarnode.core.errors import Refused
from polarnode.core.status import ScoredRow, ScoreRow
from polarnode.core.trajectory import LeftOut, Trajectory, Turn, line_of, sequence

CLIP_RANGE: Final = (0.8, 1.2)  # the limits of r for PPO's epsilon of 0.2, the default of TRL, verl and slime
# The limit on d in exp(d). A float overflows at 709, and no logprob of a sampled token under -700 means
# anything.
MAX_EXPONENT: Final = 700.0


@frozen(kw_only=True)
class DifferenceStatistics:
    """Means over `tokens` sampled tokens, in nats; `outside` is a share from 0 to 1.

    `k1` and `k3` are None if the distribution was cut (greedy, `top_p`, `top_k`, `min_p`), because the tokens
    are then not a sample of the distribution that their logprobs describe.
    """

    tokens: int
    mean: float
    mean_absolute: float
    k1: float | None
    k3: float | None
    outside: float


@frozen(kw_only=True)
class SpanDifference:
    """Tokens [start, end) of a turn's sample, with the version that sampled them. `scored_by` names the
    weights that are compared with that version.
    """

    turn: int
    start: int
    end: int
    version: str
    scored_by: str
    figures: DifferenceStatistics


@frozen(kw_only=True)
class TokenDifferences:
    """A turn's sample: its `token_ids`, int32[S], and the `old` and `new` logprobs, float32[S]."""

    turn: int
    token_ids: "array[int]"
    old: "array[float]"
    new: "array[float]"


@frozen(kw_only=True)
class SessionDifference:
    """A session's sampled tokens under other weights. `versions` has the statistics of all tokens that a
    version sampled. `left_out` names the turns that cannot be compared, and why.
    """

    session_id: str
    engine: str
    adapter: str
    scored_by: tuple[str, ...]
    total: DifferenceStatistics | None
    versions: Mapping[str, DifferenceStatistics]
    spans: tuple[SpanDifference, ...]
    tokens: tuple[TokenDifferences, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


@frozen(kw_only=True)
class RowToScore:
    """A row, and the turns whose samples it scores, each with the place where its sample begins in the
    row.
    """

    row: ScoreRow
    samples: Mapping[int, int] = field(factory=dict)


def incomparable_turns(turns: Iterable[Turn]) -> tuple[LeftOut, ...]:
    """The sampled turns that cannot be compared, because scoring gives logprobs at temperature 1, without
    penalties. The logprobs of a greedy turn are at temperature 1 too.
    """
    found = []
    for turn in turns:
        used = turn.used
        if not turn.sampled:
            continue
        if used.temperature not in (None, 0.0, 1.0):
            reason = f"sampled at temperature {used.temperature:g}, and scoring is at 1"
        elif used.frequency_penalty or used.presence_penalty or used.repetition_penalty not in (None, 1.0):
            reason = "sampled with a penalty, and scoring has none"
        else:
            continue
        found.append(LeftOut(turn=turn.index, reason=reason))
    return tuple(found)


def rows_to_score(turns: Sequence[Turn], *, inherited: int = 0) -> tuple[RowToScore, ...]:
    """The fewest rows in which each sample that can be compared is scored once. These are the rows of the
    leaves. A row does not score turns that an earlier row scores, nor the first `inherited` turns, which
    another session sampled. Raises Refused if a turn's ancestor is missing.
    """
    known, skipped = {turn.index: turn for turn in turns}, {each.turn for each in incomparable_turns(turns)}
    due = {turn.index for turn in turns if turn.sampled and turn.index >= inherited} - skipped
    rows = []
    for turn in sorted(turns, key=lambda turn: turn.end, reverse=True):
        if turn.index not in due:
            continue
        line = line_of(known, turn.index)
        if line is None:
            raise Refused(f"turn {turn.index} cannot be scored: a turn before it is missing")
        samples = {each.index: each.prompt_length for each in line if each.index in due}
        due -= samples.keys()
        mask = bytearray(turn.end)
        for index, start in samples.items():
            mask[start : known[index].end] = bytes([1]) * len(known[index].sampled)
        row = ScoreRow(token_ids=sequence(known, turn.index), loss_mask=bytes(mask))
        rows.append(RowToScore(row=row, samples=samples))
    return tuple(rows)


def compared(
    trajectory: Trajectory,
    rows: Sequence[RowToScore],
    scored: Sequence[ScoredRow],
    *,
    engine: str,
    adapter: str = "",
) -> SessionDifference:
    """The session's statistics, computed from the answer to its `rows_to_score`."""
    turns = {turn.index: turn for turn in trajectory.turns}
    tokens, by = [], {}
    for asked, answer in zip(rows, scored, strict=True):
        for index, start in asked.samples.items():
            turn = turns[index]
            new = answer.logprobs[start : turn.end]
            tokens.append(
                TokenDifferences(turn=index, token_ids=turn.sampled, old=turn.logprobs, new=floats(new))
            )
            by[index] = answer.version or ""
    tokens.sort(key=lambda each: each.turn)
    spans, sums = [], defaultdict[str, list[_DifferencePart]](list)
    for each in tokens:
        cut = _cut(turns[each.turn])
        for span in turns[each.turn].version_spans:
            places = range(span.start, span.end)
            part = _DifferencePart(
                differences=[each.new[place] - each.old[place] for place in places], cut=cut
            )
            if places:
                sums[span.version].append(part)
                spans.append(
                    SpanDifference(
                        turn=each.turn,
                        start=span.start,
                        end=span.end,
                        version=span.version,
                        scored_by=by[each.turn],
                        figures=_figures([part]),
                    )
                )
    every = [part for parts in sums.values() for part in parts]
    return SessionDifference(
        session_id=trajectory.session_id,
        engine=engine,
        adapter=adapter,
        scored_by=tuple(dict.fromkeys(by[each.turn] for each in tokens)),
        total=_figures(every) if every else None,
        versions={version: _figures(parts) for version, parts in sums.items()},
        spans=tuple(spans),
        tokens=tuple(tokens),
        left_out=incomparable_turns(turn for turn in trajectory.turns if turn.index >= trajectory.inherited),
    )


@frozen(kw_only=True)
class _DifferencePart:
    differences: Sequence[float]
    cut: bool


def _cut(turn: Turn) -> bool:
    """Whether the turn was not sampled from the whole distribution."""
    used = turn.used
    top_p, top_k, min_p = used.top_p or 1.0, used.top_k or 0, used.min_p or 0.0
    return used.temperature == 0.0 or top_p < 1.0 or top_k > 0 or min_p > 0.0


def _figures(parts: Sequence[_DifferencePart]) -> DifferenceStatistics:
    differences = [each for part in parts for each in part.differences]
    count = len(differences)
    ratios = [exp(min(each, MAX_EXPONENT)) for each in differences]
    mean = fsum(differences) / count
    whole = not any(part.cut for part in parts)
    pairs = zip(ratios, differences, strict=True)
    return DifferenceStatistics(
        tokens=count,
        mean=mean,
        mean_absolute=fsum(map(abs, differences)) / count,
        k1=-mean if whole else None,
        k3=fsum(ratio - 1 - each for ratio, each in pairs) / count if whole else None,
        outside=sum(not CLIP_RANGE[0] <= ratio <= CLIP_RANGE[1] for ratio in ratios) / count,
    )
