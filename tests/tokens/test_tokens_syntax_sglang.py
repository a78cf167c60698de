"""Our reading of every family against SGLang's own detectors: the same calls where it is right, and a list of
where it is not.

A difference that is no longer one fails, so that the list stays true.
"""

import json
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from call_writers import CALL_WRITERS, TOOLS, cases
from syntax_kit import DEEPSEEK, KIMI, THOUGHTS, TOY_MODELS

pytestmark = [
    pytest.mark.engine,  # its import alone takes as long as an engine's start
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed"),
]

PROGRAM = Path(__file__).parents[1] / "kits" / "sglang_program.py"
DETECTORS = {
    "json": "qwen25",
    "bare_json": "llama3",
    "function_xml": "qwen3_coder",
    "invoke_xml": "minimax-m2",
    "arg_xml": "glm45",
    "fenced": "deepseekv3",
    "separated": "deepseekv31",
    "numbered": "kimi_k2",
    "braces": "gemma4",
    "harmony": "gpt-oss",
}
REASONERS = {
    "json": "qwen3",
    "function_xml": "qwen3",
    "invoke_xml": "qwen3",
    "arg_xml": "glm45",
    "fenced": "deepseek-r1",
    "separated": "deepseek-v3",
    "numbered": "kimi_k2",
    "braces": "gemma4",
    "harmony": "gpt-oss",
}
# GLM 4.7 and 5 write a call in one line; Nemotron 3 a newline after each
ONE_LINE = [
    re.sub(r"\n(?=</?(?:arg_key|arg_value|tool_call)>)", "", CALL_WRITERS["arg_xml"](calls))
    for calls in cases()
]
LAST_NEWLINE = [CALL_WRITERS["function_xml"](calls) + "\n" for calls in cases()]


# ── where SGLang is wrong ─────────────────────────────────────────────────────


@frozen
class Difference:
    """A text that is one call; `right` is what it says, `why` what SGLang makes of it."""

    syntax: str
    text: str
    right: tuple[str, dict[str, Any]]
    why: str


def argument(syntax: str, key: str, written: str, value: Any, why: str) -> Difference:
    """A value between its tags."""
    texts = {
        "function_xml": (
            f"<tool_call>\n<function=look>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
        ),
        "invoke_xml": (
            '<minimax:tool_call>\n<invoke name="look">\n<parameter'
            f' name="{key}">{written}</parameter>\n</invoke>\n</minimax:tool_call>'
        ),
        "arg_xml": (
            f"<tool_call>look\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
        ),
        "braces": f"<|tool_call>call:look{{{key}:{written}}}<tool_call|>",
    }
    return Difference(syntax, texts[syntax], ("look", {key: value}), why)


