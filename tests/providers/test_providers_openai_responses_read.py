"""Responses: a request becomes the conversation its client wrote, and what is asked of the engine."""

import json
from typing import Any

import pytest

from polarnode.core.conversation import Constraint, Message, ModelRequest, Sampling, ToolCall
from polarnode.core.errors import Refused
from polarnode.gateway.earlier_requests import SessionMemory
from polarnode.providers.contract import Operation, RequestEnvelope
from polarnode.providers.openai_responses import OPENAI_RESPONSES
from polarnode.providers.openai_responses.history import INSTRUCTION
from polarnode.providers.openai_responses.read import read

GO: dict[str, Any] = {"type": "function", "name": "go", "parameters": {"type": "object"}}


def asked(
    *, operation: Operation = "generate", memory: SessionMemory | None = None, **changes: Any
) -> ModelRequest:
    body = {
        key: value for key, value in ({"model": "m", "input": "hi"} | changes).items() if value is not ...
    }
    return read(
        json.dumps(body).encode(), RequestEnvelope(operation=operation, memory=memory or SessionMemory())
    )


def refused(**changes: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        asked(**changes)
    return caught.value


def test_input_string_or_items() -> None:
    assert asked().conversation.messages == (Message(role="user", text="hi"),)
    assert asked(input=[{"role": "user", "content": "hi"}]).conversation == asked().conversation
    assert asked(input="").conversation.messages == (Message(role="user"),)


def test_instructions_come_first() -> None:
    found = asked(
        instructions="Code.", input=[{"role": "developer", "content": "x"}, {"role": "user", "content": "hi"}]
    )
    assert [(message.role, message.text) for message in found.conversation.messages] == [
        ("system", "Code."),
        ("system", "x"),
        ("user", "hi"),
    ]
    assert (
        asked(instructions="").conversation == asked(instructions=None).conversation == asked().conversation
    )


@pytest.mark.parametrize("said", [None, [], ...])
def test_empty_input_is_refused(said: Any) -> None:
    assert (str(refused(input=said)), refused(input=said).path) == (
        "input is empty: send at least one item",
        "$.input",
    )


def test_prewarm_may_have_no_input() -> None:
    """A client that only warms its connection may say nothing."""
    found = asked(input=[], generate=False)
    assert (found.generate, found.conversation.messages) == (False, ())
    assert asked().generate is asked(generate=None).generate is asked(generate=True).generate is True


def test_sampling_is_what_client_said() -> None:
    assert asked().sampling == Sampling()
    assert asked(temperature=0, top_p=0.9, max_output_tokens=5).sampling == Sampling(
        temperature=0, top_p=0.9, max_tokens=5
    )
    assert asked(max_output_tokens=4096.0).sampling.max_tokens == 4096


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"model": None}, "$.model"),
        ({"input": 5}, "$.input"),
        ({"input": ["x"]}, "$.input[0]"),
        ({"temperature": 3}, "$.temperature"),
        ({"top_p": 0}, "$.top_p"),
        ({"max_output_tokens": 0}, "$.max_output_tokens"),
        ({"top_logprobs": 21}, "$.top_logprobs"),
        ({"stream": "yes"}, "$.stream"),
        ({"store": "no"}, "$.store"),
        ({"include": "x"}, "$.include"),
        ({"background": True}, "$.background"),
        ({"conversation": "conv_1"}, "$.conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "$.prompt"),
        ({"previous_response_id": "resp_1"}, "$.previous_response_id"),
        ({"text": {"format": {"type": "xml"}}}, "$.text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "$.text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "$.text.format.schema"),
        ({"reasoning": {"effort": 5}}, "$.reasoning.effort"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "$.tool_choice"),
        ({"tool_choice": "any"}, "$.tool_choice"),
        ({"tools": [{"type": "function"}]}, "$.tools[0].name"),
        ({"tools": ["x"]}, "$.tools[0]"),
    ],
)
def test_malformed_setting_refused_with_path(changes: dict[str, Any], path: str) -> None:
    error = refused(**changes)
    assert error.path == path
    assert str(error)


def test_unknown_fields_are_named() -> None:
    found = asked(
        stream_options={"include_obfuscation": False},
        prompt_cache_retention="24h",
        stop=["x"],
        n=2,
        new=None,
        text={"verbosity": "low"},
    )
    assert found.ignored == (
        "$.stream_options",
        "$.prompt_cache_retention",
        "$.stop",
        "$.n",
        "$.text.verbosity",
    )
    said: dict[str, Any] = {
        "client_metadata": {},
        "metadata": {"a": "b"},
        "user": "u",
        "service_tier": "flex",
        "prompt_cache_key": "k",
        "max_tool_calls": 1,
    }
    assert (
        asked(**said, background=False, reasoning={"context": "all_turns", "summary": "auto"}).ignored == ()
    )


@pytest.mark.parametrize(
    ("effort", "thinking"),
    [
        ({}, None),
        ({"effort": "none"}, False),
        ({"effort": "high"}, None),
        ({"effort": None}, None),
        (None, None),
    ],
)
def test_only_explicit_words_switch_thinking(effort: Any, thinking: bool | None) -> None:
    """Thinking is switched only by a client that says so."""
    assert asked(reasoning=effort).conversation.thinking is thinking


def test_text_format_is_a_constraint() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    assert asked(
        text={"format": {"type": "json_schema", "name": "x", "strict": True, "schema": schema}}
    ).constraint == Constraint(kind="json_schema", text='{"type":"object","properties":{"z":{},"a":{}}}')
    assert asked(text={"format": {"type": "json_object"}}).constraint == Constraint(
        kind="json_schema", text='{"type":"object"}'
    )
    for text in (None, {}, {"format": None}, {"format": {"type": "text"}}):
        assert asked(text=text).constraint is None


