"""The sessions of a group pass the stages together: who runs next when a place is free."""

from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, field
from session_kit import MemoryNode, session_of_call, town
from trio.abc import Clock

from polarnode.core.errors import EngineError
from polarnode.rollouts.scheduler import Scheduler


@define(eq=False)
class Runs:
    """Harnesses that run for `each` seconds, and the order in which they began, by a letter a session."""

    each: float = 5.0
    lost: set[str] = field(factory=set)  # letters whose first session the machine loses
    began: list[str] = field(factory=list)

    def program(self) -> Any:
        async def run(call: Any) -> int:
            session_id = session_of_call(run, call).session_id
            letter = next(
                each.task_id[0] for each in self.place.scheduler.sessions() if each.session_id == session_id
            )
            self.began.append(letter)
            await trio.sleep(self.each)
            if letter in self.lost:
                self.lost.remove(letter)
                raise EngineError("the host died")
            return 0

        return run

    place: MemoryNode = field(init=False)

    async def submit(self, task_id: str, *takes: float, **more: Any) -> None:
        """A task of one session for each of `takes`, the seconds until its container is there."""
        self.place.runtimes.takes += takes
        self.place.submit(task_id=task_id, num_samples=len(takes), **more)
        await trio.sleep(0.1)  # so that its containers are opened before the next task's


async def order(tmp_path: Path, runs: Runs, *tasks: tuple[str, tuple[float, ...], dict[str, Any]]) -> str:
    """The letters of the sessions in the order in which they ran, one at a time."""
    async with town(tmp_path, {"agent": runs.program()}, live=32, init=32, run=1) as place:
        runs.place = place
        for task_id, takes, more in tasks:
            await runs.submit(task_id, *takes, **more)
    return "".join(runs.began)


async def test_older_group_runs_before_younger(autojump_clock: Clock, tmp_path: Path) -> None:
    # b's containers are there before most of a's: its first runs, its others wait for those of a
    found = await order(tmp_path, Runs(), ("a", (1, 9, 9, 9), {}), ("b", (2, 2, 2, 2), {}))
    assert found == "abaaabbb"


async def test_begun_group_runs_before_older_group(autojump_clock: Clock, tmp_path: Path) -> None:
    """A group that has begun goes on before an older one that has not."""
    found = await order(tmp_path, Runs(), ("a", (3, 3, 3), {}), ("b", (1, 8, 8), {}), ("c", (2, 2), {}))
    # b runs first; then a, which is older than c; b's others are there when a's second ends
    assert found == "baaabbcc"
    found = await order(tmp_path, Runs(each=9.0), ("a", (3, 3, 3), {}), ("b", (1, 8, 8), {}))
    assert found == "bbbaaa"


async def test_priority_goes_before_group_order(autojump_clock: Clock, tmp_path: Path) -> None:
    """A priority goes before groups, and does not end them."""
    found = await order(
        tmp_path,
        Runs(),
        ("a", (1, 1, 1), {}),
        ("low", (0, 0), {"priority": 10}),
        ("high", (7, 7), {"priority": 90}),
    )
    assert found == "lahhaal"


async def test_tasks_share_one_group(autojump_clock: Clock, tmp_path: Path) -> None:
    tasks = [(f"{letter}{number}", (5.0,), {"group_id": letter}) for number in range(4) for letter in "ab"]
    assert await order(tmp_path, Runs(), *tasks) == "aaaabbbb"


async def test_finished_group_name_can_be_reused(autojump_clock: Clock, tmp_path: Path) -> None:
    runs = Runs()
    async with town(tmp_path, {"agent": runs.program()}, live=32, init=32, run=1) as place:
        runs.place = place
        await runs.submit("x", 1, group_id="name")
        await place.over()
        await runs.submit("a", 1, 1)
        await runs.submit("b", 1, 1, group_id="name")
        scheduler: Scheduler = place.scheduler
        assert len(scheduler._cohorts) == 2
    assert "".join(runs.began) == "xaabb"


@pytest.mark.parametrize("retries", [0, 1])
async def test_lost_session_retries_before_younger_groups(
    autojump_clock: Clock, tmp_path: Path, retries: int
) -> None:
    found = await order(
        tmp_path,
        Runs(lost={"a"}),
        ("a", (1, 1), {"budgets": {"retries": retries}}),
        ("b", (1, 1), {}),
        ("c", (1, 1), {}),
    )
    assert found == ("aaabbcc" if retries else "aabbcc")
