"""The tree of a session's turns by itself: whose child is whose, what was asked, what came to nothing. Names:
tests/merge/test_merge_lineage.py.
"""

import pytest
from attrs import evolve
from merge_toys import Session, ask, system, user

from polarnode.core.conversation import Sampling
from polarnode.core.trajectory import Turn
from polarnode.merge.ledger import Ledger
from polarnode.merge.turn_kinds import TurnGraph


def turns(count: int) -> tuple[Turn, ...]:
    """A line of this many turns."""
    session, messages = Session(), [system(), user()]
    for number in range(count):
        _, said = session.say(ask(*messages), f"step {number}")
        messages += [said, user(f"next {number}")]
    return session.turns


def tree_of(*kept: Turn) -> TurnGraph:
    ledger = Ledger()
    tree = TurnGraph(ledger)
    for turn in kept:
        tree.enter(turn)
        ledger.add(turn)
    return tree


def test_dropped_numbers_are_not_reused() -> None:
    session = Session()
    plan = session.begin(ask(system(), user())).plan
    tree = TurnGraph(Ledger())
    tree.plans[plan.index] = plan
    tree.enter(plan)
    tree.drop(plan)
    assert (tree.next_index, tree.next_lineage, list(tree.requests())) == (1, 1, [])


def test_requests_stand_in_index_order() -> None:
    one, two = turns(2)
    tree = tree_of(two, one)
    assert [asked.index for asked in tree.requests()] == [0, 1]


@pytest.mark.parametrize(
    ("state", "limit", "expected"),
    [("partial", None, True), ("partial", 3, True), ("partial", 2, False), ("complete", None, False)],
)
def test_cut_turn_resumes_while_room_remains(state: str, limit: int | None, expected: bool) -> None:
    (turn,) = turns(1)
    cut = evolve(turn, state=state, sampled=turn.sampled[:2], used=Sampling(max_tokens=limit))
    assert tree_of(cut).can_continue(cut) is expected


def test_extended_cut_turn_is_not_resumable() -> None:
    one, two = turns(2)
    cut = evolve(one, state="partial")
    assert tree_of(cut).can_continue(cut)
    assert not tree_of(cut, two).can_continue(cut)
    assert tree_of(cut, evolve(two, state="failed", sampled=two.sampled[:0])).can_continue(cut)
