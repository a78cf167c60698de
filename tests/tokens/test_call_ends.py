"""Calls whose arguments hold closing tags, and calls in thoughts that are never closed: single inputs, each a
report against some server's parser.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from attrs import define
from syntax_kit import LOOK, TOY_MODELS, ToyModel

from polarnode.tokens import parser
from polarnode.tokens.syntax.call_ends import READINGS, StringTracker
from polarnode.tokens.syntax.call_faults import fault_of
from polarnode.tokens.tool_calls import CallBody

END = "<|im_end|>"


def xml(value: str, name: str = "look") -> str:
    return (
        f"<tool_call>\n<function={name}>\n<parameter=path>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )


def glm(value: str) -> str:
    return f"<tool_call>look\n<arg_key>path</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"


def invoke(value: str) -> str:
    return (
        f'<minimax:tool_call>\n<invoke name="look">\n<parameter name="path">{value}</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    )


def read(name: str, text: str, *, clean: bool = True, **asked: Any) -> tuple[list[Any], str, str, list[str]]:
    """Calls' paths, text, thinking and notes."""
    toy = TOY_MODELS[name]
    reading = toy.parser(tools=(LOOK,), **asked)
    reading.feed(toy.spelled(text))
    answer = reading.finish("stop" if clean else "length").answer
    paths = [json.loads(call.arguments).get("path") for call in answer.calls]
    return paths, answer.text, answer.thinking, list(reading.notes)


# ── closing tags as data ──────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        (
            "json",
            '<tool_call>\n{"name": "look", "arguments": {"path": "echo </tool_call> test"}}\n</tool_call>',
            "echo </tool_call> test",
        ),
        ("function_xml", xml("A block ends with </parameter> here."), "A block ends with </parameter> here."),
        ("function_xml", xml("a </tool_call> b"), "a </tool_call> b"),
        (
            "function_xml",
            xml("</parameter>\n</function>\n</tool_call>"),
            "</parameter>\n</function>\n</tool_call>",
        ),
        ("function_xml", xml(f"As in:\n{xml('x', 'y')}\nand so on"), f"As in:\n{xml('x', 'y')}\nand so on"),
        (
            "arg_xml",
            glm("before </tool_call> mid </arg_value> after"),
            "before </tool_call> mid </arg_value> after",
        ),
        ("arg_xml", glm("</arg_value>\n</tool_call>"), "</arg_value>\n</tool_call>"),
        ("arg_xml", glm(f"see {glm('x')}."), f"see {glm('x')}."),
        ("arg_xml", glm("see <arg_key>x</arg_key> so"), "see <arg_key>x</arg_key> so"),
        ("arg_xml", glm("a <arg_value>b</arg_value> c"), "a <arg_value>b</arg_value> c"),
        (
            "invoke_xml",
            invoke("</parameter> and </minimax:tool_call>"),
            "</parameter> and </minimax:tool_call>",
        ),
        ("braces", '<|tool_call>call:look{path:<|"|>a <tool_call|> b<|"|>}<tool_call|>', "a <tool_call|> b"),
        (
            "harmony",
            '<|channel|>commentary to=functions.look<|message|>{"path": "a <|end|> b"}<|call|>',
            "a <|end|> b",
        ),
    ],
)
def test_closing_tag_in_argument(name: str, text: str, value: str) -> None:
    assert read(name, text) == ([value], "", "", [])


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        (
            "json",
            '<tool_call>\n{"name": "look", "arguments": {"path": "open}}\n</tool_call>',
            '<tool_call>\n{"name": "look", "arguments": {"path": "b"}}\n</tool_call>',
        ),
        (
            "function_xml",
            "<tool_call>\n<function=look>\n<parameter=path>\na\n</function>\n</tool_call>",
            xml("b"),
        ),
        ("function_xml", "<tool_call>look</tool_call>", xml("b")),
        ("arg_xml", "<tool_call>look<arg_key>path</arg_key>a</arg_value></tool_call>", glm("b")),
    ],
)
def test_good_call_after_bad(name: str, bad: str, good: str) -> None:
    """A call that has no end of its own takes nothing from those that follow."""
    paths, text, _, notes = read(name, f"{bad}\n{good}")
    assert (paths, text) == (["b"], bad)
    assert len(notes) == 1
    assert notes[0].startswith("malformed call: ")


