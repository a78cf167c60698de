"""Chat Completions: a request becomes the conversation its client wrote."""

import json
from typing import Any

import pytest
from attrs import validators

from polarnode.core.conversation import Constraint, Message, ModelRequest, Sampling, ToolCall
from polarnode.core.errors import Refused
from polarnode.providers.openai_chat.read import read

HI = {"role": "user", "content": "hi"}


def asked(*, headers: dict[str, str] | None = None, model: str | None = None, **changes: Any) -> ModelRequest:
    body = {"model": "m", "messages": [HI]} | changes
    return read(json.dumps(body).encode(), headers=headers or {}, model=model)


def told(*messages: dict[str, Any]) -> tuple[Message, ...]:
    return asked(messages=list(messages)).conversation.messages


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool", "assistant"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ([{"type": "text", "text": "plain"}], "plain"),
        (None, ""),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": ""}], ""),
    ],
)
def test_content_string_or_parts(role: str, content: Any, text: str) -> None:
    """Content is a string or parts, for every role."""
    shape = {"role": role, "content": content} | ({"tool_call_id": "call_1"} if role == "tool" else {})
    (message,) = told(shape)
    assert message.text == text
    assert message.role == ("system" if role == "developer" else role)
    assert message.call_id == ("call_1" if role == "tool" else None)


def test_message_without_content_is_empty() -> None:
    assert told({"role": "user"}, {"role": "assistant"}) == (Message(role="user"), Message(role="assistant"))


