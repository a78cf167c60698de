"""Separators and stop strings: what may be shown, and when."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarnode.core.conversation import (
    Delta,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    TokenLogprob,
    ToolCall,
)
from polarnode.tokens.output_parser import Flow, Kind, fold, joined

CALL = ToolCall(id="c", name="f", arguments="{}")


def shown(flow: Flow, *writes: str, kind: Kind = "text") -> list[str]:
    """What each write lets out."""
    out = []
    for text in writes:
        flow.write(kind, text)
        out.append("".join(getattr(delta, "text", "") for delta in flow.take()))
    return out


def test_newlines_wait_for_what_follows() -> None:
    flow = Flow()
    assert shown(flow, "\n", "\na", "\n", "\n", "b\n") == ["", "a", "", "", "\n\nb"]
    flow.call(CALL)
    assert flow.take() == [CALL]
    assert shown(flow, "\n\n", "c\n") == ["", "c"]
    flow.release()
    assert flow.take() == []
    assert flow.parts == (TextPart("a\n\nb"), CALL, TextPart("c"))


def test_other_space_is_text() -> None:
    assert shown(Flow(), " \t", " \n ", "\n") == [" \t", " \n ", ""]


def test_a_part_that_goes_on_keeps_its_newlines() -> None:
    """An empty thought in between shows nothing, so the text goes on."""
    flow = Flow()
    flow.write("text", "a\n")
    flow.write("thinking", "\n\n")
    flow.write("text", "\nb")
    assert flow.take() == [TextDelta("a\n\nb")]


def test_kinds_in_their_order() -> None:
    flow = Flow()
    flow.write("thinking", "\nt\n")
    flow.write("text", "\n\na\n")
    flow.write("thinking", "u")
    assert flow.take() == [ThinkingDelta("t"), TextDelta("a"), ThinkingDelta("u")]
    assert flow.parts == (ThinkingPart("t"), TextPart("a"), ThinkingPart("u"))


def test_text_that_must_stay_keeps_its_last_newline() -> None:
    flow = Flow()
    flow.write("text", "<tool_call>\n")
    flow.release(exactly=True)
    assert flow.take() == [TextDelta("<tool_call>\n")]


@pytest.mark.parametrize(
    ("stop", "writes", "expected", "stopped"),
    [
        (("END",), ("aE", "N", "x"), ["a", "", "ENx"], None),
        (("END",), ("aE", "ND tail", "more"), ["a", "", ""], "END"),
        (("END",), ("a\nE", "ND"), ["a", ""], "END"),
        (("END",), ("a\nE", "x"), ["a", "\nEx"], None),
        (("\n\n",), ("a\n", "b\n", "\nc"), ["a", "\nb", ""], "\n\n"),
        (("\n\n",), ("\n\na",), ["a"], None),
        (("aab",), ("aaa", "aab", "z"), ["a", "aa", ""], "aab"),
        (("b", "ab"), ("xab",), ["x"], "ab"),
        (("abc", "b"), ("xabc",), ["xa"], "b"),
        (("ab", "a"), ("xab",), ["x"], "a"),
    ],
)
def test_stop_strings(
    stop: tuple[str, ...], writes: tuple[str, ...], expected: list[str], stopped: str | None
) -> None:
    flow = Flow(stop)
    assert shown(flow, *writes) == expected
    assert flow.stopped == stopped


def test_what_a_stop_string_held_back_is_text_at_the_end() -> None:
    flow = Flow(("STOP",))
    assert shown(flow, "a STO") == ["a "]
    flow.release()
    assert flow.take() == [TextDelta("STO")]


def test_thinking_is_not_watched_and_nothing_follows_a_stop() -> None:
    flow = Flow(("x",))
    assert shown(flow, "axb", kind="thinking") == ["axb"]
    assert shown(flow, "axb", "c") == ["a", ""]
    flow.call(CALL)
    flow.write("thinking", "t")
    flow.release()
    assert flow.take() == []
    assert flow.parts == (ThinkingPart("axb"), TextPart("a"))


PIECES = st.lists(st.text("ab\n ", max_size=6), max_size=8)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3).map(tuple)


@settings(max_examples=300, deadline=None)
@given(pieces=PIECES, stop=STOPS, cuts=st.lists(st.integers(0, 40), max_size=10))
def test_chunks_do_not_matter(pieces: list[str], stop: tuple[str, ...], cuts: list[int]) -> None:
    text = "".join(pieces)
    at = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    whole, chunked, single = Flow(stop), Flow(stop), Flow(stop)
    shown(whole, text)
    shown(chunked, *(text[start:end] for start, end in pairwise(at)))
    shown(single, *text)
    for flow in (whole, chunked, single):
        flow.release()
        flow.take()
    assert whole.parts == chunked.parts == single.parts
    assert whole.stopped == chunked.stopped == single.stopped


@settings(max_examples=200, deadline=None)
@given(pieces=PIECES, stop=STOPS)
def test_what_is_shown_is_the_text_before_the_stop(pieces: list[str], stop: tuple[str, ...]) -> None:
    text = "".join(pieces)
    flow = Flow(stop)
    shown(flow, *pieces)
    flow.release()
    flow.take()
    text = text.lstrip("\n")
    ends = [text.find(word) + len(word) for word in stop if word in text]
    before = text[: min(ends)] if ends else text
    assert before.removesuffix(flow.stopped or "").rstrip("\n") == "".join(
        part.text for part in flow.parts if isinstance(part, TextPart)
    )
    assert (flow.stopped is None) == (not ends)


def test_folding_joins_neighbours_of_one_kind() -> None:
    deltas: list[Delta] = [TextDelta("a"), TextDelta("b"), CALL, CALL, ThinkingDelta("t"), TextDelta("c")]
    assert fold(deltas) == (TextPart("ab"), CALL, CALL, ThinkingPart("t"), TextPart("c"))
    assert fold([]) == ()


def test_joining_makes_one_event_of_neighbours_and_keeps_their_tokens() -> None:
    one, other = TokenLogprob(data=b"a", logprob=-1), TokenLogprob(data=b"b", logprob=-2)
    deltas: list[Delta] = [
        TextDelta("a", (one,)),
        TextDelta("b", (other,)),
        CALL,
        ThinkingDelta("t"),
        ThinkingDelta("u"),
        TextDelta("c"),
    ]
    assert joined(deltas) == [TextDelta("ab", (one, other)), CALL, ThinkingDelta("tu"), TextDelta("c")]


def test_tokens_leave_with_the_first_letter_they_wrote_and_are_dropped_with_the_last() -> None:
    flow = Flow(("END",))
    tokens = [TokenLogprob(data=bytes([letter]), logprob=-letter) for letter in range(6)]
    for text, token in zip(("\n", "ab", "cE", "N", "\n", "d"), tokens, strict=True):
        flow.write("text", text, (token,))
    assert flow.take() == [TextDelta("abcEN\nd", tuple(tokens[1:]))]
    flow.write("text", "\n\n", (tokens[0],))
    flow.release()
    assert flow.take() == []
    assert flow.logprobs == tuple(tokens[1:])
