"""JSON to values: strict, and every refusal names the field."""

from collections.abc import Mapping
from typing import Any, Literal

import attrs
import pytest
from cattrs import StructureHandlerNotFoundError
from hypothesis import given
from hypothesis import strategies as st

from polarnode.core.codec import dump_json, read_json, structure
from polarnode.core.codec.json import kind_of
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused


@attrs.frozen(kw_only=True)
class Text:
    type: Literal["text"] = "text"
    text: str


@attrs.frozen(kw_only=True)
class Image:
    type: Literal["image"]
    url: str | None = None


@attrs.frozen(kw_only=True)
class Message:
    role: Literal["user", "assistant"]
    content: str | tuple[Text | Image, ...]
    extra: Mapping[str, Json] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Request:
    messages: tuple[Message, ...]
    max_tokens: int | None = None
    temperature: float = 1.0
    stream: bool = False
    stop: str | tuple[str, ...] | None = None
    kind: str = attrs.field(default="", alias="sort")
    headers: Mapping[str, str] = attrs.field(factory=dict)
    anything: Json = None
    blob: object = None


HELLO: dict[str, Json] = {"role": "user", "content": "hello"}


def request(**fields: Any) -> dict[str, Json]:
    return {"messages": [HELLO], **fields}


def refusal(value: Json, *, forbid_extra: bool = False) -> tuple[str | None, str]:
    with pytest.raises(Refused) as caught:
        structure(value, Request, forbid_extra=forbid_extra)
    return caught.value.path, str(caught.value)


def test_unwritable_value_is_internal_error() -> None:
    """A value that is no JSON is an internal error."""
    with pytest.raises(TypeError, match="complex"):
        kind_of(1j)


def test_whole_request_is_read() -> None:
    read = structure(
        request(
            max_tokens=5.0,
            temperature=1,
            stop=["a"],
            headers={"a": "b"},
            anything={"x": [1]},
            blob=[None],
            sort="c",
        ),
        Request,
    )
    assert read.messages == (Message(role="user", content="hello"),)
    assert (read.max_tokens, read.temperature, read.stop, read.kind) == (5, 1.0, ("a",), "c")
    assert isinstance(read.max_tokens, int)
    assert isinstance(read.temperature, float)
    assert (read.anything, read.blob, read.headers) == ({"x": [1]}, [None], {"a": "b"})


def test_union_chosen_by_kind_and_tag() -> None:
    parts: Json = [{"type": "text", "text": "a"}, {"type": "image", "url": None}]
    read = structure(request(messages=[{"role": "user", "content": parts}]), Request)
    assert read.messages[0].content == (Text(text="a"), Image(type="image"))


@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        ({"max_tokens": "5"}, "$.max_tokens", "must be a number or null, not a string"),
        ({"max_tokens": 1.5}, "$.max_tokens", "must be a whole number, not 1.5"),
        ({"max_tokens": True}, "$.max_tokens", "not a boolean"),
        ({"temperature": "hot"}, "$.temperature", "must be a number, not a string"),
        ({"temperature": False}, "$.temperature", "must be a number, not a boolean"),
        ({"stream": 1}, "$.stream", "must be true or false, not a number"),
        ({"messages": "hi"}, "$.messages", "must be a list, not a string"),
        ({"messages": ["hi"]}, "$.messages[0]", "must be an object, not a string"),
        ({"messages": [HELLO, {"role": "user"}]}, "$.messages[1].content", "is missing"),
        (
            {"messages": [{**HELLO, "role": "root"}]},
            "$.messages[0].role",
            "must be one of 'user', 'assistant', not 'root'",
        ),
        ({"messages": [{**HELLO, "role": {}}]}, "$.messages[0].role", "not an object"),
        (
            {"messages": [{**HELLO, "content": 3}]},
            "$.messages[0].content",
            "must be a string or a list, not a number",
        ),
        (
            {"messages": [{**HELLO, "content": [{"type": "sound"}]}]},
            "$.messages[0].content[0]",
            "unknown 'type': it must be one of 'image', 'text', not 'sound'",
        ),
        ({"messages": [{**HELLO, "content": [{}]}]}, "$.messages[0].content[0]", "needs 'type'"),
        (
            {"messages": [{**HELLO, "content": [{"type": "text"}]}]},
            "$.messages[0].content[0].text",
            "is missing",
        ),
        ({"stop": ["a", 4]}, "$.stop[1]", "must be a string, not a number"),
        ({"headers": {"a b": 1}}, "$.headers['a b']", "must be a string"),
        ({"sort": 1}, "$.sort", "must be a string"),
    ],
)
def test_mistyped_value_refused_with_path(fields: dict[str, Any], path: str, words: str) -> None:
    where, sentence = refusal(request(**fields))
    assert where == path
    assert words in sentence
    assert sentence.startswith(path.removeprefix("$."))


