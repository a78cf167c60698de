"""Loading a tokenizer: plain ids, exact bytes, and every folder that cannot be served refused with its
remedy.
"""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokens_kit as kit
import vocabulary_kit
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from polarnode.core.conversation import Json
from polarnode.core.errors import ModelError, Refused
from polarnode.tokens.tokenizer import load_tokenizer

USER: tuple[dict[str, Json], ...] = ({"role": "user", "content": "x"},)


@pytest.fixture(params=["tiny", "qwen3"])
def loaded(request: pytest.FixtureRequest) -> kit.Model:
    return kit.model() if request.param == "tiny" else kit.model(request.getfixturevalue("qwen3_folder"))


def test_control_tokens_and_sizes_match_model(loaded: kit.Model) -> None:
    assert loaded.tokenizer.control == {
        token.content: number for number, token in loaded.reference.added_tokens_decoder.items()
    }
    assert loaded.tokenizer.vocab_size == len(loaded.reference)


def test_control_string_is_encoded_as_text(loaded: kit.Model) -> None:
    marks = set(loaded.tokenizer.control.values())
    for text in loaded.tokenizer.control:
        plain = loaded.tokenizer.encode_plain(f"a{text}{text}\n{text}")
        assert not marks.intersection(plain)
        assert b"".join(map(loaded.tokenizer.token_bytes, plain)).decode() == f"a{text}{text}\n{text}"


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60) | st.text(st.characters(max_codepoint=0x7F), max_size=60))
def test_plain_ids_spell_the_text(text: str) -> None:
    """Plain ids are the models and their bytes the texts."""
    tiny = kit.model()
    # Hypothesis reads the constants in our sources
    assume(not any(control in text for control in tiny.tokenizer.control))
    plain = tiny.tokenizer.encode_plain(text)
    assert plain == tiny.reference.encode(text, add_special_tokens=False)
    assert b"".join(map(tiny.tokenizer.token_bytes, plain)) == unicodedata.normalize("NFC", text).encode()


def test_real_vocabulary_round_trips_odd_text(qwen3_folder: Path) -> None:
    text = (
        "caf\u00e9 \u65e5\u672c\u8a9e \U0001f469\u200d\U0001f4bb\x00\x7f\u00a0\u00ad \u0142\t\r\n\n  end "
        + "".join(map(chr, range(0x20, 0x250)))
    )
    tokenizer = kit.model(qwen3_folder).tokenizer
    assert b"".join(
        map(tokenizer.token_bytes, tokenizer.encode_plain(text))
    ).decode() == unicodedata.normalize("NFC", text)


