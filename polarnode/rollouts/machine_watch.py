"""What a node reads of its machine: memory and disk that are left, and how long programs wait for the CPU.

A few small files of the kernel's; what a machine does not have is None. Rule for whoever edits it: a limit of
the control group the node is in counts like the machine's own, because the kernel ends what goes beyond it
all the same.

The watcher: once a second it reads the machine and the engine, and sets the stages' limits accordingly.

Rule for whoever edits it: it only obeys `decision.py`; what it does must be understood from `GET /v1/status`
alone.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import trio
from attrs import define, evolve, field, frozen

from polarnode.engine.routing import EngineStatistics
from polarnode.rollouts.services import Stages
from polarnode.rollouts.stage_limits import Bounds, Readings, Standing, State, begin, decide

# ── readings ────────────────────────────────────────────────────────────

MIB = 1 << 20
NO_LIMIT = 1 << 60  # bytes: version 1 of control groups writes no limit as the largest number of pages
SOME = re.compile(r"^some avg10=([\d.]+)", re.MULTILINE)

# Of version 2 and version 1 of control groups: the limit, what is used, and of that what would be given back
# at once.
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


def read_machine(places: Iterable[Path], root: Path = Path("/")) -> Machine:
    """The machine now; of several places the fullest disk counts. `root` is where the kernel's files are."""
    rooms = [room for room in (_available(root), *_groups(root)) if room is not None]
    disks = [disk for disk in map(_disk, places) if disk is not None]
    return Machine(memory_mb=min(rooms, default=None), disk_mb=min(disks, default=None), cpu=_cpu(root))


def _available(root: Path) -> float | None:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) / 1024 if found else None


def _groups(root: Path) -> Iterator[float | None]:
    """What is left in the groups the node is in, its own and those around it."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers in ("", "memory"):
            tree = root / "sys/fs/cgroup" / controllers
            place = Path(path.lstrip("/"))
            yield from (_left(tree / each) for each in (place, *place.parents))


def _left(group: Path) -> float | None:
    for limit_file, used_file, reclaimable in FILES:
        limit, used = _text(group / limit_file).strip(), _text(group / used_file).strip()
        if limit.isdigit() and used.isdigit() and int(limit) < NO_LIMIT:
            found = re.search(rf"^{reclaimable} (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
            return (int(limit) - int(used) + (int(found[1]) if found else 0)) / MIB
    return None


def _disk(place: Path) -> float | None:
    try:
        told = os.statvfs(place)
    except OSError:
        return None
    return told.f_bavail * told.f_frsize / MIB


def _cpu(root: Path) -> float | None:
    """The kernel's own figure; else, of those that want a CPU, the part that has none."""
    found = SOME.search(_text(root / "proc/pressure/cpu"))
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

LOOK_S = 1.0  # seconds between looks: a session takes about as long to begin, and a look costs 0.2 ms

logger = logging.getLogger(__name__)


@define(eq=False, kw_only=True)
class PressureWatch:
    """Adjusts the gates of one node. `read` is the machine now, `hold` is told whether anything may be
    started for later.
    """

    stages: Stages
    bounds: Bounds
    ready_limit: int
    engines: Callable[[], EngineStatistics]
    read: Callable[[], Machine]
    hold: Callable[[bool], None]
    state: State = field(init=False)

    @state.default
    def _begin(self) -> State:
        return begin(self.bounds)

    async def run(self, ready: trio.Event) -> None:
        """Look and adjust until cancelled."""
        while True:
            await self.look()
            ready.set()
            await trio.sleep(LOOK_S)

    async def look(self) -> None:
        """One look."""
        machine = await trio.to_thread.run_sync(self.read)
        before, self.state = (
            self.state,
            decide(self.state, _readings(machine, self.engines()), _standing(self.stages), self.bounds),
        )
        self._say(before)
        stages, state = self.stages, self.state
        stages.init.adjust(state.init, state.init_held)
        stages.run.adjust(state.run, state.run_held)
        stages.live.adjust(state.run + self.ready_limit)
        stages.post.adjust(state.post, state.post_held)
        if before.short != state.short:
            self.hold(state.short)

    def _say(self, before: State) -> None:
        if self.state.short and not before.short:
            logger.warning("no session is begun for now: %s", self.state.init_held)
        if before.short and not self.state.short:
            logger.info("sessions are begun again")


def _readings(machine: Machine, engine: EngineStatistics) -> Readings:
    ready = [host for host in engine.hosts if host.state == "ready"]
    told = Readings(
        memory_mb=machine.memory_mb,
        disk_mb=machine.disk_mb,
        cpu=machine.cpu,
        serving=bool(ready) and engine.paused is None,
    )
    return evolve(
        told, running=sum(host.running for host in ready), waiting=sum(host.waiting for host in ready)
    )


def _standing(stages: Stages) -> Standing:
    """Those that have begun: whoever waits for INIT has not."""
    init, run, post = stages.init.statistics(), stages.run.statistics(), stages.post.statistics()
    return Standing(
        at_work=init.inside + run.waiting + run.inside + post.waiting + post.inside, running=run.inside
    )
