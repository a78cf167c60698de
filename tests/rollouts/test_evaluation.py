"""What a harness left is judged by anybody's code: whatever that does, only the reward is at stake."""

import tarfile
from pathlib import Path
from typing import Any

import pytest
import session_kit as kit
import trio
from fakes_runtime import KILLED, MemoryRuntime
from session_kit import agent, town
from trio.abc import Clock

from polarnode.core.errors import ContentFault, RuntimeFault
from polarnode.core.ports import Ended, TimedProgram
from polarnode.core.task import EvaluatorSpec, FileSpec, PrepareStep, RuntimeSpec
from polarnode.core.trajectory import Outcome, Verdict
from polarnode.groups.group import lost_to_the_machine
from polarnode.merge.trajectory import Result
from polarnode.rollouts.evaluation import NodeClock, evaluated
from polarnode.rollouts.session_containers import Containers
from polarnode.support.concurrency import PrioritySemaphore


async def test_run_outcome_is_separate_from_verdict(autojump_clock: Clock, tmp_path: Path) -> None:
    """Alone, without a session: how the run ended stays, whether it is judged or not."""
    runtime: Any = MemoryRuntime()
    failed = Outcome(status="failed", exit_code=3, log_tail="last words")
    async with town(tmp_path) as place:
        containers = place.scheduler.services.containers
        orders = [kit.order(kit.task(evaluator=name)) for name in ("COUNTS", "RAISES")]
        results = [
            await evaluated(Containers(each, containers), kit.no_judge, runtime, failed, ())
            for each in orders
        ]
        assert place.runtimes.opened == [], "no fresh runtime was asked for"
    assert results[0] == Result(outcome=failed, verdict=Verdict(reward=0.0, metrics={"seen": "failed"}))
    reason = "ZeroDivisionError: by my own hand"
    unset = dict.fromkeys(("clock", "boundary", "reason", "log_tail"))
    assert results[1] == Result(
        outcome=Outcome(
            status="error", boundary="evaluator", exit_code=3, reason=reason, log_tail="last words"
        ),
        metrics={"run_outcome": {**unset, "status": "failed", "exit_code": 3}},
    )
    await runtime.close()


@pytest.mark.parametrize("evaluator", ["HANGS", "HANGS_AND_FALLS"])
async def test_evaluator_timeout_costs_only_reward(
    autojump_clock: Clock, tmp_path: Path, evaluator: str
) -> None:
    async with town(tmp_path, {"agent": agent(ends=1)}) as place:
        found = await place.one(evaluator=evaluator, budgets={"post_s": 30.0})
    assert (found.outcome.status, found.outcome.boundary, found.outcome.exit_code) == (
        "error",
        "evaluator",
        1,
    )
    if evaluator == "HANGS":
        assert (found.outcome.clock, found.outcome.reason) == (
            "post",
            "the evaluator ran 30 s (budgets.post_s) and was ended",
        )
    assert (found.reward, len(found.turns), len(found.traces)) == (None, 2, 1)
    assert round(found.timing.post_s) == 30


@pytest.mark.parametrize(
    ("evaluator", "reason"),
    [
        ("RAISES", "ZeroDivisionError: by my own hand"),
        ("RAISES_IN_NURSERY", "ExceptionGroup: Exceptions from Trio nursery (1 sub-exception)"),
        ("JUDGES_NOT", "the test suite is gone"),
        ("EXITS", "SystemExit: 3"),
        ("NAN", "the evaluator gave nan as its reward: return a finite number"),
        ("HUGE", "as its reward: return a finite number"),
        ("TRUE", "the evaluator gave True as its reward: return a finite number"),
        ("NOTHING", "the evaluator returned NoneType: return a polarnode.core.trajectory.Verdict"),
        ("OBJECTS", "the evaluator's metrics are not JSON: "),
    ],
)
async def test_failing_evaluator_costs_only_reward(
    autojump_clock: Clock, tmp_path: Path, evaluator: str, reason: str
) -> None:
    async with town(tmp_path, {"agent": agent()}) as place:
        found = await place.one(evaluator=evaluator)
    assert (found.outcome.status, found.outcome.boundary, found.outcome.exit_code) == (
        "error",
        "evaluator",
        0,
    )
    assert reason in (found.outcome.reason or "")
    assert (found.reward, len(found.turns), len(found.traces)) == (None, 2, 1)


