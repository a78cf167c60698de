"""Small tokenizers that are spelled as SentencePiece's are (Gemma's way), trained on a few lines, for whoever
tests a vocabulary.

Whoever changes them keeps what real ones do: byte tokens that no text becomes, control tokens inside the
vocabulary, ordinary text listed as added tokens beside them, and an id for it that the merges alone would not
give (`<table>`).
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = """a client wrote: the answer is 42,  and then it   looked at {"name": "look", "arguments": {"path": "a.txt"}}
user model system start of turn end look at the file with the tool and say what is in it
caf\u00e9 \u65e5\u672c\u8a9e def look(path): return open(path).read()\n\n\n"""
CONTROL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
ORDINARY_TOKENS = ("[multimodal]", "\n", "\n\n", "\u2581\u2581", "<table>")
TEMPLATE = """{{ bos_token }}{%- for m in messages %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content + '<end_of_turn>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""


def write_folder(folder: Path, tokenizer: Tokenizer | dict[str, Any], template: str = TEMPLATE) -> Path:
    """A model folder with this tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    told = tokenizer if isinstance(tokenizer, dict) else json.loads(tokenizer.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(told))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def bpe_json() -> dict[str, Any]:
    """BPE with byte fallback, as Gemma's: its JSON, to be changed freely."""
    told: dict[str, Any] = json.loads(_trained_bpe())
    return told


def unigram_json() -> dict[str, Any]:
    """Unigram with byte fallback; it knows each letter and each byte, and looks its control tokens up like
    words.
    """
    pieces: list[tuple[str, float]] = [(text, 0.0) for text in CONTROL]
    pieces += [(f"<0x{byte:02X}>", 0.0) for byte in range(256)]
    words = {word for line in TEXT.splitlines() for word in line.replace(" ", " \u2581").split(" ")}
    letters = {letter for word in words for letter in word}
    pieces += [(piece, -2.0 * len(piece) ** 0.5) for piece in sorted(words | letters) if piece]
    tokenizer = Tokenizer(models.Unigram(pieces, CONTROL.index("<unk>"), True))
    _spelled(tokenizer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    told: dict[str, Any] = json.loads(tokenizer.to_str())
    return told


def _spelled(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )


@cache
def _trained_bpe() -> str:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    _spelled(tokenizer)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    first = [*CONTROL, *ORDINARY_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=first, show_progress=False)  # type: ignore[no-untyped-call]
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    told = json.loads(tokenizer.to_str())
    special = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    told["added_tokens"] = [
        {"id": told["model"]["vocab"][text], "content": text, "special": text in CONTROL, **special}
        for text in (*CONTROL, *ORDINARY_TOKENS)
    ]
    return json.dumps(told)
