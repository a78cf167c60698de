"""From a shape to a started runtime: create, init, volumes, door, workdir, start. Half a runtime is never
left behind.

The order is what makes the door reliable: `init` makes the namespaces, the listener is made in them, what is
mounted is compared with what is allowed, and only then does anything run.
"""

import itertools
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from socket import socket

import trio
from attrs import define, field

from polarnode.containers.client import Client
from polarnode.containers.container import (
    FIRST_SHIFT,
    IDS,
    LABEL_NODE,
    LABEL_OWNER,
    LABEL_SESSION,
    SLOTS,
    Owner,
    Shape,
    container_spec,
    open_volumes,
)
from polarnode.containers.disk import DiskWatch, Upper, Written
from polarnode.containers.endpoint import open_door
from polarnode.containers.exec import Execs
from polarnode.containers.files import Account, Rooted
from polarnode.containers.inside import Inside, group_of, look_inside
from polarnode.containers.probe import PodmanFindings
from polarnode.containers.runtime import REMOVE_S, PodmanRuntime
from polarnode.core.errors import RuntimeFault

_log = logging.getLogger(__name__)


def _shifts() -> Iterator[int]:
    """Ranges of user ids, one container each; nodes begin at different places."""
    first = os.getpid() * 64
    return (FIRST_SHIFT + IDS * ((first + slot) % SLOTS) for slot in itertools.count())


@define(eq=False, kw_only=True)
class Starter:
    """Starts containers for one node. `alive` are the ids it has not removed yet, which the sweeper must let
    be.
    """

    client: Client
    api: Path
    findings: PodmanFindings
    node_id: str
    owner: Owner
    watch: DiskWatch
    allowed_volumes: tuple[str, ...] = ()
    alive: set[str] = field(factory=set, init=False)
    _shift: Iterator[int] = field(factory=_shifts, init=False)

    async def start(self, shape: Shape, *, session_id: str, lifetime_s: float) -> PodmanRuntime:
        """A fresh runtime. Raises RuntimeFault, and then nothing of it is left."""
        shift = next(self._shift) if self.findings.user_namespaces else 0
        name = f"polarnode-{secrets.token_hex(8)}"
        self.alive.add(name)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._discard, name)
            expires = trio.current_time() + lifetime_s
            inside, upper = await self._made(
                shape, name, session_id=session_id, lifetime_s=lifetime_s, shift=shift
            )
            undo.callback(inside.close)
            door = await open_door(inside.pid)
            undo.callback(door.close)
            files = Rooted(root=inside.root, shift=shift)
            account = await trio.to_thread.run_sync(_prepare, files, shape)
            await self.client.start(name)
            undo.pop_all()
        return self._runtime(
            name, shape, account, expires, inside, files, door, self._watched(name, shape, inside, upper)
        )

    async def _made(
        self, shape: Shape, name: str, *, session_id: str, lifetime_s: float, shift: int
    ) -> tuple[Inside, Path | None]:
        """A container with its namespaces and its volumes, in which nothing runs yet, and where its layer is
        written.
        """
        labels = {LABEL_NODE: self.node_id, LABEL_SESSION: session_id, LABEL_OWNER: self.owner.label()}
        with ExitStack() as opened:
            sources = await trio.to_thread.run_sync(
                opened.enter_context, open_volumes(shape.volumes, self.allowed_volumes)
            )
            spec = container_spec(
                shape,
                self.findings,
                name=name,
                labels=labels,
                lifetime_s=lifetime_s,
                shift=shift,
                volumes=sources.volumes,
            )
            await self.client.create(spec)
            initialised = await self.client.init(name)
            inside = look_inside(initialised.pid)
            try:
                sources.check_mounted(inside.root)
            except RuntimeFault:
                inside.close()
                raise
        return inside, initialised.upper

    def _watched(self, name: str, shape: Shape, inside: Inside, upper: Path | None) -> Written:
        """Its disk under watch, where there is a layer to measure."""
        group = group_of(inside.pid)
        place = Upper(folder=upper or Path("/nonexistent"), group=group, device=os.fstat(inside.root).st_dev)
        written = Written(id=name, upper=place, limit_mb=shape.disk_mb, end=inside.kill_all)
        if upper is not None:
            self.watch.add(written)
        return written

    def _runtime(
        self,
        name: str,
        shape: Shape,
        account: Account,
        expires: float,
        inside: Inside,
        files: Rooted,
        door: socket,
        written: Written,
    ) -> PodmanRuntime:
        execs = Execs(socket=self.api, container=name, inside=inside, limiter=self.client.limiter)
        return PodmanRuntime(
            id=name,
            door=door,
            workdir=shape.workdir,
            user=shape.user,
            account=account,
            expires=expires,
            inside=inside,
            files=files,
            execs=execs,
            written=written,
            client=self.client,
            on_close=self._forget,
        )

    def _forget(self, name: str) -> None:
        self.watch.discard(name)
        self.alive.discard(name)

    async def _discard(self, name: str) -> None:
        with trio.move_on_after(REMOVE_S, shield=True):
            try:
                await self.client.remove(name)
            except RuntimeFault as fault:
                _log.warning("container %s is left to the sweeper: %s", name, fault)
        self.alive.discard(name)


def _prepare(files: Rooted, shape: Shape) -> Account:
    """See that the workdir is there and `/` as it is elsewhere, and find who the user is."""
    account = files.account(shape.user)
    files.own_top()
    files.make_folder(shape.workdir, account)
    return account
