"""Chat templates at the level of text: a whole conversation, and what follows an assistant's turn.

`messages_shape` and `tools_shape` give OpenAI's messages and tools as dictionaries, in the manner of the
family's template. `content` is a string, never None. `arguments` is an object in the client's key order.
Absent values are left out, because templates ask `is defined`. What a template would leave out of a message
becomes a message of its own.

`TemplateRenderer.following` uses the marker method: it renders a made-up question, a made-up answer with a
mark, and the new messages, and takes the text after the end of the answer. If calls are answered, the mark
is in the arguments of the last call, because some templates drop the text beside a call. Neither history nor
tools are rendered, so the cost depends only on what is new. `audit` says whether a template allows that.

Invariants: every client string reaches the template guarded, and is restored afterwards. `check_present`
refuses a render in which a text is missing, both as it is and as JSON writes it.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from attrs import Factory, evolve, field, frozen

from polarnode.core.conversation import Conversation, Json, Message, Tool, ToolCall
from polarnode.core.errors import ModelError, Refused
from polarnode.core.ports import Tokenizer
from polarnode.tokens.families import Family, TemplateManner
from polarnode.tokens.tool_calls import read_object

# ── guard ────────────────────────────────────────────────────────────────────────────────────────

# Letters of Unicode's private use area. No keyboard, no template and hardly any text has them, and JSON and
# strip() leave them unchanged.
_STAND_INS: Final = range(0xE5E5, 0xF900)
_STAND_IN_PATTERN: Final = re.compile(f"[{chr(_STAND_INS.start)}-{chr(_STAND_INS.stop - 1)}]")
# The levels of nested JSON that are accepted. Real tool schemas have about ten, and Python's own JSON writer
# gives up at a thousand.
_DEEPEST: Final = 100


@frozen(kw_only=True)
class TextGuard:
    """The letters that stand for others during one render.

    A control string is recognised by its first letter. Wherever a client's string contains that letter, a
    letter that nobody used stands in for it during the render. So no client text can become control text,
    neither alone nor joined with what the template puts beside it, and it cannot influence the template. A
    stand-in replaces one letter by one letter, so lengths and JSON escapes do not change.
    """

    _to: Mapping[int, str]
    _back: Mapping[str, str]

    @classmethod
    def over(cls, letters: Iterable[str], values: Iterable[Json]) -> "TextGuard":
        """A guard whose stand-ins occur in none of these values. Raises Refused for text that is not valid
        Unicode, or JSON nested beyond reason.
        """
        texts = list(_texts(list(values), 0))
        _check_unicode(texts)
        used = {letter for text in texts if not text.isascii() for letter in _STAND_IN_PATTERN.findall(text)}
        free = (chr(code) for code in _STAND_INS if chr(code) not in used)
        back: dict[str, str] = {}
        for letter in letters:
            stand_in = next(free, None)
            if stand_in is None:
                raise Refused(
                    "the conversation holds every character polarnode could use to mark its text: remove some"
                    " private-use characters"
                )
            back[stand_in] = letter
        return cls(to={ord(letter): stand_in for stand_in, letter in back.items()}, back=back)

    def hide(self, value: Json) -> Json:
        """The same value with every string in it guarded, keys included."""
        match value:
            case str():
                return self._hidden(value)
            case list():
                return [self.hide(item) for item in value]
            case dict():
                return {self._hidden(key): self.hide(item) for key, item in value.items()}
            case _:
                return value

    def show(self, text: str) -> str:
        """The text as the client wrote it."""
        for stand_in, letter in self._back.items():
            text = text.replace(stand_in, letter)
        return text

    def _hidden(self, text: str) -> str:
        for letter, stand_in in self._to.items():
            text = text.replace(chr(letter), stand_in)
        return text


def _texts(value: Json, depth: int) -> Iterator[str]:
    if depth > _DEEPEST:
        raise Refused(f"the conversation holds JSON nested deeper than {_DEEPEST} levels: flatten it")
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _texts(item, depth + 1)
        case dict():
            yield from value
            for item in value.values():
                yield from _texts(item, depth + 1)
        case _:
            return


def _check_unicode(texts: list[str]) -> None:
    try:
        for text in texts:
            if not text.isascii():
                text.encode()
    except UnicodeEncodeError as error:
        raise Refused(
            "the conversation holds half of a surrogate pair, which is no character: send valid Unicode"
        ) from error


# ── shapes ────────────────────────────────────────────────────────────────────────────────────────

Shape = dict[str, Json]
_EITHER_MANNER: Final = TemplateManner(arguments="either")


@frozen(kw_only=True)
class Shown:
    """A call as the template shows it: the name of its tool, and its id there."""

    name: str
    id: str


@frozen(kw_only=True)
class EarlierCalls:
    """What precedes some messages: the calls that they answer, by id, and the number of calls in the
    conversation so far.
    """

    calls: Mapping[str, Shown] = field(factory=dict)
    count: int = 0


def messages_shape(
    messages: Sequence[Message],
    *,
    manner: TemplateManner = _EITHER_MANNER,
    earlier: EarlierCalls | None = None,
) -> list[Shape]:
    """Messages as templates read them. A result gets the name of the call that it answers, which may be an
    earlier one.
    """
    before = earlier or EarlierCalls()
    shown, count, shapes = dict(before.calls), before.count, []
    for message in _split_messages(messages, manner):
        for call in message.calls:
            shown[call.id] = shown_call(call, count, manner)
            count += 1
        shapes.append(_message(message, shown, manner))
    return shapes


def shown_call(call: ToolCall, place: int, manner: TemplateManner) -> Shown:
    """A call that the model did not sample in this session. `place` is its number among the calls of the
    conversation.
    """
    return Shown(name=call.name, id=f"functions.{call.name}:{place}" if manner.model_call_ids else call.id)


def tools_shape(tools: Sequence[Tool]) -> list[Shape]:
    """Tools as templates write them. Every key is present, in this order, because the model was trained on
    the resulting text.
    """
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in tools
    ]


def call_shape(shown: Shown, arguments: Json) -> Json:
    """One call of an assistant message."""
    return {"id": shown.id, "type": "function", "function": {"name": shown.name, "arguments": arguments}}


def _split_messages(messages: Sequence[Message], manner: TemplateManner) -> Iterator[Message]:
    """The messages, split so that none holds more than the template shows of one message."""
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if message.calls and message.text and manner.text_apart:
            yield Message(role="assistant", text=message.text)
            message = evolve(message, text="")
        if len(message.calls) < 2 or not manner.one_call:
            yield message
            continue
        results = _results(messages, at)
        at += len(results)
        yield from _calls_one_by_one(message, results)


def _results(messages: Sequence[Message], at: int) -> Sequence[Message]:
    end = next((place for place in range(at, len(messages)) if messages[place].role != "tool"), len(messages))
    return messages[at:end]


def _calls_one_by_one(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    """A message's calls, each followed by its results."""
    for place, call in enumerate(message.calls):
        yield evolve(
            message,
            text="" if place else message.text,
            thinking="" if place else message.thinking,
            calls=(call,),
        )
        yield from (result for result in results if result.call_id == call.id)
    ids = {call.id for call in message.calls}
    yield from (result for result in results if result.call_id not in ids)


