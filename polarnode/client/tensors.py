"""A trainer's tensors to a node after an optimizer step: `push_tensors`, by a checkpoint on a disk, by handle
or by broadcast.

torch and safetensors are imported on use, and nowhere else in the client. Names are those of the Hugging Face
checkpoint. The generators of buckets hold a bucket's tensors until the next bucket is requested, which is
when the node has taken it. Payloads contain what SGLang's own reader admits: tensors and names, pickled with
torch's reductions.
"""

import json
import os
import re
import shutil
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from filecmp import cmpfiles
from io import BytesIO
from itertools import count
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from attrs import define, field, frozen

from polarnode.client.scripts import RetryPatience
from polarnode.client.values import ClientError, Unreachable
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.weights import AdapterReport, Backend, UpdateMode, WeightsReport

if TYPE_CHECKING:
    import torch

    from polarnode.client.blocking import PolarnodeClient

Named = tuple[str, "torch.Tensor"]
Bucket = dict[str, Json]

Transport = Literal["disk", "tensor", "distributed"]
# one request for each bucket: a few dozen for a model of 30 GB, and the copies held meanwhile stay small
BUCKET_BYTES = 512 << 20
DEVICE_INDEX = 6  # index of the device in torch's reduction of a CUDA tensor
# bytes of one file of a checkpoint: the Hugging Face Hub's usual size; each is held in memory while it is
# written
FILE_BYTES = 5 << 30
KEPT_FOLDERS = 3  # the one that is served, the one before, and one that a restarting host may still read
MARK = "polarnode.json"  # is in the folders that `save_checkpoint` wrote; others are never deleted
# files of a model's folder that are not copied beside new weights
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
JOIN_TIMEOUT_S = 60.0  # seconds for the trainer's end of a group once the node's end reports it complete


# ── after an optimizer step ────────────────────────────────────────────────────


def push_tensors(
    client: "PolarnodeClient",
    version: str,
    named: "Mapping[str, torch.Tensor] | Iterable[Named]",
    *,
    transport: Transport = "disk",
    folder: str | Path | None = None,
    model: str | Path | None = None,
    group: "WeightsGroup | None" = None,
    mode: UpdateMode = "in_place",
    keep: int = KEPT_FOLDERS,
    bucket_bytes: int = BUCKET_BYTES,
) -> WeightsReport:
    """Serve these tensors as `version`. Return when they are served.

    * `named`: every tensor of the model, whole (not a shard), by its name in the Hugging Face checkpoint: a
      mapping such as a state dict, or pairs, which may be made while they are sent.
    * transport="disk" writes a checkpoint below `folder`, which only this trainer writes to and the node's
      machine sees under the same absolute path. What is not weights is copied from `model`, the checkpoint
      that training began with. The last `keep` checkpoints are kept, because a node that restarts reads its
      version again.
    * transport="tensor" sends handles, for a trainer on the node's machine. The tensors must not change until
      this returns.
    * transport="distributed" broadcasts over `group`, which is joined when it is first used.
    * `mode`: what happens to turns in progress, as for `update_weights`.

    One process of a trainer calls this. It blocks: from asyncio, `await asyncio.to_thread(push_tensors,
    client, …)`. A broken connection is retried for the client's patience as long as no tensor was sent, or
    when they can be sent again (by handle, from a mapping or a sequence). Raises Refused for arguments that
    do not fit the transport, and what `update_weights` raises: ClientError means that the node serves the
    previous weights; after Unreachable `client.weights()` shows which.
    """
    if transport == "disk":
        if folder is None or model is None:
            raise Refused(
                "transport='disk' writes checkpoints: give folder= (the node's machine must see it under the"
                " same path) and model= (the folder of the checkpoint that training began with)"
            )
        return _push_disk(client, version, named, Path(folder), Path(model), mode, keep)
    source = _TensorSource(named, again=transport == "tensor")
    if transport == "tensor":
        return _push(client, version, source, lambda: buckets(source, bucket_bytes=bucket_bytes), None, mode)
    if group is None:
        raise Refused("transport='distributed' broadcasts over a process group: give group=WeightsGroup(…)")
    return _push_distributed(client, version, source, group, mode, bucket_bytes)


