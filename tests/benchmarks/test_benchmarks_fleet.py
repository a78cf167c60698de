"""The chaos of a fleet in short: a minute's worth of deaths and hangs on three nodes loses and doubles nothing."""

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


async def test_a_short_chaos_loses_and_doubles_no_place(script: Any) -> None:
    found = await script.run(NODES, MINUTES, SEED)
    assert (found["lost"], found["doubled"]) == (0, 0)
    assert found["places"] >= found["tasks"] >= 10, found
    counts = found["counts"]
    assert counts.get("node killed", 0) + counts.get("node stopped", 0) >= 2, found
    assert counts["event: group"] >= found["tasks"], found


def test_a_lost_and_a_doubled_place_are_found(script: Any) -> None:
    front = script.FrontProcess(folder=Path(), nodes="")
    chaos = script.Chaos(nodes=[], fronts=[front], random=random.Random(0))
    chaos.tasks["t"] = 2
    for index in range(2):
        session = {"task_id": "t", "sample_index": index, "session_id": f"s{index}"}
        front.reader.add("trajectory", f"trajectory:s{index}", session)
    with pytest.raises(AssertionError, match="the group of t did not come"):
        front.reader.check(chaos.tasks)
    sessions = [{"sample_index": index, "session_id": f"s{index}"} for index in range(2)]
    front.reader.add("group", "group:t", {"sessions": sessions})
    assert chaos.ended() == 1
    front.reader.check(chaos.tasks)
    other = {"task_id": "t", "sample_index": 1, "session_id": "s2"}
    front.reader.add("trajectory", "trajectory:s2", other)
    with pytest.raises(AssertionError, match="is doubled"):
        front.reader.check(chaos.tasks)