def _message(message: Message, shown: Mapping[str, Shown], manner: TemplateManner) -> Shape:
    shape: Shape = {"role": message.role, "content": message.text}
    if message.thinking:
        shape[manner.thinking] = message.thinking
    if message.calls:
        shape["tool_calls"] = [
            call_shape(shown[call.id], arguments_shape(call, manner)) for call in message.calls
        ]
    if message.call_id is not None:
        answered = shown.get(message.call_id)
        shape["tool_call_id"] = message.call_id if answered is None else answered.id
        if answered is not None:
            shape["name"] = answered.name
    return shape


def arguments_shape(call: ToolCall, manner: TemplateManner) -> Json:
    """Arguments as the template writes them: the object. If the template shows only objects, text that is not
    an object is shown under the name `arguments`; otherwise it stays as it is. It is not refused, because a
    harness that shortened an old call sends it with every later request, and would be refused until its
    session ends. Empty text means no arguments.
    """
    text = call.arguments if call.arguments.strip() else "{}"
    if manner.arguments == "text":
        return text
    value = read_object(text)
    if value is None and manner.arguments == "object":
        return {"arguments": text}
    return text if value is None else value


def argument_notes(messages: Sequence[Message], manner: TemplateManner) -> tuple[str, ...]:
    """Notes on calls whose arguments the template could not show as they were sent."""
    names = (
        call.name
        for message in messages
        for call in message.calls
        if manner.arguments == "object" and call.arguments.strip() and read_object(call.arguments) is None
    )
    return tuple(
        f"the arguments of a call of {name[:60]!r} are no JSON object: the model sees their text as one"
        " argument"
        for name in dict.fromkeys(names)
    )


