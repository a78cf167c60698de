"""A trainer's own code in a program of its own: its packages are in `.venv/oracles`, apart from the tests'."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT_S = 120.0  # a program imports torch and a trainer, and takes seconds


def run_program(name: str, *arguments: Any, stdin: Any = None) -> Any:
    """Run a program of this folder with JSON as its input. Return the JSON that it printed; its errors fail
    the test.
    """
    ended = subprocess.run(
        [sys.executable, Path(__file__).with_name(name), *arguments],
        input=b"" if stdin is None else json.dumps(stdin).encode(),
        capture_output=True,
        check=False,
        timeout=LIMIT_S,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    assert ended.returncode == 0, ended.stderr.decode()[-4000:]
    return json.loads(ended.stdout)
