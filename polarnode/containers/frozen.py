"""Images of containers with their processes: written while the harness waits, and restored for forks.

A container is paused, CRIU writes its processes, and its layer is copied, so that both are of one moment;
then the container runs on. A copy is a container of Podman's like any other, with a name and labels of its
own. Its layer and its processes are put into it before it is started, and it is restored in place of a start.
It has the user ids of the original, because its processes have them. Its processes are stopped until `thaw`,
which happens when its endpoint listens.

Invariants: a folder without `config.json` is no image; no process of a copy runs before `thaw`.
"""

import json
import os
import platform
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import trio
from attrs import define

from polarnode.containers.below import number_of
from polarnode.containers.client import ContainerClient, PlacedContainer
from polarnode.containers.control_groups import Group
from polarnode.containers.criu import Criu, logged_error
from polarnode.containers.freezing import ContainerFreeze
from polarnode.containers.inside import EGRESS_PORT, ENDPOINT_PORT, ContainerHandle, printable
from polarnode.containers.sealing import ContainerMount, SealState
from polarnode.core.errors import ForkError, Refused, RuntimeFault, boundary
from polarnode.core.snapshots import FrozenImage, FrozenMount, FrozenProcess

IMAGES_FOLDER, LAYER, CONFIG = "criu", "layer.tar", "config.json"
# The tar of a layer keeps names, owners, modes, times to the nanosecond, and what overlay stores in
# attributes.
TAR_COMMAND = ("tar", "--numeric-owner", "--xattrs", "--xattrs-include=*", "--acls")
# On a busy machine, one pause in ten fails if processes start others all the time, because runc gives up.
PAUSES, PAUSE_RETRY_S = 4, 0.1
REMOVING_S = 5.0  # seconds to remove an image of some files: milliseconds, unless the disk hangs
ESTABLISHED_STATE = "01"  # the state of a connection in /proc/net/tcp


