"""The benchmark of the model plane runs: its smallest loads. Its figures are for people to judge."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "model_plane.py"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (
            ["cost", "--agents", "2", "--turns", "3", "--chunks", "--api", "anthropic", "openai_responses"],
            ["anthropic", "openai_responses"],
        ),
        (
            ["paced", "--agents", "1", "--turns", "2", "--api", "google"],
            ["direct", "google", "direct", "google, streamed"],
        ),
        (
            [
                "cost",
                "--agents",
                "2",
                "--turns",
                "2",
                "--chunks",
                "--api",
                "anthropic",
                "--rounds",
                "1",
                "--against",
                str(BENCHMARK.parents[1]),
            ],
            ["anthropic"],
        ),
    ],
)
def test_smallest_load_runs_to_end(arguments: list[str], names: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, str(BENCHMARK), *arguments], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    rows = [line.strip("| ").split(" | ") for line in ran.stdout.splitlines() if line.startswith("| ")][1:]
    assert [cells[0] for cells in rows] == names
    if "--against" in arguments:
        for ratio, low, high in (
            map(float, cells[place].strip(")").replace(" (", " to ").split(" to "))
            for cells in rows
            for place in (4, 7)
        ):
            assert 0 < low <= ratio <= high, ran.stdout
    elif arguments[0] == "cost":
        # all turns but a session's first extend the one before
        assert {cells[10] for cells in rows} == {"67%"}


def test_latency_floor_is_measured() -> None:
    program = [sys.executable, str(BENCHMARK.with_name("plane_least.py")), "--turns", "2"]
    ran = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    name, agents, _, later, _, first = ran.stdout.strip("| \n").split(" | ")
    assert (name, agents) == ("least", "1")
    assert all(float(cell.split(" / ")[0]) > 0 for cell in (later, first))


@pytest.mark.parametrize(
    ("count", "ranks"),
    [(3, (1, 3)), (5, (1, 5)), (6, (1, 6)), (10, (2, 9)), (20, (6, 15)), (30, (10, 21))],
)
def test_median_interval_matches_tables(
    count: int, ranks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are those of the sign test's tables, at 5 % on both sides together."""
    values = [float(value) for value in range(count, 0, -1)]
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    from model_plane import median_interval

    assert median_interval(values) == ranks
