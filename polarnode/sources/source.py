"""`read_source` detects the kind of a path, reads its tasks, and merges the user's overrides over each.

A path of unknown kind is refused with a list of kinds; `--kind` always decides. Iteration is lazy and can be
repeated. A task that cannot be read never hides the next one; only an unreadable source raises.
"""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

from attrs import frozen

from polarnode.core import codec
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.task import TaskSpec
from polarnode.sources.harbor import tasks as harbor_tasks
from polarnode.sources.polar import tasks as polar_tasks
from polarnode.sources.reading import (
    is_dataset,
    lines,
    named,
    one,
    read_json,
    read_jsonl,
    read_toml,
    read_yaml,
)
from polarnode.sources.swe import tasks as swe_tasks
from polarnode.sources.terminal_bench import tasks as terminal_bench_tasks
from polarnode.sources.values import KINDS, FoundTask, Kind, Overrides, SourcedTask, UnreadTask, merge_over

# ── detection ──────────────────────────────────────────────────────────────────

LOOKED_AT = 64  # entries of a folder that are inspected; the first ones show whether it holds tasks
KIND_REMEDY = f"name its kind with --kind ({', '.join(KINDS)})"


def detect(path: Path) -> Kind:
    """The kind of source at `path`. Raises Refused if it cannot be detected."""
    return _folder(path) if path.is_dir() else _file(path)


def _folder(folder: Path) -> Kind:
    kind = _task_folder_kind(folder)
    if kind is not None:
        return kind
    for below in islice(sorted(folder.iterdir()), LOOKED_AT):
        inside = _task_folder_kind(below) if below.is_dir() else None
        if inside in ("harbor", "terminal_bench"):
            return inside
    if is_dataset(folder):
        return "swe"
    raise Refused(
        f"{folder} is no known folder of tasks: no task.toml with instruction.md, no dataset; {KIND_REMEDY}"
    )


def _task_folder_kind(folder: Path) -> Kind | None:
    if (folder / "task.toml").is_file():
        return (
            "harbor"
            if (folder / "instruction.md").is_file() or is_harbor(read_toml(folder / "task.toml"))
            else "task"
        )
    return "terminal_bench" if (folder / "task.yaml").is_file() else None


def is_harbor(value: Mapping[str, Any]) -> bool:
    """Whether a TOML file is that of a Harbor task and not one of polarnode's own."""
    return not {"harness", "instruction", "instruction_file"} & set(value) and bool(
        {"verifier", "agent", "environment", "steps"} & set(value)
    )


def _file(file: Path) -> Kind:
    match file.suffix:
        case ".toml":
            return "harbor" if is_harbor(read_toml(file)) else "task"
        case ".parquet" | ".arrow":
            return "swe"
        case ".jsonl" | ".ndjson":
            return _lines(file)
        case ".json":
            value = read_json(file)
            return _value(
                value[0] if isinstance(value, list) and value else value, file, listed=isinstance(value, list)
            )
        case ".yaml" | ".yml":
            value = read_yaml(file)
            return (
                "terminal_bench"
                if file.name == "task.yaml" and not (isinstance(value, dict) and "agent" in value)
                else "polar"
            )
    raise Refused(f"the kind of {file} cannot be detected by its name; {KIND_REMEDY}")


def _lines(file: Path) -> Kind:
    for _, line in lines(file):
        try:
            return _value(codec.read_json(line), file, listed=True)
        except Refused:
            return "jsonl"  # The reader of this kind reports what is wrong with the line.
    raise Refused(f"{file} is empty: it holds no task")


def _value(value: Any, file: Path, *, listed: bool) -> Kind:
    if isinstance(value, dict) and "agent" in value and "harness" not in value:
        return "polar"
    if isinstance(value, dict) and {"instance_id", "problem_statement"} <= set(value):
        return "swe"
    if listed and file.suffix == ".json":
        raise Refused(
            f"{file} is a list of neither dataset rows nor Polar's tasks: write tasks as JSONL, one a line"
        )
    return "jsonl" if listed else "task"


# ── sources ────────────────────────────────────────────────────────────────────

Reader = Callable[[Path, Overrides], Iterator[FoundTask | UnreadTask]]
READERS: Mapping[Kind, Reader] = {
    "task": one,
    "jsonl": read_jsonl,
    "harbor": harbor_tasks,
    "terminal_bench": terminal_bench_tasks,
    "swe": swe_tasks,
    "polar": polar_tasks,
}


