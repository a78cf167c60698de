"""A model's chat template at the level of text: a whole conversation, and what follows an assistant's turn.

The second is the marker method: render a made-up question, a made-up answer with a mark and then what is new, and take what stands behind
the answer's end. Where calls are answered the mark stands in the last call's arguments, because some templates drop a text beside a call.
Neither the history nor the tools are rendered for it, so it costs no more than what is new; `audit.py` says whether a template allows that.
Whoever edits this lets no client string reach the template unguarded, and none of it vanish in there.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from attrs import Factory, field, frozen

from polarnode.conversation import Conversation, Json, Message, ToolCall
from polarnode.errors import ModelError, Refused
from polarnode.ports import Tokenizer
from polarnode.tokens.family import Family
from polarnode.tokens.guard import Guard
from polarnode.tokens.presence import check_present
from polarnode.tokens.shape import Earlier, Shape, Shown, arguments_shape, call_shape, messages_shape, shown_call, tools_shape

_QUESTION: Final[Shape] = {"role": "user", "content": "u"}
_MARK: Final = "MARK"


@frozen
class Rendered:
    """Text of a template, client strings still inert; `guard` gives them back once the control strings are found.

    `ended` is the turn end that the template wrote before it, empty where the next header ends a turn.
    """

    text: str
    guard: Guard
    ended: str = ""


@frozen
class _Inert:
    """What a template is given: every string of a client's made inert by the guard."""

    messages: list[Shape]
    tools: list[Shape]
    guard: Guard


@frozen(kw_only=True)
class Answered:
    """The turn that is gone on from: its calls, the ids the model spoke for them where it does, and how many calls there were before it."""

    calls: Sequence[ToolCall] = ()
    spoken: Sequence[str] = ()
    calls_before: int = 0

    def earlier(self, family: Family) -> Earlier:
        """Its calls under the ids that their results are shown under."""
        shown = {}
        for place, call in enumerate(self.calls):
            spoken = self.spoken[place] if place < len(self.spoken) else None
            shown[call.id] = Shown(name=call.name, id=spoken) if spoken else shown_call(call, self.calls_before + place, family.manner)
        return Earlier(calls=shown, count=self.calls_before + len(self.calls))


@frozen(eq=False)
class Renderer:
    """A template that renders; immutable, safe in several threads. ModelError for control strings that can not be guarded.

    `letters` are those that control strings begin with.
    """

    tokenizer: Tokenizer
    family: Family
    letters: str = field(init=False, default=Factory(lambda self: _first_letters(self.tokenizer), takes_self=True))
    _ends: "re.Pattern[str]" = field(init=False, default=Factory(lambda self: _any_of(self._end_texts()), takes_self=True))

    def whole(self, conversation: Conversation) -> Rendered:
        """A conversation from its head, asking for the next turn."""
        if not conversation.messages:
            raise Refused("a conversation needs at least one message", path="$.messages")
        messages, tools = messages_shape(conversation.messages, manner=self.family.manner), tools_shape(conversation.tools)
        inert = self._inert(messages, tools)
        text = self._text(inert, conversation.thinking)
        check_present(inert.messages, inert.tools, text, inert.guard)
        return Rendered(text, inert.guard)

    def following(self, new: Sequence[Message], *, answered: Answered, thinking: bool | None) -> Rendered:
        """What stands between an assistant's turn and the next of its own. A call without a result is not shown to the template."""
        earlier = answered.earlier(self.family)
        asked = {message.call_id for message in new if message.role == "tool"}
        known = answered.calls if self.family.call_syntax != "none" else ()  # its template would show neither the call nor the mark in it
        shown = [earlier.calls[call.id] for call in known if call.id in asked]
        messages = messages_shape(new, manner=self.family.manner, earlier=earlier)
        made_up = [_QUESTION, self._answer(shown)]
        inert = self._inert([*made_up, *messages], [])
        ended, text = self.after(_MARK, self._text(inert, thinking))
        check_present(inert.messages[len(made_up) :], [], text, inert.guard)
        return Rendered(text, inert.guard, ended)

    def after(self, mark: str, text: str) -> tuple[str, str]:
        """The turn end behind a mark, empty where the next header is one, and what stands behind it."""
        at = text.find(mark)
        end = self._ends.search(text, at) if at >= 0 else None
        if end is None:
            raise ModelError("this chat template does not write an assistant's text and its turn end, so turns can not be extended faithfully")
        if self._goes_on(end[0]):
            return "", text[end.start() :]
        return end[0], text[end.end() :]

    def _answer(self, shown: Sequence[Shown]) -> Shape:
        """The made-up answer. Arguments are behind us, but a template may look a name up."""
        if not shown:
            return {"role": "assistant", "content": _MARK}
        manner = self.family.manner
        several = self.family.refuses.get("several results") if len(shown) > 1 else None
        if several is not None:
            raise Refused(f"this model's chat template {several}", path="$.messages")
        nothing, mark = ToolCall(id="", name="", arguments=""), ToolCall(id="", name="", arguments=f'{{"mark": "{_MARK}"}}')
        calls = [call_shape(call, arguments_shape(nothing, manner)) for call in shown[:-1] if not manner.one_call]
        return {"role": "assistant", "content": "", "tool_calls": [*calls, call_shape(shown[-1], arguments_shape(mark, manner))]}

    def _end_texts(self) -> Iterable[str]:
        family = self.family
        tokens = family.turn_ends | family.boundaries | family.turn_starts
        return (self.tokenizer.token_bytes(token).decode() for token in tokens)

    def _goes_on(self, text: str) -> bool:
        """Whether a control string begins what follows a turn, and does not end the turn itself."""
        token = self.tokenizer.control[text]
        return token in self.family.boundaries or token not in self.family.turn_ends

    def _inert(self, messages: list[Shape], tools: list[Shape]) -> _Inert:
        guard = Guard.over(self.letters, [*messages, *tools])
        return _Inert([_guarded(shape, guard) for shape in messages], [_guarded(shape, guard) for shape in tools], guard)

    def _text(self, inert: _Inert, thinking: bool | None) -> str:
        return self.tokenizer.render(inert.messages, tools=inert.tools, generation_prompt=True, thinking=thinking)


def _guarded(shape: Shape, guard: Guard) -> Shape:
    """A shape with every string in it inert. Our own field names and roles hold no such letter, and stay as they are."""
    return {name: guard.hide(value) for name, value in shape.items()}


def _first_letters(tokenizer: Tokenizer) -> str:
    letters: dict[str, Json] = dict.fromkeys(text[:1] for text in tokenizer.control)
    odd = [letter for letter in letters if not letter or letter in '"\\' or letter.isspace() or letter.isalnum()]
    if odd:
        raise ModelError(f"a control token of this model begins with {odd[0]!r}: text of clients could not be kept apart from it")
    return "".join(letters)


def _any_of(texts: Iterable[str]) -> "re.Pattern[str]":
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))
