"""An installed wheel, in an environment of its own in another folder, works without the checkout: it has the recipes of
images, the embedded model and the licence, and its commands read the README's first task.
"""

import json
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Mapping
from email.message import Message
from email.parser import Parser
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from wheel_kit import BUILD_S, PACKAGES, ROOT, SOURCES, build, link, make_environment, run_in

from polarnode.containers.recipes import default_runtimes_dir, read_recipes

PROJECT: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEBIAN_12 = "3.11.2"  # its own Python, which `make setup` takes
DIGESTS = """
import json
from polarnode.containers.recipes import default_runtimes_dir, read_recipes
from polarnode.node.config import TINY_MODEL
folder = default_runtimes_dir()
digests = {name: recipe.digest for name, recipe in read_recipes(folder).by_name.items()}
print(json.dumps({"folder": str(folder), "digests": digests, "model": str(TINY_MODEL)}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """An environment with the wheel, as pip installs it, and what `polarnode[node]` asks for."""
    environment = tmp_path_factory.mktemp("installed") / "environment"
    packages = make_environment(environment)
    pip = (sys.executable, "-m", "pip", "--python", str(environment), "--disable-pip-version-check")
    subprocess.run(
        [*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], check=True, timeout=BUILD_S
    )
    link([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["node"]], packages)
    return environment


def test_lock_runs_on_debian_12() -> None:
    """pip refuses a pinned package that wants a newer one, and `make setup` would end there."""
    wanted = {
        f"{found.name}=={found.version}": found.metadata.get("Requires-Python") for found in distributions()
    }
    assert {
        name: versions for name, versions in wanted.items() if DEBIAN_12 not in SpecifierSet(versions or "")
    } == {}


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(opened.read(name).decode())


def first_task() -> str:
    """The task file of the README's first rollout."""
    found = re.search(r"```toml\n# hello\.toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


# ── what is in it ─────────────────────────────────────────────────────────────


def test_wheel_has_every_file(wheel: Path) -> None:
    """The wheel has every file of the package, and the recipes."""
    wanted = {
        ("" if name == "polarnode" else "polarnode/") + path.relative_to(ROOT).as_posix(): path.read_bytes()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with ZipFile(wheel) as opened:
        found = {name: opened.read(name) for name in opened.namelist() if ".dist-info/" not in name}
    assert found.keys() == wanted.keys()
    assert [name for name, content in wanted.items() if found[name] != content] == []


def test_sdist_has_all_wheel_sources(wheel: Path) -> None:
    source = build("sdist", wheel.parent)
    with tarfile.open(source) as opened:
        found = {name.partition("/")[2] for name in opened.getnames()}
    recipes = {path.relative_to(ROOT).as_posix() for path in (ROOT / "runtimes").rglob("*") if path.is_file()}
    assert {*SOURCES, *recipes, "polarnode/models/tiny/model.safetensors"} <= found


def test_recipes_are_not_executable() -> None:
    """No recipe is a program, because pip keeps no other mode."""
    assert [
        path for path in (ROOT / "runtimes").rglob("*") if path.is_file() and path.stat().st_mode & 0o111
    ] == []


def test_licence_is_declared_and_included(wheel: Path) -> None:
    declared = metadata(wheel)
    assert (declared["License-Expression"], declared["License-File"]) == ("Apache-2.0", "LICENSE")
    with ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
        text = opened.read(name).decode()
    assert text == (ROOT / "LICENSE").read_text()
    assert text.split()[:6] == ["Apache", "License", "Version", "2.0,", "January", "2004"]
    assert "END OF TERMS AND CONDITIONS" in text


def test_extras_name_installable_packages(wheel: Path) -> None:
    declared = metadata(wheel)
    asked = [Requirement(line) for line in declared.get_all("Requires-Dist", [])]
    extras = {
        name: [each for each in asked if each.marker is not None and each.marker.evaluate({"extra": name})]
        for name in declared.get_all("Provides-Extra", [])
    }
    assert extras.keys() == PROJECT["optional-dependencies"].keys()
    for name, found in extras.items():
        wanted = {Requirement(line).name for line in PROJECT["optional-dependencies"][name]}
        assert {each.name for each in found} == wanted
        within = {inner for each in found if each.name == "polarnode" for inner in each.extras}
        assert within <= extras.keys(), f"{name} asks for an extra that is not there"
    assert {each.name: each.extras for each in extras["gpu"]} == {"polarnode": {"node"}, "sglang": set()}


# ── what it does ──────────────────────────────────────────────────────────────


def test_recipes_match_the_checkout(installed: Path) -> None:
    """The recipes are its own, with the digests of the checkout."""
    done = run_in(installed, "python", "-P", "-c", DIGESTS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert default_runtimes_dir() == ROOT / "runtimes"
    ours = read_recipes(default_runtimes_dir()).by_name
    assert found["digests"] == {name: recipe.digest for name, recipe in ours.items()}
    for place in (found["folder"], found["model"]):
        assert Path(place).is_relative_to(installed), "it is in the environment, not in the checkout"
        assert Path(place).is_dir()


def test_commands_start_and_find_recipes(installed: Path) -> None:
    helped = run_in(installed, "polarnode", "--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "polarnode doctor" in helped.stdout
    examined = run_in(installed, "polarnode", "doctor", "--engine", "simulated")
    (line,) = (line for line in examined.stdout.splitlines() if "runtimes:" in line)
    assert line.startswith("✓ runtimes: base"), examined.stdout + examined.stderr
    assert "pi (for pi)" in examined.stdout


def test_readme_first_task_is_read(installed: Path) -> None:
    (installed / "hello.toml").write_text(first_task())
    shown = run_in(installed, "polarnode", "convert", "--out", "-", "hello.toml")
    assert shown.returncode == 0, shown.stderr
    task = json.loads(shown.stdout)
    assert (task["harness"]["name"], task["num_samples"]) == ("pi", 4)
