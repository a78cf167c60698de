"""Plans: other samples of one prompt, and going on with a cut one."""

import pytest
from merge_toys import Session, ask, system, user

from polarnode.merge.attach import EXTRA_CHOICE, RESUMED, choice_plan, resumed


@pytest.mark.parametrize(("key", "expected"), [("body", "body.2"), ("", "")])
def test_other_sample_is_sibling_not_retry(key: str, expected: str) -> None:
    plan = Session().begin(ask(system(), user()), request_key=key).plan
    other = choice_plan(plan, index=4, lineage=3, number=2)
    assert (other.index, other.lineage, other.kind, other.reason, other.request_key) == (
        4,
        3,
        "root",
        EXTRA_CHOICE,
        expected,
    )
    assert (other.parent, other.new, other.before_key) == (plan.parent, plan.new, plan.before_key)


def test_sample_under_turn_is_branch() -> None:
    session = Session()
    _, one = session.say(ask(system(), user()), "one")
    plan = session.begin(ask(system(), user(), one, user("two"))).plan
    assert choice_plan(plan, index=9, lineage=9, number=1).kind == "branch"


def test_resumed_plan_continues_cut_turn() -> None:
    session = Session()
    turn, _ = session.say(ask(system(), user()), "one", state="partial")
    plan = resumed(turn, index=1, total=2)
    assert (plan.parent, plan.kind, plan.reason, plan.new, plan.matched, plan.total) == (
        0,
        "continue",
        RESUMED,
        (),
        2,
        2,
    )
    assert (plan.lineage, plan.role, plan.before_key) == (turn.lineage, turn.role, turn.before_key)
    assert "2 tokens go on" in plan.notes[0]


def test_plan_knows_its_turns_key() -> None:
    session = Session()
    pending = session.begin(ask(system(), user()))
    answer = session.answer(pending.plan, "one")
    turn = session.end(pending, answer)
    assert pending.plan.after(answer) == turn.message_key != ""
