"""The harness interface, the judgement of how a harness ended, and writers for config files of harnesses.

A harness is an agent program that is never modified. Its module names the image in `runtimes/` that holds it,
the measured version, the APIs it speaks, whether its exit code is reliable, and how it is launched (argv,
environment, files). In a new harness: pass no argument through a shell, build the environment from nothing,
turn telemetry and updates off, and leave unsupported features (MCP servers, skills) False, so that tasks that
need them are refused. The node's own environment never reaches a harness.

A failure after the engine died counts as the engine's. Measured: pi, openclaw, hermes and gemini_cli exit
with 0 when they have done nothing; opencode exits with 1 after a compaction although its work is done. Only
the recorded turns overrule an exit code, and the reason says so. In config files, text of a task is data in
every format.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from attrs import frozen

from polarnode.core.conversation import Json
from polarnode.core.errors import EngineError, Refused
from polarnode.core.ports import LOST, NOT_RUN, HarnessOrder, Launch
from polarnode.core.task import McpServerSpec
from polarnode.core.trajectory import Outcome, Turn

# ── harness ────────────────────────────────────────────────────────────────────

# Harnesses show their simplest behaviour with an unknown model name.
DEFAULT_MODEL_NAME = "local-model"
MAX_ARGUMENT_BYTES = 131_071  # Linux's limit for a single argument (MAX_ARG_STRLEN without the NUL)


@frozen(kw_only=True)
class Harness:
    """One agent program: its name, the version that its image pins, the image, and its launch as a pure
    function.

    `apis` are the values of its setting `api`, the default first. `exit_code_honest` is False if the program
    may exit with 0 without having done anything, or with 1 after its work is done: then the session's turns
    decide (`exit_outcome`).

    `resume` launches it with the same settings, files and environment in the home and workdir that an earlier
    session of this harness left, so that it continues that conversation; the order's instruction is the
    message that it then adds. None: its pinned version cannot resume, or its first request after resuming
    differs from the session's next one. `settles_s`: seconds after a request until its files hold what it
    keeps of the conversation. `calls_first`: it does not continue from the calls of an answer that was cut,
    so it is told that such an answer ended with its calls; other harnesses are told that the answer was cut.
    """

    name: str
    version: str | None
    image: str
    launch: Callable[[HarnessOrder], Launch]
    apis: tuple[str, ...] = ()
    exit_code_honest: bool = True
    mcp_servers: bool = False
    skills: bool = False
    resume: Callable[[HarnessOrder], Launch] | None = None
    calls_first: bool = False
    settles_s: float = 0.0


def model_name(order: HarnessOrder) -> str:
    """The model name given to the harness. The node serves its one model under any name."""
    return order.model_name or DEFAULT_MODEL_NAME


def quiet_environment(order: HarnessOrder) -> dict[str, str]:
    """The variables that every harness gets: a home, a plain terminal, no telemetry. `environment` merges the
    task's own `env` over them.
    """
    return {
        "HOME": order.home,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "DO_NOT_TRACK": "1",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }


def environment(order: HarnessOrder, own: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a harness: `quiet_environment`, then the harness's own variables, then the
    task's.
    """
    return {**quiet_environment(order), **own, **order.env}


def argument(text: str, *, special: tuple[str, ...] = ("-", "@")) -> str:
    """An instruction as a command-line argument. If it begins with a `special` prefix (a flag, file or
    command of the harness), a space is put before it.
    """
    if len(text.encode()) >= MAX_ARGUMENT_BYTES:
        raise Refused(
            f"the instruction is longer than the {MAX_ARGUMENT_BYTES} bytes a program's argument may have:"
            " put it"
            " in a file of the workspace",
            path="$.instruction",
        )
    return f" {text}" if text.startswith(special) else text


def skill_files(order: HarnessOrder, folder: str) -> dict[str, bytes]:
    """The task's skills, each at the path where this harness looks for them. `folder` is relative to the
    home.
    """
    return {f"{order.home}/{folder}/{name}/SKILL.md": text.encode() for name, text in order.skills.items()}


def choice(settings: Mapping[str, Json], name: str, allowed: tuple[str, ...]) -> str:
    """The value of a setting that must be one of `allowed`; the first is the default."""
    value = settings.get(name, allowed[0])
    if not isinstance(value, str) or value not in allowed:
        raise Refused(
            f"harness setting {name} must be one of {', '.join(allowed)}", path=f"$.harness.settings.{name}"
        )
    return value


def check_setting_names(settings: Mapping[str, Json], names: tuple[str, ...]) -> None:
    """Refuse a setting that this harness does not have, so that a misspelt name is never silently ignored."""
    for name in settings:
        if name not in names:
            listed = ", ".join(names) or "none"
            raise Refused(
                f"this harness has no setting {name}; it knows: {listed}", path=f"$.harness.settings.{name}"
            )


