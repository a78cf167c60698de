"""A group that has enough ends its siblings, at every place they may be at; and none is begun again, not even
by another life of the node.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import trio
from attrs import evolve
from fakes_runtime import Call, ProgramFunction
from journal_samples import make_identity, make_trajectory
from journal_writes import cancel_task, publish_end, submit_task
from session_kit import MemoryNode, agent, task, town
from session_kit import life as life_of_node
from trio.abc import Clock

from polarnode.core.errors import RuntimeFault
from polarnode.core.task import GroupSpec, TaskSpec
from polarnode.groups import EARLY_STOP_REASON, read_group, stopped_early
from polarnode.journal import queries
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.port import NodeFacts
from polarnode.rollouts.recovery import recover
from polarnode.rollouts.scheduler import Scheduler

GONE = RuntimeFault("the container is gone")


def paced(*runs: float | Exception) -> ProgramFunction:
    """A harness whose first run makes one turn of so many seconds, or one of a second and then fails so; its
    second likewise. Further ones take for ever.
    """
    left = list(runs)

    async def program(call: Call) -> int:
        now = left.pop(0) if left else 1e6
        run: Any = agent(turns=1, each=now) if isinstance(now, float) else agent(turns=1, each=1.0, ends=now)
        run.sessions_by_key = program.sessions_by_key  # type: ignore[attr-defined]
        return int(await run(call))

    return program


def wanting(enough: int, **more: Any) -> GroupSpec:
    return GroupSpec(early_stop_min=enough, **more)


def ends(place: MemoryNode) -> dict[int, str]:
    """How the session that holds each place ended: its reward, or its outcome's reason."""
    return {
        each.sample_index: str(each.outcome.reason if each.reward is None else each.reward)
        for each in place.published
        if each.retried_as is None
    }


# ── in a node ─────────────────────────────────────────────────────────────────


async def test_running_siblings_end_with_turns(autojump_clock: Clock, tmp_path: Path) -> None:
    """Siblings that run end with the turns that they have."""
    async with town(tmp_path, {"agent": paced(10.0, 20.0, 40.0, 50.0)}) as place:
        ids = place.submit(num_samples=4, evaluator="COUNTS", group=wanting(2))
        await place.over()
        assert trio.current_time() < 40, "nobody waits for the slow"
        assert sorted(ends(place).values()) == ["1.0", "1.0", "early stop in run", "early stop in run"]
        cut = [each for each in place.published if stopped_early(each.outcome)]
        assert {(each.outcome.status, each.reward) for each in cut} == {("cancelled", None)}
        assert all([turn.state for turn in each.turns] == ["partial"] for each in cut), (
            "with the half turn they had"
        )
        assert sorted(each.session_id for each in place.published) == sorted(ids)
        assert place.log.cancelled == [], "the task was not cancelled, its group had enough"
        assert place.scheduler.registry.tally.groups == {"early": 1}
        assert place.scheduler.registry.tally.stopped_early == 2


async def test_waiting_sessions_never_start(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent(turns=1)}, live=1) as place:
        place.submit(num_samples=4, evaluator="COUNTS", group=wanting(1))
        await place.over()
        assert sorted(ends(place).values()) == ["1.0", *["early stop in init"] * 3]
        assert len(place.runtimes.sessions) == 1, "no container was opened for the others"


async def test_ready_sibling_stops_judged_one_finishes(autojump_clock: Clock, tmp_path: Path) -> None:
    """One that waits to run is stopped, and one that is judged is not."""
    async with town(tmp_path, {"agent": paced(10.0, 11.0)}, run=2) as place:
        place.submit(num_samples=4, evaluator="COUNTS", group=wanting(1))
        await place.over()
        assert sorted(ends(place).values()) == ["1.0", "1.0", "early stop in run", "early stop in run"]
    async with town(tmp_path, {"agent": paced(10.0)}, run=1, post=1) as place:
        place.submit(num_samples=2, evaluator="COUNTS", group=wanting(1))
        await place.until("ready")
        await place.over()
        assert sorted(ends(place).values()) == ["1.0", "early stop in run"], (
            "it had the place to run while its sibling was judged"
        )


