"""Attempts that go on where the machine lost the one before, on a scheduler with containers in memory and a real
journal: what they begin with, what is sampled again, what is trained, and when they begin from the start.

A node that is killed is in tests/live.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve
from keeper_kit import KEEPER_HARNESS, Keeper, programs
from session_kit import life, order, submit, task, town

from polarnode.core.errors import RuntimeFault
from polarnode.core.task import ForkSpec, SnapshotSpec, TaskSpec
from polarnode.core.trajectory import Trajectory
from polarnode.journal import queries
from polarnode.journal.journal import open_journal
from polarnode.merge.trajectory import Identity
from polarnode.rollouts.forks import NoParents, find_continuation
from polarnode.rollouts.snapshots import archive_path, list_snapshots


def spec_of(*turns: int, retries: int = 2, run_s: float = 600.0, **more: Any) -> TaskSpec:
    budgets = {"retries": retries, "run_s": run_s}
    return task(harness=KEEPER_HARNESS, snapshot_at=SnapshotSpec(turns=turns), budgets=budgets, **more)


async def attempts(folder: Path, spec: TaskSpec, keeper: Keeper) -> list[Trajectory]:
    """A task's session and those that took its place, in order."""
    path = folder / "journal.sqlite"
    async with life(path, programs(keeper)) as (_, scheduler, _):
        _, (name,) = await submit(scheduler, spec)
        while scheduler.statistics().live:  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.1)
    found, after = list[Trajectory](), name
    async with open_journal(path, now=time.time) as journal:
        while after:
            trajectory = await journal.reader.query(queries.trajectory, after)
            assert trajectory is not None
            found.append(trajectory)
            after = trajectory.retried_as or ""
    return found


def sampled(found: Trajectory) -> list[tuple[int, ...]]:
    return [tuple(turn.sampled) for turn in found.turns]


async def test_attempt_continues_from_last_snapshot(tmp_path: Path) -> None:
    keeper = Keeper(turns=5, dies={0: 4})
    lost, found = await attempts(tmp_path, spec_of(1, 3), keeper)
    assert (lost.outcome.boundary, found.outcome.status) == ("runtime", "completed")
    assert keeper.begun == [0, 3]
    assert found.continued_from is not None
    assert (found.continued_from.session_id, found.continued_from.turn) == (lost.session_id, 3)
    assert 0 < found.continued_from.run_s < lost.timing.run_s
    assert [turn.index for turn in found.turns] == [0, 1, 2, 3, 4]
    assert sampled(found)[:3] == sampled(lost)[:3]
    # every token of the place is trained once, in the session that holds it
    everything = sum(map(len, sampled(found)))
    assert found.trainable_tokens == found.sampled_tokens == everything
    assert found.metrics["sampled_tokens"] == everything
    assert [left for left in found.left_out if left.reason == "inherited"] == []
    told: Any = found.metrics["snapshots"]
    assert (told["turns"], told["taken"]) == ([3], 0)


async def test_continued_session_continues_again(tmp_path: Path) -> None:
    """A continued session continues again, from its own beginning."""
    keeper = Keeper(turns=6, dies={0: 4, 1: 5})
    first, second, third = await attempts(tmp_path, spec_of(3), keeper)
    assert keeper.begun == [0, 3, 3]
    assert third.outcome.status == "completed"
    assert third.continued_from is not None
    assert (third.continued_from.session_id, third.continued_from.turn) == (second.session_id, 3)
    assert sampled(third)[:3] == sampled(first)[:3]
    # the snapshot is its own: that of the first may be removed
    one, other = (archive_path(tmp_path, each.session_id, 3) for each in (first, third))
    assert one.stat().st_ino == other.stat().st_ino
    assert [each.turn for each in list_snapshots(tmp_path, third.session_id).snapshots] == [3]


@pytest.mark.parametrize(
    "snapshot_at", [SnapshotSpec(), SnapshotSpec(turns=(2,), resume_lost=False)], ids=["none", "off"]
)
async def test_without_snapshots_attempt_starts_over(tmp_path: Path, snapshot_at: SnapshotSpec) -> None:
    keeper = Keeper(dies={0: 3})
    _, found = await attempts(tmp_path, evolve(spec_of(), snapshot_at=snapshot_at), keeper)
    assert (found.outcome.status, found.continued_from, keeper.begun) == ("completed", None, [0, 0])


