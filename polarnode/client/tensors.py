"""Tensors as buckets for `push_weights`, without a disk: by handle or by broadcast. This is the trainer's
side.

torch is imported on use, and nowhere else in the client. Each function is a generator that holds a bucket's
tensors until the next bucket is requested, which is when the node has taken it. Payloads contain what
SGLang's own reader admits: tensors and names, pickled with torch's reductions.
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

# one request for each bucket: a few dozen for a model of 30 GB, and the copies held meanwhile stay small
BUCKET_BYTES = 512 << 20
DEVICE = 6  # index of the device in torch's reduction of a CUDA tensor


def buckets(named: Iterable[Named], *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Yield tensors of this process by handle, for a node on this machine: CUDA IPC, or shared memory on a
    CPU.

    `named` yields (name, tensor) with the checkpoint's names. `bucket_bytes` is the most bytes of tensors in
    a bucket; a larger tensor has a bucket of its own. A trainer of several processes makes one `payload` on
    each GPU and gathers them.
    """
    for part in parts(named, bucket_bytes):
        made = payload(part)
        yield {"payloads": [made.text]}


def broadcast_buckets(
    named: Iterable[Named], group: Any, *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Yield tensors that rank 0 broadcasts over a joined group (`open_group`).

    The broadcast of a bucket begins before the bucket is yielded, and is awaited before the next one.
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
    """Split tensors in order into lists of up to `most` bytes; a larger tensor is a list of its own."""
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
    """Base64 text of a pickle that holds handles, not numbers. Keep it until the node has taken it: the
    tensors are freed with it.
    """

    text: str
    held: "Sequence[Named]"


def payload(named: Iterable[Named]) -> Payload:
    """Make a payload of the tensors of one device."""
    import torch
    from torch import multiprocessing

    sharing: Any = multiprocessing  # its functions have no types
    file, held = BytesIO(), [(name, _shareable(tensor)) for name, tensor in named]
    pickler = ForkingPickler(file, 4)
    pickler.dispatch_table[torch.Tensor] = _reduced
    before = sharing.get_sharing_strategy()
    # by name: descriptors are passed by a server that only this process's children may use
    sharing.set_sharing_strategy("file_system")
    try:
        pickler.dump(held)
    finally:
        sharing.set_sharing_strategy(before)
    return Payload(b64encode(file.getvalue()).decode(), held)


def _shareable(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the tensor to share. On a CPU this is a copy: sharing moves memory that the trainer's optimizer
    refers to.
    """
    import torch

    plain = tensor.detach()
    return plain.contiguous() if plain.is_cuda else plain.clone(memory_format=torch.contiguous_format)


def _reduced(tensor: "torch.Tensor") -> tuple[Any, ...]:
    """Reduce a tensor as torch does, but name a GPU by its UUID: its index differs in a process that sees
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
    """Open rank 0's end of a process group with the node's engines. Return the group when all `world_size`
    ranks have joined.

    Call `join_weights_group` at the same time, from a thread. torch has no public function for a group
    besides the default one; this is the function that SGLang uses for its own end.
    """
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    rendezvous = c10d.rendezvous(f"tcp://{address}:{port}", 0, world_size, timeout=c10d.default_pg_timeout)
    store, rank, size = next(rendezvous)
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
