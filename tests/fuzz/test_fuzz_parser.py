"""Arbitrary model output, in pieces: every tool-call syntax reads it without an error, to the same answer
however it is cut, and never gives a call that is not valid JSON.
"""

import json
from array import array
from itertools import pairwise
from typing import Any

import pytest
from fuzz_kit import Target, play, watched
from hypothesis import strategies as st
from syntax_kit import CALLS, LOOK, THOUGHTS, TOY_MODELS, ToyModel

from polarnode.core.arrays import ids
from polarnode.core.conversation import TextDelta, ThinkingDelta, ToolCall

STOP = ("STOP", "\n\n\n")


def pieces_of(name: str) -> list[str]:
    """What its output is made of: whole calls, each mark, and parts of them."""
    toy, call, thought = TOY_MODELS[name], CALLS.get(name, ""), THOUGHTS.get(name, "")
    parts = {text[start : start + 7] for text in (call, thought) for start in range(0, len(text), 7)}
    return [
        *(call, call * 3, thought, *toy.control, *sorted(parts)),
        *('{"a": ', "[[", "{{", '\\"', "</parameter>", "null", "1e999", "\ud83d".encode("utf-8", "surrogatepass").decode("utf-8", "replace")),
        *("\x00", "\u2028", "🚀", "ﬁ", "STO", "P", "\n\n", " " * 50, "[" * 300, "{" * 300, "9" * 5000, "a" * 3000),
    ]  # fmt: skip


@st.composite
def outputs(draw: st.DrawFn) -> tuple[str, list[int], tuple[int, ...], bool, bool]:
    """A family, what its model sampled, where that is cut, and whether the prompt opened a thought and stop
    strings were asked for.
    """
    name = draw(st.sampled_from(sorted(TOY_MODELS)))
    toy = TOY_MODELS[name]
    text = "".join(draw(st.lists(st.sampled_from(pieces_of(name)) | st.text(max_size=5), max_size=8)))
    sampled = list(toy.spelled(text.encode("utf-8", "replace").decode()))
    for _ in range(draw(st.integers(0, 3))):  # bytes that are no text, marks in odd places
        place = draw(st.integers(0, len(sampled)))
        sampled.insert(place, draw(st.integers(0, toy.vocab_size - 1)))
    cuts = draw(st.lists(st.integers(0, len(sampled)), max_size=6).map(lambda found: tuple(sorted(found))))
    return name, sampled, cuts, draw(st.booleans()), draw(st.booleans())


def read(toy: ToyModel, parts: "list[array[int]]", thinking: bool, stop: bool) -> tuple[Any, str, str, int]:
    """The answer, and the text, the thoughts and the number of calls that were streamed."""
    parser = toy.parser(opens_thinking=thinking, stop=STOP if stop else (), tools=(LOOK,))
    deltas = [delta for part in parts for delta in parser.feed(part)]
    finished = parser.finish("stop")
    deltas += finished.deltas
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    thought = "".join(delta.text for delta in deltas if isinstance(delta, ThinkingDelta))
    return finished.answer, text, thought, sum(isinstance(delta, ToolCall) for delta in deltas)


def check(value: tuple[str, list[int], tuple[int, ...], bool, bool]) -> None:
    name, sampled, cuts, thinking, stop = value
    toy = TOY_MODELS[name]
    places = [0, *cuts, len(sampled)]
    with watched(len(sampled)):
        whole = read(toy, [ids(sampled)], thinking, stop)
        cut = read(toy, [ids(sampled[a:b]) for a, b in pairwise(places)], thinking, stop)
        assert cut == whole
    answer, text, thought, calls = whole
    assert text == answer.text
    assert thought == answer.thinking
    made = [part for part in answer.parts if isinstance(part, ToolCall)]
    assert calls == len(made)
    assert len({call.id for call in made}) == len(made)
    for call in made:
        assert isinstance(json.loads(call.arguments), dict)


TARGETS = (Target(name="output_parser", inputs=outputs(), check=check, examples=250),)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_output_parses_alike_in_any_chunks(target: Target) -> None:
    """Any output reads the same however it comes."""
    play(target)
