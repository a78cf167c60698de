"""The benchmark of snapshots on a small workspace and real containers."""

import importlib.util
import sys
from pathlib import Path

import pytest

from polarnode.containers.runtimes import NodeRuntimes


@pytest.mark.podman
async def test_small_workspace_is_taken_and_restored(runtimes: NodeRuntimes, tmp_path: Path) -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "snapshots.py"
    spec = importlib.util.spec_from_file_location("benchmark_snapshots", file)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = bench
    spec.loader.exec_module(bench)
    found = await bench.times(runtimes, bench.Size(20, 20_000), 2, tmp_path)
    assert (len(found.held), len(found.restore), found.files >= 20, found.bytes >= 20_000) == (
        2,
        2,
        True,
        True,
    )
    assert found.row().startswith("| 0 MB, ")
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240
