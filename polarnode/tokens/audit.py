"""Checks of a chat template at load: what it cannot show, and whether its turns can be extended.

`Limits` tries the template once. A request that needs something that the template moves, refuses or leaves
out is refused with a sentence, because the model would otherwise answer without having seen it. Only system
messages are shown in another way, if no word is lost, with a note on the turn, because harnesses put
reminders into the middle of a conversation.

`audit` refuses a template that writes a message differently after another history, because its prompts would
not equal any training render. A known fault of a family's own template is a note instead. Add a probe for
each new way in which templates lose text, and a case to the grid for each new way in which they differ. The
texts of the probes are ones that no template writes by itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Final, Literal

from attrs import evolve, field, frozen

from polarnode.core.conversation import Conversation, Json, Message, Tool, ToolCall
from polarnode.core.errors import ModelError, Refused
from polarnode.tokens.rendering import AnsweredTurn, TemplateRenderer

# ── limits ────────────────────────────────────────────────────────────────────────────────────────

Kind = Literal["tools", "calls", "tool", "late system", "two systems"]

_NAME, _PROBE_TEXT, _PROBE_VALUE, _LATER_TEXT = "qzprobe", "Qzsaid", "Qzvalue", "Qzlater"
_PROBE_TOOL: Final = Tool(
    name=_NAME,
    description=_PROBE_TEXT,
    parameters={"type": "object", "properties": {"a": {"type": "string", "description": _PROBE_VALUE}}},
)
_PROBE_CALL: Final = ToolCall(id="c0", name=_NAME, arguments=f'{{"a": "{_PROBE_VALUE}"}}')
_PROBE_QUESTION: Final = Message(role="user", text="first")
_PROBE_ANSWER: Final = Message(role="assistant", text="Qzanswer")
_PROBE_CALLING: Final = Message(role="assistant", calls=(_PROBE_CALL,))
_RESULT: Final = Message(role="tool", text=_PROBE_TEXT, call_id="c0")
_PROBE_SYSTEM: Final = Message(role="system", text=_PROBE_TEXT)
_FAULT_SENTENCES: Final[Mapping[Kind, str]] = {
    "tools": "does not show tools",
    "calls": "does not show calls of tools",
    "tool": "does not show results of tools",
    "late system": "does not leave a system message where it stands among the others",
    "two systems": "does not show two system messages at the head",
}


_NO_PLACE: Final = "this model's chat template has no place for it, so the model sees"
_OTHERWISE_NOTES: Final[Mapping[Kind, str]] = {
    "late system": f"system message behind the head: {_NO_PLACE} a user's message there",
    "two systems": f"second system message at the head: {_NO_PLACE} both as one",
}


@frozen
class Limits:
    """What the template cannot show, each with the sentence of its refusal. `otherwise` has what is shown in
    another way instead, each with the note on how.
    """

    sentences: Mapping[Kind, str]
    otherwise: Mapping[Kind, str] = field(factory=dict)

    @classmethod
    def of(cls, renderer: TemplateRenderer) -> "Limits":
        """Probe a template, except for what the family's row already refuses."""
        found: dict[Kind, str] = {}
        for kind, probe in _PROBES.items():
            why = renderer.family.refuses.get(kind)
            fault = why if why is not None else _probe_fault(kind, probe, renderer)
            if fault is not None:
                found[kind] = (
                    f"this model's chat template {fault}: put a template into the model's folder that does,"
                    " or send none"
                )
        instead = {
            kind: note
            for kind, note in _OTHERWISE_NOTES.items()
            if kind in found and _probe_fault(kind, _OTHERWISE_PROBES[kind], renderer) is None
        }
        return cls(found, instead)

    def settled(self, messages: Sequence[Message], *, follows: bool = False) -> tuple[Message, ...]:
        """The messages, rewritten where the template can only show them in another form."""
        head = _head(messages, follows=follows)
        first, later = tuple(messages[:head]), tuple(messages[head:])
        if "two systems" in self.otherwise and head > 1:
            first = (Message(role="system", text="\n\n".join(message.text for message in first)),)
        if "late system" in self.otherwise:
            later = tuple(
                evolve(message, role="user") if message.role == "system" else message for message in later
            )
        return first + later

    def notes(self, messages: Sequence[Message], *, follows: bool = False) -> tuple[str, ...]:
        """Notes for the turn on messages that are shown in another way."""
        kinds = dict.fromkeys(_kinds(messages, (), follows=follows))
        return tuple(self.otherwise[kind] for kind in kinds if kind in self.otherwise)

    def check(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, follows: bool = False
    ) -> None:
        """Raise Refused for what the template cannot show. `follows`: the messages come after other
        messages.
        """
        for kind in dict.fromkeys(_kinds(messages, tools, follows=follows)):
            if kind in self.sentences:
                raise Refused(self.sentences[kind], path="$.tools" if kind == "tools" else "$.messages")

    def allow(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, follows: bool = False
    ) -> bool:
        """Whether the template can show all of these messages and tools."""
        return self.sentences.keys().isdisjoint(_kinds(messages, tools, follows=follows))


