"""The trainer's side of weights that do not go over a disk: tensors as buckets for `push_weights`, by handle
or by broadcast.

torch is imported on use, and nowhere else in the client. A bucket's tensors are held until the node has
taken it: each function is a generator, and what it yielded is let go when the next is requested. Payloads
are what SGLang's own reader admits: tensors and names, pickled with torch's reductions.
"""

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from attrs import frozen

from polarnode.core.conversation import Json

if TYPE_CHECKING:
    import torch

Named = tuple[str, "torch.Tensor"]
Bucket = dict[str, Json]

# a request each: a few dozen for a model of 30 GB, and the copies that are held meanwhile stay small
BUCKET_BYTES = 512 << 20
DEVICE = 6  # where torch's reduction of a CUDA tensor says its device


def buckets(named: Iterable[Named], *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Tensors of this process by handle, for a node on this machine and a trainer of one process: CUDA IPC,
    or shared memory on a CPU.

    Names are the checkpoint's. A trainer of several processes makes one payload a GPU itself (`payload`) and
    gathers them.
    """
    for part in parts(named, bucket_bytes):
        made = payload(part)
        yield {"payloads": [made.text]}


def broadcast_buckets(
    named: Iterable[Named], group: Any, *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Tensors that rank 0 of a joined group (`open_group`) broadcasts: each bucket is under way when it is
    told, and waited for before the next.
    """
    import torch.distributed as dist

    for part in parts(named, bucket_bytes):
        sent = [tensor.detach().contiguous() for _, tensor in part]
        works = [dist.broadcast(tensor, group_src=0, group=group, async_op=True) for tensor in sent]
        yield {
            "names": [name for name, _ in part],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in sent],
            "shapes": [list(tensor.shape) for tensor in sent],
        }
        for work in works:
            work.wait()


def parts(named: Iterable[Named], most: int) -> Iterator[list[Named]]:
    """Tensors in order, up to `most` bytes at a time; one that is larger goes by itself."""
    part: list[Named] = []
    size = 0
    for name, tensor in named:
        if part and size + tensor.nbytes > most:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    if part:
        yield part


@frozen
class Payload:
    """Base64 of a pickle that holds handles, not numbers. Hold it until the node has taken it: what the
    handles lead to lives as long.
    """

    text: str
    held: "Sequence[Named]"


def payload(named: Iterable[Named]) -> Payload:
    """Tensors of one device as a payload."""
    import torch
    from torch import multiprocessing

    sharing: Any = multiprocessing  # its functions have no types
    file, held = BytesIO(), [(name, _shareable(tensor)) for name, tensor in named]
    pickler = ForkingPickler(file, 4)
    pickler.dispatch_table[torch.Tensor] = _reduced
    before = sharing.get_sharing_strategy()
    # by name: descriptors would be handed over by a server that only this process's children may ask
    sharing.set_sharing_strategy("file_system")
    try:
        pickler.dump(held)
    finally:
        sharing.set_sharing_strategy(before)
    return Payload(b64encode(file.getvalue()).decode(), held)


def _shareable(tensor: "torch.Tensor") -> "torch.Tensor":
    """On a CPU a copy: sharing moves a tensor's memory, and the trainer's own stays where its optimizer knows
    it.
    """
    import torch

    plain = tensor.detach()
    return plain.contiguous() if plain.is_cuda else plain.clone(memory_format=torch.contiguous_format)


def _reduced(tensor: "torch.Tensor") -> tuple[Any, ...]:
    """As torch does it, but that a GPU is called by its UUID: its number is another in a process that sees
    other GPUs. SGLang reads both.
    """
    import torch
    from torch.multiprocessing import reductions

    reduce: Any = reductions.reduce_tensor
    rebuild, args = reduce(tensor)
    if tensor.is_cuda and isinstance(args[DEVICE], int):
        uuid = str(torch.cuda.get_device_properties(args[DEVICE]).uuid)
        args = (*args[:DEVICE], uuid, *args[DEVICE + 1 :])
    return rebuild, args


def open_group(
    *, address: str, port: int, world_size: int, backend: str = "nccl", name: str = "weights"
) -> Any:
    """Rank 0's end of a group with the node's engines; waits until they have joined (`join_weights_group`, at
    the same time, from a thread).

    torch has no public way to a group beside the trainer's own default one; this is the one SGLang's end is
    made by.
    """
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    found = c10d.rendezvous(f"tcp://{address}:{port}", 0, world_size, timeout=c10d.default_pg_timeout)
    store, rank, size = next(found)
    store.set_timeout(c10d.default_pg_timeout)
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=c10d.default_pg_timeout,
    )
    c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group
