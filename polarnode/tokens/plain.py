"""A vocabulary without its control tokens: what encodes a client's text, whatever that text holds.

The same model and the same way to cut and normalise text, shared and not copied, without control tokens, post-processor, truncation or
padding. Only parts that are known to lose nothing are let through, by name: whoever adds one to the lists shows that it keeps every byte.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from polarnode.errors import ModelError
from polarnode.tokens.spelling import SPACE, state

_SPACES: Final = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_CUTTERS: Final = frozenset(["Split", "ByteLevel", "Metaspace", "Digits", "Punctuation"])
_BYTES_BEGIN: Final = "<0x"  # a Unigram model finds its byte tokens in a text that spells them, which must stay that text
_PREFIXED: Final = (
    "it puts a space before every text, so what a client wrote would not come back: "
    'set "legacy": false and "add_prefix_space": false in tokenizer_config.json, or write tokenizer.json anew, if the model was trained so'
)


def plain(backend: Tokenizer, *, control: Iterable[str], text: Iterable[AddedToken]) -> Tokenizer:
    """The vocabulary alone. `text` are added tokens that are no control tokens: they are found as the model finds them.

    ModelError where a part of it changes or loses text, or looks control tokens up.
    """
    made = Tokenizer(_model(backend.model, frozenset(control)))
    if backend.normalizer is not None:
        _check_normalizer(state(backend.normalizer))
        made.normalizer = backend.normalizer
    cutter = _cutter(backend)
    if cutter is not None:
        made.pre_tokenizer = cutter
    made.add_tokens(list(text))
    return made


def normalises(backend: Tokenizer) -> bool:
    """Whether texts are shown to the model composed (NFC): other letters than a client sent, the same text to a reader."""
    return backend.normalizer is not None and any(part["type"] == "NFC" for part in _parts(state(backend.normalizer), "normalizers"))


def _model(model: Any, control: frozenset[str]) -> Any:
    match model:
        case models.BPE():
            if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
                raise ModelError("it encodes at random or marks the parts of words: its tokens are not the text's bytes")
            return model
        case models.Unigram():
            return _hidden(state(model), control)
        case _:
            raise ModelError(f"its model is {type(model).__name__}, which can lose text: BPE and Unigram are supported")


def _hidden(told: dict[str, Any], control: frozenset[str]) -> Any:
    """A Unigram model looks every piece up, control tokens too. A piece with a space in it is never found: all spaces are U+2581 by then."""
    vocabulary = [(f" {piece}" if piece in control else piece, score) for piece, score in told["vocab"]]
    return models.Unigram(vocabulary, told["unk_id"], told["byte_fallback"])


def _check_normalizer(told: dict[str, Any]) -> None:
    for part in _parts(told, "normalizers"):
        if part["type"] == "Prepend":
            raise ModelError(_PREFIXED)
        if part["type"] != "NFC" and part != _SPACES:
            raise ModelError(f"it changes texts before it encodes them ({part['type']}), so what a client wrote would not come back")


def _cutter(backend: Tokenizer) -> Any:
    told = None if backend.pre_tokenizer is None else state(backend.pre_tokenizer)
    parts = [] if told is None else [_kept(part) for part in _parts(told, "pretokenizers")]
    if isinstance(backend.model, models.Unigram):
        parts.insert(0, state(pre_tokenizers.Split(_BYTES_BEGIN, "isolated")))
    if not parts:
        return None
    # Its parts are made only from a whole tokenizer's JSON.
    empty = json.loads(Tokenizer(models.BPE()).to_str()) | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}
    return Tokenizer.from_str(json.dumps(empty)).pre_tokenizer


def _kept(part: dict[str, Any]) -> dict[str, Any]:
    """A part that cuts text and loses none of it; a prefix of the very first text is left out, because a prompt begins with a control token."""
    if part["type"] not in _CUTTERS or part.get("behavior") == "Removed":
        raise ModelError(f"it cuts texts in a way that may lose some of them ({part['type']}): such tokenizers are not supported")
    if part.get("add_prefix_space") or part.get("prepend_scheme") == "always":
        raise ModelError(_PREFIXED)
    return part | {"prepend_scheme": "never"} if part["type"] == "Metaspace" else part


def _parts(told: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    if told["type"] != "Sequence":
        yield told
        return
    for part in told[key]:
        yield from _parts(part, key)
