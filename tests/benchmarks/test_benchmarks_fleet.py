"""The chaos of nodes that share a log, in short: half a minute of deaths and hangs loses and doubles nothing."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
NODES, MINUTES, SEED = 3, 0.4, 3  # what CI has time for; `make fleet-chaos` is the hour


@pytest.fixture
def script() -> Iterator[Any]:
    """The script as a module."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    try:
        import fleet

        yield fleet
    finally:
        sys.path[:] = before
        sys.modules.pop("fleet", None)


async def test_short_chaos_loses_nothing(script: Any) -> None:
    found = await script.run(NODES, MINUTES, SEED)
    assert (found["lost"], found["doubled"]) == (0, 0)
    assert found["places"] >= found["tasks"] >= 10, found
    counts = found["counts"]
    assert sum(count for what, count in counts.items() if what.startswith("disturbed: ")) >= 3, found
    assert counts["event: group"] >= found["tasks"], found


def test_lost_and_doubled_places_are_found(script: Any) -> None:
    chaos = script.Chaos(cluster=None, dsn="", nodes=[], random=random.Random(0))
    reader = chaos.readers["one"]
    chaos.tasks["t1"] = 2
    members = [{"session_id": name, "sample_index": index} for index, name in enumerate(("a", "b"))]
    with pytest.raises(AssertionError, match="the group of t1 did not come"):
        reader.check(chaos.tasks)
    reader.add("group", "group:t1", {"sessions": members})
    for member in members:
        reader.add("trajectory", f"trajectory:{member['session_id']}", {"task_id": "t1", **member})
    reader.check(chaos.tasks)
    reader.add("trajectory", "trajectory:c", {"task_id": "t1", "session_id": "c", "sample_index": 1})
    with pytest.raises(AssertionError, match="is doubled"):
        reader.check(chaos.tasks)
    with pytest.raises(AssertionError, match="names others"):
        reader.add("group", "group:t1", {"sessions": members[::-1]})
