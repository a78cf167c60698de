"""What a session's containers are to it: sealed while its harness runs, reaching what its task may, telling
why they ended, its evaluator's ready.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, field
from fakes_runtime import Call, MemoryRuntimes
from session_kit import agent, town
from trio.abc import Clock

from polarnode.core.conversation import Json
from polarnode.core.errors import RuntimeFault
from polarnode.core.task import EvaluatorSpec, PrepareStep, RuntimeSpec
from polarnode.rollouts.session_containers import open_prefetched_runtime
from polarnode.support.concurrency import PrioritySemaphore

# ── the seal ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("read_only", [True, False])
async def test_container_sealed_during_run(autojump_clock: Clock, tmp_path: Path, read_only: bool) -> None:
    """A container is sealed while its harness runs, and open when it is judged."""
    seen: list[bool] = []

    async def program(call: Call) -> int:
        seen.append(call.runtime.sealed is not None)
        await call.runtime.put({"/work/answer": b"42", "/opt/cache/x": b"1"})
        try:
            await call.runtime.put({"/etc/x": b"1"})
        except RuntimeFault:
            seen.append(True)
        return 0

    async with town(tmp_path, {"agent": program}) as place:
        found = await place.one(
            runtime=RuntimeSpec(read_only=read_only, writable=("/opt/cache",)), evaluator="READS"
        )
        (runtime,) = place.runtimes.opened
    assert seen == ([True, True] if read_only else [False])
    assert (found.reward, runtime.sealed) == (1.0, None)


async def test_sealing_failure_ends_in_init(
    autojump_clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: Any, spec: RuntimeSpec) -> None:
        await trio.lowlevel.checkpoint()
        raise RuntimeFault("the root of a container can not be made read-only")

    monkeypatch.setattr("fakes_runtime.MemoryRuntime.seal", fails)
    async with town(tmp_path, {"agent": agent()}) as place:
        found = await place.one(budgets={"retries": 0})
        assert (found.outcome.status, found.outcome.boundary) == ("error", "runtime")
        assert len(place.runtimes.opened) == 2, "a fresh one was tried"


# ── why it ended ──────────────────────────────────────────────────────────────


async def test_overfull_disk_is_reported_and_judged(autojump_clock: Clock, tmp_path: Path) -> None:
    """A harness that wrote too much is told so, and its session is judged."""

    async def fills(call: Call) -> int:
        await trio.sleep(1)
        call.runtime.ended_because = "its container wrote more than the 64 MiB of its disk_mb"
        return 137

    async with town(tmp_path, {"agent": fills}) as place:
        found = await place.one(evaluator="COUNTS")
    assert (found.outcome.status, found.outcome.exit_code, found.outcome.boundary) == ("failed", 137, None)
    assert found.outcome.reason == "its container wrote more than the 64 MiB of its disk_mb"
    assert found.reward == 0.0


@pytest.mark.parametrize(("ends", "status"), [(137, "failed"), (0, "completed")])
async def test_out_of_memory_kills_are_reported(
    autojump_clock: Clock, tmp_path: Path, ends: int, status: str
) -> None:
    usual = agent(turns=1, ends=ends)

    async def program(call: Call) -> int:
        usual.sessions_by_key = program.sessions_by_key  # type: ignore[attr-defined]
        call.runtime.ooms = 2
        return await usual(call)

    async with town(tmp_path, {"agent": program}) as place:
        found = await place.one(runtime=RuntimeSpec(memory_mb=512))
    assert (found.outcome.status, found.metrics["oom_kills"]) == (status, 2)
    said = "the kernel ended 2 of its programs: its 512 MiB of memory were spent"
    assert (said in (found.outcome.reason or "")) == (status == "failed")


async def test_step_and_evaluator_disk_limits(autojump_clock: Clock, tmp_path: Path) -> None:
    """A step and an evaluator that write too much are told so."""

    async def fills(call: Call) -> int:
        await trio.sleep(1)
        call.runtime.ended_because = "the session wrote more than its disk_mb (64)"
        return 137

    async with town(tmp_path, {"agent": agent(), "fills": fills}) as place:
        found = await place.one(runtime=RuntimeSpec(prepare=(PrepareStep(argv=("fills",)),)))
        assert (found.outcome.status, found.outcome.boundary) == ("error", "client")
        assert "ended with exit code 137" in (found.outcome.reason or "")
        assert "(the session wrote more than its disk_mb (64))" in (found.outcome.reason or "")
        found = await place.one(evaluator=EvaluatorSpec(name="command", config={"argv": ["fills"]}))
        assert (found.outcome.status, found.outcome.boundary, found.reward) == ("error", "evaluator", None)
        assert found.outcome.reason == "the evaluator was ended: the session wrote more than its disk_mb (64)"
        cases: list[Json] = [{"argv": ["fills"]}]
        programs = EvaluatorSpec(name="program_cases", config={"cases": cases})
        found = await place.one(evaluator=programs)
        assert (found.outcome.status, found.reward) == ("completed", 0.0), (
            "a program of the agent's is a case"
        )


# ── what it reaches ───────────────────────────────────────────────────────────


@define(eq=False)
class Proxies:
    """As `NodeEgress`: a proxy that is an address, one at a time a network."""

    names: tuple[str, ...] = ("pypi.example", "a")
    opened: list[int] = field(factory=list)
    asked: list[tuple[str, ...]] = field(factory=list)

    @asynccontextmanager
    async def open(self, network: int, asked: tuple[str, ...]) -> AsyncIterator["Proxies"]:
        assert network not in self.opened
        self.opened.append(network)
        self.asked.append(asked)
        await trio.lowlevel.checkpoint()
        try:
            yield self
        finally:
            self.opened.remove(network)

    def check(self, asked: tuple[str, ...]) -> None: ...

    env: Mapping[str, str] = {"https_proxy": "http://127.0.0.1:9", "NO_PROXY": "localhost"}

    def figures(self) -> Mapping[str, Json]:
        return {"allowed": {"pypi.example": 1}, "sent_bytes": 10}


async def test_all_stages_reach_same_names(autojump_clock: Clock, tmp_path: Path) -> None:
    """Steps, harness and evaluator reach the same network names."""
    proxies, seen = Proxies(), dict[str, str | None]()

    def notes(name: str) -> Any:
        async def program(call: Call) -> int:
            await trio.sleep(1)
            seen[name] = call.env.get("https_proxy")
            return 0

        return program

    names = ("step", "agent", "evaluation", "test")
    steps = {"prepare": (PrepareStep(argv=("step",)),), "eval_prepare": (PrepareStep(argv=("evaluation",)),)}
    async with town(tmp_path, {name: notes(name) for name in names}, egress=proxies) as place:
        judged = EvaluatorSpec(name="command", config={"argv": ["test"]})
        found = await place.one(runtime=RuntimeSpec(egress=("pypi.example",), **steps), evaluator=judged)
        assert seen == dict.fromkeys(names, "http://127.0.0.1:9")
        assert (found.reward, proxies.opened, set(proxies.asked)) == (1.0, [], {("pypi.example",)})
        assert found.metrics["egress"] == {"allowed": {"pypi.example": 3}, "sent_bytes": 30}
        own = RuntimeSpec(egress=("pypi.example",), env={"https_proxy": "mine"}, **steps)
        await place.one(runtime=own, evaluator=judged)
        assert (seen["step"], seen["agent"]) == ("mine", "mine"), "what the task says counts more"
        await place.one(runtime=RuntimeSpec(**steps), evaluator=judged)
        assert seen == dict.fromkeys(names, None)


async def test_fresh_evaluator_containers_reach_names(autojump_clock: Clock, tmp_path: Path) -> None:
    """Both containers of a fresh evaluator reach the allowed names."""
    proxies = Proxies()
    async with town(tmp_path, {"agent": agent()}, egress=proxies) as place:
        found = await place.one(
            runtime=RuntimeSpec(egress=("a",)), evaluator=EvaluatorSpec(import_path="session_kit:TAKES")
        )
    assert found.reward == 0.0
    assert proxies.opened == []


# ── limits that change ────────────────────────────────────────────────────────


async def test_held_stage_costs_no_budget(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent(turns=1, each=3.0)}) as place:
        for stage in (place.stages.init, place.stages.run, place.stages.post):
            stage.adjust(0, "memory: 1 MiB left of the 1024 kept free")
        (session_id,) = place.submit(budgets={"init_s": 5.0, "run_s": 5.0, "post_s": 5.0})
        for stage in (place.stages.init, place.stages.run, place.stages.post):
            await trio.sleep(1000)
            assert place.scheduler.statistics().stages["init"].held_back == (
                None if stage is not place.stages.init else stage.held_back
            )
            stage.adjust(8)
        await place.over()
        found = place.of(session_id)
    assert found.outcome.status == "completed"
    assert (found.timing.init_s, found.timing.run_s, found.timing.post_s) == (
        pytest.approx(0),
        pytest.approx(3),
        pytest.approx(0),
    )
    assert found.timing.ready_s == pytest.approx(1000)


# ── made beforehand, alone ────────────────────────────────────────────────────


async def test_prefetch_releases_runtime_on_error(autojump_clock: Clock) -> None:
    """An error beside a prefetched runtime is raised as itself, and releases the runtime."""
    runtimes, settled = MemoryRuntimes(), list[bool]()

    async def fails() -> None:
        opened = partial(runtimes.open, RuntimeSpec(), session_id="s", lifetime_s=9.0)
        async with open_prefetched_runtime(
            opened, PrioritySemaphore(limit=1), budget_s=9.0, on_settled=lambda: settled.append(True)
        ) as prefetched:  # type: ignore[arg-type]
            prefetched.begin()
            await trio.sleep(1)
            assert runtimes.opened[0].alive
            raise KeyError("beside it")

    with pytest.raises(KeyError):
        await fails()
    assert (runtimes.opened[0].alive, settled) == (False, [True])


async def test_prefetch_ends_at_its_budget(autojump_clock: Clock) -> None:
    @asynccontextmanager
    async def never() -> AsyncIterator[Any]:
        await trio.sleep_forever()
        yield

    stage = PrioritySemaphore(limit=1)
    async with open_prefetched_runtime(never, stage, budget_s=9.0, on_settled=lambda: None) as prefetched:
        prefetched.begin()
        await trio.sleep(1)
        assert stage.statistics().inside == 1
        assert await prefetched.take() is None
        assert stage.statistics().inside == 0
    assert trio.current_time() == pytest.approx(9.0)
