"""A rollout's phases under virtual time: what each clock ends, what each fault costs, and that nothing else
is lost with it.
"""

import gc
import logging
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import session_kit as kit
import trio
from attrs import evolve
from fakes_runtime import Call
from session_kit import agent, town
from trio.abc import Clock

from polarnode.core.errors import RuntimeFault
from polarnode.core.task import BuilderSpec, HarnessSpec, PrepareStep, RuntimeSpec
from polarnode.core.trajectory import Outcome, Timing
from polarnode.merge.trajectory import violated_invariant
from polarnode.rollouts import evaluation, session_containers
from polarnode.rollouts import session as session_module
from polarnode.support.concurrency import open_background

SLOW = RuntimeSpec(prepare=(PrepareStep(argv=("sleep", "4")),))


# ── the way a session goes ────────────────────────────────────────────────────


async def test_phases_run_in_order_with_times(autojump_clock: Clock, tmp_path: Path) -> None:
    phases: list[str] = []
    async with town(tmp_path, {"agent": agent(turns=2, each=5.0)}) as place:
        place.runtimes.takes = [2.0]
        phase_changed = place.scheduler._on_phase_change

        def noting(session: Any) -> None:
            phases.append(session.phase)
            phase_changed(session)

        (session_id,) = place.submit(evaluator="COUNTS", runtime=SLOW)
        place.session(session_id).on_phase = noting
        await place.over()
        found = place.of(session_id)
    assert phases == ["ready", "run", "post", "ended"]
    assert found.outcome == Outcome(status="completed", exit_code=0)
    assert found.timing == Timing(
        init_s=pytest.approx(6.0),
        ready_s=pytest.approx(0.0),
        run_s=pytest.approx(10.0),
        post_s=pytest.approx(3.0),
    )
    assert (found.reward, found.metrics["evaluation"]) == (2.0, {"seen": "completed"})
    assert [len(trace.turn_spans) for trace in found.traces] == [2]
    assert {"turns": 2, "traces": 1, "failed_turns": 0, "refusals": {}}.items() <= found.metrics.items()


async def test_ready_phase_costs_no_budget(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent(turns=1, each=90.0)}, run=1) as place:
        first, second = place.submit(num_samples=2, budgets={"run_s": 100.0, "init_s": 5.0})
    assert [each.outcome.status for each in place.published] == ["completed", "completed"]
    assert {round(place.of(each).timing.ready_s) for each in (first, second)} == {0, 90}
    assert [round(each.timing.run_s) for each in place.published] == [90, 90]


async def test_container_survives_long_ready_wait(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent()}) as place:
        await place.one(budgets={"init_s": 10.0, "run_s": 100.0, "post_s": 20.0})
    assert place.runtimes.lifetimes == [
        10
        + session_containers.READY_WAIT_S
        + (100 + session_containers.MAX_HELD_S)
        + 40
        + session_containers.TEARDOWN_MARGIN_S
    ]


async def test_old_ready_container_is_replaced(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent()}, run=1) as place:
        async with place.stages.run.slot(priority=50):
            (session_id,) = place.submit()
            await trio.sleep(session_containers.READY_WAIT_S + 600)
        await place.over()
        assert place.of(session_id).outcome.status == "completed"
        assert len(place.runtimes.opened) == 2


async def test_dead_ready_container_is_replaced(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent()}, run=1) as place:
        async with place.stages.run.slot(priority=50):
            (session_id,) = place.submit()
            await place.until("ready")
            place.runtimes.opened[0].alive = False
        await place.over()
        assert place.of(session_id).outcome.status == "completed"
        assert len(place.runtimes.opened) == 2


# ── clocks ────────────────────────────────────────────────────────────────────


async def test_timed_out_harness_is_judged(autojump_clock: Clock, tmp_path: Path) -> None:
    """A harness that is out of time keeps its turns and is judged."""
    async with town(tmp_path, {"agent": agent(turns=1000, each=7.0)}) as place:
        found = await place.one(budgets={"run_s": 60.0}, evaluator="COUNTS")
    assert (found.outcome.status, found.outcome.clock, found.outcome.exit_code) == ("timeout", "run", None)
    assert found.outcome.reason == "the harness ran 60 s (budgets.run_s) and was ended"
    assert [turn.state for turn in found.turns] == ["complete"] * 8 + ["partial"]
    assert (found.reward, found.metrics["evaluation"]) == (9.0, {"seen": "timeout"})
    assert sum(trace.loss_mask.count(1) for trace in found.traces) == found.metrics["trainable_tokens"] > 0
    assert round(found.timing.run_s) == 60


