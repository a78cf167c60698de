"""A node in its fleet: its second homes, and its requests to the other nodes, over one link a peer.

Invariant: a link belongs to one address and certificate; when the front names another for a journal, the old
link is closed, so that nothing is sent to a machine that lost its name.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio
from attrs import define, field

from polarnode.client.values import Unreachable
from polarnode.core.errors import Refused
from polarnode.core.fleet import Peer
from polarnode.fleet.link import Link
from polarnode.journal.journal import Journal
from polarnode.rollouts.scheduler import Scheduler, recover
from polarnode.rollouts.second_homes import SecondHomes
from polarnode.rollouts.snapshot_copies import KeptSnapshots
from polarnode.support.concurrency import open_background

CLOSE_S = 3.0  # for connections to be closed
ASK_S = 10.0  # without a byte of an answer: a commit waits for an fsync of a busy disk


@define(eq=False)
class PeerLinks:
    """Links by journal. Those of `open_homes`."""

    token: str | None
    _links: dict[str, tuple[Peer, Link]] = field(factory=dict, init=False)

    async def ask(
        self, peer: Peer, method: str, path: str, *, value: object = None, body: bytes | None = None
    ) -> tuple[int, Any] | None:
        """One request: its status and JSON; None when there was no whole answer, whatever its effect."""
        link = await self._link(peer)
        try:
            answer = await link.ask(method, path, value=value, body=body, timeout_s=ASK_S)
            return answer.status, answer.json
        except (Unreachable, Refused):
            return None

    async def _link(self, peer: Peer) -> Link:
        known, link = self._links.get(peer.journal, (None, None))
        if link is not None and known == peer:
            return link
        fresh = Link(url=peer.url, token=self.token, certificate=peer.certificate)
        self._links[peer.journal] = (peer, fresh)
        if link is not None:
            await link.close()
        return fresh

    async def close(self) -> None:
        """Close all links."""
        for _, link in self._links.values():
            await link.close()


@asynccontextmanager
async def open_homes(
    token: str | None,
    journal: Journal,
    scheduler: Scheduler,
    snapshots: KeptSnapshots,
    report: Callable[[str], None],
) -> AsyncIterator[SecondHomes]:
    """A node's part in a fleet, as its journal has it. Sessions of an earlier run are recovered, except
    those of tasks that a front must confirm first.
    """
    links = PeerLinks(token)
    homes = SecondHomes(journal=journal, scheduler=scheduler, ask=links.ask, snapshots=snapshots)
    await homes.load()
    scheduler.registry.homes = homes
    await recover(journal, scheduler, report, skips=homes.waits)
    try:
        async with open_background(homes.run), open_background(partial(snapshots.run, homes)):
            yield homes
    finally:
        with trio.move_on_after(CLOSE_S, shield=True):
            await links.close()
