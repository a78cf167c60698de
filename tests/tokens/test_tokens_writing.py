"""Samples of every family into answers: what is held back and comes out, and that it does not matter how a
sample is cut into pieces.
"""

import json
from array import array
from collections.abc import Sequence
from itertools import pairwise

import pytest
from attrs import evolve
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from syntax_kit import ARGUMENTS, CALLS, DEEPSEEK, HARMONY, KIMI, LOOK, THOUGHTS, TOY_MODELS, ToyModel

from polarnode.core.arrays import ids
from polarnode.core.conversation import (
    Answer,
    Part,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    ToolCall,
)
from polarnode.tokens.families import Mode
from polarnode.tokens.output_parser import OutputWriter, fold
from polarnode.tokens.parser import mode_at_end, model_call_ids

TEXT, THINK = TextPart, ThinkingPart
END = {name: next(iter(toy.control)) for name, toy in TOY_MODELS.items()}
CALLERS = sorted(CALLS)
THINKERS = sorted(THOUGHTS)


def call(place: int = 0, arguments: str = ARGUMENTS) -> ToolCall:
    return ToolCall(id=f"call_{place}", name="look", arguments=arguments)


def outcome(
    toy: ToyModel, chunks: Sequence["array[int]"], *, ended: bool, **asked: object
) -> tuple[object, ...]:
    """Everything an answer is, read in these pieces."""
    parser = toy.parser(**asked)  # type: ignore[arg-type]
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)]
    finished = parser.finish("stop" if ended else "length")
    assert fold([*deltas, *finished.deltas]) == finished.answer.parts
    assert all(not isinstance(delta, TextDelta | ThinkingDelta) or delta.text for delta in deltas)
    return (
        finished.answer,
        parser.stopped,
        parser.thinking_tokens,
        parser.malformed_calls,
        parser.model_call_ids,
    )


def read(name: str, text: str, *, ended: bool = True, **asked: object) -> Answer:
    """The answer of a sample, its control strings sampled as tokens; fed id by id it must be the same."""
    toy = TOY_MODELS[name]
    sampled = toy.spelled(text)
    asked = {"tools": (LOOK,)} | asked
    whole = outcome(toy, [sampled], ended=ended, **asked)
    assert whole == outcome(toy, [ids([token]) for token in sampled], ended=ended, **asked)
    answer = whole[0]
    assert isinstance(answer, Answer)
    return answer


# ── every family ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", CALLERS)
def test_call_is_read_whole(name: str) -> None:
    assert read(name, CALLS[name] + END[name]) == Answer(parts=(call(),), finish_reason="tool_calls")


@pytest.mark.parametrize("name", THINKERS)
def test_thought_text_and_call(name: str) -> None:
    word = (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        if name == "harmony"
        else "I look.\n"
    )
    answer = read(name, THOUGHTS[name] + word + CALLS[name] + END[name])
    assert answer == Answer(parts=(THINK("hm"), TEXT("I look."), call()), finish_reason="tool_calls")


@pytest.mark.parametrize("name", sorted(TOY_MODELS))
def test_plain_text_answer(name: str) -> None:
    text = "<|channel|>final<|message|>\nhello\n" if name == "harmony" else "\nhello\n"
    assert read(name, text + END[name]) == Answer(parts=(TEXT("hello"),), finish_reason="stop")
    assert read(name, text, ended=False).parts == (TEXT("hello"),)


@pytest.mark.parametrize("name", CALLERS)
def test_half_a_call_is_hidden(name: str) -> None:
    """Only the beginning of an answer without marks, which may be no call, is."""
    body = CALLS[name].removesuffix("<|call|>")
    size = body.index("path") + 2
    answer = read(name, body[:size], ended=False)
    assert answer == Answer(parts=(), finish_reason="length")


@pytest.mark.parametrize("name", sorted(set(CALLERS) - {"bare_json"}))
def test_call_in_ordinary_tokens_is_text(name: str) -> None:
    toy = TOY_MODELS[name]
    sampled = toy.spelled("<|channel|>final<|message|>") if name == "harmony" else ids()
    answer = toy.read(sampled + toy.plain(CALLS[name]), tools=(LOOK,))
    assert answer == Answer(parts=(TEXT(CALLS[name]),), finish_reason="stop")


