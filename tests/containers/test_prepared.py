"""Who prepares a workspace and who waits: `Workspaces` under virtual time, and sessions that share one."""

import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from attrs import evolve
from fakes_runtime import MemoryCopies, MemoryRuntime
from hypothesis import given, settings
from hypothesis import strategies as st
from session_kit import agent, town
from trio.abc import Clock
from trio.testing import MockClock

from polarnode.containers.pool import RATE_WINDOW_S, StartDurations, TakeRate, enough
from polarnode.containers.prepared import MIN_COPIED_FILES, Workspace, Workspaces, workspace_of
from polarnode.core.errors import Refused, RuntimeFault
from polarnode.core.task import EvaluatorSpec, FileSpec, PrepareStep, RuntimeSpec, VolumeSpec

STEP = RuntimeSpec(prepare=(PrepareStep(argv=("sleep", "10")),))


def workspace(spec: RuntimeSpec = STEP) -> Workspace:
    found = workspace_of(spec, "image")
    assert found is not None
    return found


# ── what a workspace is ───────────────────────────────────────────────────────


def test_visible_differences_make_another_workspace() -> None:
    others = [
        evolve(STEP, workdir="/other"),
        evolve(STEP, user="root"),
        evolve(STEP, env={"A": "1"}),
        evolve(STEP, files=(FileSpec(path="a", text="1"),)),
        evolve(STEP, files=(FileSpec(path="a", text="1", mode=0o755),)),
        evolve(STEP, prepare=(PrepareStep(argv=("sleep", "10"), user="root"),)),
        evolve(STEP, egress=("pypi.example",)),
        evolve(STEP, volumes=(VolumeSpec(source="/a", target="/b"),)),
    ]
    found = [workspace(), *map(workspace, others)]
    assert len(set(found)) == len({each.digest("i") for each in found}) == len(found)
    same = evolve(
        STEP,
        memory_mb=9999,
        cpus=3,
        pids=9,
        disk_mb=99,
        artifacts=("a",),
        eval_prepare=(PrepareStep(argv=("true",)),),
        env={},
    )
    assert workspace(same) == workspace()
    assert workspace().digest("i") != workspace().digest("j"), "a rebuilt image"
    assert workspace_of(STEP, "other") != workspace()


def test_quick_workspace_is_not_copied() -> None:
    few = tuple(FileSpec(path=str(number), text="") for number in range(MIN_COPIED_FILES - 1))
    assert workspace_of(RuntimeSpec(), "i") is None
    assert workspace_of(RuntimeSpec(files=few), "i") is None
    assert workspace_of(RuntimeSpec(files=(*few, FileSpec(path="one more", text=""))), "i") is not None
    assert workspace_of(evolve(STEP, reuse_prepared=False), "i") is None


def test_copying_pays_for_shared_or_repeated() -> None:
    """A copy pays for several sessions, or the second time."""
    known: Workspaces[MemoryRuntime] = Workspaces(copies=MemoryCopies(), most=9)
    assert known.pays(workspace(), shared=True)
    other = workspace(evolve(STEP, user="root"))
    assert not known.pays(other, shared=False)
    assert known.pays(other, shared=False)
    assert not known.pays(None, shared=True)


# ── one prepares, the others wait ─────────────────────────────────────────────


class Yard:
    """Runtimes as they are asked for; `step` is what preparing does."""

    def __init__(self, step: Callable[[MemoryRuntime], Awaitable[None]] | None = None) -> None:
        self.copies = MemoryCopies()
        self.known: Workspaces[MemoryRuntime] = Workspaces(copies=self.copies, most=2)
        self.started: list[tuple[str | None, MemoryRuntime]] = []
        self.prepared = 0
        self.step = step

    async def start(self, image: str | None) -> MemoryRuntime:
        await trio.sleep(1)
        runtime = MemoryRuntime(id=str(len(self.started)))
        self.started.append((image, runtime))
        if image is not None:
            async with AsyncExitStack() as undo:
                undo.push_async_callback(runtime.close)
                self.copies.put(image, runtime)
                undo.pop_all()
        return runtime

    async def prepare(self, runtime: MemoryRuntime) -> None:
        self.prepared += 1
        await trio.sleep(10)
        if self.step is not None:
            await self.step(runtime)
        await runtime.put({"/work/ready": b"1"})

    async def obtain(self, of: Workspace | None = None) -> MemoryRuntime:
        runtime = await self.known.obtain(of or workspace(), self.start, self.prepare)
        assert await runtime.read("/work/ready") == b"1"
        return runtime

    async def close(self) -> None:
        for _, runtime in self.started:
            await runtime.close()


async def test_later_sessions_start_from_copy(autojump_clock: Clock) -> None:
    yard = Yard()
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(yard.obtain)
    assert (yard.prepared, yard.known.made, yard.known.reused, yard.known.kept) == (1, 1, 4, 1)
    assert [image is None for image, _ in yard.started] == [True, False, False, False, False]
    assert trio.current_time() == pytest.approx(12.0, abs=0.1), "not one after the other"
    await yard.close()


