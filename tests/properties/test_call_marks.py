"""Marks that are data: a call whose arguments hold the very tags that end calls and thoughts, in every family,
and answers of any marks in any order, whole and in pieces.
"""

import json
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from call_writers import CALL_WRITERS
from hypothesis import given
from hypothesis import strategies as st
from sample_kit import examples
from syntax_kit import ARGUMENTS, CALLS, LOOK, TOY_MODELS, ToyModel

from polarnode.core.arrays import ids
from polarnode.core.conversation import Answer, TextDelta, TextPart, ThinkingPart
from polarnode.tokens.output_parser import fold

# what ends a call, a part of a call or a thought in each family; stop ids end the sample itself
CLOSERS = {
    "json": ("</tool_call>", "</think>", "<tool_call>", "<think>", '"}}', "\n"),
    "function_xml": ("</parameter>", "</function>", "</tool_call>", "</think>", "\n", "<think>"),
    "invoke_xml": ("</parameter>", "</invoke>", "</minimax:tool_call>", "</think>", "\n"),
    "arg_xml": ("</arg_value>", "</arg_key>", "</tool_call>", "</think>", "\n"),
    "fenced": ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "</think>", "```", "\n"),
    "separated": ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "</think>", '"}'),
    "numbered": ("<|tool_call_end|>", "<|tool_calls_section_end|>", "</think>", '"}'),
    "braces": ("<tool_call|>", "<channel|>", "}", "]"),
    "harmony": ("<|end|>", "<|start|>", "<|channel|>", '"}'),
}
syntaxes = pytest.mark.parametrize("name", CLOSERS)


def chunks(sampled: "array[int]", cuts: Sequence[int]) -> list["array[int]"]:
    edges = [0, *sorted(cut for cut in cuts if cut <= len(sampled)), len(sampled)]
    return [sampled[start:end] for start, end in pairwise(edges)]


def outcome(toy: ToyModel, pieces: Sequence["array[int]"], *, told: bool, clean: bool, **asked: Any) -> Any:
    """The answer, after the laws of one stream are checked."""
    parser, place, deltas = toy.parser(tools=(LOOK,), **asked), 0, []
    every = toy.told([token for piece in pieces for token in piece])
    for piece in pieces:
        deltas += parser.feed(piece, every[place : place + len(piece)] if told else ())
        place += len(piece)
    finished = parser.finish("stop" if clean else "length")
    deltas += finished.deltas
    assert fold(deltas) == finished.answer.parts
    shown = [token for delta in deltas if isinstance(delta, TextDelta) for token in delta.logprobs]
    assert tuple(shown) == finished.answer.logprobs
    places = [token.logprob for token in shown]
    assert places == sorted(set(places), reverse=True)
    answer = Answer(parts=finished.answer.parts, finish_reason=finished.answer.finish_reason)
    return answer, parser.notes, parser.thinking_tokens, parser.stopped


def spelled(toy: ToyModel, pieces: Sequence[tuple[str, bool]]) -> "array[int]":
    """Ids of pieces, each with its control strings sampled as such or in ordinary tokens."""
    out = ids()
    for text, as_control in pieces:
        out.extend(toy.spelled(text) if as_control else toy.plain(text))
    return out


def written(name: str, values: Sequence[str]) -> str:
    return CALL_WRITERS[name]([("look", {"path": value, "lines": 3}) for value in values])


@st.composite
def values(draw: st.DrawFn, name: str) -> str:
    parts = st.sampled_from(CLOSERS[name]) | st.text("ab <>/", max_size=4)
    return "".join(draw(st.lists(parts, max_size=7)))


@syntaxes
@examples(120)
@given(data=st.data())
def test_closing_tags_survive_in_arguments(name: str, data: st.DataObject) -> None:
    """Every control string sampled as its token; in any pieces."""
    toy, count = TOY_MODELS[name], 1 if name == "harmony" else 2
    said = data.draw(st.lists(values(name), min_size=1, max_size=count))
    text = written(name, said)
    sampled = toy.spelled(text + ("" if name == "harmony" else next(iter(toy.control))))
    cuts = data.draw(st.lists(st.integers(0, len(sampled)), max_size=6))
    for pieces in ([sampled], chunks(sampled, cuts)):
        answer, notes, _, _ = outcome(toy, pieces, told=False, clean=True)
        found = [json.loads(call.arguments) for call in answer.calls]
        assert found == [{"path": value, "lines": 3} for value in said]
        assert notes == ()


@pytest.mark.parametrize("name", ["json", "function_xml", "invoke_xml", "arg_xml", "numbered"])
@examples(80)
@given(data=st.data())
def test_call_in_unclosed_thought(name: str, data: st.DataObject) -> None:
    toy = TOY_MODELS[name]
    closers = [text for text in CLOSERS[name] if "think" not in text]
    value = "".join(data.draw(st.lists(st.sampled_from(closers) | st.text("ab ", max_size=3), max_size=6)))
    call = toy.spelled(written(name, [value]))
    sampled = toy.spelled("I look.\n") + call + ids([256])
    cuts = data.draw(st.lists(st.integers(0, len(sampled)), max_size=6))
    for pieces in ([sampled], chunks(sampled, cuts)):
        answer, notes, thinking, _ = outcome(toy, pieces, told=False, clean=True, opens_thinking=True)
        assert (answer.thinking, answer.text, notes) == ("I look.", "", ())
        assert [json.loads(each.arguments) for each in answer.calls] == [{"path": value, "lines": 3}]
        assert thinking == len("I look.\n")


@syntaxes
@examples(150)
@given(data=st.data())
def test_pieces_do_not_matter(name: str, data: st.DataObject) -> None:
    """Marks, tags, calls and words in any order: the answer is the same by any cut, with and without
    logprobs.
    """
    toy = TOY_MODELS[name]
    stops = {toy.token_bytes(token).decode() for token in toy.family.stop_ids}
    marks = st.sampled_from([text for text in toy.control if text not in stops])
    parts = marks | st.sampled_from((*CLOSERS[name], CALLS[name], ARGUMENTS, '"', "\n", "STOP", "\u00e9"))
    drawn = data.draw(st.lists(st.tuples(parts | st.text('a"\n', max_size=3), st.booleans()), max_size=14))
    clean, opens = data.draw(st.booleans()), data.draw(st.booleans())
    stop = data.draw(st.sampled_from(((), ("STOP",), ("a", "\n\n"))))
    sampled = spelled(toy, drawn) + ids([toy.family.stop_ids[0]] * clean)
    cuts = data.draw(st.lists(st.integers(0, len(sampled)), max_size=6))
    asked: dict[str, Any] = {"clean": clean, "opens_thinking": opens and name != "harmony", "stop": stop}
    whole = outcome(toy, [sampled], told=False, **asked)
    assert outcome(toy, chunks(sampled, cuts), told=False, **asked) == whole
    assert outcome(toy, [sampled[at : at + 1] for at in range(len(sampled))], told=False, **asked) == whole
    assert outcome(toy, chunks(sampled, cuts), told=True, **asked) == whole
    assert all(part.text for part in whole[0].parts if isinstance(part, TextPart | ThinkingPart))
