"""Rows of a node as padded tensors, with the prompt that all of them share kept once.

Invariant: a row is what the engine saw and sampled, id for id; nothing here adds or removes an id.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One training sequence: `mask` where it was sampled and is trained, `logprobs` as recorded there (None:
    not recorded), an advantage of the row, or one for each token, and a weight for each token of it.
    """

    ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float] | None
    advantage: float | Sequence[float] = 0.0
    weight: float = 1.0

    @property
    def trained(self) -> int:
        return sum(map(bool, self.mask))

    @property
    def teaches(self) -> bool:
        """Whether a step on it changes anything."""
        own = self.advantage
        return bool(self.trained and (own if isinstance(own, int | float) else any(own)))


@dataclass(frozen=True)
class Batch:
    """`prompt` is what all rows begin with, the tensors what follows it, padded at the end."""

    prompt: Tensor
    ids: Tensor
    real: Tensor
    mask: Tensor
    logprobs: Tensor
    advantages: Tensor
    weights: Tensor


def shared(rows: Sequence[Row]) -> int:
    """Length of the prefix that all rows share and that is not trained; at least one id of each row comes
    after it.
    """
    longest = min(
        (min(list(row.mask).index(1) if 1 in row.mask else len(row.ids), len(row.ids)) - 1 for row in rows),
        default=0,
    )
    first = list(rows[0].ids[:longest])
    for row in rows[1:]:
        same = next(
            (at for at, (one, two) in enumerate(zip(first, row.ids, strict=False)) if one != two), len(first)
        )
        first = first[:same]
    return len(first)


def batch(rows: Sequence[Row], at: int) -> Batch:
    """Rows as tensors; the first `at` ids, which are those of all, once."""
    size = (len(rows), max(len(row.ids) for row in rows) - at)
    kinds = (torch.long, torch.long, torch.bool, torch.float32, torch.float32)
    ids, real, mask, logprobs, advantages = (torch.zeros(size, dtype=kind) for kind in kinds)
    for place, row in enumerate(rows):
        width = len(row.ids) - at
        ids[place, :width] = torch.tensor(list(row.ids[at:]))
        real[place, :width] = 1
        mask[place, :width] = torch.tensor(list(row.mask[at:])) > 0
        logprobs[place, :width] = torch.tensor(
            list(row.logprobs[at:]) if row.logprobs is not None else [math.nan] * width
        )
        own = row.advantage
        advantages[place, :width] = torch.tensor(own if isinstance(own, int | float) else list(own[at:]))
    prompt = torch.tensor([list(rows[0].ids[:at])], dtype=torch.long)
    return Batch(prompt, ids, real, mask, logprobs, advantages, torch.tensor([row.weight for row in rows]))


def micro(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    """Rows of like length together, so that little is padding."""
    ordered = sorted(rows, key=lambda row: len(row.ids))
    return (ordered[at : at + size] for at in range(0, len(ordered), size))
