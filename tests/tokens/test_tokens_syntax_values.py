"""Bare text between tags as JSON: what a tool's schema says a value is."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarnode.core.conversation import Tool
from polarnode.tokens.syntax.tag_calls import arguments_json

NESTED = {
    "$defs": {
        "Point": {"type": "object"},
        "Again": {"$ref": "#/$defs/Point"},
        "Circle": {"$ref": "#/$defs/Circle"},
        "a/b~c": {"type": "integer"},
    }
}


def value(text: str, schema: Any, *, untyped: bool = False) -> str:
    """A text as the value of a parameter with this schema, in JSON."""
    tool = Tool(name="f", parameters={"type": "object", "properties": {"x": schema}, **NESTED})
    found = arguments_json([("x", text)], "f", (Tool(name="g"), tool), untyped=untyped)
    assert found is not None
    return found.removeprefix('{"x": ').removesuffix("}")


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, " a\n", '" a\\n"'),
        ({"type": "string"}, "5", '"5"'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "string"}, '"quoted"', '"\\"quoted\\""'),
        ({"type": "string"}, "", '""'),
        ({"type": "string"}, "caf\u00e9 \U0001f642", '"caf\u00e9 \U0001f642"'),
        ({"type": "integer"}, "5", "5"),
        ({"type": "integer"}, "\n-5 ", "-5"),
        ({"type": "integer"}, "5.0", "5.0"),
        ({"type": "integer"}, "5.5", '"5.5"'),
        ({"type": "integer"}, "05", '"05"'),
        ({"type": "integer"}, "five", '"five"'),
        ({"type": "integer"}, "true", '"true"'),
        ({"type": "integer"}, "", '""'),
        ({"type": "integer"}, "9" * 5000, '"' + "9" * 5000 + '"'),
        ({"type": "number"}, "5", "5"),
        ({"type": "number"}, "1.50", "1.50"),
        ({"type": "number"}, "1e3", "1e3"),
        ({"type": "number"}, "1e999", '"1e999"'),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "boolean"}, "true", "true"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "False", "false"),
        ({"type": "boolean"}, "yes", '"yes"'),
        ({"type": "boolean"}, "1", '"1"'),
        ({"type": "object"}, ' {"b": 1.0,\n"a": []} ', '{"b": 1.0,\n"a": []}'),
        ({"type": "object"}, "[1]", '"[1]"'),
        ({"type": "object"}, "{'a': 1}", "\"{'a': 1}\""),
        ({"type": "object"}, '{"a": 1, "a": 2}', '"{\\"a\\": 1, \\"a\\": 2}"'),
        ({"type": "array"}, '["a"]', '["a"]'),
        ({"type": "array"}, "a, b", '"a, b"'),
        ({"type": "null"}, "null", "null"),
        ({"type": "null"}, "None", "null"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "5", '"5"'),
        ({"type": ["integer", "string"]}, "5", "5"),
        ({"type": ["integer", "string"]}, "five", '"five"'),
        ({"type": ["string", "integer"]}, "5", '"5"'),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", "null"),
        ({"oneOf": [{"type": "array"}, {"$ref": "#/$defs/Point"}]}, "{}", "{}"),
        ({"allOf": [{"description": "x"}, {"type": "integer"}]}, "5", "5"),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', '{"x": 1}'),
        ({"$ref": "#/$defs/Again"}, "{}", "{}"),
        ({"$ref": "#/$defs/Circle"}, "{}", '"{}"'),
        ({"$ref": "#/$defs/a~1b~0c"}, "1", "1"),
        ({"$ref": "#/nowhere/at/all"}, "1", '"1"'),
        ({"$ref": "https://example.com/schema"}, "1", '"1"'),
        ({"enum": ["a", "1"]}, "1", '"1"'),
        ({"enum": [1, 2, None]}, "1", "1"),
        ({"enum": [1, 2, None]}, "null", "null"),
        ({"enum": [1.0, 2.5]}, "2.5", "2.5"),
        ({"const": True}, "true", "true"),
        ({"properties": {}}, "{}", "{}"),
        ({"items": {}}, "[]", "[]"),
        ({"type": "STRING"}, "5", '"5"'),
        ({"type": "int"}, "5", "5"),
        ({"type": "dict"}, "{}", "{}"),
        ({}, "5", '"5"'),
        (True, "5", '"5"'),
        (None, "5", '"5"'),
        ({"type": 5}, "5", '"5"'),
        ({"type": "file"}, "5", '"5"'),
    ],
)
def test_schema_decides_the_value(schema: Any, text: str, expected: str) -> None:
    found = value(text, schema)
    assert found == expected
    assert json.loads(found) is not Ellipsis


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[
            (" 5 ", "5"),
            ("true", "true"),
            ("null", "null"),
            ('{"a": 1}', '{"a": 1}'),
            ("[1, 2]", "[1, 2]"),
            ("1.0", "1.0"),
        ],
        *[("a", '"a"'), ('"a"', '"\\"a\\""'), ("True", '"True"'), ("", '""'), ("05", '"05"')],
    ],
)
def test_untyped_value_read_as_json(text: str, expected: str) -> None:
    """A value without a type is read where the template writes JSON."""
    assert value(text, {}, untyped=True) == expected
    assert value(text, {"type": "string"}, untyped=True) == json.dumps(text)


def test_unknown_tool_or_parameter() -> None:
    for tools in (
        (),
        (Tool(name="f", parameters={"type": "object", "properties": {"y": {"type": "integer"}}}),),
    ):
        assert arguments_json([("x", "5")], "f", tools, untyped=False) == '{"x": "5"}'
        assert arguments_json([("x", "5")], "f", tools, untyped=True) == '{"x": 5}'
    free = Tool(name="f", parameters={"type": "object", "additionalProperties": {"type": "integer"}})
    assert arguments_json([("x", "5")], "f", (free,), untyped=False) == '{"x": 5}'


def test_parameters_found_in_schema_branches() -> None:
    branch = {"properties": {"x": {"type": "integer"}}}
    for word in ("anyOf", "oneOf", "allOf"):
        tool = Tool(name="f", parameters={"type": "object", word: [{"properties": {"y": {}}}, branch]})
        assert arguments_json([("x", "5")], "f", (tool,), untyped=False) == '{"x": 5}'


def test_circular_schema_is_read_once() -> None:
    again: dict[str, Any] = {"anyOf": [{"$ref": f"#/$defs/{place}"} for place in range(40)]}
    tool = Tool(
        name="f",
        parameters={**again, "properties": {"x": again}, "$defs": {str(place): again for place in range(40)}},
    )
    assert arguments_json([("x", "5")], "f", (tool,), untyped=True) == '{"x": 5}'
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        deep = {"anyOf": [deep]}
    assert value("5", deep) == '"5"'


def test_order_kept_and_duplicates_refused() -> None:
    """The order is the model's, and no parameter is written twice."""
    tool = Tool(name="f", parameters={"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}})
    assert arguments_json([("b", "1"), ("a", "2")], "f", (tool,), untyped=False) == '{"b": 1, "a": 2}'
    assert arguments_json([("b", "1"), ("b", "1")], "f", (tool,), untyped=False) is None
    assert arguments_json([], "f", (tool,), untyped=False) == "{}"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KINDS = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


@settings(max_examples=300, deadline=None)
@given(found=JSON)
def test_what_a_template_writes_is_read_back(found: Any) -> None:
    """Strings as they are, anything else as JSON: with its schema the value comes back, whatever it is."""
    text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    schema = {"type": KINDS[type(found)]}
    assert json.loads(value(text, schema)) == found
    assert json.loads(value(text, {"anyOf": [schema, {"type": "null"}]})) == (
        None if text in ("null", "None") else found
    )


SCHEMAS = st.recursive(
    st.sampled_from(
        (
            {},
            {"type": "integer"},
            {"type": "string"},
            {"type": ["null", "array"]},
            {"enum": [1, "a"]},
            {"$ref": "#/$defs/Circle"},
            None,
            5,
        )
    ),
    lambda inner: st.builds(
        lambda word, branches: {word: branches},
        st.sampled_from(("anyOf", "allOf", "oneOf")),
        st.lists(inner, max_size=3),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(text=st.text('ab0123.-eE"{}[]:, \ntrufalsn', max_size=12), schema=SCHEMAS, untyped=st.booleans())
def test_schema_text_becomes_same_json(text: str, schema: Any, untyped: bool) -> None:
    """Any text with any schema is json of the same meaning."""
    found = json.loads(value(text, schema, untyped=untyped))
    assert found == text or found == json.loads({"None": "null"}.get(text.strip(), text))
