"""Values of the weights API: the node writes them, and clients read them.

Invariant: a field here is a field of the API, with its row in docs/weights.md. Fields that a node of an
earlier release does not write have defaults.
"""

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

# Calls in progress continue as they are, recompute their prefix, run to their end, or are cut.
UpdateMode = Literal["in_place", "retract", "drain", "abort"]
PauseMode = Literal["in_place", "retract", "abort"]
Backend = Literal["nccl", "gloo"]
MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]


@frozen(kw_only=True)
class HostReport:
    """One engine host's part of an update: `seconds` to load the weights. `ok` is always true, because an
    update that fails on one host is not served.
    """

    index: int
    seconds: float = 0.0
    ok: bool = True


@frozen(kw_only=True)
class WeightsReport:
    """An update that is served. `seconds` is the time it took. `created` is False when the version was served
    before and the same answer is returned again. `stale` names the nodes of the log that do not serve it yet.
    """

    version: str
    mode: UpdateMode
    source: Mapping[str, str]
    seconds: float
    hosts: tuple[HostReport, ...] = ()
    created: bool = True
    stale: tuple[str, ...] = ()


@frozen(kw_only=True)
class UpdateOpened:
    """An update of several requests. `buckets` counts those that have arrived; the node gives the update up
    `idle_s` seconds after the last.
    """

    update_id: str
    version: str = ""
    mode: UpdateMode = "in_place"
    buckets: int = 0
    idle_s: float = 0.0


@frozen(kw_only=True)
class WeightsUpdate:
    """An update in the history; `at` is in seconds since the epoch."""

    version: str
    mode: UpdateMode = "in_place"
    source: Mapping[str, str] = field(factory=dict)
    seconds: float = 0.0
    hosts: tuple[HostReport, ...] = ()
    at: float = 0.0


@frozen(kw_only=True)
class WeightsState:
    """The state of the weights: the version served, the version being loaded, and how generation is held, if
    it is.

    `versions` are those since the node started, oldest first; `released` names the GPU memory that is lent;
    `ranks` counts the node's GPUs, its ranks in a process group. `stale` names the nodes of the log that do
    not serve its current version, and take no tasks until they do.
    """

    version: str
    versions: tuple[str, ...] = ()
    updating: str | None = None
    paused: str | None = None
    released: tuple[str, ...] = ()
    updates: int = 0
    failures: int = 0
    last_seconds: float | None = None
    warning: str | None = None
    ranks: int = 0
    stale: tuple[str, ...] = ()


@frozen(kw_only=True)
class AdapterReport:
    """A version of an adapter that is served: each call of its sessions that begins from now on is sampled by
    it. `seconds` is the time it took; `created` is False when it was served already. `stale` names the nodes
    of the log that do not serve it yet.
    """

    name: str
    version: str
    source: Mapping[str, str] = field(factory=dict)
    seconds: float = 0.0
    created: bool = True
    stale: tuple[str, ...] = ()


@frozen(kw_only=True)
class AdapterState:
    """An adapter: the version that is current, whether the engine holds it, and who needs it. `sessions` name
    it and are not over, `calls` sample by any of its versions now; `loads` counts how often it was loaded,
    `seconds` is how long the last took on the slowest host. `versions` are all since the node started, oldest
    first. Without a version `warning` says why not.
    """

    name: str
    version: str
    loaded: bool = False
    sessions: int = 0
    calls: int = 0
    loads: int = 0
    seconds: float = 0.0
    warning: str | None = None
    versions: tuple[str, ...] = ()


@frozen(kw_only=True)
class AdaptersState:
    """The adapters of a node. `lora_rank` is the largest rank it takes, 0 where it takes none; `lora_slots`
    is how many it holds in the engine at once.
    """

    adapters: tuple[AdapterState, ...] = ()
    lora_rank: int = 0
    lora_slots: int = 0
    updates: int = 0


@frozen(kw_only=True)
class WeightsStatus(WeightsState):
    """The state of the weights and, where requested, the last updates, newest first."""

    history: tuple[WeightsUpdate, ...] = ()
