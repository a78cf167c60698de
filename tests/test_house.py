"""The laws of the house that no linter knows. An exception is listed with its reason, and one that is no longer needed fails."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(path for path in (ROOT / "polarnode").rglob("*.py") if "stubs" not in path.parts)
LONGEST_MODULE = 300  # lines: one noun a file
LONGEST_FUNCTION = 50  # lines

LONG_MODULES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
ASYNCIO_ROOM = "engine_host"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name_of(path)}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "a module opens with what it is and the rule for whoever edits it"


def test_modules_are_short() -> None:
    long = {name_of(path) for path in MODULES if len(path.read_text().splitlines()) > LONGEST_MODULE}
    assert long == set(LONG_MODULES), "split a module over 300 lines into a folder of its name; take back an exception no longer needed"


def test_functions_are_short() -> None:
    long = {name for path in MODULES for name, lines in functions(path) if lines > LONGEST_FUNCTION}
    assert long == set(LONG_FUNCTIONS), "cut a function over 50 lines; take back an exception no longer needed"


def test_asyncio_and_sglang_have_one_room() -> None:
    pattern = re.compile(r"^\s*(?:import|from) (?:asyncio|sglang|uvloop)\b", re.MULTILINE)
    found = {name_of(path) for path in MODULES if pattern.search(path.read_text())}
    assert all(ASYNCIO_ROOM in name for name in found), found


def test_every_module_is_named_by_a_test() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    silent = [name_of(path) for path in MODULES if path.name != "__init__.py" and not _named(path, tests)]
    assert silent == [], "each module has a test that imports it"


def _named(path: Path, tests: str) -> bool:
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    package, _, module = dotted.rpartition(".")
    return dotted in tests or bool(re.search(rf"from {re.escape(package)} import [^\n]*\b{re.escape(module)}\b", tests)) or package in REEXPORTED


REEXPORTED = {
    "polarnode.shell.podman": "its names are imported from the package, whose tests are tests/test_podman_*.py",
    "polarnode.shell.journal": "its names are imported from the package, whose tests are tests/test_journal*.py",
    "polarnode.wire": "its names are imported from the package, whose tests are tests/test_wire_*.py",
    "polarnode.web.control_plane.openapi": "one document, asked and compared as a whole by tests/test_openapi.py and tests/test_openapi_node.py",
    "polarnode.shell.egress": "its names are imported from the package, whose tests are tests/test_egress*.py",
    "polarnode.shell.pressure": "its names are imported from the package, whose tests are in tests/test_pressure.py",
    "polarnode.node": "its names are imported from the package; whole nodes run in tests/test_cli_serve.py and tests/live",
    "polarnode.cli.generate": "driven as a program in tests/test_cli_generate.py",
    "polarnode.cli": "driven as a program in tests/test_cli.py",
    "polarnode.engine_host": "a child process: driven through tests/test_engine_real.py",
}


def test_nothing_of_this_machine_is_committed() -> None:
    """No home, no scratch folder, no registry host: a checkout works anywhere."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    pattern = re.compile(r"/work/(?:main|shared)|/root/\.|registry\.npmjs|pypi\.org|docker\.io|files\.pythonhosted|deb\.debian\.org")
    found = []
    for name in filter(None, listed):
        path = ROOT / name
        if path == Path(__file__) or not path.is_file() or path.suffix in {".safetensors", ".json"}:
            continue
        found += [f"{name}: {hit[0]}" for hit in pattern.finditer(path.read_text(errors="replace"))]
    assert found == []
