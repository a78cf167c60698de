"""A place in a group is given to a fresh session when the machine lost the one that held it, a few times, and
for nothing the agent did.
"""

import logging
from pathlib import Path
from typing import Any

import merge_toys as toys
import pytest
import trio
from fakes_runtime import Call, ProgramFunction
from memory_log import MemoryLog
from session_kit import MemoryNode, agent, session_of_call, task, town
from trio.abc import Clock

from polarnode.core.errors import PolarnodeError, RuntimeFault
from polarnode.core.task import Budgets
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.groups import lost_to_the_machine
from polarnode.rollouts.lifecycle import PAUSES, has_retries_left, pause_before

GONE = RuntimeFault("the container is gone")


@pytest.mark.parametrize(
    ("outcome", "lost"),
    [
        *((Outcome(status="error", boundary=boundary), True) for boundary in ("runtime", "engine", "node")),
        *(
            (Outcome(status="error", boundary=boundary), False)
            for boundary in ("evaluator", "harness", "client", "laws", "config", "journal", None)
        ),
        (Outcome(status="interrupted", boundary="node"), True),
        *(
            (Outcome(status=status, boundary="runtime"), False)
            for status in ("completed", "failed", "timeout", "cancelled")
        ),
    ],
)
def test_only_machine_losses_are_retried(outcome: Outcome, lost: bool) -> None:
    assert lost_to_the_machine(outcome) is lost


def test_retries_are_limited_and_wait_longer() -> None:
    """A place is held by a limited number of sessions, and each waits longer."""
    held = [
        retries for retries in range(9) if retries == 0 or has_retries_left(retries - 1, Budgets(retries=4))
    ]
    assert [pause_before(retries) for retries in held] == [0.0, 0.5, 2.0, 5.0, 5.0]
    assert not has_retries_left(0, Budgets(retries=0))


# ── in a node ─────────────────────────────────────────────────────────────────


def loses(*faults: PolarnodeError, each: float = 10.0, ends: int = 0) -> ProgramFunction:
    """A harness that makes two turns; its first runs end in these faults, the next with an exit code."""
    left = list(faults)

    async def program(call: Call) -> int:
        run: Any = agent(turns=2, each=each, ends=left.pop(0) if left else ends)
        run.sessions_by_key = program.sessions_by_key  # type: ignore[attr-defined]
        return int(await run(call))

    return program


def attempts(place: MemoryNode) -> list[Trajectory]:
    """All that was published, in order of place and attempt."""
    return sorted(place.published, key=lambda each: (each.sample_index, each.attempt))


