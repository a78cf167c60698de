"""Bound what sessions write: measure the containers' layers, and end those over their limit.

A quota of the file system is the better bound and is used where there is one (`probe.py`); each single file
is bounded by its size limit everywhere. This watch bounds the sum: it reads the free space of the disk, which
costs nothing, and measures containers only when that moved. Invariant: what is measured is hostile, so a
measurement is a program of its own that follows no link, may take long, and never delays another.

Locks on files are watched too: the kernel charges them to no control group, and has no limit for them.
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

LOOK_S = 0.5  # seconds between looks at the free space, one system call
MOVED = 32 << 20  # bytes of free space that make a measurement worth it: a session's smallest sensible limit
# seconds after which all are measured even if the free space has not moved: one may write what another frees
SELDOM_S = 60.0
# pause after a measurement, as a multiple of its duration: a million files take ten seconds, a sixth of a
# core at most
REST = 5
# least pause in seconds, and the least per watched container: ten measurements a second, 5 % of a core
LEAST_S, EACH_S = 2.0, 0.1
# bytes that a file counts at least, empty or not: a disk has room for so many files alone, and the least
# block is as large
ENTRY = 4096
AT_ONCE = 2  # measurements side by side
# seconds to find out who filled a disk that is nearly full: half of the reserve is still free meanwhile
NOW_S = 5.0
# open files looked at for what is unlinked: 0.2 s, and no honest program has a tenth of it
DESCRIPTORS = 50_000
# an ended container may write 1/AGAIN of its limit more before it is ended again, because its evaluator may
# write too
AGAIN = 4

# Locks on files. Two million took 380 MB of the kernel's in eleven seconds, of a container with 128 MB.
SLABS = Path("/proc/slabinfo")  # only root reads it
LOCKS_S = 2.0  # seconds between looks at how many the machine has: 70 MB at that rate
LOCKS_REST_S = 20.0  # seconds after a search for who holds them, which reads a line for each
MANY_LOCKS = 250_000  # of the machine, 50 MB, from which on a search is worth it: databases hold thousands
MOST_LOCKS = 50_000  # of one session

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class DiskSpace:
    """What a disk still has room for, in bytes: of content, and of files even if they are empty."""

    content: int = 0
    files: int = 0

    @property
    def least(self) -> int:
        """The scarcer of the two."""
        return min(self.content, self.files)

    def moved(self, since: "DiskSpace") -> bool:
        """Whether enough of either was written or removed since to be worth a measurement."""
        return max(abs(self.content - since.content), abs(self.files - since.files)) >= MOVED


@frozen(kw_only=True)
class WritableLayer:
    """Where a container writes: its layer's folder on this machine, its control group, the device its
    processes see files on.
    """

    folder: Path
    group: Group
    device: int


@define(eq=False, kw_only=True)
class WatchedContainer:
    """One container under watch. `because` is why it was ended, None while it runs; `for_room`: it was ended
    because the disk was nearly full, not for its own limit.
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
        """Why it is ended where it wrote more than it may."""
        return f"the session wrote more than its disk_mb ({self.limit_mb})"

    def begin_judging(self) -> None:
        """Let a test write 1/AGAIN of the limit as well: a session that left no room would have none."""
        if not self.judged:
            self.judged = True
            self.limit += (self.limit_mb << 20) // AGAIN

    @contextmanager
    def spared(self) -> Iterator[Callable[[int], None]]:
        """While the node itself writes there, lift the limit. The block calls the given function with the
        bytes it wrote; they are added to the limit afterwards.
        """
        own = [0]
        before, self.limit = self.limit, sys.maxsize
        try:
            yield lambda size: own.append(size)
        finally:
            self.limit = before + own[-1]