@pytest.mark.parametrize("name", THINKERS)
def test_call_in_thought_is_thinking(name: str) -> None:
    toy = TOY_MODELS[name]
    open_, close = (
        (HARMONY[3] + "analysis" + HARMONY[4], HARMONY[6])
        if name == "harmony"
        else [list(toy.control)[place] for place in (2, 3)]
    )
    held = CALLS[name].removesuffix("<|call|>").replace("<|constrain|>", "")
    assert read(name, open_ + held + close, ended=False).parts == (THINK(held.rstrip("\n")),)


@pytest.mark.parametrize("name", THINKERS)
def test_thinking_tokens_and_thought_end(name: str) -> None:
    toy = TOY_MODELS[name]
    parser = toy.parser()
    thought = THOUGHTS[name].removesuffix("<|start|>assistant").rstrip("\n")
    sampled = toy.spelled(thought)
    assert parser.thought_end is None
    parser.feed(sampled[:-1])
    assert parser.thought_end == sampled[-1]
    parser.feed(sampled[-1:])
    assert parser.thought_end is None
    head = len("analysis") + 1 if name == "harmony" else 0
    assert parser.thinking_tokens == len(sampled) - head
    opened = toy.parser(opens_thinking=True)
    assert opened.thought_end == sampled[-1]


# ── several calls ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json", "{0}\n{0}"),
        ("function_xml", "{0}\n{0}"),
        (
            "function_xml",
            "{0}".replace(
                "{0}",
                CALLS["function_xml"].replace("</tool_call>", "")
                + CALLS["function_xml"].replace("<tool_call>", ""),
            ),
        ),
        (
            "invoke_xml",
            CALLS["invoke_xml"].replace("</minimax:tool_call>", "")
            + CALLS["invoke_xml"].replace("<minimax:tool_call>", ""),
        ),
        ("arg_xml", "{0}\n{0}"),
        ("fenced", CALLS["fenced"].replace(DEEPSEEK[7], "\n") + CALLS["fenced"].replace(DEEPSEEK[6], "")),
        (
            "separated",
            CALLS["separated"].replace(DEEPSEEK[7], "") + CALLS["separated"].replace(DEEPSEEK[6], "\n \n"),
        ),
        ("numbered", CALLS["numbered"].replace(KIMI[7], "") + CALLS["numbered"].replace(KIMI[6], "")),
        ("braces", "{0}{0}"),
        ("bare_json", "{0};{0}"),
        ("bare_json", "{0} ; {0}\n"),
        ("bare_json", "<|python_tag|>{0}; {0}"),
        (
            "harmony",
            CALLS["harmony"].replace("<|call|>", "<|end|>") + "<|start|>assistant" + CALLS["harmony"],
        ),
    ],
)
def test_consecutive_calls_are_read(name: str, text: str) -> None:
    answer = read(name, text.replace("{0}", CALLS[name]) + END[name])
    assert answer == Answer(parts=(call(0), call(1)), finish_reason="tool_calls")


@pytest.mark.parametrize("name", ["fenced", "separated", "numbered"])
def test_text_between_calls_is_shown(name: str) -> None:
    """Whatever stands between calls is shown if it is text."""
    marks = list(TOY_MODELS[name].control)
    one = CALLS[name].removeprefix(marks[6]).removesuffix(marks[7])
    text = f"so\n{marks[6]} \n{one} and\n {marks[2]} too \n{one}\n{marks[7]}done{marks[0]}"
    parts = (TEXT("so"), call(), TEXT(f" and\n {marks[2]} too"), call(1), TEXT("done"))
    assert read(name, text).parts == parts
    assert read(name, f"{marks[6]}\n", ended=False).parts == ()


@pytest.mark.parametrize("name", ["fenced", "separated", "numbered"])
def test_good_beside_bad_calls(name: str) -> None:
    marks = list(TOY_MODELS[name].control)
    one = CALLS[name].removeprefix(marks[6]).removesuffix(marks[7])
    bad = one.replace("}", "")
    answer = read(name, f"{marks[6]}{one}\n{bad}\n{one}{marks[7]}{marks[0]}")
    assert answer == Answer(parts=(call(), TEXT(bad), call(1)), finish_reason="tool_calls", malformed_calls=1)


