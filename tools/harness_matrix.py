"""Runs the whole live matrix and writes its table into docs/harnesses.md: `make harness-matrix`, or some cases: `harness_matrix.py NAME...`.

A case that was not run keeps its row. The exit code is the tests'. Rule for whoever edits it: nothing is judged here; the rows are what
tests/live/test_harness_matrix.py saw, failed cases too.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = ("tests/live/test_harness_matrix.py", "tests/live/test_subagents_live.py")
PAGE = ROOT / "docs" / "harnesses.md"
BEGIN, END = "<!-- matrix -->", "<!-- /matrix -->"
HEAD = (
    "| case | version | API | shell / write / final | turns | calls beside | lineages | rows | first prompt | seconds | remarks |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        code = tested(",".join(sys.argv[1:]) or "all", out)
        seen = {row["case"]: line(row) for row in map(json.loads, out.read_text().splitlines() if out.exists() else ())}
    page = PAGE.read_text()
    PAGE.write_text(written(page, kept(page) | seen))
    return code


def tested(cases: str, out: Path) -> int:
    environment = {**os.environ, "POLARNODE_MATRIX": cases, "POLARNODE_MATRIX_OUT": str(out)}
    program = [sys.executable, "-m", "pytest", "-m", "harness", "-p", "no:cacheprovider", *TESTS]
    return subprocess.run(program, cwd=ROOT, env=environment, check=False).returncode


def kept(page: str) -> dict[str, str]:
    """The lines of the runs before, by case."""
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines(keepends=True)
    return {each.split("|")[1].strip(): each for each in lines if each.startswith("| ") and each not in HEAD}


def written(page: str, lines: dict[str, str]) -> str:
    """The page with the table between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.relative_to(ROOT)} has no {BEGIN} and {END} to write the table between")
    return f"{before}{BEGIN}\n{HEAD}{''.join(lines[case] for case in sorted(lines))}{END}{after}"


def line(row: dict[str, Any]) -> str:
    result = " / ".join("–" if row[name] is None else "yes" if row[name] else "no" for name in ("shell", "write", "final"))
    remarks = "; ".join(filter(None, [row["why"], *(f"fails: {problem}" for problem in row["problems"])])).replace("|", "\\|")
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
