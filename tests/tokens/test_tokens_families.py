"""Families are recognised by what a template does, and unknown ones are refused."""

from pathlib import Path

import pytest
import tokens_kit as kit

from polarnode.core.errors import ModelError
from polarnode.tokens.families import Family, Mode, TemplateManner, family_of
from polarnode.tokens.tokenizer import load_tokenizer


def test_tiny_model_is_qwen3() -> None:
    tiny = kit.model()
    number = tiny.tokenizer.control
    assert tiny.family == Family(
        name="qwen3",
        turn_end=number["<|im_end|>"],
        turn_ends=frozenset([number["<|im_end|>"]]),
        turn_starts=frozenset([number["<|im_start|>"]]),
        stop_ids=(number["<|im_end|>"], number["<|endoftext|>"]),
        think_open=number["<think>"],
        think_close=number["</think>"],
        call_open=number["<tool_call>"],
        call_close=number["</tool_call>"],
        call_syntax="json",
        call_in_thought="line",
        manner=TemplateManner(arguments="either"),
    )


def test_real_qwen3_is_recognised(qwen3_folder: Path) -> None:
    family = kit.model(qwen3_folder).family
    assert (family.name, family.stop_ids, family.call_open, family.think_close) == (
        "qwen3",
        (151645, 151643),
        151657,
        151668,
    )


def test_thought_opening_template_is_qwen3(tmp_path: Path) -> None:
    assert family_of(load_tokenizer(prefilled(tmp_path))).name == "qwen3"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            '<tool_call>\\n{"name": "\' + call.name',
            "<tool_call>\\n<function=' + call.name",
            id="calls as XML",
        ),
        pytest.param(
            "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking",
            "{{- 'Assistant:' }}{%- if enable_thinking",
            id="prompt",
        ),
        pytest.param(
            "{%- if tools %}",
            "{%- if true %}{{- raise_exception('no') }}{%- endif %}{%- if tools %}",
            id="refuses the probe",
        ),
        pytest.param("{%- if tools %}", "{{- 1 + 'x' }}{%- if tools %}", id="fails on the probe"),
    ],
)
def test_changed_template_is_unknown_family(tmp_path: Path, before: str, after: str) -> None:
    tokenizer = load_tokenizer(kit.variant(tmp_path, template=lambda text: text.replace(before, after)))
    with pytest.raises(ModelError, match=r"no family polarnode knows \(qwen3, .*describe it"):
        family_of(tokenizer)


def test_missing_control_tokens_are_unknown_family(tmp_path: Path) -> None:
    folder = kit.variant(tmp_path, tokenizer=lambda tokenizer: tokenizer["added_tokens"].pop())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert family_of(load_tokenizer(folder)).name == "qwen3", "the tool response's mark is not needed"
    folder = kit.variant(
        tmp_path, tokenizer=lambda tokenizer: tokenizer.update(added_tokens=tokenizer["added_tokens"][:5])
    )
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ModelError, match="no family"):
        family_of(load_tokenizer(folder))


@pytest.mark.parametrize(
    ("mode", "text", "after"),
    [
        ("text", "<think>", "thinking"),
        ("text", "</think>", "text"),
        ("text", "<tool_call>", "call"),
        ("text", "</tool_call>", "text"),
        ("thinking", "<think>", "thinking"),
        ("thinking", "</think>", "text"),
        ("thinking", "<tool_call>", "thinking"),
        ("thinking", "</tool_call>", "thinking"),
        ("call", "<think>", "call"),
        ("call", "</think>", "call"),
        ("call", "<tool_call>", "call"),
        ("call", "</tool_call>", "text"),
        ("call", "<|im_start|>", "call"),
    ],
)
def test_mark_changes_only_some_modes(mode: Mode, text: str, after: Mode) -> None:
    """A mark means something only where it can."""
    tiny = kit.model()
    assert tiny.family.after(mode, tiny.tokenizer.control[text]) == after


def prefilled(to: Path) -> Path:
    """The tiny model with a template that begins every answer inside a thought, as Qwen3 2507 thinking has
    it.
    """
    before = "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking"
    return kit.variant(
        to,
        template=lambda text: text.replace(
            before, "{{- '<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable_thinking"
        ),
    )
