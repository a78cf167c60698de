"""Run the live matrix and write its table into docs/harnesses.md.

`make harness-matrix` runs all cases, `harness_matrix.py NAME...` some. A case that was not run keeps its row.
The exit code is that of the tests. Rows are what tests/live/test_harness_matrix.py recorded, failed cases too;
nothing is judged here.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from page import ROOT, write_table

TESTS = ("tests/live/test_harness_matrix.py", "tests/live/test_subagents_live.py")
PAGE = ROOT / "docs" / "harnesses.md"
PART = "matrix"
HEAD = (
    "| case | version | API | shell / write / final | turns | calls beside | lineages | rows | first prompt |"
    " seconds | remarks |\n|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        code = tested(",".join(sys.argv[1:]) or "all", out)
        seen = {
            row["case"]: line(row)
            for row in map(json.loads, out.read_text().splitlines() if out.exists() else ())
        }
    write_table(PAGE, PART, HEAD, seen)
    return code


def tested(cases: str, out: Path) -> int:
    environment = {**os.environ, "POLARNODE_MATRIX": cases, "POLARNODE_MATRIX_OUT": str(out)}
    program = [sys.executable, "-m", "pytest", "-m", "harness", "-p", "no:cacheprovider", *TESTS]
    return subprocess.run(program, cwd=ROOT, env=environment, check=False).returncode


def line(row: dict[str, Any]) -> str:
    result = " / ".join(
        "–" if row[name] is None else "yes" if row[name] else "no" for name in ("shell", "write", "final")
    )
    remarks = "; ".join(
        filter(None, [row["why"], *(f"fails: {problem}" for problem in row["problems"])])
    ).replace("|", "\\|")
    columns = (
        row["case"],
        row["version"],
        row["provider"],
        result,
        row["turns"],
        row["beside"],
        row["lineages"],
        row["rows"],
        row["prompt_tokens"],
        row["seconds"],
        remarks,
    )
    return "| " + " | ".join(map(str, columns)) + " |\n"


if __name__ == "__main__":
    sys.exit(main())
