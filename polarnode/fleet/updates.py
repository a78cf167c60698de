"""What follows from the answers of a fleet's nodes to one change of their weights.

Pure. An update stands once a node serves it: a version's name is never used again, so it cannot be taken
back. Enough nodes make it an answer; the others are late, and take no new tasks until they have it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

Verdict = Literal["served", "short", "refused"]


def verdict(took: int, asked: int, min_nodes: float) -> Verdict:
    """Of so many nodes that were asked, so many serve it. `refused`: none does, nothing has changed."""
    if not took:
        return "refused"
    return "served" if took >= asked * min_nodes else "short"


def rank_offsets(first: int, ranks: Sequence[int]) -> list[int]:
    """The first rank of each node in a process group over all their GPUs."""
    return [first + sum(ranks[:at]) for at in range(len(ranks))]


def payloads_of(payloads: Sequence[str], ranks: Sequence[int]) -> list[list[str]]:
    """The payloads for each node: its own where there is one for every GPU of the fleet, else the same."""
    if len(payloads) != sum(ranks):
        return [list(payloads) for _ in ranks]
    return [list(payloads[at : at + each]) for at, each in zip(rank_offsets(0, ranks), ranks, strict=True)]


def newest(histories: Iterable[Sequence[Mapping[str, Any]]]) -> Mapping[str, Any] | None:
    """The last update of any node, as their histories have it; None where there was none."""
    every = [each for history in histories for each in history]
    return max(every, key=lambda each: (float(each["at"]), str(each["version"])), default=None)


def fresh(asked: str | None, used: set[str]) -> str:
    """A name for new weights that no node has used: the trainer's own if it can be had."""
    if asked is not None and asked not in used:
        return asked
    number = 1 if asked is None else 2
    while (name := f"unnamed-{number}" if asked is None else f"{asked}~{number}") in used:
        number += 1
    return name


def joined_state(states: Sequence[Mapping[str, Any]], desired: str | None) -> dict[str, Any]:
    """The nodes' states of their weights as one node's; `version` is what all shall have."""
    if not states:
        return {"version": desired or "0", "versions": [], "ranks": 0}
    first = next((each for each in states if each["version"] == desired), states[0])
    return {
        **first,
        "updating": next((each["updating"] for each in states if each["updating"]), None),
        "paused": next((each["paused"] for each in states if each["paused"]), None),
        "released": sorted({tag for each in states for tag in each["released"]}),
        "failures": sum(each["failures"] for each in states),
        "last_seconds": max((each["last_seconds"] or 0.0 for each in states), default=None),
        "warning": next((each["warning"] for each in states if each["warning"]), None),
        "ranks": sum(each["ranks"] for each in states),
    }
