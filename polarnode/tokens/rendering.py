"""A model's chat template at the level of text: a whole conversation, and what follows an assistant's turn.

The second is the marker method: render a made-up question, a made-up answer MARK and then what is new, and take what stands after the first
turn end behind MARK. Neither the history nor the tools are rendered for it, so it costs no more than what is new; `audit.py` says whether a
template allows that. Whoever edits this lets no client string reach the template unguarded.
"""

from collections.abc import Sequence
from typing import Final

from attrs import Factory, field, frozen

from polarnode.conversation import Conversation, Json, Message, ToolCall
from polarnode.errors import ModelError, Refused
from polarnode.ports import Tokenizer
from polarnode.tokens.family import Family
from polarnode.tokens.guard import Guard
from polarnode.tokens.shape import Shape, call_shape, messages_shape, tools_shape

_QUESTION: Final[Shape] = {"role": "user", "content": "u"}
_MARK: Final = "MARK"


@frozen
class Rendered:
    """Text of a template, client strings still inert; `guard` gives them back once the control strings are found."""

    text: str
    guard: Guard


@frozen(eq=False)
class Renderer:
    """A template that renders; immutable, safe in several threads. ModelError for control strings that can not be guarded.

    `letters` are those that control strings begin with.
    """

    tokenizer: Tokenizer
    family: Family
    letters: str = field(init=False, default=Factory(lambda self: _first_letters(self.tokenizer), takes_self=True))
    _turn_end: str = field(init=False, default=Factory(lambda self: _text_of(self.family.turn_end, self.tokenizer), takes_self=True))

    def whole(self, conversation: Conversation) -> Rendered:
        """A conversation from its head, asking for the next turn."""
        if not conversation.messages:
            raise Refused("a conversation needs at least one message", path="$.messages")
        return self._render(messages_shape(conversation.messages), tools_shape(conversation.tools), conversation.thinking)

    def following(self, new: Sequence[Message], *, calls: Sequence[ToolCall], thinking: bool | None) -> Rendered:
        """What stands between an assistant's turn end and the next turn of its own. `calls` are those of the turn that is extended."""
        answered = {message.call_id for message in new if message.role == "tool"}
        answer: Shape = {"role": "assistant", "content": _MARK}
        asked = [call_shape(call, {}) for call in calls if call.id in answered]  # a template may look a name up; the arguments are behind us
        if asked:
            answer["tool_calls"] = asked
        rendered = self._render([_QUESTION, answer, *messages_shape(new, earlier=calls)], [], thinking)
        return Rendered(self.after(_MARK, rendered.text), rendered.guard)

    def after(self, mark: str, text: str) -> str:
        """What stands behind the first turn end after a mark."""
        at = text.find(mark)
        end = text.find(self._turn_end, at) if at >= 0 else -1
        if end < 0:
            raise ModelError("this chat template does not write an assistant's text and its turn end, so turns can not be extended faithfully")
        return text[end + len(self._turn_end) :]

    def _render(self, messages: list[Shape], tools: list[Shape], thinking: bool | None) -> Rendered:
        guard = Guard.over(self.letters, [*messages, *tools])
        text = self.tokenizer.render(
            [_guarded(message, guard) for message in messages],
            tools=[_guarded(tool, guard) for tool in tools],
            generation_prompt=True,
            thinking=thinking,
        )
        return Rendered(text, guard)


def _guarded(shape: Shape, guard: Guard) -> Shape:
    """A shape with every string in it inert. Our own field names and roles hold no such letter, and stay as they are."""
    return {name: guard.hide(value) for name, value in shape.items()}


def _first_letters(tokenizer: Tokenizer) -> str:
    letters: dict[str, Json] = dict.fromkeys(text[:1] for text in tokenizer.control)
    odd = [letter for letter in letters if not letter or letter in '"\\' or letter.isspace() or letter.isalnum()]
    if odd:
        raise ModelError(f"a control token of this model begins with {odd[0]!r}: text of clients could not be kept apart from it")
    return "".join(letters)


def _text_of(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token).decode()
