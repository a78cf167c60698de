"""Sampled ids into an answer: transcripts of what is shown when, and streamed answers that equal
whole ones.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import tokens_kit as kit
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from polarnode.core.arrays import ids
from polarnode.core.conversation import (
    Answer,
    Delta,
    FinishReason,
    Part,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    TokenLogprob,
    ToolCall,
)
from polarnode.core.errors import ModelError, Refused
from polarnode.tokens.output_parser import fold
from polarnode.tokens.parser import ParsedAnswer, Parser

BODY = '\n{"name": "look", "arguments": {"b": 1, "a": "x"}}\n'
LOOK = ToolCall(id="call_0", name="look", arguments='{"b": 1, "a": "x"}')
TEXT, THINK = TextPart, ThinkingPart


def again(place: int) -> ToolCall:
    return ToolCall(id=f"call_{place}", name="look", arguments=LOOK.arguments)


def read(
    *pieces: str, reason: FinishReason = "stop", opens_thinking: bool = False, stop: tuple[str, ...] = ()
) -> Answer:
    """The answer of a sample fed at once; fed id by id it must be the same."""
    tiny = kit.model()
    sampled = tiny.spelled(*pieces)
    whole = tiny.parser(opens_thinking=opens_thinking, stop=stop)
    single = tiny.parser(opens_thinking=opens_thinking, stop=stop)
    whole.feed(sampled)
    for token in sampled:
        single.feed(ids([token]))
    answer = whole.finish(reason).answer
    assert answer == single.finish(reason).answer
    return answer


# ── parts ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("pieces", "parts", "reason"),
    [
        (("hello", kit.END), (TEXT("hello"),), "stop"),
        (("\n\nhello\n", kit.END), (TEXT("hello"),), "stop"),
        ((kit.END,), (), "stop"),
        (("hello", "<|endoftext|>"), (TEXT("hello"),), "stop"),
        ((kit.OPEN, "\nhm\n", kit.CLOSE, "\n\nhello", kit.END), (THINK("hm"), TEXT("hello")), "stop"),
        ((kit.OPEN, "\n\n", kit.CLOSE, "\n\nhello", kit.END), (TEXT("hello"),), "stop"),
        ((kit.OPEN, kit.CLOSE, "hello", kit.END), (TEXT("hello"),), "stop"),
        ((kit.CALL, BODY, kit.CALLED, kit.END), (LOOK,), "tool_calls"),
        (("so\n", kit.CALL, BODY, kit.CALLED, kit.END), (TEXT("so"), LOOK), "tool_calls"),
        (
            (
                kit.OPEN,
                "\nhm\n",
                kit.CLOSE,
                "\n\nso\n",
                kit.CALL,
                BODY,
                kit.CALLED,
                "\n",
                kit.CALL,
                BODY,
                kit.CALLED,
                kit.END,
            ),
            (THINK("hm"), TEXT("so"), LOOK, again(1)),
            "tool_calls",
        ),
        (
            (kit.CALL, BODY, kit.CALLED, "\nthen\n", kit.CALL, BODY, kit.CALLED, "\nend", kit.END),
            (LOOK, TEXT("then"), again(1), TEXT("end")),
            "tool_calls",
        ),
        (("a\n", kit.OPEN, "b", kit.CLOSE, "\nc", kit.END), (TEXT("a"), THINK("b"), TEXT("c")), "stop"),
        ((kit.OPEN, "a", kit.CLOSE, "\n\n", kit.OPEN, "b", kit.CLOSE, kit.END), (THINK("ab"),), "stop"),
        ((kit.OPEN, "a", kit.OPEN, "b", kit.CLOSE, "c", kit.END), (THINK("a<think>b"), TEXT("c")), "stop"),
        (
            (kit.OPEN, "a", kit.CALL, BODY, kit.CALLED, "b", kit.CLOSE, "c", kit.END),
            (THINK(f"a<tool_call>{BODY}</tool_call>b"), TEXT("c")),
            "stop",
        ),
        ((kit.OPEN, "never closed", kit.END), (THINK("never closed"),), "stop"),
        (("a", kit.CLOSE, "b", kit.END), (TEXT("a</think>b"),), "stop"),
        (
            ("a<|im_start|>", "<|im_start|>", "<tool_response>", kit.END),
            (TEXT("a<|im_start|><|im_start|><tool_response>"),),
            "stop",
        ),
        (
            ("spelled: <think>x</think><tool_call>", BODY, kit.END),
            (TEXT(f"spelled: <think>x</think><tool_call>{BODY[:-1]}"),),
            "stop",
        ),
        (
            (
                kit.CALL,
                '{"name": "f", "arguments": {"a": "',
                kit.OPEN,
                "x",
                kit.CALL,
                '"}}',
                kit.CALLED,
                kit.END,
            ),
            (ToolCall(id="call_0", name="f", arguments='{"a": "<think>x<tool_call>"}'),),
            "tool_calls",
        ),
    ],
)
def test_parts_of_an_answer(pieces: Sequence[str], parts: tuple[Part, ...], reason: FinishReason) -> None:
    assert read(*pieces) == Answer(parts=parts, finish_reason=reason)


def test_thought_opened_by_the_prompt() -> None:
    assert read("hm\n", kit.CLOSE, "\n\nso", kit.END, opens_thinking=True).parts == (THINK("hm"), TEXT("so"))
    assert read("hm", reason="length", opens_thinking=True) == Answer(
        parts=(THINK("hm"),), finish_reason="length"
    )


@pytest.mark.parametrize(
    ("pieces", "text", "why"),
    [
        (
            (kit.CALL, "\nlook(1)\n", kit.CALLED),
            "<tool_call>\nlook(1)\n</tool_call>",
            "it is no JSON: Expecting",
        ),
        (
            ("so\n\n", kit.CALL, "{}", kit.CALLED, "\n\nthen"),
            "so\n\n<tool_call>{}</tool_call>\n\nthen",
            "it is no object of exactly name and arguments",
        ),
        (
            (kit.CALL, "{bad", kit.CALL, BODY, kit.CALLED),
            f"<tool_call>{{bad<tool_call>{BODY}</tool_call>",
            "it is no JSON: Expecting property name",
        ),
        (("a", kit.CALLED, "c"), "a</tool_call>c", "</tool_call> without a call before it"),
    ],
)
def test_unreadable_call_is_sampled_text(pieces: Sequence[str], text: str, why: str) -> None:
    """A call that cannot be read is text, as it was sampled."""
    for reason, end in (("stop", (kit.END,)), ("length", ())):
        assert read(*pieces, *end, reason=reason) == Answer(
            parts=(TEXT(text),), finish_reason=reason, malformed_calls=1
        )  # type: ignore[arg-type]
    parser = kit.model().parser()
    parser.feed(kit.model().spelled(*pieces))
    parser.finish("length")
    (note,) = parser.notes
    assert note.startswith(f"malformed call: {why}")


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (("so\n", kit.CALL, BODY), f"so\n<tool_call>{BODY}"),
        ((kit.CALL,), "<tool_call>"),
        ((kit.CALL, "\n{", kit.OPEN, "<|im_start|>", "\n"), "<tool_call>\n{<think><|im_start|>\n"),
    ],
)
def test_call_without_an_end(pieces: Sequence[str], text: str) -> None:
    ended = read(*pieces, kit.END)
    assert ended == Answer(parts=(TEXT(text),), finish_reason="stop", malformed_calls=1)
    cut = read(*pieces, reason="length")
    assert cut == Answer(parts=(TEXT("so"),) * text.startswith("so"), finish_reason="length")
    parser = kit.model().parser()
    parser.feed(kit.model().spelled(*pieces))
    parser.finish("length")
    assert parser.notes == ("cut call: the answer ended inside a call, which is not shown",)


def test_good_beside_bad_calls() -> None:
    answer = read(
        kit.CALL,
        BODY,
        kit.CALLED,
        "\n",
        kit.CALL,
        "bad",
        kit.CALLED,
        "\n",
        kit.CALL,
        BODY,
        kit.CALLED,
        kit.END,
    )
    assert answer.parts == (LOOK, TEXT("<tool_call>bad</tool_call>"), again(1))
    assert (answer.malformed_calls, answer.finish_reason) == (1, "tool_calls")


@pytest.mark.parametrize("reason", ["length", "abort", "error", "stop"])
def test_finish_reason_changes_only_for_calls(reason: FinishReason) -> None:
    """The reason is the engine's, but for calls."""
    assert read("a", reason=reason).finish_reason == reason
    expected = "tool_calls" if reason == "stop" else reason
    assert read(kit.CALL, BODY, kit.CALLED, reason=reason).finish_reason == expected


