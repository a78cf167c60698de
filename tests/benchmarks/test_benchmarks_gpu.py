"""The GPU programme: what it does without a GPU, and each of its parts that a CPU can play in small."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def run(out: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--dry-run", "--out", str(out), *more], capture_output=True, text=True
    )


def found(out: Path, part: str) -> Any:
    return json.loads((out / f"{part}.json").read_text())


def test_gpu_parts_refuse_with_reason(tmp_path: Path) -> None:
    done = run(tmp_path, "--parts", "smoke,memory")
    assert done.returncode == 0, done.stderr
    assert "make gpu-test" in found(tmp_path, "smoke")["refused"]
    assert "| memory | refused | a CPU's engine lends no memory" in done.stdout


def test_finished_parts_are_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "start.json").write_text(json.dumps({"part": "start", "figures": {"start_s": 1.5}}))
    done = run(tmp_path, "--parts", "start")
    assert "| start | start_s | 1.5 |" in done.stdout
    assert not (tmp_path / "start.log").exists()


def test_unknown_part_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--parts", "start,speed")
    assert done.returncode == 2
    assert "speed is no part" in done.stderr


def test_failed_part_gives_reason(tmp_path: Path) -> None:
    done = run(tmp_path, "--parts", "start", "--model", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert "| start | failed | exit status 1" in done.stdout
    assert not (tmp_path / "start.json").exists()


@pytest.mark.engine
def test_parts_run_on_a_cpu(tmp_path: Path) -> None:
    """The longest two; `make gpu DRY=1` plays all of them."""
    done = run(tmp_path, "--parts", "throughput,kv")
    assert done.returncode == 0, done.stdout + done.stderr
    throughput, kv = found(tmp_path, "throughput")["figures"], found(tmp_path, "kv")["figures"]
    assert throughput["node_1"] > 0
    assert throughput["bare_4"] > 0
    assert kv["4x_on_known_from_cache"] > kv["4x_off_known_from_cache"]
    assert found(tmp_path, "kv")["versions"]["sglang"]
