"""Anthropic Messages: tools, settings, and who asks."""

import json
from typing import Any

import pytest

from polarnode.conversation import Message, ModelRequest, Sampling, Tool
from polarnode.errors import Refused
from polarnode.providers.anthropic.read import read

HI = {"role": "user", "content": "hi"}
GO = {"name": "go", "description": "Goes.", "input_schema": {"type": "object", "properties": {"z": {}, "a": {}}}}


def asked(*, headers: dict[str, str] | None = None, model: str | None = None, counting: bool = False, **changes: Any) -> ModelRequest:
    body = {"model": "m", "messages": [HI], "max_tokens": 9} | changes
    return read(json.dumps(body).encode(), headers=headers or {}, model=model, counting=counting)


def test_a_plain_request() -> None:
    request = asked(system="You code.")
    assert (request.provider, request.model, request.stream, request.ignored) == ("anthropic", "m", False, ())
    assert request.conversation.messages == (Message(role="system", text="You code."), Message(role="user", text="hi"))
    assert (request.conversation.tool_choice, request.conversation.thinking) == ("auto", None)
    assert asked(model="from-path", stream=True).model == "from-path"
    assert asked(stream=True).stream


def test_14_15_hosted_tools_are_dropped_and_deferred_ones_wait() -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, GO, {"type": "bash_20250124", "name": "bash"}]
    tools += [GO | {"name": "later", "defer_loading": True}, GO | {"name": "now", "defer_loading": False, "type": "custom"}]
    request = asked(tools=tools)
    assert request.conversation.tools[0] == Tool(name="go", description="Goes.", parameters=GO["input_schema"])  # type: ignore[arg-type]
    assert [tool.name for tool in request.conversation.tools] == ["go", "now"]
    assert request.ignored == ("$.tools[0]", "$.tools[2]", "$.tools[3]")


def test_14_15_a_deferred_tool_is_shown_from_its_reference_on_in_its_place() -> None:
    tools = [GO | {"name": "later", "defer_loading": True}, GO, GO | {"name": "never", "defer_loading": True}]
    reference = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "tool_reference", "tool_name": "later"}]}
    request = asked(tools=tools, messages=[HI, {"role": "user", "content": [reference]}])
    assert [tool.name for tool in request.conversation.tools] == ["later", "go"]
    assert request.ignored == ("$.tools[2]",)


@pytest.mark.parametrize(
    ("choice", "word"),
    [
        (None, "auto"),
        ({"type": "auto"}, "auto"),
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "go"}, "go"),
    ],
)
def test_tool_choice(choice: Any, word: str) -> None:
    assert asked(tools=[GO], tool_choice=choice).conversation.tool_choice == word


@pytest.mark.parametrize(
    ("said", "thinking"),
    [
        (None, None),
        ({"type": "adaptive", "display": "omitted"}, None),
        ({"type": "enabled", "budget_tokens": 9}, True),
        ({"type": "disabled"}, False),
    ],
)
def test_thinking_is_switched_only_by_who_says_so(said: Any, thinking: bool | None) -> None:
    assert asked(thinking=said).conversation.thinking is thinking


def test_sampling_says_what_the_client_said() -> None:
    assert asked().sampling == Sampling(max_tokens=9)
    assert asked(temperature=1, top_p=0.5, top_k=3, stop_sequences=["a", "b"]).sampling == Sampling(
        temperature=1.0, top_p=0.5, top_k=3, max_tokens=9, stop=("a", "b")
    )
    assert asked(top_k=0).sampling.top_k is None


def test_max_tokens_is_required_but_for_counting() -> None:
    assert asked(max_tokens=None, counting=True).sampling == Sampling()
    with pytest.raises(Refused, match="max_tokens is missing"):
        asked(max_tokens=None)


@pytest.mark.parametrize(
    ("headers", "hints"),
    [
        ({}, {}),
        ({"x-claude-code-session-id": "s"}, {"session": "s", "agent": "", "parent": ""}),
        (
            {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a", "x-claude-code-parent-agent-id": "p"},
            {"session": "s", "agent": "a", "parent": "p"},
        ),
    ],
)
def test_14_18_headers_say_which_agent_asks(headers: dict[str, str], hints: dict[str, str]) -> None:
    assert asked(headers=headers).hints == hints


def test_a_volatile_line_is_named_among_what_was_left_out() -> None:
    assert asked(system="x-anthropic-billing-header: cch=1;\nYou code.", metadata={}).ignored == ("$.metadata", "$.system")


def test_two_requests_that_differ_by_a_nonce_are_the_same_conversation() -> None:
    one, two = (asked(system=f"x-anthropic-billing-header: cch={nonce};\nYou code.") for nonce in ("5d1", "77a"))
    assert one.conversation == two.conversation
