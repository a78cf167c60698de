"""What a call is in each family's syntax: the arguments as the model wrote them, and everything that is no
call.
"""

import json
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarnode.core.conversation import Tool
from polarnode.tokens.families import CallSyntax
from polarnode.tokens.syntax import READERS, json_calls
from polarnode.tokens.syntax.tag_calls import is_name
from polarnode.tokens.tool_calls import CallBody, ReadCall

# ── json ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('\n{"name": "f", "arguments": {"b": 1, "a": "x"}}\n', '{"b": 1, "a": "x"}'),
        ('{"name":"f","arguments":{}}', "{}"),
        (
            '{ "arguments" : { "x":1.0 ,"y" : [1e5,"\\u00e9"] } , "name" : "f" }',
            '{ "x":1.0 ,"y" : [1e5,"\\u00e9"] }',
        ),
        (
            '{"name": "f", "arguments": {\n  "a": "}{\\"",\n  "arguments": {"arguments": 1}\n}}',
            '{\n  "a": "}{\\"",\n  "arguments": {"arguments": 1}\n}',
        ),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "arguments": " {}\\n"}', "{}"),
        ('{"n\\u0061me": "f", "arguments": {"a": "\\ud83d\\ude42"}}', '{"a": "\\ud83d\\ude42"}'),
        (
            '{"name": "f", "arguments": {"n": 123456789012345678901234567890}}',
            '{"n": 123456789012345678901234567890}',
        ),
    ],
)
def test_call_keeps_its_arguments_text(body: str, arguments: str) -> None:
    assert json_calls.read_json(CallBody(body), ()) == (ReadCall("f", arguments),)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "\n",
        "f(x=1)",
        "[]",
        '"f"',
        '{"name": "f"}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": {}, "id": 1}',
        '{"name": "f", "parameters": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"name": null, "arguments": {}}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": []}',
        '{"name": "f", "arguments": ""}',
        '{"name": "f", "arguments": "[1]"}',
        '{"name": "f", "arguments": "{\\"a\\": 1, \\"a\\": 2}"}',
        '{"name": "f", "name": "g", "arguments": {}}',
        '{"name": "f", "arguments": {"a": 1, "a": 1}}',
        '{"name": "f", "arguments": {"deep": [{"a": 1, "a": 2}]}}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": -Infinity}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": {"a": 01}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "\\udc00", "arguments": {}}',
        '{"name": "f", "arguments": {"a": "line\nbreak"}}',
        '{"name": "f", "arguments": {"a": 1,}}',
        "{'name': 'f', 'arguments': {}}",
        '{"name": "f", "arguments": {}',
        '{"name": "f", "arguments": {}}}',
        '{"name": "f", "arguments": {}} {"name": "g", "arguments": {}}',
        '\u00a0{"name": "f", "arguments": {}}',
        '{"name": "f", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}",
        '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
    ],
)
def test_non_strict_call_is_none(body: str) -> None:
    assert json_calls.read_json(CallBody(body), ()) is None


OBJECTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(
    name=st.text(min_size=1, max_size=8),
    arguments=OBJECTS,
    ascii_only=st.booleans(),
    indent=st.none() | st.integers(0, 2),
    first=st.booleans(),
)
def test_any_json_call_is_read(
    name: str, arguments: dict[str, object], ascii_only: bool, indent: int | None, first: bool
) -> None:
    """Whatever json writes is read as it is."""
    for key in ("arguments", "parameters"):
        value = {"name": name, key: arguments} if first else {key: arguments, "name": name}
        body = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
        read = READERS["json" if key == "arguments" else "bare_json"](CallBody(f"\n{body}\n"), ())
        assert read is not None
        assert read[0].name == name
        assert read[0].arguments in body
        assert json.loads(read[0].arguments) == arguments


# ── the others ────────────────────────────────────────────────────────────────

TYPED = Tool(
    name="look",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "lines": {"type": "integer"},
            "share": {"type": "number"},
            "deep": {"type": "boolean"},
            "where": {"type": "object"},
            "kinds": {"type": "array", "items": {"type": "string"}},
        },
    },
)