def test_unknown_names_are_passed_on() -> None:
    answer = read(kit.CALL, '{"name": "no such tool", "arguments": {}}', kit.CALLED, kit.END)
    assert answer.calls == (ToolCall(id="call_0", name="no such tool", arguments="{}"),)


def test_nothing_read_after_turn_end() -> None:
    assert read("a", kit.END, "\n", "<|im_start|>", "user", kit.OPEN).parts == (TEXT("a"),)


# ── when it is shown ──────────────────────────────────────────────────────────


@frozen
class Fed:
    """One chunk and what it lets out."""

    pieces: tuple[str, ...]
    deltas: tuple[Delta, ...]


def play(parser: Parser, *script: Fed) -> None:
    for step in script:
        assert tuple(parser.feed(kit.model().spelled(*step.pieces))) == step.deltas, step


def test_streamed_turn_step_by_step() -> None:
    parser = kit.model().parser()
    play(
        parser,
        Fed((kit.OPEN,), ()),
        Fed(("\n", "hm"), (ThinkingDelta("hm"),)),
        Fed((", well\n",), (ThinkingDelta(", well"),)),
        Fed((kit.CLOSE, "\n\n"), ()),
        Fed(("I look", ".\n"), (TextDelta("I look."),)),
        Fed((kit.CALL,), ()),
        Fed((BODY[:20],), ()),
        Fed((BODY[20:],), ()),
        Fed((kit.CALLED,), (LOOK,)),
        Fed(("\n", kit.CALL, BODY, kit.CALLED, kit.END), (again(1),)),
    )
    assert parser.finish("stop") == ParsedAnswer(
        answer=Answer(parts=(THINK("hm, well"), TEXT("I look."), LOOK, again(1)), finish_reason="tool_calls"),
        deltas=(),
    )