@define(eq=False, kw_only=True)
class FrozenImageWriter:
    """Writes one running container into files. `layer` is the folder with what the container has written."""

    criu: Criu
    client: ContainerClient
    name: str
    inside: ContainerHandle
    freeze: ContainerFreeze
    shift: int
    layer: Path
    group: Group

    async def write(
        self, to: Path, *, number: int, places: Sequence[str], sealed: SealState | None, limit: int
    ) -> FrozenImage:
        """Write the container to a folder that does not exist yet, and let it run on. `number`: the process
        id of the harness's shell in it. `places`: where files may be that processes watch. Raises Refused for
        more than `limit` bytes, RuntimeFault if it cannot be written or could not be restored as it is.
        """
        await trio.to_thread.run_sync(self._check, limit)
        placed = await self.client.placed(self.name)
        try:
            with boundary(RuntimeFault, "the frozen image could not be written"):
                await trio.to_thread.run_sync(_make_folders, to)
                await trio.to_thread.run_sync(self.criu.configure_dump, self.name, places)
                async with self._paused():
                    processes = await trio.to_thread.run_sync(self._frozen_processes)
                    with _tmp_unchanged(self.inside.root):
                        await self.criu.dump(placed.id, to / IMAGES_FOLDER, to)
                    await _run_tar("-S", "--format=posix", "-cf", to / LAYER, "-C", self.layer, ".")
                size = await trio.to_thread.run_sync(_finish, to, placed.config)
        except BaseException:
            with trio.move_on_after(REMOVING_S, shield=True):
                await remove_image(to)
            raise
        if size > limit:
            await remove_image(to)
            raise _too_large(limit)
        return FrozenImage(
            bytes=size,
            number=number,
            shift=self.shift,
            container=placed.id,
            name=self.name,
            root=placed.root,
            image_id=placed.image,
            machine=platform.release(),
            processes=processes,
            closed=() if sealed is None else tuple(_frozen_mount(each) for each in sealed.closed),
            opened=() if sealed is None else sealed.opened,
        )

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Stop everything in the container for the block. A container that was stopped before stays
        stopped.
        """
        was_frozen = self.freeze.on
        for _ in range(PAUSES - 1):
            try:
                await self.freeze.freeze()
                break
            except RuntimeFault:
                await trio.sleep(PAUSE_RETRY_S)
        else:
            await self.freeze.freeze()
        try:
            yield
        finally:
            with trio.CancelScope(shield=True):
                if not was_frozen:
                    # A failed dump may have left the container frozen in any way.
                    await self.freeze.thaw_certainly()

    def _check(self, limit: int) -> None:
        """Refuse a container that is too large, or that a copy could not equal."""
        if found := next(connections(self.inside.pid), None):
            raise RuntimeFault(
                f"processes are connected to each other by TCP ({found}), and no copy would be"
            )
        if found := next(filter(None, map(_halted_reason, self.inside.members())), None):
            raise RuntimeFault(f"{found}, and CRIU would wait for it")
        size = self.group.memory_bytes() or sum(map(_resident, [self.inside.pid, *self.inside.members()]))
        if size > limit:
            raise _too_large(limit)

    def _frozen_processes(self) -> tuple[FrozenProcess, ...]:
        found = ((pid, number_of(pid)) for pid in self.inside.members())
        return tuple(
            FrozenProcess(number=number, comm=_state(pid)[0])
            for pid, number in sorted(found)
            if number is not None
        )


@contextmanager
def _tmp_unchanged(root: int) -> Iterator[None]:
    """Restore the modification time of /tmp after the block, because CRIU makes a folder there."""
    tmp = "tmp"
    try:
        before = os.stat(tmp, dir_fd=root, follow_symlinks=False)
    except OSError:  # it has none
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            times = (before.st_atime_ns, before.st_mtime_ns)
            os.utime(tmp, ns=times, dir_fd=root, follow_symlinks=False)


def _frozen_mount(mount: ContainerMount) -> FrozenMount:
    return FrozenMount(place=mount.place, flags=mount.flags)


def seal_of(image: FrozenImage) -> SealState | None:
    """The seal that applies to the processes of an image; None if there is none."""
    if not image.closed and not image.opened:
        return None
    closed = tuple(ContainerMount(place=each.place, flags=each.flags, writable=True) for each in image.closed)
    return SealState(closed=closed, opened=image.opened)


def connections(pid: int) -> Iterator[str]:
    """Yield the TCP connections between processes of a container, as `PORT to PORT`. Connections to the model
    endpoint and to the egress proxy do not count, because their other ends belong to the node.
    """
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                here, there = (int(each.rpartition(":")[2], 16) for each in words[1:3])
                if words[3] == ESTABLISHED_STATE and not {here, there} & {ENDPOINT_PORT, EGRESS_PORT}:
                    yield f"port {here} to {there}"


def _resident(pid: int) -> int:
    """Bytes of anonymous memory of a process, which are what a dump writes of it."""
    with suppress(OSError, ValueError):
        found = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        line = next((each for each in found if each.startswith("RssAnon:")), "RssAnon: 0 kB")
        return int(line.split()[1]) << 10
    return 0


def _halted_reason(pid: int) -> str | None:
    """The words for a process that is stopped by a signal or traced; None if it is neither. In a frozen group
    of cgroups v1 nothing can attach to such a process, and CRIU attaches to all.
    """
    comm, state = _state(pid)
    with suppress(OSError):
        if "\nTracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text(errors="replace"):
            return f"process {number_of(pid)} ({printable(comm)}) is traced by another"
    return (
        f"process {number_of(pid)} ({printable(comm)}) is stopped by a signal"
        if state in "Tt" and state
        else None
    )


def _state(pid: int) -> tuple[str, str]:
    """The name and the state of a process; empty once it has ended."""
    try:
        head, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    except OSError:
        return "", ""
    return head.partition("(")[2], rest.split()[0]


def _too_large(limit: int) -> Refused:
    return Refused(
        f"the session's memory and layer are more than {limit >> 20} MiB: raise max_mb",
        path="$.snapshot_at.max_mb",
    )


def _make_folders(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / IMAGES_FOLDER).mkdir()
    (folder / IMAGES_FOLDER).chmod(0o755)


def _finish(folder: Path, config: Path) -> int:
    """Make the images readable for the user that the copy's root is, and add the container's configuration.
    Returns the bytes of all.
    """
    for file in (folder / IMAGES_FOLDER).iterdir():
        file.chmod(0o644)  # only root may enter the folder above
    for log in ("dump.log", "stats-dump"):
        (folder / log).unlink(missing_ok=True)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    text = config.read_bytes()
    (folder / CONFIG).write_bytes(text)
    return size + len(text)


async def remove_image(folder: Path) -> None:
    """Remove the folder of an image, if there is one, beginning with the file that makes it an image. The
    removal runs in a thread and is waited for, also when its caller is cancelled.
    """
    await trio.to_thread.run_sync(remove_folder, folder)


def remove_folder(folder: Path) -> None:
    """The same, in a thread."""
    (folder / CONFIG).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


async def _run_tar(*argv: str | Path) -> None:
    done = await trio.run_process(
        [*TAR_COMMAND, *argv],
        capture_stdout=True,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise OSError(done.stdout.decode(errors="replace").strip()[-200:])


# ── copies ────────────────────────────────────────────────────────────────────


def check_machine(image: FrozenImage) -> None:
    """Raise ForkError if an image was written on another kernel, because its processes expect that kernel."""
    if image.machine != platform.release():
        raise ForkError(
            f"it was frozen on Linux {image.machine}, and this is {platform.release()}: fork it by resume or"
            " replay"
        )


async def restore_into(
    placed: PlacedContainer, name: str, client: ContainerClient, criu: Criu, image: FrozenImage, folder: Path
) -> None:
    """Turn a container that was created, and never started, into a copy of a frozen one, with its processes
    stopped. Raises RuntimeFault with CRIU's first error.
    """
    with boundary(RuntimeFault, "a frozen container cannot be restored"):
        await _run_tar("-xpf", folder / LAYER, "-C", placed.layer)
        await trio.to_thread.run_sync(_write_copy_config, placed, name, image, folder)
        criu.configure_restore(name)
        try:
            await client.restore(name)
        except RuntimeFault as fault:
            why = logged_error(placed.bundle / "restore.log")
            raise RuntimeFault(f"criu cannot restore it: {why or fault}") from fault
        await trio.to_thread.run_sync(_forget_host, placed, name)


def _write_copy_config(placed: PlacedContainer, name: str, image: FrozenImage, folder: Path) -> None:
    """Write the original's configuration, with the copy's names and paths, to where Podman looks for it."""
    text = (folder / CONFIG).read_text()
    for old, new in ((image.container, placed.id), (image.root, placed.root), (image.name, name)):
        text = text.replace(old, new)
    (placed.bundle / "config.json").write_text(text)
    (placed.bundle / "checkpoint").symlink_to(folder / IMAGES_FOLDER)


def _forget_host(placed: PlacedContainer, name: str) -> None:
    """Remove the container's name from its /etc/hosts, in the file on this machine: inside it is
    read-only.
    """
    mounts = json.loads((placed.bundle / "config.json").read_text())["mounts"]
    hosts = next((Path(each["source"]) for each in mounts if each["destination"] == "/etc/hosts"), None)
    if hosts is not None:
        hosts.write_text(re.sub(rf"[ \t]+{re.escape(name)}(?=\s|$)", "", hosts.read_text()))


def check_processes(inside: ContainerHandle, image: FrozenImage) -> None:
    """Raise ForkError for the first process that only the image or only its copy has."""
    found = {(number_of(pid), _state(pid)[0]) for pid in inside.members()}
    expected = {(each.number, each.comm) for each in image.processes}
    if found != expected:
        number, comm = min(found ^ expected, key=lambda each: each[0] or 0)
        which = "is missing in" if (number, comm) in expected else "is only in"
        raise ForkError(f"process {number} ({comm}) {which} the copy of the frozen session")


def thaw(inside: ContainerHandle, image: FrozenImage) -> None:
    """Let the processes of a copy run, except for those that were stopped in the original. Children are
    continued first, so that no process sees a stopped child.
    """
    stopped = {each.number for each in image.processes if each.stopped}
    members = [(number_of(pid), pid) for pid in inside.members()]
    for number, pid in sorted(members, key=lambda each: each[0] or 0, reverse=True):
        if number not in stopped and inside.holds(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    if inside.alive():
        signal.pidfd_send_signal(inside.pidfd, signal.SIGCONT)
