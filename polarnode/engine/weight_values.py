"""Values of the weights API: what a trainer sends and receives, and the load messages for each engine host.

They are frozen values, encoded as JSON by `core.codec.json`, and plain functions. Impossible requests are
refused here, before generation is held. Invariants: a request body is read into these classes only, so every
field is a field of the API with a row in docs/weights.md. Payloads are handles, never weights by value,
because a frame to a host would otherwise hold gigabytes.
"""

import binascii
from base64 import b64decode
from collections.abc import Sequence
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen

from polarnode.core.codec.json import dump_json, plain
from polarnode.core.errors import Refused
from polarnode.core.weights import Backend, HostReport, MemoryTag, PauseMode, UpdateMode
from polarnode.engine.protocol import LoadBroadcast, LoadDisk, LoadTensors, ToHost

if TYPE_CHECKING:  # a reader of these values needs no engine
    from polarnode.engine.update import MessageMaker

# ── values ────────────────────────────────────────────────────────────

Layout = Literal["flattened_bucket"]
ALL_MEMORY: tuple[MemoryTag, ...] = ("kv_cache", "weights", "cuda_graph")


@frozen(kw_only=True)
class DiskSource:
    """A Hugging Face checkpoint in a folder that every engine host can read."""

    kind: Literal["disk"] = "disk"
    path: str


@frozen(kw_only=True)
class AdapterOrder:
    """A version of an adapter, to be served from a folder of this machine."""

    name: str
    version: str
    source: DiskSource


@frozen(kw_only=True)
class TensorBucket:
    """Some tensors of a process on this machine. `payloads` are base64 of SGLang's MultiprocessingSerializer:
    one for each GPU of the node in order, or one for each GPU of one engine if all engines read the same
    (shared memory of a CPU).
    """

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
    """A torch process group. Rank 0 is the trainer's, and the node's GPUs have the ranks from `rank_offset`
    on.
    """

    name: str = "weights"
    address: str
    port: int
    world_size: int
    rank_offset: int = 1
    backend: Backend = "nccl"


@frozen(kw_only=True)
class PauseOrder:
    """How generation is held."""

    mode: PauseMode = "in_place"


@frozen(kw_only=True)
class MemoryOrder:
    """Which GPU memory to release or take back."""

    tags: tuple[MemoryTag, ...] = ALL_MEMORY


@frozen(kw_only=True)
class Served:
    """One version of the history. `digest` is that of its source, to recognise a repeated order; "" matches
    none.
    """

    version: str
    mode: UpdateMode
    source: dict[str, str]
    seconds: float
    hosts: tuple[HostReport, ...]
    digest: str
    model: str  # the checkpoint the node was started with
    files: str = ""  # the fingerprint of a disk source's files
    at: float = field(default=0.0)


def digest(order: UpdateOrder) -> str:
    """The digest of what an order would load, without its mode."""
    return sha256(dump_json(plain(order.source))).hexdigest()


def source_record(order: UpdateOrder, buckets: int) -> dict[str, str]:
    """A source as shown in the history."""
    match order.source:
        case DiskSource(path=path):
            return {"kind": "disk", "path": path}
        case TensorSource():
            return {"kind": "tensor", "buckets": str(buckets)}
        case DistributedSource(group=group):
            return {"kind": "distributed", "group": group, "buckets": str(buckets)}


def in_order(logged: Sequence[str], served: Sequence[str], *, after: str | None) -> tuple[str, ...]:
    """The versions of a log, oldest first, with those that a node served and the log does not have. The node
    began with these when `after` was the last version of the log.
    """
    first = list(logged).index(after) + 1 if after is not None and after in logged else 0
    own = [each for each in served if each not in logged]
    return (*logged[:first], *own, *logged[first:])


# ── buckets ────────────────────────────────────────────────────────────

# Bytes of payloads for one host: a handle takes some 400, and a model of 100,000 tensors comes in several
# buckets.
MAX_HANDLE_BYTES = 4 << 20
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8", "uint8")
PORTS = range(1, 65536)


