"""The end of RUN moves with what calls are held, back with what they were not, and never beyond its bound."""

import pytest

from polarnode.rollouts.run_clock import MAX_HELD_S, RunClock


@pytest.mark.parametrize(
    ("credits", "moved", "held"),
    [
        ([50.0], 50.0, 50.0),
        ([50.0, -42.0], 8.0, 8.0),
        ([MAX_HELD_S - 10, 50.0], MAX_HELD_S, MAX_HELD_S + 40),
        ([MAX_HELD_S + 40, -50.0], MAX_HELD_S - 10, MAX_HELD_S - 10),
        ([-1e-9], -1e-9, 0.0),
    ],
)
def test_credits_extend_run_deadline(credits: list[float], moved: float, held: float) -> None:
    clock, began = RunClock(), 1000.0
    clock.scope.deadline = began
    for seconds in credits:
        clock.credit(seconds)
    assert clock.scope.deadline == pytest.approx(began + moved)
    assert clock.held_s == pytest.approx(held)