def test_incomplete_character_is_held_back() -> None:
    tiny = kit.model()
    parser = tiny.parser()
    shown = [parser.feed(ids([token])) for byte in "\U0001f642".encode() for token in _byte(byte)]
    assert shown == [[], [], [], [TextDelta("\U0001f642")]]


def test_cut_character_becomes_replacement() -> None:
    """A character that is cut is a replacement in the last deltas."""
    parser = kit.model().parser()
    assert parser.feed(ids([*_byte(0x61), *_byte(0xF0), *_byte(0x9F)])) == [TextDelta("a")]
    finished = parser.finish("length")
    assert finished.deltas == (TextDelta("\ufffd"),)
    assert finished.answer.text == "a\ufffd"


def test_character_broken_by_mark_is_replaced() -> None:
    """A character that a mark breaks is a replacement where it was."""
    parser = kit.model().parser()
    parser.feed(
        ids([*_byte(0xF0), *kit.model().spelled(kit.OPEN, "t", kit.CLOSE), *_byte(0x9F), *_byte(0x61)])
    )
    assert parser.finish("stop").answer.parts == (TEXT("\ufffd"), THINK("t"), TEXT("\ufffda"))


def _byte(byte: int) -> list[int]:
    """The token of one byte."""
    tokenizer = kit.model().tokenizer
    return [
        next(
            number for number in range(tokenizer.vocab_size) if tokenizer.token_bytes(number) == bytes([byte])
        )
    ]


