"""Reads the machine and the engine once a second, and sets the stages' limits accordingly.

The readings come from a few small files of the kernel; a reading that a machine lacks is None. A memory limit
of the node's control group counts like the machine's own, because the kernel enforces both. Keep every
decision in `stage_limits`, and its reason in `GET /v1/status`.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import trio
from attrs import define, evolve, field, frozen

from polarnode.engine.routing import EngineStatistics
from polarnode.rollouts.services import StageSlots
from polarnode.rollouts.stage_limits import LoadReadings, SessionCounts, StageBounds, State, begin, decide

# ── readings ────────────────────────────────────────────────────────────

MIB = 1 << 20
NO_LIMIT_BYTES = (
    1 << 60
)  # bytes; version 1 of control groups writes "no limit" as the largest number of pages
CPU_PRESSURE_PATTERN = re.compile(r"^some avg10=([\d.]+)", re.MULTILINE)

# For version 2 and version 1 of control groups: the limit, the memory used, and the part of it that would be
# given back at once.
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@frozen(kw_only=True)
class Machine:
    """MiB left, and percent of time in which some program waited for the CPU."""

    memory_mb: float | None
    disk_mb: float | None
    cpu: float | None


def read_machine(folders: Iterable[Path], root: Path = Path("/")) -> Machine:
    """The machine now. Of several folders the one on the fullest disk counts. `root` holds the kernel's
    files.
    """
    free = [memory for memory in (_available(root), *_groups(root)) if memory is not None]
    disks = [disk for disk in map(_disk_free, folders) if disk is not None]
    return Machine(
        memory_mb=min(free, default=None), disk_mb=min(disks, default=None), cpu=_cpu_pressure(root)
    )


def _available(root: Path) -> float | None:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) / 1024 if found else None


def _groups(root: Path) -> Iterator[float | None]:
    """The MiB free in each control group of the node, its own and those around it."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers in ("", "memory"):
            tree = root / "sys/fs/cgroup" / controllers
            own = Path(path.lstrip("/"))
            yield from (_group_free(tree / each) for each in (own, *own.parents))


def _group_free(group: Path) -> float | None:
    for limit_file, used_file, reclaimable in FILES:
        limit, used = _text(group / limit_file).strip(), _text(group / used_file).strip()
        if limit.isdigit() and used.isdigit() and int(limit) < NO_LIMIT_BYTES:
            found = re.search(rf"^{reclaimable} (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
            return (int(limit) - int(used) + (int(found[1]) if found else 0)) / MIB
    return None


def _disk_free(folder: Path) -> float | None:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize / MIB


def _cpu_pressure(root: Path) -> float | None:
    """The kernel's pressure figure, or without one the percentage of runnable programs that have no CPU."""
    found = CPU_PRESSURE_PATTERN.search(_text(root / "proc/pressure/cpu"))
    if found:
        return float(found[1])
    load = _text(root / "proc/loadavg").split()
    cpus = len(os.sched_getaffinity(0))
    return max(0.0, 100 * (1 - cpus / float(load[0]))) if load and float(load[0]) > 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# ── watch ────────────────────────────────────────────────────────────

LOOK_S = 1.0  # seconds between readings; a session takes about as long to begin, and a reading costs 0.2 ms

logger = logging.getLogger(__name__)


@define(eq=False, kw_only=True)
class MachineWatch:
    """Adjusts the stage limits of one node. `read` returns the machine's readings. `pause_prewarm` is called
    with whether memory or disk is short, so that no container is started ahead then. `memory_short` is called
    with whether memory is short.
    """

    stages: StageSlots
    bounds: StageBounds
    ready_limit: int
    engines: Callable[[], EngineStatistics]
    read: Callable[[], Machine]
    pause_prewarm: Callable[[bool], None]
    memory_short: Callable[[bool], None]
    state: State = field(init=False)

    @state.default
    def _begin(self) -> State:
        return begin(self.bounds)

    async def run(self, ready: trio.Event) -> None:
        """Read and adjust once a second until cancelled."""
        while True:
            await self.look()
            ready.set()
            await trio.sleep(LOOK_S)

    async def look(self) -> None:
        """Read once, and adjust the limits."""
        machine = await trio.to_thread.run_sync(self.read)
        before, self.state = (
            self.state,
            decide(self.state, _load_readings(machine, self.engines()), _standing(self.stages), self.bounds),
        )
        self._log_change(before)
        stages, state = self.stages, self.state
        stages.init.adjust(state.init, state.init_held)
        stages.run.adjust(state.run, state.run_held)
        # Containers for sessions that find no place in the engine's cache would only take memory.
        running = stages.run.statistics().inside if stages.run.is_refused else state.run
        stages.live.adjust(max(1, min(state.run, running)) + self.ready_limit)
        stages.post.adjust(state.post, state.post_held)
        if before.short != state.short:
            self.pause_prewarm(state.short)
        if before.memory_short != state.memory_short:
            self.memory_short(state.memory_short)

    def _log_change(self, before: State) -> None:
        if self.state.short and not before.short:
            logger.warning("no session is begun for now: %s", self.state.init_held)
        if before.short and not self.state.short:
            logger.info("sessions are begun again")


def _load_readings(machine: Machine, engine: EngineStatistics) -> LoadReadings:
    ready = [host for host in engine.hosts if host.state == "ready"]
    readings = LoadReadings(
        memory_mb=machine.memory_mb,
        disk_mb=machine.disk_mb,
        cpu=machine.cpu,
        serving=bool(ready) and engine.paused is None,
        gated=bool(ready) and all(host.residency is not None for host in ready),
    )
    return evolve(
        readings,
        running=sum(host.running for host in ready),
        # It counts sessions and not calls in the queue, because a flood of calls of one session must not keep
        # others from beginning.
        waiting=sum(host.waiting + host.queued_sessions for host in ready),
    )


def _standing(stages: StageSlots) -> SessionCounts:
    """The sessions that have begun; those that wait for INIT do not count."""
    init, run, post = stages.init.statistics(), stages.run.statistics(), stages.post.statistics()
    return SessionCounts(
        at_work=init.inside + run.waiting + run.inside + post.waiting + post.inside, running=run.inside
    )
