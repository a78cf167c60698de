"""Limits that follow the machine and the engine: the decision as transcripts, the readings from files, the
watcher on real gates.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from trio.abc import Clock

from polarnode.engine.routing import EngineStatistics, HostStatistics
from polarnode.rollouts.machine_watch import Machine, MachineWatch, _load_readings, read_machine
from polarnode.rollouts.services import StageSlots
from polarnode.rollouts.stage_limits import (
    FEW,
    SETTLE,
    LoadReadings,
    SessionCounts,
    StageBounds,
    State,
    begin,
    decide,
)
from polarnode.support.concurrency import PrioritySemaphore

BOUNDS = StageBounds(init=4, run=64, post=8, memory_mb=1000, disk_mb=4000)
WORK = SessionCounts(at_work=10, running=64)
FINE = LoadReadings(memory_mb=9000, disk_mb=90_000, cpu=10, running=32)


def play(*steps: tuple[LoadReadings, SessionCounts], state: State | None = None) -> list[State]:
    states = [state or begin(BOUNDS)]
    for readings, standing in steps:
        states.append(decide(states[-1], readings, standing, BOUNDS))
    return states[1:]


# ── INIT ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("readings", "held"),
    [
        (LoadReadings(memory_mb=412, disk_mb=9999), "memory: 412 MiB left of the 1000 kept free"),
        (LoadReadings(memory_mb=2000, disk_mb=3999), "disk: 3999 MiB left of the 4000 kept free"),
    ],
)
def test_shortage_holds_new_sessions(readings: LoadReadings, held: str) -> None:
    (state,) = play((readings, WORK))
    assert (state.init, state.init_held, state.short) == (0, held, True)
    assert (state.run, state.post) == (64, 8), "what has begun goes on"


def test_idle_node_begins_despite_shortage() -> None:
    short = LoadReadings(memory_mb=10)
    states = play(
        (short, SessionCounts(at_work=0, running=0)),
        (short, SessionCounts(at_work=1, running=0)),
        (short, SessionCounts(at_work=0, running=0)),
    )
    assert [state.init for state in states] == [1, 0, 1]
    assert all(state.init_held for state in states)


def test_resume_needs_margin_above_reserve() -> None:
    """A little more than the reserve must be free before sessions begin again."""
    states = play(*((LoadReadings(memory_mb=left), WORK) for left in (999, 1050, 1099, 1100, 1050)))
    assert [state.init for state in states] == [0, 0, 0, 4, 4]


def test_unknown_readings_hold_nothing() -> None:
    (state,) = play((LoadReadings(), WORK))
    assert (state.init, state.run, state.post, state.init_held, state.run_held, state.post_held) == (
        4,
        64,
        8,
        None,
        None,
        None,
    )


# ── RUN ───────────────────────────────────────────────────────────────────────

CROWDED = LoadReadings(memory_mb=9000, disk_mb=90_000, running=32, waiting=64)


def test_run_limit_follows_queue_length() -> None:
    states = play(*[(CROWDED, WORK)] * 3)
    assert [state.run for state in states] == [
        64,
        51,
        51,
    ], "a burst of a second is no queue; then a fifth of those that run"
    assert states[-1].run_held == "engine: 64 requests wait while 32 are served"
    later = play(*[(CROWDED, SessionCounts(at_work=50, running=51))] * SETTLE, state=states[-1])
    assert later[-1].run == 40, "not before those inside had time to be served"
    relieved = play(*[(FINE, SessionCounts(at_work=50, running=40))] * 60, state=later[-1])
    assert relieved[-1] == State(
        init=4, run=64, post=8, queue=relieved[-1].queue, post_in=relieved[-1].post_in
    )
    assert all(after.run - before.run in (0, 1) for before, after in pairwise(relieved))


def test_run_limit_keeps_engine_busy() -> None:
    states = play(*[(CROWDED, SessionCounts(at_work=9, running=8))] * 200)
    assert min(state.run for state in states) == 8


def test_unreached_limits_shrink_to_usage() -> None:
    states = play(*[(CROWDED, SessionCounts(at_work=30, running=30))] * 3)
    assert states[-1].run == 24


@pytest.mark.parametrize(
    "readings",
    [LoadReadings(running=0, waiting=FEW - 1), LoadReadings(running=32, waiting=500, serving=False)],
)
def test_short_queue_leaves_run_limit(readings: LoadReadings) -> None:
    """A few requests and a paused engine are no queue."""
    assert {state.run for state in play(*[(readings, WORK)] * 30)} == {64}


# ── POST ──────────────────────────────────────────────────────────────────────


def test_post_limit_follows_cpu_in_steps() -> None:
    busy = play(*[(LoadReadings(cpu=95.0), WORK)] * 40)
    assert [busy[index].post for index in (0, 4, 5, 39)] == [7, 7, 6, 2]
    assert busy[-1].post_held == "cpu: some program waited for it 95 % of the time"
    between = play(*[(LoadReadings(cpu=70.0), WORK)] * 10, state=busy[-1])
    assert between[-1].post == 2
    assert play(*[(LoadReadings(cpu=20.0), WORK)] * 40, state=between[-1])[-1].post == 8


ANY = st.one_of(st.none(), st.floats(0, 20_000))
READINGS = st.builds(LoadReadings, memory_mb=ANY, disk_mb=ANY, cpu=st.one_of(st.none(), st.floats(0, 100)), running=st.integers(0, 99),
                     waiting=st.integers(0, 500), serving=st.booleans())  # fmt: skip
STEPS = st.lists(
    st.tuples(READINGS, st.builds(SessionCounts, at_work=st.integers(0, 90), running=st.integers(0, 64))),
    max_size=40,
)
SIZES = st.builds(
    StageBounds,
    init=st.integers(1, 9),
    run=st.integers(1, 200),
    post=st.integers(1, 9),
    memory_mb=st.just(1000),
    disk_mb=st.just(4000),
)


@given(STEPS, SIZES)
def test_whatever_is_read_nothing_stops_for_ever(
    steps: Sequence[tuple[LoadReadings, SessionCounts]], bounds: StageBounds
) -> None:
    state = begin(bounds)
    for readings, standing in steps:
        state = decide(state, readings, standing, bounds)
        assert 1 <= state.run <= bounds.run
        assert 1 <= state.post <= bounds.post
        assert (state.init == 0) <= (standing.at_work > 0)
        assert state.init <= bounds.init
        for limit, most, held in (
            (state.run, bounds.run, state.run_held),
            (state.post, bounds.post, state.post_held),
        ):
            assert (limit < most) == (held is not None)
    for _ in range(300):
        state = decide(state, LoadReadings(), SessionCounts(at_work=0, running=0), bounds)
    assert (state.init, state.run, state.post) == (
        bounds.init,
        bounds.run,
        bounds.post,
    ), "and in the end all is as it was"


# ── readings ──────────────────────────────────────────────────────────────────


def test_readings_of_this_machine(tmp_path: Path) -> None:
    machine = read_machine([tmp_path])
    assert machine.memory_mb is not None
    assert machine.memory_mb > 0
    assert machine.disk_mb is not None
    assert machine.disk_mb > 0
    assert machine.cpu is not None
    assert 0 <= machine.cpu <= 100


def machine_of(root: Path, **files: str) -> Machine:
    for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    8388608 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return read_machine([], root)


def test_enclosing_cgroups_count_too(tmp_path: Path) -> None:
    stat = "anon 1\ninactive_file 104857600\ntotal_inactive_file 0\n"
    two = {"memory.max": "1073741824\n", "memory.current": "524288000\n", "memory.stat": stat}
    machine = machine_of(
        tmp_path,
        **{
            "proc/self/cgroup": "0::/outer/inner\n",
            **{f"sys/fs/cgroup/outer/{name}": text for name, text in two.items()},
        },
    )
    assert machine == Machine(memory_mb=1024 - 500 + 100, disk_mb=None, cpu=None)


def test_cgroup_version_1_is_read(tmp_path: Path) -> None:
    one = {
        "memory.limit_in_bytes": "2147483648\n",
        "memory.usage_in_bytes": "1073741824\n",
        "memory.stat": "total_inactive_file 1048576\n",
    }
    none = {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "1\n"}
    listing = {
        "proc/self/cgroup": "9:name=systemd:/\n5:memory:/node\n",
        "proc/loadavg": "0.00 1 1 1/2 3",
        "proc/pressure/cpu": "some avg10=12.50 avg60=1\n",
    }
    put = {f"sys/fs/cgroup/memory/node/{name}": text for name, text in one.items()} | {
        f"sys/fs/cgroup/memory/{name}": text for name, text in none.items()
    }
    assert machine_of(tmp_path, **listing, **put) == Machine(memory_mb=1025, disk_mb=None, cpu=12.5)


def test_load_average_replaces_missing_pressure(tmp_path: Path) -> None:
    """Without the kernel's pressure files the load is read."""
    machine = machine_of(tmp_path, **{"proc/loadavg": "100000.00 1 1 1/2 3"})
    assert machine.memory_mb == 8192
    assert machine.cpu is not None
    assert machine.cpu > 99


