"""The benchmark of floods runs: a short one. Its figures are for people to judge."""

import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "plane_flood.py"


def test_short_flood_runs_to_end() -> None:
    arguments = ["new", "--rate", "50", "--calls", "3", "--rounds", "1", "--answer", "0"]
    ran = subprocess.run(
        [sys.executable, str(BENCHMARK), *arguments], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    cells = ran.stdout.splitlines()[-1].strip("| ").split(" | ")
    assert cells[0] == "new"
    assert float(cells[1]) > 0, "keys were tried"
    assert float(cells[4]) > 0
