"""A node that was killed: what its sessions had is published at its next start, once, and within the laws;
and their places are filled again.
"""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import merge_toys as toys
import pytest
import trio
from attrs import evolve
from fakes_runtime import ProgramFunction
from journal_samples import make_identity, make_spec, make_trajectory
from journal_writes import cancel_task, publish_attempt, submit_task
from session_kit import agent, scheduling, task, town

from polarnode.core.task import Budgets, BuilderSpec, HarnessSpec, TaskSpec
from polarnode.core.trajectory import Built
from polarnode.journal import queries
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.port import LogUnavailable, NodeFacts
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.journal.values import EventFilters
from polarnode.merge.invariants import check
from polarnode.rollouts.recovery import recover
from polarnode.rollouts.scheduler import Scheduler
from polarnode.rollouts.services import NodeIdentity

NODE = NodeFacts(name="n1")


def ran(
    journal: Journal, session_id: str, *, task_id: str = "t", turns: int = 0, cut: bool = False
) -> toys.Session:
    """A session that is under way in the journal, with this many turns and perhaps one that was cut."""
    journal.writer.record_session(make_identity(session_id, task_id=task_id))
    session, history = toys.Session(session_id), [toys.user()]
    for _ in range(turns):
        _, message = session.say(toys.ask(*history), "an answer")
        history += [message, toys.user("more")]
    if cut:
        session.say(toys.ask(*history), "half a", state="partial")
    for turn in session.turns:
        journal.writer.record_turn(turn)
    return session


def once(**more: Any) -> TaskSpec:
    """A task whose places are not given again."""
    return make_spec(budgets=Budgets(retries=0), **more)


def submitted(journal: Journal, *session_ids: str, spec: TaskSpec | None = None) -> None:
    submit_task(
        journal,
        spec or once(metadata={"split": "train"}),
        task_id="t",
        session_ids=session_ids,
        idempotency_key=None,
    )


@asynccontextmanager
async def life(
    path: Path, *, import_paths: tuple[str, ...] = (), programs: Mapping[str, ProgramFunction] | None = None
) -> AsyncIterator[tuple[Journal, Scheduler]]:
    """A life of the node: its journal, and its scheduler over containers in memory. Leaving it waits for the
    sessions.
    """
    async with (
        open_journal(path, now=time.time) as journal,
        town(path.parent, programs or {"agent": agent(each=0.01)}) as place,
    ):
        log, identity = SqliteLog(journal), NodeIdentity(node="n1", model="tiny-2")
        async with scheduling(
            log, place, journal.writer, identity=identity, allowed_imports=import_paths
        ) as scheduler:
            yield journal, scheduler


async def recovered(path: Path, said: list[str], *, import_paths: tuple[str, ...] = ()) -> None:
    async with life(path, import_paths=import_paths) as (journal, scheduler):
        await recover(journal, scheduler, NODE, said.append)


async def test_earlier_sessions_become_interrupted_trajectories(tmp_path: Path) -> None:
    path, said = tmp_path / "journal.sqlite", list[str]()
    async with open_journal(path, now=time.time) as journal:
        submitted(journal, "with-turns", "without")
        session = ran(journal, "with-turns", turns=3, cut=True)
        ran(journal, "without")
    await recovered(path, said)
    assert said == [
        "2 sessions of an earlier run were interrupted; their turns are kept, and 0 of them are tried again"
    ]
    async with open_journal(path, now=time.time) as journal:
        found = await journal.reader.query(queries.trajectory, "with-turns")
        assert found is not None
        assert (found.outcome.status, found.outcome.boundary, found.reward) == ("interrupted", "node", None)
        assert found.outcome.reason == "the node ended while the session ran; 4 turns were captured"
        assert (found.turns, found.harness, found.metadata) == (session.turns, "pi", {"split": "train"})
        counts = check(found.turns, Built(traces=found.traces, left_out=found.left_out))
        assert counts.trainable == counts.sampled == sum(len(turn.sampled) for turn in session.turns) > 0
        other = await journal.reader.query(queries.trajectory, "without")
        assert other is not None
        assert (other.outcome.status, other.turns, other.traces) == ("interrupted", (), ())
        page = await journal.reader.events(0)
        kinds = [event.kind for event in page.events]
        assert kinds == ["trajectory"] * 2 + [
            "group",
            "task",
        ], "who waits for the group learns that it is over"


