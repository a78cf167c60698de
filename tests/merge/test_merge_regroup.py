"""Calls of one answer that came back as several messages: joined where ids prove it, left alone where they do
not.
"""

from collections.abc import Sequence

import pytest
from attrs import evolve
from merge_toys import SECRET, ask, said, told, user

from polarnode.core.conversation import Message, ModelRequest, Sampling, ToolCall
from polarnode.merge.attach import References, join_answer_calls

OURS = References("s-1", SECRET)


def call(turn: int, place: int) -> ToolCall:
    return ToolCall(id=OURS.call_id(turn, place), name="bash", arguments="{}")


def calling(*calls: ToolCall, text: str = "") -> Message:
    return Message(role="assistant", text=text, calls=calls, refs=tuple(one.id for one in calls))


def request(*messages: Message) -> ModelRequest:
    return ModelRequest(provider="p", model="m", conversation=ask(*messages), sampling=Sampling())


def shown(*messages: Message) -> Sequence[Message]:
    return join_answer_calls(request(*messages), OURS).conversation.messages


A, B, C = call(3, 0), call(3, 1), call(3, 2)


@pytest.mark.parametrize(
    "messages",
    [
        (calling(A), told(A, "a"), calling(B), told(B, "b"), calling(C), told(C, "c")),
        (calling(A), calling(B), calling(C), told(A, "a"), told(B, "b"), told(C, "c")),
        (calling(A, B), told(A, "a"), told(B, "b"), calling(C), told(C, "c")),
    ],
)
def test_split_calls_rejoin_one_message(messages: tuple[Message, ...]) -> None:
    found = join_answer_calls(request(user(), *messages, user("on")), OURS)
    assert found.conversation.messages == (
        user(),
        calling(A, B, C),
        told(A, "a"),
        told(B, "b"),
        told(C, "c"),
        user("on"),
    )
    assert found.notes[0].startswith("regrouped: the calls of turn 3 came in")


def test_text_stays_with_first_message() -> None:
    assert shown(calling(A, text="Both."), told(A, "a"), calling(B, text="Both."))[0] == calling(
        A, B, text="Both."
    )


@pytest.mark.parametrize(
    "messages",
    [
        (calling(A), told(A, "a"), calling(call(4, 1)), told(call(4, 1), "b")),
        (calling(B), told(B, "b"), calling(A), told(A, "a")),
        (calling(A), told(A, "a"), calling(A), told(A, "again")),
        (calling(A), user("no"), calling(B)),
        (calling(A), told(A, "a"), calling(B, text="And then?")),
        (calling(A), told(A, "a"), said("So."), calling(B)),
        (calling(evolve(A, id="call_" + "0" * 18)), calling(evolve(B, id="call_" + "0" * 16 + "01"))),
        (calling(evolve(A, id="")), calling(evolve(B, id=""))),
    ],
)
def test_other_messages_are_untouched(messages: tuple[Message, ...]) -> None:
    asked = request(user(), *messages)
    assert join_answer_calls(asked, OURS) is asked


def test_foreign_calls_are_not_joined() -> None:
    asked = request(calling(A), told(A, "a"), calling(B))
    assert join_answer_calls(asked, References("s-2", SECRET)) is asked
