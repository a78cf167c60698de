"""Make a container's root read-only except for writable places, in its own mount namespace, and undo that.

The layer stays one overlay, so that a copy of a prepared container keeps its workspace, and nothing is copied
at a start. The writable places are mounted on themselves; then the root, and the mounts that Podman puts over
its files, are made read-only. No process inside can undo that: it takes a capability over the namespace,
which none of them has, and in a namespace of their own the kernel locks such mounts. Invariant: whatever
fails on the way, a seal can undo what it changed.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from attrs import frozen

from polarnode.containers.inside import (
    CLONE_FS,
    CLONE_NEWNS,
    ContainerHandle,
    checked,
    enter,
    in_own_thread,
    libc,
)
from polarnode.core.errors import Refused, RuntimeFault

Answer = TypeVar("Answer")

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x4_0000
MNT_DETACH, UMOUNT_NOFOLLOW = 0x2, 0x8
# A remount loses these flags unless they are given again. The kernel keeps the others.
KEPT_FLAGS = {"nosuid": 0x2, "nodev": 0x4, "noexec": 0x8}

# Mounts of the container runtime, which have rights of their own. Nothing of them is on disk.
RUNTIME_MOUNTS = ("/proc", "/sys", "/dev")
SHOWN = 3  # a refusal names at most this many open files


@frozen(kw_only=True)
class ContainerMount:
    """One mount of a container: its place in there, its flags for a remount, and whether it is writable."""

    place: str
    flags: int
    writable: bool


@frozen(kw_only=True)
class SealState:
    """The changes of a seal, from which it can be undone."""

    closed: tuple[ContainerMount, ...]
    opened: tuple[str, ...]


def seal(inside: ContainerHandle, *, writable: Sequence[str], kept: Sequence[str] = ()) -> SealState:
    """Make everything read-only except those `writable` places that are folders, and mounts at or below
    `kept`.

    Raises Refused if a program that a prepare step left running holds a file open for writing, in a writable
    place or not. The program opened the file through the mount that is to become read-only, and the kernel
    forbids that.
    """
    mounts = mounts_of(inside.pid)
    try:
        return run_in_mounts(inside, lambda: _seal_places(mounts, tuple(writable), tuple(kept)))
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise _busy_refusal(inside) from error
        raise RuntimeFault(
            f"the root of a container cannot be made read-only: {error}; set read_only = false in the task"
        ) from error


def unseal(inside: ContainerHandle, sealed: SealState) -> None:
    """Undo the seal."""
    try:
        run_in_mounts(inside, lambda: _undo_seal(sealed))
    except OSError as error:
        raise RuntimeFault(f"the root of a container cannot be made writable again: {error}") from error


def run_in_mounts(inside: ContainerHandle, work: Callable[[], Answer]) -> Answer:
    """Run something in the container's mount namespace, where paths are those of the container. OSErrors are
    raised unchanged.
    """

    def entered() -> Answer:
        checked(libc.unshare(CLONE_FS), "unshare")
        enter(inside.mounts, CLONE_NEWNS)
        return work()

    return in_own_thread(entered)


def writable_places(inside: ContainerHandle, writable: Sequence[str]) -> tuple[str, ...]:
    """The writable places of a container that are folders, by real path, without those inside another one."""
    return run_in_mounts(inside, lambda: _places(tuple(writable)))


def sealing_obstacle() -> str | None:
    """Try a seal on private mounts of the node itself. Return the obstacle; None if there is none."""

    def trial() -> None:
        checked(libc.unshare(CLONE_FS | CLONE_NEWNS), "unshare")
        _mount(b"/", MS_REC | MS_PRIVATE)
        _mount_on_itself("/proc")
        _remount("/proc", MS_RDONLY)

    try:
        in_own_thread(trial)
    except OSError as error:
        return str(error)
    return None


def mounts_of(pid: int) -> tuple[ContainerMount, ...]:
    """The mounts a process sees, outer ones first."""
    return tuple(
        map(_parse_mount, Path(f"/proc/{pid}/mountinfo").read_text(errors="surrogateescape").splitlines())
    )


def _parse_mount(line: str) -> ContainerMount:
    place, text = line.split()[4:6]
    options = text.split(",")
    flags = sum(flag for name, flag in KEPT_FLAGS.items() if name in options)
    return ContainerMount(place=_unescape_place(place), flags=flags, writable="rw" in options)


def _unescape_place(place: str) -> str:
    """Decode a path of mountinfo, in which spaces and the like are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), place)


