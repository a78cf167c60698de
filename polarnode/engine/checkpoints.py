"""The tensors of a checkpoint's folder: names, shapes and dtypes, read from the headers of its safetensors
files.

No torch here: the node and the simulated engine read checkpoints too. A header is bounded before it is read.
"""

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from attrs import frozen

HEAD_LIMIT = 100 << 20  # bytes: safetensors' own bound of its head
SHOWN = 3  # names in a sentence
FLOATS = frozenset({"BF16", "F16", "F32"})  # any of them is read as any other


class BadCheckpoint(ValueError):
    """Why weights do not belong to the model, in one sentence."""


@frozen
class Kind:
    """A tensor's shape and dtype, without its values."""

    shape: tuple[int, ...]
    dtype: str


Manifest = Mapping[str, Kind]


def manifest(path: Path) -> Manifest:
    """The tensors of a checkpoint; empty where it has no safetensors files."""
    found: dict[str, Kind] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= {
            name: Kind(tuple(each["shape"]), str(each["dtype"]))
            for name, each in _head(file).items()
            if name != "__metadata__"
        }
    return found


def _head(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= HEAD_LIMIT:
            raise BadCheckpoint(f"{file.name} is no safetensors file: its header claims {length} bytes")
        try:
            head: dict[str, Any] = json.loads(opened.read(length))
        except ValueError as error:
            raise BadCheckpoint(f"{file.name} is no whole safetensors file: {error}") from None
    end = (
        8
        + length
        + max((each["data_offsets"][1] for name, each in head.items() if name != "__metadata__"), default=0)
    )
    if file.stat().st_size < end:
        raise BadCheckpoint(f"{file.name} is cut: it has {file.stat().st_size} bytes and needs {end}")
    return head


def check_folder(path: Path, model: Manifest) -> None:
    """Raise BadCheckpoint unless the folder holds a whole checkpoint with the tensors of `model`, or any
    whole checkpoint if those are unknown.
    """
    if not (path / "config.json").is_file():
        raise BadCheckpoint(
            f"there is no config.json under {path}: name a folder with a Hugging Face checkpoint"
        )
    found = manifest(path)
    if model:
        check_tensors(found, model)
        check_whole(found, model)


def check_tensors(found: Manifest, model: Manifest) -> None:
    """Raise BadCheckpoint if a tensor is not one of the model's, or has another shape or type."""
    # a tied output head is often listed; it is the embedding
    if unknown := sorted(found.keys() - model.keys() - {"lm_head.weight"}):
        raise BadCheckpoint(f"{_some(unknown)} not in the model")
    for name in found.keys() & model.keys():
        if found[name].shape != model[name].shape:
            raise BadCheckpoint(
                f"{name} has shape {list(found[name].shape)}, the model's has {list(model[name].shape)}"
            )
        if found[name].dtype != model[name].dtype and not {found[name].dtype, model[name].dtype} <= FLOATS:
            raise BadCheckpoint(f"{name} is {found[name].dtype}, the model's is {model[name].dtype}")


def check_whole(names: Iterable[str], model: Manifest) -> None:
    """Raise BadCheckpoint if tensors of the model are missing: they would keep their old values, and the
    model would be neither old nor new.
    """
    if missing := sorted(model.keys() - set(names)):
        raise BadCheckpoint(f"{_some(missing)} missing: send every tensor of the model")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more} {'are' if len(names) > 1 else 'is'}"


def fingerprint(path: Path) -> str:
    """Fingerprint of a folder's files by name, size and time, to detect changes since they were loaded. Empty
    if there are none.
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
