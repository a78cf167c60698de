"""Import paths: refused before anything runs unless the node allows the module."""

import json
import sys
from pathlib import Path

import pytest

from polarnode.core import plugins
from polarnode.core.errors import Refused


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package on disk whose import leaves a mark."""
    (tmp_path / "acme_rewards").mkdir()
    (tmp_path / "acme_rewards" / "__init__.py").write_text("")
    (tmp_path / "acme_rewards" / "good.py").write_text("def score():\n    return 1.0\n")
    (tmp_path / "acme_rewards" / "broken.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "acme_rewards" / "quits.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "acme_rewards"
    for name in [name for name in sys.modules if name.split(".")[0] == "acme_rewards"]:
        del sys.modules[name]


@pytest.mark.parametrize("allowed", [("*",), ("json",), ("other", "json")])
def test_allowed_module_is_imported(allowed: tuple[str, ...]) -> None:
    assert plugins.load("json:dumps", allowed=allowed) is json.dumps


def test_prefix_allows_modules_below(package: str) -> None:
    score = plugins.load(f"{package}.good:score", allowed=(package,))
    assert callable(score)
    assert score() == 1.0


@pytest.mark.parametrize(
    "allowed", [(), ("acme",), ("acme_rewards.good",), ("acme_rewards.broken.more",), ("",)]
)
def test_forbidden_module_is_never_run(package: str, allowed: tuple[str, ...]) -> None:
    with pytest.raises(Refused, match="may not be imported by this node: add it"):
        plugins.load(f"{package}.broken:score", allowed=allowed)
    assert f"{package}.broken" not in sys.modules
    assert package not in sys.modules


@pytest.mark.parametrize(
    "import_path",
    [
        "",
        "json",
        "json:",
        ":dumps",
        "json.dumps",
        "json:a.b",
        "json:dumps:x",
        "../x:y",
        "json :dumps",
        "a..b:c",
        ".json:dumps",
        "json:1",
    ],
)
def test_malformed_import_path_is_refused(import_path: str) -> None:
    with pytest.raises(Refused, match="write it as package"):
        plugins.load(import_path, allowed=("*",))


def test_missing_module_is_named(package: str) -> None:
    with pytest.raises(
        Refused, match=r"importing 'acme_rewards.nothing' failed: No module named 'acme_rewards.nothing'"
    ):
        plugins.load(f"{package}.nothing:score", allowed=("*",))


@pytest.mark.parametrize(("module", "why"), [("broken", "no licence"), ("quits", "division by zero")])
def test_failing_module_is_callers_fault(package: str, module: str, why: str) -> None:
    """A module that fails is the caller's fault, with its cause."""
    with pytest.raises(Refused, match=why) as caught:
        plugins.load(f"{package}.{module}:score", allowed=(package,))
    assert caught.value.__cause__ is not None
    assert caught.value.boundary == "client"


def test_missing_attribute_is_named() -> None:
    with pytest.raises(Refused, match="module 'json' has no attribute 'nothing'"):
        plugins.load("json:nothing", allowed=("json",))
