"""The values of a source: tasks with their origin and notes, unreadable tasks, and the user's overrides.

Overrides are partial TaskSpecs merged over a task. A harness, builder or evaluator with another name replaces
the old one whole, so that the settings of one program are never passed to another.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from attrs import field, frozen

from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.task import TaskSpec

# ── shapes ─────────────────────────────────────────────────────────────────────

Kind = Literal["task", "jsonl", "harbor", "terminal_bench", "swe", "polar"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@frozen(kw_only=True)
class ImageBuild:
    """An image to build from a folder, on the machine of the node that runs the task. `image` is its name."""

    folder: Path
    containerfile: str
    image: str
    limit_s: float


@frozen(kw_only=True)
class Overrides:
    """What a user changes in every task of a source.

    `over` is a partial TaskSpec as JSON, merged over each task. `harness` and `samples` override it. `only`
    is a pattern of names (`django__*`). `limit` is the most tasks to take of those that match.
    `image_template` and `instruction_template` are for datasets whose rows have no image and only a problem.
    `split` is one of a dataset's splits.
    """

    harness: str | None = None
    samples: int | None = None
    over: Mapping[str, Json] = field(factory=dict)
    only: str | None = None
    limit: int | None = None
    image_template: str | None = None
    instruction_template: str | None = None
    split: str | None = None


@frozen(kw_only=True)
class FoundTask:
    """One task of a source before overrides: a TaskSpec as JSON, possibly without a harness.

    `foreign` says that the image is the task's own, so that the harness has to be added to it.
    """

    name: str
    origin: str
    value: dict[str, Json]
    notes: tuple[str, ...] = ()
    build: ImageBuild | None = None
    foreign: bool = False


@frozen(kw_only=True)
class SourcedTask:
    """A task, its origin, and notes on fields that have no effect. With `build`, its image is built first."""

    spec: TaskSpec
    name: str
    origin: str
    notes: tuple[str, ...] = ()
    build: ImageBuild | None = None


@frozen(kw_only=True)
class UnreadTask:
    """A task of a source that could not be read; `refused` holds the reason, the origin and the field."""

    name: str
    origin: str
    refused: Refused


# ── overrides ──────────────────────────────────────────────────────────────────

PROGRAMS = ("harness", "builder", "evaluator")
PROGRAM_IDENTITY_FIELDS = ("name", "import_path", "parts")


def merge_over(value: Mapping[str, Json], over: Mapping[str, Json]) -> dict[str, Json]:
    """Merge `over` over `value`: objects are merged, and everything else is replaced."""
    merged: dict[str, Json] = dict(value)
    for key, new in over.items():
        old = merged.get(key)
        replaces = (
            key in PROGRAMS
            and isinstance(new, Mapping)
            and isinstance(old, Mapping)
            and _is_another_program(old, new)
        )
        merged[key] = (
            merge_over(old, new)
            if isinstance(old, Mapping) and isinstance(new, Mapping) and not replaces
            else new
        )
    return merged


def _is_another_program(old: Mapping[str, Json], new: Mapping[str, Json]) -> bool:
    """Whether new settings are of another program than the old ones. Settings without a name belong to the
    program that is named later.
    """
    return any(key in old for key in PROGRAM_IDENTITY_FIELDS) and any(
        key in new and new[key] != old.get(key) for key in PROGRAM_IDENTITY_FIELDS
    )
