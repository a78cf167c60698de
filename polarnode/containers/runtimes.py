"""`open_runtimes`: probe, configure and serve Podman, sweep orphans, run the pool; close in reverse order.

The sweeper removes containers that no process owns any more: those of killed nodes, the node's own that a
failed removal left, and forgotten ones. An owner is a process id with its start time and the machine's boot,
so that no other process is taken for it. Containers of another living node are never touched, whatever its
name. Invariant: a container whose label cannot be read is left alone.

Podman forgets a container whose node is killed between the container's `init` and Podman's record of it. The
container's conmon and its first process, which waits to be started, live on. Podman, for which that container
never began, removes only its own record. Such containers are found by their conmon. Invariant: processes are
read before Podman is queried, because Podman lists a container from before its conmon begins until after its
first process has ended. A container that Podman does not list then will never be ended by anyone else.
"""

import logging
import os
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import trio
from attrs import define, evolve, field, frozen

from polarnode.containers.client import ContainerClient, ListedContainer
from polarnode.containers.container import LABEL_OWNER, Owner, current_owner, read_owner
from polarnode.containers.criu import Criu
from polarnode.containers.disk import DiskWatch
from polarnode.containers.pool import Pool, PrewarmRequest, RuntimesStatistics
from polarnode.containers.prepared import PodmanCopies, Workspace, Workspaces, workspace_of
from polarnode.containers.probe import PodmanFindings, Store
from polarnode.containers.recipes import RuntimesSettings, default_runtimes_dir, read_recipes
from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.service import PodmanService, configure_store, traced_profile
from polarnode.containers.starting import RuntimeStarter
from polarnode.core.errors import RuntimeFault
from polarnode.core.snapshots import FrozenImage
from polarnode.core.task import RuntimeSpec
from polarnode.support.concurrency import open_background

# ── containers Podman forgot ──────────────────────────────────────────────────

PROGRAM = b"conmon"
# Seconds that the OCI runtime may take to clear a container's state; 0.05 on a quiet machine. A call that
# hangs must not keep a node from starting.
CLEAR_S = 20.0

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class ConmonProcess:
    """The process that watches over one container."""

    pid: int
    container: str


