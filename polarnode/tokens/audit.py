"""The load-time audit of a chat template: whether what follows a turn can be rendered without what came before it.

A template that writes a message differently after another history would make prompts that no training render equals, silently. It is
refused here, once, with a sentence; where a family's own template does so by a fault of its own, the family's row says it and it is a note.
Whoever adds a way for templates to differ (a role, a setting) adds it to the grid below.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final

from attrs import evolve

from polarnode.conversation import Conversation, Json, Message, Tool, ToolCall
from polarnode.errors import ModelError, Refused
from polarnode.tokens.limits import Limits
from polarnode.tokens.rendering import Answered, Renderer

_ANSWER: Final = "ANSWER"
_THOUGHT: Final = "THOUGHT"
_TOOL: Final = Tool(name="look", description="Look.", parameters={"type": "object", "properties": {"a": {"type": "string"}}})
_OTHER: Final = ToolCall(id="c2", name="look", arguments='{"a": "y"}')
_CALL: Final = ToolCall(id="c1", name="look", arguments=f'{{"a": "{_ANSWER}"}}')  # the last of its turn: what follows it is behind the turn
_RESULTS: Final = tuple(Message(role="tool", text=text, call_id=call.id) for text, call in (("r1", _CALL), ("r2", _OTHER)))
_CASES: Final[dict[str, tuple[tuple[ToolCall, ...], tuple[Message, ...]]]] = {
    "tool": ((_CALL,), _RESULTS[:1]),
    "two tool": ((_OTHER, _CALL), _RESULTS[::-1]),
    "tool and user": ((_CALL,), (*_RESULTS[:1], Message(role="user", text="q"))),
    "user": ((), (Message(role="user", text="q"),)),
    "system": ((), (Message(role="system", text="s"),)),
    "no": ((), ()),
}
_FIRST: Final = (Message(role="user", text="first"),)
_EARLY: Final = Message(role="assistant", text="early", thinking=_THOUGHT)
_HISTORIES: Final[tuple[tuple[Message, ...], ...]] = (
    _FIRST,
    (Message(role="system", text="be brief"), *_FIRST, _EARLY, Message(role="user", text="more")),
    (*_FIRST, evolve(_EARLY, calls=(_OTHER,)), Message(role="tool", text="r0", call_id="c2")),
)
_DROPPED: Final = "the template leaves out earlier thinking; sampled thinking is kept all the same, because sampled tokens are never rendered again"


def audit(renderer: Renderer, limits: Limits) -> tuple[str, ...]:
    """What is worth knowing of a template. ModelError where a turn's extension would differ from a full render."""
    notes = dict.fromkeys(limits.otherwise.get(kind, sentence) for kind, sentence in limits.sentences.items())
    for name, thinking in product(_CASES, (None, True, False)):
        calls, new = _CASES[name]
        if limits.allow((*new, Message(role="assistant", calls=calls)), follows=True):
            notes |= dict.fromkeys(_differences(renderer, limits, name, thinking))
    _check_text_survives(renderer, limits)
    if drops_thinking(renderer, (Message(role="user", text="q"),)):
        notes[_DROPPED] = None
    return tuple(notes)


def drops_thinking(renderer: Renderer, new: Sequence[Message]) -> bool:
    """Whether the template leaves out thoughts of earlier turns when messages of these roles follow."""
    answer = Message(role="assistant", text="a", thinking=_THOUGHT + "2")
    if new and new[0].role == "tool":
        answer = evolve(answer, text="", calls=(_CALL,))
    stand_ins = [Message(role=message.role, text="q", call_id=_CALL.id if message.role == "tool" else None) for message in new]
    cycle = (evolve(_EARLY, text="", thinking=_THOUGHT + "1", calls=(_OTHER,)), Message(role="tool", text="r0", call_id=_OTHER.id))
    for history in (cycle, ()):  # a template without calls has only its last turn's thought
        try:
            text = renderer.whole(Conversation(messages=(*_FIRST, *history, answer, *stand_ins))).text
        except Refused:
            continue
        return text.count(_THOUGHT) < (2 if history else 1)
    return False


def _differences(renderer: Renderer, limits: Limits, name: str, thinking: bool | None) -> Iterator[str]:
    """Why what follows differs from a full render, where the family's row knows it. ModelError where it does not."""
    calls, new = _CASES[name]
    try:
        for conversation in _conversations(limits, calls, new, thinking):
            expected, found = _shown(renderer, conversation, new), _rendered(renderer, conversation)
            if found != expected:
                yield _known(renderer, name, expected, found)
    except Refused as error:
        yield f"{name} messages after an answer are refused: {error}"


def _conversations(limits: Limits, calls: tuple[ToolCall, ...], new: tuple[Message, ...], thinking: bool | None) -> Iterator[Conversation]:
    """The same new messages after histories that differ in everything a template could look at."""
    for history, thought, tools in product(_HISTORIES, ("", _THOUGHT), ((), (_TOOL,))):
        if limits.allow(history, tools):
            answer = Message(role="assistant", text="" if calls else _ANSWER, calls=calls, thinking=thought)
            yield Conversation(messages=(*history, answer, *new), tools=tools, thinking=thinking)


def _shown(renderer: Renderer, conversation: Conversation, new: tuple[Message, ...]) -> tuple[str, str]:
    before = conversation.messages[: len(conversation.messages) - len(new)]
    answered = Answered(calls=before[-1].calls, calls_before=sum(len(message.calls) for message in before[:-1]))
    rendered = renderer.following(new, answered=answered, thinking=conversation.thinking)
    return rendered.ended, rendered.guard.show(rendered.text)


def _rendered(renderer: Renderer, conversation: Conversation) -> tuple[str, str]:
    whole = renderer.whole(conversation)
    return renderer.after(_ANSWER, whole.guard.show(whole.text))


def _known(renderer: Renderer, name: str, expected: tuple[str, str], found: tuple[str, str]) -> str:
    known = renderer.family.known.get(name)
    if known is not None:
        return f"{name} messages after an answer: {known}"
    raise ModelError(
        f"this chat template writes {name} message(s) after an answer as {expected[1]!r} or as {found[1]!r}, depending on what came before: "
        "turns could not be extended faithfully, so it is not served"
    )


def _check_text_survives(renderer: Renderer, limits: Limits) -> None:
    """A template that escapes or changes the stand-ins would show the model another text than the client's."""
    odd = (f"{renderer.letters}q{place}" for place in range(9))
    system, user, result, said, key, described = (next(odd) for _ in range(6))
    schema: dict[str, Json] = {"type": "object", "properties": {key: {"type": "string", "description": described}}}
    called = (Message(role="assistant", calls=(_CALL,)), Message(role="tool", text=result, call_id=_CALL.id))
    tools = (Tool(name="look", description=said, parameters=schema),)
    cycle = called if limits.allow(called) else ()
    shown_tools = tools if limits.allow((), tools) else ()
    messages = (Message(role="system", text=system), Message(role="user", text=user), *cycle)
    try:
        whole = renderer.whole(Conversation(messages=messages, tools=shown_tools))
    except Refused as error:
        raise ModelError(f"this chat template does not take a plain conversation: {error}: it is not served") from error
    shown = whole.guard.show(whole.text)
    wanted = (system, user, *((result,) if cycle else ()), *((said, key, described) if shown_tools else ()))
    lost = [text for text in wanted if text not in shown]
    if lost:
        raise ModelError(f"this chat template does not write a client's {lost[0]!r} as it is: it is not served")