async def test_verdict_is_kept_as_json(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent()}) as place:
        found = await place.one(evaluator="ODD")
        assert (found.reward, type(found.reward), found.metrics["evaluation"]) == (
            1.0,
            float,
            {"pair": [1, 2], "nan": None, "1": 2},
        )
        assert (await place.one(evaluator="WHOLE")).reward == float(2**50)


async def test_harness_processes_end_before_evaluator(autojump_clock: Clock, tmp_path: Path) -> None:
    """Nothing of a harness runs beside its evaluator."""
    left: list[int] = []

    async def daemon(runtime: Any) -> None:
        left.append((await runtime.run(["sleep", "infinity"])).exit_code)

    async def program(call: Any) -> int:
        place.nursery.start_soon(daemon, call.runtime)
        await trio.sleep(1)
        return 0

    async with town(tmp_path, {"agent": program}) as place:
        place.submit(evaluator="COUNTS")
        await place.until("post")
        await trio.sleep(1)
        assert left == [KILLED]


async def test_fault_before_verdict_is_the_runtimes(autojump_clock: Clock, tmp_path: Path) -> None:
    """A fault between run and verdict is the runtime's."""

    async def ends_the_container(call: Any) -> int:
        await trio.sleep(1)
        call.runtime.alive = False
        return 0

    async with town(tmp_path, {"agent": ends_the_container}) as place:
        found = await place.one(evaluator=EvaluatorSpec(name="command", config={"argv": ["true"]}))
    assert (found.outcome.status, found.outcome.boundary, found.outcome.exit_code) == ("error", "runtime", 0)


# ── a clean runtime for the evaluator ─────────────────────────────────────────


async def writes(call: Any) -> int:
    await trio.sleep(20)
    await call.runtime.put({"/work/answer": b"42", "/home/agent/cheat": b"x"})
    return 0


DATA = RuntimeSpec(
    files=(FileSpec(path="/opt/data", text="given"),), prepare=(PrepareStep(argv=("sleep", "4")),)
)
FRESH = EvaluatorSpec(import_path="session_kit:READS", fresh_runtime=True)


