"""Harbor task directories (task.toml schemas 1.0 to 1.4): one, or a folder of them.

instruction.md becomes the instruction. tests/ go to the evaluator `harbor` and are copied into the container
only after the agent has ended; solution/ is never used. A Harbor field without an effect here becomes a note.
A field that changes the task itself (several steps, several containers, GPUs, another operating system) is
refused. Unknown fields become notes, as Harbor ignores them.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from polarnode.core import codec
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.sources.reading import (
    ContainerStart,
    check_part,
    inline,
    make_build,
    named,
    read_dockerfile,
    read_text,
    read_toml,
)
from polarnode.sources.values import FoundTask, ImageBuild, Overrides, UnreadTask

# ── shapes ─────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class HarborMcp:
    name: str
    transport: Literal["stdio", "sse", "streamable-http", "http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class HarborEnvironment:
    docker_image: str | None = None
    build_timeout_sec: float = 600.0
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    memory: str | None = None
    storage_mb: int | None = None
    storage: str | None = None
    gpus: int | None = None
    env: Mapping[str, str] = field(factory=dict)
    mcp_servers: tuple[HarborMcp, ...] = ()
    workdir: str | None = None
    network_mode: Literal["no-network", "public", "allowlist"] | None = None
    allowed_hosts: tuple[str, ...] = ()
    allow_internet: bool | None = None


@frozen(kw_only=True)
class HarborAgent:
    timeout_sec: float | None = None
    user: str | int | None = None


@frozen(kw_only=True)
class HarborVerifier:
    timeout_sec: float = 600.0
    env: Mapping[str, str] = field(factory=dict)
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Mapping[str, Json] | None = None
    collect: tuple[Mapping[str, Json], ...] = ()


@frozen(kw_only=True)
class HarborTask:
    """`steps` mark a task with several instructions, which is refused."""

    task: Mapping[str, Json] = field(factory=dict)
    metadata: Mapping[str, Json] = field(factory=dict)
    environment: HarborEnvironment = field(factory=HarborEnvironment)
    agent: HarborAgent = field(factory=HarborAgent)
    verifier: HarborVerifier = field(factory=HarborVerifier)
    artifacts: tuple[str | Mapping[str, Any], ...] = ()
    steps: tuple[Mapping[str, Json], ...] = ()


# ── tasks ──────────────────────────────────────────────────────────────────────

WORKDIR = "/app"  # where most tasks work; the default if neither task.toml nor the Dockerfile sets one
POST_MARGIN_S = 60.0  # seconds beyond the verifier's timeout, to copy its files and read its reward
SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([GMK])B?", re.IGNORECASE)
MEGABYTES_PER_UNIT = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
VARIABLE_PATTERN = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
CANARY_PATTERN = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")
IGNORED_FIELDS = (
    "version",
    "schema_version",
    "source",
    "multi_step_reward_strategy",
    "multi_step_reward_mode",
    "solution",
)
# Maps fields of a part that have no effect here to the reason why the task stays the same without them.
UNUSED = {
    "environment.gpu_types": "no GPU is asked for",
    "environment.skills_dir": "skills are given as texts under harness.skills",
    "environment.healthcheck": (
        "the container has no service that must come up; a command under runtime.prepare can wait for one"
    ),
    "agent.network_mode": "while the harness runs the network is the task's own, runtime.egress",
    "agent.allowed_hosts": "while the harness runs the network is the task's own, runtime.egress",
    "verifier.network_mode": "the tests have the network of the task, runtime.egress",
    "verifier.allowed_hosts": "the tests have the network of the task, runtime.egress",
}


def tasks(path: Path, overrides: Overrides) -> Iterator[FoundTask | UnreadTask]:
    """The task of a directory (or of the task.toml in it), or of each subdirectory that has one."""
    folder = path.parent if path.is_file() else path
    single = (folder / "task.toml").is_file()
    for each in (
        [folder] if single else sorted(each for each in folder.iterdir() if (each / "task.toml").is_file())
    ):
        try:
            yield _task(each)
        except Refused as refused:
            yield UnreadTask(name=each.resolve().name, origin=str(each), refused=named(refused, str(each)))


@frozen(kw_only=True)
class _TaskImage:
    """A task's image: its name, its build, and the start state its Dockerfile sets."""

    name: str
    build: ImageBuild | None
    start: ContainerStart


