"""Measure prewarming: containers a second, how much of INIT hides behind RUN, waits of evaluators.

    python benchmarks/runtimes.py                 two minutes, real Podman, no engine: harnesses that sleep
    python benchmarks/runtimes.py --sessions 32 --run-s 10 --files 2000

Does the same work in three ways, one after another in one run, so that other load affects all of them. `each
prepares` is a cold start and the task's steps in every container. `from a copy` prepares once and starts the
others from the copy, still cold. `prewarmed` also has warm containers of the copy. Ratios are to the first
row. Between the start of the first harness and that of the last, `RUN idle` is the share of empty run slots,
and `hidden` the share of the time in INIT during which no run slot was empty.
"""

import argparse
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from functools import partial
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory
from typing import Final

import trio
from attrs import define, evolve, field, frozen

from polarnode.containers.images import ensure_images
from polarnode.containers.probe import default_state_dir
from polarnode.containers.recipes import RuntimesSettings
from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import NodeRuntimes, open_runtimes
from polarnode.core.errors import EvaluatorError
from polarnode.core.ports import Judge
from polarnode.core.task import Budgets, EvaluatorSpec, HarnessSpec, PrepareStep, RuntimeSpec, TaskSpec
from polarnode.core.trajectory import Trajectory
from polarnode.gateway.live_sessions import LiveSessions
from polarnode.journal import queries
from polarnode.journal.journal import open_journal
from polarnode.journal.log.port import NodeFacts
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.journal.values import EventFilters
from polarnode.rollouts import session, session_containers
from polarnode.rollouts.admission import TaskAdmission, TaskSubmission
from polarnode.rollouts.forks import NoParents
from polarnode.rollouts.freezer import ContainerFreezer
from polarnode.rollouts.lifecycle import LiveSessionFactory
from polarnode.rollouts.recovery import recover
from polarnode.rollouts.scheduler import Scheduler, make_scheduler
from polarnode.rollouts.services import NoCachePlaces, NodeIdentity, StageSlots
from polarnode.rollouts.session_containers import NodeContainers
from polarnode.rollouts.snapshots import NodeSnapshots
from polarnode.support.concurrency import PrioritySemaphore, open_background
from polarnode.support.metrics import NodeCounters

AT_ONCE: Final = 4  # the node's init_limit
RUN_PLACES: Final = 4
READY_PLACES: Final = 4  # the node's ready_limit
WARM: Final = 8  # the node's
LIFETIME_S: Final = 900.0
LOOK_S: Final = 0.02

# A small repository with its packages: that many files of 4 KB in folders of a hundred.
MAKE: Final = (
    'i=0; while [ $i -lt "$1" ]; do mkdir -p d$((i/100)); head -c 4096 /dev/urandom > d$((i/100))/f$i;'
    " i=$((i+1)); done"
)


@frozen(kw_only=True)
class Way:
    """One row of each table."""

    name: str
    reuse: bool
    warm: int
    beforehand: bool


