"""Sample many sessions in step, in plain torch: Qwen3's forward pass with a shared prompt computed once.

Invariant: its logits are those of transformers, within rounding; `tests/examples/test_examples_grpo.py`
checks this.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache


class Decoder:
    """Keys and values of `count` sessions, of up to `longest` tokens each after the prompt `head`."""

    @torch.no_grad()
    def __init__(self, model: Any, head: list[int], count: int, longest: int) -> None:
        self.model, self.config, self.before = model, model.config, len(head)
        self.size = int(self.config.head_dim)
        cache = DynamicCache(config=self.config)
        model.model(torch.tensor([head]), past_key_values=cache, use_cache=True)
        self.head = [(layer.keys[0].contiguous(), layer.values[0].contiguous()) for layer in cache.layers]
        shape = (count, self.config.num_key_value_heads, longest, self.size)
        self.own = [(torch.zeros(shape), torch.zeros(shape)) for _ in self.head]
        base = torch.arange(0, self.size, 2).float() / self.size
        angles = torch.outer(
            torch.arange(self.before + longest).float(),
            1.0 / (self.config.rope_parameters["rope_theta"] ** base),
        )
        self.angles = torch.cat([angles, angles], -1)

    @torch.inference_mode()
    def step(self, ids: Tensor, places: Tensor, rows: Tensor) -> Tensor:
        """Logits after token `ids[i]`, which is at `places[i]` after the prompt of session `rows[i]`."""
        inner, turn = self.model.model, self.angles[self.before + places][:, None]
        hidden = inner.embed_tokens.weight[ids]
        for number, layer in enumerate(inner.layers):
            seen = normed(hidden, layer.input_layernorm.weight)
            hidden = hidden + self.attended(number, layer.self_attn, seen, places, rows, turn)
            seen = normed(hidden, layer.post_attention_layernorm.weight)
            hidden = hidden + layer.mlp.down_proj(
                functional.silu(layer.mlp.gate_proj(seen)) * layer.mlp.up_proj(seen)
            )
        logits: Tensor = self.model.lm_head(normed(hidden, inner.norm.weight))
        return logits

    def attended(
        self, number: int, part: Any, seen: Tensor, places: Tensor, rows: Tensor, turn: Tensor
    ) -> Tensor:
        """Attention over the shared prompt and over each session's own tokens, in one softmax."""
        count, heads = len(rows), self.config.num_key_value_heads
        queries = turned(normed(part.q_proj(seen).view(count, -1, self.size), part.q_norm.weight), turn)
        queries = queries.view(count, heads, -1, self.size) * self.size**-0.5
        keys, values = self.own[number]
        keys[rows, :, places] = turned(
            normed(part.k_proj(seen).view(count, heads, self.size), part.k_norm.weight), turn
        )
        values[rows, :, places] = part.v_proj(seen).view(count, heads, self.size)
        reach = int(places.max()) + 1
        there = torch.arange(reach)[None] <= places[:, None]
        shared_keys, shared_values = self.head[number]
        own = queries @ keys[rows, :, :reach].transpose(2, 3)
        scores = torch.cat(
            [queries @ shared_keys.transpose(1, 2), own.masked_fill(~there[:, None, None], -torch.inf)], -1
        ).softmax(-1)
        found = (
            scores[..., : self.before] @ shared_values + scores[..., self.before :] @ values[rows, :, :reach]
        )
        result: Tensor = part.o_proj(found.reshape(count, -1))
        return result


def normed(value: Tensor, scale: Tensor) -> Tensor:
    return value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-6) * scale


def turned(value: Tensor, angles: Tensor) -> Tensor:
    one, other = value.chunk(2, -1)
    return value * angles.cos() + torch.cat([-other, one], -1) * angles.sin()