def test_bad_call_makes_region_text() -> None:
    """A region with one bad call is text as a whole."""
    good, bad = (
        CALLS["invoke_xml"].replace("</minimax:tool_call>", ""),
        CALLS["invoke_xml"].replace("<minimax:tool_call>", "").replace("</invoke>", ""),
    )
    assert read("invoke_xml", good + bad) == Answer(
        parts=(TEXT(good + bad),), finish_reason="stop", malformed_calls=1
    )


# ── tags that are tokens ──────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "head", "inner", "tail", "value"),
    [
        (
            "arg_xml",
            "<tool_call>look<arg_key>path</arg_key><arg_value>",
            "a</arg_value>b",
            "</arg_value></tool_call>",
            "a</arg_value>b",
        ),
        (
            "arg_xml",
            "<tool_call>look<arg_key>path</arg_key><arg_value>",
            "<arg_key>x",
            "</arg_value></tool_call>",
            "<arg_key>x",
        ),
        ("braces", '<|tool_call>call:look{path:<|"|>', 'a<|"|>b', '<|"|>}<tool_call|>', 'a<|"|>b'),
        (
            "json",
            '<tool_call>{"name": "look", "arguments": {"path": "',
            "</tool_call>",
            '"}}</tool_call>',
            "</tool_call>",
        ),
    ],
)
def test_spelled_tag_in_value_is_text(name: str, head: str, inner: str, tail: str, value: str) -> None:
    """A tag in a value that was not sampled as one is text."""
    toy = TOY_MODELS[name]
    answer = toy.read(toy.spelled(head) + toy.plain(inner) + toy.spelled(tail), tools=(LOOK,))
    (only,) = answer.calls
    assert json.loads(only.arguments) == {"path": value}


def test_spelled_separator_separates_nothing() -> None:
    """A separator that was not sampled as one separates nothing."""
    toy = TOY_MODELS["separated"]
    sampled = (
        toy.spelled(DEEPSEEK[6] + DEEPSEEK[4] + "look")
        + toy.plain(DEEPSEEK[8])
        + toy.spelled("{}" + DEEPSEEK[5])
    )
    assert toy.read(sampled) == Answer(
        parts=(TEXT(f"{DEEPSEEK[4]}look{DEEPSEEK[8]}{{}}{DEEPSEEK[5]}"),),
        finish_reason="stop",
        malformed_calls=1,
    )


# ── calls without marks ───────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "malformed"),
    [
        ('{"answer": 42}', 0),
        ('{"name": "Bob", "age": 3}', 0),
        ('{"name": "look", "parameters": {}} as you asked', 1),
        ('{"name": "look", "parameters": {}}\n{"name": "look", "parameters": {}}', 1),
        ('{"name": "look", "parameters": [1]}', 1),
        ('{"name": "look"}', 0),
        ("{", 0),
        (" {not json", 0),
        ('I look: {"name": "look", "parameters": {}}', 0),
        ('[{"name": "look", "parameters": {}}]', 0),
    ],
)
def test_non_call_answer_is_text(text: str, malformed: int) -> None:
    assert read("bare_json", text + END["bare_json"]) == Answer(
        parts=(TEXT(text),), finish_reason="stop", malformed_calls=malformed
    )


def test_possible_call_is_held_back() -> None:
    """An answer is held back while it may be a call, and not longer."""
    toy = TOY_MODELS["bare_json"]
    parser = toy.parser()
    shown = [parser.feed(toy.plain(text)) for text in (' {"name', '": "Bob", ', '"age', '"', ": 3", "}")]
    assert shown == [[], [], [], [TextDelta(' {"name": "Bob", "age"')], [TextDelta(": 3")], [TextDelta("}")]]
    assert parser.calls == 0


def test_python_tag_call_after_text() -> None:
    """A call behind the Python tag may follow text."""
    answer = read("bare_json", "I look.\n<|python_tag|>" + CALLS["bare_json"] + "<|eom_id|>")
    assert answer == Answer(parts=(TEXT("I look."), call()), finish_reason="tool_calls")
    code = "<|python_tag|>print(1)"
    assert read("bare_json", code + "<|eom_id|>") == Answer(
        parts=(TEXT(code),), finish_reason="stop", malformed_calls=1
    )
    cut = "<|python_tag|>" + CALLS["bare_json"]
    assert read("bare_json", cut, ended=False) == Answer(parts=(), finish_reason="length")


