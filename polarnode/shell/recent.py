"""What is remembered for a while: the latest so many of something, by name.

The rule for whoever edits it: every memory of the shell that could grow has its number, with the reason beside it, where it is kept.
"""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def remember(kept: dict[K, V], name: K, value: V, *, most: int) -> None:
    """Keep a value as the latest of its table, and forget the oldest where there are more than `most`."""
    kept.pop(name, None)
    kept[name] = value
    while len(kept) > most:
        del kept[next(iter(kept))]
