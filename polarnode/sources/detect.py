"""Which kind of source a path is, by the names in a folder and the first bytes of a file.

The rule for whoever edits it: a guess that could be wrong is refused with the kinds it may be; `--kind` always decides.
"""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from polarnode import wire
from polarnode.errors import Refused
from polarnode.sources.reading import lines, read_json, read_toml, read_yaml
from polarnode.sources.shapes import KINDS, Kind
from polarnode.sources.tables import is_dataset

LOOKED_AT = 64  # entries of a folder that are looked into: a dataset of tasks shows in its first
HOW = f"say what it is with --kind ({', '.join(KINDS)})"


def detect(path: Path) -> Kind:
    """The kind of what lies at `path`. Refused when it is none, or could be several."""
    return _folder(path) if path.is_dir() else _file(path)


def _folder(folder: Path) -> Kind:
    kind = _one_task(folder)
    if kind is not None:
        return kind
    for below in islice(sorted(folder.iterdir()), LOOKED_AT):
        inside = _one_task(below) if below.is_dir() else None
        if inside in ("harbor", "terminal_bench"):
            return inside
    if is_dataset(folder):
        return "swe"
    raise Refused(f"{folder} is no folder of tasks that is known here: no task.toml with its instruction.md, no dataset; {HOW}")


def _one_task(folder: Path) -> Kind | None:
    if (folder / "task.toml").is_file():
        return "harbor" if (folder / "instruction.md").is_file() or is_harbor(read_toml(folder / "task.toml")) else "task"
    return "terminal_bench" if (folder / "task.yaml").is_file() else None


def is_harbor(value: Mapping[str, Any]) -> bool:
    """Whether a TOML is a Harbor task's and not our own."""
    return not {"harness", "instruction", "instruction_file"} & set(value) and bool({"verifier", "agent", "environment", "steps"} & set(value))


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
            return _value(value[0] if isinstance(value, list) and value else value, file, listed=isinstance(value, list))
        case ".yaml" | ".yml":
            value = read_yaml(file)
            return "terminal_bench" if file.name == "task.yaml" and not (isinstance(value, dict) and "agent" in value) else "polar"
    raise Refused(f"{file} has no name that says what it is; {HOW}")


def _lines(file: Path) -> Kind:
    for _, line in lines(file):
        try:
            return _value(wire.read_json(line), file, listed=True)
        except Refused:
            return "jsonl"  # whose reader says what is wrong with the line
    raise Refused(f"{file} is empty: it holds no task")


def _value(value: Any, file: Path, *, listed: bool) -> Kind:
    if isinstance(value, dict) and "agent" in value and "harness" not in value:
        return "polar"
    if isinstance(value, dict) and {"instance_id", "problem_statement"} <= set(value):
        return "swe"
    if listed and file.suffix == ".json":
        raise Refused(f"{file} is a list of neither dataset rows nor Polar's tasks: write tasks as JSONL, one a line")
    return "jsonl" if listed else "task"
