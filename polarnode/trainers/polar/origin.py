"""What Polar's side knows a task by: its ids and what was said when it was taken, kept in the task's metadata under `polarnode`.

The rule for whoever edits it: it travels with the task, so that whoever reads a trajectory a year later can still call it as its trainer did.
"""

from collections.abc import Mapping
from typing import Final

from attrs import frozen

from polarnode.conversation import Json

KEY: Final = "polarnode"


@frozen(kw_only=True)
class Origin:
    """`task_id` and `session_id` as Polar's side says them (None: as ours); `run` counts the tasks that were submitted by one task_id, from 1."""

    task_id: str | None = None
    session_id: str | None = None
    run: int = 1
    notes: tuple[str, ...] = ()


def origin_of(metadata: Mapping[str, Json]) -> Origin:
    """The origin of a task with this metadata."""
    said = metadata.get(KEY)
    if not isinstance(said, dict):
        return Origin()
    notes, run = said.get("notes"), said.get("run")
    return Origin(
        task_id=_text(said.get("task_id")),
        session_id=_text(said.get("session_id")),
        run=run if isinstance(run, int) else 1,
        notes=tuple(str(note) for note in notes) if isinstance(notes, list) else (),
    )


def with_origin(metadata: Mapping[str, Json], origin: Origin) -> dict[str, Json]:
    """A task's metadata with where it came from."""
    said: dict[str, Json] = {"task_id": origin.task_id, "run": origin.run, "notes": list(origin.notes)}
    return {**metadata, KEY: said if origin.session_id is None else {**said, "session_id": origin.session_id}}


def told(metadata: Mapping[str, Json]) -> dict[str, Json]:
    """The metadata as it was submitted."""
    return {name: value for name, value in metadata.items() if name != KEY}


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None