class Cache:
    """Places in an engine's cache: `free` of them. Calls of each session are held for `held_s`, 10 s after
    it began.
    """

    def __init__(self, free: int, held_s: float = 0.0) -> None:
        self.free, self.held_s, self.began = free, held_s, list[str]()

    def begin_session(
        self, session: str, kind: str, group: str, credit: Callable[[float], None], *, waits: bool = True
    ) -> str | None:
        if not self.free:
            return "engine: its cache is full"
        self.free -= 1
        self.began.append(session)
        if self.held_s:
            trio.lowlevel.spawn_system_task(self._hold, credit)
        return None

    def end_session(self, session: str) -> None:
        if session in self.began:
            self.began.remove(session)
            self.free += 1

    async def _hold(self, credit: Callable[[float], None]) -> None:
        await trio.sleep(10)
        credit(self.held_s)


async def test_session_waits_for_cache_room(autojump_clock: Clock, tmp_path: Path) -> None:
    cache = Cache(free=1)
    async with town(tmp_path, {"agent": agent()}, places=cache) as place:
        place.submit(num_samples=3)
        await trio.sleep(1)
        assert len(cache.began) == 1
        stage = place.stages.run.statistics()
        assert (stage.inside, stage.waiting, stage.held_back) == (1, 2, "engine: its cache is full")
        await place.over()
    assert cache.free == 1
    assert [each.outcome.status for each in place.published] == ["completed"] * 3
    assert len({round(each.timing.ready_s) for each in place.published}) == 3, "one after another"


async def test_cancelled_waiting_session_leaves_no_place(autojump_clock: Clock, tmp_path: Path) -> None:
    cache = Cache(free=0)
    async with town(tmp_path, {"agent": agent()}, places=cache) as place:
        (session_id,) = place.submit()
        await trio.sleep(1)
        place.scheduler.cancel_session(session_id)
        await place.over()
    assert place.of(session_id).outcome.status == "cancelled"
    assert (cache.free, cache.began) == (0, [])


@pytest.mark.parametrize(("held_s", "run_s"), [(30.0, 90.0), (1000.0, 660.0)])
async def test_held_calls_extend_budget_within_bound(
    autojump_clock: Clock, tmp_path: Path, held_s: float, run_s: float
) -> None:
    async with town(
        tmp_path, {"agent": agent(turns=1000, each=7.0)}, places=Cache(free=1, held_s=held_s)
    ) as place:
        found = await place.one(budgets={"run_s": 60.0})
    assert (found.outcome.status, found.outcome.clock) == ("timeout", "run")
    assert round(found.timing.run_s) == run_s
    assert found.timing.held_s == held_s


async def test_held_session_freezes_when_memory_short(autojump_clock: Clock, tmp_path: Path) -> None:
    class Holds(Cache):
        async def _hold(self, credit: Callable[[float], None]) -> None:
            await trio.sleep(10)
            credit(50.0)
            await trio.sleep(20)
            credit(-30.0)

    cache = Holds(free=2, held_s=20.0)
    async with town(tmp_path, {"agent": agent(turns=8, each=7.0)}, places=cache) as place:
        freezer = place.scheduler.services.freezer
        async with open_background(freezer.run):
            freezer.memory_short(True)
            first, second = place.submit(num_samples=2)
            await trio.sleep(12)
            assert [runtime.frozen for runtime in place.runtimes.opened] == [True, True]
            place.scheduler.cancel_session(first)
            await trio.sleep(20)
            assert place.of(first).outcome.status == "cancelled"
            assert not any(runtime.frozen for runtime in place.runtimes.opened)
            await place.over()
    found = place.of(second)
    assert (found.outcome.status, found.timing.held_s) == ("completed", 20.0)
    assert [runtime.freezes for runtime in place.runtimes.opened] == [1, 1]