def test_stop_string_spares_calls() -> None:
    """A stop string is not looked for in a call, and ends other text."""
    assert read("bare_json", CALLS["bare_json"] + END["bare_json"], stop=("path",)).parts == (call(),)
    answer = read("bare_json", '{"path": 1}', stop=("ath",))
    assert answer == Answer(parts=(TEXT('{"p'),), finish_reason="stop_string", stop_string="ath")


# ── Harmony ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<|channel|>final<|message|>hello<|return|>", (TEXT("hello"),)),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", (TEXT("{}"),)),
        ("<|message|>hello<|return|>", (TEXT("hello"),)),
        ("hello<|return|>", (TEXT("hello"),)),
        (
            "<|channel|>final" + " a" * 300 + "<|message|>b",
            (TEXT("<|channel|>final" + " a" * 300 + "<|message|>b"),),
        ),
        ("<|start|> to=functions.look", (TEXT("<|start|> to=functions.look"),)),
        (" to=" + "a" * 500 + "<|channel|>", (TEXT(" to=" + "a" * 500 + "<|channel|>"),)),
        ("together<|message|>x<|return|>", (TEXT("together<|message|>x"),)),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>",
            (THINK("a\n\nb"),),
        ),
        (
            "<|channel|>commentary<|message|>a<|end|>\n<|start|>assistant<|channel|>final<|message|>b<|return|>",
            (TEXT("a\n\nb"),),
        ),
        (
            "<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b<|return|>",
            (THINK("a"), TEXT("b")),
        ),
        (" to=functions.look<|channel|>commentary json<|message|>" + ARGUMENTS + "<|call|>", (call(),)),
        ("<|channel|>commentary to=user<|message|>hello<|end|>", (TEXT("hello"),)),
        ("<|channel|>analysis to=functions.look code<|message|>" + ARGUMENTS + "<|call|>", (call(),)),
        ("<|channel|>final<|message|>a<|channel|>b<|start|>c<|return|>", (TEXT("a<|channel|>b<|start|>c"),)),
        ("<|channel|>final<|message|>a<|end|> and <|message|>b", (TEXT("a\n\n and <|message|>b"),)),
        ("<|channel|>other<|message|>a<|end|>", (TEXT("<|channel|>other<|message|>a"),)),
        ("<|end|><|start|>assistant<|channel|>final<|message|>a<|return|>", (TEXT("<|end|>a"),)),
        (
            "<|channel|>final<|message|>a<|end|><|start|>user<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>c",
            (TEXT("a\n\n<|start|>user<|message|>b\n\nc"),),
        ),
        ("<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>anal", (TEXT("a"),)),
        ("<|channel|>comm", ()),
        (
            "<|channel|>final<|channel|>final<|message|>a",
            (TEXT("<|channel|>final<|channel|>final<|message|>a"),),
        ),
    ],
)
def test_harmony_messages_are_read(text: str, parts: tuple[Part, ...]) -> None:
    answer = read("harmony", text)
    assert (answer.parts, answer.malformed_calls) == (parts, 0)


@pytest.mark.parametrize(
    ("text", "half"),
    [
        ("<|channel|>commentary to=functions.look <|constrain|>json<|message|>{bad", True),
        ("<|channel|>commentary to=functions.look <|constr", True),
        (" to=functions.look", True),
        ("<|channel|>commentary to=functions.look to=functions.see json<|message|>{}", False),
        ("<|channel|>commentary to=python<|message|>print(1)", True),
    ],
)
def test_unreadable_harmony_calls(text: str, half: bool) -> None:
    """`half`: it is not known what it would have been when it is cut, so that it is not shown."""
    shown = Answer(parts=(TEXT(text),), finish_reason="stop", malformed_calls=1)
    assert read("harmony", text, ended=True) == shown
    cut = Answer(parts=(), finish_reason="length") if half else evolve(shown, finish_reason="length")
    assert read("harmony", text, ended=False) == cut