@define(eq=False)
class _TensorSource:
    """Tensors to send. `repeatable`: a broken connection costs nothing, they can be sent (again)."""

    named: "Mapping[str, torch.Tensor] | Iterable[Named]"
    again: bool
    begun: bool = field(default=False, init=False)

    @property
    def repeatable(self) -> bool:
        return not self.begun or (self.again and isinstance(self.named, Mapping | Sequence))

    def __iter__(self) -> "Iterator[Named]":
        self.begun = True
        yield from pairs(self.named)


def pairs(named: "Mapping[str, torch.Tensor] | Iterable[Named]") -> "Iterable[Named]":
    """Return tensors with their names, of a mapping or of pairs."""
    return named.items() if isinstance(named, Mapping) else named


def _push(
    client: "PolarnodeClient",
    version: str,
    source: _TensorSource,
    make: Callable[[], Iterator[Bucket]],
    group: "WeightsGroup | None",
    mode: UpdateMode,
) -> WeightsReport:
    """Push buckets, and again after transient errors while `source` is repeatable."""
    patience = RetryPatience(client.patience_s, time.monotonic)
    while True:
        try:
            if group is None:
                return client.push_weights(version, make(), mode=mode)
            return client.push_weights(version, make(), kind="distributed", group=group.name, mode=mode)
        except (ClientError, Unreachable) as error:
            if not source.repeatable:
                raise
            time.sleep(patience.pause(error))


def _push_distributed(
    client: "PolarnodeClient",
    version: str,
    source: _TensorSource,
    group: "WeightsGroup",
    mode: UpdateMode,
    bucket_bytes: int,
) -> WeightsReport:
    def push() -> WeightsReport:
        joined = group.joined(client)
        return _push(
            client,
            version,
            source,
            lambda: broadcast_buckets(source, joined, bucket_bytes=bucket_bytes),
            group,
            mode,
        )

    try:
        return push()
    except ClientError as error:
        if error.status != 409 or source.begun:
            raise
        group.leave(client)  # an engine that was restarted is in no group: join again, once
    return push()


# ── an adapter ────────────────────────────────────────────────────────────────


def push_adapter(
    client: "PolarnodeClient",
    name: str,
    version: str,
    adapter: Any,
    config: "Mapping[str, Any] | Any | None" = None,
) -> AdapterReport:
    """Serve an adapter as `version` of `name`. Return when it is served.

    * `adapter`: a model of PEFT's, whose active adapter is taken; or its tensors (torch or numpy), with the
      names of `get_peft_model_state_dict`. Tensors need `config`: PEFT's, or that of adapter_config.json.

    The tensors travel in the request, whatever disk or machine the node is on. Call it in one process, with
    whole tensors. Raises Refused for what is no adapter, and what `PolarnodeClient.update_adapter` raises.
    """
    if config is None:
        found = getattr(adapter, "peft_config", None)
        if not found:
            raise Refused("give config= (PEFT's, or that of adapter_config.json), or a model of PEFT's")
        from peft import get_peft_model_state_dict

        active = adapter.active_adapter
        config = found[active]
        adapter = get_peft_model_state_dict(adapter, adapter_name=active)
    settings = config if isinstance(config, Mapping) else config.to_dict()
    # in PEFT's configs target_modules is a set
    text = json.dumps(
        dict(settings), default=lambda each: sorted(each) if isinstance(each, set) else str(each)
    )
    return client.send_adapter(
        name, version, _safetensors_bytes(dict(pairs(adapter)), {"adapter_config": text})
    )


def _safetensors_bytes(named: dict[str, Any], metadata: dict[str, str]) -> bytes:
    """The bytes of a safetensors file."""
    try:
        if not any(hasattr(each, "detach") for each in named.values()):
            from safetensors.numpy import save as save_arrays

            return save_arrays(named, metadata)
        from safetensors.torch import save
    except ImportError:
        raise Refused("an adapter travels as a safetensors file: pip install safetensors") from None
    return save({name: each.detach().to("cpu").contiguous() for name, each in named.items()}, metadata)