async def test_unreferenced_session_is_freed_at_once(autojump_clock: Clock, tmp_path: Path) -> None:
    """The histories of a session may be hundreds of megabytes, and the collector runs seldom in a node."""
    async with town(tmp_path, {"agent": agent()}) as place:
        (session_id,) = place.submit()
        await place.until("run")
        held = weakref.ref(place.session(session_id).live)
        assert held() is not None
        gc.collect()
        gc.disable()
        try:
            await place.over()
            await trio.sleep(1)
            assert held() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("bug", [False, True])
async def test_turn_in_flight_joins_trajectory(autojump_clock: Clock, tmp_path: Path, bug: bool) -> None:
    """A call no harness waits for any more: closing the live session records it before anything is judged or
    built.
    """

    async def program(call: Any) -> int:
        live = kit.session_of_call(program, call)
        place.nursery.start_soon(partial(kit.ask, live, [kit.toys.user()], takes=1000.0))
        await trio.sleep(1)
        if bug:
            raise KeyError("a bug")
        return 0

    async with town(tmp_path, {"agent": program}) as place:
        found = await place.one(evaluator="COUNTS")
    assert found.reward == (None if bug else 1.0)
    assert [turn.state for turn in found.turns] == ["partial"]
    assert len(found.traces) == 1


async def test_init_timeout_leaves_nothing_open(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path) as place:
        stuck = RuntimeSpec(prepare=(PrepareStep(argv=("sleep", "infinity")),))
        found = await place.one(budgets={"init_s": 20.0}, runtime=stuck)
        assert (found.outcome.status, found.outcome.clock, found.outcome.reason) == (
            "timeout",
            "init",
            "not ready after 20 s",
        )
        assert (round(found.timing.init_s), found.turns) == (20, ())
        place.runtimes.takes = [1000.0]
        found = await place.one(budgets={"init_s": 20.0})
        assert (found.outcome.clock, len(place.runtimes.opened)) == ("init", 1)


async def test_waiting_costs_no_init_budget(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent()}, init=1) as place:
        place.submit(num_samples=4, budgets={"init_s": 6.0}, runtime=SLOW)
    assert [each.outcome.status for each in place.published] == ["completed"] * 4


@pytest.mark.parametrize(
    ("budget", "clock"),
    [({"max_turns": 3}, "turns"), ({"max_tokens": 7}, "tokens"), ({"max_repeats": 3}, "repeats")],
)
async def test_spent_budget_stops_endless_harness(
    autojump_clock: Clock, tmp_path: Path, budget: dict[str, int], clock: str
) -> None:
    async with town(tmp_path, {"agent": agent(turns=1000, each=2.0, endless=True)}) as place:
        found = await place.one(budgets=budget, evaluator="COUNTS")
    assert (found.outcome.status, found.outcome.clock, found.outcome.exit_code) == ("timeout", clock, None)
    assert found.reward == len(found.turns) == (2 if clock == "tokens" else 3)
    assert (f"max_{clock} = {next(iter(budget.values()))}" in (found.outcome.reason or "")) is (
        clock != "repeats"
    )
    assert found.timing.run_s == pytest.approx(2.0 * len(found.turns) + session_module.SPENT_GRACE_S)
    assert found.metrics["refusals"] == {"budget_spent": 1}


async def test_looping_rollout_is_not_retried(autojump_clock: Clock, tmp_path: Path) -> None:
    """A rollout that loops says so, and is not tried again."""
    async with town(tmp_path, {"agent": agent(turns=9, each=2.0, ends=3)}) as place:
        found = await place.one(budgets={"max_repeats": 4, "retries": 2}, evaluator="COUNTS")
        assert len(place.published) == 1
    assert evolve(found.outcome, log_tail=None) == Outcome(
        status="timeout",
        clock="repeats",
        exit_code=3,
        reason="it looped: 4 turns in a row did the same and got the same, or met the same error",
    )
    assert (found.reward, len(found.turns), len(found.traces)) == (4.0, 4, 1)
    assert found.metrics["trainable_tokens"]


