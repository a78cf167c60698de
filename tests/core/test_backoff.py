"""The schedule of pauses."""

from itertools import islice

import pytest

from polarnode.core.backoff import Backoff


def test_pauses_grow_to_the_cap() -> None:
    assert list(islice(Backoff(first_s=0.5, longest_s=3.0).delays(), 5)) == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert list(islice(Backoff(first_s=1.0, longest_s=60.0, factor=4.0).delays(), 4)) == [
        1.0,
        4.0,
        16.0,
        60.0,
    ]
    assert Backoff(first_s=1.0, longest_s=7.0).delay(100_000) == 7.0


def test_lower_bound_and_jitter() -> None:
    """A lower bound may exceed the cap, and jitter is a share of the pause."""
    schedule = Backoff(first_s=1.0, longest_s=4.0, jitter=0.5)
    assert schedule.delay(0, at_least_s=30.0) == 30.0
    assert schedule.delay(3, at_least_s=2.0) == 4.0
    assert schedule.delay(1, draw=0.5) == pytest.approx(2.5)
