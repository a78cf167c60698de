"""Run sessions of every harness and write the comparison of their rows into docs/token-fidelity.md.

`make meaning` runs everything; `meaning.py FOLDER` reads what a run left there. There are two kinds of
sessions, all at temperature 1 unless their line says otherwise, all kept: the policy alone, from `polarnode
run`; and after a script that leads it into a harness's work, from tests/live/test_meaning_live.py. Nothing is
judged or selected here.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from page import ROOT, write_part

from polarnode.harnesses import HARNESSES

PAGE = ROOT / "docs" / "token-fidelity.md"
SAMPLES = 3
USUAL = {"temperature": 1.0, "max_tokens": 256}
# nearly uniform, so cut by its length: Claude Code asks for the rest, again and again
CUT = {"temperature": 100.0, "max_tokens": 48}


def main() -> int:
    given = Path(sys.argv[1]) if sys.argv[1:] else None
    folder = given or ROOT / "out" / "meaning" / time.strftime("%Y%m%d-%H%M%S")
    if given is None:
        folder.mkdir(parents=True)
        alone(folder)
        led(folder)
    files = [str(file) for file in (folder / "trajectories.jsonl", folder / "led.jsonl") if file.exists()]
    program = [sys.executable, "-m", "examples.meaning", *files, "--requests", str(folder / "requests")]
    done = subprocess.run(program, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    write_part(PAGE, "meaning", done.stdout)
    return done.returncode


def alone(folder: Path) -> None:
    """The policy alone. A session that ends in an error is kept too, with what it has."""
    # a shell has no work of its own
    tasks = [task_file(folder, name, {"name": name}, USUAL) for name in sorted(HARNESSES) if name != "shell"]
    tasks.append(task_file(folder, "claude_code_cut", {"name": "claude_code"}, CUT))
    options = [
        "--cpu",
        "--run-limit",
        "2",
        "--record-requests",
        str(folder / "requests"),
        "--out",
        str(folder),
    ]
    subprocess.run([ROOT / ".venv" / "bin" / "polarnode", "run", *options, *tasks], cwd=ROOT, check=False)


def task_file(folder: Path, name: str, harness: dict[str, Any], sampling: dict[str, Any]) -> Path:
    task = {
        "instruction": "Read /work/info.txt and write the same word to /work/out.txt.",
        "num_samples": SAMPLES,
        "harness": harness,
        "runtime": {"files": [{"path": "info.txt", "text": "silver\n"}]},
        "budgets": {"run_s": 600, "max_turns": 8},
        "sampling": sampling,
    }
    file = folder / f"{name}.json"
    file.write_text(json.dumps(task))
    return file


def led(folder: Path) -> None:
    environment = {**os.environ, "POLARNODE_MATRIX": "all", "POLARNODE_MEANING_OUT": str(folder)}
    program = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "harness",
        "-p",
        "no:cacheprovider",
        "tests/live/test_meaning_live.py",
    ]
    subprocess.run(program, cwd=ROOT, env=environment, check=False)


if __name__ == "__main__":
    sys.exit(main())
