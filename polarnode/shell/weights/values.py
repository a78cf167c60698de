"""What a trainer says of weights, and what it is told: frozen values, JSON by `wire`.

Rule for whoever edits it: a body is read into these and nothing else, so a field here is a field of the API, with its row in docs/weights.md.
"""

from hashlib import sha256
from typing import Literal

from attrs import field, frozen

from polarnode.engine_host.updates import MemoryTag
from polarnode.shell.engine import UpdateMode
from polarnode.wire import dump_json, plain

Layout = Literal["flattened_bucket"]
ALL_MEMORY: tuple[MemoryTag, ...] = ("kv_cache", "weights", "cuda_graph")


@frozen(kw_only=True)
class DiskSource:
    """A Hugging Face checkpoint in a folder that every engine host can read."""

    kind: Literal["disk"] = "disk"
    path: str


@frozen(kw_only=True)
class TensorBucket:
    """Some tensors of a process on this machine. `payloads`: base64 of SGLang's MultiprocessingSerializer, one for each GPU of the node in order,
    or for each GPU of one engine, where all engines read the same (shared memory of a CPU)."""

    payloads: tuple[str, ...]
    layout: Layout | None = None


@frozen(kw_only=True)
class TensorSource:
    """Tensors by handle: CUDA IPC on a GPU, torch's shared memory on a CPU."""

    kind: Literal["tensor"] = "tensor"
    buckets: tuple[TensorBucket, ...] = ()


@frozen(kw_only=True)
class BroadcastBucket:
    """Some tensors that rank 0 of the group broadcasts, in this order."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layout: Layout | None = None


@frozen(kw_only=True)
class DistributedSource:
    """Tensors over a process group that was joined by POST /v1/weights/groups."""

    kind: Literal["distributed"] = "distributed"
    group: str = "weights"
    buckets: tuple[BroadcastBucket, ...] = ()


@frozen(kw_only=True)
class UpdateOrder:
    """New weights, to be served under `version`."""

    version: str
    source: DiskSource | TensorSource | DistributedSource
    mode: UpdateMode = "in_place"


@frozen(kw_only=True)
class GroupOrder:
    """A torch process group: rank 0 is the trainer's, the node's GPUs are `rank_offset` and those behind it."""

    name: str = "weights"
    address: str
    port: int
    world_size: int
    rank_offset: int = 1
    backend: Literal["nccl", "gloo"] = "nccl"


@frozen(kw_only=True)
class PauseOrder:
    """How generation is held."""

    mode: Literal["in_place", "retract", "abort"] = "in_place"


@frozen(kw_only=True)
class MemoryOrder:
    """What memory of the GPUs is meant."""

    tags: tuple[MemoryTag, ...] = ALL_MEMORY


@frozen(kw_only=True)
class HostReport:
    """One engine host: how long its loads took. `ok` is always true: one host that is not is an update that is none."""

    index: int
    seconds: float
    ok: bool = True


@frozen(kw_only=True)
class UpdateReport:
    """An update that is served. `created` is False when it was served before and this is the same answer again."""

    version: str
    mode: UpdateMode
    source: dict[str, str]
    seconds: float
    hosts: tuple[HostReport, ...]
    created: bool = True


@frozen(kw_only=True)
class UpdateOpened:
    """An update of several requests; `buckets` have come, and it is given up `idle_s` seconds after the last."""

    update_id: str
    version: str
    mode: UpdateMode
    buckets: int
    idle_s: float


@frozen(kw_only=True)
class Served:
    """One version of the history. `digest` is of its source, to know the same order when it comes again; "" knows none."""

    version: str
    mode: UpdateMode
    source: dict[str, str]
    seconds: float
    hosts: tuple[HostReport, ...]
    digest: str
    model: str  # the checkpoint the node was started with
    files: str = ""  # the fingerprint of a disk source's files
    at: float = field(default=0.0)


@frozen(kw_only=True)
class WeightsStatus:
    """The weights now. `versions` are those of this life of the node, oldest first; `released` is memory that others have."""

    version: str
    versions: tuple[str, ...]
    updating: str | None
    paused: str | None
    released: tuple[str, ...]
    updates: int
    failures: int
    last_seconds: float | None
    warning: str | None


def digest(order: UpdateOrder) -> str:
    """Of what an order would load; the mode is how, not what."""
    return sha256(dump_json(plain(order.source))).hexdigest()


def told(order: UpdateOrder, buckets: int) -> dict[str, str]:
    """A source as the history tells it."""
    match order.source:
        case DiskSource(path=path):
            return {"kind": "disk", "path": path}
        case TensorSource():
            return {"kind": "tensor", "buckets": str(buckets)}
        case DistributedSource(group=group):
            return {"kind": "distributed", "group": group, "buckets": str(buckets)}