def _kinds(messages: Sequence[Message], tools: Sequence[Tool], *, follows: bool) -> Iterator[Kind]:
    if tools:
        yield "tools"
    head = _head(messages, follows=follows)
    if head > 1:
        yield "two systems"
    for message in messages[head:]:
        if message.role == "system":
            yield "late system"
        if message.role == "tool":
            yield "tool"
        if message.calls:
            yield "calls"


def _head(messages: Sequence[Message], *, follows: bool) -> int:
    """The number of system messages at the head of a conversation."""
    return (
        0
        if follows
        else next(
            (place for place, message in enumerate(messages) if message.role != "system"), len(messages)
        )
    )


def _probe_fault(
    kind: Kind, probe: Callable[[TemplateRenderer], bool], renderer: TemplateRenderer
) -> str | None:
    try:
        return None if probe(renderer) else _FAULT_SENTENCES[kind]
    except (Refused, ModelError):  # The template refuses it, leaves the text out, or fails.
        return _FAULT_SENTENCES[kind]


def _text(renderer: TemplateRenderer, *messages: Message, tools: tuple[Tool, ...] = ()) -> str:
    return renderer.whole(Conversation(messages=messages, tools=tools)).text


def _tools(renderer: TemplateRenderer) -> bool:
    return _NAME in _text(renderer, _PROBE_QUESTION, tools=(_PROBE_TOOL,))


def _calls(renderer: TemplateRenderer) -> bool:
    return _PROBE_VALUE in _text(renderer, _PROBE_QUESTION, _PROBE_CALLING, _PROBE_QUESTION)


def _tool(renderer: TemplateRenderer) -> bool:
    return (
        _PROBE_TEXT
        in renderer.following((_RESULT,), answered=AnsweredTurn(calls=(_PROBE_CALL,)), thinking=None).text
    )


def _late(renderer: TemplateRenderer, message: Message = _PROBE_SYSTEM) -> bool:
    text = _text(renderer, _PROBE_QUESTION, _PROBE_ANSWER, message, Message(role="user", text=_LATER_TEXT))
    after = renderer.following((message,), answered=AnsweredTurn(), thinking=None).text
    return (
        text.index(_PROBE_ANSWER.text) < text.index(_PROBE_TEXT) < text.index(_LATER_TEXT)
        and _PROBE_TEXT in after
    )


def _keeps_late_user(renderer: TemplateRenderer) -> bool:
    return _late(renderer, evolve(_PROBE_SYSTEM, role="user"))


def _keeps_two_systems(renderer: TemplateRenderer) -> bool:
    text = _text(renderer, _PROBE_SYSTEM, Message(role="system", text=_LATER_TEXT), _PROBE_QUESTION)
    return text.index(_PROBE_TEXT) < text.index(_LATER_TEXT)


def _keeps_joined_systems(renderer: TemplateRenderer) -> bool:
    text = _text(renderer, Message(role="system", text=f"{_PROBE_TEXT}\n\n{_LATER_TEXT}"), _PROBE_QUESTION)
    return text.index(_PROBE_TEXT) < text.index(_LATER_TEXT)


_PROBES: Final[Mapping[Kind, Callable[[TemplateRenderer], bool]]] = {
    "tools": _tools,
    "calls": _calls,
    "tool": _tool,
    "late system": _late,
    "two systems": _keeps_two_systems,
}
_OTHERWISE_PROBES: Final[Mapping[Kind, Callable[[TemplateRenderer], bool]]] = {
    "late system": _keeps_late_user,
    "two systems": _keeps_joined_systems,
}


