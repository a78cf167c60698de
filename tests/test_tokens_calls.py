"""What counts as a call: strict JSON, and the arguments exactly as they were written."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarnode.tokens.calls import ReadCall, read_call, read_object


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('\n{"name": "f", "arguments": {"b": 1, "a": "x"}}\n', '{"b": 1, "a": "x"}'),
        ('{"name":"f","arguments":{}}', "{}"),
        ('{ "arguments" : { "x":1.0 ,"y" : [1e5,"\\u00e9"] } , "name" : "f" }', '{ "x":1.0 ,"y" : [1e5,"\\u00e9"] }'),
        (
            '{"name": "f", "arguments": {\n  "a": "}{\\"",\n  "arguments": {"arguments": 1}\n}}',
            '{\n  "a": "}{\\"",\n  "arguments": {"arguments": 1}\n}',
        ),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "arguments": " {}\\n"}', "{}"),
        ('{"n\\u0061me": "f", "arguments": {"a": "\\ud83d\\ude42"}}', '{"a": "\\ud83d\\ude42"}'),
        ('{"name": "f", "arguments": {"n": 123456789012345678901234567890}}', '{"n": 123456789012345678901234567890}'),
    ],
)
def test_a_call_keeps_the_text_of_its_arguments(body: str, arguments: str) -> None:
    assert read_call(body) == ReadCall("f", arguments)


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
def test_a_call_that_is_not_strict_is_none(body: str) -> None:
    assert read_call(body) is None


OBJECTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(name=st.text(min_size=1, max_size=8), arguments=OBJECTS, ascii_only=st.booleans(), indent=st.none() | st.integers(0, 2), first=st.booleans())
def test_whatever_json_writes_is_read_as_it_is(name: str, arguments: dict[str, object], ascii_only: bool, indent: int | None, first: bool) -> None:
    value = {"name": name, "arguments": arguments} if first else {"arguments": arguments, "name": name}
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    read = read_call(f"\n{body}\n")
    assert read is not None
    assert read.name == name
    assert read.arguments in body
    assert json.loads(read.arguments) == arguments


@pytest.mark.parametrize(
    ("text", "value"), [('{"b": 1, "a": 2}', {"b": 1, "a": 2}), (" {} ", {}), ("[]", None), ("1", None), ("", None), ("{", None)]
)
def test_an_object_keeps_its_keys_order(text: str, value: dict[str, int] | None) -> None:
    read = read_object(text)
    assert read == value
    assert list(read or ()) == list(value or ())
