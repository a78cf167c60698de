"""A container's control group as a folder of this machine: which processes are in it, and what the kernel ended for want of memory.

Both versions of cgroups, since both are met: the memory controller is in a tree of its own (v1, hybrid) or in the one tree (v2).
"""

import re
from pathlib import Path

from attrs import frozen

ROOT = Path("/sys/fs/cgroup")
OURS = "libpod"  # in the name of the group Podman makes; crun puts processes into one below it
KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)  # of memory.oom_control (v1) and memory.events (v2) alike


@frozen
class Group:
    """A container's group, where its memory is counted."""

    folder: Path

    def oom_kills(self) -> int:
        """How many processes the kernel ended because the group had no memory left; 0 once the group is gone."""
        for name in ("memory.events", "memory.oom_control"):
            try:
                found = KILLS.search((self.folder / name).read_text())
            except OSError:
                continue
            return int(found[1]) if found else 0
        return 0

    def processes(self) -> list[int]:
        """Process ids of this machine, those in groups below it too."""
        found: list[int] = []
        for listing in (self.folder / "cgroup.procs", *self.folder.glob("*/cgroup.procs")):
            try:
                found += map(int, listing.read_text().split())
            except OSError:
                continue  # it ended while we looked
        return found


def group_of(pid: int, root: Path = ROOT, proc: Path = Path("/proc")) -> Group:
    """The group of a container, by its first process."""
    lines = [line.split(":", 2) for line in (proc / str(pid) / "cgroup").read_text().splitlines()]
    by_controllers = {controllers: path for _, controllers, path in lines}
    path = by_controllers.get("memory")
    tree = root if path is None else root / "memory"
    place = Path((path if path is not None else by_controllers.get("", "/")).lstrip("/"))
    named = [each for each in (place, *place.parents) if OURS in each.name]
    return Group(tree / (named[0] if named else place))