WAYS: Final = (
    Way(name="each prepares", reuse=False, warm=0, beforehand=False),
    Way(name="from a copy", reuse=True, warm=0, beforehand=False),
    Way(name="prewarmed", reuse=True, warm=WARM, beforehand=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--run-s", type=float, default=5.0)
    parser.add_argument("--files", type=int, default=200)
    given = parser.parse_args()
    trio.run(measure, given.sessions, given.run_s, given.files)
    return 0


async def measure(sessions: int, run_s: float, files: int) -> None:
    """All three tables."""
    with TemporaryDirectory() as folder:
        await ensure_images(_settings(0), ["base"], log=Path(folder) / "build.log", report=print)
        started = [await starts_a_second(way, sessions, files) for way in WAYS]
        table(
            "containers started",
            ("a second", "ratio"),
            [(f"{each:.2f}", f"{each / started[0]:.1f}×") for each in started],
        )
        flows = [await flow(way, sessions, run_s, files, Path(folder)) for way in WAYS]
        table(
            "INIT behind RUN",
            ("INIT s each", "RUN idle", "hidden", "all s"),
            [each.shown() for each in flows],
        )
        waits = [await evaluators_wait(way, sessions, run_s, files, Path(folder)) for way in WAYS]
        table(
            "evaluator's runtime",
            ("POST s, median", "ratio"),
            [(f"{each:.2f}", f"{each / waits[0]:.2f}×") for each in waits],
        )


def table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """One table, a row a way."""
    print(f"\n| {' | '.join((title, *columns))} |\n|{'---|' * (len(columns) + 1)}")
    for way, row in zip(WAYS, rows, strict=True):
        print(f"| {' | '.join((way.name, *row))} |", flush=True)


def _settings(warm: int) -> RuntimesSettings:
    return RuntimesSettings(state_dir=default_state_dir(), node_id="benchmark", warm=warm)


def _spec(way: Way, files: int) -> RuntimeSpec:
    """A workspace nobody prepared before."""
    steps = (
        PrepareStep(argv=("sh", "-c", MAKE, "sh", str(files))),
        PrepareStep(argv=("true", secrets.token_hex(8))),
    )
    return RuntimeSpec(image="base", memory_mb=256, pids=64, prepare=steps, reuse_prepared=way.reuse)


# ── containers a second ───────────────────────────────────────────────────────


async def starts_a_second(way: Way, count: int, files: int) -> float:
    """Containers with their workspace, AT_ONCE at a time, from the first to the last. The one that prepares
    for all is not counted.
    """
    spec, places = _spec(way, files), trio.CapacityLimiter(AT_ONCE)
    counted = count if way.reuse else count - 1
    async with (
        open_runtimes(_settings(way.warm)) as runtimes,
        opened(runtimes, spec),
        AsyncExitStack() as held,
    ):
        await _warmed(runtimes, spec, min(way.warm, count))
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(counted):
                nursery.start_soon(_start_one, runtimes, spec, places, held)
        return counted / (trio.current_time() - began)


async def _start_one(
    runtimes: NodeRuntimes, spec: RuntimeSpec, places: trio.CapacityLimiter, held: AsyncExitStack
) -> None:
    async with places:
        await held.enter_async_context(opened(runtimes, spec))


async def _warmed(runtimes: NodeRuntimes, spec: RuntimeSpec, count: int) -> None:
    """A group was submitted a while ago: the pool is as full as its own rule makes it."""
    runtimes.prewarm(spec, 1000 if count else 0)
    while count and not runtimes.statistics().warm:  # noqa: ASYNC110 (seen from outside)
        await trio.sleep(0.05)


def opened(runtimes: NodeRuntimes, spec: RuntimeSpec) -> AbstractAsyncContextManager[PodmanRuntime]:
    async def prepare(runtime: PodmanRuntime) -> None:
        await session_containers.prepare(runtime, spec)

    return runtimes.open_prepared(
        spec, session_id="benchmark", lifetime_s=LIFETIME_S, prepare=prepare, shared=True
    )


# ── sessions ──────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Flow:
    """Sessions from the first to the last. Shares are of the time between the first harness that runs and the
    last that begins.
    """

    ended: tuple[Trajectory, ...]
    spent: float
    idle: float
    hidden: float

    def shown(self) -> tuple[str, ...]:
        """Its row."""
        init = statistics.mean(each.timing.init_s for each in self.ended)
        return f"{init:.2f}", f"{self.idle:.0%}", f"{self.hidden:.0%}", f"{self.spent:.1f}"


@define(eq=False)
class Looks:
    """The stages, looked at all the time."""

    scheduler: Scheduler
    places: list[int] = field(factory=list)  # of RUN that are taken, at each look
    init: list[bool] = field(factory=list)  # whether somebody is in INIT

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            stages = self.scheduler.statistics().stages
            self.places.append(stages["run"].inside)
            self.init.append(stages["init"].inside > 0)
            await trio.sleep(LOOK_S)

    def shares(self) -> tuple[float, float]:
        """RUN idle, and INIT hidden."""
        began = next((index for index, inside in enumerate(self.places) if inside), 0)
        over = max((index for index, busy in enumerate(self.init) if busy), default=began) + 1
        places, init = self.places[began:over], self.init[began:over]
        if not any(init):
            return 0.0, 1.0
        hidden = sum(inside == RUN_PLACES for inside, busy in zip(places, init, strict=True) if busy) / sum(
            init
        )
        return 1 - sum(places) / (RUN_PLACES * len(places)), hidden


async def flow(way: Way, count: int, run_s: float, files: int, folder: Path) -> Flow:
    """A task's sessions through all phases. The first way has no READY either: each place of RUN waits for
    its own INIT.
    """
    ready = READY_PLACES if way.beforehand or way.reuse else 0
    return await _played(way, _task(way, count, run_s, files), folder, ready)


async def evaluators_wait(way: Way, count: int, run_s: float, files: int, folder: Path) -> float:
    """The median of POST, whose evaluator has a runtime of its own and does nothing in it."""
    evaluator = EvaluatorSpec(name="command", config={"argv": ["true"]}, fresh_runtime=True)
    played = await _played(
        way, evolve(_task(way, count, run_s, files), evaluator=evaluator), folder, READY_PLACES
    )
    return statistics.median(each.timing.post_s for each in played.ended)


def _task(way: Way, count: int, run_s: float, files: int) -> TaskSpec:
    harness = HarnessSpec(name="shell", command=("sleep", str(run_s)))
    return TaskSpec(
        instruction="sleep",
        harness=harness,
        num_samples=count,
        runtime=_spec(way, files),
        budgets=Budgets(retries=0),
    )


async def _played(way: Way, task: TaskSpec, folder: Path, ready: int) -> Flow:
    with _beforehand(way.beforehand):
        async with (
            open_runtimes(_settings(way.warm)) as runtimes,
            open_scheduler(runtimes, folder, ready, way.warm) as scheduler,
        ):
            looks, began = Looks(scheduler), trio.current_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(looks.run)
                ended = await run_task(scheduler, task)
                nursery.cancel_scope.cancel()
            spent, (idle, hidden) = trio.current_time() - began, looks.shares()
    wrong = [each.outcome for each in ended if each.outcome.status not in ("completed", "failed")]
    if wrong:
        raise SystemExit(f"a session ended wrong, the figures mean nothing: {wrong[0]}")
    return Flow(ended=ended, spent=spent, idle=idle, hidden=hidden)


async def run_task(scheduler: Scheduler, task: TaskSpec) -> tuple[Trajectory, ...]:
    """Run all of a task's sessions, and give their trajectories as the journal has them."""
    log = scheduler.log
    assert isinstance(log, SqliteLog)
    submission = TaskSubmission(
        log=log,
        admission=scheduler.admission,
        registry=scheduler.registry,
        now=scheduler.now,
        runs_tasks=True,
    )
    task_id, _ = await submission.submit(task)
    seen = log.news
    while log.open_places:
        await log.wait_news(seen, LOOK_S)
        seen = log.news
    reader = log.journal.reader
    await log.journal.writer.flush()
    page = await reader.events(0, filters=EventFilters(kinds=("trajectory",), task_id=task_id))
    found = [await reader.query(queries.trajectory, each.key.partition(":")[2]) for each in page.events]
    return tuple(each for each in found if each is not None)


@contextmanager
def _beforehand(wanted: bool) -> Iterator[None]:
    """Without it evaluators open their runtimes in POST."""
    usual = vars(session)["open_prefetched_runtime"]
    if not wanted:
        setattr(session, "open_prefetched_runtime", lambda *_, **__: nullcontext())  # noqa: B010 (not one of its exports)
    try:
        yield
    finally:
        setattr(session, "open_prefetched_runtime", usual)  # noqa: B010


@asynccontextmanager
async def open_scheduler(
    runtimes: NodeRuntimes, folder: Path, ready: int, warm: int
) -> AsyncIterator[Scheduler]:
    """The sessions' part of a node alone, with doors that lead nowhere."""
    stages = StageSlots(
        live=PrioritySemaphore(limit=RUN_PLACES + ready),
        init=PrioritySemaphore(limit=AT_ONCE),
        run=PrioritySemaphore(limit=RUN_PLACES),
        post=PrioritySemaphore(limit=8),
    )
    async with open_journal(folder / "journal.sqlite", now=time.time) as journal:
        tally = NodeCounters()
        services = session.SessionServices(
            journal=journal.writer,
            stages=stages,
            parents=NoParents(),
            snapshots=NodeSnapshots(folder=folder, runtimes=runtimes, tally=tally),
            drops_thinking=lambda _: False,
            containers=NodeContainers(runtimes=runtimes, ensure_image=_image_is_there, folder=folder),
            serve_endpoint=_no_door,
            context_length=4096,
            places=NoCachePlaces(),
            freezer=ContainerFreezer(),
            judge=_no_judge,
        )
        async with trio.open_nursery() as nursery:
            scheduler = make_scheduler(
                SqliteLog(journal),
                nursery,
                admission=TaskAdmission(
                    identity=NodeIdentity(node="benchmark", model="none"), context_length=4096
                ),
                services=services,
                session_factory=LiveSessionFactory(
                    journal=journal.writer, tally=tally, drops_thinking=lambda _: False
                ),
                sessions_by_key=LiveSessions(),
                now=time.time,
                most_claimed=2 * stages.live.limit,
                warm=warm,
            )
            await recover(journal, scheduler, NodeFacts(name="benchmark"), print)
            async with (
                open_background(scheduler.registry.results.run),
                open_background(partial(scheduler.claims.run, scheduler)),
            ):
                yield scheduler
                await scheduler.registry.stop(cancel=False)


def _no_door(session_id: str, door: socket) -> AbstractAsyncContextManager[object]:
    return nullcontext()


async def _image_is_there(name: str) -> None:
    await trio.lowlevel.checkpoint()


def _no_judge(name: str) -> Judge:
    raise EvaluatorError("a benchmark has no judges")


if __name__ == "__main__":
    sys.exit(main())
