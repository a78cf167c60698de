"""The tensors of a checkpoint's folder or of an adapter: names, shapes and dtypes, read from the headers of
its safetensors files.

There is no torch here, because the node and the simulated engine read checkpoints too. A header is bounded
before it is read. An adapter may be only what SGLang samples by exactly: SGLang ignores some of PEFT's
options, so that the logprobs would be those of other weights, and some shapes end its scheduler in the middle
of a batch.
"""

import json
import os
import re
import stat
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import numpy
from attrs import frozen

from polarnode.core.errors import shortened

# Bytes of a file's header: 150 for each tensor, and the largest checkpoints have 100 000 of them in a hundred
# files. Parsing it holds the process.
MAX_HEADER_BYTES = 32 << 20
MAX_ADAPTER_HEADER_BYTES = (
    1 << 20
)  # bytes of an adapter's header: 7 000 tensors, two for each linear layer of a model
SHOWN = 3  # names in a sentence
FLOATS = frozenset({"BF16", "F16", "F32"})  # each of them can be read as any other


class BadCheckpoint(ValueError):
    """Why weights do not belong to the model, in one sentence."""


def require(holds: bool, sentence: str) -> None:
    """Raise BadCheckpoint with the sentence unless the condition holds."""
    if not holds:
        raise BadCheckpoint(sentence)


@frozen
class Kind:
    """A tensor's shape and dtype, without its values."""

    shape: tuple[int, ...]
    dtype: str


Manifest = Mapping[str, Kind]


@contextmanager
def open_regular(file: Path) -> Iterator[BufferedReader]:
    """Open a file to read. Raises BadCheckpoint for what is no regular file: a pipe would wait for its
    writer, a device has no end, and a folder has nothing to read. Links to files are followed.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:  # checked before Python's own file is made, which takes no folder
        require(
            stat.S_ISREG(os.fstat(descriptor).st_mode),
            f"{file.name} is no regular file: write weights as files, not as folders, pipes or devices",
        )
    except BadCheckpoint:
        os.close(descriptor)
        raise
    with open(descriptor, "rb") as opened:
        yield opened


def check_files(path: Path) -> None:
    """Raise BadCheckpoint if a folder has something that is neither a file nor a folder. Each file is opened
    once, because a disk that hangs must do so here, and not in the engine.
    """
    # Otherwise whoever loads it says what is missing.
    for each in sorted(path.iterdir()) if path.is_dir() else ():
        if not each.is_dir():
            require(
                each.is_file(),
                f"{each.name} is no regular file: write weights as files, not as pipes, devices or links to"
                " them",
            )
            with open_regular(each) as opened:
                opened.read(8)


def manifest(path: Path, limit: int = MAX_HEADER_BYTES) -> Manifest:
    """The tensors of a checkpoint. It is empty if there are no safetensors files. `limit` is in bytes of a
    header.
    """
    found: dict[str, Kind] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= {
            name: Kind(tuple(each["shape"]), str(each["dtype"]))
            for name, each in head(file, limit).items()
            if name != "__metadata__"
        }
    return found


def head(file: Path, limit: int = MAX_HEADER_BYTES) -> dict[str, Any]:
    """A safetensors file's header: for each tensor its shape, dtype and place, which is within the file, and
    `__metadata__` as it is.
    """
    with open_regular(file) as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= limit:
            raise BadCheckpoint(
                f"{file.name} is no safetensors file of this kind: its header claims {length} bytes, at most"
                f" {limit} are read"
            )
        try:
            head: dict[str, Any] = json.loads(opened.read(length))
            ends = [_end(each) for name, each in head.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise BadCheckpoint(
                f"{file.name} is no whole safetensors file: {type(error).__name__}: {error}"
            ) from None
    end = 8 + length + max(ends, default=0)
    if file.stat().st_size < end:
        raise BadCheckpoint(f"{file.name} is cut: it has {file.stat().st_size} bytes and needs {end}")
    return head


def _end(tensor: Mapping[str, Any]) -> int:
    """Where a tensor of a header ends. Raises ValueError and others for an entry that is no tensor."""
    first, last = tensor["data_offsets"]
    numbers = (first, last, *tensor["shape"])
    if not all(type(each) is int and each >= 0 for each in numbers) or last < first:
        raise ValueError(f"a tensor of shape {shortened(str(tensor['shape']), 80)} from {first} to {last}")
    tensor["dtype"].isalnum()
    return int(last)


def check_folder(path: Path, model: Manifest) -> None:
    """Raise BadCheckpoint unless the folder holds a whole checkpoint with the tensors of `model`, or any
    whole checkpoint if those are unknown.
    """
    if not (path / "config.json").is_file():
        raise BadCheckpoint(
            f"there is no config.json under {path}: name a folder with a Hugging Face checkpoint"
        )
    check_files(path)
    found = manifest(path)
    if model:
        check_tensors(found, model)
        check_whole(found, model)


def check_tensors(found: Manifest, model: Manifest) -> None:
    """Raise BadCheckpoint if a tensor is not one of the model's, or has another shape or type."""
    # A tied output head is often listed, although it is the embedding.
    if unknown := sorted(found.keys() - model.keys() - {"lm_head.weight"}):
        raise BadCheckpoint(f"{_some(unknown)} not in the model")
    for name in found.keys() & model.keys():
        if found[name].shape != model[name].shape:
            raise BadCheckpoint(
                f"{name} has shape {list(found[name].shape)}, the model's has {list(model[name].shape)}"
            )
        if found[name].dtype != model[name].dtype and not {found[name].dtype, model[name].dtype} <= FLOATS:
            raise BadCheckpoint(f"{name} is {found[name].dtype}, the model's is {model[name].dtype}")


