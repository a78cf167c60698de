"""Three real control planes over HTTP, on containers in memory: a fleet's tasks whoever dies."""

from pathlib import Path

import pytest
from homes_kit import task, three, until

pytestmark = pytest.mark.trio


async def test_a_task_is_committed_before_it_is_published(tmp_path: Path) -> None:
    async with three(tmp_path) as fleet:
        await fleet.submit("a", "b", task(places=3))
        a, b = fleet["a"], fleet["b"]

        async def ended() -> bool:
            return "task:t1" in await a.keys()

        await until(ended)
        sessions = await fleet.check_group(3)
        row = await b.row("t1")
        assert row is not None
        assert row.role == "second"
        assert row.open_places == 0
        assert len(sessions) == 3
        assert a.node.homes.held == 0


async def test_without_its_second_home_a_result_waits(tmp_path: Path) -> None:
    async with three(tmp_path) as fleet:
        a = fleet["a"]
        await fleet.submit("a", "b", task(places=2))
        await fleet["b"].kill()
        await fleet.submit("a", "c", task(0.2, places=1), "t2")

        async def second_ended() -> bool:
            return "task:t2" in await a.keys()

        await until(second_ended)
        before = await a.keys("trajectory")
        # whatever was committed before the kill has its event, and no other result of t1
        held = a.node.homes.held
        assert len(before) - 1 + held == 2
        await fleet.replace_second("a", "c")

        async def ended() -> bool:
            return "task:t1" in await a.keys()

        await until(ended)
        row = await fleet["c"].row("t1")
        assert row is not None
        assert (row.role, row.open_places) == ("second", 0)