# ── outcomes ───────────────────────────────────────────────────────────────────

EXIT_CODES: Final = {**NOT_RUN, LOST: "it let itself be traced (PTRACE_TRACEME), so that its own is lost"}


def exit_outcome(harness: Harness, exit_code: int, turns: Sequence[Turn]) -> Outcome:
    """The outcome of a harness that ended: completed, failed, or an engine error, with a reason unless the
    exit code is enough.
    """
    judged = _judged(harness, exit_code, turns)
    if judged.status != "failed" or not lost_its_engine(turns):
        return judged
    reason = (
        f"the engine failed the harness's last call, and it ended with exit code {exit_code}:"
        " the logs of the node and of its engines have the cause"
    )
    return Outcome(status="error", boundary=EngineError.boundary, exit_code=exit_code, reason=reason)


def lost_its_engine(turns: Sequence[Turn]) -> bool:
    """Whether the engine failed the main agent's last call. A failed call that was retried and answered does
    not count, and neither does a call that the engine refused because of what the agent asked for.
    """
    last = _last_main_turn(turns)
    return last is not None and last.state == "failed" and not last.refused


def _judged(harness: Harness, exit_code: int, turns: Sequence[Turn]) -> Outcome:
    # With a lost exit code the program did not end by itself, whatever it did before.
    if harness.exit_code_honest or exit_code == LOST:
        return _plain(exit_code)
    last = _last_main_turn(turns)
    if exit_code == 0 and (last is None or last.state != "complete"):
        reason = (
            f"{harness.name} ended with exit code 0, but without a whole answer to its last call"
            if last
            else "it never called its model"
        )
        return Outcome(status="failed", exit_code=exit_code, reason=reason)
    if exit_code != 0 and last is not None and _is_final_answer(last):
        reason = (
            f"{harness.name} ended with exit code {exit_code} after its last answer was whole: its work was"
            " done"
        )
        return Outcome(status="completed", exit_code=exit_code, reason=reason)
    return _plain(exit_code)


def _plain(exit_code: int) -> Outcome:
    if exit_code == 0:
        return Outcome(status="completed", exit_code=0)
    meaning = EXIT_CODES.get(exit_code)
    reason = f"the harness ended with exit code {exit_code}{f': {meaning}' if meaning else ''}"
    return Outcome(status="failed", exit_code=exit_code, reason=reason)


def _last_main_turn(turns: Sequence[Turn]) -> Turn | None:
    """The main agent's last turn. Side calls and sub-agents do not show how the agent ended."""
    return next((turn for turn in reversed(turns) if turn.role == "main"), None)


def _is_final_answer(turn: Turn) -> bool:
    """Whether this is a complete answer without a tool call: the agent loop of every harness ends on one."""
    answer = turn.answer
    return (
        turn.state == "complete"
        and answer is not None
        and answer.finish_reason in ("stop", "stop_string")
        and not answer.calls
    )


# ── config files ───────────────────────────────────────────────────────────────

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def json_bytes(value: Json) -> bytes:
    """A config file in JSON, which is also valid YAML."""
    return json.dumps(value, indent=1, ensure_ascii=False).encode()


def toml_bytes(table: Mapping[str, Json]) -> bytes:
    """A config file in TOML. Nulls are left out, because TOML has none."""
    return ("\n".join(_table(table, ())) + "\n").encode()


def _table(table: Mapping[str, Json], path: tuple[str, ...]) -> Iterator[str]:
    if path:
        yield f"[{'.'.join(_key(part) for part in path)}]"
    for name, value in table.items():
        if not isinstance(value, dict) and value is not None:
            yield f"{_key(name)} = {_value(value)}"
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _table(value, (*path, name))


def _key(name: str) -> str:
    return name if BARE_KEY.fullmatch(name) else _text(name)


def _value(value: Json) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return f"[{', '.join(_value(part) for part in value)}]"
    return json.dumps(value)


def _text(value: str) -> str:
    """A TOML string. JSON's form is valid TOML except for DEL, which TOML requires to be escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def mcp_server_json(
    server: McpServerSpec, *, url: str = "url", kinds: tuple[str, str] | None = None
) -> dict[str, Json]:
    """An MCP server in the JSON form that most harnesses read. `url` is the harness's key for a streamable
    HTTP address; `kinds` are its type names for (stdio, http), if it has them.
    """
    stdio = server.command is not None
    kind: dict[str, Json] = {} if kinds is None else {"type": kinds[0] if stdio else kinds[1]}
    if stdio:
        return {**kind, "command": server.command, "args": list(server.args), "env": dict(server.env)}
    return {**kind, url: server.url, "headers": dict(server.headers)}