@pytest.mark.parametrize(
    ("prompt", "text", "parts"),
    [
        ("<|start|>user<|message|>hi<|end|><|start|>assistant", "<|channel|>final<|message|>a", (TEXT("a"),)),
        ("<|start|>assistant", CALLS["harmony"], (call(),)),
        ("<|start|>assistant<|channel|>analysis", "<|message|>a<|end|>", (THINK("a"),)),
        ("<|start|>assistant<|channel|>analysis<|message|>so", " far<|end|>", (THINK(" far"),)),
        ("<|start|>assistant<|channel|>final<|message|>", "a", (TEXT("a"),)),
        (
            "<|start|>assistant to=functions.look<|channel|>",
            "commentary<|message|>" + ARGUMENTS + "<|call|>",
            (call(),),
        ),
        ("<|start|>assistant", "hello", (TEXT("hello"),)),
        ("<|start|>assistant<|channel|>", "odd<|message|>a", (TEXT("odd<|message|>a"),)),
        ("<|start|>assistant to=functions.look<|channel|>commentary<|message|>{", "}<|call|>", (TEXT("}"),)),
        ("<|start|>user<|message|>hi<|end|>", "<|start|>assistant<|channel|>final<|message|>a", (TEXT("a"),)),
        ("", "<|channel|>final<|message|>a", (TEXT("a"),)),
    ],
)
def test_harmony_sample_continues_its_prompt(prompt: str, text: str, parts: tuple[Part, ...]) -> None:
    """A sample of Harmony begins where its prompt ends."""
    assert read("harmony", text, prompt=TOY_MODELS["harmony"].spelled(prompt)).parts == parts


# ── what else is asked of samples ─────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "text", "mode"),
    [
        ("json", "a<think>b", "thinking"),
        ("json", "<think>b<|im_start|>assistant", "text"),
        ("json", "a</think><tool_call>", "call"),
        ("separated", DEEPSEEK[6], "between"),
        ("harmony", "<|start|>assistant", "header"),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>a", "thinking"),
        ("harmony", "<|start|>assistant<|channel|>final<|message|>a", "text"),
        ("harmony", "<|channel|>commentary to=functions.look json<|message|>{", "call"),
        ("harmony", "<|start|>assistant<|channel|>final<|message|>a<|end|>", "between"),
    ],
)
def test_open_part_at_end_of_ids(name: str, text: str, mode: Mode) -> None:
    """The mode at the end of the ids says which part is being written."""
    toy = TOY_MODELS[name]
    assert mode_at_end(toy.spelled(text), toy, toy.family) == mode


def test_thought_resumes_where_it_started() -> None:
    for name in ("json", "harmony"):
        toy = TOY_MODELS[name]
        assert mode_at_end(toy.spelled("a"), toy, toy.family, "thinking") == "thinking"


def test_model_call_ids_are_read() -> None:
    toy = TOY_MODELS["numbered"]
    calls = (
        CALLS["numbered"].replace("look:0", "look:7")
        + CALLS["numbered"].replace("}", "")
        + CALLS["numbered"].replace("look:0", "see:8")
    )
    assert model_call_ids(toy.spelled(calls + END["numbered"]), toy, toy.family) == (
        "functions.look:7",
        "functions.see:8",
    )
    earlier = toy.spelled(CALLS["numbered"] + END["numbered"] + "<|im_assistant|>" + calls)
    assert model_call_ids(earlier, toy, toy.family) == ("functions.look:7", "functions.see:8")
    thought = toy.spelled(CALLS["numbered"] + "</think>" + calls)
    assert model_call_ids(thought, toy, toy.family, opens_thinking=True) == (
        "functions.look:7",
        "functions.see:8",
    )
    assert (
        model_call_ids(
            TOY_MODELS["json"].spelled(CALLS["json"]), TOY_MODELS["json"], TOY_MODELS["json"].family
        )
        == ()
    )


@pytest.mark.parametrize(
    ("thought", "parts"),
    [
        ("thought\nhm\n", (THINK("hm"),)),
        ("thought\n", ()),
        ("thought", ()),
        ("thou", (THINK("thou"),)),
        ("thoughts\n", (THINK("thoughts"),)),
        ("hm\nthought\n", (THINK("hm\nthought"),)),
        ("thought\nthought\nhm", (THINK("thought\nhm"),)),
    ],
)
def test_thought_label_is_not_thought(thought: str, parts: tuple[Part, ...]) -> None:
    assert read("braces", f"<|channel>{thought}<channel|>").parts == parts
    assert read("braces", f"<|channel>{thought}", ended=False).parts == parts


def test_writing_starts_in_its_mode() -> None:
    """Only an answer that begins with text may be a call without marks."""
    toy = TOY_MODELS["bare_json"]
    assert toy.read(toy.plain(CALLS["bare_json"]), opens_thinking=True).parts == (THINK(CALLS["bare_json"]),)
    assert OutputWriter.__name__ == "OutputWriter"