async def test_two_simultaneous_ends_both_count(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": paced(10.0, 10.0)}) as place:
        place.submit(num_samples=3, evaluator="COUNTS", group=wanting(1))
        await place.over()
        assert sorted(ends(place).values()) == ["1.0", "1.0", "early stop in run"]
        assert (place.scheduler.registry.tally.groups, place.scheduler.registry.tally.stopped_early) == (
            {"early": 1},
            1,
        )


async def test_only_usable_sessions_count(autojump_clock: Clock, tmp_path: Path) -> None:
    """A failed evaluation and a session without a turn do not count; a harness that failed and was scored
    does.
    """
    async with town(tmp_path, {"agent": agent(turns=1, ends=1)}) as place:
        place.submit(num_samples=3, evaluator="COUNTS", group=wanting(2))
        await place.over()
        assert {each.outcome.status for each in place.published} == {"failed"}
        assert place.scheduler.registry.tally.groups == {"complete": 1}
    async with town(tmp_path, {"agent": agent(turns=1)}) as place:
        place.submit(num_samples=3, evaluator="JUDGES_NOT", group=wanting(1))
        await place.over()
        assert {each.outcome.status for each in place.published} == {"error"}
        assert (place.scheduler.registry.tally.groups, place.scheduler.registry.tally.stopped_early) == (
            {"dropped": 1},
            0,
        )
    async with town(tmp_path, {"agent": agent(turns=0)}) as place:
        place.submit(num_samples=2, evaluator="COUNTS", group=wanting(1))
        await place.over()
        assert sorted(ends(place).values()) == ["0.0", "0.0"]


async def test_other_tasks_are_not_stopped(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent(turns=1, each=10.0)}) as place:
        place.submit(task_id="other", group_id="g", num_samples=2)
        place.submit(task_id="mine", group_id="g", num_samples=2, evaluator="COUNTS", group=wanting(1))
        await place.over()
    assert {each.outcome.status for each in place.published if each.task_id == "other"} == {"completed"}


# ── with what happens besides ─────────────────────────────────────────────────


async def test_place_awaiting_retry_is_stopped(autojump_clock: Clock, tmp_path: Path) -> None:
    """A place that waits for its retry is not over, and is stopped too."""
    async with town(tmp_path, {"agent": paced(1.05, GONE)}) as place:
        place.submit(num_samples=2, group=wanting(1), budgets={"retries": 3}, evaluator=None)
        await place.over()
        assert [each.retried_as is not None for each in place.published] == [True, False, False]
        assert sorted(ends(place).values()) == ["1.0", "early stop in init"]
        assert trio.current_time() < 1.5, "its pause was cut"
        assert len(place.runtimes.sessions) == 2, "it opened no container"


async def test_session_lost_after_stop_not_retried(autojump_clock: Clock, tmp_path: Path) -> None:
    """A session that the machine loses after the stop is not tried again."""
    async with town(tmp_path, {"agent": paced(1.0, 1.0, 1.0)}) as place:
        place.submit(num_samples=3, group=wanting(2), budgets={"retries": 3})
        place.notes.refuse = [TypeError("no")]  # the first to end can not be packed: a fault of the node's
        await place.over()
        lost = [each for each in place.published if each.outcome.boundary == "node"]
        assert len(place.published) == 3 + len([each for each in lost if each.retried_as is not None])
        assert place.scheduler.registry.tally.groups.total() == 1


async def test_trainers_cancel_beside_early_stop(autojump_clock: Clock, tmp_path: Path) -> None:
    """A trainer's cancel beside an early stop stands where it was first."""
    async with town(tmp_path, {"agent": paced(10.0)}) as place:
        place.submit(task_id="t", num_samples=3, evaluator="COUNTS", group=wanting(1))
        await place.until("post")
        assert await place.scheduler.cancel("t")
        await place.over()
        assert sorted(ends(place).values()) == ["1.0", "cancelled in run", "cancelled in run"]
        assert place.scheduler.registry.tally.groups == {"partial": 1}
    async with town(tmp_path, {"agent": paced(10.0)}) as place:
        place.submit(task_id="t", num_samples=3, evaluator="COUNTS", group=wanting(1))
        while not place.published:  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.001)
        await place.scheduler.cancel("t")
        await place.over()
        assert sorted(ends(place).values()) == ["1.0", "early stop in run", "early stop in run"]


async def test_unpublishable_session_delays_no_stop(autojump_clock: Clock, tmp_path: Path) -> None:
    """A session that cannot be published does not hold the stop up."""
    async with town(tmp_path, {"agent": paced(1.0, 5.0)}) as place:
        place.submit(num_samples=3, evaluator="COUNTS", group=wanting(1))
        place.notes.refuse = [TypeError("no"), TypeError("no again")]
        await place.over()
        assert sorted(ends(place).values()) == ["1.0", "early stop in run"]
        assert place.scheduler.registry.tally.groups == {}, "a group with a place nobody knows of is nobody's"
        gone = {each.session_id for each in place.notes.started} - {
            each.session_id for each in place.published
        }
        place.notes.started = [each for each in place.notes.started if each.session_id not in gone]
        place.notes.turns = [turn for turn in place.notes.turns if turn.session_id not in gone]


# ── staleness ─────────────────────────────────────────────────────────────────


