"""Three parts of SGLang replaced on machines without a GPU: torch-native attention, and the memory of routed
experts and of adapters.

SGLang's `torch_native` backend pads the new queries to the whole sequence: 200 new tokens after a cached
prompt of 25 000 cost 25 000 x 25 000 again, 1.8 s a layer on two cores where 0.09 s suffice (measured), and
every turn of an agent is such an extension. Only plain causal attention is replaced; everything else goes to
SGLang's own method.

SGLang keeps routed experts in memory that it registers with CUDA for quicker copies, which needs a CUDA build
of torch. Here they are kept in plain memory, and nothing else changes. Its layers with adapters ask for
pinned memory whatever the device is, which torch refuses where there is no accelerator to pin it for: the
same tensors are made in plain memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.lora import layers, torch_ops
from sglang.srt.lora.backend import torch_backend
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

from polarnode.engine.embedded.causal import extend

# Functions of torch that make tensors.
TENSOR_MAKERS = frozenset(("tensor", "empty", "zeros", "ones", "full", "arange"))


def install_cpu_attention() -> None:
    """Take the place of `torch_native` in this process. The name stays, because SGLang decides much by it."""
    ATTENTION_BACKENDS["torch_native"] = CpuAttention


class CpuAttention(TorchNativeAttnBackend):  # type: ignore[misc]  # sglang is not typed
    """Attention where `query` is [tokens, heads, head_size], caches are [slots, kv_heads, head_size], and
    lengths are [sequences]. It fills and returns `output`.
    """

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        windowed = sliding_window_size is not None and sliding_window_size > -1
        if encoder_lens is not None or is_cross_attn or not causal or windowed:
            whole: torch.Tensor = super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                extend_prefix_lens, extend_seq_lens, encoder_lens, scaling, enable_gqa,
                causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
            return whole
        first = 0
        for row, prefix, count in zip(
            req_pool_indices.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True
        ):
            slots = req_to_token[row, : prefix + count]
            queries = query[first : first + count].movedim(0, 1)
            keys, values = (cache[slots].to(query.dtype).movedim(0, 1) for cache in (k_cache, v_cache))
            output[first : first + count] = extend(
                queries, keys, values, scale=scaling, grouped=enable_gqa
            ).movedim(0, 1)
            first += count
        return output


def install_cpu_experts() -> None:
    """Register an allocator for device `cpu` in this process. SGLang looks allocators up by device name."""
    ALLOC_MEMORY_FUNCS["cpu"] = _plain


def _plain(
    dims: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    found: torch.Tensor = allocator.allocate(dims, dtype=dtype, device=device)
    return found


def install_cpu_adapters() -> None:
    """Take the place of `torch` in the two modules that pin memory, and of a method that can only raise. A
    batch of the base alone leaves the adapters' slots out.
    """
    layers.torch = torch_backend.torch = _UnpinnedTorch()
    torch_backend.TorchNativeLoRABackend.skip_inactive_lora_batches = True
    for name in ("sgemm_lora_a_control_fwd", "sgemm_lora_b_control_fwd"):
        setattr(torch_ops, name, _index_by_numbers(getattr(torch_ops, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore


def _index_by_numbers(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """SGLang's product of a batch, indexed by numbers, because a tensor as an index copies weights."""

    def run(x: Any, weights: Any, adapters: Any, lengths: Any, ranks: Any, *more: Any) -> torch.Tensor:
        return product(x, weights, adapters.tolist(), lengths.tolist(), ranks.tolist(), *more)

    return run


class _UnpinnedTorch:
    """Torch, where the functions that make tensors ignore `pin_memory`."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in TENSOR_MAKERS:
            return found

        def made(*args: Any, pin_memory: bool = False, **more: Any) -> Any:
            return found(*args, **more)

        return made
