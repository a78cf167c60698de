"""Run an unmodified harness once, in a temporary directory, against an endpoint on loopback.

The directory is mounted over the workdir in its own mount namespace, so the harness sees the same path as in
production. The environment starts empty: no variable of ours reaches the harness.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

WORKDIR = "/work"
KEY = "not-a-real-key"
_MOUNT = 'mount --bind "$1" "$2" && cd "$2" && shift 2 && exec "$@"'


@dataclass(frozen=True)
class Finished:
    """How a harness run ended."""

    code: int
    output: str


def find(name: str, given: str | None = None) -> str:
    """The harness's executable: as given, by `TINY_POLICY_<NAME>`, or from PATH."""
    found = given or os.environ.get(f"TINY_POLICY_{name.upper()}") or shutil.which(name)
    if not found:
        raise SystemExit(
            f"no {name} executable: install it, then put it on PATH or set TINY_POLICY_{name.upper()}"
        )
    return str(Path(found).absolute())


def pi_command(program: str, prompt: str) -> list[str]:
    """Pi, headless, with the model of `pi_home`."""
    return [program, "-p", prompt, "--provider", "local", "--model", "local-model"]


def mini_command(program: str, prompt: str) -> list[str]:
    """mini-swe-agent, headless, without asking and without a limit on cost."""
    return [
        program,
        "-m",
        "openai/local-model",
        "-t",
        prompt,
        "-y",
        "-l",
        "0",
        "--exit-immediately",
        "-o",
        "/tmp/trajectory.json",
    ]


COMMANDS = {"pi": pi_command, "mini": mini_command}


def environment(program: str, home: Path, url: str) -> dict[str, str]:
    """What both harnesses need, and nothing that calls home."""
    path = os.pathsep.join(
        [str(Path(program).parent), *_tool_folders(), "/usr/local/bin", "/usr/bin", "/bin"]
    )
    return {
        "HOME": str(home),
        "PATH": path,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "LOCAL_API_KEY": KEY,
        "PI_OFFLINE": "1",
        "PI_SKIP_VERSION_CHECK": "1",
        "PI_TELEMETRY": "0",
        "OPENAI_API_BASE": url,
        "OPENAI_API_KEY": KEY,
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def _tool_folders() -> list[str]:
    """The folder of Node, for a launcher that finds it through `env`."""
    node = shutil.which("node")
    return [str(Path(node).parent)] if node else []


def write_pi_models(home: Path, url: str) -> None:
    """Pi reads its providers from a file in its home."""
    model = {
        "id": "local-model",
        "name": "local-model",
        "reasoning": False,
        "input": ["text"],
        "contextWindow": 65536,
        "maxTokens": 8192,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {"baseUrl": url, "api": "openai-completions", "apiKey": "LOCAL_API_KEY", "models": [model]}
    folder = home / ".pi" / "agent"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models.json").write_text(json.dumps({"providers": {"local": provider}}))


def run(
    name: str, program: str, prompt: str, folder: Path, home: Path, url: str, limit: float = 120
) -> Finished:
    """Run harness `name` on `prompt` in `folder`, seen as WORKDIR; a run past `limit` seconds is ended."""
    home.mkdir(parents=True, exist_ok=True)
    write_pi_models(home, url)
    command = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        _MOUNT,
        "sh",
        str(folder),
        WORKDIR,
        *COMMANDS[name](program, prompt),
    ]
    try:
        done = subprocess.run(
            command,
            env=environment(program, home, url),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired as late:
        return Finished(124, str(late))
    return Finished(done.returncode, done.stdout + done.stderr)