def test_assistant_parts_join_without_newline() -> None:
    """Parts are lines, but the parts of an answer are one text."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert told({"role": "user", "content": parts})[0].text == "a\nb"
    assert told({"role": "assistant", "content": parts})[0].text == "ab"
    assert told({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]})[0].text == "no"


def test_messages_keep_number_and_order() -> None:
    roles = ["system", "user", "user", "system", "assistant", "assistant", "developer"]
    found = told(*({"role": role, "content": str(index)} for index, role in enumerate(roles)))
    assert [message.role for message in found] == [
        "system",
        "user",
        "user",
        "system",
        "assistant",
        "assistant",
        "system",
    ]
    assert [message.text for message in found] == list("0123456")


def call(arguments: Any, **extra: Any) -> dict[str, Any]:
    return {"id": "call_a1", "type": "function", "function": {"name": "go", "arguments": arguments}, **extra}


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ('{"b": 1,  "a":2}', '{"b": 1,  "a":2}'),
        ("not json {", "not json {"),
        ("", ""),
        ({"b": 1, "a": [2.0]}, '{"b":1,"a":[2.0]}'),
        (None, "{}"),
    ],
)
def test_arguments_keep_client_spelling(written: Any, kept: str) -> None:
    """Arguments are kept as the client wrote them."""
    (message,) = told({"role": "assistant", "content": None, "tool_calls": [call(written, index=0)]})
    assert message.calls == (ToolCall(id="call_a1", name="go", arguments=kept),)
    assert message.refs == ("call_a1",)


def test_null_calls_equal_no_calls() -> None:
    assert told({"role": "assistant", "content": "x", "tool_calls": None}) == told(
        {"role": "assistant", "content": "x", "tool_calls": []}
    )


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thinking_under_either_field_name(field: str) -> None:
    assert told({"role": "assistant", "content": "x", field: "hm\n"})[0].thinking == "hm\n"
    assert told({"role": "assistant", "content": "x", field: {"effort": "low"}})[0].thinking == ""


def test_opaque_ids_are_references() -> None:
    """Every opaque id of an assistant message is a reference."""
    details = [
        {"type": "reasoning.encrypted", "data": "ZGF0YQ==", "id": "rs_1"},
        {"type": "reasoning.text", "text": "hm", "signature": "c2ln"},
        "odd",
    ]
    (message,) = told(
        {
            "role": "assistant",
            "tool_calls": [call("{}"), call("{}") | {"id": ""}],
            "reasoning_details": details,
        }
    )
    assert message.refs == ("call_a1", "rs_1", "ZGF0YQ==", "c2ln")


def test_sampling_is_what_client_said() -> None:
    assert asked().sampling == Sampling()
    said: dict[str, Any] = {
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "max_tokens": 5,
        "stop": "END",
        "seed": -1,
        "frequency_penalty": 1,
    }
    said |= {"presence_penalty": -1, "repetition_penalty": 1.1}
    assert asked(**said).sampling == Sampling(**(said | {"stop": ("END",)}))
    assert asked(stop=["a", "b"]).sampling.stop == ("a", "b")
    assert asked(max_tokens=5, max_completion_tokens=7).sampling.max_tokens == 7
    assert asked(top_k=0).sampling.top_k is asked(top_k=-1).sampling.top_k is None
    assert asked(max_tokens=4096.0).sampling.max_tokens == 4096


def test_choices_logprobs_and_one_call() -> None:
    """Settings ask for several answers, for logprobs and for one call at a time."""
    plain = asked()
    assert (plain.choices, plain.logprobs, plain.one_call, plain.constraint) == (1, None, False, None)
    assert asked(n=3).choices == 3
    assert (asked(logprobs=True).logprobs, asked(logprobs=True, top_logprobs=5).logprobs) == (0, 5)
    unasked = asked(logprobs=False, top_logprobs=5)
    assert (unasked.logprobs, unasked.ignored) == (None, ("$.top_logprobs",))
    assert (asked(parallel_tool_calls=False).one_call, asked(parallel_tool_calls=True).one_call) == (
        True,
        False,
    )


def test_schema_constrains_the_answer() -> None:
    assert asked(response_format={"type": "json_object"}).constraint == Constraint(
        kind="json_schema", text='{"type":"object"}'
    )


def test_echoed_refusal_is_text() -> None:
    assert told({"role": "assistant", "content": None, "refusal": "I can not."})[0].text == "I can not."
    assert told({"role": "assistant", "content": "x", "refusal": None})[0].text == "x"


def test_openclaw_last_message_dropped() -> None:
    """OpenClaw's last message is left out and named."""
    context = (
        "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nActive exec"
        " sessions:\nnone\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    )
    request = asked(messages=[HI, {"role": "user", "content": context}])
    assert request.conversation.messages == (Message(role="user", text="hi"),)
    assert request.ignored == ("$.messages[-1]",)


def test_streamed_usage_on_request() -> None:
    """Usage is streamed only when it is asked for."""
    assert (asked().stream, asked().include_usage) == (False, False)
    assert (asked(stream=True).stream, asked(stream=True).include_usage) == (True, False)
    assert asked(stream=True, stream_options={"include_usage": True}).include_usage
    assert not asked(stream=True, stream_options={"include_usage": False}).include_usage


def test_asked_name_is_kept() -> None:
    assert (asked().model, asked(model="from-path").model, asked().provider) == (
        "m",
        "from-path",
        "openai_chat",
    )


@pytest.mark.parametrize(
    ("headers", "hints"),
    [
        ({}, {}),
        ({"x-session-id": "s"}, {"session": "s", "agent": "", "parent": ""}),
        (
            {"x-session-id": "child", "x-parent-session-id": "s"},
            {"session": "child", "agent": "child", "parent": "s", "kind": "subagent"},
        ),
        ({"x-litellm-session-id": "c"}, {"session": "c", "agent": "", "parent": ""}),
    ],
)
def test_headers_name_the_agent(headers: dict[str, str], hints: dict[str, str]) -> None:
    assert asked(headers=headers).hints == hints


def test_part_without_text_is_refused() -> None:
    """Its shape refuses it with the path; this is the second lock, for whoever loosens the first."""
    with validators.disabled(), pytest.raises(Refused, match="reads text only"):
        told({"role": "user", "content": [{"type": "image_url"}]})


def test_echoed_call_without_id() -> None:
    """Harnesses keep no id where none was given (harnesses.md 12, `noid`), and their requests are served like
    any other.
    """
    bare = {"type": "function", "function": {"name": "go", "arguments": "{}"}}
    for echoed in (bare, bare | {"id": None}, bare | {"id": ""}):
        assistant, tool = told(
            {"role": "assistant", "tool_calls": [echoed]}, {"role": "tool", "content": "done"}
        )
        assert [made.id for made in assistant.calls] == [""]
        assert (assistant.refs, tool.call_id) == ((), None)
