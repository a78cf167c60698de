"""The shapes of Polar's TaskRequest, and the conversion of its evaluators and runtimes to polarnode's.

Unknown fields are kept for a note. An evaluator without a counterpart is refused and never noted, because its
reward is trained on. The evaluator itself checks its config when the task is submitted.
"""

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from posixpath import join
from typing import Literal

from attrs import field, frozen

from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.sources.reading import LARGEST_FILE, below, file_mode, inline, read_bytes
from polarnode.sources.swe import instance_value

# ── shapes ─────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class PolarAction:
    type: Literal["upload_file", "upload_dir", "exec"]
    source: str | None = None
    target: str | None = None
    command: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    max_attempts: int = 1
    retry_backoff_seconds: float = 0.0


@frozen(kw_only=True)
class PolarRuntime:
    image: str
    backend: Literal["docker", "apptainer"] = "docker"
    prepare: tuple[PolarAction, ...] = ()
    eval_prepare: tuple[PolarAction, ...] | None = None
    env: Mapping[str, str] = field(factory=dict)
    network: str | None = "host"
    workdir: str | None = None
    direct_exec_init_command: str | None = None
    cpus: int | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int = 0
    allow_internet: bool = True
    internet_volumes: tuple[str, ...] = ()
    import_path: str | None = None
    kwargs: Mapping[str, Json] = field(factory=dict)


@frozen(kw_only=True)
class PolarMcp:
    name: str
    transport: str = "stdio"
    command: str | None = None
    args: tuple[str, ...] = ()
    url: str | None = None


@frozen(kw_only=True)
class PolarShell:
    command: str
    cwd: str | None = None
    env: Mapping[str, str] | None = None


@frozen(kw_only=True)
class PolarAgent:
    harness: str | None = None
    import_path: str | None = None
    model_name: str | None = None
    settings: Mapping[str, Json] = field(factory=dict)
    env: Mapping[str, str] = field(factory=dict)
    mcp_servers: tuple[PolarMcp, ...] = ()
    skills_path: str | None = None
    custom_shell: PolarShell | None = None


@frozen(kw_only=True)
class PolarStrategy:
    strategy: str
    config: Mapping[str, Json] = field(factory=dict)


@frozen(kw_only=True)
class PolarEvaluator:
    strategy: str
    config: Mapping[str, Json] = field(factory=dict)
    env: Mapping[str, str] = field(factory=dict)
    refresh_runtime: bool = False


@frozen(kw_only=True)
class PolarTask:
    instruction: str
    agent: PolarAgent
    task_id: str | None = None
    num_samples: int = 1
    dispatch_priority: int | None = None
    early_stop_min_usable_sessions: int | None = None
    max_steps: int | None = None  # a field of forks of Polar: the model calls that a session may make
    timeout_seconds: float = 600.0
    runtime: PolarRuntime | None = None
    builder: PolarStrategy = PolarStrategy(strategy="per_request")
    evaluator: PolarEvaluator | None = None
    callback_url: str | None = None
    metadata: Mapping[str, Json] = field(factory=dict)


# ── evaluators ─────────────────────────────────────────────────────────────────

Note = Callable[[str], None]
SWE_EVALUATORS = ("swebench_harness", "swegym_git_diff")
CLEAN_RUNTIME_NOTE = (
    "evaluator.refresh_runtime is false, and yet it judges in a clean runtime: what the agent left running"
    " could forge its reward"
)


