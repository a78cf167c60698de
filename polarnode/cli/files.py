"""Tasks from files, for the verbs that take one."""

from pathlib import Path

from attrs import evolve

from polarnode import wire
from polarnode.errors import Refused
from polarnode.tasks import TaskSpec


def read_task_file(file: Path, *, samples: int | None = None) -> TaskSpec:
    """A task from TOML, or from JSON by its name. A refusal names the file and the field."""
    try:
        text = file.read_text()
        spec = wire.read_task(wire.read_json(text.encode())) if file.suffix == ".json" else wire.read_task_toml(text)
    except Refused as refused:
        raise Refused(f"{file}: {refused}", path=refused.path) from refused
    return spec if samples is None else evolve(spec, num_samples=samples)