# ── in the container's namespace ──────────────────────────────────────────────


def _seal_places(
    mounts: Sequence[ContainerMount], writable: tuple[str, ...], kept: tuple[str, ...]
) -> SealState:
    places = _places(writable)
    if "/" in places:
        return SealState(closed=(), opened=())
    spared = (*places, *map(os.path.realpath, kept), *RUNTIME_MOUNTS)
    to_close = [mount for mount in mounts if mount.writable and not _below(mount.place, spared)]
    with ExitStack() as undo:
        for place in places:
            _mount_on_itself(place)
            undo.callback(_unmount, place)
        for mount in to_close:
            _remount(mount.place, mount.flags | MS_RDONLY)
            undo.callback(_remount, mount.place, mount.flags)
        undo.pop_all()
    return SealState(closed=tuple(to_close), opened=places)


def _undo_seal(sealed: SealState) -> None:
    for mount in reversed(sealed.closed):
        _remount(mount.place, mount.flags)
    for place in reversed(sealed.opened):
        _unmount(place)


def _places(writable: Sequence[str]) -> tuple[str, ...]:
    """The existing folders among some places, by real path, without those inside another one."""
    real = sorted({os.path.realpath(place) for place in writable if os.path.isdir(place)})
    return tuple(place for place in real if not _below(place, [other for other in real if other != place]))


def _below(place: str, others: Sequence[str]) -> bool:
    """Whether a place is one of the others or inside one."""
    return any(place == other or place.startswith(other.rstrip("/") + "/") for other in others)


def _mount_on_itself(place: str) -> None:
    """Bind a place on itself, with what is mounted in it. The bind goes through the working folder, so that
    the path is resolved only once.
    """
    opened = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fchdir(opened)
        checked(libc.mount(b".", b".", None, MS_BIND | MS_REC, None), f"bind {place}")
    finally:
        os.close(opened)
        os.chdir("/")


def _remount(place: str, flags: int) -> None:
    _mount(os.fsencode(place), MS_REMOUNT | MS_BIND | flags)


def _mount(place: bytes, flags: int) -> None:
    checked(libc.mount(None, place, None, flags, None), f"mount {place.decode(errors='replace')}")


def _unmount(place: str) -> None:
    checked(libc.umount2(os.fsencode(place), MNT_DETACH | UMOUNT_NOFOLLOW), f"unmount {place}")


# ── what prevents a seal ─────────────────────────────────────────────────────────


def _busy_refusal(inside: ContainerHandle) -> Refused:
    held = sorted({path for pid in inside.members() for path in _written(pid)})
    named = f" ({', '.join(held[:SHOWN])})" if held else ""
    sentence = (
        f"a program that a prepare step left running has files open for writing{named}, which forbids a"
        " read-only root"
    )
    return Refused(f"{sentence}: end it, or set read_only = false", path="$.runtime.read_only")


def _written(pid: int) -> Iterator[str]:
    """Yield the plain files that a process has open for writing, by the paths that it sees."""
    with suppress(OSError):  # it ended meanwhile
        for number in os.listdir(f"/proc/{pid}/fd"):
            flags = re.search(r"flags:\s*([0-7]+)", Path(f"/proc/{pid}/fdinfo/{number}").read_text())
            is_plain = stat.S_ISREG(os.stat(f"/proc/{pid}/fd/{number}").st_mode)
            if is_plain and flags and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                yield os.readlink(f"/proc/{pid}/fd/{number}")
