"""The wheel of this checkout, built once a test run, and environments that have nothing but what is put into them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
# what a build reads: with less it fails, or a wheel lacks something that tests/test_wheel.py misses
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
PACKAGES = ("polarnode", "runtimes")
BUILD_S = 120  # seconds for one step of a build or an installation: some 3 s, more on two busy cores


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel file, built from a copy: a build leaves folders in the tree that it is made from."""
    source = tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, source / name)
    return build("wheel", source)


def build(kind: str, source: Path) -> Path:
    """Build the `wheel` or `sdist` of a source tree, into that tree."""
    program = f"from setuptools import build_meta; print(build_meta.build_{kind}('.'))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=source,
        check=True,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
    )
    return source / done.stdout.splitlines()[-1]


def make_environment(folder: Path) -> Path:
    """A virtual environment with nothing in it, not even pip. Returns the folder that it imports from."""
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True, timeout=BUILD_S)
    (packages,) = folder.glob("lib/python*/site-packages")
    return packages


def asked_for(names: list[str]) -> Iterator[str]:
    """Distributions that these requirements bring, each installed here in a version they take."""
    waiting, found = [Requirement(name) for name in names], set[str]()
    while waiting:
        requirement = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = distribution(requirement.name)
        assert requirement.specifier.contains(installed.version), (
            f"{requirement}: {installed.version} is installed"
        )
        if requirement.name not in found:
            found.add(requirement.name)
            yield requirement.name
            waiting += map(Requirement, installed.requires or ())


def link(names: list[str], folder: Path) -> None:
    """Put installed distributions, and what they need, into a folder that Python may import from."""
    for name in asked_for(names):
        for top in {file.parts[0] for file in distribution(name).files or ()} - {"..", "__pycache__"}:
            place = folder / top
            if not place.exists():
                place.symlink_to(Path(str(distribution(name).locate_file(top))))


def run_in(environment: Path, *command: str, more: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a program of an environment in its folder, with nothing of this process's Python but `more`."""
    ours = ("PYTHON", "POLARNODE")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    if more is not None:
        variables["PYTHONPATH"] = str(more)
    return subprocess.run(
        [str(environment / "bin" / command[0]), *command[1:]],
        env=variables,
        cwd=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
