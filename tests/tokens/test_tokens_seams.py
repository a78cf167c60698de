"""How cut turns are closed in each family, and what is noted where sampled ids differ from what a template
writes.
"""

import pytest
import tokens_kit as kit
from family_fixtures import family_folder

from polarnode.tokens.families import Mode
from polarnode.tokens.template import TurnClosing, differences, joined


@pytest.mark.parametrize(
    ("name", "mode", "opening", "close"),
    [
        ("qwen3", "text", "\n", ["<|im_end|>"]),
        ("qwen3", "thinking", "\n", ["</think>", "<|im_end|>"]),
        ("qwen3", "call", "\n", ["<|im_end|>"]),
        ("kimi_k2", "between", "<|im_user|>", ["<|im_end|>"]),
        ("deepseek_v3", "call", "<｜User｜>", ["<｜end▁of▁sentence｜>"]),
        ("minimax_m2", "thinking", "\n", ["</think>", "[e~["]),
        ("glm4", "text", "<|user|>", []),
        ("glm4", "thinking", "<|user|>", ["</think>"]),
        ("gemma4", "text", "\n", ["<turn|>"]),
        ("gemma4", "text", "<|tool_response>", []),
        ("gptoss", "header", "<|start|>", ["<|message|>", "<|end|>"]),
        ("gptoss", "thinking", "<|start|>", ["<|end|>"]),
        ("gptoss", "call", "<|start|>", ["<|end|>"]),
        ("gptoss", "between", "<|start|>", []),
    ],
)
def test_shortest_close_of_each_mode(name: str, mode: Mode, opening: str, close: list[str]) -> None:
    """A close is the least that ends a turn."""
    model = kit.model(family_folder(name))
    assert TurnClosing(model.family).of(mode, model.spelled(opening)) == model.spelled(*close)


@pytest.mark.parametrize(
    ("name", "last", "ended", "opening", "rest", "note"),
    [
        ("qwen3", "<|im_end|>", "<|im_end|>", "\n", "\n", None),
        ("qwen3", "x", "<|im_end|>", "\n", "\n", None),
        (
            "qwen3",
            "<|endoftext|>",
            "<|im_end|>",
            "\n",
            "\n",
            "ends with '<|endoftext|>' where the template writes '<|im_end|>'",
        ),
        ("glm4", "<|user|>", "", "<|user|>", "", None),
        (
            "glm4",
            "<|user|>",
            "",
            "<|observation|>",
            "<|observation|>",
            "ends with '<|user|>' where the template goes on with '<|observation|>'",
        ),
        (
            "glm4",
            "<|endoftext|>",
            "",
            "<|user|>",
            "<|user|>",
            "ends with '<|endoftext|>' where the template goes on without a turn end",
        ),
        (
            "gptoss",
            "<|return|>",
            "<|end|>",
            "<|start|>",
            "<|start|>",
            "ends with '<|return|>' where the template writes '<|end|>'",
        ),
        ("gptoss", "<|call|>", "<|call|>", "<|start|>", "<|start|>", None),
        ("gemma4", "<|tool_response>", "", "<|tool_response>", "", None),
        (
            "gemma4",
            "<turn|>",
            "",
            "<|tool_response>",
            "<|tool_response>",
            "ends with '<turn|>' where the template goes on without a turn end",
        ),
        (
            "gemma4",
            "<|tool_response>",
            "<turn|>",
            "\n",
            "\n",
            "ends with '<|tool_response>' where the template writes '<turn|>'",
        ),
    ],
)
def test_seam_joins_and_notes_difference(
    name: str, last: str, ended: str, opening: str, rest: str, note: str | None
) -> None:
    model = kit.model(family_folder(name))
    sampled, follows = model.spelled("said", last), model.spelled(opening)
    assert joined(sampled, follows, model.family) == model.spelled(*filter(None, [rest]))
    notes = differences(sampled, follows, ended, model.tokenizer, model.family)
    assert (len(notes) == 1 and note in notes[0]) if note else notes == ()


def test_empty_sample_has_no_seam() -> None:
    model = kit.model(family_folder("glm4"))
    opening = model.spelled("<|user|>")
    assert joined(model.spelled(), opening, model.family) == opening
    assert differences(model.spelled(), opening, "", model.tokenizer, model.family) == ()
