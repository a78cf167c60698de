"""What each recorded request was answered with, found where a harness shows it: in the requests that came after.

The rules for whoever edits it. Requests are compared as lineage compares them, by the keys of their paths, so a harness may trim, sort and
rename here exactly as it may in a live session. An answer belongs to the last request that asked for it before it was first shown: those
of the same path before that one had none, or they would not have been asked again.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from attrs import define, field, frozen

from polarnode.conversation import Answer, Conversation, Message, TextPart, ThinkingPart
from polarnode.errors import Refused
from polarnode.merge.fingerprint import Memo, advance, root_key, thinking_letter

_NEVER: Final = 1 << 60


@frozen(kw_only=True)
class Found:
    """How a request ended: with an answer that was shown, without one (it was asked again), or in a way no later request tells."""

    answer: Answer | None = None
    asked_again: bool = False


@frozen(kw_only=True)
class _Asked:
    """A request's messages and the keys of its path: one more than messages."""

    messages: tuple[Message, ...]
    keys: tuple[str, ...]

    @property
    def key(self) -> str:
        return self.keys[-1]


@frozen(kw_only=True)
class _Showing:
    """An assistant message that stands in a request, and the key with it."""

    request: int
    key: str
    message: Message


@define(eq=False)
class _Shown:
    """Where each path goes on with an assistant message."""

    asked: Sequence[_Asked]
    _after: dict[str, list[_Showing]] = field(factory=dict)
    _paths: set[str] = field(factory=set)

    def __attrs_post_init__(self) -> None:
        self._paths.update(asked.key for asked in self.asked)
        for number, asked in enumerate(self.asked):
            for place, message in enumerate(asked.messages):
                if message.role == "assistant":
                    showing = _Showing(request=number, key=asked.keys[place + 1], message=message)
                    self._after.setdefault(asked.keys[place], []).append(showing)

    def of(self, number: int) -> Iterator[_Showing]:
        """The answers to a request that later requests show, those of its whole path first."""
        asked = self.asked[number]
        yield from self._later(number, asked.key)
        if not asked.messages:
            return
        last, before = asked.messages[-1], asked.keys[-2]
        if last.role == "assistant":
            yield from (rest for showing in self._later(number, before) if (rest := _rest(showing, last)) is not None)
        elif last.role == "user":
            yield from self._later(number, before)  # the message was taken out again
            yield from self._changed(number, before)

    def _later(self, number: int, key: str) -> Iterator[_Showing]:
        return (showing for showing in self._after.get(key, ()) if showing.request > number)

    def _changed(self, number: int, before: str) -> Iterator[_Showing]:
        """Where a later request shows another last user message, which nobody asked with, and then an answer."""
        place = len(self.asked[number].messages) - 1
        for later in range(number + 1, len(self.asked)):
            asked = self.asked[later]
            if len(asked.messages) <= place:
                continue
            if asked.keys[place] == before and len(asked.messages) == place + 1 and asked.messages[place].role == "user":
                return  # it was asked again, in other words: the answer is to those
            if _goes_on(asked, place, before) and asked.keys[place + 1] not in self._paths:
                yield _Showing(request=later, key=asked.keys[place + 2], message=asked.messages[place + 1])


def _goes_on(asked: _Asked, place: int, before: str) -> bool:
    """Whether a user message stands at this place of this path, and an answer to it."""
    roles = [message.role for message in asked.messages[place : place + 2]]
    return asked.keys[place] == before and roles == ["user", "assistant"]


def _rest(showing: _Showing, begun: Message) -> _Showing | None:
    """What an answer added to the assistant message a request ended with."""
    shown = showing.message
    if shown == begun or not shown.text.startswith(begun.text) or shown.calls[: len(begun.calls)] != begun.calls:
        return None
    rest = Message(role="assistant", text=shown.text[len(begun.text) :], calls=shown.calls[len(begun.calls) :])
    return _Showing(request=showing.request, key=showing.key, message=rest)


def find_answers(conversations: Sequence[Conversation], failed: Sequence[bool]) -> list[Found]:
    """How each request of a session ended. `failed`: those whose recorded response says that there was no answer."""
    memo = Memo()
    asked = [_path(conversation, memo, number) for number, conversation in enumerate(conversations)]
    shown = _Shown(asked)
    found = [Found() for _ in asked]
    for same in _by_path(asked):
        claimed: set[str] = set()
        for number, following in pairwise([*same, _NEVER]):
            first = next((each for each in shown.of(number) if each.request <= following and each.key not in claimed), None)
            if first is not None and not (failed[number] and following != _NEVER):
                claimed.add(first.key)
                found[number] = Found(answer=_answer(first.message))
            else:
                found[number] = Found(asked_again=following != _NEVER or failed[number])
    return found


def _path(conversation: Conversation, memo: Memo, number: int) -> _Asked:
    try:
        keys = [root_key(memo.tools_key(conversation.tools), thinking_letter(conversation))]
    except Refused:  # whoever plans it is told why; nobody goes on from it
        return _Asked(messages=(), keys=(f"refused {number}",))
    for message in conversation.messages:
        keys.append(advance(keys[-1], message, canonical=memo.canonical))
    return _Asked(messages=conversation.messages, keys=tuple(keys))


def _by_path(asked: Sequence[_Asked]) -> list[list[int]]:
    grouped: dict[str, list[int]] = {}
    for number, each in enumerate(asked):
        grouped.setdefault(each.key, []).append(number)
    return list(grouped.values())


def _answer(message: Message) -> Answer:
    thinking = (ThinkingPart(message.thinking),) if message.thinking else ()
    text = (TextPart(message.text),) if message.text else ()
    return Answer(parts=(*thinking, *text, *message.calls), finish_reason="tool_calls" if message.calls else "stop")
