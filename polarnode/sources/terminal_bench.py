"""Terminal-Bench's older task format: task.yaml, a Dockerfile, tests/ and run-tests.sh.

In this format a parser reads the output of the tests, and no reward is written. A task is accepted only if
the exit code of pytest is its reward. Any other task is refused with a pointer to the newer format.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from polarnode.core import codec
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.sources.harbor import POST_MARGIN_S, WORKDIR
from polarnode.sources.reading import (
    check_part,
    file_mode,
    inline,
    make_build,
    named,
    read_dockerfile,
    read_text,
    read_yaml,
)
from polarnode.sources.values import FoundTask, Overrides, UnreadTask

MIGRATE_REMEDY = "Harbor's own `harbor task migrate` rewrites it in the newer form, which is read here"
BUILD_S = 600.0  # seconds, as Harbor's default
UNUSED_FIELDS = (
    "author_name",
    "author_email",
    "difficulty",
    "category",
    "tags",
    "estimated_duration_sec",
    "expert_time_estimate_min",
)
IGNORED_SERVICE_FIELDS = {
    "image",
    "container_name",
    "build",
    "command",
    "environment",
    "volumes",
    "tty",
    "stdin_open",
    "init",
}


@frozen(kw_only=True)
class OldTask:
    """The fields of a task.yaml that are used here."""

    instruction: str | None = None
    max_agent_timeout_sec: float | None = None
    max_test_timeout_sec: float = 180.0
    parser_name: str = "pytest"
    run_tests_in_same_shell: bool = False
    descriptions: tuple[Mapping[str, Json], ...] = field(factory=tuple)


def tasks(path: Path, overrides: Overrides) -> Iterator[FoundTask | UnreadTask]:
    """The task of a directory (or of the task.yaml in it), or of each directory below that holds one."""
    folder = path.parent if path.is_file() else path
    single = (folder / "task.yaml").is_file()
    for each in (
        [folder] if single else sorted(each for each in folder.iterdir() if (each / "task.yaml").is_file())
    ):
        try:
            yield _task(each)
        except Refused as refused:
            yield UnreadTask(name=each.resolve().name, origin=str(each), refused=named(refused, str(each)))


def _task(folder: Path) -> FoundTask:
    raw = read_yaml(check_part(folder, "task.yaml"))
    try:
        task = codec.structure(raw, OldTask)
    except Refused as refused:
        raise named(refused, str(folder / "task.yaml")) from refused
    _refuse_what_is_not_simple(task, folder)
    start = read_dockerfile(read_text(check_part(folder, "Dockerfile")))
    build = make_build(folder, "Dockerfile", limit_s=BUILD_S)
    name = folder.resolve().name
    run: dict[str, Json] = {} if task.max_agent_timeout_sec is None else {"run_s": task.max_agent_timeout_sec}
    value: dict[str, Json] = {
        "instruction": task.instruction,
        "runtime": {
            "image": build.image,
            "workdir": start.workdir or WORKDIR,
            "user": start.user or "root",
            "read_only": False,
        },
        "evaluator": {
            "name": "harbor",
            "config": {"tests": _tests(folder), "verifier_timeout": task.max_test_timeout_sec},
        },
        "budgets": {**run, "post_s": task.max_test_timeout_sec + POST_MARGIN_S},
        "metadata": {
            **{key: raw[key] for key in UNUSED_FIELDS if key in raw},
            "source": "terminal_bench",
            "name": name,
        },
    }
    return FoundTask(
        name=name, origin=str(folder), value=value, notes=tuple(_notes(raw)), build=build, foreign=True
    )


def _refuse_what_is_not_simple(task: OldTask, folder: Path) -> None:
    if task.instruction is None:
        raise Refused(f"its task.yaml has no instruction, or several: {MIGRATE_REMEDY}", path="$.instruction")
    if task.parser_name != "pytest":
        raise Refused(
            f"its tests are read by the parser {task.parser_name}, and only pytest's exit code says a reward:"
            f" {MIGRATE_REMEDY}",
            path="$.parser_name",
        )
    if task.run_tests_in_same_shell:
        raise Refused(
            f"its tests run in the agent's own shell, which is over by then: {MIGRATE_REMEDY}",
            path="$.run_tests_in_same_shell",
        )
    for name in ("run-tests.sh", "Dockerfile"):
        if not (folder / name).is_file():
            raise Refused(f"it has no {name}: {MIGRATE_REMEDY}")
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / name).is_file():
            _refuse_compose(read_yaml(check_part(folder, name)), name)


def _refuse_compose(raw: Any, name: str) -> None:
    """Refuse a compose file that asks for more than the one service that every such task has. The node builds
    that service from the task's folder itself.
    """
    services = raw.get("services") if isinstance(raw, dict) else None
    if not isinstance(services, dict) or len(services) != 1:
        raise Refused(f"its {name} asks for several containers; a session here has one")
    service = next(iter(services.values()))
    other = sorted(set(service) - IGNORED_SERVICE_FIELDS) if isinstance(service, dict) else ["its service"]
    if other:
        raise Refused(
            f"its {name} asks for {', '.join(other)}, which a session's container does not have:"
            f" {MIGRATE_REMEDY}"
        )
    build = service.get("build")
    if (build.get("dockerfile", "Dockerfile") if isinstance(build, dict) else "Dockerfile") != "Dockerfile":
        raise Refused(f"its {name} builds another file than Dockerfile: {MIGRATE_REMEDY}")


def _tests(folder: Path) -> dict[str, Json]:
    """The files of tests/ unchanged, with the script that runs them. The script's exit code is the reward."""
    found = inline(check_part(folder, "tests")) if (folder / "tests").is_dir() else {}
    return {
        **found,
        "run-tests.sh": {
            "text": read_text(check_part(folder, "run-tests.sh")),
            "mode": file_mode(folder / "run-tests.sh"),
        },
    }


def _notes(raw: Mapping[str, Any]) -> Iterator[str]:
    yield "it may reach the whole internet; here it reaches only the hosts of runtime.egress, which is empty"
    read = {each.alias for each in OldTask.__attrs_attrs__} | set(UNUSED_FIELDS)
    for name in sorted(set(raw) - read):
        yield f"{re.sub(r'[^ -~]', '?', name)} is not used: it has no meaning here"
