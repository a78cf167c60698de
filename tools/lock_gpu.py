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

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "tools" / "constraints-gpu.txt"
DEBIAN_12 = "3.11.2"  # its own Python, which the lock has to admit
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


def too_new(report: Any) -> list[str]:
    """What Debian 12's own Python could not install."""
    return [
        f"{each['metadata']['name']} {each['metadata']['version']} needs Python {wanted}"
        for each in report["install"]
        if DEBIAN_12 not in SpecifierSet(wanted := each["metadata"].get("requires_python", ""))
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        subprocess.run([*pip, "--report", str(report), f"{ROOT}[gpu,test]"], check=True)
        resolved = json.loads(report.read_text())
        if refused := too_new(resolved):
            sys.exit(f"bound these in pyproject.toml: {'; '.join(refused)}")
        found = lines(resolved)
    LOCK.write_text(HEAD + "\n".join(found) + "\n")
    print(f"{LOCK.relative_to(ROOT)}: {len(found)} packages")


if __name__ == "__main__":
    main()
