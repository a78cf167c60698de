"""`open_runtimes`: Podman probed, configured and served, orphans swept, the pool and the sweeper running, all taken down in reverse."""

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from attrs import define

from polarnode.shell.podman.background import open_background
from polarnode.shell.podman.client import Client
from polarnode.shell.podman.conf import ready_store
from polarnode.shell.podman.container import this_process
from polarnode.shell.podman.pool import Pool, RuntimesStatistics
from polarnode.shell.podman.probe import PodmanFindings
from polarnode.shell.podman.recipes import default_runtimes_dir, read_recipes
from polarnode.shell.podman.runtime import PodmanRuntime
from polarnode.shell.podman.service import Service
from polarnode.shell.podman.settings import RuntimesSettings
from polarnode.shell.podman.starter import Starter
from polarnode.shell.podman.store import Store
from polarnode.shell.podman.sweeper import Sweeper
from polarnode.tasks import RuntimeSpec


@define(eq=False, kw_only=True)
class Runtimes:
    """Where sessions get their containers."""

    findings: PodmanFindings
    settings: RuntimesSettings
    _pool: Pool
    _sweeper: Sweeper
    _service: Service

    def open(self, spec: RuntimeSpec, *, session_id: str, lifetime_s: float) -> AbstractAsyncContextManager[PodmanRuntime]:
        """A runtime used by nobody before, removed when the block is left in any way. Opening raises RuntimeFault when none starts.

        `lifetime_s` is its dead-man switch: so many seconds later it is killed even if the node, the service and all else are dead.
        """
        return self._pool.open(spec, session_id=session_id, lifetime_s=lifetime_s)

    def want(self, spec: RuntimeSpec, count: int) -> None:
        """Keep `count` runtimes of this shape warm, at most `settings.warm`; the pool fills in the background."""
        self._pool.want(spec, min(count, self.settings.warm))

    async def sweep(self) -> int:
        """Remove orphans now; how many there were."""
        return await self._sweeper.sweep()

    def statistics(self) -> RuntimesStatistics:
        """Counts now."""
        pool = self._pool
        return RuntimesStatistics(
            live=pool.live,
            warm=pool.warm,
            started=pool.started,
            served_warm=pool.served_warm,
            failed=pool.failed,
            swept=self._sweeper.swept,
            service_restarts=self._service.restarts,
        )


@asynccontextmanager
async def open_runtimes(settings: RuntimesSettings) -> AsyncIterator[Runtimes]:
    """Podman, ready for sessions; raises RuntimeFault with the remedies where this machine lacks something.

    Opening removes what killed nodes left. Leave it after the sessions: warm runtimes go, then the sweeper, then the service.
    """
    ready = await ready_store(settings.state_dir)
    async with _served(settings, ready.findings, ready.store, ready.podman) as runtimes:
        yield runtimes


@asynccontextmanager
async def _served(settings: RuntimesSettings, findings: PodmanFindings, store: Store, podman: Path) -> AsyncIterator[Runtimes]:
    service = Service(podman, store, store.sockets / f"{os.getpid()}-{secrets.token_hex(4)}.sock")
    client = Client(service.socket, settings.calls)
    try:
        async with open_background(service.run), _pooled(settings, findings, service, client) as runtimes:
            yield runtimes
    finally:
        client.close()


@asynccontextmanager
async def _pooled(settings: RuntimesSettings, findings: PodmanFindings, service: Service, client: Client) -> AsyncIterator[Runtimes]:
    owner = this_process()
    starter = Starter(client=client, api=service.socket, findings=findings, node_id=settings.node_id, owner=owner)
    sweeper = Sweeper(client, owner, starter.alive)
    await sweeper.sweep()
    recipes = read_recipes(settings.runtimes_dir or default_runtimes_dir(), base=settings.base_image)
    pool = Pool(starter=starter, recipes=recipes)
    async with open_background(sweeper.run), open_background(pool.run):
        yield Runtimes(findings=findings, settings=settings, pool=pool, sweeper=sweeper, service=service)
