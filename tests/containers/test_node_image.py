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


def test_node_image_is_no_harness_recipe() -> None:
    assert "polarnode" not in read_recipes(default_runtimes_dir()).by_name


def test_copied_files_make_the_package() -> None:
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", RECIPE, re.MULTILINE) for name in line.split()]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "polarnode", "runtimes"} <= set(copied)


def test_debian_packages_are_installed() -> None:
    page = (ROOT / "docs" / "upgrading.md").read_text()
    found = re.search(r"^apt-get install --no-install-recommends (.*)$", page, re.MULTILINE)
    assert found is not None
    assert set(found[1].split()) <= set(RECIPE.split())


def test_extras_and_sglang_match_project() -> None:
    pinned = next(each for each in EXTRAS["gpu"] if each.startswith("sglang=="))
    assert f"--no-deps {pinned};" in RECIPE
    named = re.search(r"^# gpu: .* cpu: .* node: ", RECIPE, re.MULTILINE)
    assert named is not None
    assert {"gpu", "cpu", "node"} <= EXTRAS.keys()


def test_init_reaps_and_passes_arguments() -> None:
    """The first process waits for monitors and passes its arguments on."""
    assert RECIPE.rstrip().endswith('ENTRYPOINT ["catatonit", "--", "polarnode"]')
