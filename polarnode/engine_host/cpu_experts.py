"""The experts that SGLang remembers for each token, on a machine without a GPU.

SGLang keeps them in memory that it registers with CUDA for quicker copies, which needs a CUDA build of torch. Where the model itself is in
plain memory there is nothing to copy from a device, so plain memory is what they are kept in. Rule for whoever edits it: nothing but that.
"""

from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS


def install() -> None:
    """For device `cpu` of this process; SGLang asks its table of allocators by the device's name."""
    ALLOC_MEMORY_FUNCS["cpu"] = _plain


def _plain(
    dims: tuple[int, ...], *, dtype: torch.dtype, device: str, pin_memory: bool, allocator: Any, registration_granularity_bytes: int | None = None
) -> torch.Tensor:
    found: torch.Tensor = allocator.allocate(dims, dtype=dtype, device=device)
    return found
