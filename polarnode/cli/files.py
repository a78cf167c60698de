"""Files of the verbs: tasks that are read, results that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from attrs import evolve

from polarnode import wire
from polarnode.errors import Refused
from polarnode.tasks import TaskSpec


def read_task_file(file: Path, *, samples: int | None = None) -> TaskSpec:
    """A task from TOML, or from JSON by its name. A refusal names the file and the field.

    In TOML, `instruction_file` and the `source` of a `[[runtime.files]]` are read relative to the task's own folder, wherever they lead: it
    is the user's own file.
    """
    try:
        spec = wire.read_task(wire.read_json(_content(file))) if file.suffix == ".json" else _from_toml(file)
    except Refused as refused:
        raise Refused(f"{file}: {refused}", path=refused.path) from refused
    return spec if samples is None else evolve(spec, num_samples=samples)


def _from_toml(file: Path) -> TaskSpec:
    try:
        text = _content(file).decode()
    except UnicodeDecodeError as error:
        raise Refused(f"it is not UTF-8 text ({error.reason} at byte {error.start})") from error
    return wire.read_task_toml(text, read_file=lambda name: _content(file.parent / name))


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise Refused(f"{file} can not be read: {error.strerror}") from error


@contextmanager
def written_whole(file: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when the block is through; until then, and after an error, what had that name stays."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as out:
            yield out
        part.replace(file)
    except OSError as error:
        raise Refused(f"{file} can not be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
