"""Polar's TaskRequests as tasks: from JSON, YAML or JSONL files, or sent to a node.

Invariant: every field is converted, noted or refused. A field that tunes Polar's own machinery becomes a
note. A field without which the agent or its evaluator would get another task is refused. In a request that is
sent to a node, a path on the node's machine must be, with links resolved, below a folder that the node's
config opens to tasks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import define, field

from polarnode.core import codec
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.sources.polar_spec import (
    WORKDIR,
    PolarAgent,
    PolarEvaluator,
    PolarMcp,
    PolarRuntime,
    PolarStrategy,
    PolarTask,
    evaluator_value,
    runtime_value,
)
from polarnode.sources.reading import check_part, lines, named, read_json, read_line, read_text, read_yaml
from polarnode.sources.values import FoundTask, Overrides, UnreadTask

# ── tasks ──────────────────────────────────────────────────────────────────────

# The settings of Polar's presets that change what the agent is, and that no preset here accepts.
AGENT_CHANGING_SETTINGS = (
    "append_system_prompt",
    "system_prompt",
    "allowed_tools",
    "disallowed_tools",
    "fallback_model",
    "repo_path",
    "shell_preamble",
)
PARTS: Mapping[str | None, Any] = {
    None: PolarTask,
    "agent": PolarAgent,
    "runtime": PolarRuntime,
    "builder": PolarStrategy,
    "evaluator": PolarEvaluator,
}
# The settings that Polar needs because it does not keep the engine's own tokens.
UNNEEDED_BUILDER_SETTINGS = ("end_of_turn_token_id", "tokenizer_name_or_path")


@define(eq=False)
class TaskNotes:
    """The notes on one task, collected while it is read."""

    texts: list[str] = field(factory=list)

    def add(self, text: str) -> None:
        self.texts.append(text)


def tasks(path: Path, overrides: Overrides) -> Iterator[FoundTask | UnreadTask]:
    """The task of a JSON or YAML file, each task of a list, or the task of each line of JSONL."""
    for origin, read in _values(path):
        if isinstance(read, Refused):
            yield UnreadTask(name=origin, origin=origin, refused=named(read, origin))
            continue
        task_id = read.get("task_id") if isinstance(read, dict) else None
        name = task_id if isinstance(task_id, str) else path.stem
        try:
            yield convert_task(read, name=name, origin=origin, folder=path.parent)
        except Refused as refused:
            yield UnreadTask(name=name, origin=origin, refused=named(refused, origin))


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix in (".jsonl", ".ndjson"):
        for number, line in lines(path):
            try:
                yield f"{path} line {number}", read_line(line)
            except Refused as refused:
                yield f"{path} line {number}", refused
        return
    value = read_json(path) if path.suffix == ".json" else read_yaml(path)
    if not isinstance(value, list):
        yield str(path), value
        return
    for number, each in enumerate(value, start=1):
        yield f"{path} task {number}", each


def convert_task(request: Any, *, name: str, origin: str, folder: Path, served: bool = False) -> FoundTask:
    """A TaskRequest as a task. `served` says that it was sent to a node, which calls its callback and uses
    Polar's own priority if none is given.
    """
    task = codec.structure(request, PolarTask)
    notes = TaskNotes()
    _note_unknown(request, notes)
    value: dict[str, Json] = {
        "instruction": task.instruction,
        "num_samples": task.num_samples,
        "harness": _harness_value(task.agent, folder, notes),
        "builder": _builder(task, notes),
        "evaluator": evaluator_value(task.evaluator, folder, notes.add),
        "budgets": _budgets_value(task, notes),
        "metadata": dict(task.metadata),
    }
    value |= {
        key: present
        for key, present in (("task_id", task.task_id), ("priority", task.dispatch_priority))
        if present is not None
    }
    group = task.metadata.get("group_id")
    if isinstance(group, str):
        value["group_id"] = group
    if task.early_stop_min_usable_sessions is not None:
        value["group"] = {"early_stop_min": task.early_stop_min_usable_sessions}
    if served:
        value |= {
            "priority": task.dispatch_priority or 0,
            "callback_url": task.callback_url,
            "callback_format": "polar_task",
        }
    if task.runtime is None:
        notes.add(
            "runtime: it has none, and Polar's node has a default of its own; here it is the harness's own"
            " image"
        )
    else:
        value["runtime"] = runtime_value(task.runtime, folder, notes.add)
    _note_machinery(task, notes, served=served)
    return FoundTask(
        name=name, origin=origin, value=value, notes=tuple(notes.texts), foreign=task.runtime is not None
    )


# ── harness ────────────────────────────────────────────────────────────────────


def _harness_value(agent: PolarAgent, folder: Path, notes: TaskNotes) -> dict[str, Json]:
    if agent.import_path is not None or agent.harness is None:
        raise Refused(
            "a harness class of Polar's own kind cannot run here: write it as a polarnode.harnesses Harness",
            path="$.agent.import_path",
        )
    found: dict[str, Json] = {"name": agent.harness, "env": dict(agent.env)}
    if agent.model_name is not None:
        found["model_name"] = agent.model_name
    if agent.settings:
        found |= _settings(agent, notes)
    if agent.harness == "shell":
        found["command"] = _command(agent)
        notes.add(
            "{instruction}, {base_url}, {key}, {model} and {workdir} are replaced in the shell's command;"
            " Polar replaces nothing"
        )
    if agent.mcp_servers:
        found["mcp_servers"] = {server.name: _server(server) for server in agent.mcp_servers}
    if agent.skills_path is not None:
        found["skills"] = _read_skills(folder / agent.skills_path)
    return found


def _settings(agent: PolarAgent, notes: TaskNotes) -> dict[str, Json]:
    used: dict[str, Json] = {}
    for name, value in agent.settings.items():
        if name in AGENT_CHANGING_SETTINGS:
            raise Refused(
                f"agent.settings.{name} makes it another agent, and no harness here takes it",
                path=f"$.agent.settings.{name}",
            )
        if name == "version":
            used["version"] = value
        else:
            notes.add(f"agent.settings.{name} is not used: the harness runs with its own default")
    return used


def _command(agent: PolarAgent) -> list[Json]:
    shell = agent.custom_shell
    if shell is None:
        raise Refused("the harness shell has no custom_shell: give its command", path="$.agent.custom_shell")
    env = [f"{name}={value}" for name, value in (shell.env or {}).items()]
    moved = ["--chdir", shell.cwd] if shell.cwd else []
    return [*(["env", *moved, *env] if env or moved else []), "bash", "-lc", shell.command]


def _server(server: PolarMcp) -> Json:
    if server.transport == "sse":
        raise Refused(
            f"the MCP server {server.name} speaks over sse; harnesses here are given stdio and"
            " streamable-http",
            path="$.agent.mcp_servers",
        )
    return (
        {"url": server.url}
        if server.url is not None
        else {"command": server.command, "args": list(server.args)}
    )


def _read_skills(folder: Path) -> dict[str, Json]:
    found: dict[str, Json] = {
        file.parent.name: read_text(check_part(folder, f"{file.parent.name}/SKILL.md"))
        for file in sorted(folder.glob("*/SKILL.md"))
    }
    if not found:
        raise Refused(f"{folder} holds no skill: a folder each, with a SKILL.md", path="$.agent.skills_path")
    return found


# ── budgets and builder ────────────────────────────────────────────────────────


def _budgets_value(task: PolarTask, notes: TaskNotes) -> dict[str, Json]:
    alone, steps = (
        task.metadata.get("agent_timeout"),
        {} if task.max_steps is None else {"max_turns": task.max_steps},
    )
    if isinstance(alone, int | float) and not isinstance(alone, bool):
        return {"run_s": alone, **steps}
    notes.add(
        "timeout_seconds is Polar's one deadline for all phases; here it is the run's alone, and init and"
        " post have budgets of their own"
    )
    return {"run_s": task.timeout_seconds, **steps}


def _builder(task: PolarTask, notes: TaskNotes) -> dict[str, Json]:
    config = {
        name: value for name, value in task.builder.config.items() if name not in UNNEEDED_BUILDER_SETTINGS
    }
    for name in UNNEEDED_BUILDER_SETTINGS:
        if name in task.builder.config:
            notes.add(f"builder.config.{name} is not needed: the engine's own tokens are kept")
    if ":" in task.builder.strategy:
        raise Refused(
            "a builder of Polar's own kind cannot run here: write it as a polarnode builder",
            path="$.builder.strategy",
        )
    return {"name": task.builder.strategy, "config": config}


# ── notes ──────────────────────────────────────────────────────────────────────


def _note_machinery(task: PolarTask, notes: TaskNotes, *, served: bool) -> None:
    if task.callback_url is not None and not served:
        notes.add(
            "callback_url is not called: results are read from the stream of trajectories, from where the"
            " reader stopped"
        )
    if task.runtime is not None and task.runtime.workdir is None:
        notes.add(
            f"runtime.workdir is the image's own, which is not known here: {WORKDIR} is taken;"
            " set runtime.workdir in --override to change it"
        )


def _note_unknown(request: Mapping[str, Any], notes: TaskNotes) -> None:
    """Note the fields of the request and of its parts that are not read here."""
    for part, kind in PARTS.items():
        value = request if part is None else request.get(part)
        fields = {each.alias for each in kind.__attrs_attrs__}
        for name in sorted(set(value) - fields) if isinstance(value, Mapping) else ():
            notes.add(
                f"{name if part is None else f'{part}.{name}'} is not used: no TaskRequest has such a field"
            )


# ── requests to a node ─────────────────────────────────────────────────────────

ROOT = Path("/")
# Maps the beginning of a field's path here to its place in a request. Longer beginnings come first.
REQUEST_PATHS: Mapping[str, str] = {
    "$.budgets.run_s": "$.timeout_seconds",
    "$.budgets.max_turns": "$.max_steps",
    "$.group.early_stop_min": "$.early_stop_min_usable_sessions",
    "$.priority": "$.dispatch_priority",
    "$.harness.name": "$.agent.harness",
    "$.harness": "$.agent",
    "$.builder.name": "$.builder.strategy",
    "$.evaluator.name": "$.evaluator.strategy",
}


def convert_request(request: Any, *, volumes: tuple[str, ...]) -> FoundTask:
    """The task of a request. `volumes` are the folders of this machine that tasks may see. The files that the
    request names are read.

    Raises Refused, with the field's path, if the task cannot run here.
    """
    for where, name in _named(codec.structure(request, PolarTask)):
        _check(name, where, volumes)
    return convert_task(request, name="request", origin="request", folder=ROOT, served=True)


@contextmanager
def name_request_paths() -> Iterator[None]:
    """Let refusals of the block name the field as it stands in the request."""
    try:
        yield
    except Refused as refused:
        raise Refused(str(refused), path=request_path(refused.path)) from refused


def request_path(path: str | None) -> str | None:
    """A field's path in the request; the same path if the field has the same name there."""
    begins = next((ours for ours in REQUEST_PATHS if path is not None and path.startswith(ours)), None)
    return path if path is None or begins is None else REQUEST_PATHS[begins] + path.removeprefix(begins)


def _named(task: PolarTask) -> Iterator[tuple[str, str]]:
    """Each path on the node's own machine that a request names, preceded by the path of its field."""
    for index, action in enumerate(task.runtime.prepare if task.runtime is not None else ()):
        if action.source is not None:
            yield f"$.runtime.prepare[{index}].source", action.source
    if task.agent.skills_path is not None:
        yield "$.agent.skills_path", task.agent.skills_path
        yield from (
            ("$.agent.skills_path", str(file)) for file in Path(task.agent.skills_path).glob("*/SKILL.md")
        )
    tests = None if task.evaluator is None else task.evaluator.config.get("tests_dir")
    if tests is not None:
        yield "$.evaluator.config.tests_dir", str(tests)


def _check(name: str, where: str, volumes: tuple[str, ...]) -> None:
    path = Path(name)
    if not path.is_absolute():
        raise Refused(f"{name} must be an absolute path: it is one of the node's own machine", path=where)
    if not any(path.resolve().is_relative_to(Path(folder).resolve()) for folder in volumes):
        raise Refused(
            f"{name} is on the node's own machine, below no folder that its setting volumes opens to tasks:"
            " add one there",
            path=where,
        )