DIFFERENCES = (
    argument(
        "function_xml", "text", "null", "null", "the word null is no string to it, whatever the schema says"
    ),
    argument(
        "function_xml",
        "point",
        '{"x": 1}',
        {"x": 1},
        "it follows no $ref, and hands an object on as a string",
    ),
    argument("function_xml", "deep", "yes", "yes", "what is no truth value becomes false"),
    argument(
        "function_xml",
        "where",
        "{'x': 1}",
        "{'x': 1}",
        "Python's spelling is taken for JSON: a repaired call",
    ),
    argument(
        "function_xml",
        "where",
        '{"x": 1, "x": 2}',
        '{"x": 1, "x": 2}',
        "of two equal keys the first is dropped",
    ),
    *(
        argument(syntax, "text", written, written, "a value is cut at the first closing tag that is data")
        for syntax, written in (
            ("function_xml", "it ends with </parameter> here"),
            ("invoke_xml", "it ends with </parameter> here"),
            ("arg_xml", "it ends with </arg_value> here"),
        )
    ),
    argument(
        "invoke_xml",
        "text",
        "a line\n",
        "a line\n",
        "newlines at a value's edges are dropped: a file loses its last one",
    ),
    argument("invoke_xml", "text", "none", "none", "the word none is no string to it"),
    argument("invoke_xml", "may", "here", "here", "where null is allowed, everything is null"),
    argument("invoke_xml", "deep", "1", "1", "numbers and words become truth values"),
    argument("invoke_xml", "point", '{"x": 1}', {"x": 1}, "it follows no $ref"),
    argument(
        "arg_xml", "text", '{"a":1}', '{"a":1}', "a string that is JSON is written anew, with other blanks"
    ),
    argument("arg_xml", "text", "true", "true", "a string that is JSON is written as Python writes it: True"),
    argument("arg_xml", "text", "1e3", "1e3", "a string that is a number is written as Python's: 1000.0"),
    argument("arg_xml", "text", '"quoted"', '"quoted"', "a string loses its quotes"),
    argument("arg_xml", "where", "{'x': 1}", "{'x': 1}", "Python's spelling is taken for JSON"),
    argument("braces", "share", "1e5", 1e5, "a number with an exponent is a string to it"),
    argument("braces", "may", "null", None, "null is a string to it"),
    argument("braces", "where", '{<|"|>a b<|"|>:1}', {"a b": 1}, "a quoted key keeps its quotes"),
    argument(
        "braces",
        "kinds",
        '[[<|"|>]<|"|>]]',
        [["]"]],
        "a bracket in a string inside a list of lists ends the list",
    ),
    Difference(
        "arg_xml",
        "<tool_call>stop</tool_call>",
        ("stop", {}),
        "a call without a newline behind its name is lost",
    ),
    Difference(
        "harmony",
        "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}<|call|>",
        ("look", {}),
        "a recipient before the channel, as the model's own template writes it, is not seen",
    ),
    Difference(
        "harmony",
        "<|start|>assistant<|channel|>commentary to=functions.a.look <|constrain|>json<|message|>{}<|call|>",
        ("a.look", {}),
        "a name is cut at its last dot",
    ),
    Difference(
        "harmony",
        "<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}<|end|>",
        ("look", {}),
        "a call that is ended as a message is, and not as a turn, is dropped",
    ),
)
# Texts that are no calls and that SGLang reads as some: repaired, or not strict.
LENIENT = (
    ("json", '<tool_call>\n{"name": "look", "arguments": {"count": 1, "count": 2}}\n</tool_call>'),
    ("json", '<tool_call>\n{"name": "look", "arguments": {"count": NaN}}\n</tool_call>'),
    ("bare_json", '{"name": "look", "parameters": {}} as you asked'),
    ("bare_json", "{'name': 'look', 'parameters': {}}"),
    ("function_xml", "<tool_call>\n<function=look>\n<parameter=text>\na\n</function>\n</tool_call>"),
    ("invoke_xml", '<minimax:tool_call>\n<invoke name="look">\nsome words\n</invoke>\n</minimax:tool_call>'),
    (
        "arg_xml",
        (
            "<tool_call>look\n<arg_key>text</arg_key>some"
            " words<arg_key>text</arg_key><arg_value>a</arg_value></tool_call>"
        ),
    ),
    (
        "separated",
        f'{DEEPSEEK[6]}{DEEPSEEK[4]}look{DEEPSEEK[8]}{{"count": 1, "count": 2}}{DEEPSEEK[5]}{DEEPSEEK[7]}',
    ),
    ("numbered", f'{KIMI[6]}{KIMI[4]}3{KIMI[8]}{{"count": 1}}{KIMI[5]}{KIMI[7]}'),
    ("braces", "<|tool_call>call:look{text:no quotes}<tool_call|>"),
)


# Closing tags in JSON, which says itself where it ends.
IN_STRINGS = (
    (
        "json",
        '<tool_call>\n{"name": "look", "arguments": {"text": "echo </tool_call> test"}}\n</tool_call>',
        "echo </tool_call> test",
    ),
)
# A call in a thought that is never closed; MiniMax's is lost by SGLang.
OPEN_THOUGHTS = ("json", "function_xml", "arg_xml", "numbered")


def open_thought(name: str) -> str:
    return "<think>I look.\n" + CALL_WRITERS[name]([("look", {"count": 3})])


# ── both sides ────────────────────────────────────────────────────────────────


