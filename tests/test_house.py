"""The laws of the house that no linter knows. An exception is listed with its reason, and one that is no
longer needed fails.
"""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(path for path in (ROOT / "polarnode").rglob("*.py") if "stubs" not in path.parts)
ASYNCIO_ROOM = "engine/"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_has_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), (
        "a module opens with what it is and the rule for whoever edits it"
    )


def test_asyncio_and_sglang_stay_inside() -> None:
    pattern = re.compile(r"^\s*(?:import|from) (?:asyncio|sglang|uvloop)\b", re.MULTILINE)
    found = {name_of(path) for path in MODULES if pattern.search(path.read_text())}
    assert all(ASYNCIO_ROOM in name for name in found), found


def imported_by_tests() -> set[str]:
    """Every module that a test or a kit of theirs imports, and every dotted name that stands in one as text."""
    found: set[str] = set()
    for path in set((ROOT / "tests").rglob("*.py")) - {Path(__file__)}:
        source = path.read_text()
        found.update(re.findall(r"polarnode(?:\.\w+)+", source))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module:
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_every_module_is_imported_by_tests() -> None:
    imported = imported_by_tests()
    silent = {
        dotted
        for path in MODULES
        if path.name not in ("__init__.py", "__main__.py")
        and (dotted := ".".join(path.relative_to(ROOT).with_suffix("").parts)) not in imported
    }
    assert silent == set(TESTED_ELSEWHERE), "each module has a test that imports it"


# The child process around SGLang is driven as a program (tests/engine/test_engine_real.py and its neighbours); the others
# by the module that calls them.
TESTED_ELSEWHERE = {
    "polarnode.engine.embedded.cpu_attention",
    "polarnode.engine.embedded.cpu_platform",
    "polarnode.tokens.syntax.harmony",
}


def test_no_machine_path_is_committed() -> None:
    """No home, no scratch folder, no registry host: a checkout works anywhere."""
    listed = (
        subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
        .stdout.decode()
        .split("\0")
    )
    pattern = re.compile(
        r"/work/(?:main|shared)|/root/\.|registry\.npmjs|pypi\.org|docker\.io|files\.pythonhosted|deb\.debian\.org"
    )
    found = []
    for name in filter(None, listed):
        path = ROOT / name
        if path == Path(__file__) or not path.is_file() or path.suffix in {".safetensors", ".json"}:
            continue
        found += [f"{name}: {hit[0]}" for hit in pattern.finditer(path.read_text(errors="replace"))]
    assert found == []