def _task(folder: Path) -> FoundTask:
    file = check_part(folder, "task.toml")
    raw = _plain(read_toml(file))
    try:
        task = codec.structure(raw, HarborTask)
    except Refused as refused:
        raise named(refused, str(file)) from refused
    _refuse_other_worlds(task, folder)
    image = _image(task.environment, folder)
    name = folder.resolve().name
    run: dict[str, Json] = {} if task.agent.timeout_sec is None else {"run_s": task.agent.timeout_sec}
    value: dict[str, Json] = {
        "instruction": strip_canary(read_text(check_part(folder, "instruction.md"))),
        "runtime": _runtime(task, image),
        "evaluator": _evaluator(task, folder),
        "budgets": {**run, "post_s": task.verifier.timeout_sec + POST_MARGIN_S},
        "metadata": {**task.metadata, "source": "harbor", "name": name},
    }
    servers: dict[str, Json] = {server.name: _server(server) for server in task.environment.mcp_servers}
    return FoundTask(
        name=name,
        origin=str(folder),
        value={**value, **({"harness": {"mcp_servers": servers}} if servers else {})},
        notes=tuple(_notes(task, raw, image, folder)),
        build=image.build,
        foreign=True,
    )


def strip_canary(text: str) -> str:
    """An instruction without the canary lines at its head, as Harbor shows it. The lines are for crawlers,
    not for the agent.
    """
    lines = text.split("\n")
    marks = next(
        (place for place, line in enumerate(lines) if CANARY_PATTERN.fullmatch(line.strip()) is None),
        len(lines),
    )
    return "\n".join(lines[marks:]).lstrip("\n") if marks else text


def _refuse_other_worlds(task: HarborTask, folder: Path) -> None:
    environment, verifier = task.environment, task.verifier
    if task.steps:
        raise Refused(
            "it has several steps, each with an instruction of its own; a task here has one", path="$.steps"
        )
    if environment.os.lower() != "linux":
        raise Refused(
            f"its container is {environment.os}; containers here are Linux", path="$.environment.os"
        )
    if environment.gpus:
        raise Refused(
            "it asks for GPUs in the container, which has none: the node's GPUs serve the model",
            path="$.environment.gpus",
        )
    for name in COMPOSE:
        if (folder / "environment" / name).exists():
            raise Refused(f"environment/{name} asks for several containers; a session here has one")
    if verifier.environment_mode == "separate" or verifier.environment is not None or verifier.collect:
        raise Refused(
            "its tests run in a container of their own that gets artifacts; here they run where the agent"
            " worked",
            path="$.verifier",
        )
    if not (folder / "tests" / "test.sh").is_file():
        raise Refused("it has no tests/test.sh, so that nothing says what it is worth")


# ── image and runtime ──────────────────────────────────────────────────────────


def _image(environment: HarborEnvironment, folder: Path) -> _TaskImage:
    """The image named in task.toml, otherwise the one that environment/ builds."""
    file = check_part(folder, "environment/Dockerfile")
    start = read_dockerfile(read_text(file)) if file.is_file() else ContainerStart()
    if environment.docker_image is not None:
        return _TaskImage(name=environment.docker_image, build=None, start=start)
    if not file.is_file():
        raise Refused(
            "it has neither environment.docker_image nor environment/Dockerfile: nothing says what its"
            " container is"
        )
    build = make_build(file.parent, file.name, limit_s=environment.build_timeout_sec)
    return _TaskImage(name=build.image, build=build, start=start)


def _runtime(task: HarborTask, image: _TaskImage) -> dict[str, Json]:
    """The container, as open as Harbor's. Every path is writable, because a task may be to set up a
    machine.
    """
    environment = task.environment
    user = task.agent.user if task.agent.user is not None else image.start.user
    runtime: dict[str, Json] = {
        "image": image.name,
        "workdir": environment.workdir or image.start.workdir or WORKDIR,
        "user": str(user) if user is not None else "root",
        "read_only": False,
        "cpus": environment.cpus,
        "memory_mb": (
            environment.memory_mb
            if environment.memory is None
            else _parse_megabytes(environment.memory, "$.environment.memory")
        ),
        "disk_mb": (
            environment.storage_mb
            if environment.storage is None
            else _parse_megabytes(environment.storage, "$.environment.storage")
        ),
        "env": _env(environment.env, "$.environment.env"),
        "egress": [host for host in environment.allowed_hosts if not _is_address(host)],
        "artifacts": [place for place in map(_place, task.artifacts) if place],
    }
    return {name: value for name, value in runtime.items() if value not in (None, [], {})}