def test_text_after_call_is_shown() -> None:
    assert read("function_xml", f"{xml('a')}\nDone </parameter>.{END}")[:2] == (["a"], "Done </parameter>.")
    assert read("function_xml", f"{xml('a')}\nand\n{xml('b')}{END}")[:2] == (["a", "b"], "and")


def test_many_calls_in_one_answer() -> None:
    """Closing tags are data in the last call as in the first."""
    values = [f"{place} </parameter> and </tool_call> so" for place in range(30)]
    assert read("function_xml", "\n".join(map(xml, values)) + END) == (values, "", "", [])


def test_call_counted_before_it_is_sent() -> None:
    """A request for a single call ends at its closing tag, although a later one may win."""
    toy = TOY_MODELS["function_xml"]
    reading = toy.parser(tools=(LOOK,))
    assert reading.feed(toy.spelled(xml("a"))) == []
    assert reading.calls == 1
    finished = reading.finish("tool_calls")
    assert (len(finished.deltas), finished.answer.finish_reason) == (1, "tool_calls")


@pytest.mark.parametrize("cut", range(5, 60, 7))
def test_answer_cut_inside_a_value(cut: int) -> None:
    whole = xml("a </tool_call> b </tool_call> c and so on")
    paths, text, _, notes = read("function_xml", f"so\n{whole[:cut]}", clean=False)
    assert (paths, text) == ([], "so" if cut >= len("<tool_call>") else f"so\n{whole[:cut]}")
    assert notes == ["cut call: the answer ended inside a call, which is not shown"] * (
        paths == [] and text == "so"
    )


def test_readings_of_a_call_are_bounded() -> None:
    """A closing mark after the last reading is text, although the call could go on to it."""
    closers = "\n</parameter>\n</function>\n</tool_call>"
    (path,), text, _, _ = read("function_xml", xml("a" + closers * 3 * READINGS) + END)
    assert path == "a" + closers * READINGS
    assert text.count("</tool_call>") == 2 * READINGS


@pytest.mark.parametrize("size", range(1, 9))
def test_open_string_tracked_across_pieces(size: int) -> None:
    text = '{"a": "x \\" \\\\", "b\\\\": "\\\\\\"", "c": "'
    strings, found = StringTracker(), []
    for at in range(0, len(text), size):
        strings.read(text[at : at + size])
        found.append(strings.open)
    assert strings.open
    strings.read('"')
    assert not strings.open


@define(eq=False)
class Counted:
    """A tokenizer that counts the ids whose bytes are asked for, which every reading of an id does."""

    toy: ToyModel
    read: int = 0

    @property
    def control(self) -> Mapping[str, int]:
        return self.toy.control

    def token_bytes(self, token: int) -> bytes:
        self.read += 1
        return self.toy.token_bytes(token)


