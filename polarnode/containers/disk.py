"""Limit what sessions write to the disk: measure the containers' layers, and end those over their limit.

A quota of the file system is the better limit and is used if there is one (`probe.py`); a size limit bounds
each single file everywhere. This watch bounds the sum: it reads the free space of the disk, which costs
nothing, and measures containers only when the free space changed. Invariant: the measured files are hostile,
so a measurement is a program of its own that follows no link, may take long, and never delays another one.

Locks on files are watched too, because the kernel charges them to no control group and has no limit for them.
"""

import logging
import math
import os
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import trio
from attrs import define, field, frozen

from polarnode.containers.control_groups import Group
from polarnode.core.errors import RuntimeFault

LOOK_S = 0.5  # seconds between checks of the free space, which are one system call each
# Containers are measured when the free space changed by this many bytes: a session's smallest sensible limit.
MOVED = 32 << 20
# After this many seconds all are measured even if the free space did not change, because one session may
# write what another one frees.
FULL_ROUND_S = 60.0
# The pause after a measurement is this multiple of its duration. A million files take ten seconds, so
# measuring takes a sixth of a core at most.
REST = 5
# The shortest pause in seconds, and the shortest for each watched container: ten measurements a second, which
# take 5 % of a core.
LEAST_S, PAUSE_PER_CONTAINER_S = 2.0, 0.1
# A file counts at least this many bytes, even if it is empty: a disk has room for a limited number of files,
# and the smallest block has this size.
MIN_FILE_BYTES = 4096
AT_ONCE = 2  # concurrent measurements
# Seconds to find out who filled a disk that is nearly full. Half of the reserve is still free meanwhile.
URGENT_MEASURE_S = 5.0
# The most open files that are checked for unlinked ones. They take 0.2 s, and no honest program has a tenth.
MAX_DESCRIPTORS = 50_000
# A container that was ended may write 1/AGAIN of its limit more before it is ended again, because its
# evaluator may write too.
AGAIN = 4

# Limits for locks on files. Two million locks, taken in eleven seconds by a container with 128 MB, took 380
# MB of the kernel's memory.
SLABINFO_PATH = Path("/proc/slabinfo")  # only root can read it
LOCKS_S = 2.0  # seconds between counts of the machine's locks: 70 MB at that rate
LOCKS_REST_S = 20.0  # pause after a search for their holders, which reads a line for each lock
# From this many locks of the machine on, which take 50 MB, a search is worth it. Databases hold thousands.
MANY_LOCKS = 250_000
MAX_SESSION_LOCKS = 50_000  # the most locks of one session

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class DiskSpace:
    """The room on a disk, in bytes: for content, and for files, which take room even if they are empty."""

    content: int = 0
    files: int = 0

    @property
    def least(self) -> int:
        """The scarcer of the two."""
        return min(self.content, self.files)

    def moved(self, since: "DiskSpace") -> bool:
        """Whether either changed enough since then to be worth a measurement."""
        return max(abs(self.content - since.content), abs(self.files - since.files)) >= MOVED


@frozen(kw_only=True)
class WritableLayer:
    """Where a container writes: its layer's folder on this machine, its control group, and the device that
    its processes see files on.
    """

    folder: Path
    group: Group
    device: int


@define(eq=False, kw_only=True)
class WatchedContainer:
    """A watched container. `because` is why it was ended, None while it runs. `for_room`: it was ended
    because the disk was nearly full, not because of its own limit.
    """

    id: str
    layer: WritableLayer
    limit_mb: int
    end: Callable[[], Awaitable[None]]
    because: str | None = field(default=None, init=False)
    for_room: bool = field(default=False, init=False)
    size: int = field(default=0, init=False)
    limit: int = field(init=False)
    not_before: float = field(default=-math.inf, init=False)
    measured: int = field(default=0, init=False)
    judged: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.limit = self.limit_mb << 20

    @property
    def too_much(self) -> str:
        """The reason for ending it if it wrote more than its limit."""
        return f"the session wrote more than its disk_mb ({self.limit_mb})"

    def begin_judging(self) -> None:
        """Let a test write another 1/AGAIN of the limit, because the session may have left no room."""
        if not self.judged:
            self.judged = True
            self.limit += (self.limit_mb << 20) // AGAIN

    @contextmanager
    def spared(self) -> Iterator[Callable[[int], None]]:
        """Lift the limit while the node itself writes there. The block calls the given function with the
        number of bytes that it wrote; they are added to the limit afterwards.
        """
        own = [0]
        before, self.limit = self.limit, sys.maxsize
        try:
            yield lambda size: own.append(size)
        finally:
            self.limit = before + own[-1]


