"""A session's runtime, which is `ports.Runtime` on Podman: a started container with its model endpoint.

Programs run through `exec.py`; files are written and read from outside through `files.py`. `starting.py`
makes runtimes. A runtime is used once and never again.
"""

import logging
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import trio
from attrs import define, field

from polarnode.containers.below import DetachedProgram
from polarnode.containers.client import ContainerClient
from polarnode.containers.copying import Copy
from polarnode.containers.disk import WatchedContainer
from polarnode.containers.exec import Channel, ExecOrder, ExecRunner, OutputTail
from polarnode.containers.files import Account, CollectedFiles, ContainerFiles, collect, unpack_workdir
from polarnode.containers.freezing import ContainerFreeze
from polarnode.containers.frozen import FrozenImageWriter, check_processes, thaw
from polarnode.containers.inside import (
    ENDPOINT_HOST,
    ENDPOINT_PORT,
    ContainerHandle,
    Process,
)
from polarnode.containers.sealing import SealState, seal, unseal, writable_places
from polarnode.containers.snapshots import SnapshotFiles, archive, check_size, restore
from polarnode.core.errors import ContentFault, RuntimeFault, SpoiltRuntime, boundary
from polarnode.core.ports import Ended
from polarnode.core.snapshots import FrozenImage
from polarnode.core.task import RuntimeSpec
from polarnode.support.bounded import open_bounded_log

# The bytes of stdout and of stderr that a `run` keeps. A large patch must pass whole, and few programs run at
# once.
OUTPUT_LIMIT = 32 << 20
# The most bytes that are copied of a session's changes to its workspace, unless twice its disk limit is more:
# a session that wrote too much is evaluated too.
COPY_LIMIT_BYTES = 8 << 30
KILLED = 137  # the exit code of a program that was ended by SIGKILL
ALWAYS_WRITABLE = ("/tmp", "/var/tmp")
RESTORING_PREFIX = ".restoring-"  # prefix of a temporary folder into which a kept workdir is unpacked
# Seconds that a removal may take, its wait for a free call included; 0.1 s on a quiet machine. After that the
# sweeper removes the container.
REMOVE_S = 120.0

_log = logging.getLogger(__name__)