async def test_failed_step_frees_the_others(autojump_clock: Clock) -> None:
    """After a step that fails the others try side by side."""
    fails = [True, True, True, False]

    async def step(runtime: MemoryRuntime) -> None:
        await trio.lowlevel.checkpoint()
        if fails.pop(0):
            raise Refused("exit code 1")

    yard, refused = Yard(step), 0

    async def one() -> None:
        nonlocal refused
        try:
            await yard.obtain()
        except Refused:
            refused += 1

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(one)
    assert (refused, yard.prepared, yard.known.made) == (3, 4, 0)
    assert trio.current_time() == pytest.approx(22.0, abs=0.1)
    assert sum(runtime.alive for _, runtime in yard.started) == 1, "those that failed are closed"
    fails += [False]
    await yard.obtain()
    assert yard.known.made == 1, "once one has succeeded the next is copied"
    await yard.close()


async def test_cancelled_preparation_costs_only_time(
    autojump_clock: Clock,
) -> None:
    yard = Yard()
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(5):
            nursery.start_soon(late, yard)
            await yard.obtain()
    assert [runtime.alive for _, runtime in yard.started] == [False, True]
    assert yard.known.expected(workspace(), 7) == (None, 1), "the next may be copied"
    await yard.close()


async def late(yard: Yard) -> None:
    await trio.sleep(2)
    await yard.obtain()


async def test_failed_start_affects_own_session(autojump_clock: Clock) -> None:
    yard = Yard()
    usual, faults = yard.start, [RuntimeFault("no")]

    async def start(image: str | None) -> MemoryRuntime:
        if faults:
            raise faults.pop()
        return await usual(image)

    yard.start = start  # type: ignore[method-assign]
    with pytest.raises(RuntimeFault):
        await yard.obtain()
    await yard.obtain()
    assert (yard.known.made, yard.prepared) == (1, 1)
    await yard.close()


async def test_failed_lookup_does_not_prevent_preparing(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: MemoryCopies, workspace: Workspace) -> str | None:
        await trio.lowlevel.checkpoint()
        raise RuntimeFault("image not known")

    monkeypatch.setattr(MemoryCopies, "find", fails)
    yard = Yard()
    for _ in range(2):
        await yard.obtain()
    assert (yard.prepared, yard.known.made, yard.known.reused) == (1, 1, 1)
    await yard.close()


