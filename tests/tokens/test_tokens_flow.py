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


def test_newlines_wait_for_following_text() -> None:
    flow = Flow()
    assert shown(flow, "\n", "\na", "\n", "\n", "b\n") == ["", "a", "", "", "\n\nb"]
    flow.call(CALL)
    assert flow.take() == [CALL]
    assert shown(flow, "\n\n", "c\n") == ["", "c"]
    flow.release()
    assert flow.take() == []
    assert flow.parts == (TextPart("a\n\nb"), CALL, TextPart("c"))


def test_other_whitespace_is_shown() -> None:
    assert shown(Flow(), " \t", " \n ", "\n") == [" \t", " \n ", ""]


def test_resumed_part_keeps_its_newlines() -> None:
    """An empty thought in between shows nothing, so the text goes on."""
    flow = Flow()
    flow.write("text", "a\n")
    flow.write("thinking", "\n\n")
    flow.write("text", "\nb")
    assert flow.take() == [TextDelta("a\n\nb")]


def test_kinds_keep_their_order() -> None:
    flow = Flow()
    flow.write("thinking", "\nt\n")
    flow.write("text", "\n\na\n")
    flow.write("thinking", "u")
    assert flow.take() == [ThinkingDelta("t"), TextDelta("a"), ThinkingDelta("u")]
    assert flow.parts == (ThinkingPart("t"), TextPart("a"), ThinkingPart("u"))


def test_final_text_keeps_last_newline() -> None:
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
def test_stop_strings_end_the_text(
    stop: tuple[str, ...], writes: tuple[str, ...], expected: list[str], stopped: str | None
) -> None:
    flow = Flow(stop)
    assert shown(flow, *writes) == expected
    assert flow.stopped == stopped


def test_held_back_text_shown_at_end() -> None:
    """Text that a stop string held back is shown at the end."""
    flow = Flow(("STOP",))
    assert shown(flow, "a STO") == ["a "]
    flow.release()
    assert flow.take() == [TextDelta("STO")]


def test_thinking_ignores_stop_strings() -> None:
    """Thinking is not watched, and nothing follows a stop."""
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
def test_shown_text_ends_before_stop(pieces: list[str], stop: tuple[str, ...]) -> None:
    """What is shown is the text before the stop."""
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


def test_fold_joins_neighbours_by_kind() -> None:
    deltas: list[Delta] = [TextDelta("a"), TextDelta("b"), CALL, CALL, ThinkingDelta("t"), TextDelta("c")]
    assert fold(deltas) == (TextPart("ab"), CALL, CALL, ThinkingPart("t"), TextPart("c"))
    assert fold([]) == ()


def test_joined_events_keep_their_tokens() -> None:
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


def test_tokens_leave_with_their_letters() -> None:
    """Tokens leave with the first letter they wrote and are dropped with the last."""
    flow = Flow(("END",))
    tokens = [TokenLogprob(data=bytes([letter]), logprob=-letter) for letter in range(6)]
    for text, token in zip(("\n", "ab", "cE", "N", "\n", "d"), tokens, strict=True):
        flow.write("text", text, (token,))
    assert flow.take() == [TextDelta("abcEN\nd", tuple(tokens[1:]))]
    flow.write("text", "\n\n", (tokens[0],))
    flow.release()
    assert flow.take() == []
    assert flow.logprobs == tuple(tokens[1:])
