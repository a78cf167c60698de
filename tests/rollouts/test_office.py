"""Which front commands a node: values and times, no clock."""

import pytest
from polarnode.rollouts.office import ANSWER_S, CALM_S, Office

from polarnode.core.errors import Superseded
from polarnode.core.fleet import TermOrder

FIRST, SECOND = TermOrder(term=1, front="first"), TermOrder(term=2, front="second")


def held() -> Office:
    """A node whose front reads its feed."""
    office = Office()
    assert office.take(FIRST, 0.0)
    office.feeds["first"] = 1
    return office


def test_a_term_is_taken_once_and_a_later_one_replaces_it() -> None:
    office = Office()
    assert office.take(FIRST, 0.0)
    assert not office.take(FIRST, 1.0), "nothing to write down"
    with pytest.raises(Superseded, match="term 1 is held here"):
        office.take(TermOrder(term=1, front="second"), 2.0)
    assert office.take(SECOND, 3.0), "the first front's feed has ended"
    with pytest.raises(Superseded, match="has term 1 and this node is in term 2"):
        office.check(1)
    office.check(2)


def test_a_front_that_answers_keeps_its_term() -> None:
    office, now = held(), 100.0
    for _ in range(4):
        with pytest.raises(Superseded, match="reads this node's feed"):
            office.take(SECOND, now)
        assert office.challenged
        assert not office.take(FIRST, now + ANSWER_S - 1)
        assert not office.challenged
        for calm in (0.1, CALM_S - 0.1):
            with pytest.raises(Superseded):
                office.take(SECOND, now + ANSWER_S - 1 + calm)
            assert not office.challenged, "it has just answered"
        now += ANSWER_S + CALM_S
    assert (office.term, office.front) == (1, "first")


def test_a_front_that_does_not_answer_is_replaced() -> None:
    office = held()
    with pytest.raises(Superseded):
        office.take(SECOND, 100.0)
    with pytest.raises(Superseded):
        office.take(SECOND, 100.0 + ANSWER_S - 0.1)
    assert office.take(SECOND, 100.0 + ANSWER_S)
    assert (office.term, office.front, office.challenged) == (2, "second", False)
    with pytest.raises(Superseded, match="term 2 is held here"):
        office.take(FIRST, 120.0)