@define(eq=False, kw_only=True)
class PodmanRuntime:
    """A running container. `endpoint` listens inside it and is served by the node; `expires` is when its
    dead-man switch fires (Trio's clock).
    """

    id: str
    endpoint: socket.socket
    workdir: str
    user: str
    account: Account
    files_time: int  # the modification time of placed files, in seconds since 1970
    expires: float
    base_url: str = f"http://{ENDPOINT_HOST}:{ENDPOINT_PORT}"
    _inside: ContainerHandle
    _files: ContainerFiles
    _execs: ExecRunner
    _client: ContainerClient
    _on_close: Callable[[str], None]  # called with its id once it is removed, or left to the sweeper
    _watched: WatchedContainer
    _freeze: ContainerFreeze
    _below: DetachedProgram
    _image_writer: FrozenImageWriter | None  # None where it cannot be frozen into files
    _closed: bool = field(default=False, init=False)
    _sealed: SealState | None = field(default=None)

    @property
    def home(self) -> str:
        """The home of the runtime's user."""
        return self.account.home

    @property
    def ended_because(self) -> str | None:
        """The reason why the node ended everything in it, for the session's outcome; None if it did not. If
        there is a reason, its files are not worth evaluating.
        """
        return self._watched.because

    @property
    def ended_for_room(self) -> bool:
        """Whether it was ended because the machine's disk was nearly full, which is not the session's
        fault.
        """
        return self._watched.for_room

    def oom_kills(self) -> int:
        """The number of its programs that the kernel ended because the container's memory was used up."""
        return self._watched.layer.group.oom_kills()

    @property
    def network(self) -> int:
        """Its network namespace, as a descriptor that stays open until the runtime closes. The endpoint's
        descriptor closes with the run.
        """
        return self._inside.network

    @property
    def alive(self) -> bool:
        """Whether its first process runs. The dead-man switch or the kernel may end it."""
        return not self._closed and self._inside.alive()

    @property
    def shift(self) -> int:
        """The offset of the container's user ids on this machine."""
        return self._files.shift

    async def busy(self) -> bool:
        """Whether anything but its first process runs in it."""
        return bool(await trio.to_thread.run_sync(self._inside.members))

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
        stdin: bytes = b"",
        keep: int | None = None,
    ) -> Ended:
        """Run a program to its end; the last `keep` bytes of each stream are kept, OUTPUT_LIMIT by default.
        Cancelling ends its process group.
        """
        limit = OUTPUT_LIMIT if keep is None else keep
        kept: dict[Channel, OutputTail] = {"stdout": OutputTail(limit), "stderr": OutputTail(limit)}
        order = await self._order(argv, env, user, workdir, stdin)
        exit_code = self._finish(
            await self._execs.run(order, lambda channel, piece: kept[channel].write(piece))
        )
        if exit_code == KILLED and self.ended_because is not None:
            # The reason is added at the end of stderr, where readers look for the reason of a failure.
            kept["stderr"].write(f"\n{self.ended_because}\n".encode())
        stdout, stderr = kept["stdout"].value(), kept["stderr"].value()
        return Ended(
            exit_code=exit_code,
            stdout=stdout,
            stderr=stderr,
            truncated=any(tail.dropped for tail in kept.values()),
        )

    async def run_logged(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        limit: int,
        user: str | None = None,
        workdir: str | None = None,
        stdin: bytes = b"",
    ) -> int:
        """Run a harness: feed it all of stdin, write both streams to a file of at most `limit` bytes
        (beginning and end), and return its exit code.

        Cancelling sends TERM to its process group, waits a little, and ends everything in the container.
        """
        order = await self._order(argv, env, user, workdir, stdin)
        with open_bounded_log(log, limit) as kept:
            return self._finish(await self._execs.run(order, lambda _, piece: kept.write(piece), alone=True))

    async def start_detached(self, argv: Sequence[str], *, env: Mapping[str, str], stdin: bytes = b"") -> int:
        """Start a harness below the first process, so that it can be frozen; returns its number."""
        return await self._below.start(await self._order(argv, env, None, None, stdin))

    async def follow_detached(self, number: int, *, log: Path, limit: int) -> int:
        """Do what `run_logged` does, for a harness that was started below the first process."""
        with open_bounded_log(log, limit) as kept:
            return self._finish(await self._below.follow(number, lambda _, piece: kept.write(piece)))

    async def follow_copy(self, image: FrozenImage, *, log: Path, limit: int) -> int:
        """Do the same for a copy of a frozen container, whose processes are continued now. Raises ForkError
        if its processes are not those of the image.
        """

        def begin() -> None:
            check_processes(self._inside, image)
            thaw(self._inside, image)

        with open_bounded_log(log, limit) as kept:
            code = await self._below.follow(image.number, lambda _, piece: kept.write(piece), begin=begin)
            return self._finish(code)

    async def write_frozen(self, spec: RuntimeSpec, to: Path, *, number: int, limit: int) -> FrozenImage:
        """Write all processes and the layer to a folder, and let the processes run on, as
        `FrozenImageWriter.write` does.
        """
        if self._image_writer is None:
            raise RuntimeFault("this machine cannot freeze containers: see `polarnode doctor`")
        places = self._writable(spec)
        return await self._image_writer.write(
            to, number=number, places=places, sealed=self._sealed, limit=limit
        )

    async def put(self, files: Mapping[str, bytes], *, user: str | None = None, mode: int = 0o644) -> None:
        """Write files by absolute path, and the folders they need, owned by `user` (default: the
        runtime's).
        """
        await self._write(files, user, mode, at_s=None)

    async def place(self, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
        """Write files that a session begins with, as the runtime's user. Unlike with `put`, their
        modification time is the same in all containers of the image, so that listings of them are equal.
        """
        await self._write(files, None, mode, at_s=self.files_time)

    async def _write(
        self, files: Mapping[str, bytes], user: str | None, mode: int, *, at_s: int | None
    ) -> None:
        owner = await self._account(user)
        for path, content in files.items():
            write = partial(self._files.write, path, content, owner, mode, at_s=at_s)
            await trio.to_thread.run_sync(write)

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        """A plain file's first `limit` bytes; None where there is none. No link in the path is followed."""
        return await trio.to_thread.run_sync(self._files.read, path, limit)

    async def seal(self, spec: RuntimeSpec) -> None:
        """Make the root read-only except for the workdir, the home, /tmp, /var/tmp and what the task names;
        do nothing where the task turns it off.

        Put what a harness needs before this. Refused where a program that a prepare step left running has
        files open for writing.
        """
        if spec.read_only and self._sealed is None:
            work = partial(
                seal,
                self._inside,
                writable=self._writable(spec),
                kept=[volume.target for volume in spec.volumes],
            )
            self._sealed = await trio.to_thread.run_sync(work)

    def _writable(self, spec: RuntimeSpec) -> tuple[str, ...]:
        home = (self.home,) if self.home != "/" else ()
        return (self.workdir, *ALWAYS_WRITABLE, *spec.writable, *home)

    async def unseal(self) -> None:
        """Make the root writable again if it is sealed, once the harness's processes have ended. Also make
        sure that the workdir is a folder in which programs can start: otherwise no test could report that the
        work in it is gone. The disk limit is raised, so that a test has room however much the session wrote.
        """
        if self._sealed is not None:
            await trio.to_thread.run_sync(unseal, self._inside, self._sealed)
            self._sealed = None
        self._watched.begin_judging()
        # A link in the place of the workdir is left alone.
        with suppress(ContentFault):
            await trio.to_thread.run_sync(self._files.open_to_owner, self.workdir, self.account)

    async def collect(self, paths: Sequence[str], to: Path) -> CollectedFiles:
        """Keep files and folders, by paths relative to the workdir or absolute, as a tar. Call it once the
        harness's processes have ended: it unseals.
        """
        await self.unseal()
        return await trio.to_thread.run_sync(
            partial(collect, self._files, paths=paths, workdir=self.workdir, to=to)
        )

    async def copy_workdir(self, target: "PodmanRuntime") -> None:
        """Make the target's workdir equal to this one's. Call it once the harness's processes have ended: it
        unseals. Raises EvaluatorError where that is impossible.
        """
        await self.unseal()
        copy = Copy(
            source=self._files, target=target._files, limit=max(COPY_LIMIT_BYTES, 2 * self._watched.limit)
        )
        with target._watched.spared() as spared:
            await trio.to_thread.run_sync(copy.run, self.workdir, target.workdir)
            spared(copy.size)

    async def restore_workdir(self, kept: Path) -> None:
        """Make the workdir equal to one that `collect` kept. Raises RuntimeFault or EvaluatorError where that
        is impossible.
        """
        limit = max(COPY_LIMIT_BYTES, 2 * self._watched.limit)
        with self._watched.spared() as spared:
            spared(await trio.to_thread.run_sync(_restore, kept, self._files, self.workdir, limit))

    async def processes(self) -> frozenset[Process]:
        """The processes in it besides its first process."""
        return await trio.to_thread.run_sync(self._inside.processes)

    async def snapshot(
        self, spec: RuntimeSpec, to: Path, limit: int, *, measured: bool = False
    ) -> SnapshotFiles:
        """Write everything below the places that a seal leaves writable to a tar. The harness may run, but
        call this while it changes nothing. `measured`: check first whether the content is too large. Raises
        Refused for more than `limit` bytes of content, RuntimeFault if the tar cannot be written.
        """

        def work() -> SnapshotFiles:
            # If there is a seal, its places are used, so that a link that an agent put into the path of a
            # place has no effect.
            opened = () if self._sealed is None else self._sealed.opened
            places = opened or writable_places(self._inside, self._writable(spec))
            if measured:
                check_size(self._files, places, limit)
            return archive(self._files, places=places, to=to, limit=limit)

        with boundary(RuntimeFault, "a container's writable places cannot be read"):
            return await trio.to_thread.run_sync(work)

    async def restore_snapshot(self, kept: Path, places: Sequence[str]) -> None:
        """Make the places equal to a snapshot's. Call it before anything is started. Raises RuntimeFault
        where that is impossible.
        """
        with self._watched.spared() as spared:
            spared(await trio.to_thread.run_sync(restore, kept, self._files, places))

    @property
    def frozen(self) -> bool:
        """Whether its programs are stopped."""
        return self._freeze.on

    async def freeze(self) -> None:
        """Freeze its programs. Do nothing once they are being ended. Raises RuntimeFault."""
        await self._freeze.freeze()

    async def thaw(self) -> None:
        """Let its programs run on. Raises RuntimeFault."""
        await self._freeze.thaw()

    async def end_processes(self) -> None:
        """End everything in the container but its first process."""
        await self._freeze.thaw_for_good()
        await self._inside.kill_all()

    async def close(self) -> None:
        """Close the endpoint and remove the container. Bounded, shielded, never raises, and may be called
        again.
        """
        if self._closed:
            return
        self._closed = True
        self.endpoint.close()
        self._inside.close()
        self._below.close()
        if self._image_writer is not None:
            self._image_writer.criu.forget(self.id)
        with trio.move_on_after(REMOVE_S, shield=True) as scope:
            try:
                await self._client.remove(self.id)
            except RuntimeFault as fault:
                _log.warning("container %s is left to the sweeper: %s", self.id, fault)
        if scope.cancelled_caught:
            _log.warning("container %s is left to the sweeper: no call to podman was free", self.id)
        self._on_close(self.id)

    async def _order(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        user: str | None,
        workdir: str | None,
        stdin: bytes,
    ) -> ExecOrder:
        self._check_alive()
        await self._freeze.thaw()
        obstacle = self._files.account_obstacle()
        if obstacle is not None:  # a program in it did that, and would do it again
            raise SpoiltRuntime(f"nothing can be run: {obstacle}")
        home = (await self._account(user)).home
        basic = {"LANG": "C.UTF-8", "HOME": home}  # PATH is the image's own, or the caller's
        return ExecOrder(
            argv=tuple(argv),
            env={**basic, **(env or {})},
            user=user or self.user,
            workdir=workdir or self.workdir,
            stdin=stdin,
        )

    async def _account(self, user: str | None) -> Account:
        if user is None or user == self.user:
            return self.account
        return await trio.to_thread.run_sync(self._files.account, user)

    def _finish(self, exit_code: int) -> int:
        """Return the exit code, or raise a fault if the container itself ended while the program ran."""
        self._check_alive()
        return exit_code

    def _check_alive(self) -> None:
        if not self.alive:
            kind = ContentFault if self.oom_kills() else RuntimeFault  # the kernel ended all that was in it
            raise kind("the container has ended: its lifetime is over, or the kernel ended its first process")


def _restore(kept: Path, files: ContainerFiles, workdir: str, limit: int) -> int:
    """Unpack a kept workdir beside its tar and copy it into a container; returns the bytes written."""
    with (
        tempfile.TemporaryDirectory(prefix=RESTORING_PREFIX, dir=kept.parent) as folder,
        ExitStack() as stack,
    ):
        unpack_workdir(kept, Path(folder))
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, root)
        copy = Copy(source=ContainerFiles(root=root, shift=0), target=files, limit=limit)
        copy.run("/", workdir)
        return copy.size