def test_half_a_call_is_hidden() -> None:
    parser = kit.model().parser()
    play(parser, Fed(("so\n", kit.CALL, "\n{"), (TextDelta("so"),)))
    finished = parser.finish("length")
    assert finished.deltas == ()
    assert (finished.answer.text, parser.malformed_calls) == ("so", 0)


def test_padding_id_silent_foreign_id_error() -> None:
    """An id that pads the embedding shows nothing, and a foreign one is an error."""
    tiny = kit.model()
    with pytest.raises(ModelError, match="outside this model's vocabulary"):
        tiny.parser().feed(ids([tiny.tokenizer.vocab_size]))


# ── stop strings ──────────────────────────────────────────────────────────────


def test_stop_string_ends_the_answer() -> None:
    parser = kit.model().parser(stop=("STOP", "\nObs:"))
    play(parser, Fed(("one ST",), (TextDelta("one "),)), Fed(("ILL\nOb",), (TextDelta("STILL"),)))
    assert parser.stopped is None
    play(parser, Fed(("s: unseen", kit.CALL, BODY, kit.CALLED), ()), Fed(("more", kit.OPEN, "t"), ()))
    assert parser.stopped == "\nObs:"
    answer = parser.finish("abort").answer
    assert answer == Answer(parts=(TEXT("one STILL"),), finish_reason="stop_string", stop_string="\nObs:")


def test_stop_strings_watch_visible_text_only() -> None:
    stop = ("x",)
    assert read(kit.OPEN, "axb", kit.CLOSE, "c", kit.END, stop=stop).parts == (THINK("axb"), TEXT("c"))
    assert read(kit.CALL, BODY, kit.CALLED, kit.END, stop=stop).parts == (LOOK,)
    given_back = read("a\n", kit.CALL, "{x}", kit.CALLED, "b", kit.END, stop=stop)
    assert given_back == Answer(
        parts=(TEXT("a\n<tool_call>{"),), finish_reason="stop_string", stop_string="x", malformed_calls=1
    )


def test_separator_is_no_stop_string() -> None:
    assert read(kit.OPEN, "t", kit.CLOSE, "\n\nhello", kit.END, stop=("\n\n",)).parts == (
        THINK("t"),
        TEXT("hello"),
    )


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(Refused, match="empty stop string"):
        kit.model().parser(stop=("a", ""))


# ── counts ────────────────────────────────────────────────────────────────────


def test_thinking_tokens_include_their_marks() -> None:
    tiny = kit.model()
    parser = tiny.parser()
    thought = tiny.spelled(kit.OPEN, "\nhm, well\n", kit.CLOSE)
    parser.feed(thought + tiny.spelled("\n\nhello", kit.END))
    assert parser.thinking_tokens == len(thought)
    parser = tiny.parser(opens_thinking=True)
    parser.feed(thought[1:-1])
    assert parser.thinking_tokens == len(thought) - 2


# ── properties ────────────────────────────────────────────────────────────────

MARKS = (kit.OPEN, kit.CLOSE, kit.CALL, kit.CALLED, "<|im_start|>", "<tool_response>")
PIECES = st.lists(
    st.sampled_from(MARKS)
    | st.sampled_from((BODY, '{"name": "f", "arguments": {}}', "\n", "\n\n", "STOP", "ST"))
    | st.text("aST\n\u00e9\U0001f642", max_size=5),
    max_size=12,
)
BYTES = st.lists(st.sampled_from((0x61, 0x0A, 0xC3, 0xA9, 0xF0, 0x9F, 0x99, 0x82, 0xFF)), max_size=6)
STOPS = st.sampled_from(((), ("STOP",), ("S", "\n\n"), ("aa", "T\n", "\u00e9")))
LETTER = {byte: _byte(byte)[0] for byte in (0x61, 0x0A, 0xC3, 0xA9, 0xF0, 0x9F, 0x99, 0x82, 0xFF)}