def evaluator_value(evaluator: PolarEvaluator | None, folder: Path, note: Note) -> dict[str, Json]:
    """An EvaluatorSpec as JSON."""
    if evaluator is None:
        note("evaluator: it has none; here a session without one gets a reward of 1 for ending well")
        return {}
    config = dict(evaluator.config)
    match evaluator.strategy:
        case "session_completed":
            return {"name": "session_completed", "config": config}
        case "test_on_output":
            _refuse_env(evaluator)
            _note_clean(evaluator, note)
            return {"name": "test_on_output", "config": config}
        case "harbor":
            env: dict[str, Json] = {"env": dict(evaluator.env)} if evaluator.env else {}
            return {
                "name": "harbor",
                "config": {**_with_tests(config, folder), **env},
                "fresh_runtime": evaluator.refresh_runtime,
            }
        case strategy if strategy in SWE_EVALUATORS:
            _refuse_env(evaluator)
            _note_clean(evaluator, note)
            return {"name": "swebench", "config": _with_instance(config)}
    raise Refused(
        f"the evaluator {evaluator.strategy} is Polar's own: here there are others, see docs/evaluators.md",
        path="$.evaluator.strategy",
    )


def _refuse_env(evaluator: PolarEvaluator) -> None:
    if evaluator.env:
        raise Refused(
            f"the evaluator {evaluator.strategy} has no env of its own here: put it into its command",
            path="$.evaluator.env",
        )


def _note_clean(evaluator: PolarEvaluator, note: Note) -> None:
    if not evaluator.refresh_runtime:
        note(CLEAN_RUNTIME_NOTE)


def _with_tests(config: dict[str, Json], folder: Path) -> dict[str, Json]:
    """Add the files of `tests_dir`, a folder on the submitter's machine."""
    tests = folder / str(_needed(config, "tests_dir"))
    if not tests.is_dir():
        raise Refused(
            f"{tests} is no folder: tests_dir names one, from the task's file on",
            path="$.evaluator.config.tests_dir",
        )
    return {**config, "tests": inline(tests)}


def _with_instance(config: dict[str, Json]) -> dict[str, Json]:
    instance = _needed(config, "instance")
    if not isinstance(instance, dict):
        raise Refused("the instance is a dataset's row: a JSON object", path="$.evaluator.config.instance")
    return {**config, "instance": instance_value(instance)}


def _needed(config: dict[str, Json], name: str) -> Json:
    if name not in config:
        raise Refused(f"the evaluator needs {name}", path=f"$.evaluator.config.{name}")
    return config.pop(name)


# ── runtimes ───────────────────────────────────────────────────────────────────

WORKDIR = "/work"
SESSION_FOLDER = "/polar/session"
# The prefixes that say where Apptainer gets an image. The image's name follows.
IMAGE_TRANSPORTS = ("docker-daemon:", "docker://", "containers-storage:")


def runtime_value(runtime: PolarRuntime, folder: Path, note: Note) -> dict[str, Json]:
    """A RuntimeSpec as JSON. Files are read relative to the task's own folder."""
    _refuse_other_worlds(runtime)
    _note_differences(runtime, note)
    fields: dict[str, Json] = {
        "image": _image(runtime.image, note),
        "workdir": runtime.workdir or WORKDIR,
        "user": "root",  # Polar's containers run as their image's user, which is root in nearly all of them
        "read_only": False,
        "files": [file for action in runtime.prepare for file in _files(action, folder)],
        "prepare": [_step(action, note) for action in runtime.prepare if action.type == "exec"],
        "eval_prepare": [_step(action, note) for action in runtime.eval_prepare or ()],
        "env": dict(runtime.env),
        "cpus": runtime.cpus,
        "memory_mb": runtime.memory_mb,
        "disk_mb": runtime.storage_mb,
        "volumes": list(_volume_values(runtime, note)),
    }
    return {name: value for name, value in fields.items() if value not in (None, [], {})}


def _refuse_other_worlds(runtime: PolarRuntime) -> None:
    if runtime.import_path is not None:
        raise Refused("a runtime class of Polar's own kind cannot run here", path="$.runtime.import_path")
    if runtime.gpus:
        raise Refused(
            "it asks for GPUs in the container, which has none: the node's GPUs serve the model",
            path="$.runtime.gpus",
        )
    if runtime.image.endswith(".sif") or "oras://" in runtime.image:
        raise Refused(
            f"{runtime.image} is an image of Apptainer: name the OCI image it was made from",
            path="$.runtime.image",
        )
    if any(action.type != "exec" for action in runtime.eval_prepare or ()):
        raise Refused(
            "eval_prepare uploads files: place them with the evaluator, or under prepare",
            path="$.runtime.eval_prepare",
        )


