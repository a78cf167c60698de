"""Chat Completions: what is refused, each with its path and one sentence, and what is taken though we do not
know it.
"""

import json
from typing import Any

import pytest
from attrs import fields

from polarnode.core.codec import structure
from polarnode.core.errors import Refused
from polarnode.providers.contract import RequestEnvelope
from polarnode.providers.openai_chat import OPENAI_CHAT
from polarnode.providers.openai_chat.shapes import ChatRequest

HI: dict[str, Any] = {"role": "user", "content": "hi"}
OLD = "the function_call API of old is not served: use tools and tool_calls"


def refusal(**changes: Any) -> tuple[str, str | None]:
    body = {"model": "m", "messages": [HI]} | changes
    with pytest.raises(Refused) as caught:
        OPENAI_CHAT.read(json.dumps(body).encode(), RequestEnvelope())
    return str(caught.value), caught.value.path


@pytest.mark.parametrize(
    ("changes", "path", "sentence"),
    [
        ({"model": None}, "$.model", "model must be a string, not null"),
        ({"messages": None}, "$.messages", "messages must be a list, not null"),
        ({"messages": []}, "$.messages", "messages is empty: send at least one"),
        ({"temperature": 2.1}, "$.temperature", "temperature must be from 0 to 2, not 2.1"),
        ({"top_p": 0}, "$.top_p", "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_k": -2}, "$.top_k", "top_k must be at least -1, not -2"),
        ({"min_p": 2}, "$.min_p", "min_p must be from 0 to 1, not 2.0"),
        ({"frequency_penalty": 3}, "$.frequency_penalty", "frequency_penalty must be from -2 to 2, not 3.0"),
        (
            {"repetition_penalty": 1e-300},
            "$.repetition_penalty",
            "repetition_penalty must be from 0.01 to 2, not 1e-300",
        ),
        ({"max_tokens": 0}, "$.max_tokens", "max_tokens must be at least 1, not 0"),
        (
            {"max_completion_tokens": 1.5},
            "$.max_completion_tokens",
            "max_completion_tokens must be a whole number, not 1.5",
        ),
        ({"stop": ["", "x"]}, "$.stop", "stop holds an empty string: remove it"),
        ({"n": 9}, "$.n", "n must be from 1 to 8, not 9"),
        ({"n": 0}, "$.n", "n must be from 1 to 8, not 0"),
        (
            {"logprobs": True, "top_logprobs": 21},
            "$.top_logprobs",
            "top_logprobs must be from 0 to 20, not 21",
        ),
        ({"logprobs": 3}, "$.logprobs", "logprobs must be a boolean or null, not a number"),
        ({"stop": ["x"] * 65}, "$.stop", "stop holds 65 strings: send at most 64"),
        ({"stop": "x" * 1001}, "$.stop", "stop holds a string of more than 1000 characters: shorten it"),
        ({"top_k": 2**31}, "$.top_k", "top_k must be at most 2147483647, not 2147483648"),
        ({"max_tokens": 1e300}, "$.max_tokens", "max_tokens must be a whole number of at most 64 bits"),
        (
            {"seed": 2**63 - 1},
            "$.seed",
            f"seed must be from {1025 - 2**63} to {2**63 - 1025}, not {2**63 - 1}",
        ),
        (
            {"modalities": ["text", "audio"]},
            "$.modalities",
            "this model writes text only: send modalities ['text']",
        ),
        ({"functions": []}, "$.functions", OLD),
        ({"function_call": "auto"}, "$.function_call", OLD),
        (
            {"tool_choice": "some"},
            "$.tool_choice",
            "tool_choice must be one of 'auto', 'none', 'required', not 'some'",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "go"}}},
            "$.tool_choice.function.name",
            "tool_choice names 'go', which is not among the tools: add it",
        ),
        (
            {"tools": [{"type": "function"}]},
            "$.tools[0].function",
            "tools[0].function is missing: it is required",
        ),
        (
            {"tools": [{"type": "function", "function": {}}]},
            "$.tools[0].function.name",
            "tools[0].function.name is missing: it is required",
        ),
        (
            {"response_format": {"type": "structural_tag"}},
            "$.response_format.type",
            "response_format 'structural_tag' is not served: use 'json_schema', 'json_object' or 'text'",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "$.response_format.json_schema",
            "json_schema is missing: a response_format of this type needs it",
        ),
    ],
)
def test_unsupported_setting_is_refused(changes: dict[str, Any], path: str, sentence: str) -> None:
    assert refusal(**changes) == (sentence, path)


