"""What a harness left is judged by anybody's code: whatever that does, only the reward is at stake."""

from pathlib import Path
from typing import Any

import pytest
import session_kit as kit
import trio
from fakes_runtime import KILLED, MemoryRuntime
from session_kit import agent, town
from trio.abc import Clock

from polarnode.errors import RuntimeFault
from polarnode.merge.trajectory import Identity, Result
from polarnode.records import Outcome, Verdict
from polarnode.shell.admission import admitted
from polarnode.shell.evaluation import evaluated
from polarnode.shell.orders import SessionOrder
from polarnode.tasks import EvaluatorSpec, FileSpec, RuntimeSpec


async def test_the_run_and_its_verdict_are_told_apart(autojump_clock: Clock) -> None:
    """Alone, without a session: how the run ended stays, whether it is judged or not."""
    runtime: Any = MemoryRuntime()
    failed = Outcome(status="failed", exit_code=3, log_tail="last words")
    results = [
        await evaluated(order(name), runtime, failed, (), lambda: pytest.fail("no fresh runtime was asked for")) for name in ("COUNTS", "RAISES")
    ]
    assert results[0] == Result(outcome=failed, verdict=Verdict(reward=0.0, metrics={"seen": "failed"}))
    reason = "ZeroDivisionError: by my own hand"
    assert results[1] == Result(outcome=Outcome(status="error", boundary="evaluator", exit_code=3, reason=reason, log_tail="last words"))
    await runtime.close()


def order(evaluator: str) -> SessionOrder:
    spec = kit.task(evaluator=evaluator)
    found = admitted(spec, model="tiny", context_length=4096, allowed_imports=kit.ALLOWED)
    who = Identity(
        session_id="s", task_id="t", group_id="g", sample_index=0, harness="shell", harness_version=None, model="tiny", node="n0"
    )  # fmt: skip
    return SessionOrder(identity=who, spec=spec, harness=found.harness, evaluator=found.evaluator)


@pytest.mark.parametrize("evaluator", ["HANGS", "HANGS_AND_FALLS"])
async def test_an_evaluator_out_of_time_costs_the_reward_only(autojump_clock: Clock, tmp_path: Path, evaluator: str) -> None:
    async with town(tmp_path, {"agent": agent(ends=1)}) as place:
        found = await place.one(evaluator=evaluator, budgets={"post_s": 30.0})
    assert (found.outcome.status, found.outcome.boundary, found.outcome.exit_code) == ("error", "evaluator", 1)
    if evaluator == "HANGS":
        assert (found.outcome.clock, found.outcome.reason) == ("post", "the evaluator ran 30 s and was ended")
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
        ("NOTHING", "the evaluator returned NoneType: return a polarnode.records.Verdict"),
        ("OBJECTS", "the evaluator's metrics are not JSON: "),
        ("LARGE", "the evaluator's metrics are not JSON: "),
    ],
)
async def test_an_evaluator_that_can_not_judge_costs_the_reward_only(autojump_clock: Clock, tmp_path: Path, evaluator: str, reason: str) -> None:
    async with town(tmp_path, {"agent": agent()}) as place:
        found = await place.one(evaluator=evaluator)
    assert (found.outcome.status, found.outcome.boundary, found.outcome.exit_code) == ("error", "evaluator", 0)
    assert reason in (found.outcome.reason or "")
    assert (found.reward, len(found.turns), len(found.traces)) == (None, 2, 1)


async def test_a_verdict_is_kept_as_the_json_it_makes(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent()}) as place:
        found = await place.one(evaluator="ODD")
        assert (found.reward, type(found.reward), found.metrics["evaluation"]) == (1.0, float, {"pair": [1, 2], "nan": None, "1": 2})
        assert (await place.one(evaluator="WHOLE")).reward == float(2**70)


async def test_nothing_of_a_harness_runs_beside_its_evaluator(autojump_clock: Clock, tmp_path: Path) -> None:
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


async def test_a_fault_between_run_and_verdict_is_the_runtimes(autojump_clock: Clock, tmp_path: Path) -> None:
    async def ends_the_container(call: Any) -> int:
        await trio.sleep(1)
        call.runtime.alive = False
        return 0

    async with town(tmp_path, {"agent": ends_the_container}) as place:
        found = await place.one(evaluator=EvaluatorSpec(name="command", config={"argv": ["true"]}))
    assert (found.outcome.status, found.outcome.boundary, found.outcome.exit_code) == ("error", "runtime", 0)


# ── a clean runtime for the evaluator ─────────────────────────────────────────


async def test_a_fresh_runtime_is_opened_prepared_and_judged(autojump_clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def copied(source: Any, target: Any) -> None:
        await trio.lowlevel.checkpoint()
        target.files |= {path: content for path, content in source.files.items() if path.startswith("/work/")}

    async def writes(call: Any) -> int:
        await trio.sleep(1)
        await call.runtime.put({"/work/answer": b"42", "/home/agent/cheat": b"x"})
        return 0

    monkeypatch.setattr("polarnode.shell.workspace.copy", copied)  # what it really does is tested in test_workspace.py
    spec = RuntimeSpec(files=(FileSpec(path="/opt/data", text="given"),))
    judged = EvaluatorSpec(import_path="session_kit:READS", fresh_runtime=True)
    async with town(tmp_path, {"agent": writes}) as place:
        found = await place.one(runtime=spec, evaluator=judged)
        _, clean = place.runtimes.opened
        assert (found.reward, found.metrics["evaluation"]) == (1.0, {"runtime": clean.id})
        assert set(clean.files) == {"/opt/data", "/work/answer"}
        place.runtimes.faults = []
        (session_id,) = place.submit(runtime=spec, evaluator=judged)
        await place.until("run", session_id)
        place.runtimes.faults = [RuntimeFault("one hiccup")]
        await place.over()
        assert place.of(session_id).reward == 1.0
        (session_id,) = place.submit(runtime=spec, evaluator=judged)
        await place.until("run", session_id)
        place.runtimes.faults = [RuntimeFault("one"), RuntimeFault("two")]
        await place.over()
        assert (place.of(session_id).outcome.boundary, place.of(session_id).reward) == ("runtime", None)