# ── audit ─────────────────────────────────────────────────────────────────────────────────────────

_ANSWER: Final = "ANSWER"
_THOUGHT: Final = "THOUGHT"
# The number of messages rendered at either end. A render of twice as many takes 1 ms, and the event loop
# waits for a dozen renders.
_EDGE_MESSAGES: Final = 32
_CASE_TOOL: Final = Tool(
    name="look", description="Look.", parameters={"type": "object", "properties": {"a": {"type": "string"}}}
)
_OTHER_CALL: Final = ToolCall(id="c2", name="look", arguments='{"a": "y"}')
# This is the last call of its turn, so the text after its arguments follows the turn.
_CALL: Final = ToolCall(id="c1", name="look", arguments=f'{{"a": "{_ANSWER}"}}')
_CASE_RESULTS: Final = tuple(
    Message(role="tool", text=text, call_id=call.id) for text, call in (("r1", _CALL), ("r2", _OTHER_CALL))
)
_AUDIT_CASES: Final[dict[str, tuple[tuple[ToolCall, ...], tuple[Message, ...]]]] = {
    "tool": ((_CALL,), _CASE_RESULTS[:1]),
    "two tool": ((_OTHER_CALL, _CALL), _CASE_RESULTS[::-1]),
    "tool and user": ((_CALL,), (*_CASE_RESULTS[:1], Message(role="user", text="q"))),
    "user": ((), (Message(role="user", text="q"),)),
    "system": ((), (Message(role="system", text="s"),)),
    "no": ((), ()),
}
_FIRST_QUESTION: Final = (Message(role="user", text="first"),)
_EARLY_ANSWER: Final = Message(role="assistant", text="early", thinking=_THOUGHT)
_AUDIT_HISTORIES: Final[tuple[tuple[Message, ...], ...]] = (
    _FIRST_QUESTION,
    (
        Message(role="system", text="be brief"),
        *_FIRST_QUESTION,
        _EARLY_ANSWER,
        Message(role="user", text="more"),
    ),
    (
        *_FIRST_QUESTION,
        evolve(_EARLY_ANSWER, calls=(_OTHER_CALL,)),
        Message(role="tool", text="r0", call_id="c2"),
    ),
)
_DROPS_THINKING_NOTE: Final = (
    "the template leaves out earlier thinking; sampled thinking is kept all the same, because sampled tokens"
    " are never rendered again"
)


def audit(renderer: TemplateRenderer, limits: Limits) -> tuple[str, ...]:
    """Notes on a template. Raises ModelError if a turn's extension would differ from a full render."""
    notes = dict.fromkeys(limits.otherwise.get(kind, sentence) for kind, sentence in limits.sentences.items())
    for name, thinking in product(_AUDIT_CASES, (None, True, False)):
        calls, new = _AUDIT_CASES[name]
        if limits.allow((*new, Message(role="assistant", calls=calls)), follows=True):
            notes |= dict.fromkeys(_known_differences(renderer, limits, name, thinking))
    _check_text_survives(renderer, limits)
    if drops_thinking(renderer, (Message(role="user", text="q"),)):
        notes[_DROPS_THINKING_NOTE] = None
    return tuple(notes)


def drops_thinking(renderer: TemplateRenderer, new: Sequence[Message]) -> bool:
    """Whether the template leaves out the thinking of earlier turns if messages of these roles follow."""
    new = _few_messages(new)
    answer = Message(role="assistant", text="a", thinking=_THOUGHT + "2")
    if new and new[0].role == "tool":
        answer = evolve(answer, text="", calls=(_CALL,))
    stand_ins = [
        Message(role=message.role, text="q", call_id=_CALL.id if message.role == "tool" else None)
        for message in new
    ]
    cycle = (
        evolve(_EARLY_ANSWER, text="", thinking=_THOUGHT + "1", calls=(_OTHER_CALL,)),
        Message(role="tool", text="r0", call_id=_OTHER_CALL.id),
    )
    for history in (cycle, ()):  # In a conversation without calls only the last turn can have a thought.
        try:
            text = renderer.whole(
                Conversation(messages=(*_FIRST_QUESTION, *history, answer, *stand_ins))
            ).text
        except Refused:
            continue
        return text.count(_THOUGHT) < (2 if history else 1)
    return False