@define(eq=False)
class WeightsGroup:
    """A torch process group of this process, rank 0, with all GPUs of a node; joined on first use.

    * `address`: this machine's, as the node reaches it. `port`: 0 takes a free one for each join.
    * `name`: of the group on the node; two trainers of one node need two names.
    """

    address: str
    port: int = 0
    backend: Backend = "nccl"
    name: str = "weights"
    _group: Any = field(default=None, init=False)

    def joined(self, client: "PolarnodeClient") -> Any:
        """Return torch's group. The first call joins it, together with the node's engines."""
        if self._group is None:
            self._leave_node(client)  # of a trainer that ended before
            where: dict[str, Any] = {
                "address": self.address,
                "port": self.port or _free_port(),
                "world_size": 1 + client.weights().ranks,
                "backend": self.backend,
                "name": self.name,
            }
            opened: list[Any] = []
            # a daemon: if the node refuses, torch waits for the others until its own time limit
            own = threading.Thread(target=lambda: opened.append(open_group(**where)), daemon=True)
            own.start()
            client.join_weights_group(**where)
            own.join(JOIN_TIMEOUT_S)
            if not opened:
                raise Unreachable(f"this process did not complete the group {self.name!r}: see its own error")
            self._group = opened[0]
        return self._group

    def leave(self, client: "PolarnodeClient") -> None:
        """End the group on both sides."""
        if self._group is not None:
            import torch.distributed as dist

            left = threading.Thread(target=self._leave_node, args=(client,), daemon=True)
            left.start()  # at once: NCCL ends a group together
            dist.destroy_process_group(self._group)
            self._group = None
            left.join()

    def _leave_node(self, client: "PolarnodeClient") -> None:
        try:
            client.leave_weights_group(self.name)
        except ClientError as error:
            if error.status != 404:  # it is in no such group
                raise


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


# ── a checkpoint ────────────────────────────────────────────────────


def _push_disk(
    client: "PolarnodeClient",
    version: str,
    named: "Mapping[str, torch.Tensor] | Iterable[Named]",
    folder: Path,
    model: Path,
    mode: UpdateMode,
    keep: int,
) -> WeightsReport:
    path, created = save_checkpoint(folder, version, named, model=model)
    try:
        report = client.update_weights(version, path=path, mode=mode)
    except ClientError:
        if created:  # the node did not take it
            shutil.rmtree(path)
        raise
    _prune(folder, max(1, keep), path)
    return report


