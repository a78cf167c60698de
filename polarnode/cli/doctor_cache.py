"""What doctor can say about the engine's KV cache before an engine starts: how much memory a token takes, how
much main memory adds, and whether sessions will wait for cache space.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from polarnode.containers.probe import MachineFinding
from polarnode.engine.settings import cpu_tokens, token_bytes
from polarnode.node.config import NodeConfig

GB: Final = 1e9  # the unit of SGLang's hicache_size
SESSION: Final = 32_000  # tokens at the end of a coding agent's session: the median of those measured
NUMBER_BYTES: Final = 2  # bytes of a number in a GPU's KV cache: bf16
# SGLang leaves these bytes of main memory to the machine before it gives any to a cache.
SYSTEM_RESERVE_BYTES: Final = 10 << 30


def cache(config: NodeConfig, memory: Path = Path("/proc/meminfo")) -> Iterator[MachineFinding]:
    """The findings about the cache of one engine host, for a model whose config.json can be read. There are
    none for external servers, which size their caches themselves.
    """
    path = Path(config.model) / "config.json"
    if config.engine_urls or not path.is_file():
        return
    waits = _waits(config)
    if config.engine == "simulated":
        tokens = config.simulated.kv_tokens
        size = f"{tokens:,} tokens{waits}" if tokens else "without bounds: no session waits for it"
        yield MachineFinding(name="kv cache", ok=True, what=size)
        return
    found = json.loads(path.read_text())
    model = {**found, **text} if isinstance(text := found.get("text_config"), dict) else found
    if config.cpu:
        yield MachineFinding(name="kv cache", ok=True, what=f"{cpu_tokens(model):,} tokens{waits}")
        return
    each = token_bytes(model, size=NUMBER_BYTES) / config.tp
    what = f"{each:,.0f} bytes a token on each GPU in bf16; the engine tells how many fit when it serves"
    yield MachineFinding(name="kv cache", ok=True, what=what + waits)
    if config.host_cache_gb:
        yield _host_cache_finding(config, each, memory)


def _waits(config: NodeConfig) -> str:
    if config.residency:
        last = "; prefixes of sessions that still call are evicted last" if config.session_cache else ""
        return (
            "; sessions begin while it holds what they become (residency = false where reading is"
            f" cheap){last}"
        )
    return "; residency = false: as many sessions run as run_limit and the engine's queue allow"


def _host_cache_finding(config: NodeConfig, token: float, memory: Path) -> MachineFinding:
    """How many tokens `host_cache_gb` holds, and whether the machine has that memory. `token`: bytes of a
    token on each GPU.
    """
    tokens, gpus = int(config.host_cache_gb * GB / token), max(1, len(config.gpus))
    total = re.search(r"^MemTotal:\s+(\d+) kB", memory.read_text(), re.MULTILINE)
    free = max(0, int(total[1]) * 1024 - SYSTEM_RESERVE_BYTES) / GB if total else 0.0
    needed, most = config.host_cache_gb * gpus, int(free / gpus)
    remedy = f"set host_cache_gb to {most} or less" if most else "leave host_cache_gb out"
    return MachineFinding(
        name="host cache",
        ok=needed <= free,
        what=f"{tokens:,} tokens beside each engine's own, {tokens // SESSION} sessions of {SESSION:,}; takes"
        f" {needed} GB of main memory, of {free:.0f} GB that can be had",
        remedy="" if needed <= free else remedy,
    )