# ── the watcher ───────────────────────────────────────────────────────────────


async def test_watcher_adjusts_gates_with_reason(autojump_clock: Clock) -> None:
    stages = StageSlots(
        live=PrioritySemaphore(limit=68),
        init=PrioritySemaphore(limit=4),
        run=PrioritySemaphore(limit=64),
        post=PrioritySemaphore(limit=8),
    )
    host = HostStatistics(
        index=0, state="ready", pid=1, gpus=(0,), in_flight=0, running=32, waiting=64, token_usage=0.9, restarts=0, weight_version="1", last_error=None
    )  # fmt: skip
    engine = EngineStatistics(hosts=(host,), vocab_size=9, context_length=9, weight_version="1", paused=None)
    machines = [Machine(memory_mb=10, disk_mb=90_000, cpu=1)] * 5 + [
        Machine(memory_mb=9000, disk_mb=90_000, cpu=1)
    ] * 1000
    held: list[bool] = []
    short: list[bool] = []
    watch = MachineWatch(
        stages=stages, bounds=BOUNDS, ready_limit=4, engines=lambda: engine, read=lambda: machines.pop(0), pause_prewarm=held.append, memory_short=short.append
    )  # fmt: skip
    async with stages.run.slot(priority=50), trio.open_nursery() as nursery:
        await nursery.start(started, watch)
        statistics = stages.init.statistics()
        assert (statistics.limit, statistics.held_back) == (0, "memory: 10 MiB left of the 1000 kept free")
        assert held == [True]
        # no deadline: virtual time would jump to it while a look is in its thread
        async with stages.init.slot(priority=50):
            assert held == short == [True, False]
        assert stages.init.statistics().held_back is None
        assert stages.run.statistics().limit == 8
        assert stages.live.statistics().limit == 12
        nursery.cancel_scope.cancel()


def test_calls_of_one_session_count_once() -> None:
    """What waits in the node counts by session: 500 calls of one are one."""
    host = HostStatistics(
        index=0, state="ready", pid=1, gpus=(0,), in_flight=0, running=32, waiting=2, token_usage=0.9, restarts=0, weight_version="1", last_error=None, queued=500, queued_sessions=1
    )  # fmt: skip
    engine = EngineStatistics(hosts=(host,), vocab_size=9, context_length=9, weight_version="1", paused=None)
    machine = Machine(memory_mb=1, disk_mb=1, cpu=1)
    assert _load_readings(machine, engine).waiting == 3
    many = evolve(engine, hosts=(evolve(host, queued_sessions=50),))
    assert _load_readings(machine, many).waiting == 52


async def started(watch: MachineWatch, task_status: trio.TaskStatus[None]) -> None:
    async with trio.open_nursery() as nursery:
        ready = trio.Event()
        nursery.start_soon(watch.run, ready)
        await ready.wait()
        task_status.started()