# How checkpoints name the layers by which they draft, and what only those layers have.
_DRAFT_NAME = re.compile(r"(?:^|\.)mtp[._]")
_DRAFT_JOIN = ".eh_proj."


def draft_tensors(model: Manifest) -> frozenset[str]:
    """The tensors of layers that only draft (multi-token prediction). Sampling is right with old ones, and
    most trainers have none.
    """
    layers = tuple({name.partition(_DRAFT_JOIN)[0] + "." for name in model if _DRAFT_JOIN in name})
    return frozenset(name for name in model if _DRAFT_NAME.search(name) or name.startswith(layers))


def check_whole(names: Iterable[str], model: Manifest) -> None:
    """Raise BadCheckpoint if tensors of the model are missing: they would keep their old values, and the
    model would be neither old nor new. Those that draft may be missing, if all of them are.
    """
    found, drafts = set(names), draft_tensors(model)
    needed = model.keys() - (frozenset() if found & drafts else drafts)
    if missing := sorted(needed - found):
        raise BadCheckpoint(f"{_some(missing)} missing: send every tensor of the model")


# ── adapters ──────────────────────────────────────────────────────────────

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"  # as PEFT's save_pretrained names them
MAX_CONFIG_BYTES = (
    1 << 20
)  # bytes: PEFT's own has 1 kB, and one that names each module of a model has hundreds
READ = 1 << 24  # values of a tensor that are checked together
_LORA_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
# Fields of PEFT's config that change what the adapter computes and that SGLang does not read, each with the
# values that mean "not used".
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "use_qalora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "alora_invocation_tokens": (None, []),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
# Initialisations that change the base weights, or the layer.
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
MAX_ALPHA = 1e6  # a larger value is no scale but a mistake, and the engine's float32 would overflow


@frozen(kw_only=True)
class AdapterLimits:
    """What the engine has room for: the largest rank, and the modules that may be changed."""

    rank: int
    modules: tuple[str, ...]


def check_adapter(path: Path, model: Manifest, limits: AdapterLimits) -> None:
    """Raise BadCheckpoint unless the folder holds a LoRA adapter in PEFT's layout that the engine samples by
    exactly. It must be for a model with these tensors, or for any model if those are unknown. Reads every
    value.
    """
    rank, found = _check_config(path, limits), manifest(path, MAX_ADAPTER_HEADER_BYTES)
    require(
        (path / TENSORS).is_file() and len(found) > 0,
        f"there are no tensors in {path / TENSORS}: save the adapter with save_pretrained",
    )
    modules: dict[str, dict[str, Kind]] = {}
    for name, kind in found.items():
        if (matched := _LORA_TENSOR.fullmatch(name)) is None:
            raise BadCheckpoint(f"{name} is no tensor of a LoRA adapter of linear layers: leave it out")
        modules.setdefault(matched[1], {})[matched[2]] = kind
    for module, pair in modules.items():
        _check_module(module, pair, model, limits, rank)
        _check_partners(module, modules.keys())
    _check_finite(path / TENSORS)