def test_every_byte_has_token() -> None:
    tiny = kit.model().tokenizer
    known = {tiny.token_bytes(number) for number in range(tiny.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= known


def test_padding_id_empty_larger_id_error() -> None:
    """An id that pads the embedding has no bytes, and one beyond it is an error."""
    tokenizer = load_tokenizer(kit.TINY, vocab_size=2432)
    assert tokenizer.vocab_size == 2432
    assert tokenizer.token_bytes(2431) == b""
    for token in (2432, -1):
        with pytest.raises(ModelError, match=f"token {token} is outside"):
            tokenizer.token_bytes(token)


def test_render_matches_the_template(loaded: kit.Model) -> None:
    text = loaded.tokenizer.render(USER, tools=(), generation_prompt=True, thinking=None)
    assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert (
        loaded.tokenizer.render(USER, tools=(), generation_prompt=False, thinking=None)
        == "<|im_start|>user\nx<|im_end|>\n"
    )
    assert (
        loaded.tokenizer.render(USER, tools=(), generation_prompt=True, thinking=False)
        == text + "<think>\n\n</think>\n\n"
    )
    assert loaded.tokenizer.render(USER, tools=(), generation_prompt=True, thinking=True) == text


def test_template_refusal_is_client_fault(tmp_path: Path) -> None:
    folder = kit.variant(
        tmp_path, template=lambda text: "{{- raise_exception('roles must alternate') }}" + text
    )
    with pytest.raises(Refused, match="refuses this conversation: roles must alternate") as caught:
        load_tokenizer(folder).render(USER, tools=(), generation_prompt=True, thinking=None)
    assert caught.value.path == "$.messages"


def test_failing_template_is_model_fault(tmp_path: Path) -> None:
    folder = kit.variant(tmp_path, template=lambda text: "{{- 1 + 'x' }}" + text)
    with pytest.raises(ModelError, match="the chat template fails"):
        load_tokenizer(folder).render(USER, tools=(), generation_prompt=True, thinking=None)


# ── what is refused while loading ─────────────────────────────────────────────


def refusal(folder: Path, vocab_size: int | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        load_tokenizer(folder, vocab_size=vocab_size)
    return str(caught.value)


def test_missing_or_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "there is no model folder" in refusal(tmp_path / "none")
    assert "there is no tokenizer.json" in refusal(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "cannot be loaded" in refusal(tmp_path)


def test_missing_chat_template_is_refused(tmp_path: Path) -> None:
    folder = kit.variant(tmp_path)
    (folder / "chat_template.jinja").unlink()
    assert "has no chat template: put" in refusal(folder)


def test_too_small_embedding_is_refused() -> None:
    assert "knows 2304 ids and the model only 2303" in refusal(kit.TINY, 2303)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_stripping_control_token_is_refused(tmp_path: Path, flag: str) -> None:
    """A control token that strips its neighbours is refused."""
    assert "'<|im_start|>' swallows or changes text beside it" in refusal(
        flagged(tmp_path, "<|im_start|>", flag)
    )


def test_unused_stripping_token_is_allowed(tmp_path: Path) -> None:
    folder = flagged(tmp_path, "<|endoftext|>", "rstrip")
    assert load_tokenizer(folder).control == kit.model().tokenizer.control


def flagged(to: Path, text: str, flag: str) -> Path:
    """The tiny tokenizer with a flag on one of its control tokens."""

    def change(tokenizer: dict[str, Any]) -> None:
        (token,) = (each for each in tokenizer["added_tokens"] if each["content"] == text)
        token[flag] = True

    folder = kit.variant(to, tokenizer=change)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (told,) = (each for each in config["added_tokens_decoder"].values() if each["content"] == text)
    told[flag] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_vocabulary_spelling_control_token_refused(tmp_path: Path) -> None:
    def change(tokenizer: dict[str, Any]) -> None:
        tokenizer["model"]["ignore_merges"] = True  # a whole word is looked up as it is
        tokenizer["model"]["vocab"] |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        tokenizer["pre_tokenizer"] = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }

    folder = kit.variant(tmp_path, tokenizer=change)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert "spells the control token '<|endoftext|>' itself" in refusal(folder)


def test_non_byte_level_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = kit.variant(tmp_path)
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert "neither a byte-level one nor SentencePiece" in refusal(folder)


def test_non_byte_letter_is_refused(tmp_path: Path) -> None:
    def change(tokenizer: dict[str, Any]) -> None:
        vocab = tokenizer["model"]["vocab"]
        vocab["\u65e5"] = vocab.pop("\u0100")  # the letter of byte 0, which no merge has

    folder = kit.variant(tmp_path, tokenizer=change)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert "stands for no byte" in refusal(folder)


@pytest.mark.parametrize(
    ("normalizer", "wrong"),
    [
        ({"type": "Lowercase"}, "changes texts before it encodes them (Lowercase)"),
        ({"type": "Prepend", "prepend": "x"}, "puts a space before every text"),
    ],
)
def test_text_changing_tokenizer_is_refused(tmp_path: Path, normalizer: dict[str, str], wrong: str) -> None:
    def change(tokenizer: dict[str, Any]) -> None:
        tokenizer["normalizer"] = normalizer

    folder = kit.variant(tmp_path, tokenizer=change)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert wrong in refusal(folder)


def test_byte_token_lookalike_is_refused(tmp_path: Path) -> None:
    """Found by trying: no part of it loses text, together they make an A of a client's `<0x41>`."""
    told = vocabulary_kit.bpe_json()
    told["model"]["ignore_merges"] = True
    assert "does not give back the bytes of a text" in refusal(vocabulary_kit.write_folder(tmp_path, told))


# ── SentencePiece's spelling ──────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["bpe_json", "unigram_json"])
def test_sentencepiece_tokenizer_is_loaded(tmp_path: Path, kind: str) -> None:
    told = getattr(vocabulary_kit, kind)()
    loaded = load_tokenizer(vocabulary_kit.write_folder(tmp_path, told))
    assert tuple(loaded.control) == vocabulary_kit.CONTROL, "runs of newlines and tags are text"
    assert loaded.kind == f"SentencePiece {'BPE' if kind == 'bpe_json' else 'Unigram'}"
    text = " a  b\n\n\n<table>\u65e5 \U0001f642 <eos><0x41> "
    assert b"".join(map(loaded.token_bytes, loaded.encode_plain(text))).decode() == text
    prompt = loaded.render(
        ({"role": "user", "content": "x"},), tools=(), generation_prompt=True, thinking=None
    )
    assert prompt == "<bos><start_of_turn>user\nx<end_of_turn>\n<start_of_turn>model\n"


def test_sentencepiece_ids_match_model(tmp_path: Path) -> None:
    told = vocabulary_kit.bpe_json()
    reference, loaded = (
        Tokenizer.from_str(json.dumps(told)),
        load_tokenizer(vocabulary_kit.write_folder(tmp_path, told)),
    )
    for text in (vocabulary_kit.TEXT, "<table>\n\n\n  x", "\n\n\n\n[multimodal]"):
        assert loaded.encode_plain(text) == reference.encode(text, add_special_tokens=False).ids
