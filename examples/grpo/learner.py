"""The policy in training: rows in, one optimizer step out. Plain torch and transformers; no node.

Invariant: a row is what the engine saw and sampled, id for id, so `worst` of a first step is the difference
of two ways to compute the same numbers. The prompt that all rows of a step share (the harness's) is computed
once, as one cache for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from examples.grpo.lora import Lora, adapt
from examples.grpo.rows import Batch, Row, batch, micro, shared


@dataclass(frozen=True)
class Recipe:
    """How a step is made. `cap` bounds the importance weight, for rows sampled by older weights than those
    being trained; a token whose probability has gone further than `clip` from the recorded one, where its
    advantage drives it, is left alone.
    """

    lr: float = 3e-5
    # of the norms' scales within the layers, which make attention sharper: few numbers, near 1
    scale_lr: float = 1e-3
    # of the last norm's scale, which makes answers sharper: what a policy mostly gets wrong is bad luck at
    # temperature 1
    final_lr: float = 3e-2
    clip_norm: float = 1.0
    cap: float = 2.0
    clip: float = 0.2
    # optimizer steps on the same rows: a session costs a hundred times what a row costs to train on
    inner: int = 4
    # rows computed at once, of no other meaning; more of them at once are slower on a CPU, whose cache they
    # leave (64: three times)
    micro: int = 8
    # whether the gradient flows through what all rows begin with: it costs as much as they do
    through_prompt: bool = False
    # the rank of an adapter, which is then all that is trained; 0 trains the whole model
    lora: int = 0
    alpha: float = 32.0
    lora_lr: float = 5e-4


@dataclass(frozen=True)
class Step:
    """What a batch did to the policy. `worst` is the largest |recorded - own| logprob before its first step;
    `ratio` the mean importance weight over all of its steps.
    """

    rows: int
    tokens: int
    updates: int
    loss: float
    norm: float
    worst: float
    ratio: float


@dataclass(frozen=True)
class _Pass:
    loss: float
    norm: float
    worst: float
    ratio: float


class Learner:
    """A policy, its tokenizer and its optimizer."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.train()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.adapter = adapt(self.model, Lora(recipe.lora, recipe.alpha)) if recipe.lora else None
        self._optimizer = optimizer_of(self.model, recipe)

    def own(self, given: Batch) -> Tensor:
        """The policy's logprob of every id after the prompt but the first, at temperature 1."""
        cache, before = DynamicCache(config=self.model.config), given.prompt.shape[1]
        real = given.real
        if before:
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.recipe.through_prompt):
                self.model.model(given.prompt, past_key_values=cache, use_cache=True)
            cache.batch_repeat_interleave(len(given.ids))
            real = torch.cat([torch.ones(len(given.ids), before, dtype=torch.long), real], 1)
        places = torch.arange(before, before + given.ids.shape[1]).expand_as(given.ids)
        hidden = self.model.model(
            given.ids, attention_mask=real, position_ids=places, past_key_values=cache, use_cache=True
        ).last_hidden_state
        wanted = given.mask[:, 1:]
        found = torch.log_softmax(self.model.lm_head(hidden[:, :-1][wanted]).float(), -1)
        picked = found.gather(1, given.ids[:, 1:][wanted][:, None])[:, 0]
        return torch.zeros(wanted.shape).masked_scatter(wanted, picked)

    def learn(self, rows: Sequence[Row]) -> Step:
        """The recipe's number of AdamW steps on these rows. Those without an advantage change nothing, and
        are not computed.
        """
        taught = [row for row in rows if row.teaches]
        # of all rows, so that what no gradient flows through does not depend on how they are cut into batches
        at = shared(rows)
        batches = [batch(few, at) for few in micro(taught, self.recipe.micro)]
        if not batches:
            return Step(len(rows), sum(row.trained for row in rows), 0, 0.0, 0.0, 0.0, 1.0)
        batches = [self._known(each) for each in batches]
        passes = [self._update(batches) for _ in range(self.recipe.inner)]
        tokens = sum(int(each.mask[:, 1:].sum()) for each in batches)
        first, ratio = passes[0], sum(each.ratio for each in passes) / len(passes) / tokens
        return Step(
            len(rows),
            sum(row.trained for row in rows),
            len(passes),
            first.loss,
            first.norm,
            first.worst,
            ratio,
        )

    def _update(self, batches: Sequence[Batch]) -> "_Pass":
        loss, ratio, worst = 0.0, 0.0, 0.0
        for given in batches:
            value, seen, away = objective(self.own(given), given, self.recipe)
            value.backward()  # type: ignore[no-untyped-call]
            loss, ratio, worst = loss + float(value.detach()), ratio + seen, max(worst, away)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return _Pass(loss, norm, worst, ratio)

    @torch.no_grad()
    def _known(self, given: Batch) -> Batch:
        """For rows without recorded logprobs, use the policy's own logprobs before the batch."""
        known = given.logprobs.clone()
        known[:, 1:] = (
            torch.where(known[:, 1:].isnan(), self.own(given), known[:, 1:])
            if known.isnan().any()
            else known[:, 1:]
        )
        return replace(given, logprobs=known)

    def save(self, folder: Path) -> Path:
        """What is trained, as an engine loads it: the checkpoint with its tokenizer beside it, or the adapter
        alone.
        """
        if self.adapter is not None:
            return self.adapter.save(folder)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return folder


def optimizer_of(model: Any, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW with separate learning rates for weight tables, norm scales, and the last norm's scale, or with
    one for an adapter.
    """
    final = model.model.norm.weight
    trained = [each for each in model.parameters() if each.requires_grad]
    scales = [each for each in trained if each.ndim == 1 and each is not final]
    tables = [each for each in trained if each.ndim > 1]
    rates = [(tables, recipe.lr), (scales, recipe.scale_lr), ([final], recipe.final_lr)]
    if recipe.lora:  # of all these, the adapter's matrices alone are trained
        rates = [(tables, recipe.lora_lr)]
    groups = [{"params": parameters, "lr": rate} for parameters, rate in rates]
    # a run is some sixty steps: betas for few of them
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)


def objective(own: Tensor, given: Batch, recipe: Recipe) -> tuple[Tensor, float, float]:
    """Summed over trained tokens, each with its row's weight: -min(own probability / recorded probability,
    cap) * advantage * logprob, the importance weight without a gradient.

    With the weights that sampled it this is REINFORCE, with others truncated importance sampling; where PPO's
    clip cuts the gradient it is cut here. Also the sum of the weights, and the largest difference of own and
    recorded logprobs.
    """
    mask, advantage = given.mask[:, 1:], given.advantages[:, 1:]
    away = (own.detach() - given.logprobs[:, 1:]) * mask
    ratio = away.exp()
    gone = ((ratio > 1 + recipe.clip) & (advantage > 0)) | ((ratio < 1 - recipe.clip) & (advantage < 0))
    weight = ratio.clamp(max=recipe.cap) * mask
    loss = -(weight * ~gone * advantage * given.weights[:, None] * own).sum()
    return loss, float(weight.sum()), float(away.abs().max())