def _check_config(path: Path, limits: AdapterLimits) -> int:
    """The adapter's rank, from a config of which SGLang ignores nothing that matters."""
    try:
        with open_regular(path / CONFIG) as file:
            read = json.loads(file.read(MAX_CONFIG_BYTES))
    except FileNotFoundError:
        raise BadCheckpoint(f"there is no {CONFIG} under {path}: name a folder in PEFT's layout") from None
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{CONFIG} is no JSON: {error}") from None
    config = defaultdict[str, Any](lambda: None, read if isinstance(read, dict) else {})
    kind, rank, alpha = config["peft_type"], config["r"], config["lora_alpha"]
    require(str(kind).upper() == "LORA", f"peft_type is {_shown(kind)}: only LORA is served")
    require(
        type(rank) is int and 1 <= rank <= limits.rank,
        f"r is {_shown(rank)}, the rank, and this node takes 1 to {limits.rank}: train a smaller one, or"
        " start the node with a larger lora_rank",
    )
    require(
        type(alpha) in (int, float) and abs(alpha) < MAX_ALPHA,
        f"lora_alpha is {_shown(alpha)}: give a number, the update is scaled by lora_alpha / r",
    )
    for name, plain in PLAIN.items():
        require(
            config[name] in plain,
            f"{name} is {_shown(config[name])}, which the engine does not compute: train without it",
        )
    begun, targets = config["init_lora_weights"], config["target_modules"]
    require(
        not str(begun).lower().startswith(BASE_CHANGING_INITS),
        f"init_lora_weights is {_shown(begun)}, which changes the base: save it as an adapter of the"
        " unchanged base (path_initial_model_for_weight_conversion) whose init_lora_weights is true",
    )
    names = [] if targets == "all-linear" else targets
    require(
        isinstance(names, list) and all(isinstance(each, str) for each in names),
        f"target_modules is {_shown(targets)}: give a list of the modules' names",
    )
    for each in names:
        _check_target(each.rpartition(".")[2], limits)
    return int(rank)


def _check_target(module: str, limits: AdapterLimits) -> None:
    require(
        module in limits.modules,
        f"target_modules has {_shown(module)}, and this node's adapters change {', '.join(limits.modules)}:"
        " train those, or start the node with it among lora_modules",
    )


def _check_module(
    module: str, pair: Mapping[str, Kind], model: Manifest, limits: AdapterLimits, rank: int
) -> None:
    """One layer's pair of matrices: A is [r, in], B is [out, r] for a weight of [out, in]."""
    _check_target(module.rpartition(".")[2], limits)
    require(len(pair) == 2, f"{module} has lora_{min(pair)} alone: save both of its matrices")
    weight = model.get(f"{module}.weight")
    require(not model or weight is not None, f"{module} is not in the model: the adapter is for another base")
    for side, (which, kind) in enumerate(sorted(pair.items())):
        found = f"{module}.lora_{which} has shape {list(kind.shape)}"
        require(
            kind.dtype in FLOATS,
            f"{module}.lora_{which} is {kind.dtype}: save it as float32, bfloat16 or float16",
        )
        require(
            len(kind.shape) == 2 and kind.shape[side] == rank,
            f"{found}, and r is {rank}: every module needs the same rank",
        )
        require(
            weight is None or kind.shape[1 - side] == weight.shape[1 - side],
            f"{found}, and the model's weight {list(weight.shape if weight else ())}: the adapter is for"
            " another base",
        )


# SGLang joins these into one layer. If it finds one of the first, it needs all of the second.
JOINED_LAYERS = (({"q_proj", "k_proj", "v_proj"}, ("q_proj", "v_proj")), ({"up_proj"}, ("gate_proj",)))


def _check_partners(module: str, modules: Collection[str]) -> None:
    parent, _, name = module.rpartition(".")
    for partner in next((partners for names, partners in JOINED_LAYERS if name in names), ()):
        require(
            f"{parent}.{partner}" in modules,
            f"{module} has an adapter and {parent}.{partner} has none: the engine joins them into one layer,"
            f" so train {partner} too",
        )


def _check_finite(file: Path) -> None:
    """Require that every value is a finite number. One that is not would make every logprob of its calls
    useless.
    """
    data, listed = numpy.memmap(file, dtype=numpy.uint8, mode="r"), head(file)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    # The bits of the exponent: all of them are set in a value that is infinite or no number.
    bits = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}
    for name, each in listed.items():
        if name != "__metadata__" and (found := bits.get(each["dtype"])):
            first, last = each["data_offsets"]
            require(
                last - first == int(found[0][-1]) * prod(each["shape"]),
                f"{name} has {last - first} bytes, not those of its shape: save it again",
            )
            values = data[start + first : start + last].view(found[0])
            for part in range(0, values.size, READ):
                require(
                    not ((values[part : part + READ] & found[1]) == found[1]).any(),
                    f"{name} has values that are no finite numbers: send the step before",
                )


def _shown(value: object) -> str:
    return shortened(repr(value), 80)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more} {'are' if len(names) > 1 else 'is'}"


def fingerprint(path: Path) -> str:
    """The fingerprint of a folder's files by name, size and time, to detect changes since they were loaded.
    It is empty if there are none.
    """
    try:
        seen = [
            (each.name, each.stat().st_size, each.stat().st_mtime_ns)
            for each in sorted(path.iterdir())
            if each.is_file()
        ]
    except OSError:
        return ""
    return sha256(repr(seen).encode()).hexdigest() if seen else ""