# ── any pieces, any cuts ──────────────────────────────────────────────────────

STOPS = st.lists(st.text("ab\n {", min_size=1, max_size=3), max_size=2).map(tuple)


def pieces(name: str) -> st.SearchStrategy[list[str]]:
    """Whole calls and thoughts, their halves, marks, and text of all kinds."""
    body = CALLS.get(name, "")
    halves = (body[: len(body) // 2], body[len(body) // 2 :])
    words = (
        "a",
        " b",
        "\n",
        "{",
        "}",
        ";",
        '"',
        "\u00e9",
        "assistant",
        "analysis",
        " to=functions.look ",
        "thought\n",
        "final",
    )
    return st.lists(
        st.sampled_from((*TOY_MODELS[name].control, body, *halves, THOUGHTS.get(name, ""), *words)),
        max_size=9,
    )


@settings(max_examples=400, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(TOY_MODELS)),
    stop=STOPS,
    opens=st.booleans(),
    ended=st.booleans(),
    odd=st.binary(max_size=3),
)
def test_chunks_do_not_matter(
    data: st.DataObject, name: str, stop: tuple[str, ...], opens: bool, ended: bool, odd: bytes
) -> None:
    toy = TOY_MODELS[name]
    found = data.draw(pieces(name))
    at = data.draw(st.integers(0, len(found)))
    sampled = (
        toy.spelled("".join(found[:at]))
        + ids(list(odd))
        + toy.spelled("".join(found[at:]) + END[name] * ended)
    )
    cuts = data.draw(st.lists(st.integers(0, len(sampled)), max_size=6))
    edges = [0, *sorted(cuts), len(sampled)]
    ways = (
        [sampled],
        [sampled[start:end] for start, end in pairwise(edges)],
        [ids([token]) for token in sampled],
    )
    one, *others = [
        outcome(toy, way, ended=ended, opens_thinking=opens, stop=stop, tools=(LOOK,)) for way in ways
    ]
    assert others == [one, one]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(TOY_MODELS)), size=st.integers(1, 7), stop=STOPS)
def test_telling_changes_nothing_else(
    data: st.DataObject, name: str, size: int, stop: tuple[str, ...]
) -> None:
    toy = TOY_MODELS[name]
    sampled = toy.spelled("".join(data.draw(pieces(name))))
    plain, _, *counts = outcome(toy, [sampled], ended=False, stop=stop)
    parser, told = toy.parser(stop=stop), toy.told(sampled)
    deltas = [
        delta
        for start in range(0, len(sampled), size)
        for delta in parser.feed(sampled[start : start + size], told[start : start + size])
    ]
    finished = parser.finish("length")
    assert evolve(finished.answer, logprobs=()) == plain
    assert [parser.thinking_tokens, parser.malformed_calls, parser.model_call_ids] == counts
    assert (
        tuple(
            t for delta in (*deltas, *finished.deltas) if isinstance(delta, TextDelta) for t in delta.logprobs
        )
        == finished.answer.logprobs
    )
    places = [-token.logprob for token in finished.answer.logprobs]
    assert places == sorted(set(places))
    assert (finished.answer.text == "") == (finished.answer.logprobs == ())


@settings(max_examples=300, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(set(TOY_MODELS) - {"harmony"})))
def test_every_letter_shown_or_in_call(data: st.DataObject, name: str) -> None:
    """But for marks and blanks, an answer holds the very letters that were sampled, in their order; a call's
    are those of its own syntax.
    """
    toy = TOY_MODELS[name]
    stops = [list(toy.control)[token - 256] for token in toy.family.stop_ids]
    text = "".join(piece for piece in data.draw(pieces(name)) if piece not in stops)
    answer = read(name, text, ended=True, tools=())
    # halves can make calls of other letters
    usual = [{"path": "a b", "lines": 3}, {"path": "a b", "lines": "3"}]
    assume(all(part.name == "look" and json.loads(part.arguments) in usual for part in answer.calls))
    body = _letters(toy, CALLS.get(name, ""))
    shown = "".join(body if isinstance(part, ToolCall) else _letters(toy, part.text) for part in answer.parts)
    assert shown.replace("thought", "") == _letters(toy, text).replace("thought", "")


def _letters(toy: ToyModel, text: str) -> str:
    for mark in toy.control:
        text = text.replace(mark, "")
    return "".join(text.split())
