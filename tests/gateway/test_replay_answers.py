"""What a request was answered with, told by the requests that came after it."""

from merge_toys import ask, said, system, told, user

from polarnode.core.conversation import Conversation, Message, ToolCall
from polarnode.gateway.replay import RecordedEnding, find_answers

CALL = Message(
    role="assistant", text="look", calls=(ToolCall(id="c1", name="bash", arguments='{"b": 1, "a": 2}'),)
)


def found(*conversations: Conversation, failed: tuple[int, ...] = ()) -> list[RecordedEnding]:
    return find_answers(conversations, [number in failed for number in range(len(conversations))])


def texts(*conversations: Conversation) -> list[str | None]:
    return [None if each.answer is None else each.answer.text for each in found(*conversations)]


def test_answer_is_read_from_next_request() -> None:
    """The answer is what the next request shows."""
    one, two = ask(system(), user()), ask(system(), user(), CALL, told("c1", "done"))
    first, last = found(one, two)
    assert first.answer is not None
    assert first.answer.as_message() == CALL
    assert (last.answer, last.asked_again) == (None, False)


def test_last_identical_request_was_answered() -> None:
    """Of identical requests, the last one before its answer was answered."""
    one, two = ask(user()), ask(user(), said("a"), user("more"))
    ended = found(one, one, one, two)
    assert [each.asked_again for each in ended] == [True, True, False, False]
    assert [each.answer is not None for each in ended] == [False, False, True, False]


def test_restarted_conversation_has_own_answer() -> None:
    """A conversation that begins again has an answer of its own."""
    one = ask(user())
    assert texts(one, ask(user(), said("a"), user("x")), one, ask(user(), said("b"), user("x"))) == [
        "a",
        None,
        "b",
        None,
    ]
    again = found(one, ask(user(), said("a"), user("x")), one, ask(user(), said("a"), user("y")))
    assert again[2].answer is None


def test_interleaved_conversations_answer_apart() -> None:
    """Interleaved conversations do not answer one another."""
    main, other = [user("main")], [user("other")]
    assert texts(ask(*main), ask(*other), ask(*other, said("o"), user()), ask(*main, said("m"), user())) == [
        "m",
        "o",
        None,
        None,
    ]


def test_last_user_message_may_vanish() -> None:
    """A last user message may be taken out again."""
    one = ask(system(), user("task"), user("volatile one"))
    two = ask(system(), user("task"), CALL, told("c1", "done"), user("volatile two"))
    three = ask(system(), user("task"), CALL, told("c1", "done"), said("end"), user("next"))
    assert texts(one, two, three) == ["look", "end", None]


def test_last_user_message_may_change() -> None:
    """A last user message may come back with other words."""
    one = ask(system(), user("task\nvolatile one"))
    shown = ask(system(), user("task"), CALL, told("c1", "done"), user("volatile"))
    assert texts(one, shown) == ["look", None]
    assert texts(one, ask(system(), user("task\nvolatile two")), shown) == [None, "look", None], (
        "asked again in other words"
    )
    assert texts(one, ask(system(), user("task")), shown) == [None, "look", None], (
        "a request was sent with those words"
    )


def test_answer_may_extend_assistant_message() -> None:
    """An answer may go on an assistant message."""
    one, two = ask(user(), said("begun")), ask(user(), said("begun and ended"), user("more"))
    assert texts(one, two) == [" and ended", None]


def test_failed_response_is_no_answer() -> None:
    one = ask(user())
    assert [each.asked_again for each in found(one, failed=(0,))] == [True]
