"""Forks by resume on a scheduler with containers in memory and a real journal: what they begin with, when they
are refused, and how one ends that is in another state.

Real harnesses are in tests/live.
"""

import platform
import time
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from keeper_kit import KEEPER_HARNESS, Keeper, programs
from session_kit import life, submit, task

from polarnode.core.codec.json import dump_json, plain
from polarnode.core.errors import Refused, RuntimeFault
from polarnode.core.snapshots import FrozenImage
from polarnode.core.task import ForkSpec, HarnessSpec, RuntimeSpec, SnapshotSpec, TaskSpec
from polarnode.core.trajectory import ForkedFrom, Trajectory
from polarnode.journal import queries
from polarnode.journal.journal import open_journal
from polarnode.rollouts.forks import check_fork, find_frozen, find_snapshot
from polarnode.rollouts.snapshots import archive_path, beside, read_snapshot


async def run(folder: Path, spec: TaskSpec, keeper: Keeper | None = None) -> Trajectory:
    async with life(folder / "journal.sqlite", programs(keeper)) as (_, scheduler, _):
        _, (name,) = await submit(scheduler, spec)
    return await read(folder, name)


async def read(folder: Path, name: str) -> Trajectory:
    async with open_journal(folder / "journal.sqlite", now=time.time) as journal:
        found = await journal.reader.query(queries.trajectory, name)
    assert found is not None
    return found


async def parent_in(folder: Path) -> Trajectory:
    spec = task(harness=KEEPER_HARNESS, snapshot_at=SnapshotSpec(turns=(0, 2)))
    found = await run(folder, spec)
    assert (found.outcome.status, len(found.turns)) == ("completed", 4)
    return found


def fork_of(parent: Trajectory, turn: int = 2, **more: Any) -> TaskSpec:
    return task(harness=KEEPER_HARNESS, fork=ForkSpec(session=parent.session_id, turn=turn), **more)


async def test_fork_resumes_snapshot_with_parent_turns(tmp_path: Path) -> None:
    parent = await parent_in(tmp_path)
    found = await run(tmp_path, fork_of(parent))
    assert found.outcome.status == "completed", found.outcome
    assert found.forked_from == ForkedFrom(session_id=parent.session_id, turn=2, got=2, by="resume")
    assert [turn.index for turn in found.turns] == [0, 1, 2, 3]
    assert [turn.sampled for turn in found.turns[:2]] == [turn.sampled for turn in parent.turns[:2]]
    assert found.turns[2].before_key == parent.turns[2].before_key
    assert found.turns[2].parent == 1
    assert [(left.turn, left.reason) for left in found.left_out] == [(0, "inherited"), (1, "inherited")]
    assert (
        found.trainable_tokens == found.sampled_tokens == sum(len(each.sampled) for each in found.turns[2:])
    )


async def test_state_without_answer_starts_with_instruction(tmp_path: Path) -> None:
    """A state before the first answer is begun with the instruction."""
    parent = await parent_in(tmp_path)
    found = await run(tmp_path, fork_of(parent, 0))
    assert found.outcome.status == "completed", found.outcome
    assert found.forked_from == ForkedFrom(session_id=parent.session_id, turn=0, got=0, by="resume")
    assert len(found.turns) == 4


async def test_different_state_ends_without_retry(tmp_path: Path) -> None:
    """Another state ends with the first difference, and is not tried again."""
    parent = await parent_in(tmp_path)
    found = await run(tmp_path, fork_of(parent, budgets={"retries": 2}), Keeper(says="else"))
    outcome = found.outcome
    assert (outcome.status, outcome.boundary, found.attempt, found.retried_as) == ("error", "fork", 0, None)
    assert outcome.reason == (
        f"turn 2 of session {parent.session_id} cannot be forked by resuming: the resumed request is not the"
        ' recorded one: in message 1 (user), after "user:", it has "else" where "do it" was recorded'
    )
    assert (found.traces, found.sampled_tokens, len(found.turns)) == ((), 0, 2)


async def test_silent_harness_is_no_fork(tmp_path: Path) -> None:
    """A harness that asks for no answer is no fork."""
    parent = await parent_in(tmp_path)
    found = await run(tmp_path, fork_of(parent), Keeper(ends=0))
    assert (found.outcome.status, found.outcome.boundary) == ("error", "fork")
    assert "ended without asking for it again" in str(found.outcome.reason)