def check(order: UpdateOrder) -> None:
    """Raise Refused for errors that are visible without reading the disk."""
    if not 0 < len(order.version) <= 128 or not order.version.isprintable():
        raise Refused("version must be a name of 1 to 128 printable characters", path="$.version")
    if isinstance(order.source, DiskSource):
        if not Path(order.source.path).is_absolute():
            raise Refused(
                "source.path must be absolute: the engine hosts work in folders of their own",
                path="$.source.path",
            )
        if "\0" in order.source.path:
            raise Refused("source.path has a NUL character: remove it", path="$.source.path")


def loads(order: UpdateOrder, *, hosts: int, ranks: int) -> "list[MessageMaker]":
    """The loads of an order that comes in one request, in their order."""
    match order.source:
        case DiskSource(path=path):
            return [lambda call, _: LoadDisk(call=call, path=path)]
        case TensorSource(buckets=buckets):
            return [
                tensors(each, hosts=hosts, ranks=ranks, path=f"$.source.buckets[{at}]")
                for at, each in enumerate(buckets)
            ]
        case source:
            return [
                broadcast(each, source.group, path=f"$.source.buckets[{at}]")
                for at, each in enumerate(source.buckets)
            ]


def tensors(bucket: TensorBucket, *, hosts: int, ranks: int, path: str = "$") -> "MessageMaker":
    """The load of a bucket of tensors by `hosts` engines of `ranks` GPUs each."""
    if len(bucket.payloads) not in (ranks, hosts * ranks):
        wanted = (
            f"{hosts * ranks} (one for each GPU of the node, in order) or {ranks} (the same for each engine)"
        )
        raise Refused(
            f"payloads has {len(bucket.payloads)} entries, this node takes {wanted}", path=f"{path}.payloads"
        )
    payloads = [_bytes(each, f"{path}.payloads[{at}]") for at, each in enumerate(bucket.payloads)]
    if sum(map(len, payloads)) > MAX_HANDLE_BYTES * hosts:
        raise Refused(
            f"payloads hold more than {MAX_HANDLE_BYTES >> 20} MiB for an engine: send handles (CUDA IPC,"
            " shared"
            " memory), not tensors",
            path=path,
        )
    if len(payloads) == ranks:
        payloads *= hosts

    def make(call: int, host: int) -> ToHost:
        return LoadTensors(
            call=call, payloads=payloads[host * ranks : (host + 1) * ranks], layout=bucket.layout
        )

    return make


def _bytes(text: str, path: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except binascii.Error:
        raise Refused(
            "a payload is no base64: send MultiprocessingSerializer.serialize(tensors, output_str=True)",
            path=path,
        ) from None


def broadcast(bucket: BroadcastBucket, group: str, *, path: str = "$") -> "MessageMaker":
    """The load of a broadcast bucket. It is checked before the trainer begins to send, because afterwards the
    trainer would hang in a broadcast without a receiver.
    """
    if not len(bucket.names) == len(bucket.dtypes) == len(bucket.shapes) or not bucket.names:
        raise Refused("names, dtypes and shapes must be equally many, and at least one", path=path)
    for at, (dtype, shape) in enumerate(zip(bucket.dtypes, bucket.shapes, strict=True)):
        if dtype not in DTYPES:
            raise Refused(
                f"dtype {dtype!r} is unknown: give one of {', '.join(DTYPES)}", path=f"{path}.dtypes[{at}]"
            )
        if any(each < 0 for each in shape) or prod(shape) > 1 << 40:
            raise Refused(f"shape {list(shape)} is none of a tensor", path=f"{path}.shapes[{at}]")
    shapes = [list(each) for each in bucket.shapes]
    return lambda call, _: LoadBroadcast(
        call=call,
        group=group,
        names=list(bucket.names),
        dtypes=list(bucket.dtypes),
        shapes=shapes,
        layout=bucket.layout,
    )


def check_group(order: GroupOrder, ranks: int) -> None:
    """Raise Refused for a group that cannot be joined. `ranks` is the number of GPUs of the whole node."""
    if order.port not in PORTS:
        raise Refused(f"port {order.port} is none: give 1 to 65535", path="$.port")
    if order.rank_offset < 1 or order.rank_offset + ranks > order.world_size:
        raise Refused(
            f"this node's {ranks} GPUs are ranks {order.rank_offset} to {order.rank_offset + ranks - 1}: rank"
            f" 0 is the trainer's, and world_size must be at least {order.rank_offset + ranks}",
            path="$.world_size",
        )