# ── dropped text check ────────────────────────────────────────────────────────────────────────────

GuardedShape = Mapping[str, Json]


def check_present(
    messages: Sequence[GuardedShape], tools: Sequence[GuardedShape], text: str, guard: TextGuard
) -> None:
    """Raise Refused if the text of a message, the name of a call, or the name or description of a tool is
    missing from a render. All strings are still guarded.
    """
    at = 0
    for what, shown in _client_texts(messages, tools):
        found = _place(shown, text, at)
        if found < 0:
            path = "$.tools" if what == "tool" else "$.messages"
            raise Refused(
                f"this model's chat template leaves out the {what} {_short(guard.show(shown))}: the model"
                " would never see it; give the model a template that shows it, or do not send it",
                path=path,
            )
        at = found


def _client_texts(
    messages: Sequence[GuardedShape], tools: Sequence[GuardedShape]
) -> Iterator[tuple[str, str]]:
    for tool in tools:
        function = tool["function"]
        if isinstance(function, dict):
            yield from (
                ("tool", value)
                for key in ("name", "description")
                if isinstance(value := function[key], str) and value.strip()
            )
    for message in messages:
        content, calls = message["content"], message.get("tool_calls", ())
        if isinstance(content, str) and content.strip():
            yield f"{message['role']} message", content.strip()
        for call in calls if isinstance(calls, list) else ():
            if (
                isinstance(call, dict)
                and isinstance(function := call["function"], dict)
                and str(function["name"]).strip()
            ):
                yield "call", str(function["name"]).strip()


def _place(wanted: str, text: str, at: int) -> int:
    """The position of a text, -1 if it is absent. The search begins after the previous text, so that a
    conversation is read once.
    """
    found = text.find(wanted, at)
    if found >= 0:
        return found
    escaped = json.dumps(wanted, ensure_ascii=False)[1:-1]
    # Kimi K2.5 is shown tools with their descriptions as comments.
    comment = re.sub(r"\n(?!\n|$)", "\n// ", wanted)
    places = (text.find(spelling, start) for start in (at, 0) for spelling in (escaped, wanted, comment))
    return next((place for place in places if place >= 0), -1)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


# ── rendering ─────────────────────────────────────────────────────────────────────────────────────

_QUESTION: Final[Shape] = {"role": "user", "content": "u"}
_MARK: Final = "MARK"


@frozen
class RenderedText:
    """Text that a template rendered, with the client's strings still guarded. `guard` restores them once the
    control strings are found.

    `ended` is the turn end that the template wrote before the text; empty if the next header ends a turn.
    """

    text: str
    guard: TextGuard
    ended: str = ""


@frozen
class _GuardedInput:
    """The input of the template, with every client string guarded."""

    messages: list[Shape]
    tools: list[Shape]
    guard: TextGuard


@frozen(kw_only=True)
class AnsweredTurn:
    """The turn before the new messages: its calls, the model's own ids for them if it has any, and the number
    of calls before it.
    """

    calls: Sequence[ToolCall] = ()
    model_ids: Sequence[str] = ()
    calls_before: int = 0

    def earlier(self, family: Family) -> EarlierCalls:
        """The turn's calls, under the ids with which their results are shown."""
        shown = {}
        for place, call in enumerate(self.calls):
            model_id = self.model_ids[place] if place < len(self.model_ids) else None
            shown[call.id] = (
                Shown(name=call.name, id=model_id)
                if model_id
                else shown_call(call, self.calls_before + place, family.manner)
            )
        return EarlierCalls(calls=shown, count=self.calls_before + len(self.calls))


