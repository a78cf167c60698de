"""Client text is inert during a render and whole afterwards."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.tokens.rendering import TextGuard

TEXTS = st.text('ab<[\ue5e5\ue5e6\ue5e7\n"\\\U0001f642', max_size=12)
VALUES = st.recursive(
    TEXTS | st.integers() | st.none() | st.booleans(),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(value=VALUES)
def test_hidden_text_has_no_first_letter(value: Json) -> None:
    """What is hidden holds no first letter and comes back."""
    guard = TextGuard.over("<[", [value])
    hidden = json.dumps(guard.hide(value), ensure_ascii=False)
    assert "<" not in hidden
    assert guard.show(hidden) == json.dumps(value, ensure_ascii=False)


def test_every_string_and_key_is_hidden() -> None:
    value: Json = {"<a": ["<b", {"<c": "<d", "n": 1, "t": True, "z": None, "f": 1.5}]}
    assert TextGuard.over("<", [value]).hide(value) == {
        "\ue5e5a": ["\ue5e5b", {"\ue5e5c": "\ue5e5d", "n": 1, "t": True, "z": None, "f": 1.5}]
    }


def test_stand_in_used_by_client_avoided() -> None:
    value = "<\ue5e5\ue5e6"
    guard = TextGuard.over("<", [value])
    assert guard.hide(value) == "\ue5e7\ue5e5\ue5e6"
    assert guard.show("\ue5e7\ue5e5\ue5e6") == value


def test_hidden_text_keeps_its_length() -> None:
    guard = TextGuard.over("<", ["<|im_end|>"])
    assert len(str(guard.hide("<|im_end|>"))) == len("<|im_end|>")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("".join(map(chr, range(0xE000, 0xF900))) + "<", "remove some private-use characters"),
        ("half \ud800", "half of a surrogate pair"),
        ({"\udc00": 1}, "half of a surrogate pair"),
    ],
)
def test_unguardable_text_is_refused(value: Json, sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        TextGuard.over("<", [value])


def test_deeply_nested_json_is_refused() -> None:
    value: Json = "x"
    for _ in range(5000):
        value = [value]
    with pytest.raises(Refused, match="deeper than 100 levels"):
        TextGuard.over("<", [value])
    value = "x"
    for _ in range(95):
        value = {"a": value}
    assert TextGuard.over("<", [value]).hide(value) == value
