"""`open_runtimes`: probe, configure and serve Podman, sweep orphans, run the pool; close in reverse order."""

import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from attrs import define, evolve

from polarnode.containers.client import ContainerClient
from polarnode.containers.container import this_process
from polarnode.containers.copies import PodmanCopies
from polarnode.containers.disk import DiskWatch
from polarnode.containers.pool import Pool, PrewarmRequest, RuntimesStatistics
from polarnode.containers.prepared import Workspace, Workspaces, workspace_of
from polarnode.containers.probe import PodmanFindings, Store
from polarnode.containers.recipes import RuntimesSettings, default_runtimes_dir, read_recipes
from polarnode.containers.runtime import PodmanRuntime, Starter
from polarnode.containers.service import PodmanService, configure_store
from polarnode.containers.sweeper import ForgottenContainers, Sweeper
from polarnode.core.task import RuntimeSpec
from polarnode.support.concurrency import open_background

Prepare = Callable[[PodmanRuntime], Awaitable[None]]


@define(eq=False, kw_only=True)
class Runtimes:
    """Provides sessions with containers."""

    findings: PodmanFindings
    settings: RuntimesSettings
    _pool: Pool
    _workspaces: Workspaces[PodmanRuntime]
    _sweeper: Sweeper
    _service: PodmanService

    @asynccontextmanager
    async def open(
        self, spec: RuntimeSpec, *, session_id: str, lifetime_s: float
    ) -> AsyncIterator[PodmanRuntime]:
        """A runtime that was never used before, removed when the block ends in any way. Raises RuntimeFault
        when none starts.

        `lifetime_s` is its dead-man switch: after so many seconds it is killed even if the node, the service
        and everything else are dead.
        """
        async with self._pool.lent(
            await self._pool.take(self._pool.shape(spec), session_id=session_id, lifetime_s=lifetime_s)
        ) as runtime:
            yield runtime

    @asynccontextmanager
    async def open_prepared(
        self, spec: RuntimeSpec, *, session_id: str, lifetime_s: float, prepare: Prepare, shared: bool
    ) -> AsyncIterator[PodmanRuntime]:
        """As `open`, with the task's workspace in it: `prepare` has run, here or once for all. What `prepare`
        raises is raised unchanged.

        `shared`: more than one runtime will need this workspace.
        """
        shape, workspace = self._pool.shape(spec), self._workspace(spec)

        async def start(image: str | None) -> PodmanRuntime:
            return await self._pool.take(
                evolve(shape, image=image or shape.image), session_id=session_id, lifetime_s=lifetime_s
            )

        if workspace is not None and self._workspaces.pays(workspace, shared=shared):
            async with self._pool.lent(await self._workspaces.obtain(workspace, start, prepare)) as runtime:
                yield runtime
        else:
            async with self._pool.lent(await start(None)) as runtime:
                await prepare(runtime)
                yield runtime

    def preparing(self, spec: RuntimeSpec) -> bool:
        """Whether what this task needs is being prepared now, so that waiting is worthwhile."""
        return self._workspaces.busy(self._workspace(spec))

    async def wait_prepared(self, spec: RuntimeSpec) -> None:
        """Wait until that preparation is over; takes no slot and makes no call."""
        await self._workspaces.wait_settled(self._workspace(spec))

    def prewarm(self, spec: RuntimeSpec, count: int) -> None:
        """Announce that `count` sessions will need a runtime for this task; the pool fills in the background,
        up to `settings.warm` of a shape.
        """
        self._pool.prewarm(
            PrewarmRequest(shape=self._pool.shape(spec), workspace=self._workspace(spec), count=count)
        )

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
            prepared=workspaces.kept,
            copied=workspaces.made,
            reused=workspaces.reused,
        )

    def _workspace(self, spec: RuntimeSpec) -> Workspace | None:
        return workspace_of(spec, self._pool.shape(spec).image)


@asynccontextmanager
async def open_runtimes(settings: RuntimesSettings) -> AsyncIterator[Runtimes]:
    """Open Podman for sessions. Raises RuntimeFault with the remedies if this machine lacks a requirement.

    Opening removes what killed nodes left. Close it after the sessions: warm runtimes go first, then the
    sweeper, then the service.
    """
    ready = await configure_store(settings.state_dir)
    socket = ready.store.sockets / f"{os.getpid()}-{secrets.token_hex(4)}.sock"
    service = PodmanService(ready.podman, ready.store, socket)
    client = ContainerClient(service.socket, settings.calls)
    try:
        async with (
            open_background(service.run),
            _pooled(settings, ready.findings, service, client, ready.store) as runtimes,
        ):
            yield runtimes
    finally:
        client.close()


@asynccontextmanager
async def _pooled(
    settings: RuntimesSettings,
    findings: PodmanFindings,
    service: PodmanService,
    client: ContainerClient,
    store: Store,
) -> AsyncIterator[Runtimes]:
    owner = this_process()
    watch = DiskWatch(store=store.state_dir, reserve=settings.disk_reserve_mb << 20)
    starter = Starter(
        client=client,
        api=service.socket,
        findings=findings,
        seccomp=store.seccomp_profile,
        node_id=settings.node_id,
        owner=owner,
        watch=watch,
        allowed_volumes=settings.volumes,
    )
    forgotten = ForgottenContainers(
        storage=service.store.storage, oci_runtime=findings.oci_runtime or Path("runc")
    )
    sweeper = Sweeper(client, owner, starter.alive, forgotten)
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
        yield Runtimes(
            findings=findings,
            settings=settings,
            pool=pool,
            workspaces=workspaces,
            sweeper=sweeper,
            service=service,
        )
