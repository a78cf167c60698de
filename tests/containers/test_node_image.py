"""runtimes/polarnode/Containerfile, the image of a node: what can be said without building it (docs/deployment.md has
what was tried).
"""

import re
import tomllib
from pathlib import Path

from polarnode.containers.recipes import default_runtimes_dir, read_recipes

ROOT = Path(__file__).parents[2]
RECIPE = (ROOT / "runtimes" / "polarnode" / "Containerfile").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_it_is_no_recipe_of_a_harness() -> None:
    assert "polarnode" not in read_recipes(default_runtimes_dir()).by_name


def test_what_it_copies_is_in_the_repository_and_makes_the_package() -> None:
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", RECIPE, re.MULTILINE) for name in line.split()]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "polarnode", "runtimes"} <= set(copied)


def test_it_installs_what_a_debian_machine_needs() -> None:
    page = (ROOT / "docs" / "upgrading.md").read_text()
    found = re.search(r"^apt-get install --no-install-recommends (.*)$", page, re.MULTILINE)
    assert found is not None
    assert set(found[1].split()) <= set(RECIPE.split())


def test_it_has_the_extras_and_the_sglang_of_the_project() -> None:
    pinned = next(each for each in EXTRAS["gpu"] if each.startswith("sglang=="))
    assert f"--no-deps {pinned};" in RECIPE
    named = re.search(r"^# gpu: .* cpu: .* node: ", RECIPE, re.MULTILINE)
    assert named is not None
    assert {"gpu", "cpu", "node"} <= EXTRAS.keys()


def test_its_first_process_waits_for_monitors_and_passes_arguments_on() -> None:
    assert RECIPE.rstrip().endswith('ENTRYPOINT ["catatonit", "--", "polarnode"]')
