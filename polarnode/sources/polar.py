"""Polar's task files: a TaskRequest as JSON, YAML, or one a line.

The rule for whoever edits it: every field of a TaskRequest is either said here in our words, told as a note, or refused. A field that tunes how
Polar's own machinery works is a note; one without which the agent or its judge would meet another task is a refusal.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import define, field

from polarnode import wire
from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.sources.polar_judges import evaluator_value
from polarnode.sources.polar_runtime import WORKDIR, runtime_value
from polarnode.sources.polar_shapes import PolarAgent, PolarEvaluator, PolarMcp, PolarRuntime, PolarStrategy, PolarTask
from polarnode.sources.reading import lines, named, read_json, read_text, read_yaml
from polarnode.sources.shapes import Found, Overrides, Unread
from polarnode.sources.task_files import read_line

# Settings of Polar's presets that change what the agent is, and that no preset here takes.
ANOTHER_AGENT = ("append_system_prompt", "system_prompt", "allowed_tools", "disallowed_tools", "fallback_model", "repo_path", "shell_preamble")
PARTS: Mapping[str | None, Any] = {
    None: PolarTask,
    "agent": PolarAgent,
    "runtime": PolarRuntime,
    "builder": PolarStrategy,
    "evaluator": PolarEvaluator,
}
BUILDERS_OWN = ("end_of_turn_token_id", "tokenizer_name_or_path")  # what Polar needs because it does not keep the engine's own tokens


@define(eq=False)
class Notes:
    """What is said of one task while it is read."""

    said: list[str] = field(factory=list)

    def add(self, text: str) -> None:
        self.said.append(text)


def tasks(path: Path, overrides: Overrides) -> Iterator[Found | Unread]:
    """The task of a JSON or YAML file, each of a list, or each line of JSONL."""
    for origin, read in _values(path):
        if isinstance(read, Refused):
            yield Unread(name=origin, origin=origin, refused=named(read, origin))
            continue
        known = read.get("task_id") if isinstance(read, dict) else None
        name = known if isinstance(known, str) else path.stem
        try:
            yield task_found(read, name=name, origin=origin, folder=path.parent)
        except Refused as refused:
            yield Unread(name=name, origin=origin, refused=named(refused, origin))


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


def task_found(told: Any, *, name: str, origin: str, folder: Path, served: bool = False) -> Found:
    """A TaskRequest as a task. `served`: it was sent to a node, which tells its callback and knows Polar's own priority where none is said."""
    task = wire.structure(told, PolarTask)
    notes = Notes()
    _note_unknown(told, notes)
    value: dict[str, Json] = {
        "instruction": task.instruction,
        "num_samples": task.num_samples,
        "harness": _harness(task.agent, folder, notes),
        "builder": _builder(task, notes),
        "evaluator": evaluator_value(task.evaluator, folder, notes.add),
        "budgets": _budgets(task, notes),
        "metadata": dict(task.metadata),
    }
    value |= {key: said for key, said in (("task_id", task.task_id), ("priority", task.dispatch_priority)) if said is not None}
    group = task.metadata.get("group_id")
    if isinstance(group, str):
        value["group_id"] = group
    if task.early_stop_min_usable_sessions is not None:
        value["group"] = {"early_stop_min": task.early_stop_min_usable_sessions}
    if served:
        value |= {"priority": task.dispatch_priority or 0, "callback_url": task.callback_url, "callback_format": "polar_task"}
    if task.runtime is None:
        notes.add("runtime: it has none, and Polar's node has a default of its own; here it is the harness's own image")
    else:
        value["runtime"] = runtime_value(task.runtime, folder, notes.add)
    _note_machinery(task, notes, served=served)
    return Found(name=name, origin=origin, value=value, notes=tuple(notes.said), foreign=task.runtime is not None)


# ── who works ─────────────────────────────────────────────────────────────────