@settings(max_examples=300, deadline=None)
@given(
    pieces=PIECES,
    odd=BYTES,
    at=st.integers(0, 12),
    cuts=st.lists(st.integers(0, 80), max_size=8),
    stop=STOPS,
    opens=st.booleans(),
    ended=st.booleans(),
)
def test_chunks_do_not_matter(
    pieces: list[str],
    odd: list[int],
    at: int,
    cuts: list[int],
    stop: tuple[str, ...],
    opens: bool,
    ended: bool,
) -> None:
    tiny = kit.model()
    sampled = (
        tiny.spelled(*pieces[:at])
        + ids(LETTER[byte] for byte in odd)
        + tiny.spelled(*pieces[at:])
        + tiny.spelled(*[kit.END] * ended)
    )
    edges = [0, *sorted(cut for cut in cuts if cut <= len(sampled)), len(sampled)]
    outcomes = []
    for chunks in (
        [sampled],
        [sampled[start:end] for start, end in pairwise(edges)],
        [ids([token]) for token in sampled],
    ):
        parser = tiny.parser(opens_thinking=opens, stop=stop)
        deltas = [delta for chunk in chunks for delta in parser.feed(chunk)]
        finished = parser.finish("stop" if ended else "length")
        assert fold([*deltas, *finished.deltas]) == finished.answer.parts
        assert all(not isinstance(delta, TextDelta | ThinkingDelta) or delta.text for delta in deltas)
        outcomes.append((finished.answer, parser.stopped, parser.thinking_tokens, parser.malformed_calls))
    assert outcomes[0] == outcomes[1] == outcomes[2]


@settings(max_examples=200, deadline=None)
@given(pieces=PIECES, opens=st.booleans())
def test_every_letter_shown_or_in_call(pieces: list[str], opens: bool) -> None:
    """But for separators and the marks of thoughts and calls, an answer holds the very text that was sampled,
    in its order.
    """
    tiny = kit.model()
    parser = tiny.parser(opens_thinking=opens)
    parser.feed(tiny.spelled(*pieces, kit.END))
    parts = parser.finish("stop").answer.parts
    shown = "".join(
        f'{{"name": "{part.name}", "arguments": {part.arguments}}}'
        if isinstance(part, ToolCall)
        else part.text
        for part in parts
    )
    assert _bare(shown) == _bare("".join(pieces))


def _bare(text: str) -> str:
    for mark in (*MARKS[:4], "\n"):
        text = text.replace(mark, "")
    return text


@settings(max_examples=60, deadline=None)
@given(thinking=st.text("ab\n\u00e9\U0001f642", max_size=20), text=st.text("ab\n \u65e5", max_size=20))
def test_thinking_matches_qwen_snippet(thinking: str, text: str) -> None:
    """Qwen's model card: split at the last </think>, decode both sides, strip newlines."""
    parts = read(kit.OPEN, thinking, kit.CLOSE, text, kit.END).parts
    expected = (THINK(thinking.strip("\n")), TEXT(text.strip("\n")))
    assert parts == tuple(part for part in expected if part.text)


def test_real_tokenizer_reads_the_same(qwen3_folder: Path) -> None:
    qwen3 = kit.model(qwen3_folder)
    parser = qwen3.parser()
    pieces = (
        kit.OPEN,
        "\ncaf\u00e9 \U0001f642\n",
        kit.CLOSE,
        "\n\nI look.\n",
        kit.CALL,
        BODY,
        kit.CALLED,
        kit.END,
    )
    deltas = [delta for token in qwen3.spelled(*pieces) for delta in parser.feed(ids([token]))]
    assert (
        fold(deltas)
        == parser.finish("stop").answer.parts
        == (THINK("caf\u00e9 \U0001f642"), TEXT("I look."), LOOK)
    )


# ── logprobs of visible text ──────────────────────────────────────────────────


