"""What a node reads of its machine: memory and disk that are left, and how long programs wait for the CPU.

A few small files of the kernel's; what a machine does not have is None. Rule for whoever edits it: a limit of the control group the node is in
counts like the machine's own, because the kernel ends what goes beyond it all the same.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from attrs import frozen

MIB = 1 << 20
NO_LIMIT = 1 << 60  # bytes: version 1 of control groups writes no limit as the largest number of pages
SOME = re.compile(r"^some avg10=([\d.]+)", re.MULTILINE)

# Of version 2 and version 1 of control groups: the limit, what is used, and of that what would be given back at once.
FILES = (("memory.max", "memory.current", "inactive_file"), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))


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
