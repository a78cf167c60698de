"""The ledger: every token once, found again by what was said."""

from array import array

import pytest
from attrs import evolve
from merge_toys import ASK, END, ROLES, START, Session, ask, rendered, said, system, told, user

from polarnode.core.arrays import ids
from polarnode.merge import ledger as ledger_module
from polarnode.merge.ledger import Ledger, chain, is_attachable, prompt_ids


def long_session(turns: int) -> Session:
    session, messages = Session(), [system(), user()]
    for number in range(turns):
        turn, answer = session.say(ask(*messages), f"step {number}", [("bash", f'{{"n": {number}}}')])
        messages += [answer, told(answer.calls[0], f"result {number}")]
        assert turn.parent == (number - 1 if number else None)
    return session


def ledger_of(session: Session) -> Ledger:
    made = Ledger()
    for turn in session.turns:
        made.add(turn)
    return made


def test_chain_starts_at_its_root() -> None:
    turns = {turn.index: turn for turn in long_session(4).turns}
    assert [turn.index for turn in chain(turns, 3)] == [0, 1, 2, 3]
    assert chain(turns, None) == []


def test_prompt_equals_engine_prompt() -> None:
    session = long_session(5)
    turns = {turn.index: turn for turn in session.turns}
    for index, prompt in session.prompts.items():
        assert prompt_ids(turns, index) == prompt


@pytest.mark.parametrize("depth", [1, 64, 65, 66, 200])
def test_written_tokens_at_any_depth(depth: int) -> None:
    """The written tokens are the prompt and the sample, at any depth."""
    session = long_session(depth)
    kept = ledger_of(session)
    for _ in range(2):
        for index in (depth - 1, depth // 2, 0, max(0, depth - 2)):
            assert kept.written(index) == session.prompts[index] + session.turns[index].sampled
            assert kept.length(index) == len(kept.written(index))
    assert kept.written(None) == array("i")
    assert kept.length(None) == 0


def test_written_returns_fresh_array() -> None:
    kept = ledger_of(long_session(100))
    first = kept.written(99)
    first.extend([7] * 10)
    assert kept.written(99) == first[:-10]


def test_few_full_copies_are_kept() -> None:
    kept = ledger_of(long_session(600))
    for index in range(70, 600, 7):
        kept.written(index)
    assert 0 < len(kept._full) <= ledger_module._MAX_FULL_COPIES


def test_thousands_of_turns_without_recursion() -> None:
    turn = long_session(1).turns[0]
    made = Ledger()
    made.add(turn)
    for index in range(1, 6000):
        made.add(
            evolve(
                turn,
                index=index,
                parent=index - 1,
                prompt_delta=ids([index]),
                prompt_length=0,
                sampled=ids([-index]),
            )
        )
    assert len(made.written(5999)) == len(turn.prompt_delta) + len(turn.sampled) + 2 * 5999
    assert len(list(made.walk_ancestors(5999))) == 6000


def test_only_answered_turns_are_attachable() -> None:
    turn = long_session(1).turns[0]
    assert is_attachable(turn)
    assert is_attachable(evolve(turn, state="partial"))
    assert not is_attachable(evolve(turn, state="failed"))
    assert not is_attachable(evolve(turn, state="partial", answer=None))
    made = Ledger()
    made.add(evolve(turn, state="failed"))
    assert list(made.find_by_answer(turn.message_key)) == []
    assert 0 in made.turns


def test_twin_answers_share_one_key() -> None:
    session = Session()
    one, _ = session.say(ask(user()), "same")
    other, _ = session.say(ask(user()), "same")
    assert list(ledger_of(session).find_by_answer(one.message_key)) == [0, 1]
    assert one.sampled != other.sampled


HALVES = ["one two", " three", " four"]


def cut_in_three(*, merged: bool) -> Session:
    """An answer cut twice; the client shows what there is as one message, or half by half."""
    session = Session()
    for number in range(3):
        shown = (
            [said("".join(HALVES[:number]))] * bool(number) if merged else list(map(said, HALVES[:number]))
        )
        session.say(ask(user(), *shown), HALVES[number], finish="length")
    return session


@pytest.mark.parametrize("merged", [True, False])
def test_cut_answer_resumes_at_its_end(merged: bool) -> None:
    """A cut answer resumes where its tokens ended."""
    session = cut_in_three(merged=merged)
    assert [(turn.kind, turn.parent) for turn in session.turns] == [
        ("root", None),
        ("continue", 0),
        ("continue", 1),
    ]
    assert [len(turn.prompt_delta) for turn in session.turns[1:]] == [0, 0]
    assert session.prompts[2] == session.prompts[1] + session.turns[1].sampled


@pytest.mark.parametrize("merged", [True, False])
def test_resumed_answer_found_by_whole_text(merged: bool) -> None:
    session = cut_in_three(merged=merged)
    pending = session.begin(ask(user(), said("".join(HALVES)), user("more")))
    assert (pending.plan.parent, pending.plan.matched) == (2, 2)
    assert list(pending.delta) == [END, *rendered([user("more")]), START, ROLES["assistant"], ASK]


def test_resumed_answer_found_in_halves() -> None:
    session = cut_in_three(merged=False)
    assert session.lineages.plan(ask(user(), *map(said, HALVES), user("more"))).parent == 2


def test_resumed_call_is_one_message() -> None:
    """A cut call and its rest are one message too."""
    session = Session()
    _, head = session.say(ask(user()), "first", [("bash", "1")], finish="length")
    _, rest = session.say(ask(user(), head), " then", [("bash", "2")])
    whole = evolve(head, text="first then", calls=head.calls + rest.calls)
    assert session.lineages.plan(ask(user(), whole, told(rest.calls[0], "ok"))).parent == 1