async def test_harness_ending_at_budget_is_immediate(autojump_clock: Clock, tmp_path: Path) -> None:
    """A harness that ends because its budget is spent is not waited for."""
    async with town(tmp_path, {"agent": agent(turns=9, each=2.0)}) as place:
        found = await place.one(budgets={"max_turns": 3})
    assert (found.outcome.clock, found.outcome.exit_code, round(found.timing.run_s)) == ("turns", 0, 6)


async def test_spent_budget_keeps_run_limit(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent(turns=9, each=2.0, endless=True)}) as place:
        found = await place.one(budgets={"max_turns": 1, "run_s": 5.0})
    assert (found.outcome.clock, found.timing.run_s) == ("turns", pytest.approx(5.0))


# ── faults ────────────────────────────────────────────────────────────────────


async def test_failed_harness_shows_its_log(autojump_clock: Clock, tmp_path: Path) -> None:
    """A harness that fails shows the end of its output, and is judged."""
    async with town(tmp_path, {"agent": agent(ends=7, says="x" * 10_000 + "\nTraceback: é\n")}) as place:
        found = await place.one(evaluator="COUNTS")
    assert (found.outcome.status, found.outcome.exit_code) == ("failed", 7)
    tail = found.outcome.log_tail or ""
    assert tail.endswith("\nTraceback: é\n")
    assert len(tail) == evaluation.LOG_TAIL_CHARS
    assert (found.reward, len(found.traces)) == (2.0, 1)


@pytest.mark.parametrize(
    ("turns", "ends", "status", "why"),
    [(2, 1, "completed", "its work was done"), (0, 0, "failed", "never called its model")],
)
async def test_turns_override_unreliable_exit_code(
    autojump_clock: Clock, tmp_path: Path, turns: int, ends: int, status: str, why: str
) -> None:
    async with town(tmp_path, {"agent": agent(turns=turns, ends=ends, says="bye\n")}) as place:
        found = await place.one(harness=HarnessSpec(import_path="session_kit:LYING_HARNESS"))
    assert (found.outcome.status, found.outcome.exit_code, found.outcome.log_tail) == (status, ends, "bye\n")
    assert why in (found.outcome.reason or "")


async def test_launch_stdin_reaches_harness(autojump_clock: Clock, tmp_path: Path) -> None:
    heard: list[bytes] = []

    async def listener(call: Call) -> int:
        heard.append(call.stdin)
        await trio.lowlevel.checkpoint()
        return 0

    async with town(tmp_path, {"agent": listener}) as place:
        found = await place.one(
            harness=HarnessSpec(import_path="session_kit:LYING_HARNESS"), instruction="two\nlines"
        )
    assert heard == [b"two\nlines"]
    assert found.harness == "liar"


async def test_missing_program_is_failed_run(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path) as place:
        found = await place.one()
    assert (found.outcome.status, found.outcome.exit_code) == ("failed", 127)
    assert "agent" in (found.outcome.log_tail or "")
    assert found.reward == 0.0


async def test_runtime_start_is_retried_once(
    autojump_clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with town(tmp_path, {"agent": agent()}) as place:
        place.runtimes.faults = [RuntimeFault("no space")]
        assert (await place.one()).outcome.status == "completed"
        assert "trying a fresh one: no space" in caplog.text
        place.runtimes.faults = [RuntimeFault("no space"), RuntimeFault("still none")]
        found = await place.one()
        assert (found.outcome.status, found.outcome.boundary, found.outcome.reason) == (
            "error",
            "runtime",
            "still none",
        )
        assert len(place.runtimes.sessions) == 4


async def test_init_attempts_share_one_budget(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent()}) as place:
        place.runtimes.takes, place.runtimes.faults = [15.0, 15.0], [RuntimeFault("no")]
        found = await place.one(budgets={"init_s": 20.0})
    assert (found.outcome.clock, round(found.timing.init_s)) == ("init", 20)