@cache
def sglang() -> dict[tuple[str | None, str | None, str], dict[str, Any]]:
    """What SGLang makes of every text of this module, by call detector, reasoning detector and text."""
    texts = [
        (DETECTORS[name], None, text)
        for name in CALL_WRITERS
        for text in (*(CALL_WRITERS[name](case) for case in cases()),)
    ]
    texts += [(DETECTORS[each.syntax], None, each.text) for each in DIFFERENCES] + [
        (DETECTORS[name], None, text) for name, text in LENIENT
    ]
    texts += [("glm47", None, text) for text in ONE_LINE] + [
        ("qwen3_coder", None, text) for text in LAST_NEWLINE
    ]
    texts += [(DETECTORS[name], None, text) for name, text, _ in IN_STRINGS]
    texts += [(None, REASONERS[name], thought(name)) for name in REASONERS]
    texts += [(None, REASONERS[name], open_thought(name)) for name in OPEN_THOUGHTS]
    tools = [[tool.name, dict(tool.parameters)] for tool in TOOLS]
    asked = [
        {"calls": calls, "thoughts": thoughts, "text": text, "tools": tools}
        for calls, thoughts, text in texts
    ]
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], input=json.dumps(asked).encode(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return dict(zip(texts, json.loads(done.stdout.splitlines()[-1]), strict=True))


def thought(name: str) -> str:
    return THOUGHTS[name].replace("<|start|>assistant", "") + (
        "<|start|>assistant<|channel|>final<|message|>so" if name == "harmony" else "so"
    )


def theirs(name: str, text: str) -> list[list[Any]]:
    found: list[list[Any]] = sglang()[DETECTORS[name], None, text]["calls"]
    return found


def ours(name: str, text: str) -> list[list[Any]]:
    toy = TOY_MODELS[name]
    stop = "" if name == "harmony" else next(iter(toy.control))
    answer = toy.read(toy.spelled(text + stop), tools=TOOLS)
    return [[call.name, json.loads(call.arguments)] for call in answer.calls]


@pytest.mark.parametrize("name", sorted(CALL_WRITERS))
def test_template_output_reads_the_same(name: str) -> None:
    """Both parsers read the same from a template's output."""
    # gpt-oss makes one call a turn; what SGLang makes of more is below
    for calls in cases()[: -1 if name == "harmony" else None]:
        text = CALL_WRITERS[name](calls)
        expected = [[name, arguments] for name, arguments in calls]
        assert ours(name, text) == expected
        assert theirs(name, text) == expected, text


@pytest.mark.parametrize(
    ("syntax", "detector", "texts"),
    [("arg_xml", "glm47", ONE_LINE), ("function_xml", "qwen3_coder", LAST_NEWLINE)],
)
def test_newer_models_calls_agree(syntax: str, detector: str, texts: list[str]) -> None:
    for calls, text in zip(cases(), texts, strict=True):
        expected = [[name, arguments] for name, arguments in calls]
        assert ours(syntax, text) == sglang()[detector, None, text]["calls"] == expected


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda each: f"{each.syntax}: {each.why}")
def test_calls_sglang_reads_otherwise(difference: Difference) -> None:
    right = [list(difference.right)]
    assert ours(difference.syntax, difference.text) == right
    assert theirs(difference.syntax, difference.text) != right, (
        "SGLang is right here by now: take it off the list"
    )


@pytest.mark.parametrize(("name", "text"), LENIENT, ids=lambda text: text[:40])
def test_calls_that_sglang_repairs(name: str, text: str) -> None:
    toy = TOY_MODELS[name]
    answer = toy.read(toy.spelled(text + next(iter(toy.control))), tools=TOOLS)
    section_mark = {"separated": DEEPSEEK, "numbered": KIMI}.get(name, ("",) * 8)
    assert (answer.calls, answer.text) == (
        (),
        text.removeprefix(section_mark[6]).removesuffix(section_mark[7]),
    )
    assert theirs(name, text) != [], "SGLang is strict here by now: take it off the list"


@pytest.mark.parametrize("name", sorted(REASONERS))
def test_thoughts_read_the_same(name: str) -> None:
    toy, text = TOY_MODELS[name], thought(name)
    answer = toy.read(toy.spelled(text))
    found = sglang()[None, REASONERS[name], text]
    assert (answer.thinking, answer.text) == (found["thinking"].strip("\n"), found["text"].strip("\n"))


@pytest.mark.parametrize(("name", "text", "value"), IN_STRINGS)
def test_closing_tags_in_strings(name: str, text: str, value: str) -> None:
    assert ours(name, text) == theirs(name, text) == [["look", {"text": value}]]


@pytest.mark.parametrize("name", OPEN_THOUGHTS)
def test_calls_in_open_thoughts(name: str) -> None:
    toy, text = TOY_MODELS[name], open_thought(name)
    answer = toy.read(toy.spelled(text), tools=TOOLS)
    found = sglang()[None, REASONERS[name], text]
    assert answer.thinking == found["thinking"].strip("\n") == "I look."
    assert [call.name for call in answer.calls] == ["look"]
    assert found["text"] == text.removeprefix("<think>I look.\n")
