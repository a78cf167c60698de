"""Conversations of generated data against the tokens the model had: rendered by transformers, for the tiny
model and for Qwen3.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from journal_samples import make_trajectory
from talk_kit import Ask, CallInProgress, Desk
from tokens_kit import TINY, model

from polarnode.cli.generate import open_comparison
from polarnode.core.task import BuilderSpec
from polarnode.merge.builders import build
from polarnode.offline import sft_lines
from polarnode.offline.rows import SftLine

TOOL = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
    "required": ["path"],
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Look at a file.", "parameters": TOOL}}
]
END = "<|im_end|>"
CALL = (
    "Let me see.\n",
    "<tool_call>",
    '\n{"name": "look", "arguments": {"path": "a.txt", "lines": 3}}\n',
    "</tool_call>",
    END,
)
CALL_ODD = ("<tool_call>", '\n{"name":"look","arguments":{"lines":3,"path":"a.txt"}}\n', "</tool_call>", END)


def talked(folder: Path, samples: Sequence[Sequence[str]]) -> SftLine:
    """A session of a chat client that echoes everything, and the line it becomes."""
    desk = Desk(model=model(folder))
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is in a.txt? <b>&é"},
    ]
    for sample in samples:
        body = {"model": "m", "messages": messages, "tools": TOOLS}
        asking = desk.say(Ask(path="/v1/chat/completions", body=body), list(desk.model.spelled(*sample)))
        answer = said(asking)
        messages += [
            answer,
            *(
                {"role": "tool", "tool_call_id": call["id"], "content": "silver\n"}
                for call in answer.get("tool_calls") or ()
            ),
        ]
        if not answer.get("tool_calls"):
            messages.append({"role": "user", "content": "And now?"})
    turns = desk.lineages.turns
    assert [turn.kind for turn in turns] == ["root", *["extend"] * (len(samples) - 1)]
    built = build(BuilderSpec(), turns)
    (line,), missing = sft_lines(evolve(make_trajectory("s"), turns=turns, traces=built.traces))
    assert not missing
    return line


def said(asking: CallInProgress) -> Any:
    turn = asking.desk.turns[-1]
    assert turn.answer is not None
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in turn.answer.calls
    ]
    return {
        "role": "assistant",
        "content": turn.answer.text,
        "reasoning_content": turn.answer.thinking,
        **({"tool_calls": calls} if calls else {}),
    }


def found(folder: Path, *samples: Sequence[str]) -> str:
    line = talked(folder, samples)
    json.dumps(line.body)
    words = open_comparison(folder)
    words.compare(line)
    assert words.why is None
    return next(name for name, count in words.counts.items() if count)


def test_tiny_model_words_match_tokens() -> None:
    """The tiny model's words, written by its template, are the same tokens."""
    assert found(TINY, CALL, ("It is silver.", END)) == "equal"
    assert found(TINY, ("Hello.", END), ("Well.", END), ("Well, well.", END)) == "equal"


def test_respaced_call_differs_in_tokens() -> None:
    """A call with other blanks is other tokens, and the rows have them."""
    assert found(TINY, CALL_ODD, ("It is silver.", END)) == "differs"


@pytest.mark.parametrize(
    ("samples", "what"),
    [
        ([("<think>", "\nhm\n", "</think>", "\n\nLet me see.\n", *CALL[1:])], "equal"),
        # it drops thoughts
        (
            [
                ("<think>", "\nhm\n", "</think>", "\n\nHello.", END),
                ("<think>", "\nso\n", "</think>", "\n\nWell.", END),
            ],
            "differs",
        ),
    ],
)
def test_qwen3_line_drops_earlier_thoughts(
    qwen3_folder: Path,
    samples: list[tuple[str, ...]],
    what: str,
) -> None:
    assert found(qwen3_folder, *samples) == what
