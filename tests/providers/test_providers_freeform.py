"""Tools that take plain text: in and out again, and what cannot be parsed is passed on unchanged."""

import json

import pytest

from polarnode.providers import openai


@pytest.mark.parametrize("text", ["", "*** Begin Patch\n+ü\n", '{"input": "x"}', "\u2028"])
def test_text_survives_wrap_and_unwrap(text: str) -> None:
    """A text comes out as it went in."""
    assert openai.text_of(openai.arguments_of(text)) == text


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "not json",
        "[1]",
        '{"other": "x"}',
        '{"input": 5}',
        '{"input": "\\ud800"}',
        '{"input": "x", "n": 99999999999999999999}',
        '{"input": "x", "n": NaN}',
    ],
)
def test_unparsable_arguments_pass_unchanged(arguments: str) -> None:
    assert openai.text_of(arguments) == arguments


def test_freeform_tool_shown_as_function() -> None:
    """The model is shown a function of one string, with its grammar."""
    tool = openai.tool("apply_patch", "Edits.", openai.grammar_text("start: x", "lark"))
    assert json.loads(json.dumps(dict(tool.parameters)))["required"] == ["input"]
    assert tool.description == "Edits.\n\nThe input must follow this lark grammar:\nstart: x"
    assert openai.tool("plain", None, "").description == ""