def _parse_megabytes(text: str, path: str) -> int:
    found = SIZE_PATTERN.fullmatch(text.strip())
    if found is None:
        raise Refused(f"{path.removeprefix('$.')} is {text!r}: write a size such as 2G or 512M", path=path)
    return max(1, int(float(found[1]) * MEGABYTES_PER_UNIT[found[2].upper()]))


def _env(env: Mapping[str, str], path: str) -> dict[str, Json]:
    return {name: _filled(text, f"{path}.{name}") for name, text in env.items()}


def _filled(text: str, path: str) -> str:
    """Replace `${NAME:-default}` by its default. The node's own environment is never read into a
    container.
    """

    def default(found: re.Match[str]) -> str:
        if found[2] is None:
            what = f"{path.removeprefix('$.')} takes {found[1]} from the machine's environment"
            raise Refused(
                f"{what}: set its value in the file given by --override, under runtime.env or"
                " evaluator.config.env",
                path=path,
            )
        return found[2]

    return VARIABLE_PATTERN.sub(default, text)


def _is_address(host: str) -> bool:
    return "/" in host or ":" in host or re.fullmatch(r"[\d.]+", host) is not None


def _place(artifact: str | Mapping[str, Any]) -> str | None:
    found = artifact if isinstance(artifact, str) else artifact.get("source")
    return found if isinstance(found, str) else None


# ── evaluator, budgets, notes ──────────────────────────────────────────────────


def _evaluator(task: HarborTask, folder: Path) -> dict[str, Json]:
    config: dict[str, Json] = {
        "tests": inline(check_part(folder, "tests")),
        "verifier_timeout": task.verifier.timeout_sec,
    }
    if task.verifier.env:
        config["env"] = _env(task.verifier.env, "$.verifier.env")
    if task.verifier.user is not None:
        config["user"] = str(task.verifier.user)
    return {"name": "harbor", "config": config}


def _server(server: HarborMcp) -> Json:
    if server.transport == "sse":
        raise Refused(
            f"the MCP server {server.name} speaks over sse; harnesses here are given stdio and"
            " streamable-http",
            path="$.environment.mcp_servers",
        )
    if server.url is not None:
        return {"url": server.url, "headers": dict(server.headers)}
    return {"command": server.command, "args": list(server.args)}


def _notes(task: HarborTask, raw: Mapping[str, Any], image: _TaskImage, folder: Path) -> Iterator[str]:
    environment = task.environment
    if environment.workdir is None and image.start.workdir is None:
        yield (
            f"its workdir is the image's own, which is not known here: {WORKDIR} is used; set runtime.workdir"
            " in --override to change it"
        )
    if environment.allow_internet is not False and environment.network_mode in (None, "public"):
        yield (
            "it may reach the whole internet; here it reaches only the hosts of runtime.egress, which is"
            " empty"
        )
    for host in filter(_is_address, environment.allowed_hosts):
        yield f"environment.allowed_hosts: {host} is an address, and only names of hosts can be reached"
    if (folder / "trajectory.json").exists():
        yield "trajectory.json: what the agent is to have done before is not given to it"
    for place in _unused(raw):
        yield f"{place} is not used: {UNUSED.get(place, 'Harbor of the schemas to 1.4 has no such field')}"


def _unused(raw: Mapping[str, Any]) -> Iterator[str]:
    """The fields of the file that are not read here."""
    fields = {field.alias for field in HarborTask.__attrs_attrs__}
    yield from (name for name in raw if name not in fields and name not in IGNORED_FIELDS)
    defaults = HarborTask()
    for part in ("environment", "agent", "verifier"):
        read = {field.alias for field in getattr(defaults, part).__attrs_attrs__}
        yield from (f"{part}.{name}" for name in raw.get(part, {}) if name not in read)


def _plain(value: Any) -> Any:
    """A TOML value as JSON, in which dates are text."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value.isoformat() if isinstance(value, date | datetime | time) else value
