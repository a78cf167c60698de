"""What the providers' shapes share."""

import json

import pytest
from attrs import field, frozen
from hypothesis import given
from hypothesis import strategies as st

from polarnode.core.errors import Refused
from polarnode.providers.shapes import (
    NESTED,
    above_zero,
    as_tuple,
    at_least,
    compact,
    no_empty_strings,
    paragraphs,
    parse_strict_json,
    read_body,
    read_value,
    refuse_non_text,
    some,
    unserved,
    within,
)


@frozen
class Part:
    kind: str = field(validator=refuse_non_text)


@frozen(kw_only=True)
class Shape:
    text: str = ""
    heat: float | None = field(default=None, validator=within(0, 2))
    share: float | None = field(default=None, validator=above_zero(1))
    count: int | None = field(default=None, validator=at_least(1))
    stop: str | tuple[str, ...] | None = field(default=None, validator=no_empty_strings)
    names: tuple[str, ...] = field(default=("a",), validator=some)
    old: str | None = field(default=None, validator=unserved("old is not served: leave it out"))
    parts: tuple[Part, ...] = ()
    inner: "Shape | None" = None


def refusal(body: bytes) -> tuple[str, str | None]:
    with pytest.raises(Refused) as caught:
        read_body(body, Shape)
    return str(caught.value), caught.value.path


@pytest.mark.parametrize(
    ("body", "path", "sentence"),
    [
        ({"heat": 2.5}, "$.heat", "heat must be from 0 to 2, not 2.5"),
        ({"heat": -1}, "$.heat", "heat must be from 0 to 2, not -1.0"),
        ({"share": 0}, "$.share", "share must be above 0 and at most 1, not 0.0"),
        ({"share": 1.1}, "$.share", "share must be above 0 and at most 1, not 1.1"),
        ({"count": 0}, "$.count", "count must be at least 1, not 0"),
        ({"stop": ""}, "$.stop", "stop holds an empty string: remove it"),
        ({"stop": ["a", ""]}, "$.stop", "stop holds an empty string: remove it"),
        ({"names": []}, "$.names", "names is empty: send at least one"),
        ({"old": "x"}, "$.old", "old is not served: leave it out"),
        (
            {"parts": [{"kind": "picture"}]},
            "$.parts[0]",
            "this model reads text only: remove the picture part",
        ),
        ({"inner": {"inner": {"count": -3}}}, "$.inner.inner.count", "count must be at least 1, not -3"),
    ],
)
def test_validator_refuses_with_field_path(body: object, path: str, sentence: str) -> None:
    assert refusal(json.dumps(body).encode()) == (sentence, path)


@pytest.mark.parametrize(
    "body", [{}, {"heat": 0, "share": 1, "count": 1, "stop": [], "old": None}, {"heat": 2.0, "stop": None}]
)
def test_boundary_values_are_accepted(body: object) -> None:
    read_body(json.dumps(body).encode(), Shape)


def test_unknown_fields_named_unless_null() -> None:
    """Unknown fields are taken, and named where they say something."""
    found, unknown = read_body(b'{"text":"t","new":1,"inner":{"newer":2},"nothing":null}', Shape)
    assert found.text == "t"
    assert unknown == ("$.new",)


@pytest.mark.parametrize("body", [b"", b"{", b'{"text": NaN}', b'{"text":"\xff"}'])
def test_non_json_is_refused(body: bytes) -> None:
    assert "the body is" in refusal(body)[0]


def test_non_object_is_refused() -> None:
    assert refusal(b"[]") == ("the body must be an object, not a list", "$")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (rb"half \ud83d", "half \ufffd"),
        (rb"\ude00 half", "\ufffd half"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\\ud83d is text, \ud83d is not", "\\ud83d is text, \ufffd is not"),
        (rb"\\\ud83d", "\\\ufffd"),
        (rb"\uD83D\uDE00", "\U0001f600"),
    ],
)
def test_split_surrogates_are_mended(written: bytes, read: str) -> None:
    """Text that JavaScript cut inside an emoji is mended."""
    assert read_body(b'{"text":"' + written + b'"}', Shape)[0].text == read


@given(st.text())
def test_mending_changes_surrogates_and_nothing_else(text: str) -> None:
    wanted = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    found = read_body(json.dumps({"text": text}).encode(), Shape)[0].text
    assert found == wanted


def test_paragraphs_skip_empty_texts() -> None:
    assert paragraphs(["a", "", "b\n", "c"]) == "a\nb\n\nc"
    assert paragraphs([]) == paragraphs([""]) == ""
    assert (as_tuple(None), as_tuple("a"), as_tuple(("a", "b"))) == ((), ("a",), ("a", "b"))


def test_compact_json_keeps_key_order() -> None:
    assert compact({"b": [1, 1.0, None], "a": "ü"}) == '{"b":[1,1.0,null],"a":"ü"}'


def test_too_deeply_nested_body_is_refused() -> None:
    """A body nested too deeply to be written again is refused."""
    for depth, taken in ((NESTED, True), (NESTED + 1, False), (1000, False)):
        body = b"[" * depth + b"]" * depth
        if taken:
            assert isinstance(read_value(body), list)
        else:
            with pytest.raises(Refused, match="nested too deeply"):
                read_value(body)
    with pytest.raises(Refused) as caught:
        read_value(b'{"a": 1, "b": [{}, {"c": ' + b"[" * 300 + b"]" * 300 + b"}]}")
    assert caught.value.path == "$.b[1]"
    wide = b"[" + b",".join([b"[]"] * 1000) + b"]"
    assert read_value(wide) == [[] for _ in range(1000)]


def test_model_json_with_large_numbers() -> None:
    """JSON that a model wrote may have numbers of any size, and no words of Python."""
    assert parse_strict_json('{"n": 123456789012345678901234567890}') == {"n": 123456789012345678901234567890}
    for text in ("NaN", '{"n": Infinity}', "", "{", "[" * 100_000):
        with pytest.raises((ValueError, RecursionError)):
            parse_strict_json(text)
