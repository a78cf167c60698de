"""The vocabulary alone: nothing is lost, control tokens are spelled out, and parts that are not known to keep
text are refused.
"""

import json
from typing import Any

import pytest
import vocabulary_kit as kit
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from polarnode.core.errors import ModelError
from polarnode.tokens.tokenizer import composes_text, plain
from polarnode.tokens.vocabulary import spell


def made(told: dict[str, Any]) -> Tokenizer:
    text = [AddedToken(each, special=False, normalized=False) for each in kit.ORDINARY_TOKENS]
    return plain(
        Tokenizer.from_str(json.dumps(told)),
        control=kit.CONTROL,
        text=text if told["model"]["type"] == "BPE" else [],
    )


@pytest.fixture(scope="module", params=["bpe_json", "unigram_json"])
def told(request: pytest.FixtureRequest) -> dict[str, Any]:
    value: dict[str, Any] = getattr(kit, request.param)()
    return value


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(
        st.sampled_from([*kit.CONTROL, *kit.ORDINARY_TOKENS, "<0x41>", "<0x", " "]) | st.text(max_size=8),
        max_size=6,
    ).map("".join)
)
def test_plain_text_round_trips_without_control(told: dict[str, Any], text: str) -> None:
    """Every text comes back and none is a control token."""
    vocabulary = told["model"]["vocab"]
    numbers = (
        vocabulary
        if isinstance(vocabulary, dict)
        else {piece: number for number, (piece, _) in enumerate(vocabulary)}
    )
    spelled, control = spell("SentencePiece", numbers), {numbers[each] for each in kit.CONTROL}
    ids = made(told).encode(text, add_special_tokens=False).ids
    assert b"".join(map(spelled.__getitem__, ids)).decode() == text.replace("\u2581", " ")
    assert not control.intersection(ids)


def test_listed_added_text_is_one_token() -> None:
    """Text that is listed as added tokens is found as the model finds it."""
    told = kit.bpe_json()
    table = told["model"]["vocab"]["<table>"]
    assert made(told).encode("a<table>b").ids.count(table) == 1
    assert (
        table
        not in plain(Tokenizer.from_str(json.dumps(told)), control=kit.CONTROL, text=[])
        .encode("a<table>b")
        .ids
    )


def refusal(**changes: Any) -> str:
    told = kit.bpe_json() | changes
    with pytest.raises(ModelError) as caught:
        made(told)
    return str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Prepend", "prepend": "\u2581"}},
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "\u2581"}],
            }
        },
        {
            "pre_tokenizer": {
                "type": "Metaspace",
                "replacement": "\u2581",
                "prepend_scheme": "always",
                "split": False,
            }
        },
        {
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            }
        },
    ],
    ids=["prepend", "sequence", "metaspace", "byte-level"],
)
def test_space_prepending_tokenizer_is_refused(changes: dict[str, Any]) -> None:
    """A tokenizer that puts a space before every text is refused."""
    assert "puts a space before every text" in refusal(**changes)
    assert '"legacy": false' in refusal(**changes)


def test_text_changing_normaliser_is_refused() -> None:
    assert "changes texts before it encodes them (NFKC)" in refusal(normalizer={"type": "NFKC"})
    strange = {"type": "Replace", "pattern": {"Regex": " +"}, "content": "\u2581"}
    assert "(Replace)" in refusal(normalizer=strange)


def test_text_dropping_pre_tokenizer_is_refused() -> None:
    assert "may lose some of them (Split)" in refusal(
        pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    )
    assert "may lose some of them (WhitespaceSplit)" in refusal(pre_tokenizer={"type": "WhitespaceSplit"})


def test_unfaithful_model_types_are_refused() -> None:
    """A model that encodes at random, or is of another kind, is refused."""
    assert "encodes at random" in refusal(model=kit.bpe_json()["model"] | {"dropout": 0.1})
    assert "is WordLevel, which can lose text" in refusal(
        model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    )


def test_first_text_prefix_is_dropped() -> None:
    told = kit.bpe_json() | {
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": "first",
            "split": False,
        }
    }
    with_prefix = Tokenizer.from_str(json.dumps(told)).encode("look", add_special_tokens=False).tokens
    assert with_prefix[0].startswith("\u2581")
    assert "".join(made(told).encode("look").tokens) == "look"


def test_normalising_tokenizers_are_recognised() -> None:
    assert not composes_text(Tokenizer.from_str(json.dumps(kit.bpe_json())))
    assert composes_text(
        Tokenizer.from_str(
            json.dumps(
                kit.bpe_json() | {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}}
            )
        )
    )
