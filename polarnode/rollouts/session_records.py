"""What the nodes of a shared log are told of a session that begins, besides this node's own journal."""

from contextlib import suppress
from functools import partial
from typing import Final

import trio
from attrs import define, field

from polarnode.core.trajectory import Turn
from polarnode.journal.journal import Journal
from polarnode.journal.log.patience import answered
from polarnode.journal.log.port import Log
from polarnode.merge.trajectory import Identity

# sessions whose identity the log has not yet: no outage is so long, and what is left out is known at its end
WAITING: Final = 10_000


@define(eq=False)
class SharedRecords:
    """`SessionJournal` of a node that shares a log. The log is told who a session is, so that another node
    can go on with it; its turns stay here.
    """

    journal: Journal
    log: Log
    _send: trio.MemorySendChannel[Identity] = field(init=False)
    _receive: trio.MemoryReceiveChannel[Identity] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[Identity](WAITING)

    def session_started(self, identity: Identity) -> None:
        self.journal.session_started(identity)
        with suppress(trio.WouldBlock):
            self._send.send_nowait(identity)

    def turn(self, turn: Turn) -> None:
        self.journal.turn(turn)

    async def run(self, ready: trio.Event) -> None:
        """Tell the log, until cancelled."""
        ready.set()
        async for identity in self._receive:
            await answered(partial(self.log.session_started, identity), meanwhile="sessions go on")