def test_root_may_be_refused_too() -> None:
    assert refusal([]) == ("$", "the body must be an object, not a list")
    assert refusal({}) == ("$.messages", "messages is missing: it is required")


def test_unknown_field_ignored_or_refused() -> None:
    assert structure(request(maxtokens=5), Request).max_tokens is None
    path, sentence = refusal(request(maxtokens=5), forbid_extra=True)
    assert (path, sentence) == ("$.maxtokens", "maxtokens is not a known field: did you mean max_tokens?")
    _, sentence = refusal(request(zzzz=5), forbid_extra=True)
    assert "known are messages" in sentence
    path, _ = refusal({"messages": [{**HELLO, "rolle": "x"}]}, forbid_extra=True)
    assert path == "$.messages[0].rolle"


def test_misspelt_field_precedes_missing_one() -> None:
    """A misspelt required field is named before the missing one."""
    path, sentence = refusal({"message": []}, forbid_extra=True)
    assert path == "$.message"
    assert "did you mean messages?" in sentence


@attrs.frozen
class Even:
    number: int

    def __attrs_post_init__(self) -> None:
        if self.number % 2:
            raise Refused("number must be even", path="$.number")


@attrs.frozen
class Evens:
    all: tuple[Even, ...]


def test_class_refusal_gains_its_path() -> None:
    """A refusal of a class keeps its words and gains its place."""
    with pytest.raises(Refused) as caught:
        structure({"all": [{"number": 2}, {"number": 3}]}, Evens)
    assert (caught.value.path, str(caught.value)) == ("$.all[1].number", "number must be even")


@attrs.frozen
class Buggy:
    number: int

    def __attrs_post_init__(self) -> None:
        raise ZeroDivisionError


@attrs.frozen
class Unreadable:
    what: complex


def test_internal_errors_are_not_refusals() -> None:
    """An internal error is never the client's fault."""
    with pytest.raises(ZeroDivisionError):
        structure({"number": 1}, Buggy)
    with pytest.raises(StructureHandlerNotFoundError):
        structure({"what": 1}, Unreadable)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b'{"a": }', "line 1, column 7"),
        (b'{\n "a": NaN}', "line 2"),
        (b'"\\ud83d"', "surrogate"),
        (b"\xff", "UTF-8"),
    ],
)
def test_non_json_refused_with_position(body: bytes, words: str) -> None:
    with pytest.raises(Refused, match=words):
        read_json(body)


JSON: st.SearchStrategy[Json] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON)
def test_json_goes_round(value: Json) -> None:
    assert read_json(dump_json(value)) == value


def path_of_refusal(body: Json) -> str | None:
    try:
        structure(body, Request, forbid_extra=True)
    except Refused as refused:
        return refused.path
    return "$"


@given(JSON)
def test_any_json_read_or_refused_with_path(value: Json) -> None:
    """Any json is read or refused with a path and nothing else."""
    bodies: list[Json] = [
        value,
        request(anything=value),
        {"messages": value},
        {"messages": [{"role": "user", "content": value}]},
    ]
    for path in map(path_of_refusal, bodies):
        assert path is not None
        assert path.startswith("$")
