"""Write tools/constraints-gpu.txt: the whole environment of a GPU host, as pip resolves it. `make gpu-lock`.

Nothing is installed, so it needs neither a GPU nor 4 GB: wheels are read for what they ask for.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "tools" / "constraints-gpu.txt"
HEAD = (
    "# The whole environment of a GPU host, resolved for Linux amd64 and Python 3.11 by `make gpu-lock`, which"
    " needs no GPU.\n"
)


def lines(report: Any) -> list[str]:
    """`name==version` of everything that pip's report would install, but ourselves; sorted."""
    found = {
        re.sub(r"[-_.]+", "-", each["metadata"]["name"]).lower(): each["metadata"]["version"]
        for each in report["install"]
    }
    found.pop("polarnode", None)
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        subprocess.run([*pip, "--report", str(report), f"{ROOT}[gpu,test]"], check=True)
        found = lines(json.loads(report.read_text()))
    LOCK.write_text(HEAD + "\n".join(found) + "\n")
    print(f"{LOCK.relative_to(ROOT)}: {len(found)} packages")


if __name__ == "__main__":
    main()
