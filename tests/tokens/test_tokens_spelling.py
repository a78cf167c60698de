"""The bytes of a vocabulary's tokens: both spellings, and vocabularies that could lose a byte."""

import json

import pytest
import vocabulary_kit as kit
from tokenizers import Tokenizer, decoders, models

from polarnode.core.errors import ModelError
from polarnode.tokens.vocabulary import byte_letters, kind_of, spell, state


def test_sentencepiece_has_spaces_and_bytes() -> None:
    told = kit.bpe_json()
    backend = Tokenizer.from_str(json.dumps(told))
    assert kind_of(backend) == "SentencePiece"
    vocabulary: dict[str, int] = told["model"]["vocab"]
    spelled = spell("SentencePiece", vocabulary)
    assert spelled[vocabulary["\u2581\u2581"]] == b"  "
    assert spelled[vocabulary["<0x00>"]] == b"\x00"
    assert spelled[vocabulary["<0xE2>"]] == b"\xe2"
    assert spelled[vocabulary["<table>"]] == b"<table>"


def test_byte_level_letter_per_byte() -> None:
    letters = byte_letters()
    assert (letters[ord("a")], letters[ord(" ")], letters[0]) == ("a", "\u0120", "\u0100")
    vocabulary = {letter: byte for byte, letter in letters.items()} | {"\u0120a": 256}
    assert spell("byte-level", vocabulary)[256] == b" a"
    with pytest.raises(ModelError, match="holds the letter '\u65e5', which stands for no byte"):
        spell("byte-level", vocabulary | {"\u65e5": 257})


@pytest.mark.parametrize("kind", ["byte-level", "SentencePiece"])
def test_missing_byte_token_is_refused(kind: str) -> None:
    letters = byte_letters()
    named = [
        letters[byte] if kind == "byte-level" else f"<0x{byte:02X}>" for byte in range(256) if byte != 0x7F
    ]
    with pytest.raises(ModelError, match="no token for the byte 0x7F"):
        spell(kind, {token: number for number, token in enumerate(named)})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["bpe_json", "unigram_json"])
def test_bytes_unknown_without_byte_fallback(kind: str) -> None:
    told = getattr(kit, kind)()
    told["model"]["byte_fallback"] = False
    with pytest.raises(ModelError, match="neither a byte-level one nor SentencePiece with byte fallback"):
        kind_of(Tokenizer.from_str(json.dumps(told)))


def test_other_decoder_is_not_guessed() -> None:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ModelError, match="exact bytes are not known"):
        kind_of(words)
    words.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    with pytest.raises(ModelError, match="exact bytes are not known"):
        kind_of(words)


def test_strip_decoder_is_still_sentencepiece() -> None:
    """A decoder that strips the first space is still SentencePiece."""
    told = kit.bpe_json()
    told["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    assert kind_of(Tokenizer.from_str(json.dumps(told))) == "SentencePiece"


def test_part_state_is_its_json() -> None:
    assert state(decoders.Fuse()) == {"type": "Fuse"}