async def test_fresh_runtime_is_prepared_and_judged(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": writes}) as place:
        found = await place.one(runtime=DATA, evaluator=FRESH)
        _, clean = place.runtimes.opened
    assert (found.reward, found.metrics["evaluation"]) == (1.0, {"runtime": clean.id, "left": False})
    assert set(clean.files) == {"/opt/data", "/work/answer"}


async def test_evaluator_runtime_made_during_run(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": writes}) as place:
        place.runtimes.takes = [1.0, 15.0]
        found = await place.one(runtime=DATA, evaluator=FRESH)
    assert found.reward == 1.0
    assert (round(found.timing.init_s), round(found.timing.run_s), round(found.timing.post_s)) == (5, 20, 0)
    assert len(place.runtimes.opened) == 2


async def test_unfinished_evaluator_runtime_is_awaited(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": writes}) as place:
        place.runtimes.takes = [1.0, 30.0]
        found = await place.one(runtime=DATA, evaluator=FRESH)
    assert (found.reward, round(found.timing.post_s), len(place.runtimes.opened)) == (1.0, 10, 2)


async def test_evaluator_runtime_skips_init_queue(autojump_clock: Clock, tmp_path: Path) -> None:
    """An evaluator does not wait behind sessions for a runtime that was not begun."""
    async with town(tmp_path, {"agent": writes}, init=1, run=1) as place:
        async with place.stages.run.slot(priority=50):
            (session_id,) = place.submit(runtime=DATA, evaluator=FRESH)
            await place.until("ready")
            # the whole of INIT is somebody's until all is over
            await place.nursery.start(hold, place.stages.init)
        await place.until("run")
        assert len(place.runtimes.opened) == 1
        await place.over()
        assert place.of(session_id).reward == 1.0
        place.nursery.cancel_scope.cancel()


async def hold(gate: PrioritySemaphore, task_status: trio.TaskStatus[None]) -> None:
    async with gate.slot(priority=50):
        task_status.started()
        await trio.sleep_forever()


async def test_sessions_enter_init_before_evaluator_runtimes(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": writes}, init=1) as place:
        place.runtimes.takes = [1.0, 5.0, 5.0, 5.0]
        (first,) = place.submit(evaluator=FRESH)
        await trio.sleep(0.5)
        others = place.submit(num_samples=2)
        await place.over()
    assert [each in others for each in place.runtimes.sessions] == [False, True, True, False]
    assert place.of(first).reward == 1.0


@pytest.mark.parametrize(("faults", "reward"), [(1, 1.0), (2, 1.0), (3, None)])
async def test_evaluator_runtime_is_tried_three_times(
    autojump_clock: Clock, tmp_path: Path, faults: int, reward: float | None
) -> None:
    """An evaluator's runtime that failed beforehand is tried twice more."""
    async with town(tmp_path, {"agent": writes}) as place:
        place.runtimes.takes = [0.0, 5.0]
        (session_id,) = place.submit(evaluator=FRESH, budgets={"retries": 0})
        await place.until("run")
        place.runtimes.faults = [RuntimeFault("no")] * faults
        await place.over()
        found = place.of(session_id)
    assert (found.reward, found.outcome.boundary) == (reward, None if reward else "runtime")


@pytest.mark.parametrize(
    ("fault", "boundary"),
    [(ContentFault("a link is in the way"), "evaluator"), (RuntimeFault("it does not answer"), "runtime")],
)
async def test_fault_of_content_is_not_retried(
    autojump_clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: RuntimeFault,
    boundary: str,
) -> None:
    """Another attempt would be another chance."""

    async def spoilt(*_: Any, **__: Any) -> Any:
        await trio.lowlevel.checkpoint()
        raise fault

    monkeypatch.setattr(MemoryRuntime, "unseal", spoilt)
    async with town(tmp_path, {"agent": writes}) as place:
        found = await place.one(evaluator="COUNTS", budgets={"retries": 0})
    assert (found.outcome.status, found.outcome.boundary) == ("error", boundary)
    assert lost_to_the_machine(found.outcome) == (boundary == "runtime")


async def test_dead_evaluator_runtime_is_replaced(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": writes}) as place:
        (session_id,) = place.submit(evaluator=FRESH)
        await place.until("run")
        await trio.sleep(5)
        place.runtimes.opened[1].alive = False
        await place.over()
        found = place.of(session_id)
    assert (found.reward, len(place.runtimes.opened)) == (1.0, 3)
    assert found.metrics["evaluation"] == {"runtime": place.runtimes.opened[2].id, "left": False}


async def test_cancelled_run_releases_evaluator_runtime(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": writes}) as place:
        (session_id,) = place.submit(task_id="t", evaluator=FRESH)
        await place.until("run")
        await trio.sleep(5)
        await place.scheduler.cancel("t")
        await place.over()
        assert (place.of(session_id).outcome.status, len(place.runtimes.opened)) == ("cancelled", 2)


async def test_evaluator_can_copy_files_itself(autojump_clock: Clock, tmp_path: Path) -> None:
    """An evaluator that takes the files it wants is given an empty runtime."""
    async with town(tmp_path, {"agent": writes}) as place:
        found = await place.one(evaluator=EvaluatorSpec(import_path="session_kit:TAKES"))
        clean = place.runtimes.opened[1]
    assert (found.reward, found.metrics["evaluation"]) == (1.0, {"runtime": clean.id, "left": True})
    assert clean.files == {}


async def test_artifacts_are_kept_after_harness(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": writes}) as place:
        found = await place.one(runtime=RuntimeSpec(artifacts=("answer", "none")), evaluator="COUNTS")
    kept: Any = found.metrics["artifacts"]
    assert (kept["files"], kept["left_out"]) == (1, ["none: No such file or directory"])
    with tarfile.open(kept["path"]) as archive:
        assert archive.getnames() == ["answer"]
    assert found.reward == 0.0


async def test_unkept_artifacts_cost_no_verdict(
    autojump_clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        raise RuntimeFault("the session's artifacts could not be kept: No space left on device")

    monkeypatch.setattr(MemoryRuntime, "collect", full)
    async with town(tmp_path, {"agent": writes}) as place:
        found = await place.one(runtime=RuntimeSpec(artifacts=("answer",)), evaluator="COUNTS")
    assert found.reward == 0.0
    assert found.metrics["artifacts"] == {
        "failed": "the session's artifacts could not be kept: No space left on device"
    }


async def test_evaluator_container_demand_ends_when_opened(autojump_clock: Clock, tmp_path: Path) -> None:
    """A second container is in demand until the evaluator has it."""
    told: list[tuple[float, int]] = []
    async with town(tmp_path, {"agent": writes}) as place:
        demand = place.scheduler.container_demand
        want, began = demand.prewarm, trio.current_time()

        def noting(spec: RuntimeSpec, count: int) -> None:
            told.append((round(trio.current_time() - began), count))
            want(spec, count)

        demand.prewarm = noting
        place.runtimes.takes = [2.0, 3.0]
        await place.one(evaluator=FRESH)
    assert told == [(0, 2), (2, 1), (5, 0)]


# ── the node's clock ──────────────────────────────────────────────────────────


class Slow(MemoryRuntime):
    """A runtime whose programs take as many seconds as their name says."""

    cleared = 0

    async def end_processes(self) -> None:
        self.cleared += 1

    async def run(self, argv: Any, **more: Any) -> Ended:
        assert more["keep"] == 1, "the program's own bound"
        await trio.sleep(float(argv[0]))
        return Ended(exit_code=0, stdout=b"", stderr=b"")


@pytest.mark.parametrize(("takes", "ended", "seconds"), [("2", True, 2.0), ("1000", False, 5.0)])
async def test_program_timeout_uses_node_clock(
    autojump_clock: Clock, takes: str, ended: bool, seconds: float
) -> None:
    runtime: Any = Slow()
    found = await NodeClock().run(runtime, TimedProgram(argv=(takes,), within_s=5.0, keep=1))
    assert (found.ended is not None, found.seconds) == (ended, pytest.approx(seconds))
    assert runtime.cleared == 1, "what it started is ended too"
    await runtime.close()


async def test_clock_runs_work_beside_requests(autojump_clock: Clock) -> None:
    seen: list[float] = []

    async def work() -> str:
        await trio.sleep(1)
        return "done"

    async def attend() -> bool:
        await trio.sleep(0.1)
        seen.append(trio.current_time())
        return len(seen) < 3

    assert await NodeClock().beside(work, attend) == "done"
    assert 3 < len(seen) < 10, "after a pause where there was nothing to do"


@pytest.mark.parametrize("where", ["work", "attend"])
async def test_fault_in_either_ends_both(autojump_clock: Clock, where: str) -> None:
    """A fault of the work or of its requests ends both, and is raised as itself."""

    async def faulty() -> bool:
        await trio.sleep(1)
        raise RuntimeFault(where)

    async def endless() -> bool:
        await trio.sleep_forever()
        return True

    both = (faulty, endless) if where == "work" else (endless, faulty)
    with pytest.raises(RuntimeFault, match=where):
        await NodeClock().beside(*both)