def test_logprobs_follow_the_include() -> None:
    asks: dict[str, Any] = {"include": ["message.output_text.logprobs", "file_search_call.results"]}
    assert asked().logprobs is None
    assert (asked(**asks).logprobs, asked(**asks, top_logprobs=5).logprobs) == (0, 5)
    assert (asked(top_logprobs=5).logprobs, asked(top_logprobs=5).ignored) == (None, ("$.top_logprobs",))


def test_parallel_calls_off_is_one_call() -> None:
    assert [asked(parallel_tool_calls=said).one_call for said in (None, True, False)] == [False, False, True]


def test_truncation_auto_is_noted() -> None:
    assert asked(truncation="disabled").notes == ()
    assert asked(truncation="auto").notes == (
        "truncation 'auto' was asked: nothing is ever dropped, a conversation that is too long is refused",
    )


def test_codex_tools_as_item() -> None:
    tools = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [{"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]}],
    }
    late = {
        "type": "tool_search_output",
        "call_id": "c",
        "execution": "client",
        "tools": [GO | {"name": "late"}],
    }
    found = asked(
        input=[tools, {"role": "user", "content": "hi"}, late],
        tools=[GO, {"type": "web_search"}],
        tool_choice={"type": "function", "name": "late"},
    )
    assert [tool.name for tool in found.conversation.tools] == ["go", "exec"]
    assert found.conversation.tool_choice == "late"
    assert found.extras["later"] == {"late": {}}
    assert found.ignored == ("$.tools[1]",)


def test_asked_name_is_kept() -> None:
    assert (asked().model, asked().provider) == ("m", "openai_responses")
    assert (
        read(b'{"input": "hi"}', RequestEnvelope(model="from-path", operation="count_tokens")).model
        == "from-path"
    )


def test_echo_has_settings_and_defaults() -> None:
    echo: Any = asked().extras["echo"]
    assert (echo["store"], echo["tools"], echo["text"], echo["temperature"]) == (
        True,
        [],
        {"format": {"type": "text"}},
        1.0,
    )
    echo = asked(
        tools=[GO], store=False, metadata={"a": "b"}, text={"verbosity": "low"}, reasoning={"effort": "low"}
    ).extras["echo"]
    assert (echo["store"], echo["tools"], echo["metadata"]) == (False, [GO], {"a": "b"})
    assert (echo["text"], echo["reasoning"]) == (
        {"format": {"type": "text"}, "verbosity": "low"},
        {"effort": "low", "summary": None},
    )


def test_openclaw_last_message_dropped() -> None:
    """OpenClaw's message about the moment is dropped."""
    moment = (
        "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nActive exec sessions:"
        " none\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    )
    found = asked(
        input=[
            {"role": "user", "content": "hi"},
            {"role": "user", "content": [{"type": "input_text", "text": moment}]},
        ]
    )
    assert (found.conversation, found.ignored) == (asked().conversation, ("$.input[-1]",))


# ── what is remembered ────────────────────────────────────────────────────────


def test_foreign_item_reference_is_ignored() -> None:
    found = asked(
        input=[{"role": "user", "content": "hi"}, {"type": "item_reference", "id": "msg_1"}, {"id": "rs_1"}]
    )
    assert (len(found.conversation.messages), found.ignored) == (1, ("$.input[1]", "$.input[2]"))


def test_only_stored_request_is_remembered() -> None:
    """Only a request that is to be stored is prepared for it."""
    assert "keeps" in asked().extras
    assert "keeps" not in asked(store=False).extras
    assert "keeps" not in asked(operation="count_tokens").extras


# ── compaction ────────────────────────────────────────────────────────────────

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
    {"type": "function_call", "call_id": "call_1", "name": "go", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "ok"},
]


def test_trigger_asks_for_summary() -> None:
    """A trigger asks for a summary of what was said."""
    before = asked(input=TALK, tools=[GO], stream=True).conversation
    found = asked(
        input=[*TALK, {"type": "compaction_trigger"}],
        tools=[GO],
        stream=True,
        tool_choice="required",
        text={"format": {"type": "json_object"}},
    )
    assert found.conversation.messages == (*before.messages, Message(role="user", text=INSTRUCTION))
    assert (found.conversation.tools, found.conversation.tool_choice) == (before.tools, "none")
    assert (found.hints["kind"], found.constraint, found.stream, found.extras["compacts"]) == (
        "compaction",
        None,
        True,
        True,
    )
    assert found.conversation.messages[1].calls == (ToolCall(id="call_1", name="go", arguments="{}"),)


def test_compact_path_asks_summary() -> None:
    found = asked(input=TALK, instructions="Code.", operation="compact", model=None, stream=True)
    assert found.conversation.messages[-1].text == INSTRUCTION
    assert (found.stream, found.extras["sent"], found.hints["kind"]) == (False, [TALK[0]], "compaction")
    both = asked(input=[*TALK, {"type": "compaction_trigger"}], operation="compact")
    assert [message.text for message in both.conversation.messages].count(INSTRUCTION) == 1


def test_lone_trigger_is_refused() -> None:
    """A trigger alone has nothing to sum up."""
    assert refused(input=[{"type": "compaction_trigger"}]).path == "$.input"


def test_dialect_uses_this_reader() -> None:
    assert OPENAI_RESPONSES.read(b'{"model":"m","input":"hi"}', RequestEnvelope()) == asked()