@pytest.mark.parametrize("opens_thinking", [False, True])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json", '<think>\n<tool_call>"x</think>'),
        ("json", '\n<tool_call>"</tool_call>'),
        ("function_xml", "\n<tool_call></tool_call>"),
        ("function_xml", "\n<tool_call>\n<function=look>\n<parameter=path>\nx</tool_call>"),
        ("arg_xml", "\n<tool_call>look<arg_key>path</arg_key><arg_value>x</tool_call>"),
        ("numbered", '<think>x<|tool_calls_section_begin|><|tool_call_begin|>"</think>'),
        ("harmony", '<|start|>assistant to=functions.look<|message|>"<|end|>'),
        ("braces", '<|tool_call>call:look{path:<|"|><tool_call|>'),
    ],
)
def test_call_rereadings_are_bounded(
    name: str, text: str, opens_thinking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks that fail over and over cost a few readings of an answer, streamed as at once. An id is read by
    the parser and by the trial of a draft; both read the whole answer again at most once above the bound.
    """
    monkeypatch.setattr(parser, "MAX_REREAD_IDS", 1000)
    toy = TOY_MODELS[name]
    sampled = toy.spelled(text)
    sampled *= 3000 // len(sampled)
    counted, answers = Counted(toy), []
    for step in (len(sampled), 999):
        reading = parser.Parser(
            tokenizer=counted,  # type: ignore[arg-type]
            family=toy.family,
            call_id=str,
            opens_thinking=opens_thinking,
        )
        for at in range(0, len(sampled), step):
            reading.feed(sampled[at : at + step])
        answers.append(reading.finish("stop").answer)
    assert answers[0] == answers[1]
    assert counted.read < 2 * 6 * len(sampled)


@pytest.mark.parametrize("name", ["json", "function_xml", "arg_xml"])
@pytest.mark.parametrize("text", ["</tool_call>", "<tool_call></tool_call>", "<think></think>"])
def test_marks_read_are_bounded(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows is text, streamed as at once, and the turn's end still ends it."""
    monkeypatch.setattr(parser, "MAX_READ_MARKS", 50)
    end = "<|user|>" if name == "arg_xml" else END
    sampled, answers = TOY_MODELS[name].spelled(text * 500 + "hi" + end + "never"), []
    for step in (len(sampled), 7):
        reading = TOY_MODELS[name].parser(tools=(LOOK,))
        for at in range(0, len(sampled), step):
            reading.feed(sampled[at : at + step])
        answers.append(reading.finish("stop").answer)
        assert reading.malformed_calls <= 50
    assert answers[0] == answers[1]
    assert answers[0].text.endswith("hi")


def test_thought_ends_beyond_mark_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser, "MAX_READ_MARKS", 50)
    found = read("json", "a <tool_call>" * 99 + "</think>Yes." + END, opens_thinking=True)
    assert (found[1], found[2].count("<tool_call>")) == ("Yes.", 99)


# ── why a call could not be read ──────────────────────────────────────────────


@pytest.mark.parametrize(
    ("syntax", "body", "why"),
    [
        ("json", '{"name": "f", "parameters": {}}', "it is no object of exactly name and arguments"),
        ("json", '{"name": "f"', "it is no JSON: Expecting ',' delimiter at character 12 of 12"),
        ("json", "[1]", "it is no JSON object"),
        ("json", '{"name": "f", "name": "g"}', "it is no strict JSON: a key is written twice"),
        ("function_xml", "read", "it does not begin with <function="),
        ("function_xml", "<function=f><parameter=a>1</function>", "a value has no </parameter>"),
        ("function_xml", "<function=f><parameter=a>1</parameter>", "it does not end with </function>"),
        (
            "invoke_xml",
            '<invoke name="f"><parameter name="a">1</parameter><parameter name="a">1</parameter></invoke>',
            "'a' is written twice",
        ),
        ("arg_xml", "f<arg_key>a</arg_key>1</arg_value>", "its tags and values do not fit together"),
        ("separated", "f{}", "it has no separator between its name and its arguments"),
        ("numbered", "call00003<sep>{}", "'call00003' is no id of the form functions.name:number"),
        ("fenced", "function<sep>f\n{}", "its arguments are in no json fence"),
        ("harmony", "to=functions.f<|message|>[]", "it is no JSON object"),
        ("braces", "call:f{a}", "it is no call:name{...} with values of this syntax"),
    ],
)
def test_malformed_call_reasons(syntax: Any, body: str, why: str) -> None:
    assert fault_of(CallBody(body, separator="<sep>"), syntax) == why


