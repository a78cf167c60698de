"""Anthropic Messages: tools, settings, and who asks."""

import json
from typing import Any

import pytest

from polarnode.core.conversation import Constraint, Message, ModelRequest, Sampling, Tool
from polarnode.core.errors import Refused
from polarnode.providers.anthropic.read import read

HI = {"role": "user", "content": "hi"}
GO = {
    "name": "go",
    "description": "Goes.",
    "input_schema": {"type": "object", "properties": {"z": {}, "a": {}}},
}


def asked(
    *, headers: dict[str, str] | None = None, model: str | None = None, counting: bool = False, **changes: Any
) -> ModelRequest:
    body = {"model": "m", "messages": [HI], "max_tokens": 9} | changes
    return read(json.dumps(body).encode(), headers=headers or {}, model=model, counting=counting)


def test_plain_request_is_read() -> None:
    request = asked(system="You code.")
    assert (request.provider, request.model, request.stream, request.ignored) == ("anthropic", "m", False, ())
    assert request.conversation.messages == (
        Message(role="system", text="You code."),
        Message(role="user", text="hi"),
    )
    assert (request.conversation.tool_choice, request.conversation.thinking) == ("auto", None)
    assert asked(model="from-path", stream=True).model == "from-path"
    assert asked(stream=True).stream


def test_hosted_dropped_deferred_waits() -> None:
    """Hosted tools are dropped, and deferred ones wait."""
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        GO,
        {"type": "bash_20250124", "name": "bash"},
    ]
    tools += [
        GO | {"name": "later", "defer_loading": True},
        GO | {"name": "now", "defer_loading": False, "type": "custom"},
    ]
    request = asked(tools=tools)
    assert request.conversation.tools[0] == Tool(
        name="go", description="Goes.", parameters=GO["input_schema"]
    )  # type: ignore[arg-type]
    assert [tool.name for tool in request.conversation.tools] == ["go", "now"]
    assert request.ignored == ("$.tools[0]", "$.tools[2]", "$.tools[3]")


def test_deferred_tool_at_reference() -> None:
    """So the tools array may grow as the conversation does, and the prompt of each request begins with the
    one before.
    """
    later, never = (
        GO | {"name": "later", "defer_loading": True},
        GO | {"name": "never", "defer_loading": True},
    )
    reference = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "tool_reference", "tool_name": "later"}],
    }
    before = asked(tools=[GO])
    request = asked(tools=[later, GO, never], messages=[HI, {"role": "user", "content": [reference]}])
    assert request.conversation.tools == before.conversation.tools
    assert request.conversation.messages[:1] == before.conversation.messages
    assert request.conversation.messages[1].text.startswith(
        'Tool loaded: later\n{"type":"function","function":{"name":"later",'
    )
    assert request.ignored == ("$.tools[2]",)
    assert asked(
        tools=[later, GO],
        messages=[HI, {"role": "user", "content": [reference]}],
        tool_choice={"type": "tool", "name": "later"},
    )


def test_single_call_where_asked_for() -> None:
    assert not asked(tools=[GO], tool_choice={"type": "auto"}).one_call
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "go"}):
        assert asked(tools=[GO], tool_choice=choice | {"disable_parallel_tool_use": True}).one_call


@pytest.mark.parametrize("said", [{"output_config": {"effort": "high", "format": {}}}, {"output_format": {}}])
def test_schema_constrains_the_answer(said: dict[str, Any]) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    changes = {
        name: value | {"format": form} if name == "output_config" else form for name, value in said.items()
    }
    assert asked(**changes).constraint == Constraint(kind="json_schema", text='{"type":"object"}')


def test_unused_settings_are_named() -> None:
    """Settings that are read and change nothing are named."""
    request = asked(
        thinking={"type": "enabled", "budget_tokens": 2048},
        output_config={"effort": "high"},
        context_management={"edits": []},
        container="c",
        service_tier="auto",
        mcp_servers=[{"type": "url", "url": "https://x", "name": "x"}],
        messages=[
            HI,
            {"role": "assistant", "content": [{"type": "mcp_tool_use", "id": "m", "name": "x", "input": {}}]},
            HI,
        ],
    )
    assert set(request.ignored) == {
        "$.thinking.budget_tokens",
        "$.output_config.effort",
        "$.context_management",
        "$.container",
        "$.service_tier",
        "$.messages[1].content[0]",
    }
    assert request.notes == (
        "mcp_servers were given: this node connects to none, so the model does not see their tools",
        "the history holds tools that another server ran: their blocks are left out",
    )


def test_omitted_thinking_reaches_writer() -> None:
    """A setting that omits thinking reaches the writer."""
    assert asked(thinking={"type": "adaptive", "display": "omitted"}).extras == {"thinking": "omitted"}
    assert asked(thinking={"type": "adaptive", "display": "summarized"}).extras == {}


def test_openclaw_last_message_dropped() -> None:
    """OpenClaw's last message is left out and named."""
    context = (
        "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nActive exec"
        " sessions:\nnone\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    )
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"}
    request = asked(messages=[HI, {"role": "user", "content": [result, {"type": "text", "text": context}]}])
    assert [message.text for message in request.conversation.messages] == ["hi", "done"]
    assert request.ignored == ("$.messages[-1]",)


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
def test_tool_choice_words_and_notes(choice: Any, word: str) -> None:
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
def test_only_explicit_words_switch_thinking(said: Any, thinking: bool | None) -> None:
    """Thinking is switched only by a client that says so."""
    assert asked(thinking=said).conversation.thinking is thinking


def test_sampling_is_what_client_said() -> None:
    assert asked().sampling == Sampling(max_tokens=9)
    assert asked(temperature=1, top_p=0.5, top_k=3, stop_sequences=["a", "b"]).sampling == Sampling(
        temperature=1.0, top_p=0.5, top_k=3, max_tokens=9, stop=("a", "b")
    )
    assert asked(top_k=0).sampling.top_k is None


def test_max_tokens_required_except_counting() -> None:
    assert asked(max_tokens=None, counting=True).sampling == Sampling()
    with pytest.raises(Refused, match="max_tokens is missing"):
        asked(max_tokens=None)


@pytest.mark.parametrize(
    ("headers", "hints"),
    [
        ({}, {}),
        ({"x-claude-code-session-id": "s"}, {"session": "s", "agent": "", "parent": ""}),
        (
            {
                "x-claude-code-session-id": "s",
                "x-claude-code-agent-id": "a",
                "x-claude-code-parent-agent-id": "p",
            },
            {"session": "s", "agent": "a", "parent": "p", "kind": "subagent"},
        ),
        ({"x-session-id": "s"}, {"session": "s", "agent": "", "parent": ""}),
        (
            {"x-session-id": "c", "x-parent-session-id": "s"},
            {"session": "c", "agent": "c", "parent": "s", "kind": "subagent"},
        ),
    ],
)
def test_headers_name_the_agent(headers: dict[str, str], hints: dict[str, str]) -> None:
    assert asked(headers=headers).hints == hints


def test_volatile_line_is_named_ignored() -> None:
    """A volatile line is named among what was left out."""
    assert asked(system="x-anthropic-billing-header: cch=1;\nYou code.", metadata={}).ignored == (
        "$.metadata",
        "$.system",
    )


def test_nonce_leaves_conversation_equal() -> None:
    """Two requests that differ by a nonce are the same conversation."""
    one, two = (
        asked(system=f"x-anthropic-billing-header: cch={nonce};\nYou code.") for nonce in ("5d1", "77a")
    )
    assert one.conversation == two.conversation
