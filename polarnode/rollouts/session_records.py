"""Records of beginning sessions for a shared log, so that other nodes know of them, beside this node's own
journal.
"""

from contextlib import suppress
from functools import partial
from typing import Final

import trio
from attrs import define, field

from polarnode.core.trajectory import Turn
from polarnode.journal.log.patience import retry_until_answered
from polarnode.journal.log.port import Log
from polarnode.journal.writer import JournalWriter
from polarnode.merge.trajectory import Identity

# The limit on sessions whose identity the log does not have yet. No outage is so long, and the log learns the
# identity of a session that is left out when the session ends.
WAITING: Final = 10_000


@define(eq=False)
class SharedSessionRecords:
    """The `SessionJournal` of a node that shares a log. The log gets the identity of a session, so that
    another node can go on with it. The turns of the session stay here.
    """

    journal: JournalWriter
    log: Log
    _send: trio.MemorySendChannel[Identity] = field(init=False)
    _receive: trio.MemoryReceiveChannel[Identity] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[Identity](WAITING)

    def record_session(self, identity: Identity) -> None:
        self.journal.record_session(identity)
        with suppress(trio.WouldBlock):
            self._send.send_nowait(identity)

    def record_turn(self, turn: Turn) -> None:
        self.journal.record_turn(turn)

    async def run(self, ready: trio.Event) -> None:
        """Send identities to the log, until cancelled."""
        ready.set()
        async for identity in self._receive:
            await retry_until_answered(partial(self.log.record_session, identity), meanwhile="sessions go on")