async def test_container_death_is_retried(tmp_path: Path) -> None:
    """A container that dies is the machine's fault, and the fork is tried again."""
    parent = await parent_in(tmp_path)
    broken = Keeper(ends=RuntimeFault("the container died"))
    first = await run(tmp_path, fork_of(parent, budgets={"retries": 1}), broken)
    second = await read(tmp_path, str(first.retried_as))
    assert [each.outcome.boundary for each in (first, second)] == ["runtime", "runtime"]
    assert second.attempt == 1


async def test_missing_snapshot_ends_fork(tmp_path: Path) -> None:
    parent = await parent_in(tmp_path)
    archive_path(tmp_path, parent.session_id, 2).unlink()
    found = await run(tmp_path, fork_of(parent, budgets={"retries": 2}))
    assert (found.outcome.status, found.outcome.boundary, found.attempt) == ("error", "fork", 0)
    assert "there is no snapshot" in str(found.outcome.reason)


# ── what is refused when it is submitted ──────────────────────────────────────


async def refused(folder: Path, spec: TaskSpec, parent: Trajectory, *, image: str | None = None) -> Refused:
    async with life(folder / "journal.sqlite", programs()) as (_, scheduler, place):
        if image is not None:
            place.runtimes.images[spec.runtime.image] = image
        harness = scheduler.admission.admit(spec).harness
        assert spec.fork is not None
        with pytest.raises(Refused) as found:
            await find_snapshot(scheduler.services.snapshots, spec, spec.fork, harness)
    return found.value


async def test_unrunnable_fork_is_refused(tmp_path: Path) -> None:
    parent = await parent_in(tmp_path)
    spec = fork_of(parent)
    shell = evolve(spec, harness=HarnessSpec(name="shell", command=("keeper",)))
    error = await refused(tmp_path, shell, parent)
    assert (error.path, "use one of claude_code, codex, pi" in str(error)) == ("$.fork.by", True)
    error = await refused(tmp_path, fork_of(parent, 1), parent)
    assert (error.path, "there are some at 0, 2" in str(error)) == ("$.fork.turn", True)


IMAGE = FrozenImage(
    bytes=1,
    number=2,
    shift=0,
    container="c",
    name="n",
    root="/r",
    image_id="sha256:0",
    machine=platform.release(),
    processes=(),
)


@pytest.mark.parametrize(
    ("image", "changes", "obstacle", "path", "sentence"),
    [
        (None, {}, None, "$.fork.turn", "at turn 2: its task did not ask for snapshot_at.freeze"),
        (evolve(IMAGE, machine="2.4"), {}, None, "$.fork.turn", "was frozen on Linux 2.4"),
        (evolve(IMAGE, image_id="sha256:1"), {}, None, "$.fork.turn", "the image of its container is gone"),
        (IMAGE, {}, "criu is not installed", "$.fork.by", "cannot freeze sessions: criu is not installed"),
        (IMAGE, {"runtime": RuntimeSpec(memory_mb=999)}, None, "$.runtime", "runtime must be that of"),
        (IMAGE, {}, None, None, ""),
    ],
)
async def test_uncopyable_frozen_fork_is_refused(
    tmp_path: Path,
    image: FrozenImage | None,
    changes: dict[str, Any],
    obstacle: str | None,
    path: str | None,
    sentence: str,
) -> None:
    parent = await parent_in(tmp_path)
    fork = ForkSpec(session=parent.session_id, turn=2, by="freeze")
    spec = evolve(fork_of(parent), fork=fork, **changes)
    kept = evolve(read_snapshot(tmp_path, parent.session_id, 2), frozen=image)
    beside(archive_path(tmp_path, parent.session_id, 2)).write_bytes(dump_json(plain(kept)))
    async with life(tmp_path / "journal.sqlite", programs()) as (_, scheduler, place):
        parents, snapshots = scheduler.services.parents, scheduler.services.snapshots
        place.runtimes.freezing_obstacle = obstacle
        found = check_fork(spec, fork, await parents.parent(fork))
        if path is None:
            assert await find_frozen(snapshots, spec, fork, found) == kept
            return
        with pytest.raises(Refused) as error:
            await find_frozen(snapshots, spec, fork, found)
        assert (error.value.path, sentence in str(error.value)) == (path, True), error.value