def _harness(agent: PolarAgent, folder: Path, notes: Notes) -> dict[str, Json]:
    if agent.import_path is not None or agent.harness is None:
        raise Refused("a harness class of Polar's own kind can not run here: write it as a polarnode.harnesses Harness", path="$.agent.import_path")
    found: dict[str, Json] = {"name": agent.harness, "env": dict(agent.env)}
    if agent.model_name is not None:
        found["model_name"] = agent.model_name
    if agent.settings:
        found |= _settings(agent, notes)
    if agent.harness == "shell":
        found["command"] = _command(agent)
        notes.add("{instruction}, {base_url}, {key}, {model} and {workdir} are replaced in the shell's command; Polar replaces nothing")
    if agent.mcp_servers:
        found["mcp_servers"] = {server.name: _server(server) for server in agent.mcp_servers}
    if agent.skills_path is not None:
        found["skills"] = _skills(folder / agent.skills_path)
    return found


def _settings(agent: PolarAgent, notes: Notes) -> dict[str, Json]:
    said: dict[str, Json] = {}
    for name, value in agent.settings.items():
        if name in ANOTHER_AGENT:
            raise Refused(f"agent.settings.{name} makes it another agent, and no harness here takes it", path=f"$.agent.settings.{name}")
        if name == "version":
            said["version"] = value
        else:
            notes.add(f"agent.settings.{name} is not used: the harness runs with its own default")
    return said


def _command(agent: PolarAgent) -> list[Json]:
    shell = agent.custom_shell
    if shell is None:
        raise Refused("the harness shell has no custom_shell: give its command", path="$.agent.custom_shell")
    env = [f"{name}={value}" for name, value in (shell.env or {}).items()]
    moved = ["--chdir", shell.cwd] if shell.cwd else []
    return [*(["env", *moved, *env] if env or moved else []), "bash", "-lc", shell.command]


def _server(server: PolarMcp) -> Json:
    if server.transport == "sse":
        raise Refused(f"the MCP server {server.name} speaks over sse; harnesses here are given stdio and streamable-http", path="$.agent.mcp_servers")
    return {"url": server.url} if server.url is not None else {"command": server.command, "args": list(server.args)}


def _skills(folder: Path) -> dict[str, Json]:
    found: dict[str, Json] = {file.parent.name: read_text(file) for file in sorted(folder.glob("*/SKILL.md"))}
    if not found:
        raise Refused(f"{folder} holds no skill: a folder each, with a SKILL.md", path="$.agent.skills_path")
    return found


# ── how long, what of it is trained ───────────────────────────────────────────


def _budgets(task: PolarTask, notes: Notes) -> dict[str, Json]:
    alone, steps = task.metadata.get("agent_timeout"), {} if task.max_steps is None else {"max_turns": task.max_steps}
    if isinstance(alone, int | float) and not isinstance(alone, bool):
        return {"run_s": alone, **steps}
    notes.add("timeout_seconds is Polar's one deadline for all phases; here it is the run's alone, and init and post have budgets of their own")
    return {"run_s": task.timeout_seconds, **steps}


def _builder(task: PolarTask, notes: Notes) -> dict[str, Json]:
    config = {name: value for name, value in task.builder.config.items() if name not in BUILDERS_OWN}
    for name in BUILDERS_OWN:
        if name in task.builder.config:
            notes.add(f"builder.config.{name} is not needed: the engine's own tokens are kept")
    if ":" in task.builder.strategy:
        raise Refused("a builder of Polar's own kind can not run here: write it as a polarnode builder", path="$.builder.strategy")
    return {"name": task.builder.strategy, "config": config}


# ── what is told ──────────────────────────────────────────────────────────────


def _note_machinery(task: PolarTask, notes: Notes, *, served: bool) -> None:
    if task.callback_url is not None and not served:
        notes.add("callback_url is not called: results are read from the stream of trajectories, from where the reader stopped")
    if task.runtime is not None and task.runtime.workdir is None:
        notes.add(f"runtime.workdir is the image's own, which is not known here: {WORKDIR} is taken; runtime.workdir in --with says another")


def _note_unknown(told: Mapping[str, Any], notes: Notes) -> None:
    """Fields nothing here reads, of the request and of its parts."""
    for part, kind in PARTS.items():
        value = told if part is None else told.get(part)
        known = {each.alias for each in kind.__attrs_attrs__}
        for name in sorted(set(value) - known) if isinstance(value, Mapping) else ():
            notes.add(f"{name if part is None else f'{part}.{name}'} is not used: no TaskRequest has such a field")
