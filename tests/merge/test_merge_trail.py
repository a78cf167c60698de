"""Remembered paths: what is found with them is what is found without, and they stay few."""

import hypothesis.strategies as st
import pytest
from attrs import evolve
from hypothesis import given
from merge_toys import SECRET, Session, ask, said, system, told, user

from polarnode.core.conversation import Message, ToolCall
from polarnode.merge.attach import Attachment, References, attach
from polarnode.merge.fingerprint import (
    FingerprintCache,
    RequestTrail,
    TrailCache,
    advance,
    message_numbers,
    root_key,
)
from polarnode.merge.ledger import Ledger

CALL = ToolCall(id="call_1", name="bash", arguments='{"a": 1}')


def trail(*numbers: int, root: str = "r", ours: tuple[int, ...] = ()) -> RequestTrail:
    return RequestTrail(
        root=root,
        numbers=message_numbers([user(str(number)) for number in numbers]),
        keys=[],
        ours=ours,
        odd=(),
    )


@pytest.mark.parametrize(
    ("asked", "shared"),
    [
        ((1, 2, 3), 3),
        ((1, 2, 3, 4), 3),
        ((1, 2), 2),
        ((1, 9, 3), 1),
        ((9,), 0),
        ((), 0),
        ((1, 2, 9, 9, 9), 2),
    ],
)
def test_shared_length_of_two_paths(asked: tuple[int, ...], shared: int) -> None:
    trails = TrailCache()
    trails.keep(trail(1, 2, 3))
    assert trails.longest("r", trail(*asked).numbers)[1] == shared
    assert trails.longest("other", trail(*asked).numbers) == (None, 0)


@given(one=st.lists(st.integers(0, 2), max_size=40), other=st.lists(st.integers(0, 2), max_size=40))
def test_the_longest_beginning_is_found(one: list[int], other: list[int]) -> None:
    trails = TrailCache()
    trails.keep(trail(*one))
    same = next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )
    assert trails.longest("r", trail(*other).numbers)[1] == same


def test_longer_path_replaces_its_prefix() -> None:
    trails = TrailCache()
    for length in range(1, 100):
        trails.keep(trail(*range(length)))
        trails.keep(trail(-1, *range(length)))
    assert len(trails._kept) == 2
    for number in range(100, 200):
        trails.keep(trail(number))
    assert len(trails._kept) == 8
    assert trails.longest("r", trail(199, 5).numbers)[1] == 1


def test_last_own_message_before_length() -> None:
    path = trail(1, 2, 3, 4, 5, 6, ours=(2, 5))
    assert [path.last_exact_place(length) for length in range(7)] == [0, 0, 2, 2, 2, 5, 5]


@pytest.mark.parametrize(
    "other",
    [
        Message(role="tool", text="x"),
        Message(role="user", text="x "),
        said("x"),
        Message(role="assistant", text="x", calls=(CALL,)),
        Message(role="assistant", text="x", calls=(evolve(CALL, name="b"),)),
        Message(role="assistant", text="x", calls=(evolve(CALL, arguments="{}"),)),
        Message(role="assistant", text="x", calls=(CALL, CALL)),
    ],
)
def test_other_keys_get_other_numbers(other: Message) -> None:
    messages = [
        user("x"),
        said("y"),
        Message(role="assistant", text="x", calls=(evolve(CALL, arguments="[]"),)),
        other,
    ]
    assert len(set(message_numbers(messages))) == 4
    assert len({advance(root_key("-", "d"), message) for message in messages}) == 4


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=5),
        min_size=1,
        max_size=5,
    )
)
def test_memo_numbers_match_messages(requests: list[list[tuple[int, bool]]]) -> None:
    """A memo s numbers are those of the messages."""
    memo, kept = FingerprintCache(), [user(str(number)) for number in range(4)]
    for request in requests:
        messages = [kept[number] if same else user(str(number)) for number, same in request]
        assert memo.numbers(messages) == message_numbers(messages)


# ── with and without ──────────────────────────────────────────────────────────


def both(session: Session, *messages: Message) -> Attachment:
    """What is found with the session's memory and with none."""
    with_it, without = (
        attach(
            ask(*messages),
            "",
            ledger=session.lineages._ledger,
            references=session.lineages.references,
            memo=memo,
        )
        for memo in (session.lineages._memo, FingerprintCache())
    )
    assert with_it == without
    return with_it


def test_late_answer_found_in_seen_history() -> None:
    session = Session()
    waiting = session.begin(ask(system(), user()))
    history = system(), user(), said("late"), user("more")
    assert both(session, *history).parent is None
    session.end(waiting, session.answer(waiting.plan, "late"))
    assert both(session, *history).parent == 0
    assert both(session, *history, said("foreign"), user()).parent == 0


def test_excused_answer_stays_excused() -> None:
    """An excused answer is excused again until a turn says it itself."""
    session = Session()
    _, answer = session.say(ask(user()), "look", [("bash", '{"a": 1}')])
    edited = evolve(answer, calls=tuple(evolve(call, arguments='{"a": 2}') for call in answer.calls))
    history = user(), edited, told(answer.calls[0], "ok")
    assert both(session, *history).notes == both(session, *history, said("x"), user()).notes[:1]
    twin, _ = session.say(ask(user()), "look", [("bash", '{"a": 2}')])
    assert both(session, *history).parent == twin.index
    assert both(session, *history, said("y"), user()).parent == twin.index


def test_leading_foreign_message_costs_nothing() -> None:
    session = Session()
    history: list[Message] = [user("example"), said("like this"), user("now")]
    for number in range(6):
        _, answer = session.say(ask(*history), f"step {number}")
        history += [answer, user("more")]
        assert both(session, *history).parent == number


def test_empty_session_has_no_trail() -> None:
    found = attach(ask(), "", ledger=Ledger(), references=References("s", SECRET), memo=FingerprintCache())
    assert (found.parent, found.matched) == (None, 0)
