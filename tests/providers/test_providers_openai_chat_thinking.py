"""Chat Completions: whether to think, in everybody's words."""

import json
from typing import Any

import pytest

from polarnode.core.codec import structure
from polarnode.core.errors import Refused
from polarnode.providers.openai_chat.read import read, unused
from polarnode.providers.openai_chat.read import thinking as wanted
from polarnode.providers.openai_chat.shapes import ChatRequest


def asked(**changes: Any) -> Any:
    return read(
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]} | changes).encode(),
        headers={},
        model=None,
    )


@pytest.mark.parametrize(
    ("changes", "thinking", "ignored"),
    [
        ({}, None, ()),
        ({"enable_thinking": False}, False, ()),
        ({"enable_thinking": True, "reasoning_effort": "none"}, True, ()),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "other": 1}},
            False,
            ("$.chat_template_kwargs.other",),
        ),
        ({"chat_template_kwargs": {"thinking": True}}, True, ()),
        ({"chat_template_kwargs": {}}, None, ()),
        ({"thinking": {"type": "disabled"}}, False, ()),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, True, ()),
        ({"thinking": {"type": "auto"}}, None, ()),
        ({"reasoning": {"enabled": False}}, False, ()),
        ({"reasoning": {"effort": "none"}}, False, ()),
        ({"reasoning": {"effort": "high", "exclude": True}}, None, ("$.reasoning.effort",)),
        ({"reasoning_effort": "none"}, False, ()),
        ({"reasoning_effort": "high"}, None, ("$.reasoning_effort",)),
    ],
)
def test_only_explicit_words_switch_thinking(
    changes: dict[str, Any], thinking: bool | None, ignored: tuple[str, ...]
) -> None:
    """Thinking is switched only by a client that says so."""
    request = asked(**changes)
    assert (request.conversation.thinking, request.ignored) == (thinking, ignored)


def test_non_boolean_thinking_is_refused() -> None:
    with pytest.raises(Refused, match="enable_thinking must be true or false or null, not 'no'") as caught:
        asked(chat_template_kwargs={"enable_thinking": "no"})
    assert caught.value.path == "$.chat_template_kwargs.enable_thinking"


def test_unused_effort_is_named() -> None:
    shape = structure(
        {
            "model": "m",
            "messages": [{"role": "user"}],
            "reasoning_effort": "low",
            "thinking": {"type": "enabled"},
        },
        ChatRequest,
    )
    assert (wanted(shape), list(unused(shape))) == (True, ["$.reasoning_effort"])
