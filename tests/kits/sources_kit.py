"""What the tests of task sources share: the fixture folders, and a source read to its end."""

from pathlib import Path
from typing import Any

from polarnode.sources import Overrides, SourcedTask, UnreadTask, read_source

DATA = Path(__file__).parents[1] / "data" / "sources"


def items(path: Path, kind: Any = None, **overrides: Any) -> list[SourcedTask | UnreadTask]:
    return list(read_source(path, kind=kind, overrides=Overrides(**overrides)).items())


def tasks(path: Path, kind: Any = None, **overrides: Any) -> list[SourcedTask]:
    return list(read_source(path, kind=kind, overrides=Overrides(**overrides)).tasks())


def task(path: Path, kind: Any = None, **overrides: Any) -> SourcedTask:
    [found] = tasks(path, kind, **overrides)
    return found


def refusal(path: Path, kind: Any = None, **overrides: Any) -> str:
    """Why the only task of a path can not be read."""
    [found] = items(path, kind, **overrides)
    assert isinstance(found, UnreadTask), found
    return str(found.refused)