@define(eq=False, kw_only=True)
class DiskWatch:
    """Watches the containers of one node. `reserve` is how many bytes should stay free; below half of it the
    largest container is ended.
    """

    store: Path
    reserve: int
    ended: int = field(default=0, init=False)
    _watched: dict[str, WatchedContainer] = field(factory=dict, init=False)
    _space: DiskSpace = field(factory=DiskSpace, init=False)  # when all were last due
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
                    nursery.start_soon(self._measure, each)
                if space.least < self.reserve // 2:
                    await self._end_largest()

    def _due(self, due: set[str], space: DiskSpace) -> set[str]:
        """The ids still to be measured: all of them when the disk moved or the last full round is
        long ago.
        """
        now = trio.current_time()
        if not space.moved(self._space) and now - self._all_at < SELDOM_S:
            return due & self._watched.keys()
        self._space, self._all_at = space, now
        return set(self._watched)

    async def _measure(self, watched: WatchedContainer) -> None:
        async with self._limiter:
            began = trio.current_time()
            measured = await used_bytes(watched.layer)
        now = trio.current_time()
        crowd = 0.0 if self._space.least < self.reserve else EACH_S * len(self._watched)
        watched.not_before = now + max(LEAST_S, crowd, REST * (now - began))
        watched.measured += 1
        if measured is None or watched.id not in self._watched:
            return
        watched.size = measured
        if measured > watched.limit:
            await self._end(watched, watched.too_much)

    async def _end_largest(self) -> None:
        """End one container when the disk is nearly full. Only one at a time, because its session then
        removes it, which frees space. Whoever filled it beyond its own limit, faster than it was measured, is
        ended for that: it is no fault of the machine, nor of another session that wrote more before.
        """
        self._all_at = -math.inf  # measure again as soon as they are rested
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
        """Measure all side by side; those that take longer than NOW_S keep the size that they had."""

        async def measure(watched: WatchedContainer) -> None:
            async with limiter:
                measured = await used_bytes(watched.layer)
            watched.size = watched.size if measured is None else measured

        limiter = trio.CapacityLimiter(AT_ONCE)
        with trio.move_on_after(NOW_S):
            async with trio.open_nursery() as nursery:
                for each in self._watched.values():
                    nursery.start_soon(measure, each)

    async def _watch_locks(self) -> None:
        """End containers that hold too many locks, once the machine has many."""
        while True:
            await trio.sleep(LOCKS_S)
            if locks_of_machine(SLABS) > MANY_LOCKS:
                for each in list(self._watched.values()):
                    if await held_locks(each.layer.group) > MOST_LOCKS and each.id in self._watched:
                        await self._end(each, f"the session held more than {MOST_LOCKS} locks on files")
                await trio.sleep(LOCKS_REST_S)

    async def _end(self, watched: WatchedContainer, because: str) -> None:
        watched.because = watched.because or because
        watched.limit = watched.size + (watched.limit_mb << 20) // AGAIN
        self.ended += 1
        _log.warning("container %s is ended: %s", watched.id, because)
        with suppress(RuntimeFault):  # its teardown ends what remains
            await watched.end()


def locks_of_machine(slabs: Path) -> int:
    """How many locks on files the kernel holds; 0 where it does not tell."""
    with suppress(OSError):
        for line in slabs.read_text().splitlines():
            if line.startswith("file_lock_cache "):
                return int(line.split()[1])
    return 0


async def held_locks(group: Group) -> int:
    """How many locks the group's processes hold, counted to just beyond MOST_LOCKS."""
    folders = [f"/proc/{pid}/fdinfo" for pid in group.processes()]
    if not folders:
        return 0
    script = f'grep -rhs ^lock: "$@" | head -n {MOST_LOCKS + 1} | wc -l'
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
    """The space that root may still use there."""
    found = os.statvfs(folder)
    content = found.f_bfree * found.f_frsize
    # no number: they are made as they are needed
    return DiskSpace(content=content, files=found.f_ffree * ENTRY if found.f_files else content)


async def used_bytes(layer: WritableLayer) -> int | None:
    """The bytes a container has on disk: its layer's files, each counted once, and those it unlinked and
    still holds open. None when it is gone.
    """
    on_disk, entries = await _walked(layer, "--block-size=1"), await _walked(layer, "--inodes")
    if on_disk is None or entries is None:
        return None
    return max(on_disk, entries * ENTRY) + await trio.to_thread.run_sync(unlinked_bytes, layer)


async def _walked(layer: WritableLayer, counted: str) -> int | None:
    argv = ["nice", "-n", "19", "du", "--summarize", counted, "--one-file-system", "--", str(layer.folder)]
    try:
        done = await trio.run_process(argv, capture_stdout=True, stderr=subprocess.DEVNULL, check=False)
    except OSError as error:
        # no process available for a measurement: the next one follows, and the disk's reserve holds meanwhile
        _log.warning("a container's disk cannot be measured: %s", error)
        return None
    total = done.stdout.split(b"\t", 1)[0]
    return int(total) if total.isdigit() else None


def unlinked_bytes(layer: WritableLayer) -> int:
    """The bytes of files that have no name any more, which no walk finds."""
    found: dict[int, int] = {}
    for number, path in enumerate(_open_files(layer.group)):
        if number > DESCRIPTORS:
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
    """Everything the group's processes hold open, or have mapped after it was unlinked, as paths of this
    machine.
    """
    for pid in group.processes():
        with suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                yield f"/proc/{pid}/fd/{number}"
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if line.endswith(" (deleted)"):
                    yield f"/proc/{pid}/map_files/{line.split(' ', 1)[0]}"