@frozen(kw_only=True)
class ForgottenContainers:
    """The forgotten containers of one store. `storage` is its graph root, which holds the bundles of its
    containers and of no other Podman's.
    """

    storage: Path
    oci_runtime: Path

    def conmons(self) -> tuple[ConmonProcess, ...]:
        """Every conmon of this store whose container runs, or is about to run. A conmon whose container has
        ended waits for Podman to clean up, and needs no help.
        """
        found = (self._read(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
        return tuple(conmon for conmon in found if conmon is not None)

    def _read(self, pid: int) -> ConmonProcess | None:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it ended while we looked
            return None
        if os.path.basename(words[0]) != PROGRAM or not {b"-c", b"-u", b"-b"} <= set(words):
            return None
        container, unit, bundle = (
            os.fsdecode(words[words.index(word) + 1]) for word in (b"-c", b"-u", b"-b")
        )
        of_container = unit == container  # the conmon of an exec ends a minute after its container
        if (
            not of_container
            or not Path(bundle).is_relative_to(self.storage)
            or all(map(_cleans_up, _children(pid)))
        ):
            return None
        return ConmonProcess(pid=pid, container=container)

    async def end(self, conmons: Collection[ConmonProcess]) -> None:
        """End the conmons that still run, with everything that they watch over, and clear what the OCI
        runtime remembers. It never raises.
        """
        # A container that was just being removed has ended meanwhile.
        still = [conmon for conmon in conmons if self._read(conmon.pid) == conmon]
        for conmon in still:
            # The descendants are read before the first process is killed, because orphans cannot be found by
            # their parent.
            for pid in (conmon.pid, *_below(conmon.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for container in {conmon.container for conmon in still}:
            await self._clear(container)
            _log.warning("container %s, which podman had forgotten, was ended", container[:12])

    async def _clear(self, container: str) -> None:
        # If the OCI runtime does not know the container either, it is cleared already.
        with trio.move_on_after(CLEAR_S), suppress(OSError):
            await trio.run_process(
                [self.oci_runtime, "delete", "--force", container],
                check=False,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )


def _below(pid: int) -> list[int]:
    """Every descendant of a process."""
    return [each for child in _children(pid) for each in (child, *_below(child))]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def _cleans_up(pid: int) -> bool:
    """Whether a conmon's child is the cleanup that it starts after its container's end, or has itself
    ended.
    """
    try:
        return os.path.basename(Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]) in (
            b"podman",
            b"",
        )
    except OSError:
        return True


# ── the sweeper ───────────────────────────────────────────────────────────────

# Seconds between sweeps. What a killed node left is swept when the next one starts; these sweeps catch
# removals that failed.
SWEEP_EVERY_S = 60.0
AT_ONCE = 3  # concurrent removals; fewer than a node's calls to Podman, so that sessions are not blocked


@define(eq=False)
class ContainerSweeper:
    """Sweeps one store for one node. `alive` are the names of containers that this node still uses."""

    client: ContainerClient
    owner: Owner
    alive: set[str]
    forgotten: ForgottenContainers
    swept: int = field(default=0, init=False)
    _suspects: set[str] = field(factory=set, init=False)

    async def sweep(self, *, at_once: int = AT_ONCE) -> int:
        """Remove every orphan, `at_once` of them concurrently, and return how many there were. Raises
        RuntimeFault when Podman does not answer.
        """
        # The names are copied before Podman is asked: a container that is created meanwhile is not listed,
        # and one that is removed meanwhile is gone anyway.
        in_use = set(self.alive)
        orphans = [
            each.id for each in await self.client.list_labelled(LABEL_OWNER) if self._is_orphan(each, in_use)
        ]
        limiter = trio.CapacityLimiter(at_once)
        async with trio.open_nursery() as nursery:
            for orphan in orphans:
                nursery.start_soon(self._remove, orphan, limiter)
        await self._end_forgotten()
        return len(orphans)

    async def _end_forgotten(self) -> None:
        conmons = await trio.to_thread.run_sync(self.forgotten.conmons)
        listed = await self.client.all_ids() if conmons else frozenset[str]()
        await self.forgotten.end([conmon for conmon in conmons if conmon.container not in listed])

    async def run(self, ready: trio.Event) -> None:
        """Sweep regularly until cancelled."""
        ready.set()
        while True:
            await trio.sleep(SWEEP_EVERY_S)
            try:
                await self.sweep()
            except RuntimeFault as fault:
                _log.warning("the sweep failed and is tried again in %.0f s: %s", SWEEP_EVERY_S, fault)

    def _is_orphan(self, each: ListedContainer, in_use: set[str]) -> bool:
        owner = read_owner(each.labels[LABEL_OWNER])
        if owner is None:
            return False
        if owner == self.owner:
            return self._forgotten(each, in_use | self.alive)
        return not owner.is_alive()

    def _forgotten(self, each: ListedContainer, in_use: set[str]) -> bool:
        """Whether one of the node's own containers was unused in two sweeps. One sweep does not suffice,
        because a container that is just being removed is unused for a moment.
        """
        if in_use.intersection(each.names):
            self._suspects.discard(each.id)
            return False
        if each.id in self._suspects:
            return True
        self._suspects.add(each.id)
        return False

    async def _remove(self, orphan: str, limiter: trio.CapacityLimiter) -> None:
        async with limiter:
            try:
                await self.client.remove(orphan)
            except RuntimeFault as fault:
                _log.warning("orphan %s could not be removed: %s", orphan[:12], fault)
                return
        self._suspects.discard(orphan)
        self.swept += 1


# ── runtimes ────────────────────────────────────────────────────────────────────────────────────────

Prepare = Callable[[PodmanRuntime], Awaitable[None]]


@define(eq=False, kw_only=True)
class NodeRuntimes:
    """Provides sessions with containers."""

    findings: PodmanFindings
    settings: RuntimesSettings
    _pool: Pool
    _workspaces: Workspaces[PodmanRuntime]
    _sweeper: ContainerSweeper
    _service: PodmanService

    @asynccontextmanager
    async def open(
        self, spec: RuntimeSpec, *, session_id: str, lifetime_s: float
    ) -> AsyncIterator[PodmanRuntime]:
        """Give a runtime that was never used before, and remove it when the block ends in any way. Raises
        RuntimeFault when none starts.

        `lifetime_s` is its dead-man switch: after this many seconds it is killed even if the node, the
        service and everything else are dead.
        """
        async with self._pool.lend_runtime(
            await self._pool.take(self._pool.shape(spec), session_id=session_id, lifetime_s=lifetime_s)
        ) as runtime:
            yield runtime

    @asynccontextmanager
    async def open_prepared(
        self, spec: RuntimeSpec, *, session_id: str, lifetime_s: float, prepare: Prepare, shared: bool
    ) -> AsyncIterator[PodmanRuntime]:
        """Do what `open` does, with the task's workspace in the runtime: `prepare` has run, here or once for
        all sessions. Errors of `prepare` are raised unchanged.

        `shared`: more than one runtime will need this workspace.
        """
        shape, workspace = self._pool.shape(spec), self._task_workspace(spec)

        async def start(image: str | None) -> PodmanRuntime:
            return await self._pool.take(
                evolve(shape, image=image or shape.image), session_id=session_id, lifetime_s=lifetime_s
            )

        if workspace is not None and self._workspaces.pays(workspace, shared=shared):
            async with self._pool.lend_runtime(
                await self._workspaces.obtain(workspace, start, prepare)
            ) as runtime:
                yield runtime
        else:
            async with self._pool.lend_runtime(await start(None)) as runtime:
                await prepare(runtime)
                yield runtime

    @asynccontextmanager
    async def open_frozen(
        self, spec: RuntimeSpec, image: FrozenImage, folder: Path, *, session_id: str, lifetime_s: float
    ) -> AsyncIterator[PodmanRuntime]:
        """Give a copy of a frozen runtime, whose processes are stopped until `follow_copy`, and remove it
        when the block ends. Raises RuntimeFault if it cannot be restored, ForkError if it comes from another
        kernel.
        """
        runtime = await self._pool.starter.restore(
            self._pool.shape(spec), image, folder, session_id=session_id, lifetime_s=lifetime_s
        )
        async with self._pool.lend_runtime(runtime):
            yield runtime

    async def has_image(self, image_id: str) -> bool:
        """Whether an image is in the store."""
        return await self._sweeper.client.has_image(image_id)

    @property
    def freezing_obstacle(self) -> str | None:
        """Why sessions cannot be frozen here, as `polarnode doctor` shows it; None if they can."""
        return self.findings.freezing_obstacle

    def is_preparing(self, spec: RuntimeSpec) -> bool:
        """Whether what this task needs is being prepared now, so that waiting is worthwhile."""
        return self._workspaces.busy(self._task_workspace(spec))

    async def wait_prepared(self, spec: RuntimeSpec) -> None:
        """Wait until that preparation is over. It takes no slot and makes no call."""
        await self._workspaces.wait_settled(self._task_workspace(spec))

    def prewarm(self, spec: RuntimeSpec, count: int) -> None:
        """Announce that `count` sessions will need a runtime for this task; the pool fills in the background,
        up to `settings.warm` of a shape.
        """
        self._pool.prewarm(
            PrewarmRequest(shape=self._pool.shape(spec), workspace=self._task_workspace(spec), count=count)
        )

    async def image_id(self, spec: RuntimeSpec) -> str:
        """The id of the image from which a task's containers are made now. Raises RuntimeFault if it is
        gone.
        """
        return await self._sweeper.client.image_id(self._pool.shape(spec).image)

    def hold(self, held: bool) -> None:
        """Start nothing in advance while under backpressure."""
        self._pool.held = held
        self._pool.look()

    async def sweep(self) -> int:
        """Remove orphans now, and return how many there were."""
        return await self._sweeper.sweep()

    def statistics(self) -> RuntimesStatistics:
        """The current counts."""
        pool, workspaces = self._pool, self._workspaces
        return RuntimesStatistics(
            live=pool.live,
            warm=pool.warm,
            started=pool.started,
            served_warm=pool.served_warm,
            failed=pool.failed,
            swept=self._sweeper.swept,
            service_restarts=self._service.restarts,
            frozen=len(pool.starter.frozen),
            prepared=workspaces.kept,
            copied=workspaces.made,
            reused=workspaces.reused,
        )

    def _task_workspace(self, spec: RuntimeSpec) -> Workspace | None:
        return workspace_of(spec, self._pool.shape(spec).image)


NO_CONTAINERS = (
    "this node runs no containers (--no-containers) and takes captures alone: send tasks to a node that has"
    " them, or start it without that flag"
)


@define(eq=False, kw_only=True)
class AbsentRuntimes:
    """Replaces `NodeRuntimes` on a node that runs no containers. Opening a runtime raises RuntimeFault."""

    settings: RuntimesSettings

    def open_prepared(
        self, spec: RuntimeSpec, *, session_id: str, lifetime_s: float, prepare: Prepare, shared: bool
    ) -> AbstractAsyncContextManager[PodmanRuntime]:
        """Raise RuntimeFault. It is called for sessions that an earlier node with containers left to be
        run.
        """
        raise RuntimeFault(NO_CONTAINERS)

    def open_frozen(
        self, spec: RuntimeSpec, image: FrozenImage, folder: Path, *, session_id: str, lifetime_s: float
    ) -> AbstractAsyncContextManager[PodmanRuntime]:
        """Raise RuntimeFault, as `open_prepared` does."""
        raise RuntimeFault(NO_CONTAINERS)

    async def has_image(self, image_id: str) -> bool:
        await trio.lowlevel.checkpoint()
        return False

    @property
    def freezing_obstacle(self) -> str | None:
        return NO_CONTAINERS

    def is_preparing(self, spec: RuntimeSpec) -> bool:
        return False

    async def wait_prepared(self, spec: RuntimeSpec) -> None:
        await trio.lowlevel.checkpoint()

    async def image_id(self, spec: RuntimeSpec) -> str:
        """Raise RuntimeFault, because there are no images."""
        raise RuntimeFault(NO_CONTAINERS)

    def prewarm(self, spec: RuntimeSpec, count: int) -> None:
        """Do nothing: no runtime is started for sessions that end at once."""

    def hold(self, held: bool) -> None:
        """Do nothing: no runtime is started anyway."""

    def statistics(self) -> RuntimesStatistics:
        return RuntimesStatistics(
            live=0, warm=0, started=0, served_warm=0, failed=0, swept=0, service_restarts=0
        )


@asynccontextmanager
async def open_runtimes(settings: RuntimesSettings) -> AsyncIterator[NodeRuntimes]:
    """Open Podman for sessions. Raises RuntimeFault with the remedies if this machine lacks a requirement.

    Opening removes what killed nodes left. Close it after the sessions. Warm runtimes are removed first, then
    the sweeper stops, then the service.
    """
    ready = await configure_store(settings.state_dir, settings.limits)
    socket = ready.store.sockets / f"{os.getpid()}-{secrets.token_hex(4)}.sock"
    service = PodmanService(ready.podman, ready.store, socket)
    client = ContainerClient(service.socket, settings.calls)
    try:
        async with (
            open_background(service.run),
            _open_pool(settings, ready.findings, service, client, ready.store) as runtimes,
        ):
            yield runtimes
    finally:
        client.close()


@asynccontextmanager
async def _open_pool(
    settings: RuntimesSettings,
    findings: PodmanFindings,
    service: PodmanService,
    client: ContainerClient,
    store: Store,
) -> AsyncIterator[NodeRuntimes]:
    owner = current_owner()
    watch = DiskWatch(store=store.state_dir, reserve=settings.disk_reserve_mb << 20)
    criu = None
    if findings.freezing_obstacle is None and findings.oci_runtime is not None:
        criu = Criu(
            oci_runtime=findings.oci_runtime, environment=store.environment(), configs=store.run_dir / "criu"
        )
    starter = RuntimeStarter(
        client=client,
        service=service,
        findings=findings,
        seccomp=store.seccomp_profile,
        traced=traced_profile(store),
        node_id=settings.node_id,
        owner=owner,
        watch=watch,
        allowed_volumes=settings.volumes,
        criu=criu,
    )
    forgotten = ForgottenContainers(
        storage=service.store.storage, oci_runtime=findings.oci_runtime or Path("runc")
    )
    sweeper = ContainerSweeper(client, owner, starter.alive, forgotten)
    await sweeper.sweep(at_once=settings.calls)  # nothing else calls yet
    copies = PodmanCopies(api=service.socket, limiter=client.limiter, owner=owner, most=settings.prepared)
    workspaces: Workspaces[PodmanRuntime] = Workspaces(copies=copies, most=settings.prepared)
    recipes = read_recipes(settings.runtimes_dir or default_runtimes_dir(), base=settings.base_image)
    pool = Pool(starter=starter, recipes=recipes, most=settings.warm, expected=workspaces.expected)
    workspaces.on_change = pool.look
    services = (watch.run, workspaces.run, copies.run, sweeper.run, pool.run)
    async with AsyncExitStack() as stack:
        for run in services:
            await stack.enter_async_context(open_background(run))
        yield NodeRuntimes(
            findings=findings,
            settings=settings,
            pool=pool,
            workspaces=workspaces,
            sweeper=sweeper,
            service=service,
        )
