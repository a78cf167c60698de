"""The embedded default model is whole: its files, its tokenizer, its template, its shape.

Whether it solves tasks is measured by `examples/tiny_policy/evaluate.py`, not here.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

import polarnode

HERE = Path(polarnode.__path__[0]) / "models" / "tiny"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look <here>.",
        "parameters": {"type": "object", "required": ["b", "a"], "properties": {}},
    },
}
USER = {"role": "user", "content": "Hi"}
CALL = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Why not.",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"b": 1, "a": "é"}}}],
}
RESULT = {"role": "tool", "content": "a lake"}


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(HERE)


@cache
def model() -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(HERE)


def rendered(*messages: Mapping[str, object], **options: object) -> str:
    return str(tokenizer().apply_chat_template(list(messages), tokenize=False, **options))


def test_package_data_is_small() -> None:
    assert sum(path.stat().st_size for path in HERE.iterdir()) <= 8 * 2**20


def test_weights_are_small_float32_qwen3() -> None:
    assert isinstance(model(), Qwen3ForCausalLM)
    assert model().dtype == torch.float32
    assert sum(p.numel() for p in model().parameters()) < 3_000_000
    assert model().config.head_dim == 32
    assert model().config.tie_word_embeddings


def test_long_prompts_fit_its_context() -> None:
    assert model().config.max_position_embeddings == 65536
    assert json.loads((HERE / "tokenizer_config.json").read_text())["model_max_length"] == 65536


def test_generation_stops_at_turn_end() -> None:
    ends = [tokenizer().convert_tokens_to_ids(text) for text in ("<|im_end|>", "<|endoftext|>")]
    assert model().generation_config.eos_token_id == ends
    assert tokenizer().eos_token == "<|im_end|>"


@pytest.mark.parametrize("text", SPECIAL + MARKS)
def test_control_token_is_one_flagged_token(text: str) -> None:
    (number,) = tokenizer().encode(text)
    added = tokenizer().added_tokens_decoder[number]
    assert (added.content, added.special) == (text, text in SPECIAL)
    assert not any((added.lstrip, added.rstrip, added.normalized, added.single_word))


def test_every_token_has_an_embedding() -> None:
    assert len(tokenizer()) == model().config.vocab_size


def test_tools_keep_the_given_order() -> None:
    text = rendered({"role": "system", "content": "Be."}, USER, tools=[TOOL], add_generation_prompt=True)
    line = json.dumps(TOOL, ensure_ascii=False)
    assert text.startswith("<|im_start|>system\nBe.\n\n# Tools\n\nYou may call")
    assert f"<tools>\n{line}\n</tools>\n\nFor each" in text
    assert text.endswith("</tool_call><|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_prompt_without_tools_mentions_none() -> None:
    assert rendered(USER) == "<|im_start|>user\nHi<|im_end|>\n"


def test_thinking_can_be_switched_off() -> None:
    on = rendered(USER, add_generation_prompt=True)
    assert on.endswith("<|im_start|>assistant\n")
    assert rendered(USER, add_generation_prompt=True, enable_thinking=False) == on + "<think>\n\n</think>\n\n"


def test_thinking_and_calls_match_qwen3() -> None:
    """Thinking and calls are rendered as Qwen3 does, and kept."""
    text = rendered(USER, CALL, RESULT, USER)
    said = (
        "<|im_start|>assistant\n<think>\nWhy not.\n</think>\n\n"
        '<tool_call>\n{"name": "look", "arguments": {"b": 1, "a": "é"}}\n</tool_call><|im_end|>\n'
    )
    heard = "<|im_start|>user\n<tool_response>\na lake\n</tool_response><|im_end|>\n"
    assert text == rendered(USER) + said + heard + rendered(USER)


def test_parallel_results_share_a_turn() -> None:
    text = rendered(USER, CALL, RESULT, RESULT)
    one = "\n<tool_response>\na lake\n</tool_response>"
    assert text.endswith(f"<|im_start|>user{one}{one}<|im_end|>\n")


@pytest.mark.parametrize("more", [[RESULT], [USER], [RESULT, RESULT], [RESULT, USER]])
def test_later_messages_keep_the_prefix(more: list[Mapping[str, object]]) -> None:
    """Messages after a turn do not change the prompt before it."""
    assert rendered(USER, CALL, *more, tools=[TOOL]).startswith(rendered(USER, CALL, tools=[TOOL]))


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_survives(text: str) -> None:
    plain = tokenizer().backend_tokenizer
    written = plain.normalizer.normalize_str(text)
    assert tokenizer().decode(tokenizer().encode(text)) == written


def test_harmless_text_is_never_control() -> None:
    first = tokenizer().convert_tokens_to_ids("<|endoftext|>")
    assert max(tokenizer().encode("".join(map(chr, range(32, 1024))))) < first


def test_tiny_model_answers_a_prompt() -> None:
    ids = tokenizer().apply_chat_template(
        [USER], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model().generate(**ids, max_new_tokens=8)
    assert output.shape[1] > ids["input_ids"].shape[1]