@frozen(eq=False)
class TemplateRenderer:
    """Renders a chat template. It is immutable and thread-safe. Raises ModelError for control strings that
    cannot be guarded.

    `letters` are the first letters of all control strings.
    """

    tokenizer: Tokenizer
    family: Family
    letters: str = field(
        init=False, default=Factory(lambda self: _first_letters(self.tokenizer), takes_self=True)
    )
    _ends: "re.Pattern[str]" = field(
        init=False, default=Factory(lambda self: _alternatives_pattern(self._end_texts()), takes_self=True)
    )

    def whole(self, conversation: Conversation) -> RenderedText:
        """A conversation from its beginning to the opening of the next turn."""
        if not conversation.messages:
            raise Refused("a conversation needs at least one message", path="$.messages")
        messages, tools = (
            messages_shape(conversation.messages, manner=self.family.manner),
            tools_shape(conversation.tools),
        )
        inert = self._guard_input(messages, tools)
        text = self._text(inert, conversation.thinking)
        check_present(inert.messages, inert.tools, text, inert.guard)
        return RenderedText(text, inert.guard)

    def following(
        self, new: Sequence[Message], *, answered: AnsweredTurn, thinking: bool | None
    ) -> RenderedText:
        """The text between an assistant's turn and its next one. A call without a result is not shown to the
        template.
        """
        earlier = answered.earlier(self.family)
        answered_ids = {message.call_id for message in new if message.role == "tool"}
        # The template of such a family would show neither the call nor the mark in it.
        calls = answered.calls if self.family.call_syntax != "none" else ()
        shown = [earlier.calls[call.id] for call in calls if call.id in answered_ids]
        messages = messages_shape(new, manner=self.family.manner, earlier=earlier)
        made_up = [_QUESTION, self._answer(shown)]
        inert = self._guard_input([*made_up, *messages], [])
        ended, text = self.after(_MARK, self._text(inert, thinking))
        check_present(inert.messages[len(made_up) :], [], text, inert.guard)
        return RenderedText(text, inert.guard, ended)

    def after(self, mark: str, text: str) -> tuple[str, str]:
        """The turn end after a mark, and the text after it. The turn end is empty if the next header serves
        as one.
        """
        at = text.find(mark)
        end = self._ends.search(text, at) if at >= 0 else None
        if end is None:
            raise ModelError(
                "this chat template does not write an assistant's text and its turn end, so turns cannot be"
                " extended faithfully"
            )
        if self._goes_on(end[0]):
            return "", text[end.start() :]
        return end[0], text[end.end() :]

    def _answer(self, shown: Sequence[Shown]) -> Shape:
        """The made-up answer. Its arguments are not used, but a template may look up a name."""
        if not shown:
            return {"role": "assistant", "content": _MARK}
        manner = self.family.manner
        several = self.family.refuses.get("several results") if len(shown) > 1 else None
        if several is not None:
            raise Refused(f"this model's chat template {several}", path="$.messages")
        nothing, mark = (
            ToolCall(id="", name="", arguments=""),
            ToolCall(id="", name="", arguments=f'{{"mark": "{_MARK}"}}'),
        )
        calls = [
            call_shape(call, arguments_shape(nothing, manner)) for call in shown[:-1] if not manner.one_call
        ]
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [*calls, call_shape(shown[-1], arguments_shape(mark, manner))],
        }

    def _end_texts(self) -> Iterable[str]:
        family = self.family
        tokens = family.turn_ends | family.boundaries | family.turn_starts
        return (self.tokenizer.token_bytes(token).decode() for token in tokens)

    def _goes_on(self, text: str) -> bool:
        """Whether a control string begins the text after a turn and does not end the turn."""
        token = self.tokenizer.control[text]
        return token in self.family.boundaries or token not in self.family.turn_ends

    def _guard_input(self, messages: list[Shape], tools: list[Shape]) -> _GuardedInput:
        guard = TextGuard.over(self.letters, [*messages, *tools])
        return _GuardedInput(
            [_guarded(shape, guard) for shape in messages], [_guarded(shape, guard) for shape in tools], guard
        )

    def _text(self, inert: _GuardedInput, thinking: bool | None) -> str:
        return self.tokenizer.render(
            inert.messages, tools=inert.tools, generation_prompt=True, thinking=thinking
        )


def _guarded(shape: Shape, guard: TextGuard) -> Shape:
    """A shape with every string in it guarded. The node's own field names and roles hold no such letter and
    remain as they are.
    """
    return {name: guard.hide(value) for name, value in shape.items()}


def _first_letters(tokenizer: Tokenizer) -> str:
    letters: dict[str, Json] = dict.fromkeys(text[:1] for text in tokenizer.control)
    odd = [
        letter for letter in letters if not letter or letter in '"\\' or letter.isspace() or letter.isalnum()
    ]
    if odd:
        raise ModelError(
            f"a control token of this model begins with {odd[0]!r}: text of clients could not be kept apart"
            " from it"
        )
    return "".join(letters)


def _alternatives_pattern(texts: Iterable[str]) -> "re.Pattern[str]":
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))