def read(
    syntax: str, body: str, *, tools: Sequence[Tool] = (TYPED,), separator: str = "<sep>"
) -> tuple[ReadCall, ...] | None:
    return READERS[syntax](CallBody(body, separator=separator), tools)  # type: ignore[index]


FUNCTION = (
    "<function=look>\n<parameter=path>\na\n\n</parameter>\n<parameter=lines>\n3\n</parameter>\n</function>"
)
INVOKE = (
    '<invoke name="look">\n<parameter name="path">a\n</parameter>\n<parameter'
    ' name="lines">3</parameter>\n</invoke>'
)
EXPECTED = '{"path": "a\\n", "lines": 3}'


@pytest.mark.parametrize(
    ("syntax", "body", "calls"),
    [
        ("function_xml", f"\n{FUNCTION}\n", [("look", EXPECTED)]),
        ("function_xml", f"{FUNCTION}\n{FUNCTION}", [("look", EXPECTED)] * 2),
        ("function_xml", "<function=stop>\n</function>", [("stop", "{}")]),
        (
            "function_xml",
            "<function=look><parameter=path>a</parameter></function>",
            [("look", '{"path": "a"}')],
        ),
        (
            "function_xml",
            "<function=look>\n<parameter=path>\n</function>\n</parameter>\n</function>",
            [("look", '{"path": "</function>"}')],
        ),
        ("invoke_xml", f"\n{INVOKE}\n", [("look", EXPECTED)]),
        ("invoke_xml", f"\n{INVOKE}\n{INVOKE}\n", [("look", EXPECTED)] * 2),
        ("invoke_xml", '<invoke name="stop">\n</invoke>', [("stop", "{}")]),
        (
            "arg_xml",
            "look\n<arg_key>path</arg_key>\n<arg_value>a\n</arg_value>\n<arg_key>lines</arg_key>\n<arg_value>3</arg_value>\n",
            [("look", EXPECTED)],
        ),
        (
            "arg_xml",
            "look<arg_key>path</arg_key><arg_value>a\n</arg_value><arg_key>lines</arg_key><arg_value>3</arg_value>",
            [("look", EXPECTED)],
        ),
        ("arg_xml", "stop\n", [("stop", "{}")]),
        ("fenced", 'function<sep>look\n```json\n{"path": "```"}\n```', [("look", '{"path": "```"}')]),
        ("separated", 'look<sep>{"a": 1.0}', [("look", '{"a": 1.0}')]),
        ("numbered", 'functions.look:12<sep>{"a": 1}', [("look", '{"a": 1}', "functions.look:12")]),
        ("numbered", "functions.a.look:0<sep>{}", [("a.look", "{}", "functions.a.look:0")]),
        ("numbered", "look:0<sep>{}", [("look", "{}", "look:0")]),
        ("braces", "call:look{}", [("look", "{}")]),
        (
            "braces",
            (
                'call:look{path:<|"|>a "quoted"'
                ' {b}\n<|"|>,n:1.50,deep:true,none:null,list:[1,[],<|"|><|"|>],where:{<|"|>x'
                ' y<|"|>:{},z:-2e3}}'
            ),
            [
                (
                    "look",
                    (
                        '{"path": "a \\"quoted\\" {b}\\n", "n": 1.50, "deep": true, "none": null, "list": [1,'
                        ' [], ""], "where": {"x y": {}, "z": -2e3}}'
                    ),
                )
            ],
        ),
        ("bare_json", ' {"name": "look", "parameters": {"a": 1}}', [("look", '{"a": 1}')]),
        ("bare_json", '{"type": "function", "name": "look", "arguments": {}}', [("look", "{}")]),
        (
            "bare_json",
            '{"name": "a", "parameters": {"x": ";"}}; {"name": "b", "parameters": {}}\n',
            [("a", '{"x": ";"}'), ("b", "{}")],
        ),
        (
            "harmony",
            '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"a": 1}',
            [("look", '{"a": 1}')],
        ),
        (
            "harmony",
            '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"a": 1} ',
            [("look", '{"a": 1}')],
        ),
        (
            "harmony",
            "<|start|>assistant<|channel|>analysis to=functions.a.look code<|message|>",
            [("a.look", "{}")],
        ),
        ("harmony", " to=python<|channel|>commentary<|message|>{}", [("python", "{}")]),
    ],
)
def test_calls_of_every_syntax(syntax: str, body: str, calls: list[tuple[str, ...]]) -> None:
    assert read(syntax, body) == tuple(ReadCall(*call) for call in calls)