@define(eq=False, kw_only=True)
class DiskWatch:
    """Watches the containers of one node. `reserve` is the number of bytes that should stay free; when less
    than half of it is free, the largest container is ended.
    """

    store: Path
    reserve: int
    ended: int = field(default=0, init=False)
    _watched: dict[str, WatchedContainer] = field(factory=dict, init=False)
    _space: DiskSpace = field(factory=DiskSpace, init=False)  # as it was when all were last due
    _all_at: float = field(default=-math.inf, init=False)
    _limiter: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(AT_ONCE), init=False)

    def add(self, watched: WatchedContainer) -> None:
        """Watch a container from now on."""
        self._watched[watched.id] = watched

    def discard(self, id: str) -> None:
        """Stop watching a container that is gone."""
        self._watched.pop(id, None)

    async def run(self, ready: trio.Event) -> None:
        """Watch until cancelled."""
        ready.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_locks)
            due: set[str] = set()
            while True:
                await trio.sleep(LOOK_S)
                space = disk_space_at(self.store)
                due = self._due(due, space)
                now = trio.current_time()
                for each in [self._watched[id] for id in due if self._watched[id].not_before <= now]:
                    due.discard(each.id)
                    each.not_before = math.inf  # until this measurement is done
                    nursery.start_soon(self._measure_container, each)
                if space.least < self.reserve // 2:
                    await self._end_largest()

    def _due(self, due: set[str], space: DiskSpace) -> set[str]:
        """The ids that are still to be measured: all of them if the free space changed or the last full round
        is long ago.
        """
        now = trio.current_time()
        if not space.moved(self._space) and now - self._all_at < FULL_ROUND_S:
            return due & self._watched.keys()
        self._space, self._all_at = space, now
        return set(self._watched)

    async def _measure_container(self, watched: WatchedContainer) -> None:
        async with self._limiter:
            began = trio.current_time()
            measured = await used_bytes(watched.layer)
        now = trio.current_time()
        crowd = 0.0 if self._space.least < self.reserve else PAUSE_PER_CONTAINER_S * len(self._watched)
        watched.not_before = now + max(LEAST_S, crowd, REST * (now - began))
        watched.measured += 1
        if measured is None or watched.id not in self._watched:
            return
        watched.size = measured
        if measured > watched.limit:
            await self._end(watched, watched.too_much)

    async def _end_largest(self) -> None:
        """End one container when the disk is nearly full. Only one is ended at a time, because its session
        then removes it, which frees space. A container that wrote beyond its own limit, faster than it was
        measured, is ended for that: it is neither a fault of the machine nor of another session that wrote
        more before.
        """
        self._all_at = -math.inf  # all are measured again as soon as their pauses are over
        if any(each.because is not None for each in self._watched.values() if each.size):
            return
        await self._measure_now()
        over = [each for each in self._watched.values() if each.size > each.limit]
        for each in over:
            await self._end(each, each.too_much)
        alive = [each for each in self._watched.values() if each.size]
        if over or not alive:
            return
        largest = max(alive, key=lambda each: each.size)
        largest.for_room = True
        await self._end(
            largest,
            f"the machine's disk is nearly full and this session wrote the most, {largest.size >> 20} MB",
        )

    async def _measure_now(self) -> None:
        """Measure all concurrently. Those that take longer than URGENT_MEASURE_S keep the size that they
        had.
        """

        async def measure(watched: WatchedContainer) -> None:
            async with limiter:
                measured = await used_bytes(watched.layer)
            watched.size = watched.size if measured is None else measured

        limiter = trio.CapacityLimiter(AT_ONCE)
        with trio.move_on_after(URGENT_MEASURE_S):
            async with trio.open_nursery() as nursery:
                for each in self._watched.values():
                    nursery.start_soon(measure, each)

    async def _watch_locks(self) -> None:
        """End containers that hold too many locks, once the machine has many."""
        while True:
            await trio.sleep(LOCKS_S)
            if count_machine_locks(SLABINFO_PATH) > MANY_LOCKS:
                for each in list(self._watched.values()):
                    if (
                        await count_held_locks(each.layer.group) > MAX_SESSION_LOCKS
                        and each.id in self._watched
                    ):
                        await self._end(
                            each, f"the session held more than {MAX_SESSION_LOCKS} locks on files"
                        )
                await trio.sleep(LOCKS_REST_S)

    async def _end(self, watched: WatchedContainer, because: str) -> None:
        watched.because = watched.because or because
        watched.limit = watched.size + (watched.limit_mb << 20) // AGAIN
        self.ended += 1
        _log.warning("container %s is ended: %s", watched.id, because)
        with suppress(RuntimeFault):  # its teardown ends what remains
            await watched.end()


