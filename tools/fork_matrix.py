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
TESTS = (
    "tests/live/test_forks_live.py",
    "tests/live/test_forks_resumed.py",
    "tests/live/test_forks_frozen.py",
)
FROZEN_FORKS = 10  # of each harness
PAGE = ROOT / "docs" / "forks.md"
PART, FROZEN = "matrix", "frozen"
HEAD = (
    "| case | version | forked before turn | path key | prompt | workspace | requests to its end | seconds to"
    " its first request | KiB of files |\n|---|---|---|---|---|---|---|---|---|\n"
)
FROZEN_HEAD = (
    "| harness | version | forks | exact | held, s | MiB | submitted to first token sampled anew, p50, s |\n"
    "|---|---|---|---|---|---|---|\n"
)
FROZEN_COLUMNS = ("frozen", "version", "forks", "exact", "held", "megabytes", "seconds")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        environment = {
            **os.environ,
            "POLARNODE_FORKS": ",".join(sys.argv[1:]) or "all",
            "POLARNODE_FROZEN_FORKS": str(FROZEN_FORKS),
            "POLARNODE_MATRIX_OUT": str(out),
        }
        program = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *TESTS]
        code = subprocess.run(program, cwd=ROOT, env=environment, check=False).returncode
        rows = [json.loads(each) for each in out.read_text().splitlines()]
    write_table(PAGE, PART, HEAD, {row["case"]: line(row) for row in rows if "case" in row})
    frozen = {row["frozen"]: cells(row, FROZEN_COLUMNS) for row in rows if "frozen" in row}
    write_table(PAGE, FROZEN, FROZEN_HEAD, frozen)
    return code


def cells(row: dict[str, Any], columns: tuple[str, ...]) -> str:
    return "| " + " | ".join(str(row[name]) for name in columns) + " |\n"


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
