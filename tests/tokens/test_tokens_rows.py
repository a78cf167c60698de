"""Every family's folder is of its own row and no other, and its marks are the strings the family is
known by.
"""

from functools import cache

import pytest
from family_fixtures import FAMILIES, family_folder

from polarnode.tokens.families import ROWS, Family, family_of, fits
from polarnode.tokens.tokenizer import LoadedTokenizer, load_tokenizer


@cache
def loaded(name: str) -> tuple[LoadedTokenizer, Family]:
    tokenizer = load_tokenizer(family_folder(name))
    return tokenizer, family_of(tokenizer)


def text(tokenizer: LoadedTokenizer, token: int | None) -> str | None:
    return None if token is None else tokenizer.token_bytes(token).decode()


def test_family_matches_only_its_row(family_name: str) -> None:
    assert [row.name for row in ROWS if fits(row, loaded(family_name)[0])] == [FAMILIES[family_name].row]


def test_every_row_has_own_fixture() -> None:
    """Every row has a fixture and a name of its own."""
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert {family.row for family in FAMILIES.values()} == {row.name for row in ROWS}


@pytest.mark.parametrize(
    ("name", "stops", "turn_end", "boundaries"),
    [
        ("qwen3_6", ["<|im_end|>", "<|endoftext|>"], "<|im_end|>", []),
        ("llama3_1", ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"], "<|eot_id|>", []),
        ("glm4", ["<|user|>", "<|observation|>", "<|endoftext|>"], None, ["<|user|>", "<|observation|>"]),
        ("gptoss", ["<|return|>", "<|call|>", "<|endoftext|>"], "<|end|>", []),
        ("deepseek_v3", ["<｜end▁of▁sentence｜>"], "<｜end▁of▁sentence｜>", []),
        ("kimi_k2", ["<|im_end|>", "[EOS]"], "<|im_end|>", []),
        ("minimax_m2", ["[e~["], "[e~[", []),
        ("gemma3", ["<end_of_turn>", "<eos>"], "<end_of_turn>", []),
        ("gemma4", ["<turn|>", "<|tool_response>", "<eos>"], "<turn|>", ["<|tool_response>"]),
    ],
)
def test_turn_ends_of_each_family(
    name: str, stops: list[str], turn_end: str | None, boundaries: list[str]
) -> None:
    tokenizer, family = loaded(name)
    assert [text(tokenizer, stop) for stop in family.stop_ids] == stops
    assert text(tokenizer, family.turn_end) == turn_end
    assert {text(tokenizer, token) for token in family.boundaries} == set(boundaries)
    assert family.boundaries <= family.turn_ends


@pytest.mark.parametrize(
    ("name", "marks"),
    [
        ("qwen2_5", [None, None, "<tool_call>", "</tool_call>", None, None, None]),
        ("qwen3_5", ["<think>", "</think>", "<tool_call>", "</tool_call>", None, None, None]),
        (
            "kimi_k2",
            [
                None,
                None,
                "<|tool_call_begin|>",
                "<|tool_call_end|>",
                "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>",
                1,
            ],
        ),
        ("gemma4", ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", None, None, None]),
        ("smollm2", [None] * 7),
    ],
)
def test_marks_of_each_family(name: str, marks: list[str | int | None]) -> None:
    tokenizer, family = loaded(name)
    ids = (
        family.think_open,
        family.think_close,
        family.call_open,
        family.call_close,
        family.section_open,
        family.section_close,
    )
    assert [*(text(tokenizer, token) for token in ids), None if family.separator is None else 1] == marks


def test_gpt_oss_has_harmony_marks() -> None:
    tokenizer, family = loaded("gptoss")
    harmony = family.harmony
    assert harmony is not None
    found = [
        text(tokenizer, token)
        for token in (harmony.start, harmony.channel, harmony.message, harmony.constrain, harmony.end)
    ]
    assert found == ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"]
    assert all(loaded(name)[1].harmony is None for name in FAMILIES if name != "gptoss")