async def test_second_copy_failure_stops_copying(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    yard = Yard()
    yard.copies.faults = [RuntimeFault("no space left")] * 9
    for _ in range(4):
        await yard.obtain()
    assert (yard.prepared, yard.known.made, len(yard.copies.faults)) == (4, 0, 7)
    assert "this session has its own: no space left" in caplog.text
    await yard.close()


async def test_missing_copy_is_made_again(autojump_clock: Clock) -> None:
    yard = Yard()
    await yard.obtain()
    yard.copies.images.clear()
    await yard.obtain()
    assert (yard.prepared, yard.known.made) == (2, 2)
    await yard.close()


async def test_least_recently_used_copy_goes(autojump_clock: Clock) -> None:
    yard = Yard()
    first, second, third = (workspace(evolve(STEP, user=user)) for user in ("a", "b", "c"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(yard.known.run, trio.Event())
        for each in (first, second, first, third):
            await yard.obtain(each)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert [yard.known.expected(each, 3)[0] is not None for each in (first, second, third)] == [
        True,
        False,
        True,
    ]
    assert len(yard.copies.images) == 2
    await yard.close()


async def test_expected_pool_demand(autojump_clock: Clock) -> None:
    yard = Yard()
    assert yard.known.expected(workspace(), 5) == (None, 1), "one of the task's own image, which prepares"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(yard.obtain)
        await trio.sleep(5)
        assert yard.known.busy(workspace())
        assert yard.known.expected(workspace(), 4) == (None, 0)
    assert yard.known.expected(workspace(), 4) == (workspace().digest("memory"), 4)
    assert not yard.known.busy(workspace())
    await yard.close()


COMERS = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([3.0, 8.0, math.inf]), st.sampled_from(["a", "b"])),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(
    COMERS,
    st.lists(st.sampled_from(["fine", "refused", "fault"]), max_size=4),
    st.lists(st.booleans(), max_size=3),
)
def test_no_waiter_waits_for_ever(
    comers: list[tuple[int, float, str]], steps: list[str], copying: list[bool]
) -> None:
    """Whoever comes and goes nobody waits for ever."""

    async def step(runtime: MemoryRuntime) -> None:
        await trio.lowlevel.checkpoint()
        match steps.pop() if steps else "fine":
            case "refused":
                raise Refused("no")
            case "fault":
                raise RuntimeFault("died")

    async def main() -> None:
        yard = Yard(step)
        yard.copies.faults = [RuntimeFault("full") for broken in copying if broken]
        got: list[MemoryRuntime] = []

        async def come(after: int, patience: float, user: str) -> None:
            await trio.sleep(after)
            with trio.move_on_after(patience):
                try:
                    got.append(await yard.obtain(workspace(evolve(STEP, user=user))))
                except (Refused, RuntimeFault):
                    return

        async with trio.open_nursery() as nursery:
            for each in comers:
                nursery.start_soon(come, *each)
        assert not any(yard.known.busy(workspace(evolve(STEP, user=user))) for user in ("a", "b"))
        alive = {id(runtime) for _, runtime in yard.started if runtime.alive}
        assert alive == {id(runtime) for runtime in got}, "a container is somebody's or closed"
        await yard.close()

    trio.run(main, clock=MockClock(autojump_threshold=0))


# ── sessions that share one ───────────────────────────────────────────────────


async def test_siblings_wait_free_outside_init(autojump_clock: Clock, tmp_path: Path) -> None:
    slow = RuntimeSpec(prepare=(PrepareStep(argv=("sleep", "50")),))
    async with town(tmp_path, {"agent": agent()}, init=1, live=9) as place:
        sharing = place.submit(num_samples=4, runtime=slow, budgets={"init_s": 60.0})
        await trio.sleep(1)
        other = place.submit(num_samples=1)
        await trio.sleep(48)
        assert place.stages.init.statistics().inside == 1
        assert place.stages.init.statistics().waiting <= len(sharing) + len(other) - 1
        await place.over()
    spent = sorted(round(place.of(each).timing.init_s) for each in sharing)
    assert spent == [0, 0, 0, 50]
    assert {each.outcome.status for each in place.published} == {"completed"}


async def test_another_task_passes_waiting_siblings(autojump_clock: Clock, tmp_path: Path) -> None:
    slow = RuntimeSpec(prepare=(PrepareStep(argv=("sleep", "50")),))
    async with town(tmp_path, {"agent": agent(turns=1, each=1.0)}, init=2, live=9) as place:
        place.submit(num_samples=6, runtime=slow)
        await trio.sleep(1)
        (other,) = place.submit()
        await trio.sleep(5)
        assert place.of(other).outcome.status == "completed"
        assert (place.stages.init.statistics().inside, place.stages.init.statistics().waiting) == (1, 0)
        await place.over()


async def test_fresh_evaluator_uses_session_copy(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent(turns=1, each=1.0)}) as place:
        await place.one(
            runtime=STEP, evaluator=EvaluatorSpec(import_path="session_kit:READS", fresh_runtime=True)
        )
        assert (place.runtimes.workspaces.made, place.runtimes.workspaces.reused) == (1, 1)


async def test_failing_step_fails_whole_group(autojump_clock: Clock, tmp_path: Path) -> None:
    broken = RuntimeSpec(prepare=(PrepareStep(argv=("false",)),))
    async with town(tmp_path, {"agent": agent()}, init=2) as place:
        place.submit(num_samples=5, runtime=broken)
    assert [(each.outcome.status, each.outcome.boundary) for each in place.published] == [
        ("error", "client")
    ] * 5
    assert place.runtimes.workspaces.made == 0


async def test_cancelled_preparer_is_succeeded(autojump_clock: Clock, tmp_path: Path) -> None:
    """A session that is cancelled while it prepares gives its place to the next."""
    async with town(tmp_path, {"agent": agent()}, init=1) as place:
        place.submit(
            task_id="first",
            num_samples=1,
            priority=90,
            runtime=STEP,
            evaluator=EvaluatorSpec(fresh_runtime=True),
        )
        await trio.sleep(2)
        place.submit(task_id="second", num_samples=2, runtime=STEP)
        await place.scheduler.cancel("first")
        await place.over()
    assert sorted((each.task_id, each.outcome.status) for each in place.published) == [
        ("first", "cancelled"), ("second", "completed"), ("second", "completed"),
    ]  # fmt: skip


# ── how many stand ready ──────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("waiting", "rate", "start_s", "kept"),
    [
        (0, 50.0, 9.0, 0),
        (1, 0.0, 0.5, 1),
        (9, 0.01, 0.5, 1),
        (9, 2.0, 1.0, 4),
        (3, 2.0, 1.0, 3),
        (99, 10.0, 3.0, 8),
    ],
)
def test_warm_count_covers_start_time(waiting: int, rate: float, start_s: float, kept: int) -> None:
    """As many are enough as are taken while one starts."""
    assert enough(waiting=waiting, rate=rate, start_s=start_s, most=8) == kept


def test_take_rate_is_recent() -> None:
    takes = TakeRate()
    assert takes.rate(5.0) == 0.0
    for at in range(800):
        takes.count(at / 4)
    assert takes.rate(200.0) == pytest.approx(4.0, rel=0.05)
    assert takes.rate(200.0 + 5 * RATE_WINDOW_S) < 0.05


def test_start_time_uses_recent_starts() -> None:
    starts = StartDurations()
    starts.took(2.0)
    assert starts.mean_s == 2.0
    for _ in range(20):
        starts.took(0.1)
    assert starts.mean_s == pytest.approx(0.1, abs=0.01)