async def test_trajectory_records_staleness_at_end(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": paced(10.0, 20.0, 40.0)}) as place:
        served = ["v0"]
        place.scheduler.registry.served_versions = lambda _: served
        place.submit(num_samples=3, evaluator="COUNTS", group=GroupSpec(max_staleness=1))
        await place.until("post")
        await trio.sleep(5)
        served.append("next")
        await trio.sleep(10)
        served.append("and next")
        await place.over()
        assert [each.staleness for each in place.published] == [0, 1, 2]
        assert (place.scheduler.registry.tally.groups, place.scheduler.registry.tally.stale) == (
            {"partial": 1},
            {"drop": 1},
        )


async def test_too_stale_session_does_not_count(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": paced(10.0, 20.0)}) as place:
        place.scheduler.registry.served_versions = lambda _: ("v0", "next")
        place.submit(num_samples=2, evaluator="COUNTS", group=wanting(1, max_staleness=0))
        await place.over()
        assert [(each.reward, each.staleness) for each in place.published] == [(1.0, 1), (1.0, 1)]
        assert (place.scheduler.registry.tally.groups, place.scheduler.registry.tally.stale) == (
            {"dropped": 1},
            {"drop": 2},
        )


async def test_session_marked_stale_counts(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": paced(10.0, 20.0)}) as place:
        place.scheduler.registry.served_versions = lambda _: ("v0", "next")
        place.submit(num_samples=2, evaluator="COUNTS", group=wanting(1, max_staleness=0, stale="mark"))
        await place.over()
        assert sorted(ends(place).values()) == ["1.0", "early stop in run"]
        assert (place.scheduler.registry.tally.groups, place.scheduler.registry.tally.stale) == (
            {"early": 1},
            {"mark": 1},
        ), "the other is unusable for another reason"


# ── another life of the node ──────────────────────────────────────────────────


@asynccontextmanager
async def life(path: Path, program: ProgramFunction) -> AsyncIterator[tuple[Journal, Scheduler]]:
    async with life_of_node(path, {"agent": program}) as (journal, scheduler, _):
        yield journal, scheduler


async def killed(path: Path, spec: TaskSpec, *, over: int) -> None:
    """A life of the node that ended when so many of the task's places were over, and scored."""
    async with open_journal(path, now=time.time) as journal:
        ids = tuple(f"s{index}" for index in range(spec.num_samples))
        submit_task(journal, spec, task_id="t", session_ids=ids, idempotency_key=None)
        for index, session_id in enumerate(ids):
            journal.writer.record_session(evolve(make_identity(session_id, sample_index=index)))
            found = make_trajectory(session_id, sample_index=index)
            for turn in found.turns:
                journal.writer.record_turn(turn)
            if index < over:
                publish_end(journal, found)


async def the_group(path: Path) -> Any:
    async with open_journal(path, now=time.time) as journal:
        page = await journal.reader.events(0)
        (body,) = (event.body for event in page.events if event.kind == "group")
        return read_group(orjson.loads(body))


async def test_recovered_full_group_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    await killed(path, task(num_samples=4, group=wanting(2), budgets={"retries": 2}), over=2)
    async with life(path, agent(each=0.01)) as (journal, scheduler):
        await recover(journal, scheduler, NodeFacts(name="n"), lambda said: None)
        assert scheduler.sessions() == (), "none is begun again"
    group = await the_group(path)
    assert (group.state, [member.why for member in group.members]) == (
        "early",
        [None, None, EARLY_STOP_REASON, EARLY_STOP_REASON],
    )
    async with open_journal(path, now=time.time) as journal:
        stopped = await journal.reader.query(queries.trajectory, "s3")
        assert stopped is not None
        assert (stopped.outcome.status, len(stopped.turns), len(stopped.traces)) == ("cancelled", 1, 1)
        assert (
            stopped.outcome.reason
            == "early stop, and the node ended while the session ran; 1 turns were captured"
        )


async def test_recovered_group_continues_until_enough(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    await killed(path, task(num_samples=5, group=wanting(2), budgets={"retries": 2}), over=1)
    async with life(path, paced(0.01)) as (journal, scheduler):
        await recover(journal, scheduler, NodeFacts(name="n"), lambda said: None)
        while scheduler.log.open_places:  # noqa: ASYNC110 - real time, and short
            await trio.sleep(0.01)
        await scheduler.registry.results.delivered()
        assert scheduler.registry.tally.groups == {"early": 1}
    group = await the_group(path)
    assert (group.state, len(group.members), sum(member.usable for member in group.members)) == (
        "early",
        5,
        2,
    )


@pytest.mark.parametrize("cancelled", [True, False])
async def test_recovered_group_without_early_stop(tmp_path: Path, cancelled: bool) -> None:
    """A recovered group without an early stop is filled as ever."""
    path = tmp_path / "journal.sqlite"
    await killed(path, task(num_samples=3, budgets={"retries": 2}), over=2)
    if cancelled:
        async with open_journal(path, now=time.time) as journal:
            cancel_task(journal, "t")
    async with life(path, agent(each=0.01)) as (journal, scheduler):
        await recover(journal, scheduler, NodeFacts(name="n"), lambda said: None)
    group = await the_group(path)
    assert (group.state, group.members[2].why) == (
        ("partial", "no reward: cancelled") if cancelled else ("complete", None)
    )
