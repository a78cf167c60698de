"""The exact bytes of a vocabulary's tokens, for the two ways in which vocabularies spell bytes.

Byte-level ones have a letter for each byte. SentencePiece's write U+2581 for a space and have a token `<0xAB>` for each byte that no other
token spells. Whoever adds a third way proves it as these are: every byte has a token, so no text of a client is ever lost.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from tokenizers import Tokenizer, models

from polarnode.errors import ModelError

Kind = Literal["byte-level", "SentencePiece"]

SPACE: Final = "\u2581"  # what SentencePiece writes for a space
_BYTE_TOKENS: Final = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
_SPELLING_DECODER: Final = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
_STRIP: Final = {"type": "Strip", "content": " ", "start": 1, "stop": 0}  # of a text's first space, which the token has all the same


def kind_of(backend: Tokenizer) -> Kind:
    """How a tokenizer's vocabulary spells bytes, from what undoes it. ModelError for one whose tokens' bytes are not known."""
    decoder = {} if backend.decoder is None else state(backend.decoder)
    if decoder.get("type") == "ByteLevel":
        return "byte-level"
    parts = [part for part in decoder.get("decoders", ()) if part != _STRIP]
    if parts == _SPELLING_DECODER and _falls_back(backend.model):
        return "SentencePiece"
    raise ModelError("it is neither a byte-level one nor SentencePiece with byte fallback: its tokens' exact bytes are not known")


def _falls_back(model: Any) -> bool:
    """Whether what a model has no token for is spelled in byte tokens."""
    match model:
        case models.BPE():
            return bool(model.byte_fallback)
        case models.Unigram():
            return bool(state(model)["byte_fallback"])
        case _:
            return False


def spell(kind: Kind, vocabulary: Mapping[str, int]) -> dict[int, bytes]:
    """The bytes of every token. ModelError where one spells no bytes, or a byte has no token."""
    spelled = _lettered(vocabulary) if kind == "byte-level" else _pieced(vocabulary)
    known = set(spelled.values()) if kind == "byte-level" else {_BYTE_TOKENS.get(token) for token in vocabulary}
    missing = [byte for byte in range(256) if bytes([byte]) not in known]
    if missing:
        raise ModelError(f"it has no token for the byte 0x{missing[0]:02X}: texts that hold it would lose it")
    return spelled


def state(part: Any) -> dict[str, Any]:
    """A tokenizer's part as its JSON; the whole tokenizer's would be megabytes."""
    value: dict[str, Any] = json.loads(part.__getstate__())
    return value


def _lettered(vocabulary: Mapping[str, int]) -> dict[int, bytes]:
    known = {letter: byte for byte, letter in byte_letters().items()}
    try:
        return {number: bytes(known[letter] for letter in token) for token, number in vocabulary.items()}
    except KeyError as unknown:
        raise ModelError(f"its vocabulary holds the letter {unknown}, which stands for no byte: it is not a byte-level one") from unknown


def _pieced(vocabulary: Mapping[str, int]) -> dict[int, bytes]:
    return {number: _BYTE_TOKENS.get(token) or token.replace(SPACE, " ").encode() for token, number in vocabulary.items()}


def byte_letters() -> dict[int, str]:
    """The letter of each byte in a byte-level vocabulary: printable ones for themselves, the others from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + place) for place, byte in enumerate(others)}