@pytest.mark.parametrize(
    ("syntax", "body"),
    [
        *[
            ("function_xml", body)
            for body in ("", "\n", "look", f"{FUNCTION} and", FUNCTION[:-1], f"x{FUNCTION}")
        ],
        ("function_xml", FUNCTION.replace("</parameter>", "", 1)),
        ("function_xml", FUNCTION.replace("lines", "path")),
        ("function_xml", FUNCTION.replace("=look", "=")),
        ("function_xml", FUNCTION.replace("=look", "= look")),
        ("function_xml", FUNCTION.replace("=lines", "=")),
        ("function_xml", "<function=look>path=a</function>"),
        ("function_xml", "<function=look><parameter=path>a"),
        *[
            ("invoke_xml", body)
            for body in ("", "look", f"{INVOKE} and", INVOKE[:-1], f"{INVOKE}\n{INVOKE[:-3]}")
        ],
        ("invoke_xml", INVOKE.replace("lines", "path")),
        ("invoke_xml", INVOKE.replace('="look"', "=look")),
        *[
            ("arg_xml", body)
            for body in (
                "",
                "\n",
                "look <arg_key>a</arg_key>",
                "look<arg_value>1</arg_value>",
                "<arg_key>a</arg_key>",
            )
        ],
        (
            "arg_xml",
            "look<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>1</arg_value>",
        ),
        ("arg_xml", "look<arg_key>a</arg_key><arg_value>1"),
        ("arg_xml", "look<arg_key>a</arg_key>x<arg_value>1</arg_value>"),
        ("arg_xml", "look<arg_key>a</arg_key><arg_value>1</arg_value>x"),
        ("arg_xml", "two\nlines<arg_key>a</arg_key><arg_value>1</arg_value>"),
        *[
            ("fenced", body)
            for body in (
                "",
                "function<sep>look",
                "function<sep>look\n```json\n{}",
                "function<sep>look\n```json\n{}```",
            )
        ],
        *[
            ("fenced", f"{head}\n```json\n{{}}\n```")
            for head in ("look", "tool<sep>look", "function<sep>", "function<sep> look")
        ],
        ("fenced", "function<sep>look\n```json\n[]\n```"),
        ("fenced", "function<sep>look\n```json\n{}\n``` "[:-1] + "x"),
        *[
            ("separated", body)
            for body in (
                "",
                "look",
                "look{}",
                "<sep>{}",
                "look<sep>",
                "look<sep>[]",
                "look<sep>{} x",
                "look<sep>{}<sep>{}",
            )
        ],
        *[
            ("numbered", f"{head}<sep>{{}}")
            for head in (
                "",
                "3",
                "look",
                "functions.:0",
                "functions.look:",
                "functions.look:x",
                "look:\u0663",
            )
        ],
        ("numbered", "functions.look:0<sep>"),
        *[
            ("braces", f"call:look{body}")
            for body in (
                "",
                "{",
                "{a}",
                "{a:}",
                "{a:1",
                "{a:1}x",
                "{a:1 b:2}",
                "{a:1,}",
                "{,}",
                "{a:x}",
                "{a:1,a:2}",
            )
        ],
        *[
            ("braces", f"call:look{body}")
            for body in ('{a:<|"|>x}', '{<|"|>a<|"|>1}', "{a:[1}", "{a:NaN}", '{a:"x"}', "{a:01}", "{{}:1}")
        ],
        *[("braces", body) for body in ("", "look{}", "call:{}", "call: look{}")],
        ("braces", "call:look{a:" + "[" * 5000 + "]" * 5000 + "}"),
        *[
            ("bare_json", body)
            for body in (
                "",
                "{}",
                "hello",
                '{"name": "f"}',
                '{"parameters": {}}',
                '[{"name": "f", "parameters": {}}]',
            )
        ],
        *[
            ("bare_json", f'{{"name": "f", "parameters": {{}}}}{rest}')
            for rest in (";", " and", ', {"name": "f", "parameters": {}}', "; {}")
        ],
        *[
            ("bare_json", f'{{"name": "f", {rest}}}')
            for rest in ('"parameters": {}, "arguments": {}', '"parameters": 1', '"arguments": {}, "x": 1')
        ],
        ("bare_json", '{"type": "tool", "name": "f", "parameters": {}}'),
        *[
            ("harmony", f"{head}<|message|>{{}}")
            for head in ("", "<|channel|>final", " to=functions.<|channel|>commentary", " to=user")
        ],
        *[
            ("harmony", f"<|channel|>commentary to=functions.f json<|message|>{body}")
            for body in ("[]", "{", '{"a": 1} x')
        ],
        ("harmony", "<|channel|>commentary to=functions.f json"),
        *[
            ("harmony", f"{head}<|message|>{{}}")
            for head in ("<|start|>user to=functions.f", " to=functions.f to=functions.g", "x to=functions.f")
        ],
        *[
            ("harmony", f" to=functions.f{rest}<|message|>{{}}")
            for rest in ("<|channel|>other", "<|channel|>final json code", "<|channel|>final<|channel|>")
        ],
        ("none", '{"name": "f", "arguments": {}}'),
    ],
)
def test_text_that_is_no_call(syntax: str, body: str) -> None:
    assert read(syntax, body) is None