def _note_differences(runtime: PolarRuntime, note: Note) -> None:
    kinds = [action.type == "exec" for action in runtime.prepare]
    if True in kinds and False in kinds[kinds.index(True) :]:
        note(
            "runtime.prepare uploads files after a command: here all files are placed before the first"
            " command"
        )
    if runtime.eval_prepare is not None:
        note(
            "runtime.eval_prepare runs after prepare's own steps in the evaluator's runtime; Polar runs it in"
            " their place"
        )
    if runtime.allow_internet:
        note(
            "it may reach the whole internet; here it reaches only the hosts of runtime.egress, which is"
            " empty"
        )
    if runtime.direct_exec_init_command is not None:
        note("runtime.direct_exec_init_command is not used: it is for Apptainer alone")
    if runtime.internet_volumes:
        note("runtime.internet_volumes are not used: the network of a session is its door and runtime.egress")
    for name in sorted(set(runtime.kwargs) - {"volumes", "fakeroot"}):
        note(f"runtime.kwargs.{name} is not used: it is a setting of Polar's backend")
    if any(SESSION_FOLDER in (action.command or action.target or "") for action in runtime.prepare):
        note(
            f"{SESSION_FOLDER} is Polar's own folder; here it is a folder like any other, and empty at first"
        )


def _image(name: str, note: Note) -> str:
    for transport in IMAGE_TRANSPORTS:
        if name.startswith(transport):
            note(f"{transport} is where Apptainer gets the image; here it is in the node's own store")
            return name.removeprefix(transport)
    return name


def _files(action: PolarAction, folder: Path) -> Iterator[Json]:
    if action.type == "exec":
        return
    if not action.source or not action.target:
        raise Refused(f"{action.type} needs a source and a target", path="$.runtime.prepare")
    source = folder / action.source
    if action.type == "upload_file":
        yield _file(source, action.target)
        return
    if not source.is_dir():
        raise Refused(f"{source} is no folder: upload_dir needs one", path="$.runtime.prepare")
    for name, file in below(source):
        yield _file(file, join(action.target, name))


def _file(file: Path, target: str) -> Json:
    content = read_bytes(file)
    if len(content) > LARGEST_FILE:
        raise Refused(
            f"{file} is too large to travel with the task: put it into the image", path="$.runtime.prepare"
        )
    return {"path": target, "base64": b64encode(content).decode(), "mode": file_mode(file)}


def _step(action: PolarAction, note: Note) -> Json:
    if not action.command:
        raise Refused("exec needs a command", path="$.runtime.prepare")
    if action.max_attempts != 1:
        note("runtime.prepare: max_attempts is not used; a step that fails ends the session in INIT")
    env = [f"{name}={value}" for name, value in (action.env or {}).items()]
    moved = ["--chdir", action.cwd] if action.cwd else []
    return {"argv": [*(["env", *moved, *env] if env or moved else []), "bash", "-lc", action.command]}


def _volume_values(runtime: PolarRuntime, note: Note) -> Iterator[Json]:
    """The volumes, each written as Docker's `source:target[:ro]`."""
    volumes = runtime.kwargs.get("volumes", [])
    if not isinstance(volumes, list) or not all(
        isinstance(each, str) and each.count(":") in (1, 2) for each in volumes
    ):
        raise Refused("kwargs.volumes is no list of source:target[:ro]", path="$.runtime.kwargs.volumes")
    for each in volumes:
        source, target, *mode = str(each).split(":")
        yield {"source": source, "target": target, "write": mode != ["ro"]}
    if volumes:
        note("runtime.kwargs.volumes are mounted only where the node's own settings allow their folders")
