"""What a chat template can not be asked, found by trying it once at load: a role it moves or refuses, tools or calls it leaves out.

A request that holds such a thing is refused with a sentence, because otherwise the model would answer without having seen it, or seen it in
another place. System messages alone are shown otherwise where that loses no word, and the turn says so: harnesses put reminders into the
middle of a conversation, and a refusal would end the run. Whoever adds a way for templates to lose something adds a probe here; its texts are
ones that no template writes by itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal

from attrs import evolve, field, frozen

from polarnode.conversation import Conversation, Message, Tool, ToolCall
from polarnode.errors import ModelError, Refused
from polarnode.tokens.rendering import Answered, Renderer

Kind = Literal["tools", "calls", "tool", "late system", "two systems"]

_NAME, _SAID, _VALUE, _LATER = "qzprobe", "Qzsaid", "Qzvalue", "Qzlater"
_TOOL: Final = Tool(name=_NAME, description=_SAID, parameters={"type": "object", "properties": {"a": {"type": "string", "description": _VALUE}}})
_CALL: Final = ToolCall(id="c0", name=_NAME, arguments=f'{{"a": "{_VALUE}"}}')
_ASK: Final = Message(role="user", text="first")
_ANSWER: Final = Message(role="assistant", text="Qzanswer")
_CALLING: Final = Message(role="assistant", calls=(_CALL,))
_RESULT: Final = Message(role="tool", text=_SAID, call_id="c0")
_SYSTEM: Final = Message(role="system", text=_SAID)
_WHAT: Final[Mapping[Kind, str]] = {
    "tools": "does not show tools",
    "calls": "does not show calls of tools",
    "tool": "does not show results of tools",
    "late system": "does not leave a system message where it stands among the others",
    "two systems": "does not show two system messages at the head",
}


_SO: Final = "this model's chat template has no place for it, so the model sees"
_OTHERWISE: Final[Mapping[Kind, str]] = {
    "late system": f"system message behind the head: {_SO} a user's message there",
    "two systems": f"second system message at the head: {_SO} both as one",
}


@frozen
class Limits:
    """What the template can not be asked, and the sentence it is refused with; `otherwise`: what of it is shown in another way instead, and how."""

    sentences: Mapping[Kind, str]
    otherwise: Mapping[Kind, str] = field(factory=dict)

    @classmethod
    def of(cls, renderer: Renderer) -> "Limits":
        """Try a template. What its family's row refuses is not tried."""
        found: dict[Kind, str] = {}
        for kind, probe in _PROBES.items():
            why = renderer.family.refuses.get(kind)
            fault = why if why is not None else _fault(kind, probe, renderer)
            if fault is not None:
                found[kind] = f"this model's chat template {fault}: put a template into the model's folder that does, or send none"
        instead = {kind: note for kind, note in _OTHERWISE.items() if kind in found and _fault(kind, _SHOWN_SO[kind], renderer) is None}
        return cls(found, instead)

    def settled(self, messages: Sequence[Message], *, follows: bool = False) -> tuple[Message, ...]:
        """The messages as the template can be asked them, as far as they can be shown in another way."""
        head = _head(messages, follows=follows)
        first, later = tuple(messages[:head]), tuple(messages[head:])
        if "two systems" in self.otherwise and head > 1:
            first = (Message(role="system", text="\n\n".join(message.text for message in first)),)
        if "late system" in self.otherwise:
            later = tuple(evolve(message, role="user") if message.role == "system" else message for message in later)
        return first + later

    def notes(self, messages: Sequence[Message], *, follows: bool = False) -> tuple[str, ...]:
        """What a reader of the turn should know of that."""
        kinds = dict.fromkeys(_kinds(messages, (), follows=follows))
        return tuple(self.otherwise[kind] for kind in kinds if kind in self.otherwise)

    def check(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, follows: bool = False) -> None:
        """Refused for what the template can not be asked. `follows`: the messages come after others."""
        for kind in dict.fromkeys(_kinds(messages, tools, follows=follows)):
            if kind in self.sentences:
                raise Refused(self.sentences[kind], path="$.tools" if kind == "tools" else "$.messages")

    def allow(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, follows: bool = False) -> bool:
        """Whether none of it is refused."""
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
    """How many system messages stand at the head of a conversation."""
    return 0 if follows else next((place for place, message in enumerate(messages) if message.role != "system"), len(messages))


def _fault(kind: Kind, probe: Callable[[Renderer], bool], renderer: Renderer) -> str | None:
    try:
        return None if probe(renderer) else _WHAT[kind]
    except (Refused, ModelError):  # it says so itself, or leaves the text out, or fails on it
        return _WHAT[kind]


def _text(renderer: Renderer, *messages: Message, tools: tuple[Tool, ...] = ()) -> str:
    return renderer.whole(Conversation(messages=messages, tools=tools)).text


def _tools(renderer: Renderer) -> bool:
    return _NAME in _text(renderer, _ASK, tools=(_TOOL,))


def _calls(renderer: Renderer) -> bool:
    return _VALUE in _text(renderer, _ASK, _CALLING, _ASK)


def _tool(renderer: Renderer) -> bool:
    return _SAID in renderer.following((_RESULT,), answered=Answered(calls=(_CALL,)), thinking=None).text


def _late(renderer: Renderer, message: Message = _SYSTEM) -> bool:
    text = _text(renderer, _ASK, _ANSWER, message, Message(role="user", text=_LATER))
    after = renderer.following((message,), answered=Answered(), thinking=None).text
    return text.index(_ANSWER.text) < text.index(_SAID) < text.index(_LATER) and _SAID in after


def _late_as_users(renderer: Renderer) -> bool:
    return _late(renderer, evolve(_SYSTEM, role="user"))


def _two(renderer: Renderer) -> bool:
    text = _text(renderer, _SYSTEM, Message(role="system", text=_LATER), _ASK)
    return text.index(_SAID) < text.index(_LATER)


def _two_as_one(renderer: Renderer) -> bool:
    text = _text(renderer, Message(role="system", text=f"{_SAID}\n\n{_LATER}"), _ASK)
    return text.index(_SAID) < text.index(_LATER)


_PROBES: Final[Mapping[Kind, Callable[[Renderer], bool]]] = {
    "tools": _tools,
    "calls": _calls,
    "tool": _tool,
    "late system": _late,
    "two systems": _two,
}
_SHOWN_SO: Final[Mapping[Kind, Callable[[Renderer], bool]]] = {"late system": _late_as_users, "two systems": _two_as_one}
