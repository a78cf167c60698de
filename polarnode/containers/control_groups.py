"""Control groups: which limits of sessions they enforce on this machine, and the group of one container.

Version 1 has a tree for each controller, version 2 one tree for all. `hybrid` is version 1 beside a tree of
version 2 that holds some controllers.
"""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from attrs import frozen

from polarnode.containers.user_namespace import ProcessRights

ROOT = Path("/sys/fs/cgroup")

# ── this machine's ────────────────────────────────────────────────────────────

CgroupsVersion = Literal["v1", "v2", "hybrid"]
LIMIT_CONTROLLERS = ("memory", "pids", "cpu")  # the controllers that enforce limits of sessions


def cgroups_version() -> CgroupsVersion:
    """The version in use: v2 is the unified tree alone; hybrid is v1 beside a v2 tree that has
    controllers.
    """
    if (ROOT / "cgroup.controllers").exists():
        return "v2"
    unified = ROOT / "unified/cgroup.controllers"
    return "hybrid" if unified.exists() and unified.read_text().strip() else "v1"


def has_systemd() -> bool:
    return Path("/run/systemd/system").is_dir()


def has_controller(name: str, cgroups: CgroupsVersion) -> bool:
    if cgroups == "v2":
        return name in (ROOT / "cgroup.controllers").read_text().split()
    return (ROOT / name).is_dir()


def enforced(cgroups: CgroupsVersion, rights: ProcessRights) -> frozenset[str]:
    """The controllers that enforce limits of our containers. Without root these are the ones that systemd
    delegated to this user, with version 2 only; Podman silently drops the other limits.
    """
    if rights.kind == "root":
        return frozenset(name for name in LIMIT_CONTROLLERS if has_controller(name, cgroups))
    if cgroups != "v2" or not has_systemd() or rights.kind == "user":
        return frozenset()
    group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
    try:
        folder = ROOT / group
        delegated = (folder / "cgroup.controllers").read_text().split()
    except OSError:
        return frozenset()
    if not os.access(folder / "cgroup.procs", os.W_OK):
        return frozenset()
    return frozenset(LIMIT_CONTROLLERS).intersection(delegated)


# ── a container's ─────────────────────────────────────────────────────────────

OURS = "libpod"  # part of the name of the group that Podman makes; crun puts processes into a group below it
# The most bytes in the sockets of a container, sixteen full connections, if they do not count as its memory.
MAX_SOCKET_BYTES = 64 << 20
# The line is the same in memory.oom_control (v1) and in memory.events (v2).
KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@frozen
class ControlGroup:
    """The control group in which a container's memory is counted."""

    folder: Path

    def oom_kills(self) -> int:
        """How many processes the kernel ended because the group was out of memory; 0 once the
        group is gone.
        """
        for name in ("memory.events", "memory.oom_control"):
            try:
                found = KILLS.search((self.folder / name).read_text())
            except OSError:
                continue
            return int(found[1]) if found else 0
        return 0

    def limit_sockets(self) -> None:
        """Limit the bytes in the sockets of the group; version 2 counts them as memory. Raises OSError.

        The node writes the limit itself, because Podman 4.3 drops the field that OCI has for it.
        """
        limit = self.folder / "memory.kmem.tcp.limit_in_bytes"
        if limit.exists():
            limit.write_text(str(MAX_SOCKET_BYTES))

    def memory_bytes(self) -> int:
        """Bytes of the group's memory that belong to no file on a disk: the memory of its processes, shared
        or not, and the files of file systems in memory; 0 once the group is gone.
        """
        try:
            words = [line.split() for line in (self.folder / "memory.stat").read_text().splitlines()]
        except OSError:
            return 0
        # In version 1 the names of these sums begin with `total_`, and anonymous memory is called `rss`.
        held = {name: int(count) for name, count in words}
        names = ("total_rss", "total_shmem") if "total_rss" in held else ("anon", "shmem")
        return sum(held.get(name, 0) for name in names)

    def processes(self) -> list[int]:
        """Process ids of this machine, those in groups below it included."""
        found: list[int] = []
        for listing in (self.folder / "cgroup.procs", *self.folder.glob("*/cgroup.procs")):
            try:
                found += map(int, listing.read_text().split())
            except OSError:
                continue  # it ended while we looked
        return found


@frozen
class UncountedGroup:
    """A container that no control group counts, like those of a node without root. Its processes are found by
    their namespace.
    """

    processes: Callable[[], list[int]]  # ids of this machine, without the container's first

    def oom_kills(self) -> int:
        """Always 0: the container has no memory limit of its own that could be reached."""
        return 0

    def memory_bytes(self) -> int:
        """Always 0: nothing counts the memory."""
        return 0

    def limit_sockets(self) -> None:
        """Do nothing: there is no group to limit."""


Group = ControlGroup | UncountedGroup


def freezer_file(pid: int, root: Path = ROOT, proc: Path = Path("/proc")) -> Path | None:
    """The file that freezes the group of a process; None if the kernel has none."""
    lines = [line.split(":", 2) for line in (proc / str(pid) / "cgroup").read_text().splitlines()]
    by_controllers = {controllers: path.lstrip("/") for _, controllers, path in lines}
    for file in (
        root / "freezer" / by_controllers.get("freezer", "") / "freezer.state",
        root / by_controllers.get("", "") / "cgroup.freeze",
    ):
        if file.exists():
            return file
    return None


def thaw(freezer: Path) -> None:
    """Thaw a group. Do nothing if it is not frozen, or is gone."""
    try:
        if freezer.read_text().strip() not in ("THAWED", "0"):
            freezer.write_text("THAWED" if freezer.name == "freezer.state" else "0")
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):  # before it was opened, and after
            raise


def control_group_of(pid: int, root: Path = ROOT, proc: Path = Path("/proc")) -> ControlGroup:
    """The control group of a container, by its first process."""
    lines = [line.split(":", 2) for line in (proc / str(pid) / "cgroup").read_text().splitlines()]
    by_controllers = {controllers: path for _, controllers, path in lines}
    path = by_controllers.get("memory")
    tree = root if path is None else root / "memory"
    place = Path((path if path is not None else by_controllers.get("", "/")).lstrip("/"))
    named = [each for each in (place, *place.parents) if OURS in each.name]
    return ControlGroup(tree / (named[0] if named else place))