async def test_no_snapshot_lookup_unless_asked(tmp_path: Path) -> None:
    class Unasked(NoParents):
        async def earlier_attempts(self, place: Identity) -> Any:
            raise AssertionError("the journal was read")

    off = SnapshotSpec(turns=(2,), resume_lost=False)
    first, second = order(spec_of(2)), evolve(order().identity, attempt=1)
    async with town(tmp_path) as place:
        snapshots = place.scheduler.services.snapshots
        for each in (
            first,
            evolve(order(spec_of()), identity=second),
            evolve(order(evolve(spec_of(), snapshot_at=off)), identity=second),
            evolve(
                order(task(snapshot_at=SnapshotSpec(turns=(2,)))), identity=second
            ),  # a harness that cannot
        ):
            assert await find_continuation(each, snapshots, Unasked()) is None


async def test_different_request_starts_over(tmp_path: Path) -> None:
    """Another first request starts the session over, and costs no retry."""
    keeper = Keeper(dies={0: 3}, says="else")
    _, refused, found = await attempts(tmp_path, spec_of(2, retries=1), keeper)
    assert (refused.outcome.status, refused.outcome.boundary) == ("error", "fork")
    assert "the resumed request is not the recorded one" in str(refused.outcome.reason)
    assert refused.continued_from is not None
    assert (found.outcome.status, found.continued_from, found.attempt) == ("completed", None, 2)
    assert keeper.begun == [0, 2, 0]


@pytest.mark.parametrize("ends", [0, RuntimeFault("the container died")], ids=["nothing", "died"])
async def test_unrestored_harness_starts_over(tmp_path: Path, ends: Any) -> None:
    """A harness that does not come back begins from the start."""
    keeper = Keeper(dies={0: 3}, ends=ends)
    _, _, found = await attempts(tmp_path, spec_of(2, retries=1), keeper)
    assert (found.outcome.status, found.continued_from, keeper.begun) == ("completed", None, [0, 0])


async def test_missing_snapshot_falls_back_to_previous(tmp_path: Path) -> None:
    def lose() -> None:
        [last] = tmp_path.glob("*.snapshot-3.json")
        last.unlink()

    keeper = Keeper(turns=5, dies={0: 4}, at_death=lose)
    _, found = await attempts(tmp_path, spec_of(1, 3), keeper)
    assert keeper.begun == [0, 1]
    assert found.continued_from is not None
    assert found.continued_from.turn == 1


async def test_lost_fork_continues_with_inheritance(tmp_path: Path) -> None:
    """A lost fork continues, and what it inherited remains its parent's."""
    [parent] = await attempts(tmp_path, spec_of(1), Keeper(turns=5))
    keeper = Keeper(turns=5, dies={0: 4})
    fork = ForkSpec(session=parent.session_id, turn=1)
    lost, found = await attempts(tmp_path, spec_of(3, fork=fork), keeper)
    assert keeper.begun == [1, 3]
    assert found.forked_from == lost.forked_from
    assert found.forked_from is not None
    assert found.forked_from.got == 1
    assert sampled(found)[:3] == sampled(lost)[:3]
    assert [(each.turn, each.reason) for each in found.left_out] == [(0, "inherited")]
    assert found.trainable_tokens == sum(map(len, sampled(found)[1:]))


async def test_run_budget_continues_after_loss(tmp_path: Path) -> None:
    keeper = Keeper(turns=5, takes=2.0, dies={0: 4})
    lost, found = await attempts(tmp_path, spec_of(3, run_s=9.0), keeper)
    assert 8 <= lost.timing.run_s < 9
    assert found.continued_from is not None
    assert 6 <= found.continued_from.run_s < 7
    assert (found.outcome.status, found.outcome.clock) == ("timeout", "run")
    assert 2 < found.timing.run_s < 5  # what 9 s leave
    assert [turn.state for turn in found.turns] == [*["complete"] * 4, "partial"]