async def test_failed_prepare_step_is_not_retried(autojump_clock: Clock, tmp_path: Path) -> None:
    """A prepare step that fails is the task's fault and is not tried again."""
    async with town(tmp_path, {"agent": agent()}) as place:
        found = await place.one(
            runtime=RuntimeSpec(
                prepare=(PrepareStep(argv=("true",)), PrepareStep(argv=("nothing-like-it", "x")))
            )
        )
        assert (found.outcome.status, found.outcome.boundary) == ("error", "client")
        reason = (
            "prepare step 'nothing-like-it x' ended with exit code 127: nothing-like-it: executable file not"
            " found in $PATH"
        )
        assert found.outcome.reason == reason
        assert len(place.runtimes.sessions) == 1
        found = await place.one(runtime=RuntimeSpec(eval_prepare=(PrepareStep(argv=("false",)),)))
        assert (found.outcome.boundary, len(found.traces), found.reward) == ("evaluator", 1, None)


async def test_runtime_fault_in_run_keeps_turns(autojump_clock: Clock, tmp_path: Path) -> None:
    """A runtime that fails in the run costs no turn, and the run is not tried again."""
    async with town(
        tmp_path, {"agent": agent(turns=3, ends=RuntimeFault("the container is gone"), says="last words")}
    ) as place:
        found = await place.one(evaluator="COUNTS")
    assert (found.outcome.status, found.outcome.boundary, found.outcome.reason) == (
        "error",
        "runtime",
        "the container is gone",
    )
    assert found.outcome.log_tail == "last words"
    assert (len(found.turns), len(found.traces), found.reward) == (3, 1, None)
    assert len(place.runtimes.sessions) == 1
    assert round(found.timing.run_s) == 3


# ── bugs ──────────────────────────────────────────────────────────────────────