@pytest.mark.parametrize(
    ("message", "path", "sentence"),
    [
        (
            {"content": "x"},
            "$.messages[1]",
            "messages[1] needs 'role': one of 'assistant', 'developer', 'system', 'tool', 'user'",
        ),
        (
            {"role": "user", "content": 5},
            "$.messages[1].content",
            "messages[1].content must be a string or a list or null, not a number",
        ),
        (
            {"role": "tool", "tool_call_id": 1},
            "$.messages[1].tool_call_id",
            "messages[1].tool_call_id must be a string or null, not a number",
        ),
        ({"role": "assistant", "function_call": {"name": "x"}}, "$.messages[1].function_call", OLD),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]},
            "$.messages[1].tool_calls[0].function",
            "function is missing: a tool call has one, or a custom",
        ),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}],
            },
            "$.messages[1].content[1]",
            "this model reads text only: remove the image_url part",
        ),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "$.messages[1].content[0].text",
            "messages[1].content[0].text is missing: it is required",
        ),
    ],
)
def test_unsupported_message_is_refused(message: dict[str, Any], path: str, sentence: str) -> None:
    """A message that cannot be shown to the model is refused."""
    assert refusal(messages=[HI, message]) == (sentence, path)


def test_image_in_result_is_described() -> None:
    """An image that a tool found is described and ends nothing."""
    found = {
        "role": "tool",
        "tool_call_id": "c",
        "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "u"}}],
    }
    read = OPENAI_CHAT.read(json.dumps({"model": "m", "messages": [HI, found]}).encode(), RequestEnvelope())
    assert (
        read.conversation.messages[1].text
        == "see\n[image_url: not shown, because this model reads text only]"
    )


def test_unknown_role_refusal_lists_known() -> None:
    """An unknown role or part is told which are known."""
    sentence, path = refusal(messages=[{"role": "function", "name": "f", "content": "x"}])
    assert path == "$.messages[0]"
    assert "'assistant', 'developer', 'system', 'tool', 'user', not 'function'" in sentence
    sentence, path = refusal(messages=[{"role": "user", "content": [{"type": "hologram"}]}])
    assert path == "$.messages[0].content[0]"
    assert "not 'hologram'" in sentence


def test_unknown_fields_at_every_depth() -> None:
    """Unknown fields are taken at every depth."""
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part], "name": "n", "provider_specific_fields": {"refusal": None}}
    body = {
        "model": "m",
        "messages": [message],
        "store": False,
        "prompt_cache_key": "k",
        "logit_bias": {"1": 2},
        "metadata": {},
        "user": None,
    }
    read = OPENAI_CHAT.read(json.dumps(body).encode(), RequestEnvelope())
    assert read.ignored == ("$.store", "$.prompt_cache_key", "$.logit_bias", "$.metadata")


def test_optional_fields_may_be_null() -> None:
    """Every field but the model and the messages may be null."""
    nulls: dict[str, Any] = {str(field.alias): None for field in fields(ChatRequest)}
    request = structure(nulls | {"model": "m", "messages": [HI]}, ChatRequest)
    assert request == structure({"model": "m", "messages": [HI]}, ChatRequest)


def test_default_settings_are_not_noted() -> None:
    """Asking for text and for one answer is nothing special."""
    body = {
        "model": "m",
        "messages": [HI],
        "response_format": {"type": "text"},
        "n": 1,
        "modalities": ["text"],
        "functions": None,
        "tool_choice": "auto",
    }
    assert OPENAI_CHAT.read(json.dumps(body).encode(), RequestEnvelope()).ignored == ()
