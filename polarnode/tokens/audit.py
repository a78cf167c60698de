"""The load-time audit of a chat template: whether what follows a turn can be rendered without what came before it.

A template that writes a message differently after another history would make prompts that no training render equals, silently. It is
refused here, once, with a sentence. Whoever adds a way for templates to differ (a role, a setting) adds it to the grid below.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final

from polarnode.conversation import Conversation, Message, Tool, ToolCall
from polarnode.errors import ModelError, Refused
from polarnode.tokens.rendering import Renderer

_TOOL: Final = Tool(name="look", description="Look.", parameters={"type": "object", "properties": {"a": {"type": "string"}}})
_CALL: Final = ToolCall(id="c1", name="look", arguments='{"a": "x"}')
_OTHER: Final = ToolCall(id="c2", name="look", arguments='{"a": "y"}')
_ANSWER: Final = "ANSWER"
_THOUGHT: Final = "THOUGHT"
_CASES: Final[dict[str, tuple[tuple[ToolCall, ...], tuple[Message, ...]]]] = {
    "tool": ((_CALL,), (Message(role="tool", text="r1", call_id="c1"),)),
    "two tool": ((_CALL, _OTHER), (Message(role="tool", text="r1", call_id="c1"), Message(role="tool", text="r2", call_id="c2"))),
    "tool and user": ((_CALL,), (Message(role="tool", text="r1", call_id="c1"), Message(role="user", text="q"))),
    "user": ((), (Message(role="user", text="q"),)),
    "system": ((), (Message(role="system", text="s"),)),
    "no": ((), ()),
}
_HISTORIES: Final[tuple[tuple[Message, ...], ...]] = (
    (Message(role="user", text="first"),),
    (
        Message(role="system", text="be brief"),
        Message(role="user", text="first"),
        Message(role="assistant", text="early", calls=(_OTHER,), thinking=_THOUGHT),
        Message(role="tool", text="r0", call_id="c2"),
    ),
)


def audit(renderer: Renderer) -> tuple[str, ...]:
    """What is worth knowing of a template. ModelError where a turn's extension would differ from a full render."""
    notes: dict[str, None] = {}
    for name, thinking in product(_CASES, (None, True, False)):
        calls, new = _CASES[name]
        try:
            expected = _shown(renderer, calls, new, thinking)
        except Refused as error:
            notes[f"{name} messages after an answer are refused: {error}"] = None
            continue
        for conversation in _conversations(calls, new, thinking):
            _check(renderer, conversation, expected, name)
    _check_text_survives(renderer)
    return (*notes, *_drops_thinking(renderer))


def _shown(renderer: Renderer, calls: Sequence[ToolCall], new: Sequence[Message], thinking: bool | None) -> str:
    rendered = renderer.following(new, calls=calls, thinking=thinking)
    return rendered.guard.show(rendered.text)


def _conversations(calls: tuple[ToolCall, ...], new: tuple[Message, ...], thinking: bool | None) -> Iterator[Conversation]:
    """The same new messages after histories that differ in everything a template could look at."""
    for history, thought, tools in product(_HISTORIES, ("", _THOUGHT), ((), (_TOOL,))):
        answer = Message(role="assistant", text=_ANSWER, calls=calls, thinking=thought)
        yield Conversation(messages=(*history, answer, *new), tools=tools, thinking=thinking)


def _check(renderer: Renderer, conversation: Conversation, expected: str, name: str) -> None:
    whole = renderer.whole(conversation)
    found = renderer.after(_ANSWER, whole.guard.show(whole.text))
    if found != expected:
        raise ModelError(
            f"this chat template writes {name} message(s) after an answer as {expected!r} or as {found!r}, depending on what came before: "
            "turns could not be extended faithfully, so it is not served"
        )


def _check_text_survives(renderer: Renderer) -> None:
    """A template that escapes or changes the stand-ins would show the model another text than the client's."""
    odd = iter(f"{letter}q{place}" for place, letter in enumerate(renderer.letters * 5))
    system, user, result, said, key = (next(odd) for _ in range(5))
    conversation = Conversation(
        messages=(
            Message(role="system", text=system),
            Message(role="user", text=user),
            Message(role="assistant", calls=(_CALL,)),
            Message(role="tool", text=result, call_id=_CALL.id),
        ),
        tools=(Tool(name="look", description=said, parameters={key: key}),),
    )
    whole = renderer.whole(conversation)
    shown = whole.guard.show(whole.text)
    lost = [text for text in (system, user, result, said, key) if text not in shown]
    if lost:
        raise ModelError(f"this chat template does not write a client's {lost[0]!r} as it is: it is not served")


def _drops_thinking(renderer: Renderer) -> tuple[str, ...]:
    thought = Message(role="assistant", text=_ANSWER, thinking=_THOUGHT)
    conversation = Conversation(messages=(*_HISTORIES[0], thought, Message(role="user", text="q")))
    if _THOUGHT in renderer.whole(conversation).text:
        return ()
    return ("the template leaves out earlier thinking; sampled thinking is kept all the same, because sampled tokens are never rendered again",)
