"""Values of what happened: the places of a turn in a row, and packed numbers cut and joined."""

import pytest

from polarnode.core.arrays import RoutedExperts, TopLogprobs, floats, ids
from polarnode.core.trajectory import Turn, TurnSpan, Verdict


def turn(*, prompt: int, delta: int, sampled: int) -> Turn:
    return Turn(
        session_id="s",
        index=0,
        provider="p",
        lineage=0,
        parent=None,
        kind="root",
        reason="first",
        prompt_delta=ids(range(delta)),
        prompt_length=prompt,
        sampled=ids(range(sampled)),
        logprobs=floats([0.0] * sampled),
    )


@pytest.mark.parametrize(("prompt", "delta", "sampled", "begin", "end"), [(5, 5, 2, 0, 7), (9, 3, 0, 6, 9)])
def test_turn_place_in_row(prompt: int, delta: int, sampled: int, begin: int, end: int) -> None:
    found = turn(prompt=prompt, delta=delta, sampled=sampled)
    assert (found.begin, found.end) == (begin, end)


def test_alternatives_are_sliced_and_joined() -> None:
    top = TopLogprobs(k=2, ids=ids([1, 2, 3, 4]), logprobs=floats([-1, -2, -3, -4]))
    assert top.row(1) == ((3, -3.0), (4, -4.0))
    assert top.narrowed(1).row(1) == ((3, -3.0),)
    assert TopLogprobs.joined([top.until(1), top]) == TopLogprobs(
        k=2, ids=ids([1, 2, 1, 2, 3, 4]), logprobs=floats([-1, -2, -1, -2, -3, -4])
    )
    assert TopLogprobs.joined([top, top.narrowed(1)]) is None


def test_experts_join_only_without_gap() -> None:
    def rows(start: int, end: int) -> RoutedExperts:
        return RoutedExperts(start=start, layers=1, top_k=1, dtype="uint8", data=bytes(range(start, end)))

    assert RoutedExperts.joined([rows(0, 3), rows(2, 5)], 5) == rows(0, 5)
    assert RoutedExperts.joined([rows(0, 2), rows(3, 5)], 5) is None


def test_turn_rewards_default_to_none() -> None:
    assert TurnSpan(turn=0, start=1, end=2).reward is None
    assert Verdict(reward=1.0).turn_rewards == {}
