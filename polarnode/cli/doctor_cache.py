"""What doctor knows of the engine's KV cache before an engine starts: what a token takes, what main memory
holds besides, and whether sessions wait for it.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from polarnode.containers.probe import Finding
from polarnode.engine.settings import cpu_tokens, token_bytes
from polarnode.node.config import NodeConfig

GB: Final = 1e9  # as SGLang counts hicache_size
SESSION: Final = 32_000  # tokens that a coding agent's session ends with: the middle of those measured
NUMBER_BYTES: Final = 2  # of a GPU's KV cache, bf16
# bytes of main memory that SGLang leaves to the machine before it gives a cache any
LEFT_BYTES: Final = 10 << 30


def cache(config: NodeConfig, memory: Path = Path("/proc/meminfo")) -> Iterator[Finding]:
    """The cache of one engine host, for a model whose config.json can be read; nothing for external servers,
    which keep what they like.
    """
    path = Path(config.model) / "config.json"
    if config.engine_urls or not path.is_file():
        return
    waits = _waits(config)
    if config.engine == "simulated":
        tokens = config.simulated.kv_tokens
        size = f"{tokens:,} tokens{waits}" if tokens else "without bounds: no session waits for it"
        yield Finding(name="kv cache", ok=True, what=size)
        return
    found = json.loads(path.read_text())
    model = {**found, **text} if isinstance(text := found.get("text_config"), dict) else found
    if config.cpu:
        yield Finding(name="kv cache", ok=True, what=f"{cpu_tokens(model):,} tokens{waits}")
        return
    each = token_bytes(model, size=NUMBER_BYTES) / config.tp
    what = f"{each:,.0f} bytes a token on each GPU in bf16; the engine tells how many fit when it serves"
    yield Finding(name="kv cache", ok=True, what=what + waits)
    if config.host_cache_gb:
        yield _in_main_memory(config, each, memory)


def _waits(config: NodeConfig) -> str:
    if config.residency:
        last = "; prefixes of sessions that still call are evicted last" if config.session_cache else ""
        return (
            "; sessions begin while it holds what they become (residency = false where reading is"
            f" cheap){last}"
        )
    return "; residency = false: as many sessions run as run_limit and the engine's queue allow"


def _in_main_memory(config: NodeConfig, token: float, memory: Path) -> Finding:
    """What `host_cache_gb` holds, and whether the machine has that memory. `token`: bytes on each GPU."""
    tokens, gpus = int(config.host_cache_gb * GB / token), max(1, len(config.gpus))
    total = re.search(r"^MemTotal:\s+(\d+) kB", memory.read_text(), re.MULTILINE)
    free = max(0, int(total[1]) * 1024 - LEFT_BYTES) / GB if total else 0.0
    needed, most = config.host_cache_gb * gpus, int(free / gpus)
    remedy = f"set host_cache_gb to {most} or less" if most else "leave host_cache_gb out"
    return Finding(
        name="host cache",
        ok=needed <= free,
        what=f"{tokens:,} tokens beside each engine's own, {tokens // SESSION} sessions of {SESSION:,}; takes"
        f" {needed} GB of main memory, of {free:.0f} GB that can be had",
        remedy="" if needed <= free else remedy,
    )
