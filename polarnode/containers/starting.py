"""How a runtime is made: a fresh container of a shape, or a copy of a frozen one.

The steps for a fresh container are create, init, volumes, endpoint, workdir, start. This order makes the
endpoint reliable: `init` makes the namespaces, the listener is made in them, the mounted folders are compared
with the allowed ones, and only then does anything run. A copy is restored in place of init and start, with
its processes stopped, and its listener is made before they are continued. A start that fails leaves nothing.
"""

import itertools
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import trio
from attrs import define, evolve, field

from polarnode.containers.below import DetachedProgram
from polarnode.containers.client import ContainerClient, InitialisedContainer, PlacedContainer
from polarnode.containers.container import (
    FIRST_SHIFT,
    LABEL_NODE,
    LABEL_OWNER,
    LABEL_SESSION,
    SHIFT_RANGES,
    OpenVolumes,
    Owner,
    Shape,
    container_spec,
    open_volumes,
)
from polarnode.containers.control_groups import Group, UncountedGroup, control_group_of, freezer_file
from polarnode.containers.criu import Criu
from polarnode.containers.disk import DiskWatch, WatchedContainer, WritableLayer
from polarnode.containers.exec import ExecRunner
from polarnode.containers.files import Account, ContainerFiles
from polarnode.containers.freezing import ContainerFreeze
from polarnode.containers.frozen import FrozenImageWriter, check_machine, restore_into, seal_of
from polarnode.containers.inside import (
    ContainerHandle,
    limit_user_namespace,
    open_handle,
    open_model_endpoint,
)
from polarnode.containers.probe import PodmanFindings
from polarnode.containers.runtime import REMOVE_S, PodmanRuntime
from polarnode.containers.service import PodmanService
from polarnode.containers.user_namespace import IDS
from polarnode.core.errors import RuntimeFault, boundary
from polarnode.core.snapshots import FrozenImage
from polarnode.support.bounded import remember

MAX_FILES_TIMES = 10_000  # images whose time is cached: more than a store has

_log = logging.getLogger(__name__)


def _id_shifts() -> Iterator[int]:
    """Yield ranges of user ids, one for each container. Nodes begin at different ranges."""
    first = os.getpid() * 64
    return (FIRST_SHIFT + IDS * ((first + slot) % SHIFT_RANGES) for slot in itertools.count())