def count_machine_locks(slabs: Path) -> int:
    """The number of locks on files in the kernel; 0 if the kernel does not tell."""
    with suppress(OSError):
        for line in slabs.read_text().splitlines():
            if line.startswith("file_lock_cache "):
                return int(line.split()[1])
    return 0


async def count_held_locks(group: Group) -> int:
    """Count the locks that the group's processes hold, at most to just beyond MAX_SESSION_LOCKS."""
    folders = [f"/proc/{pid}/fdinfo" for pid in group.processes()]
    if not folders:
        return 0
    script = f'grep -rhs ^lock: "$@" | head -n {MAX_SESSION_LOCKS + 1} | wc -l'
    try:
        done = await trio.run_process(
            ["nice", "-n", "19", "sh", "-c", script, "sh", *folders],
            capture_stdout=True,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except OSError as error:
        _log.warning("a container's locks cannot be counted: %s", error)
        return 0
    return int(done.stdout.strip() or 0)


def disk_space_at(folder: Path) -> DiskSpace:
    """The space that root may still use on the disk of a folder."""
    found = os.statvfs(folder)
    content = found.f_bfree * found.f_frsize
    # Some file systems give no number of files, because they make inodes as needed.
    return DiskSpace(content=content, files=found.f_ffree * MIN_FILE_BYTES if found.f_files else content)


async def used_bytes(layer: WritableLayer) -> int | None:
    """The bytes that a container takes on disk: its layer's files, each counted once, and the files that it
    unlinked and still holds open. None if the container is gone.
    """
    on_disk, entries = await _run_du(layer, "--block-size=1"), await _run_du(layer, "--inodes")
    if on_disk is None or entries is None:
        return None
    return max(on_disk, entries * MIN_FILE_BYTES) + await trio.to_thread.run_sync(unlinked_bytes, layer)


async def _run_du(layer: WritableLayer, counted: str) -> int | None:
    argv = ["nice", "-n", "19", "du", "--summarize", counted, "--one-file-system", "--", str(layer.folder)]
    try:
        done = await trio.run_process(argv, capture_stdout=True, stderr=subprocess.DEVNULL, check=False)
    except OSError as error:
        # No process could be started for the measurement. The next one follows, and the disk's reserve lasts
        # until then.
        _log.warning("a container's disk cannot be measured: %s", error)
        return None
    total = done.stdout.split(b"\t", 1)[0]
    return int(total) if total.isdigit() else None


def unlinked_bytes(layer: WritableLayer) -> int:
    """The bytes of open files that have no name any more, which no walk finds."""
    found: dict[int, int] = {}
    for number, path in enumerate(_open_files(layer.group)):
        if number > MAX_DESCRIPTORS:
            break
        with suppress(OSError):  # closed while we looked
            found_stat = os.stat(path)
            if (
                stat.S_ISREG(found_stat.st_mode)
                and found_stat.st_nlink == 0
                and found_stat.st_dev == layer.device
            ):
                found[found_stat.st_ino] = found_stat.st_blocks * 512
    return sum(found.values())


def _open_files(group: Group) -> Iterator[str]:
    """Everything that the group's processes hold open, and what they have mapped and is unlinked, as paths of
    this machine.
    """
    for pid in group.processes():
        with suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                yield f"/proc/{pid}/fd/{number}"
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if line.endswith(" (deleted)"):
                    yield f"/proc/{pid}/map_files/{line.split(' ', 1)[0]}"