async def test_bug_in_session_is_isolated(
    autojump_clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug in one session is logged, and no other session learns of it."""
    async with town(
        tmp_path, {"agent": agent(turns=3), "bad": agent(turns=1, ends=KeyError("a bug"))}
    ) as place:
        good = place.submit(num_samples=3)
        (bad,) = place.submit(harness=HarnessSpec(name="shell", command=("bad",)))
        (late,) = place.submit(harness=HarnessSpec(import_path="session_kit:LATE_HARNESS"))
        await place.over()
        assert [place.of(each).outcome.status for each in good] == ["completed"] * 3
        assert place.of(bad).outcome == Outcome(status="error", boundary="node", reason="KeyError: 'a bug'")
        assert (len(place.of(bad).turns), len(place.of(bad).traces), place.of(bad).reward) == (1, 1, None)
        assert place.of(late).outcome.reason == "IndexError: only when it counts"
    logged = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in logged] == [
        f"session {late} met a bug",
        f"session {bad} met a bug",
    ]
    assert all(record.exc_info for record in logged)


@pytest.mark.parametrize(
    ("builder", "boundary"),
    [("broken_builder", "client"), ("garbage_builder", "client"), ("odd_builder", "node")],
)
async def test_failing_builder_costs_only_traces(
    autojump_clock: Clock, tmp_path: Path, builder: str, boundary: str
) -> None:
    async with town(tmp_path, {"agent": agent()}) as place:
        found = await place.one(builder=BuilderSpec(import_path=f"session_kit:{builder}"), evaluator="COUNTS")
    assert len(found.turns) == 2
    assert (found.outcome.status, found.outcome.boundary, found.traces) == ("error", boundary, ())
    assert [left.reason for left in found.left_out] == [boundary] * 2
    if boundary == "client":  # what cannot be packed shows only when it is
        assert found.reward == 2.0
        assert not violated_invariant(found), "the user's builder is no bug of ours"


async def test_unpublishable_traces_are_left_out(
    autojump_clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with town(tmp_path, {"agent": agent()}) as place:
        place.notes.refuse = [TypeError("can not pack that")]
        found = await place.one(evaluator="COUNTS")
        assert found.outcome == Outcome(
            status="error", boundary="node", reason="TypeError: can not pack that"
        )
        assert (len(found.turns), found.traces, found.reward) == (2, (), None)
        assert found.timing.run_s > 0
        assert (await place.one()).outcome.status == "completed"
    assert "met a bug" in caplog.text


# ── a trainer's cancel ────────────────────────────────────────────────────────


async def test_cancelled_while_queued(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent()}, live=1) as place:
        async with place.stages.live.slot(priority=50):
            (session_id,) = place.submit(task_id="t")
            await trio.sleep(5)
            assert await place.scheduler.cancel("t")
            await place.over()
        assert place.of(session_id).outcome == Outcome(status="cancelled", reason="cancelled in init")
        assert place.runtimes.sessions == []


async def test_cancelled_before_session_begins(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent()}) as place:
        (session_id,) = place.submit(task_id="t")
        await place.scheduler.cancel("t")
        await place.over()
        assert place.of(session_id).outcome == Outcome(status="cancelled", reason="cancelled in init")
        assert place.runtimes.sessions == []


@pytest.mark.parametrize("spoiled", [False, True])
async def test_cancelled_during_init(autojump_clock: Clock, tmp_path: Path, spoiled: bool) -> None:
    async with town(tmp_path, {"agent": agent()}) as place:
        place.runtimes.faults = [RuntimeFault("no")] if spoiled else []
        (session_id,) = place.submit(task_id="t", runtime=SLOW)
        await trio.sleep(2)
        await place.scheduler.cancel("t")
        await place.over()
        found = place.of(session_id)
        assert found.outcome == Outcome(status="cancelled", reason="cancelled in init")
        assert found.timing.init_s == pytest.approx(2.0)


async def test_cancelled_while_ready(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent()}, run=1) as place:
        async with place.stages.run.slot(priority=50):
            (session_id,) = place.submit(task_id="t")
            await place.until("ready")
            await trio.sleep(30)
            await place.scheduler.cancel("t")
            await place.over()
        found = place.of(session_id)
        assert found.outcome == Outcome(status="cancelled", reason="cancelled in ready")
        assert round(found.timing.ready_s) == 30


async def test_cancelled_in_run_keeps_turns(autojump_clock: Clock, tmp_path: Path) -> None:
    """A session that is cancelled in its run keeps its turns, and is not judged."""
    async with town(tmp_path, {"agent": agent(turns=100, each=2.0, says="never")}) as place:
        (session_id,) = place.submit(task_id="t", evaluator="COUNTS")
        await place.until("run")
        await trio.sleep(5)
        await place.scheduler.cancel("t")
        await place.over()
        found = place.of(session_id)
    assert (found.outcome.status, found.outcome.reason, found.outcome.exit_code) == (
        "cancelled",
        "cancelled in run",
        None,
    )
    assert [turn.state for turn in found.turns] == ["complete", "complete", "partial"]
    assert found.traces
    assert (found.reward, found.timing.post_s) == (None, 0.0)


async def test_cancel_does_not_reach_post(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent()}, post=1) as place:
        (session_id,) = place.submit(task_id="t", evaluator="COUNTS")
        await place.until("post")
        assert await place.scheduler.cancel("t")
        await place.over()
        assert (place.of(session_id).outcome.status, place.of(session_id).reward) == ("completed", 2.0)
        async with place.stages.post.slot(priority=50):  # nor one that waits to be judged
            (session_id,) = place.submit(task_id="u", evaluator="COUNTS")
            await place.until("post")
            await place.scheduler.cancel("u")
            await trio.sleep(10)
        await place.over()
        assert (place.of(session_id).outcome.status, place.of(session_id).reward) == ("completed", 2.0)


# ── the node's own end ────────────────────────────────────────────────────────


@pytest.mark.parametrize("phase", ["init", "ready", "run", "post"])
async def test_forced_exit_publishes_nothing(autojump_clock: Clock, tmp_path: Path, phase: str) -> None:
    """A node left by force leaves no container, and publishes nothing."""
    with trio.CancelScope() as force:
        async with town(
            tmp_path, {"agent": agent(turns=50, each=1.0)}, run=0 if phase == "ready" else 8
        ) as place:
            place.submit(runtime=SLOW, evaluator="HANGS", budgets={"run_s": 20.5, "post_s": 1000.0})
            await place.until(phase)
            await trio.sleep(2)
            started = trio.current_time()
            force.cancel()
            await trio.lowlevel.checkpoint()
    assert force.cancelled_caught
    assert trio.current_time() - started < 5, "nothing of it waits for an evaluator"
    place.check_left()
    assert place.published == []
    assert len(place.notes.turns) == {"init": 0, "ready": 0, "run": 3, "post": 21}[phase], (
        "the journal has what it needs to end it later"
    )
