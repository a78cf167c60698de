"""A model's vocabulary as far as random answers need it: which ids are words, how a text is spelled, what a prompt says.

Rule for whoever edits it: the tokenizers library alone reads tokenizer.json in a tenth of the time transformers takes.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen
from tokenizers import Tokenizer

_WORD = re.compile(r"\u0120?[A-Za-z]+")  # U+0120 is how byte-level vocabularies write a blank


@frozen(eq=False, kw_only=True)
class Vocabulary:
    """`words` are ids of plain words: any row of them is text, and none of them is a control token."""

    words: tuple[int, ...]
    _tokenizer: Tokenizer

    def encode(self, text: str) -> list[int]:
        """A text that holds no control token's."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """A prompt as text, control tokens as theirs."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def load_vocabulary(model: Path) -> Vocabulary:
    """From a checkpoint folder. Raises ValueError for a vocabulary without words, which is no byte-level one."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    control = tokenizer.get_added_tokens_decoder()
    known = tokenizer.get_vocab(with_added_tokens=False)
    words = tuple(sorted(number for token, number in known.items() if number not in control and _WORD.fullmatch(token)))
    if not words:
        raise ValueError(f"the tokenizer in {model} knows no words: it is not a byte-level one")
    return Vocabulary(words=words, tokenizer=tokenizer)
