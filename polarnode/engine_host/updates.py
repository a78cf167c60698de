"""What a node says to an engine host about weights and memory: the messages of `protocol.py` that make new weights one version on all hosts.

An update is told in steps, so that no host serves new weights before all can: BeginUpdate (keep the old ones), loads, CheckUpdate (all there?),
and CommitUpdate or RollBack. The node has paused the host before. Rule for whoever edits it: plain values, as all of the protocol.
"""

from collections.abc import Sequence
from typing import Literal

from attrs import frozen

MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]


@frozen(kw_only=True)
class BeginUpdate:
    """Weights are about to change: copy what is served to main memory, so that there is a way back. `ranks` GPUs of this machine do so at once."""

    call: int
    ranks: int


@frozen(kw_only=True)
class LoadDisk:
    """Read a checkpoint's folder."""

    call: int
    path: str


@frozen(kw_only=True)
class LoadTensors:
    """Take tensors of another process of this machine. `payloads`: what torch's ForkingPickler made of them, for each rank of this host."""

    call: int
    payloads: Sequence[bytes]
    layout: Literal["flattened_bucket"] | None = None


@frozen(kw_only=True)
class LoadBroadcast:
    """Receive tensors from rank 0 of a group this host has joined."""

    call: int
    group: str
    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    layout: Literal["flattened_bucket"] | None = None


@frozen(kw_only=True)
class CheckUpdate:
    """All has been sent: say whether it is a whole model, and with `flush` forget the keys and values of the old weights."""

    call: int
    flush: bool


@frozen(kw_only=True)
class CommitUpdate:
    """What was loaded is `version` from now on, and the copy of the old weights is dropped."""

    call: int
    version: str


@frozen(kw_only=True)
class RollBack:
    """What was served before the update is served again."""

    call: int


@frozen(kw_only=True)
class JoinGroup:
    """Become ranks `rank`, `rank` + 1 … (one for each GPU of this host) of a torch process group; waits for the others."""

    call: int
    name: str
    address: str
    port: int
    rank: int
    world_size: int
    backend: str


@frozen(kw_only=True)
class LeaveGroup:
    call: int
    name: str


@frozen(kw_only=True)
class Memory:
    """Give memory of the GPU back to others, or take it again. Only while nothing is sampled."""

    call: int
    release: bool
    tags: Sequence[MemoryTag]


Update = BeginUpdate | LoadDisk | LoadTensors | LoadBroadcast | CheckUpdate | CommitUpdate | RollBack | JoinGroup | LeaveGroup | Memory
