"""`read_source`: which kind a path is, its tasks one after another, and a user's overrides laid over each.

The rule for whoever edits it: iterating is lazy and may be begun again; one task that can not be read never hides the next. Only a source
that can not be read at all (no such file, no such kind, a torn dataset) raises.
"""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from attrs import frozen

from polarnode import wire
from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.sources.detect import detect
from polarnode.sources.harbor import tasks as harbor_tasks
from polarnode.sources.overlay import laid_over
from polarnode.sources.polar import tasks as polar_tasks
from polarnode.sources.reading import named
from polarnode.sources.shapes import Found, Kind, Overrides, SourcedTask, Unread
from polarnode.sources.swe import tasks as swe_tasks
from polarnode.sources.task_files import jsonl, one
from polarnode.sources.terminal_bench import tasks as terminal_bench_tasks
from polarnode.tasks import TaskSpec

Reader = Callable[[Path, Overrides], Iterator[Found | Unread]]
READERS: Mapping[Kind, Reader] = {
    "task": one,
    "jsonl": jsonl,
    "harbor": harbor_tasks,
    "terminal_bench": terminal_bench_tasks,
    "swe": swe_tasks,
    "polar": polar_tasks,
}


@frozen(kw_only=True)
class Source:
    """A path of some kind with what is laid over its tasks. Iterate `items` for all, `tasks` to stop at the first that can not be read."""

    path: Path
    kind: Kind
    overrides: Overrides

    def items(self) -> Iterator[SourcedTask | Unread]:
        """Every task that `only` lets through, up to `limit`, in the order of the source."""
        found = READERS[self.kind](self.path, self.overrides)
        meant = (each for each in found if self.overrides.only is None or fnmatchcase(each.name, self.overrides.only))
        for each in islice(meant, self.overrides.limit):
            yield each if isinstance(each, Unread) else _sourced(each, self.overrides)

    def tasks(self) -> Iterator[SourcedTask]:
        """As `items`; raises Refused where one can not be read, and where there is none at all."""
        count = 0
        for item in self.items():
            if isinstance(item, Unread):
                raise item.refused
            count += 1
            yield item
        if not count:
            raise Refused(f"{self.path}: {self._why_none()}")

    def _why_none(self) -> str:
        return "it holds no task" if self.overrides.only is None else f"no task of it is called {self.overrides.only}: see polarnode convert"


def read_source(path: str | Path, *, kind: Kind | None = None, overrides: Overrides | None = None) -> Source:
    """The source at `path`. Refused when there is nothing, or nothing of a kind we know; its tasks are read when they are asked for."""
    where = Path(path)
    if not where.exists():
        raise Refused(f"there is no {where}: name a file or a folder")
    known = kind or detect(where)
    return Source(path=where, kind=known, overrides=overrides or Overrides())


def spec_of(found: Found) -> TaskSpec:
    """The task as it was found, nothing laid over it. Refused with the field's path."""
    return wire.read_task(_with_harness_added(found.value, found))


def _sourced(found: Found, overrides: Overrides) -> SourcedTask | Unread:
    try:
        value = laid_over(laid_over(found.value, overrides.over), _flags(overrides))
        spec = wire.read_task(_with_harness_added(value, found))
    except Refused as refused:
        return Unread(name=found.name, origin=found.origin, refused=named(refused, found.origin))
    build = found.build if found.build is not None and spec.runtime.image == found.build.image else None
    return SourcedTask(spec=spec, name=found.name, origin=found.origin, notes=found.notes, build=build)


def _flags(overrides: Overrides) -> dict[str, Json]:
    said: dict[str, Json] = {} if overrides.harness is None else {"harness": {"name": overrides.harness}}
    return said if overrides.samples is None else {**said, "num_samples": overrides.samples}


def _with_harness_added(value: dict[str, Json], found: Found) -> dict[str, Json]:
    """On the task's own image the harness is still to be put, unless it is a command of the task's own, or the user says otherwise."""
    harness, runtime = value.get("harness"), value.get("runtime")
    if harness is None:
        raise Refused("no harness is said: name one with --harness (such as pi), or under harness in the file given by --with", path="$.harness")
    if not found.foreign or not isinstance(harness, dict) or not isinstance(runtime, dict):
        return value
    needed = harness.get("name", "shell") != "shell" and "import_path" not in harness
    return {**value, "runtime": {"add_harness": needed, **runtime}}
