"""Tools that take plain text: in and out again, and what cannot be parsed is passed on unchanged."""

import json

import pytest

from polarnode.providers import openai


@pytest.mark.parametrize("text", ["", "*** Begin Patch\n+ü\n", '{"input": "x"}', "\u2028"])
def test_a_text_comes_out_as_it_went_in(text: str) -> None:
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
def test_what_can_not_be_taken_apart_is_handed_on_as_it_is(arguments: str) -> None:
    assert openai.text_of(arguments) == arguments


def test_the_model_is_shown_a_function_of_one_string_with_its_grammar() -> None:
    tool = openai.tool("apply_patch", "Edits.", openai.grammar_text("start: x", "lark"))
    assert json.loads(json.dumps(dict(tool.parameters)))["required"] == ["input"]
    assert tool.description == "Edits.\n\nThe input must follow this lark grammar:\nstart: x"
    assert openai.tool("plain", None, "").description == ""
