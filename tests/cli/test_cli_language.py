"""What a model speaks, in words: one line a thing, for families that differ in it."""

from typing import get_args

import pytest
from family_fixtures import FAMILIES, family_folder
from rich.console import Console

from polarnode.cli.doctor import _SYNTAX_DESCRIPTIONS, language, rows
from polarnode.tokens.families import CallSyntax
from polarnode.tokens.template import load_model


def told(name: str) -> dict[str, str]:
    return dict(rows(load_model(family_folder(name))))


def test_every_call_syntax_has_words() -> None:
    assert set(_SYNTAX_DESCRIPTIONS) == set(get_args(CallSyntax))


def test_model_that_supports_everything() -> None:
    said = told("qwen3")
    assert list(said) == [
        "family",
        "vocabulary",
        "ends a turn",
        "calls",
        "thinking",
        "earlier thinking",
        "refuses",
    ]
    assert said["family"] == "qwen3"
    assert "ids, 13 of them control tokens; byte-level BPE" in said["vocabulary"]
    assert said["ends a turn"].startswith("<|im_end|> (")
    assert said["calls"] == 'JSON, {"name": …, "arguments": {…}}, after <tool_call>'
    assert said["thinking"] == "<think> to </think>; the model opens it"
    assert said["earlier thinking"].startswith(
        "dropped by the template before user messages; sampled thinking is kept"
    )
    assert said["refuses"].startswith("nothing")


def test_thought_opened_by_prompt() -> None:
    assert (
        told("qwen3_6")["thinking"]
        == "<think> to </think>; the prompt opens it, with thinking off it does not"
    )


def test_unmarked_turn_and_multiple_call_marks() -> None:
    assert "the next header ends a turn" in told("glm4")[""]
    assert told("kimi_k2")["calls"].endswith("after <|tool_calls_section_begin|> <|tool_call_begin|>")


def test_template_limits_are_listed() -> None:
    assert told("gptoss")["refuses"] == "results of several calls in one turn"
    assert "system messages after the first user message" in told("gemma3")["refuses"]
    plain = told("llama3")
    assert plain["calls"] == "none: the model cannot call tools"
    assert plain["thinking"] == "none: it has no thinking tokens"
    assert "earlier thinking" not in plain
    assert plain["refuses"].startswith("tools, tool calls")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in ("gemma4", "deepseek_v3")])
def test_table_folds_in_narrow_terminal(name: str) -> None:
    console = Console(width=60, record=True)
    console.print(language(load_model(family_folder(name))))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 60
    assert any(line.strip().startswith("family") for line in lines)