def save_checkpoint(
    folder: Path,
    version: str,
    named: "Mapping[str, torch.Tensor] | Iterable[Named]",
    *,
    model: Path,
    file_bytes: int = FILE_BYTES,
) -> tuple[Path, bool]:
    """Write a checkpoint below `folder` whole or not at all. Return its absolute path, and False if it was
    there already with the same content.

    It is named after `version`, with a number if that name has other content: what a node serves is never
    overwritten. Tensors are written in the types of `model`'s, in files of up to `file_bytes`, and the other
    files of `model` are copied. A tied output head is left out where `model` leaves it out. Raises Refused
    where safetensors is not installed or `model` is no folder with a checkpoint in safetensors.
    """
    types = _tensor_types(model)
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".writing-*"):  # by a trainer that was killed
        shutil.rmtree(left)
    writing = folder / f".writing-{uuid4().hex}"
    writing.mkdir()
    try:
        for file in sorted(model.iterdir()):
            if file.is_file() and not file.name.endswith(WEIGHT_FILES) and file.name != MARK:
                shutil.copyfile(file, writing / file.name)
        _write_tensors(writing, _cast_to_types(types, named), file_bytes)
        (writing / MARK).write_text(json.dumps({"version": version}))
        for file in (*writing.iterdir(), writing):
            _sync_path(file)
        return _placed(
            writing, folder, re.sub(r"[^\w.-]", "_", version, flags=re.ASCII).lstrip(".")[:128] or "weights"
        )
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _tensor_types(model: Path) -> dict[str, str]:
    """The tensors of a checkpoint with their types, such as BF16."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise Refused(
            "transport='disk' writes safetensors files: pip install safetensors, or use transport='tensor' or"
            " 'distributed'"
        ) from None
    found: dict[str, str] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    if not found or not (model / "config.json").is_file():
        raise Refused(
            f"{model} has no config.json and safetensors files: give model= the checkpoint's folder"
        )
    return found


def _cast_to_types(
    types: Mapping[str, str], named: "Mapping[str, torch.Tensor] | Iterable[Named]"
) -> "Iterator[Named]":
    """Tensors on the CPU, each with memory of its own, as a checkpoint with `types` has them."""
    import torch

    floats = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    for name, tensor in pairs(named):
        if name == "lm_head.weight" and name not in types:
            continue  # tied: it is the embedding
        own = tensor.detach()
        if own.dtype in floats.values():
            own = own.to(floats.get(types.get(name, ""), own.dtype))
        own = own.to("cpu", memory_format=torch.contiguous_format)
        yield name, own.clone() if own.data_ptr() == tensor.data_ptr() else own


def _write_tensors(folder: Path, named: "Iterable[Named]", file_bytes: int) -> None:
    from safetensors.torch import save_file

    places: dict[str, Json] = {}
    size = 0
    for number, part in enumerate(parts(named, file_bytes), 1):
        name = f"model-{number:05}.safetensors"
        save_file(dict(part), folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys((each for each, _ in part), name)
        size += sum(tensor.nbytes for _, tensor in part)
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _placed(writing: Path, folder: Path, name: str) -> tuple[Path, bool]:
    """Give what is written its name, unless it is there already."""
    for number in count(1):
        path = folder / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            writing.rename(path)
            _sync_path(folder)
            return path, True
        files = sorted(each.name for each in writing.iterdir())
        there = sorted(each.name for each in path.iterdir()) if path.is_dir() else []
        if files == there and cmpfiles(writing, path, files, shallow=False)[0] == files:
            break
    return path, False


def _sync_path(path: Path) -> None:
    """Put a file or a folder's names on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(folder: Path, keep: int, served: Path) -> None:
    """Delete all but the last `keep` checkpoints that `save_checkpoint` wrote."""
    written = sorted(folder.absolute().glob(f"*/{MARK}"), key=lambda mark: mark.stat().st_mtime_ns)
    for mark in written[:-keep]:
        if mark.parent != served:
            shutil.rmtree(mark.parent)


# ── buckets ────────────────────────────────────────────────────


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
    file, held = BytesIO(), [(name, _shareable_tensor(tensor)) for name, tensor in named]
    pickler = ForkingPickler(file, 4)
    pickler.dispatch_table[torch.Tensor] = _reduce_tensor
    before = sharing.get_sharing_strategy()
    # by name: descriptors are passed by a server that only this process's children may use
    sharing.set_sharing_strategy("file_system")
    try:
        pickler.dump(held)
    finally:
        sharing.set_sharing_strategy(before)
    return Payload(b64encode(file.getvalue()).decode(), held)


def _shareable_tensor(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the tensor to share. On a CPU this is a copy: sharing moves memory that the trainer's optimizer
    refers to.
    """
    import torch

    plain = tensor.detach()
    return plain.contiguous() if plain.is_cuda else plain.clone(memory_format=torch.contiguous_format)


def _reduce_tensor(tensor: "torch.Tensor") -> tuple[Any, ...]:
    """Reduce a tensor as torch does, but name a GPU by its UUID: its index differs in a process that sees
    other GPUs. SGLang reads both.
    """
    import torch
    from torch.multiprocessing import reductions

    reduce: Any = reductions.reduce_tensor
    rebuild, args = reduce(tensor)
    if tensor.is_cuda and isinstance(args[DEVICE_INDEX], int):
        uuid = str(torch.cuda.get_device_properties(args[DEVICE_INDEX]).uuid)
        args = (*args[:DEVICE_INDEX], uuid, *args[DEVICE_INDEX + 1 :])
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