def told(tiny: kit.Model, sampled: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """Every token with a logprob that names its place."""
    return tuple(
        TokenLogprob(data=tiny.tokenizer.token_bytes(token), logprob=-float(place))
        for place, token in enumerate(sampled)
    )


def places(answer: Answer) -> list[int]:
    return [int(-token.logprob) for token in answer.logprobs]


def read_told(
    *pieces: str, reason: FinishReason = "stop", stop: tuple[str, ...] = (), size: int = 1000
) -> tuple[Answer, list[Delta]]:
    tiny = kit.model()
    sampled = tiny.spelled(*pieces)
    tokens = told(tiny, sampled)
    parser = tiny.parser(stop=stop)
    deltas = [
        delta
        for start in range(0, len(sampled), size)
        for delta in parser.feed(sampled[start : start + size], tokens[start : start + size])
    ]
    finished = parser.finish(reason)
    return finished.answer, [*deltas, *finished.deltas]


@pytest.mark.parametrize(
    ("pieces", "stop", "written"),
    [
        (("hello there", kit.END), (), "hello there"),
        ((kit.OPEN, "\nhm\n", kit.CLOSE, "\n\nhello", kit.END), (), "hello"),
        (("so\n", kit.CALL, BODY, kit.CALLED, "\n", "done", kit.END), (), "sodone"),
        ((kit.CALL, "bad", kit.CALLED, kit.END), (), "<tool_call>bad</tool_call>"),
        ((kit.CALL, "cut"), (), "<tool_call>cut"),
        (("a<|im_start|>", "<|im_start|>", kit.END), (), "a<|im_start|><|im_start|>"),
        (("caf\u00e9 \U0001f642!", kit.END), (), "caf\u00e9 \U0001f642!"),
        (("yes ", "STOP", " no"), ("STOP",), "yes "),
        ((kit.END,), (), ""),
    ],
)
def test_visible_tokens_reported_once_in_order(
    pieces: Sequence[str], stop: tuple[str, ...], written: str
) -> None:
    """Each token of visible text is reported once, in its order."""
    answer, deltas = read_told(*pieces, stop=stop)
    assert b"".join(token.data for token in answer.logprobs).decode() == answer.text == written
    assert places(answer) == sorted(set(places(answer)))
    assert (
        tuple(token for delta in deltas if isinstance(delta, TextDelta) for token in delta.logprobs)
        == answer.logprobs
    )


def test_multi_token_character_reports_all_tokens() -> None:
    tiny = kit.model()
    sampled = tiny.spelled("\U0001f642")
    assert len(sampled) > 1
    parser, tokens = tiny.parser(), told(tiny, sampled)
    for place in range(len(sampled) - 1):
        assert parser.feed(sampled[place : place + 1], tokens[place : place + 1]) == []
    (delta,) = parser.feed(sampled[-1:], tokens[-1:])
    assert delta == TextDelta("\U0001f642", tokens)


def test_broken_character_reports_its_tokens() -> None:
    """A character that a mark breaks is reported with its own tokens."""
    tiny = kit.model()
    sampled = ids([*tiny.spelled("\U0001f642")[:1], *tiny.spelled(kit.OPEN, "hm", kit.CLOSE)])
    parser = tiny.parser()
    assert parser.feed(sampled, told(tiny, sampled)) == [
        TextDelta("\ufffd", told(tiny, sampled)[:1]),
        ThinkingDelta("hm"),
    ]


TOLD = st.lists(
    st.sampled_from(("a", " b", "\n", "ST", "OP", "\u00e9", kit.OPEN, kit.CLOSE, kit.CALL, kit.CALLED, BODY)),
    max_size=10,
)


@settings(max_examples=150, deadline=None)
@given(pieces=TOLD, size=st.integers(1, 7), stop=st.sampled_from(((), ("STOP",), ("\n",))))
def test_reporting_and_chunks_change_nothing(pieces: list[str], size: int, stop: tuple[str, ...]) -> None:
    """Telling changes nothing else and chunks do not matter."""
    tiny = kit.model()
    plain = tiny.parser(stop=stop)
    plain.feed(tiny.spelled(*pieces))
    expected = plain.finish("length").answer
    (whole, _), (chunked, deltas) = (
        read_told(*pieces, reason="length", stop=stop),
        read_told(*pieces, reason="length", stop=stop, size=size),
    )
    assert whole == chunked
    assert evolve(whole, logprobs=()) == expected
    assert fold(deltas) == whole.parts
    assert places(whole) == sorted(set(places(whole)))
    assert (expected.text == "") == (whole.logprobs == ())