@define(eq=False, kw_only=True)
class RuntimeStarter:
    """Starts containers for one node. `alive` are the names of the containers that it has not removed yet,
    which the sweeper must skip; `frozen` are the names of those whose programs are stopped.
    """

    client: ContainerClient
    service: PodmanService
    findings: PodmanFindings
    seccomp: Path
    traced: Path  # the profile of system calls where the shape has ptrace
    node_id: str
    owner: Owner
    watch: DiskWatch
    allowed_volumes: tuple[str, ...] = ()
    criu: Criu | None = None  # None where containers cannot be frozen into files
    alive: set[str] = field(factory=set, init=False)
    frozen: set[str] = field(factory=set, init=False)
    _shift: Iterator[int] = field(factory=_id_shifts, init=False)
    _files_times: dict[str, int] = field(factory=dict, init=False)  # of images, by id

    async def start(self, shape: Shape, *, session_id: str, lifetime_s: float) -> PodmanRuntime:
        """Start a fresh runtime. If that raises RuntimeFault, nothing of the runtime remains."""
        shift = next(self._shift) if self.findings.user_namespaces else 0
        name = f"polarnode-{secrets.token_hex(8)}"
        self.alive.add(name)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.discard, name)
            expires = trio.current_time() + lifetime_s
            inside, initialised = await self._made(
                shape, name, session_id=session_id, lifetime_s=lifetime_s, shift=shift
            )
            layer = initialised.layer
            undo.callback(inside.close)
            files_time = await self.files_time(initialised.image)
            endpoint = await open_model_endpoint(inside.pid)
            undo.callback(endpoint.close)
            files = ContainerFiles(root=inside.root, shift=shift)
            account = await trio.to_thread.run_sync(_prepare, files, shape, name, files_time)
            await self.client.start(name)
            runtime = self.assemble_runtime(
                shape,
                name,
                inside,
                endpoint,
                files,
                account,
                layer=layer,
                files_time=files_time,
                expires=expires,
            )
            undo.pop_all()
        return runtime

    async def restore(
        self, shape: Shape, image: FrozenImage, folder: Path, *, session_id: str, lifetime_s: float
    ) -> PodmanRuntime:
        """Restore a runtime with the processes of the image in `folder`, which are stopped, and with its
        endpoint listening. `shape` is the shape of the frozen one. If that raises RuntimeFault or ForkError,
        nothing of the runtime remains.
        """
        if self.criu is None:
            raise RuntimeFault("this machine cannot restore frozen containers: see `polarnode doctor`")
        check_machine(image)
        name = f"polarnode-{secrets.token_hex(8)}"
        self.alive.add(name)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.discard, name)
            undo.callback(self.criu.forget, name)
            expires = trio.current_time() + lifetime_s
            inside, placed = await self._restored(
                self.criu, evolve(shape, image=image.image_id), name, image, folder, session_id, lifetime_s
            )
            undo.callback(inside.close)
            endpoint = await open_model_endpoint(inside.pid)
            undo.callback(endpoint.close)
            files = ContainerFiles(root=inside.root, shift=image.shift)
            account = await trio.to_thread.run_sync(files.account, shape.user)
            files_time = await self.files_time(image.image_id)
            runtime = self.assemble_runtime(
                shape,
                name,
                inside,
                endpoint,
                files,
                account,
                layer=placed.layer,
                files_time=files_time,
                expires=expires,
                image=image,
            )
            undo.pop_all()
        return runtime

    async def _restored(
        self,
        criu: Criu,
        shape: Shape,
        name: str,
        image: FrozenImage,
        folder: Path,
        session_id: str,
        lifetime_s: float,
    ) -> tuple[ContainerHandle, PlacedContainer]:
        with ExitStack() as opened:
            sources = await trio.to_thread.run_sync(
                opened.enter_context, open_volumes(shape.volumes, self.allowed_volumes)
            )
            await self.create(
                shape, name, sources, session_id=session_id, lifetime_s=lifetime_s, shift=image.shift
            )
            placed = await self.client.placed(name)
            await restore_into(placed, name, self.client, criu, image, folder)
            inside = open_handle(await self.client.first_process(name))
            await self.bounded(inside, sources)
        return inside, placed

    def assemble_runtime(
        self,
        shape: Shape,
        name: str,
        inside: ContainerHandle,
        endpoint: socket.socket,
        files: ContainerFiles,
        account: Account,
        *,
        layer: Path | None,
        files_time: int,
        expires: float,
        image: FrozenImage | None = None,
    ) -> PodmanRuntime:
        """Assemble the runtime of a started container, or of a copy of the frozen one `image`. Raises
        RuntimeFault if the container has ended since.
        """
        with boundary(RuntimeFault, "a container ended as it started"):
            freezer = freezer_file(inside.pid) if self.findings.freezes else None
            group = self._group(inside)
        freeze = ContainerFreeze(
            container=name,
            client=self.client,
            frozen=self.frozen,
            possible=self.findings.freezes,
            freezer=freezer,
        )
        execs = ExecRunner(
            service=self.service, container=name, inside=inside, limiter=self.client.limiter, freeze=freeze
        )
        frost = None
        if self.criu is not None and layer is not None:
            frost = FrozenImageWriter(
                criu=self.criu,
                client=self.client,
                name=name,
                inside=inside,
                freeze=freeze,
                shift=files.shift,
                layer=layer,
                group=group,
            )
        return PodmanRuntime(
            id=name,
            endpoint=endpoint,
            workdir=shape.workdir,
            user=shape.user,
            account=account,
            files_time=files_time,
            expires=expires,
            inside=inside,
            files=files,
            execs=execs,
            watched=self._watch_disk(name, shape, inside, layer, freeze, group),
            freeze=freeze,
            below=DetachedProgram(inside=inside, execs=execs, freeze=freeze, shift=files.shift),
            image_writer=frost,
            client=self.client,
            on_close=self._forget,
            sealed=None if image is None else seal_of(image),
        )

    async def _made(
        self, shape: Shape, name: str, *, session_id: str, lifetime_s: float, shift: int
    ) -> tuple[ContainerHandle, InitialisedContainer]:
        """Make a container with its namespaces and volumes, in which nothing runs yet."""
        with ExitStack() as opened:
            sources = await trio.to_thread.run_sync(
                opened.enter_context, open_volumes(shape.volumes, self.allowed_volumes)
            )
            await self.create(shape, name, sources, session_id=session_id, lifetime_s=lifetime_s, shift=shift)
            initialised = await self.client.init(name)
            inside = open_handle(initialised.pid)
            await self.bounded(inside, sources)
        return inside, initialised

    async def create(
        self,
        shape: Shape,
        name: str,
        sources: OpenVolumes,
        *,
        session_id: str,
        lifetime_s: float,
        shift: int,
    ) -> None:
        """Create a container. Its namespaces and mounts are made later."""
        labels = {LABEL_NODE: self.node_id, LABEL_SESSION: session_id, LABEL_OWNER: self.owner.label()}
        spec = container_spec(
            shape,
            self.findings,
            name=name,
            labels=labels,
            lifetime_s=lifetime_s,
            shift=shift,
            seccomp=self.traced if shape.ptrace else self.seccomp,
            volumes=sources.volumes,
            criu=None if self.criu is None else self.criu.config(name),
        )
        await self.client.create(spec)

    async def bounded(self, inside: ContainerHandle, sources: OpenVolumes) -> None:
        """Compare the folders mounted in a container with those that were checked, and limit what none of its
        own limits covers. If that fails, `inside` is closed.
        """
        try:
            sources.check_mounted(inside.root)
            # When memory is used up, the kernel then ends the agent's programs, and not the container's first
            # process.
            inside.spare()
            with boundary(RuntimeFault, "a container's sockets could not be bounded"):
                self._group(inside).limit_sockets()
            if self.findings.user_namespaces:
                await limit_user_namespace(inside)
        except BaseException:
            inside.close()
            raise

    async def files_time(self, image: str) -> int:
        """The modification time of files placed in containers of an image, in seconds since 1970."""
        if image not in self._files_times:
            remember(self._files_times, image, await self.client.files_time(image), most=MAX_FILES_TIMES)
        return self._files_times[image]

    def _watch_disk(
        self,
        name: str,
        shape: Shape,
        inside: ContainerHandle,
        layer: Path | None,
        freeze: ContainerFreeze,
        group: Group,
    ) -> WatchedContainer:
        """Watch the container's disk, if it has a layer to measure."""

        async def end() -> None:
            await freeze.thaw_for_good()
            await inside.kill_all()

        place = WritableLayer(
            folder=layer or Path("/nonexistent"), group=group, device=os.fstat(inside.root).st_dev
        )
        watched = WatchedContainer(id=name, layer=place, limit_mb=shape.disk_mb, end=end)
        if layer is not None:
            self.watch.add(watched)
        return watched

    def _group(self, inside: ContainerHandle) -> Group:
        return control_group_of(inside.pid) if self.findings.limits else UncountedGroup(inside.members)

    def _forget(self, name: str) -> None:
        self.watch.discard(name)
        self.alive.discard(name)
        self.frozen.discard(name)

    async def discard(self, name: str) -> None:
        """Remove a container that did not become a runtime."""
        with trio.move_on_after(REMOVE_S, shield=True):
            try:
                await self.client.remove(name)
            except RuntimeFault as fault:
                _log.warning("container %s is left to the sweeper: %s", name, fault)
        self.alive.discard(name)


def _prepare(files: ContainerFiles, shape: Shape, name: str, files_time: int) -> Account:
    """Make the workdir, fix the mode of `/`, and look up the user. Listings show the same in all containers
    of an image. The container's name, which Podman puts into /etc/hosts, is removed for the same reason.
    """
    account = files.account(shape.user)
    files.prepare_root(files_time)
    files.forget_host(name)
    files.make_folder(shape.workdir, account, at_s=files_time)
    return account
