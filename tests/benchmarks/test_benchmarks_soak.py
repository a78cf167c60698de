"""The soak plays a whole node with real containers, and tells what stayed behind. Its figures are for people
to judge.
"""

import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script() -> Iterator[Any]:
    """The script as a module."""
    sys.path.insert(0, str(FOLDER))
    try:
        import soak

        yield soak
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("soak", None)


def look(script: Any, ended: int, rss: int, *, live: int = 4) -> Any:
    return script.Look(
        at=float(ended),
        ended=ended,
        live=live,
        rss=rss,
        descriptors=9,
        threads=3,
        processes=2,
        p50=0.0,
        p99=0.01,
        worst=0.02,
    )


def test_slope_counts_only_warm_node(script: Any) -> None:
    growing = [look(script, ended, 1000 + 5 * ended) for ended in range(0, 101, 10)]
    flat = [look(script, ended, min(2000, 100 * ended)) for ended in range(0, 101, 10)]
    assert script.slope(growing, "rss") == pytest.approx(500)
    assert script.slope(flat, "rss") == pytest.approx(0)
    assert script.slope([look(script, 0, 5), look(script, 10, 9)], "rss") == 0


def test_child_processes_are_found_and_recognised(script: Any) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert child.pid in script.descendants(os.getpid())
            seen = {child.pid: script.start_of(child.pid)}
            assert script.alive(seen) == [child.pid]
            assert script.alive({child.pid: "0"}) == []
        finally:
            child.kill()
    assert script.alive(seen) == []


def test_default_options_match_documented_load(script: Any) -> None:
    options: Namespace = script.read_options([])
    assert (options.sessions, options.at_once) == (500, 64)


@pytest.mark.podman
@pytest.mark.usefixtures("podman")
def test_small_soak_leaves_nothing_behind(
    script: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "SETTLE_S", 1.0)
    code = script.main(
        ["--sessions", "4", "--at-once", "2", "--turns", "2", "--think", "0.1", "--tokens", "16"]
    )
    said = capfd.readouterr().out
    assert code == 0, said
    assert "{'completed': 4}" in said
    assert "containers left 0; processes left 0" in said
