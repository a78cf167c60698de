"""The policy's tokenizer: byte-level BPE with Qwen3's split and control tokens, learned on its own use.

Learning it on the harnesses' prompts and on the demonstrations makes prompts short; being byte-level, it can
still encode any text.
"""

import inspect
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from examples.tiny_policy.data import Lesson
from examples.tiny_policy.prompts import prompt
from examples.tiny_policy.transcript import TEMPLATE, render
from examples.tiny_policy.words import KEYS, STEMS, WORDS

VOCABULARY = 2304
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def blank() -> Tokenizer:
    """Qwen3's tokenizer without a vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.post_processor = processors.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    return tokenizer


def _words() -> Iterator[str]:
    """Every word in every place it can stand, so that each form becomes a token of its own."""
    for word in (*WORDS, *STEMS, *KEYS):
        yield from (word, f" {word}", f'"{word}', f"/{word}") * 40
    for word in (*WORDS, *KEYS):
        yield from (f"={word}",) * 40


def _prose(modules: tuple[ModuleType, ...]) -> Iterator[str]:
    """Some general English and code, from the standard library: what the policy meets under other
    harnesses.
    """
    for module in modules:
        yield inspect.getsource(module)


def corpus(lessons: list[Lesson]) -> Iterator[str]:
    """What the tokenizer learns from."""
    import argparse
    import shutil
    import subprocess
    import textwrap

    rng = random.Random(0)
    for harness in ("pi", "mini"):
        for _ in range(40):
            yield from _without_marks(render(prompt(harness, "", rng)))
    for lesson in lessons:
        yield from _without_marks(lesson.task.instruction + "".join(piece.text for piece in lesson.demo))
    yield from _words()
    yield from _prose((argparse, shutil, subprocess, textwrap))


def _without_marks(text: str) -> list[str]:
    """The text between control tokens."""
    for mark in (*SPECIAL, *MARKS):
        text = text.replace(mark, "\0")
    return text.split("\0")


def learn(lessons: list[Lesson], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Learn the vocabulary and add the control tokens after it, with Qwen3's flags."""
    tokenizer = blank()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocabulary - len(SPECIAL) - len(MARKS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus(lessons), trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKS])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that `AutoTokenizer` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE + "\n")
    added = {
        str(tokenizer.token_to_id(text)): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": text in SPECIAL,
        }
        for text in (*SPECIAL, *MARKS)
    }
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "split_special_tokens": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 65536,
        "added_tokens_decoder": added,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
