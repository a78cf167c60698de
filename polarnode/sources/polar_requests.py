"""A TaskRequest that was sent to a node and not read from a file of the sender's own.

The rule for whoever edits it: Polar's gateway copies whatever file of its machine a request names. Here such a path must lie below a folder
that the person who runs the node has opened to tasks, and what it leads to must lie there too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polarnode import wire
from polarnode.errors import Refused
from polarnode.sources.polar import task_found
from polarnode.sources.polar_shapes import PolarTask
from polarnode.sources.shapes import Found

ROOT = Path("/")
# Where a field of ours stands in a request, by the longest beginning of its path.
THEIRS: Mapping[str, str] = {
    "$.budgets.run_s": "$.timeout_seconds",
    "$.budgets.max_turns": "$.max_steps",
    "$.group.early_stop_min": "$.early_stop_min_usable_sessions",
    "$.priority": "$.dispatch_priority",
    "$.harness.name": "$.agent.harness",
    "$.harness": "$.agent",
    "$.builder.name": "$.builder.strategy",
    "$.evaluator.name": "$.evaluator.strategy",
}


def request_found(told: Any, *, volumes: tuple[str, ...]) -> Found:
    """The task of a request; `volumes` are the folders of this machine that tasks may see. It reads the files that the request names.

    Refused, with the field's path, where it can not be had here.
    """
    for where, name in _named(wire.structure(told, PolarTask)):
        _check(name, where, volumes)
    return task_found(told, name="request", origin="request", folder=ROOT, served=True)


@contextmanager
def their_paths() -> Iterator[None]:
    """Refusals of the block name the field as it stands in the request."""
    try:
        yield
    except Refused as refused:
        raise Refused(str(refused), path=their_path(refused.path)) from refused


def their_path(path: str | None) -> str | None:
    """A field's path in the request; its own where it is called the same."""
    begins = next((ours for ours in THEIRS if path is not None and path.startswith(ours)), None)
    return path if path is None or begins is None else THEIRS[begins] + path.removeprefix(begins)


def _named(task: PolarTask) -> Iterator[tuple[str, str]]:
    """Each path of the node's own machine that a request names, with where it stands."""
    for index, action in enumerate(task.runtime.prepare if task.runtime is not None else ()):
        if action.source is not None:
            yield f"$.runtime.prepare[{index}].source", action.source
    if task.agent.skills_path is not None:
        yield "$.agent.skills_path", task.agent.skills_path
        yield from (("$.agent.skills_path", str(file)) for file in Path(task.agent.skills_path).glob("*/SKILL.md"))
    tests = None if task.evaluator is None else task.evaluator.config.get("tests_dir")
    if tests is not None:
        yield "$.evaluator.config.tests_dir", str(tests)


def _check(name: str, where: str, volumes: tuple[str, ...]) -> None:
    path = Path(name)
    if not path.is_absolute():
        raise Refused(f"{name} must be an absolute path: it is one of the node's own machine", path=where)
    if not any(path.resolve().is_relative_to(Path(folder).resolve()) for folder in volumes):
        raise Refused(f"{name} is on the node's own machine, below no folder that its setting volumes opens to tasks: add one there", path=where)
