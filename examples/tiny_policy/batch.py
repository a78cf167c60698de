"""Lessons as tensors.

A prompt is ten times as long as a demonstration. If all tasks of a step share one, it is computed once, and
its keys and values are reused for every demonstration after it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase, Qwen3ForCausalLM

from examples.tiny_policy.data import Lesson
from examples.tiny_policy.drills import drill
from examples.tiny_policy.model import END_OF_TEXT
from examples.tiny_policy.prompts import prompt
from examples.tiny_policy.transcript import Transcript, render

_USER = "<|im_start|>user\n"
Row = tuple[list[int], list[bool]]


@dataclass(frozen=True)
class Batch:
    """`heads` are prompts, `tails` what follows them, one head for all or for each; `said` marks the tokens
    to learn.
    """

    heads: Tensor
    heads_mask: Tensor
    tails: Tensor
    tails_mask: Tensor
    said: Tensor


def encode(tokenizer: PreTrainedTokenizerBase, text: str, pieces: Transcript) -> Row:
    """Token ids of some prompt text and the session after it, and which of them the model sampled."""
    ids = tokenizer.encode(text) if text else []
    said = [False] * len(ids)
    for piece in pieces:
        new = tokenizer.encode(piece.text)
        ids += new
        said += [piece.said] * len(new)
    return ids, said


def _pad(rows: Sequence[Sequence[int]], left: bool = False) -> tuple[Tensor, Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), END_OF_TEXT)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, where] = torch.tensor(row)
        mask[i, where] = 1
    return ids, mask


def _row(
    tokenizer: PreTrainedTokenizerBase, lesson: Lesson, rng: random.Random, shared: bool, brief: bool
) -> tuple[str, Row]:
    """The prompt's text and the session's row; where a prompt is `shared`, the task's own part of it is in
    the row.
    """
    text = render(prompt(lesson.harness, lesson.task.instruction, None if shared else rng, brief))
    own = text[text.rindex(_USER) :] if shared else ""
    return text, encode(tokenizer, own, lesson.demo)


def batch(
    tokenizer: PreTrainedTokenizerBase, lessons: Sequence[Lesson], rng: random.Random, brief: bool = False
) -> Batch:
    """One step's lessons, all of one harness; pi says the same to every task before it names the task."""
    shared = lessons[0].harness == "pi"
    made = [_row(tokenizer, lesson, rng, shared, brief) for lesson in lessons]
    texts = [text for text, _ in made]
    if shared:
        text = render(prompt("pi", "", rng, brief))
        texts = [text[: text.rindex(_USER)]]
    return _batch([tokenizer.encode(text) for text in texts], [row for _, row in made])


def drills(tokenizer: PreTrainedTokenizerBase, rng: random.Random, count: int) -> Batch:
    """One step's exercises; they share nothing but a first token."""
    rows = [encode(tokenizer, "", drill(rng)) for _ in range(count)]
    return _batch([tokenizer.encode("<|im_start|>")], rows)


def _batch(heads: list[list[int]], rows: list[Row]) -> Batch:
    tails, tails_mask = _pad([ids for ids, _ in rows])
    said, _ = _pad([[int(x) for x in marks] for _, marks in rows])
    return Batch(*_pad(heads, left=True), tails, tails_mask, (said == 1) & (tails_mask == 1))


def loss(model: Qwen3ForCausalLM, given: Batch, through: bool = True) -> Tensor:
    """Mean cross-entropy of the model's tokens, given all tokens before them; `through`: with gradients
    through the prompts.
    """
    heads, repeat = given.heads, given.tails.shape[0] // given.heads.shape[0]
    cache = DynamicCache(config=model.config)
    places = given.heads_mask.cumsum(1) - 1
    with torch.set_grad_enabled(through):
        last = model.model(
            heads,
            attention_mask=given.heads_mask,
            position_ids=places.clamp(min=0),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1:]
    cache.batch_repeat_interleave(repeat)
    before = given.heads_mask.repeat_interleave(repeat, 0)
    mask = torch.cat([before, given.tails_mask], 1)
    hidden = model.model(
        given.tails,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1)[:, before.shape[1] :],
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    hidden = torch.cat([last.repeat_interleave(repeat, 0), hidden[:, :-1]], 1)
    logits = model.lm_head(hidden[given.said])
    return torch.nn.functional.cross_entropy(logits, given.tails[given.said])
