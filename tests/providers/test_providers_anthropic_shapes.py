"""Anthropic Messages: what is refused, each with its path and one sentence, and what is taken though we do
not know it.
"""

import json
from typing import Any

import pytest
from attrs import fields

from polarnode.core.codec import structure
from polarnode.core.errors import Refused
from polarnode.providers.anthropic import ANTHROPIC
from polarnode.providers.anthropic.shapes import MessagesRequest
from polarnode.providers.contract import RequestEnvelope

HI: dict[str, Any] = {"role": "user", "content": "hi"}


def refusal(**changes: Any) -> tuple[str, str | None]:
    body = {"model": "m", "messages": [HI], "max_tokens": 9} | changes
    with pytest.raises(Refused) as caught:
        ANTHROPIC.read(json.dumps(body).encode(), RequestEnvelope())
    return str(caught.value), caught.value.path


@pytest.mark.parametrize(
    ("changes", "path", "sentence"),
    [
        ({"model": 1}, "$.model", "model must be a string, not a number"),
        ({"messages": []}, "$.messages", "messages is empty: send at least one"),
        ({"max_tokens": None}, "$.max_tokens", "max_tokens is missing: it is required"),
        ({"max_tokens": 0}, "$.max_tokens", "max_tokens must be at least 1, not 0"),
        ({"temperature": 1.5}, "$.temperature", "temperature must be from 0 to 1, not 1.5"),
        ({"top_p": 0}, "$.top_p", "top_p must be above 0 and at most 1, not 0.0"),
        ({"stop_sequences": [""]}, "$.stop_sequences", "stop_sequences holds an empty string: remove it"),
        ({"system": [{"type": "image"}]}, "$.system[0].type", "system[0].type must be 'text', not 'image'"),
        (
            {"thinking": {"type": "much"}},
            "$.thinking.type",
            "thinking.type must be one of 'enabled', 'disabled', 'adaptive', not 'much'",
        ),
        (
            {"tools": [{"name": "go"}]},
            "$.tools[0].input_schema",
            "tools[0].input_schema is missing: it is required",
        ),
        ({"tools": [{"input_schema": {}}]}, "$.tools[0].name", "tools[0].name is missing: it is required"),
        (
            {"tool_choice": {"type": "tool"}},
            "$.tool_choice.name",
            "tool_choice.name is missing: it is required",
        ),
        (
            {"tool_choice": {"type": "tool", "name": "go"}},
            "$.tool_choice.name",
            "tool_choice names 'go', which is not among the tools: add it",
        ),
    ],
)
def test_unsupported_setting_is_refused(changes: dict[str, Any], path: str, sentence: str) -> None:
    assert refusal(**changes) == (sentence, path)


RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "go"}


@pytest.mark.parametrize(
    ("role", "block", "path", "sentence"),
    [
        ("user", {"type": "image", "source": {}}, "", "this model reads text only: remove the image part"),
        (
            "user",
            {"type": "document", "source": {"type": "file", "file_id": "f"}},
            ".source.type",
            "this model reads text only: send the document as text, not as file",
        ),
        ("user", {"type": "text"}, ".text", "messages[1].content[0].text is missing: it is required"),
        (
            "user",
            {"type": "tool_result", "tool_use_id": 5},
            ".tool_use_id",
            "messages[1].content[0].tool_use_id must be a string or null, not a number",
        ),
        (
            "assistant",
            {"type": "tool_use", "id": "c"},
            ".name",
            "messages[1].content[0].name is missing: it is required",
        ),
    ],
)
def test_unsupported_block_is_refused(role: str, block: dict[str, Any], path: str, sentence: str) -> None:
    """A block that cannot be shown to the model is refused."""
    assert refusal(messages=[HI, {"role": role, "content": [block]}]) == (
        sentence,
        "$.messages[1].content[0]" + path,
    )


def test_unknown_block_refusal_lists_known() -> None:
    sentence, path = refusal(messages=[{"role": "assistant", "content": [{"type": "hologram", "id": "a"}]}])
    assert path == "$.messages[0].content[0]"
    assert "'thinking', 'tool_search_tool_result', 'tool_use', " in sentence
    assert "not 'hologram'" in sentence


def test_unknown_fields_at_every_depth() -> None:
    """Unknown fields are taken at every depth."""
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "citations": None}
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": [block], "id": "x"}],
        "metadata": {"user_id": "u"},
    }
    body |= {
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
        "thinking": {"type": "adaptive", "display": "omitted"},
    }
    read = ANTHROPIC.read(
        json.dumps(body).encode(), RequestEnvelope(headers={"anthropic-beta": "of-tomorrow-2030-01-01"})
    )
    assert read.ignored == ("$.metadata", "$.context_management", "$.output_config.effort")


def test_optional_fields_may_be_null() -> None:
    """Every field but the model and the messages may be null."""
    nulls: dict[str, Any] = {str(field.alias): None for field in fields(MessagesRequest)}
    request = structure(nulls | {"model": "m", "messages": [HI]}, MessagesRequest)
    assert request == structure({"model": "m", "messages": [HI]}, MessagesRequest)
