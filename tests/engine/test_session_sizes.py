"""What sessions become: the estimates with sizes that are given, alone and in groups."""

import math
import statistics
from collections.abc import Sequence

import numpy
import pytest

from polarnode.engine.residency import ResidencyPolicy
from polarnode.engine.session_sizes import ENDS, GUESS_COUNT, MAX_LOG_GROWTH, SessionSizes


def mean(sizes: SessionSizes, running: Sequence[tuple[int, float]], *growth: float) -> list[float]:
    """Tokens that sessions of no group are expected to have together."""
    return list(sizes.expected([(*each, "") for each in running], numpy.array(growth))[0])


def test_sizes_are_guessed_at_first() -> None:
    sizes = SessionSizes(guess=10_000)
    assert mean(sizes, [(0, 1.0)], 0.0, 9_999.0, 10_001.0) == [0.0, 9_999.0, 0.0]
    for _ in range(ENDS // GUESS_COUNT):
        sizes.add(2_000)
    (found,) = mean(sizes, [(0, 1.0)], 9_000.0)
    assert found == pytest.approx(9_000 * 3 / 19), "the first to end are the short ones"
    for _ in range(ENDS):
        sizes.add(2_000)
    assert sizes.largest == 2_000
    assert mean(sizes, [(0, 1.0), (1_000, 0.5)], 0.0, 900.0) == [500.0, 1_850.0]


def test_share_of_sessions_reaching_size() -> None:
    sizes = SessionSizes(guess=0)
    for tokens in (1_000, 2_000, 3_000, 4_000):
        sizes.add(tokens)
    (found,) = mean(sizes, [(0, 1.0)], 2_500.0)
    assert round(found) == 1_250, "half of four are larger"
    (found,) = mean(sizes, [(2_500, 1.0)], 1_000.0)
    assert round(found) == 1_750 or round(found) == 1_167, "of the two that come this far"


def of_groups(*groups: Sequence[int]) -> SessionSizes:
    sizes = SessionSizes(guess=20_000)
    for number, members in enumerate(groups):
        for tokens in members:
            sizes.add(tokens, f"g{number}")
    return sizes


SHORT, LONG = [4_000, 5_000, 6_000, 5_000] * 2, [40_000, 50_000, 60_000, 50_000] * 2


def test_group_members_predict_each_other() -> None:
    sizes = of_groups(*[SHORT, LONG] * 4)
    assert 0.8 < sizes.alike <= 0.9

    def becomes(*others: int) -> tuple[float, float]:
        running = [(0, 1.0, "new"), *[(tokens, 0.0, "new") for tokens in others]]
        (tokens,), (variance,) = sizes.expected(running, numpy.array([30_000.0]))
        return float(tokens), float(variance)

    assert becomes()[0] == pytest.approx(15_000, rel=0.1), "half of the groups are long"
    assert becomes(20_000)[0] > 28_000, "another one outgrew the short ones"
    for _ in range(3):
        sizes.add(5_000, "new")
    assert becomes()[0] < 3_000, "others ended short"


def test_unknown_group_may_grow_together() -> None:
    """A group of which nothing is known may become large together."""
    sizes, growth = of_groups(*[SHORT, LONG] * 16), numpy.array([30_000.0])
    apart, together, known = (
        float(sizes.expected(running, growth)[1][0])
        for running in (
            [(0, 1.0, "a"), (0, 1.0, "b")],
            [(0, 1.0, "a"), (0, 1.0, "a")],
            [(7_000, 1.0, "a"), (7_000, 1.0, "a")],
        )
    )
    assert apart == pytest.approx(2 * 15_000**2, rel=0.1), "half of them come so far"
    assert together == pytest.approx((1 + sizes.alike) * apart), "by as much they correlate"
    assert known < 0.3 * together, "both outgrew the short ones"


def test_differing_groups_change_nothing() -> None:
    sizes, growth = of_groups(*[[*SHORT[:4], *LONG[:4]]] * 8), numpy.array([0.0, 10_000.0, 30_000.0])
    assert sizes.alike == 0.0
    grouped = sizes.expected([(0, 1.0, "g7"), (20_000, 1.0, "g7")], growth)
    apart = sizes.expected([(0, 1.0, ""), (20_000, 1.0, "new")], growth)
    assert numpy.array_equal(grouped, apart)


def test_few_short_groups_change_little() -> None:
    sizes = of_groups(*[SHORT, LONG] * 12, *[SHORT] * 7)
    (found,) = mean(sizes, [(0, 1.0)], 30_000.0)
    assert found > 10_000, "of the last 64 sessions one in eight was long, of those before every other one"


def test_first_members_predict_the_next() -> None:
    found = ResidencyPolicy(capacity=200_000)
    for number, members in enumerate([SHORT, LONG] * 16):
        for tokens in members:
            found._sizes_of("pi").add(tokens, f"g{number}")
    for name in ("s0", "s1"):
        found.begin(name, "pi", 0.0, group="new")
    before = found._expected("pi", "new", 1.0)
    for name in ("s0", "s1"):
        assert found.ask(name, name, "main", 1.0)
        found.read(name, "main", prompt=12_000, cached=0, seconds=1.0)
        found.ended(name, "main", tokens=12_000, now=2.0)
    after = found._expected("pi", "new", 2.0)
    assert after > before, "two have outgrown the short ones, so the third is long"
    assert found._expected("pi", "other", 2.0) < after, "of another group nothing is known"


SPREAD = [20_000, 30_000, 45_000, 30_000, 15_000, 40_000, 25_000, 35_000]


def drifting(slope: float, count: int) -> SessionSizes:
    """Ended sessions of one spread, of which each is so much larger than the one before it, as a logarithm."""
    sizes = SessionSizes(guess=20_000)
    for number in range(count):
        sizes.add(round(SPREAD[number % len(SPREAD)] * math.exp(slope * number)))
    return sizes


@pytest.mark.parametrize("slope", [0.015, -0.015])
def test_trend_rescales_earlier_sizes(slope: float) -> None:
    """Sizes that grow or shrink count as they would be today."""
    sizes, today = drifting(slope, ENDS), math.exp(slope * (ENDS - 1))
    assert sizes.trend == pytest.approx(slope, rel=0.2)
    (found,) = mean(sizes, [(0, 1.0)], 1.0)
    assert found == pytest.approx(1.0), "all reach one token"
    assert sizes.largest == pytest.approx(max(SPREAD) * today, rel=0.15), "less what chance may do"
    half = statistics.median(SPREAD) * today
    (found,) = mean(sizes, [(0, 1.0)], half)
    assert found == pytest.approx(half / 2, rel=0.3), "half of them reach today's median"
    assert sizes.ends[0] == SPREAD[0], "what is remembered is what was seen"


@pytest.mark.parametrize(("slope", "count"), [(0.0, ENDS), (0.0, 200), (0.003, ENDS), (0.015, ENDS - 1)])
def test_chance_is_no_trend(slope: float, count: int) -> None:
    assert drifting(slope, count).trend == 0.0


def test_consecutive_long_groups_are_no_trend() -> None:
    sizes = of_groups(*[SHORT, LONG] * 16, *[LONG] * 4)
    assert sizes.alike > 0.8
    assert sizes.trend == 0.0


def test_sudden_change_is_bounded() -> None:
    sizes = SessionSizes(guess=20_000)
    for tokens in (1_000, 50_000):
        for _ in range(ENDS // 2):
            sizes.add(tokens)
    assert sizes.trend > 0.05
    assert sizes.largest <= math.exp(MAX_LOG_GROWTH) * 50_000
