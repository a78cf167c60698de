"""Removes containers nobody owns: of nodes that were killed, and our own that a removal left behind.

An owner is a process id with its start time and the machine's boot, so that no other process is taken for it. Containers of another node that
lives are never touched, whatever its name. Rule for whoever edits it: a label that can not be read is not ours to judge.
"""

import logging

import trio
from attrs import define, field

from polarnode.errors import RuntimeFault
from polarnode.shell.podman.client import Client, Listed
from polarnode.shell.podman.container import LABEL_OWNER, Owner, read_owner
from polarnode.shell.podman.forgotten import Forgotten

SWEEP_EVERY_S = 60.0  # seconds: what a killed node left is swept when the next one starts; this catches removals that failed
AT_ONCE = 3  # removals side by side, fewer than the calls a node may make, so that sessions go on meanwhile

_log = logging.getLogger(__name__)


@define(eq=False)
class Sweeper:
    """Sweeps one store for one node. `alive` are names of containers our own process still has a use for."""

    client: Client
    owner: Owner
    alive: set[str]
    forgotten: Forgotten
    swept: int = field(default=0, init=False)
    _suspects: set[str] = field(factory=set, init=False)

    async def sweep(self, *, at_once: int = AT_ONCE) -> int:
        """Remove every orphan there is now, so many side by side; how many. Raises RuntimeFault when Podman does not answer."""
        known = set(self.alive)  # before asking: one that is created meanwhile is not listed, one removed meanwhile is gone anyway
        orphans = [each.id for each in await self.client.labelled(LABEL_OWNER) if self._is_orphan(each, known)]
        limiter = trio.CapacityLimiter(at_once)
        async with trio.open_nursery() as nursery:
            for orphan in orphans:
                nursery.start_soon(self._remove, orphan, limiter)
        await self._end_forgotten()
        return len(orphans)

    async def _end_forgotten(self) -> None:
        conmons = await trio.to_thread.run_sync(self.forgotten.conmons)
        known = await self.client.known() if conmons else frozenset[str]()
        await self.forgotten.end([conmon for conmon in conmons if conmon.container not in known])

    async def run(self, ready: trio.Event) -> None:
        """Sweep now and then until cancelled."""
        ready.set()
        while True:
            await trio.sleep(SWEEP_EVERY_S)
            try:
                await self.sweep()
            except RuntimeFault as fault:
                _log.warning("the sweep failed and is tried again in %.0f s: %s", SWEEP_EVERY_S, fault)

    def _is_orphan(self, each: Listed, known: set[str]) -> bool:
        owner = read_owner(each.labels[LABEL_OWNER])
        if owner is None:
            return False
        if owner == self.owner:
            return self._forgotten(each, known | self.alive)
        return not owner.lives()

    def _forgotten(self, each: Listed, known: set[str]) -> bool:
        """Ours, and unknown in two sweeps: one that is just being removed is unknown for a moment."""
        if known.intersection(each.names):
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
