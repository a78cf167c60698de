"""The harnesses' tools, executed in a temporary directory and reported in the harnesses' own format.

Commands name the workdir; here it is another directory, so its name is replaced on the way in and out. The
format of results was taken from captures (see capture.py).
"""

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from examples.tiny_policy.endpoint import Call
from examples.tiny_policy.tasks import WORKDIR, Task

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
_NOBODY = 65534


class Submitted(Exception):
    """The command ended the session: mini-swe-agent watches the output for one phrase."""


class Workbench:
    """A directory that plays the workdir, and the tools that act on it."""

    def __init__(self, folder: Path, task: Task, trusted: bool = False) -> None:
        self.folder = folder
        self._user = None if trusted or os.geteuid() else _NOBODY
        for name, content in task.files.items():
            (folder / name).write_text(content)
        if self._user:
            self._give_away()

    def _give_away(self) -> None:
        """Give the folder to the user `nobody`, as whom the policy's commands run."""
        for path in (self.folder, *self.folder.iterdir()):
            os.chown(path, _NOBODY, _NOBODY)

    def shell(self, command: str, shell: str = "/bin/sh") -> tuple[int, str]:
        """Exit status and output of a command that believes it is in the workdir."""
        real = command.replace(WORKDIR, str(self.folder))
        try:
            done = subprocess.run(
                [shell, "-c", real],
                cwd=self.folder,
                env=_ENVIRONMENT,
                user=self._user,
                timeout=10,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except (subprocess.TimeoutExpired, ValueError) as failed:
            return 124, str(failed)
        return done.returncode, done.stdout.decode(errors="replace").replace(str(self.folder), WORKDIR)

    def passed(self, task: Task) -> bool:
        """Whether the task's own check passes."""
        return self.shell(task.check)[0] == 0

    def path(self, name: str) -> Path:
        """Where a path of the workdir really is; any other path is taken as missing."""
        return self.folder / name.removeprefix(f"{WORKDIR}/").lstrip("/").replace("..", "_")


def mini_bash(bench: Workbench, command: str) -> str:
    """mini-swe-agent's observation of a command."""
    code, output = bench.shell(command)
    if code == 0 and output.lstrip().split("\n")[0].strip() == SUBMIT:
        raise Submitted
    return f'{{\n  "returncode": {code},\n  "output": {_jinja_json(output[:9999])}\n}}'


def _jinja_json(text: str) -> str:
    """JSON as Jinja's own filter writes it: safe inside HTML."""
    escaped = json.dumps(text)
    for char in "<>&'":
        escaped = escaped.replace(char, f"\\u{ord(char):04x}")
    return escaped


def pi_bash(bench: Workbench, command: str) -> str:
    """Pi's report of a command."""
    code, output = bench.shell(command, "/bin/bash")
    if code == 0:
        return output or "(no output)"
    return "\n\n".join(part for part in (output or "(no output)", f"Command exited with code {code}") if part)


def pi_read(bench: Workbench, path: str) -> str:
    """Pi's report of a file, or of its absence."""
    try:
        return bench.path(path).read_text(errors="replace")
    except OSError:
        absolute = path if path.startswith("/") else f"{WORKDIR}/{path}"
        return f"ENOENT: no such file or directory, access '{absolute}'"


def pi_write(bench: Workbench, path: str, content: str) -> str:
    """Pi's report of a file written."""
    try:
        bench.path(path).parent.mkdir(parents=True, exist_ok=True)
        bench.path(path).write_text(content)
    except OSError as failed:
        return str(failed)
    return f"Successfully wrote {len(content)} bytes to {path}"


def _missing(name: str, needed: tuple[str, ...], given: Mapping[str, object]) -> str:
    lines = [
        f"  - {key}: must have required properties {key}"
        for key in needed
        if not isinstance(given.get(key), str)
    ]
    shown = json.dumps(given, indent=2)
    return f'Validation failed for tool "{name}":\n' + "\n".join(lines) + f"\n\nReceived arguments:\n{shown}"


_Tool = Callable[..., str]
_TOOLS: Mapping[str, Mapping[str, tuple[_Tool, tuple[str, ...]]]] = {
    "mini": {"bash": (mini_bash, ("command",))},
    "pi": {
        "bash": (pi_bash, ("command",)),
        "read": (pi_read, ("path",)),
        "write": (pi_write, ("path", "content")),
    },
}


def use(harness: str, bench: Workbench, call: Call) -> str:
    """What the harness answers to `call`."""
    known = _TOOLS[harness].get(call.name)
    if known is None:
        return f"Tool {call.name} not found"
    tool, needed = known
    given: dict[str, object] = json.loads(call.arguments)
    values = [value for key in needed if isinstance(value := given.get(key), str)]
    if len(values) < len(needed):
        return _missing(call.name, needed, given)
    return tool(bench, *values)