async def test_second_recovery_finds_nothing(tmp_path: Path) -> None:
    path, said = tmp_path / "journal.sqlite", list[str]()
    async with open_journal(path, now=time.time) as journal:
        submitted(journal, "one")
        ran(journal, "one", turns=1)
    await recovered(path, said)
    await recovered(path, said)
    assert len(said) == 1


async def test_capture_without_task_is_built(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with open_journal(path, now=time.time) as journal:
        ran(journal, "capture", task_id="capture", turns=2)
    await recovered(path, [])
    async with open_journal(path, now=time.time) as journal:
        found = await journal.reader.query(queries.trajectory, "capture")
        assert found is not None
        assert (found.outcome.status, len(found.turns), len(found.traces)) == ("interrupted", 2, 1)


@pytest.mark.parametrize("allowed", [True, False])
async def test_unknown_builder_keeps_turns(tmp_path: Path, allowed: bool) -> None:
    """One session that can not be built must not keep the node from starting, nor the others from their
    traces.
    """
    path, said = tmp_path / "journal.sqlite", list[str]()
    async with open_journal(path, now=time.time) as journal:
        submitted(journal, "one", spec=once(builder=BuilderSpec(import_path="session_kit:garbage_builder")))
        ran(journal, "one", turns=2)
        ran(journal, "capture", task_id="capture", turns=1)
    await recovered(path, said, import_paths=("session_kit",) if allowed else ())
    async with open_journal(path, now=time.time) as journal:
        one, other = (
            await journal.reader.query(queries.trajectory, "one"),
            await journal.reader.query(queries.trajectory, "capture"),
        )
        assert one is not None
        assert other is not None
        assert (one.outcome.status, one.outcome.boundary, len(one.turns), one.traces) == (
            "error",
            "client",
            2,
            (),
        )
        assert len(other.traces) == 1


# ── the place is filled again ─────────────────────────────────────────────────


async def killed(
    path: Path, *sessions: str, spec: TaskSpec, attempt: int = 0, cancelled: bool = False
) -> None:
    """A life that ended while these sessions ran, each with two turns."""
    async with open_journal(path, now=time.time) as journal:
        submit_task(journal, spec, task_id="t", session_ids=sessions, idempotency_key="k")
        for index, session_id in enumerate(sessions):
            journal.writer.record_session(
                evolve(make_identity(session_id, sample_index=index), attempt=attempt)
            )
            history = [toys.user()]
            session = toys.Session(session_id)
            for _ in range(2):
                _, message = session.say(toys.ask(*history), "an answer")
                history += [message, toys.user("more")]
            for turn in session.turns:
                journal.writer.record_turn(turn)
        if cancelled:
            cancel_task(journal, "t")


async def test_interrupted_place_gets_fresh_session(tmp_path: Path) -> None:
    path, said = tmp_path / "journal.sqlite", list[str]()
    await killed(path, "a", "b", spec=task(num_samples=2, budgets={"retries": 2}))
    async with life(path) as (journal, scheduler):
        await recover(journal, scheduler, NODE, said.append)
        assert said == [
            (
                "2 sessions of an earlier run were interrupted; their turns are kept, and 2 of them are tried"
                " again"
            )
        ]
        assert {each.attempt for each in scheduler.sessions("t")} == {1}
        lost = await journal.reader.query(queries.trajectory, "a")
        assert lost is not None
        assert (lost.outcome.status, len(lost.turns), len(lost.traces), lost.attempt) == (
            "interrupted",
            2,
            1,
            0,
        )
        await scheduler.registry.stop(cancel=False)
        await journal.writer.flush()
        found = await journal.reader.query(queries.task, "t")
        assert found is not None
        assert [
            (one.sample_index, one.attempt, one.outcome and one.outcome.status) for one in found.sessions
        ] == [
            (0, 1, "completed"),
            (1, 1, "completed"),
        ]
        held = await journal.reader.query(queries.trajectory, found.sessions[0].session_id)
        assert held is not None
        assert (lost.retried_as, held.harness, held.node, held.model) == (
            held.session_id,
            "shell",
            "n1",
            "tiny-2",
        )
        events = (await journal.reader.events(0)).events
        assert [event.kind for event in events] == ["trajectory", "trajectory", "group", "task"]
        assert len((await journal.reader.events(0, filters=EventFilters(kinds=("attempt",)))).events) == 2


async def test_repeatedly_lost_place_ends_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    await killed(path, "a", spec=task(budgets={"retries": 2}), attempt=2)
    async with life(path) as (journal, scheduler):
        await recover(journal, scheduler, NODE, lambda _: None)
        assert scheduler.sessions() == ()
        found = await journal.reader.query(queries.trajectory, "a")
        assert found is not None
        assert (found.outcome.status, found.attempt, found.retried_as) == ("interrupted", 2, None)


async def test_recovery_waits_for_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for, and what is being settled is not begun as if an answer that gave it was lost."""
    usual, left = SqliteLog.sessions_to_stop, [LogUnavailable("the log is away") for _ in range(3)]

    async def to_stop(*given: Any) -> Any:
        if left:
            raise left.pop()
        return await usual(*given)

    path = tmp_path / "journal.sqlite"
    await killed(path, "a", spec=task(budgets={"retries": 2}))
    monkeypatch.setattr(SqliteLog, "sessions_to_stop", to_stop)
    async with life(path) as (journal, scheduler):
        await recover(journal, scheduler, NODE, lambda _: None)
        assert not left
        await scheduler.registry.stop(cancel=False)
        found = await journal.reader.query(queries.task, "t")
        assert found is not None
        (kept,) = found.sessions
        assert (kept.attempt, kept.outcome and kept.outcome.status) == (1, "completed")
        kinds = ("attempt", "trajectory")
        events = (await journal.reader.events(0, filters=EventFilters(kinds=kinds))).events
        assert [event.kind for event in events] == list(kinds)


async def test_cancelled_place_stays_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    await killed(path, "a", spec=task(budgets={"retries": 2}), cancelled=True)
    async with life(path) as (journal, scheduler):
        await recover(journal, scheduler, NODE, lambda _: None)
        assert scheduler.sessions() == ()
        found = await journal.reader.query(queries.trajectory, "a")
        assert found is not None
        assert (found.outcome.status, found.outcome.reason, len(found.traces)) == (
            "cancelled",
            "cancelled, and the node ended while the session ran; 2 turns were captured",
            1,
        )


async def test_unrunnable_place_ends_with_reason(tmp_path: Path) -> None:
    """A place that this node would not take ends interrupted, and says why."""
    path = tmp_path / "journal.sqlite"
    await killed(
        path,
        "a",
        spec=task(harness=HarnessSpec(import_path="session_kit:LATE_HARNESS"), budgets={"retries": 2}),
    )
    async with life(path, import_paths=()) as (journal, scheduler):
        await recover(journal, scheduler, NODE, lambda _: None)
        found = await journal.reader.query(queries.trajectory, "a")
        assert found is not None
        assert found.outcome.status == "interrupted"
        assert "2 turns were captured; it cannot be tried again here: " in (found.outcome.reason or "")
        assert "may not be imported" in (found.outcome.reason or "")


async def test_recovery_resumes_after_kill(tmp_path: Path) -> None:
    """The first place was given again, the second not yet: the successor has lost the next life too, and
    nothing is lost or doubled.
    """
    path = tmp_path / "journal.sqlite"
    await killed(path, "a", "b", spec=task(num_samples=2, budgets={"retries": 2}))
    async with open_journal(path, now=time.time) as journal:
        first, _ = await journal.reader.query(queries.unfinished_sessions)
        lost = evolve(first.identity, session_id="a2", attempt=1)
        publish_attempt(journal, evolve(make_trajectory("a", turns=2), retried_as="a2"), lost)
    async with life(path) as (journal, scheduler):
        await recover(journal, scheduler, NODE, lambda _: None)
        await scheduler.registry.stop(cancel=False)
        await journal.writer.flush()
        found = await journal.reader.query(queries.task, "t")
        assert found is not None
        assert [
            (one.sample_index, one.attempt, one.outcome and one.outcome.status) for one in found.sessions
        ] == [
            (0, 2, "completed"),
            (1, 1, "completed"),
        ]
        assert await journal.reader.query(queries.unfinished_sessions) == ()


async def test_unstarted_place_is_run(tmp_path: Path) -> None:
    """It keeps its session, and costs no retry."""
    path, said = tmp_path / "journal.sqlite", list[str]()
    async with open_journal(path, now=time.time) as journal:
        submitted(journal, "waiting", spec=task(budgets={"retries": 0}))
    async with life(path) as (journal, scheduler):
        await recover(journal, scheduler, NODE, said.append)
        while scheduler.log.open_places:  # noqa: ASYNC110 - real time, and short
            await trio.sleep(0.01)
    assert said == []
    async with open_journal(path, now=time.time) as journal:
        found = await journal.reader.query(queries.trajectory, "waiting")
        assert found is not None
        assert (found.outcome.status, found.attempt) == ("completed", 0)
