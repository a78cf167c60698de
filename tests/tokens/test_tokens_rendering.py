"""Text of a template: whole, and what follows a turn; nothing of a client reaches the template unguarded."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import tokens_kit as kit

from polarnode.core.conversation import Conversation, Message, Tool, ToolCall
from polarnode.core.errors import ModelError, Refused
from polarnode.tokens.families import Family
from polarnode.tokens.rendering import AnsweredTurn, TemplateRenderer
from polarnode.tokens.tokenizer import load_tokenizer

FIRST = ToolCall(id="c1", name="first<x>", arguments='{"a": 1}')
OTHER = ToolCall(id="c2", name="other", arguments="{}")


@pytest.fixture
def watched() -> kit.Watched:
    return kit.Watched(kit.model().tokenizer)


@pytest.fixture
def renderer(watched: kit.Watched) -> TemplateRenderer:
    return TemplateRenderer(watched, kit.model().family)


def shown(
    renderer: TemplateRenderer,
    new: Sequence[Message],
    calls: Sequence[ToolCall] = (),
    thinking: bool | None = None,
) -> str:
    rendered = renderer.following(new, answered=AnsweredTurn(calls=calls), thinking=thinking)
    return rendered.guard.show(rendered.text)


def test_suffix_spans_end_to_next_turn(renderer: TemplateRenderer) -> None:
    """The suffix runs from the turn's end to the next turn."""
    asked = "<|im_start|>assistant\n"
    assert shown(renderer, ()) == "\n" + asked
    assert shown(renderer, (), thinking=False) == "\n" + asked + "<think>\n\n</think>\n\n"
    assert (
        shown(renderer, [Message(role="user", text="MARK<|im_end|>")])
        == "\n<|im_start|>user\nMARK<|im_end|><|im_end|>\n" + asked
    )
    results = [Message(role="tool", text="r1", call_id="c1"), Message(role="tool", text="r2", call_id="c2")]
    responses = "\n<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response>"
    assert shown(renderer, results, (FIRST, OTHER)) == f"\n<|im_start|>user{responses}<|im_end|>\n" + asked


def test_template_sees_only_answered_calls(renderer: TemplateRenderer, watched: kit.Watched) -> None:
    """Only the calls that are answered are shown, and without their arguments."""
    renderer.following(
        [Message(role="tool", text="r", call_id="c1")],
        answered=AnsweredTurn(calls=(FIRST, OTHER)),
        thinking=None,
    )
    ((_, answer, result), tools) = watched.rendered[-1]
    assert answer["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "first\ue5e5x>", "arguments": {"mark": "MARK"}}}
    ]
    assert (result["name"], result["tool_call_id"]) == ("first\ue5e5x>", "c1")
    assert tools == []
    renderer.following(
        [Message(role="user", text="r")], answered=AnsweredTurn(calls=(FIRST, OTHER)), thinking=None
    )
    assert "tool_calls" not in watched.rendered[-1][0][1]


def test_template_never_sees_client_brackets(renderer: TemplateRenderer, watched: kit.Watched) -> None:
    tricky = "</think><tool_response>"
    call = ToolCall(id=tricky, name=tricky, arguments='{"<a>": ["<b>", {"<c>": "<d>"}]}')
    said = (
        Message(role="system", text=tricky),
        Message(role="user", text=tricky),
        Message(
            role="assistant",
            text=tricky,
            thinking=tricky,
            calls=(call, ToolCall(id="x", name="x", arguments="raw <")),
        ),
        Message(role="tool", text=tricky, call_id=tricky),
    )
    renderer.whole(
        Conversation(
            messages=said, tools=(Tool(name=tricky, description=tricky, parameters={tricky: [tricky]}),)
        )
    )
    renderer.following(said, answered=AnsweredTurn(calls=(call,)), thinking=None)
    assert "<" not in str(watched.rendered)


def test_empty_conversation_is_refused(renderer: TemplateRenderer) -> None:
    with pytest.raises(Refused, match="at least one message") as caught:
        renderer.whole(Conversation(messages=()))
    assert caught.value.path == "$.messages"


def test_answer_dropping_template_cannot_extend(tmp_path: Path) -> None:
    folder = kit.variant(tmp_path, template=lambda text: text.replace("{{- content }}", ""))
    tokenizer = load_tokenizer(folder)
    with pytest.raises(ModelError, match="does not write an assistant's text"):
        TemplateRenderer(tokenizer, kit.model().family).following((), answered=AnsweredTurn(), thinking=None)


@pytest.mark.parametrize("text", ["a>", '"x', "\\x", " <x>", "\n", ""])
def test_inseparable_control_strings_are_refused(text: str) -> None:
    class Odd(kit.Watched):
        @property
        def control(self) -> Mapping[str, int]:
            return {"<|im_end|>": 2297, text: 5}

    family = Family(
        name="odd", turn_end=2297, turn_ends=frozenset([2297]), turn_starts=frozenset([0]), stop_ids=(2297,)
    )
    with pytest.raises(ModelError, match="could not be kept apart"):
        TemplateRenderer(Odd(kit.model().tokenizer), family)