# ── calls in thoughts ─────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("function_xml", xml("a")),
        ("json", '<tool_call>\n{"name": "look", "arguments": {"path": "a"}}\n</tool_call>'),
        ("arg_xml", glm("a")),
        ("invoke_xml", invoke("a")),
    ],
)
def test_call_in_open_thought(name: str, call: str) -> None:
    assert read(name, f"I read it.\n{call}", opens_thinking=True) == (["a"], "", "I read it.", [])
    assert read(name, f"<think>I read it.\n{call}\nSo.\n{call}") == (["a", "a"], "So.", "I read it.", [])
    assert read(name, call, opens_thinking=True) == (["a"], "", "", [])
    # cut: it is not known that the thought would have been closed
    assert read(name, f"I read it.\n{call}", opens_thinking=True, clean=False)[0] == ["a"]


def test_call_in_middle_of_line() -> None:
    """A tag that a thought merely mentions is no call; Kimi's is never mentioned."""
    text = f"I write {xml('a')}"
    assert read("function_xml", text, opens_thinking=True) == ([], "", text, [])
    kimi = (
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        '{"path": "a"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    assert read("numbered", kimi, opens_thinking=True) == (["a"], "", "I look.", [])


def test_draft_in_closed_thought() -> None:
    text = f"I could\n{xml('a')}\nor not.\n</think>\n\n{xml('b')}{END}"
    paths, shown, thinking, notes = read("function_xml", text, opens_thinking=True)
    assert (paths, shown, notes) == (["b"], "", [])
    assert thinking == f"I could\n{xml('a')}\nor not."


def test_unfinished_draft_in_closed_thought() -> None:
    text = f"I could\n<tool_call>\n<function=lo\n</think>\n\n{xml('b')}{END}"
    paths, shown, thinking, notes = read("function_xml", text, opens_thinking=True)
    assert (paths, shown, thinking, notes) == (["b"], "", "I could\n<tool_call>\n<function=lo", [])


def test_end_of_thought_inside_argument() -> None:
    paths, _, thinking, notes = read("function_xml", f"hm\n{xml('a </think> b')}{END}", opens_thinking=True)
    assert (paths, thinking, notes) == (["a </think> b"], "hm", [])


def test_answer_cut_in_thought_draft() -> None:
    text = "hm\n<tool_call>\n<function=look"
    assert read("function_xml", text, opens_thinking=True, clean=False) == ([], "", text, [])
    paths, shown, thinking, notes = read("function_xml", text + END, opens_thinking=True)
    assert (paths, shown, thinking) == ([], text.removeprefix("hm\n"), "hm")
    assert notes == ["malformed call: it has no closing tag"]


def test_drafts_are_not_thinking_tokens() -> None:
    toy = TOY_MODELS["function_xml"]
    reading = toy.parser(tools=(LOOK,), opens_thinking=True)
    reading.feed(toy.spelled(f"hm\n{xml('a')}"))
    reading.finish("stop")
    assert reading.thinking_tokens == len("hm\n")


# ── gpt-oss ───────────────────────────────────────────────────────────────────


def test_tool_recipient_on_final_channel() -> None:
    head = "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>final to=functions.look<|message|>"
    for clean, end in ((True, "<|return|>"), (True, "<|end|>"), (False, "")):
        paths, text, thinking, notes = read("harmony", f"{head}This is text{end}", clean=clean)
        assert (paths, text, thinking, len(notes)) == ([], "This is text", "x", 1)
    assert read("harmony", head + '{"path": "a"}<|call|>')[0] == ["a"]


def test_half_tool_message_is_hidden() -> None:
    head = "<|channel|>commentary to=functions.look<|message|>"
    assert read("harmony", head + '{"path": "a', clean=False)[:2] == ([], "")
    assert read("harmony", "<|channel|>commentary to=functions.lo", clean=False)[:2] == ([], "")
    assert read("bare_json", '{"name": "look", "parameters": {"path": "a', clean=False)[:2] == ([], "")
