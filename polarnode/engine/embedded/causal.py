"""Causal attention of a sequence's last positions in plain torch, linear in the length of the prefix.

Padding the queries to the whole sequence would be quadratic. This module needs only torch, so that it can be
tested against the definition without an engine.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

# Rows of queries at once: their float mask over a prompt of 30 000 tokens is 120 MB, and larger blocks are no
# faster.
QUERIES = 1024


def extend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float | None, grouped: bool
) -> torch.Tensor:
    """Attention of the last `count` positions. Queries are [heads, count, size], keys and values [kv_heads,
    length, size], and the result is shaped like the queries.
    """
    count, length = queries.shape[1], keys.shape[1]
    if count == length:  # without a prefix torch's own causal path needs no mask
        return scaled_dot_product_attention(
            queries[None], keys[None], values[None], is_causal=True, scale=scale, enable_gqa=grouped
        )[0]
    done = []
    for start in range(0, count, QUERIES):
        block = queries[:, start : start + QUERIES]
        seen = length - count + start + block.shape[1]
        part = scaled_dot_product_attention(
            block[None],
            keys[None, :, :seen],
            values[None, :, :seen],
            attn_mask=_causal_mask(block.shape[1], seen, queries.dtype),
            scale=scale,
            enable_gqa=grouped,
        )
        done.append(part[0])
    return torch.cat(done, dim=1)


def _causal_mask(rows: int, seen: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask with which row r of the last `rows` positions sees all of `seen` but the `rows - 1 - r`
    positions after it.
    """
    mask = torch.zeros(rows, seen, dtype=dtype)
    mask[:, seen - rows :] = torch.full((rows, rows), float("-inf"), dtype=dtype).triu(1)
    return mask
