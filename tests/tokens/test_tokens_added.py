"""Which added tokens are control tokens, and which flags can stand."""

import pytest
from tokenizers import AddedToken, normalizers

from polarnode.core.errors import ModelError
from polarnode.tokens.vocabulary import check_flags, ordinary

VOCABULARY = {"\n": 1, "<table>": 2, "<turn>": 3, "<end>": 4}


def added(text: str, *, special: bool = False, **flags: bool) -> AddedToken:
    return AddedToken(text, special=special, **({"normalized": False} | flags))


def test_vocabulary_text_is_not_special() -> None:
    """A token is text if the vocabulary lists it and nothing calls it special."""
    tokens = {
        1: added("\n"),
        2: added("<table>"),
        3: added("<turn>"),
        4: added("<end>", special=True),
        9: added("<think>"),
    }
    text = ordinary(VOCABULARY, tokens, "{{ '<turn>' }}\n{{ m.content }}\n")
    assert sorted(text) == [1, 2], "<turn> is the template's, <end> is special, <think> is of no vocabulary"


def test_token_with_other_id_is_control() -> None:
    assert ordinary(VOCABULARY, {7: added("<table>")}, "") == {}


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_stripping_flag_allowed_where_unused(flag: str) -> None:
    """A token that strips its neighbours is allowed only where it is never written."""
    tokens = {0: added("<unk>", special=True, **{flag: True})}
    check_flags(tokens, None, "<turn>user\nx<end>")
    with pytest.raises(ModelError, match="'<unk>' swallows or changes text beside it"):
        check_flags(tokens, None, "<turn><unk>")


def test_normalized_token_needs_unchanged_text() -> None:
    """A token looked for in normalised text stands where that is the same text."""
    tokens = {0: added("<a b>", special=True, normalized=True)}
    check_flags(tokens, None, "<a b>")
    check_flags(tokens, normalizers.NFC(), "<a b>")
    check_flags(tokens, normalizers.Sequence([]), "<a b>")
    with pytest.raises(ModelError, match="'<a b>'"):
        check_flags(tokens, normalizers.Replace(" ", "\u2581"), "<a b>")
