"""Fork a session of every harness that resumes, in each of its APIs, and write the table of docs/forks.md.

`make fork-matrix` runs all cases, `fork_matrix.py NAME...` some. A case that was not run keeps its row. The
exit code is that of the tests. Rows are what tests/live/test_forks_live.py recorded, failed cases too.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from page import ROOT, write_table

# the second, forks of a whole node's sessions, records no rows
TESTS = ("tests/live/test_forks_live.py", "tests/live/test_forks_resumed.py")
PAGE = ROOT / "docs" / "forks.md"
PART = "matrix"
HEAD = (
    "| case | version | forked before turn | path key | prompt | workspace | requests to its end | seconds to"
    " its first request | KiB of files |\n|---|---|---|---|---|---|---|---|---|\n"
)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        environment = {
            **os.environ,
            "POLARNODE_FORKS": ",".join(sys.argv[1:]) or "all",
            "POLARNODE_MATRIX_OUT": str(out),
        }
        program = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *TESTS]
        code = subprocess.run(program, cwd=ROOT, env=environment, check=False).returncode
        seen = {row["case"]: line(row) for row in map(json.loads, out.read_text().splitlines())}
    write_table(PAGE, PART, HEAD, seen)
    return code


def line(row: dict[str, Any]) -> str:
    equal = ("equal" if row[name] else "**other**" for name in ("key", "prompt", "workspace"))
    columns = (
        row["case"],
        row["version"],
        row["turn"],
        *equal,
        row["requests"],
        row["seconds"],
        row["kilobytes"],
    )
    return "| " + " | ".join(map(str, columns)) + " |\n"


if __name__ == "__main__":
    sys.exit(main())
