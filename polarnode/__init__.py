"""polarnode: rollouts for reinforcement learning of language agents, with unmodified harnesses.

verifiers, which prime-rl runs its environments with, finds a plug-in by the name of an installed package and
the classes in its `__all__`: `id = "polarnode"` is the harness and the taskset of
`polarnode.integrations.prime_rl`. They are imported when they are asked for.
"""

from importlib import import_module
from typing import Any

__all__ = ["PolarnodeHarness", "PolarnodeTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("polarnode.integrations.prime_rl"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