async def test_lost_session_is_replaced_by_fresh(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": loses(GONE)}) as place:
        (first,) = place.submit(budgets={"retries": 2}, evaluator="COUNTS")
        await place.over()
        lost, kept = attempts(place)
        assert (
            lost.session_id,
            lost.attempt,
            lost.retried_as,
            lost.outcome.status,
            lost.outcome.boundary,
        ) == (
            first,
            0,
            kept.session_id,
            "error",
            "runtime",
        )
        assert (kept.attempt, kept.retried_as, kept.outcome.status, kept.reward) == (
            1,
            None,
            "completed",
            2.0,
        )
        assert (lost.task_id, lost.group_id, lost.sample_index) == (
            kept.task_id,
            kept.group_id,
            kept.sample_index,
        )
        assert len(lost.turns) == len(kept.turns) == 2, "what it captured stays its own"
        assert [each.session_id for each in place.scheduler.sessions()] == [kept.session_id], (
            "who waits counts places"
        )
        assert (place.scheduler.statistics().retried, place.scheduler.statistics().ended) == (1, 1)
        assert (place.scheduler.registry.tally.sessions, place.scheduler.registry.tally.replaced) == (
            {"completed": 1},
            {"runtime": 1},
        )


async def test_place_retried_after_lost_answer(
    autojump_clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer that gave the next attempt was lost, and the call that was made again says nothing of it."""
    usual = MemoryLog.put_back

    async def put_back(*given: Any, **more: Any) -> None:
        await usual(*given, **more)

    monkeypatch.setattr(MemoryLog, "put_back", put_back)
    async with town(tmp_path, {"agent": loses(GONE)}) as place:
        place.submit(budgets={"retries": 1})
        with trio.fail_after(600):
            await place.over()
        assert [each.outcome.status for each in place.published] == ["error", "completed"]


async def test_repeatedly_lost_place_ends_with_last(autojump_clock: Clock, tmp_path: Path) -> None:
    """A place that is lost every time ends with its last session."""
    async with town(tmp_path, {"agent": agent(ends=GONE)}) as place:
        place.submit(budgets={"retries": 2})
        began = trio.current_time()
        await place.over()
        assert trio.current_time() - began >= 0.5 + 2.0
        every = attempts(place)
        assert [(each.attempt, each.outcome.boundary) for each in every] == [
            (0, "runtime"),
            (1, "runtime"),
            (2, "runtime"),
        ]
        assert [each.retried_as for each in every] == [every[1].session_id, every[2].session_id, None]
        assert place.scheduler.registry.tally.sessions == {"error": 1}


@pytest.mark.parametrize("program", [agent(ends=1), agent(ends=139), agent(endless=True)])
async def test_agent_failures_are_not_retried(
    autojump_clock: Clock, tmp_path: Path, program: ProgramFunction
) -> None:
    async with town(tmp_path, {"agent": program}) as place:
        one = await place.one(budgets={"retries": 2, "run_s": 60.0})
        assert one.outcome.status in ("failed", "timeout")
        assert len(place.published) == 1


@pytest.mark.parametrize("evaluator", ["JUDGES_NOT", "RAISES", "HANGS"])
async def test_evaluator_failure_causes_no_retry(
    autojump_clock: Clock, tmp_path: Path, evaluator: str
) -> None:
    async with town(tmp_path, {"agent": agent()}) as place:
        one = await place.one(budgets={"retries": 2, "post_s": 5.0}, evaluator=evaluator)
        assert (one.outcome.status, one.outcome.boundary, len(place.published)) == ("error", "evaluator", 1)


async def test_engine_failure_is_retried(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": behind_an_engine_that_died()}) as place:
        place.submit(budgets={"retries": 1})
        await place.over()
        lost, kept = attempts(place)
        assert (
            lost.outcome.status,
            lost.outcome.boundary,
            lost.outcome.exit_code,
            lost.outcome.log_tail,
        ) == ("error", "engine", 1, "no model\n")
        assert [turn.state for turn in lost.turns] == ["complete", "failed"]
        assert kept.outcome.status == "completed"


def behind_an_engine_that_died() -> ProgramFunction:
    """Its first run's second call fails; it says so and exits 1."""
    runs: list[str] = []

    async def program(call: Call) -> int:
        live = session_of_call(program, call)
        runs.append(live.session_id)
        toy = toys.Session(live.session_id)
        toy.lineages = live.lineages
        for state in ("complete", "failed") if len(runs) == 1 else ("complete",):
            await trio.lowlevel.checkpoint()
            pending = toy.begin(toys.ask(toys.user()))
            live.commit(toy.turn(pending, toy.answer(pending.plan, "an answer"), state=state))
        if len(runs) == 1:
            call.stdout += b"no model\n"
        return int(len(runs) == 1)

    return program


async def test_cancelled_place_is_not_retried(autojump_clock: Clock, tmp_path: Path) -> None:
    """Cancelled while its session waits to begin, and in a run that the machine then loses."""
    async with town(tmp_path, {"agent": agent(ends=GONE)}) as place:
        place.submit(budgets={"retries": 2}, task_id="t")
        while not place.published:  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.01)
        assert place.scheduler.sessions()[0].attempt == 1
        before = trio.current_time()
        assert await place.scheduler.cancel("t")
        await place.over()
        assert trio.current_time() - before < PAUSES.first_s, "the pause is cut"
        assert [each.outcome.status for each in attempts(place)] == ["error", "cancelled"]
        assert place.log.cancelled == ["t"]
        assert not await place.scheduler.cancel("t")
        assert place.log.cancelled == ["t"], "what is over is not cancelled"


async def test_stopping_node_retries_nothing(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent(ends=GONE)}) as place:
        place.submit(budgets={"retries": 2}, num_samples=3)
        await place.until("run")
        await place.scheduler.registry.stop(cancel=True)
        assert [each.outcome.status for each in place.published] == ["cancelled"] * 3
        assert place.log.cancelled == [], "the node's own end cancels no task"


async def test_group_has_one_session_per_place(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": loses(*[GONE] * 5, ends=0)}, run=3) as place:
        place.submit(budgets={"retries": 5}, num_samples=8)
        await place.over()
        final = [each for each in place.published if each.retried_as is None]
        assert sorted(each.sample_index for each in final) == list(range(8))
        assert len(place.published) == 8 + 5
        assert len(place.scheduler.sessions()) == 8


async def test_unencodable_lost_session_keeps_its_place(
    autojump_clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A lost session that cannot be packed keeps its turns and its place."""
    async with town(tmp_path, {"agent": loses(GONE)}) as place:
        place.notes.refuse = [TypeError("no")]
        place.submit(budgets={"retries": 1})
        await place.over()
        lost, kept = attempts(place)
        assert (lost.outcome.boundary, lost.traces, len(lost.turns)) == ("node", (), 2)
        assert (kept.outcome.status, place.scheduler.registry.tally.replaced) == ("completed", {"node": 1})
    assert any(
        "met a bug" in record.getMessage() and record.levelno == logging.ERROR for record in caplog.records
    )


def test_retries_come_from_task() -> None:
    assert task(budgets={"retries": 7}).budgets.retries == 7
    assert Budgets().retries == 2
