"""Real vocabularies beside Qwen3's: their own ids for every text, exact bytes, no control token from text,
and their family known and audited.

Here because they are many times larger and odder than what tests can train; what each promise means is tested
on the small ones.
"""

import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiktoken
from qwen3_fixture import QWEN3_6_PATTERN
from tiktoken.load import load_tiktoken_bpe
from tokenizers import Tokenizer

from polarnode.tokens.template import LoadedModel, load_model

ROOT = Path(__file__).parents[2]
ODD = "".join(
    map(chr, [*range(0x20, 0x400), *range(0x3040, 0x3100), *range(0x4E00, 0x4E80), *range(0x1F600, 0x1F640)])
)


@pytest.fixture(scope="module")
def deepseek(deepseek_folder: Path) -> LoadedModel:
    return load_model(deepseek_folder)


@pytest.fixture(scope="module")
def qwen3_6(qwen3_6_folder: Path) -> LoadedModel:
    return load_model(qwen3_6_folder)


def texts() -> Iterator[str]:
    """Lines of our own documents and programs, and every letter of some scripts beside others."""
    for path in (
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "polarnode" / "tokens").glob("*.py")),
        ROOT / "README.md",
    ):
        yield from path.read_text().splitlines(keepends=True)
    yield from (ODD[at : at + 40] for at in range(0, len(ODD), 20))


def keeps_text(model: LoadedModel) -> None:
    marks = set(model.tokenizer.control.values())
    for text in ("".join(texts()), f"a{''.join(model.tokenizer.control)} b"):
        plain = model.tokenizer.encode_plain(text)
        assert b"".join(map(model.tokenizer.token_bytes, plain)).decode() == text
        assert marks.isdisjoint(plain)


def test_deepseek_v3_ids_match_its_file(deepseek: LoadedModel, deepseek_folder: Path) -> None:
    """transformers' class for it makes a SentencePiece tokenizer of this byte-level file where no config says
    what model it is.
    """
    reference = Tokenizer.from_file(str(deepseek_folder / "tokenizer.json"))
    for text in (text for text in texts() if not any(mark in text for mark in deepseek.tokenizer.control)):
        assert deepseek.tokenizer.encode_plain(text) == reference.encode(text, add_special_tokens=False).ids


def test_deepseek_v3_text_and_family(deepseek: LoadedModel) -> None:
    keeps_text(deepseek)
    assert deepseek.family.name.startswith("deepseek")
    assert (deepseek.tokenizer.kind, deepseek.tokenizer.vocab_size) == ("byte-level BPE", 129280)
    assert deepseek.family.stop_ids == (1,)


def test_qwen3_6_ids_match_tiktoken(qwen3_6: LoadedModel, qwen3_6_folder: Path) -> None:
    ranks = load_tiktoken_bpe(str(qwen3_6_folder / "tiktoken.model"))
    reference = tiktoken.Encoding(
        "qwen3_6", pat_str=QWEN3_6_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    for text in texts():
        assert qwen3_6.tokenizer.encode_plain(text) == reference.encode_ordinary(text)


def test_qwen3_6_text_and_family(qwen3_6: LoadedModel) -> None:
    keeps_text(qwen3_6)
    assert (qwen3_6.family.name, qwen3_6.tokenizer.vocab_size) == ("qwen3_xml", 248320)
    assert qwen3_6.family.stop_ids == (248046, 248044)
    assert qwen3_6.tokenizer.token_bytes(248068) == b"<think>"


def test_letters_compared_without_normalising() -> None:
    assert any(unicodedata.normalize("NFC", text) != text for text in texts()), (
        "neither of these two normalises, and the texts would show it"
    )
