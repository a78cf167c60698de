"""Strict JSON as calls are made of it: values, objects, and the arguments exactly as they were written."""

import pytest

from polarnode.tokens.tool_calls import arguments_of, read_first, read_object, read_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"b": 1, "a": 2}', {"b": 1, "a": 2}),
        (" {} ", {}),
        ("[]", None),
        ("1", None),
        ("", None),
        ("{", None),
    ],
)
def test_object_keeps_its_key_order(text: str, value: dict[str, int] | None) -> None:
    read = read_object(text)
    assert read == value
    assert list(read or ()) == list(value or ())


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), (" true ", True), ("null", None), ('"a"', "a"), ("[1, {}]", [1, {}]), ("1.5e3", 1500.0)],
)
def test_any_json_value_is_read(text: str, value: object) -> None:
    assert read_value(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nil",
        "True",
        "01",
        "1 2",
        "NaN",
        "1e999",
        '"\\ud800"',
        '{"a": 1, "a": 1}',
        "[" * 5000 + "]" * 5000,
        "9" * 5000,
    ],
)
def test_non_strict_json_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own words differ by what is wrong
        read_value(text)


def test_first_object_and_its_end() -> None:
    assert read_first('x{"a": 1}; {"b": 2}', 1) == ({"a": 1}, 9)
    assert read_first('{"a": "\\ud800"}', 0) is None
    assert read_first("[1]", 0) is None
    assert read_first(" {}", 0) is None


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ('{"n": 1, "a": { "x":1.0 ,"y" : [1e5] } }', '{ "x":1.0 ,"y" : [1e5] }'),
        ('{"a": "{\\"x\\": 1} "}', '{"x": 1}'),
        ('{"a": "[1]"}', None),
        ('{"a": [1]}', None),
        ('{"a": null}', None),
    ],
)
def test_arguments_are_the_object_source(text: str, source: str | None) -> None:
    value = read_object(text)
    assert value is not None
    assert arguments_of(value, text, "a") == source
