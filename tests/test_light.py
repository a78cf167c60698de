"""`pip install polarnode` beside a trainer: the wheel and what it asks for, nothing else, in an environment of its
own. What a trainer imports works there, both clients talk to a node, and a command that cannot run says why.
"""

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from client_kit import Node, open_node
from journal_samples import make_spec
from packaging.requirements import Requirement
from wheel_kit import link, make_environment, run_in

from polarnode.cli.main import NODE_MODULES
from polarnode.client import PolarnodeClient

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "kits" / "light_program.py"
ROOMS = ("core", "groups", "trainers", "client", "sources")
# modules beside the plug-ins that a node serves other projects with
SERVED = {"sglang.py", "sglang_nodes.py", "sglang_operations.py"}
# a plug-in's class extends the trainer's own, or it needs what every trainer has
OF_TRAINERS = {
    *(
        "torch",
        "verl",
        "skyrl",
        "slime",
        "miles",
        "areal",
        "trl",
        "tinker",
        "verifiers",
        "prime_rl",
        "nemo_rl",
    ),
    *("transformers", "atroposlib", "ray", "omegaconf", "tensordict"),
}


class Light:
    """The environment. `more`: distributions beside it, as a trainer's environment may have them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *arguments: str, more: Path | None = None) -> "subprocess.CompletedProcess[str]":
        return run_in(self.folder, "python", "-P", *arguments, more=more)

    def answer(self, *arguments: str) -> Any:
        done = self.run(str(PROGRAM), *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Light:
    environment = tmp_path_factory.mktemp("light") / "environment"
    packages = make_environment(environment)
    with ZipFile(wheel) as opened:
        opened.extractall(packages)
    (metadata,) = packages.glob("polarnode-*.dist-info/METADATA")
    link(
        [line[15:] for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist: ")],
        packages,
    )
    return Light(environment)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A control plane with a task whose two sessions are over."""
    with open_node(tmp_path / "journal.sqlite") as opened:
        PolarnodeClient(opened.url, token="secret").submit(make_spec(task_id="a", num_samples=2))
        opened.publish("a-0", task_id="a", reward=1.0)
        opened.publish("a-1", task_id="a", reward=0.0)
        yield opened


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_trainer_imports_need_no_node(light: Light) -> None:
    """All that a trainer imports needs nothing of a node."""
    ours = [dotted(path) for room in ROOMS for path in sorted((ROOT / "polarnode" / room).rglob("*.py"))]
    assert {name: why for name, why in light.answer("modules", *ours).items() if why is not None} == {}
    modules = sorted((ROOT / "polarnode" / "integrations").glob("*.py"))
    plug_ins = [dotted(path) for path in modules if path.name not in SERVED]
    missing = {name: why.partition(".")[0] for name, why in light.answer("modules", *plug_ins).items() if why}
    assert set(missing.values()) <= OF_TRAINERS, missing


def test_clients_and_projections_work(light: Light, node: Node) -> None:
    assert light.answer("client", node.url) == {
        "submitted": "mine",
        "rows": [["a-0", 1.0, 3], ["a-1", -1.0, 3]],
        "formats": ["verl", "slime", "miles", "trl", "skyrl", "nemo_rl"],
        "asynchronous": ["trajectory:a-0", "trajectory:a-1", "group:a", "task:a"],
    }


def test_client_commands_need_only_click_rich(light: Light, node: Node, tmp_path: Path) -> None:
    """Commands that ask a node need click and rich alone."""
    cli = ("-m", "polarnode.cli")
    where = ("--url", node.url, "--token", "secret")
    sentence = "this needs a node's packages ({} is not installed): pip install 'polarnode[node]'"
    assert light.run(*cli, "watch").stderr.strip() == sentence.format("click")

    more = tmp_path / "more"
    more.mkdir()
    link(["click"], more)
    assert light.run(*cli, "watch", *where, more=more).stderr.strip() == f"Error: {sentence.format('rich')}"
    link(["rich"], more)
    (tmp_path / "task.toml").write_text('task_id = "b"\ninstruction = "do it"\nharness.name = "pi"\n')
    submitted = light.run(*cli, "submit", str(tmp_path / "task.toml"), *where, more=more)
    assert (submitted.returncode, submitted.stdout) == (0, "b\n"), submitted.stderr
    watched = light.run(*cli, "watch", "--task", "a", *where, more=more)
    assert watched.returncode == 0, watched.stderr
    assert "task a is done: 2 completed" in watched.stdout
    exported = light.run(*cli, "export", *where, more=more)
    assert exported.stdout.count('"session_id"') == 2, exported.stderr
    assert "trainable" in light.run(*cli, "inspect", "a-0", *where, more=more).stdout
    for verb in (("run", "--cpu", str(tmp_path / "task.toml")), ("doctor", "--cpu"), ("--cpu",)):
        refused = light.run(*cli, *verb, more=more)
        assert refused.returncode == 1
        assert "pip install 'polarnode[node]'" in refused.stderr


def test_named_modules_match_the_extra() -> None:
    """The modules named in that sentence are those of the extra."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    light = {Requirement(line).name for line in declared["dependencies"]}
    named = NODE_MODULES | {"click"}  # without click there is no command to print the sentence
    found: set[str] = set()
    for name in {Requirement(line).name for line in declared["optional-dependencies"]["node"]} - light:
        modules = {file.parts[0] for file in distribution(name).files or ()} & named
        assert modules, f"{name} is of polarnode[node], and none of its modules is in NODE_MODULES"
        found |= modules
    assert found == named


def test_version_ranges_fit_each_trainer() -> None:
    """Without a network: what `make resolution` found, and what lock files and images pin."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {each.name: each.specifier for each in map(Requirement, declared["dependencies"])}
    trainers = tomllib.loads((ROOT / "tools" / "resolution.toml").read_text())
    pinned = [pin for trainer in trainers.values() for pin in trainer.get("locked", {}).items()]
    for trainer in trainers.values():
        for each in map(Requirement, trainer.get("requires", ())):
            pinned += [(each.name, spec.version) for spec in each.specifier if spec.operator == "=="]
    page = (ROOT / "docs" / "trainers" / "environment.md").read_text()
    table = page.partition("<!-- resolution -->")[2].partition("<!-- /resolution -->")[0]
    assert all(name.partition(",")[0] in table for name in trainers), "run `make resolution`"
    assert "cannot be resolved" not in table
    pinned += re.findall(r"(numpy|attrs|anyio|orjson|msgpack) (\d[\w.]*)", table)
    ours = [(name, version) for name, version in pinned if name in ranges]
    assert {name for name, _ in ours} >= {"numpy", "attrs", "anyio", "orjson", "msgpack"}
    assert [(name, version) for name, version in ours if not ranges[name].contains(version)] == []