def test_no_head_without_separator() -> None:
    for syntax in ("fenced", "separated", "numbered"):
        assert read(syntax, "functions.look:0{}", separator="") is None


def test_every_syntax_has_reader() -> None:
    assert set(READERS) == set(get_args(CallSyntax))


def test_name_without_tags_or_outer_blanks() -> None:
    assert all(map(is_name, ("look", "a.look-2", "two words", "\u00e9")))
    assert not any(map(is_name, ("", " look", "look\n", "a\nb", "<look", "look>", 'lo"ok')))


# ── an answer that may be a call ──────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "given_up"),
    [
        ('{"name": "f", "parameters": {"a": [1, {"x": "}\\""}]}}; {"name"', None),
        (' \n{"type": "function", "name": "f", "arguments": {}}\n', None),
        ("{", None),
        ("hello", 0),
        ("[{}]", 0),
        ('{"answer": 42}', 8),
        ('{"n\\u0061me": 1}', 3),
        ("{name: 1}", 1),
        ('{"name": "f"} and', 14),
        ('{"name": "f"}{', 13),
        ('{"name": "f", "parameters": {}, 1', 32),
    ],
)
def test_impossible_call_given_up_early(text: str, given_up: int | None) -> None:
    """An answer is given up as a call at the first letter that no call has."""
    begun = json_calls.BareCallScanner()
    found = next((place for place, letter in enumerate(text) if not begun.goes_on(letter)), None)
    assert found == given_up
    assert json_calls.BareCallScanner().goes_on(text) == (given_up is None)


@settings(max_examples=200, deadline=None)
@given(arguments=OBJECTS, indent=st.none() | st.integers(0, 2), several=st.booleans())
def test_no_call_is_given_up(arguments: dict[str, object], indent: int | None, several: bool) -> None:
    text = json.dumps({"name": "f", "parameters": arguments}, indent=indent)
    text = f"{text}; {text}" if several else text
    assert json_calls.read_bare_json(CallBody(text), ()) is not None
    begun = json_calls.BareCallScanner()
    assert begun.goes_on(text)
    assert begun.called