def _few_messages(new: Sequence[Message]) -> Sequence[Message]:
    """A few messages that stand for all of these, because templates look at the first and last ones and at
    roles.
    """
    if len(new) <= 2 * _EDGE_MESSAGES:
        return new
    first, between, last = new[:_EDGE_MESSAGES], new[_EDGE_MESSAGES:-_EDGE_MESSAGES], new[-_EDGE_MESSAGES:]
    return (*first, *{message.role: message for message in between}.values(), *last)


def _known_differences(
    renderer: TemplateRenderer, limits: Limits, name: str, thinking: bool | None
) -> Iterator[str]:
    """The known reasons why an extension differs from a full render. Raises ModelError for an unknown
    difference.
    """
    calls, new = _AUDIT_CASES[name]
    try:
        for conversation in _conversations(limits, calls, new, thinking):
            expected, found = _shown(renderer, conversation, new), _rendered(renderer, conversation)
            if found != expected:
                yield _known_difference(renderer, name, expected, found)
    except Refused as error:
        yield f"{name} messages after an answer are refused: {error}"


def _conversations(
    limits: Limits, calls: tuple[ToolCall, ...], new: tuple[Message, ...], thinking: bool | None
) -> Iterator[Conversation]:
    """The same new messages after histories that differ in everything on which a template could depend."""
    for history, thought, tools in product(_AUDIT_HISTORIES, ("", _THOUGHT), ((), (_CASE_TOOL,))):
        if limits.allow(history, tools):
            answer = Message(role="assistant", text="" if calls else _ANSWER, calls=calls, thinking=thought)
            yield Conversation(messages=(*history, answer, *new), tools=tools, thinking=thinking)


def _shown(
    renderer: TemplateRenderer, conversation: Conversation, new: tuple[Message, ...]
) -> tuple[str, str]:
    before = conversation.messages[: len(conversation.messages) - len(new)]
    answered = AnsweredTurn(
        calls=before[-1].calls, calls_before=sum(len(message.calls) for message in before[:-1])
    )
    rendered = renderer.following(new, answered=answered, thinking=conversation.thinking)
    return rendered.ended, rendered.guard.show(rendered.text)


def _rendered(renderer: TemplateRenderer, conversation: Conversation) -> tuple[str, str]:
    whole = renderer.whole(conversation)
    return renderer.after(_ANSWER, whole.guard.show(whole.text))


def _known_difference(
    renderer: TemplateRenderer, name: str, expected: tuple[str, str], found: tuple[str, str]
) -> str:
    reason = renderer.family.known_differences.get(name)
    if reason is not None:
        return f"{name} messages after an answer: {reason}"
    raise ModelError(
        f"this chat template writes {name} message(s) after an answer as {expected[1]!r} or as {found[1]!r},"
        " depending on what came before: turns could not be extended faithfully, so it is not served"
    )


def _check_text_survives(renderer: TemplateRenderer, limits: Limits) -> None:
    """Raise ModelError for a template that escapes or changes the guard's stand-ins, because the model would
    then see another text than the client's.
    """
    odd = (f"{renderer.letters}q{place}" for place in range(9))
    system, user, result, summary, key, described = (next(odd) for _ in range(6))
    schema: dict[str, Json] = {
        "type": "object",
        "properties": {key: {"type": "string", "description": described}},
    }
    called = (Message(role="assistant", calls=(_CALL,)), Message(role="tool", text=result, call_id=_CALL.id))
    tools = (Tool(name="look", description=summary, parameters=schema),)
    cycle = called if limits.allow(called) else ()
    shown_tools = tools if limits.allow((), tools) else ()
    messages = (Message(role="system", text=system), Message(role="user", text=user), *cycle)
    try:
        whole = renderer.whole(Conversation(messages=messages, tools=shown_tools))
    except Refused as error:
        raise ModelError(
            f"this chat template does not take a plain conversation: {error}: it is not served"
        ) from error
    shown = whole.guard.show(whole.text)
    wanted = (
        system,
        user,
        *((result,) if cycle else ()),
        *((summary, key, described) if shown_tools else ()),
    )
    lost = [text for text in wanted if text not in shown]
    if lost:
        raise ModelError(
            f"this chat template does not write a client's {lost[0]!r} as it is: it is not served"
        )