@frozen(kw_only=True)
class Source:
    """A path, its kind, and the overrides of its tasks. Iterate `items` for all tasks, or `tasks` to stop at
    the first that cannot be read.
    """

    path: Path
    kind: Kind
    overrides: Overrides

    def items(self) -> Iterator[SourcedTask | UnreadTask]:
        """Every task that matches `only`, up to `limit`, in the order of the source."""
        found = READERS[self.kind](self.path, self.overrides)
        meant = (
            each
            for each in found
            if self.overrides.only is None or fnmatchcase(each.name, self.overrides.only)
        )
        for each in islice(meant, self.overrides.limit):
            yield each if isinstance(each, UnreadTask) else _apply_overrides(each, self.overrides)

    def tasks(self) -> Iterator[SourcedTask]:
        """Like `items`, but raises Refused if a task cannot be read, and if there is none at all."""
        count = 0
        for item in self.items():
            if isinstance(item, UnreadTask):
                raise item.refused
            count += 1
            yield item
        if not count:
            raise Refused(f"{self.path}: {self._empty_reason()}")

    def _empty_reason(self) -> str:
        return (
            "it holds no task"
            if self.overrides.only is None
            else f"no task of it is called {self.overrides.only}: see polarnode convert"
        )


def read_source(path: str | Path, *, kind: Kind | None = None, overrides: Overrides | None = None) -> Source:
    """The source at `path`. Raises Refused if nothing is there or its kind is unknown. Tasks are read
    lazily.
    """
    where = Path(path)
    if not where.exists():
        raise Refused(f"there is no {where}: give an existing file or folder")
    found_kind = kind or detect(where)
    overrides = overrides or Overrides()
    if overrides.split is not None and (found_kind != "swe" or where.is_file()):
        raise Refused(f"{where} has no splits: leave --split out; a dataset's folder may have some")
    return Source(path=where, kind=found_kind, overrides=overrides)


def spec_of(found: FoundTask) -> TaskSpec:
    """The task without overrides. Raises Refused with the field's path."""
    return codec.read_task(_add_harness(_expand_harness(found.value), found))


def _apply_overrides(found: FoundTask, overrides: Overrides) -> SourcedTask | UnreadTask:
    flags: dict[str, Json] = {}
    if overrides.harness is not None:
        flags["harness"] = {"name": overrides.harness}
    if overrides.samples is not None:
        flags["num_samples"] = overrides.samples
    try:
        _check_trajectory(found.value)
        value = merge_over(merge_over(_expand_harness(found.value), _expand_harness(overrides.over)), flags)
        spec = codec.read_task(_add_harness(value, found))
    except Refused as refused:
        return UnreadTask(name=found.name, origin=found.origin, refused=named(refused, found.origin))
    build = found.build if found.build is not None and spec.runtime.image == found.build.image else None
    return SourcedTask(spec=spec, name=found.name, origin=found.origin, notes=found.notes, build=build)


def _check_trajectory(value: Mapping[str, Json]) -> None:
    if "session_id" in value and "traces" in value:
        raise Refused(
            "it is a trajectory, not a task: polarnode inspect --from shows it, and evaluate --file"
        )


def _expand_harness(value: Mapping[str, Json]) -> dict[str, Json]:
    """The value with its harness as an object, so that the parts of two harnesses can be merged."""
    harness = value.get("harness")
    return {**value, "harness": {"name": harness}} if isinstance(harness, str) else dict(value)


def _add_harness(value: dict[str, Json], found: FoundTask) -> dict[str, Json]:
    """Set `add_harness` for a task on its own image, unless its harness is a command of its own or the user
    set it.
    """
    harness, runtime = value.get("harness"), value.get("runtime")
    if harness is None:
        # This reports a misspelled field, which explains better what is missing.
        codec.structure({**value, "harness": "shell"}, TaskSpec, forbid_extra=True)
        raise Refused(
            "the task names no harness: give --harness (such as pi), or harness in the --override file",
            path="$.harness",
        )
    if not found.foreign or not isinstance(harness, dict) or not isinstance(runtime, dict):
        return value
    needed = harness.get("name", "shell") != "shell" and "import_path" not in harness
    return {**value, "runtime": {"add_harness": needed, **runtime}}
