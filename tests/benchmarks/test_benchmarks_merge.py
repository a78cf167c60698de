"""The benchmark of merging plays every shape, and tells whether rows and trained tokens are as due. Its times
are for people to judge.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    """The script as a module, beside that of its shapes."""
    sys.path.insert(0, str(FOLDER))
    try:
        import merge as script

        yield script
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("merge", "merge_shapes"):
            sys.modules.pop(name, None)


# At 40 turns: rows that the shape must give to our own sessions, and to calls recorded elsewhere.
DUE = {
    "linear": (1, 1),
    "interleaved": (4, 4),
    "sub-agents": (5, 5),
    "compaction": (5, 5),
    "retries": (5, 5),
    "re-tokenised": (1, 3),
    "mixed": (6, 8),
}


@pytest.mark.parametrize("shape", DUE)
def test_shapes_merge_without_loss(benchmark: Any, shape: str) -> None:
    for way, due in zip(("text", "tokens"), DUE[shape], strict=True):
        found = benchmark.measure(benchmark.Case(shape=shape, turns=40, tokens=4000, way=way))
        assert (found.rows, found.due, found.share) == (due, due, 1.0)
        assert found.right
        assert not evolve(found, rows=due + 1).right
        assert not evolve(found, share=0.99).right
        assert f"| {shape} | 40 | 4000 | {way} | {due} | 100% |" in benchmark.shown(found)


@pytest.mark.parametrize("turns", [10, 50])
def test_mixed_shape_has_six_rows(benchmark: Any, turns: int) -> None:
    assert (
        benchmark.measure(benchmark.Case(shape="mixed", turns=turns, tokens=100 * turns, way="text")).rows
        == 6
    )


def test_every_shape_is_measured(benchmark: Any) -> None:
    assert set(DUE) == set(benchmark.SHAPES) == {shape for shape, *_ in benchmark.QUICK}
    assert {shape for shape, turns, _ in benchmark.FULL if turns == 5000} == set(DUE)
