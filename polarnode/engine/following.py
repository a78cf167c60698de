"""A node of a log that others write to: it takes the weights and adapters that the others were sent.

A version is a row of the log. The node that a trainer sent it to has its files; the others find the row, try
the trainer's folder, which counts as the same where its fingerprint is, or copy the files from a node that
holds them, and say that they hold it. With two holders the version counts, and then each node loads it and
says that it serves it. A node that cannot is stale: it claims nothing, is named in the status, and tries
again.

A node alone runs this too: it finds what it wrote itself, and nothing is left to do.
"""

import logging
from collections.abc import Callable
from typing import Final

import trio
from attrs import define, field

from polarnode.core.errors import Conflict, EngineError, PolarnodeError, Refused
from polarnode.engine.adapter_store import AdapterStore
from polarnode.engine.weight_copies import Copies
from polarnode.engine.weights import Weights, served_of
from polarnode.journal.log.port import LogAway, LogWeights

logger = logging.getLogger(__name__)

PAUSE_S: Final = 0.25  # between looks, of which each is some queries: news of several nodes come together
AGAIN_S: Final = 5.0  # until what failed is tried again
MISSED_S: Final = 30.0  # until a look without news: a notification that was lost costs no more
WAIT_S: Final = 1.0  # between looks at the count of news


@define(eq=False)
class Following:
    """Takes the versions of a log for the node that has `weights` and `adapters`."""

    weights: Weights
    adapters: AdapterStore
    copies: Copies
    incarnation: Callable[[], int]  # of the node, which may join again
    _failed: bool = field(default=False, init=False)

    async def run(self, ready: trio.Event) -> None:
        """Look at the log whenever there is news of weights, until cancelled."""
        ready.set()
        log, seen, due = self.weights.log, -1, trio.current_time()
        while True:
            news = log.news
            joined_again = self.incarnation() != self.weights.incarnation
            if joined_again or log.weight_news != seen or (log.shared and trio.current_time() >= due):
                seen = log.weight_news
                await self.look()
                due = trio.current_time() + (AGAIN_S if self._failed else MISSED_S)
                await trio.sleep(PAUSE_S)
            else:
                await log.wait_news(news, WAIT_S)

    async def look(self) -> None:
        """One look at everything. What fails is tried again later."""
        self._failed, self.weights.incarnation = False, self.incarnation()
        try:
            await self.weights.follow_hold()
            if self.weights.engines.is_own:
                await self.adapters.forget_deleted()  # the base does not change while there are adapters
                await self._follow_base()
                await self.adapters.follow(self.copies)
            await self.weights.tell_serving()
            await self.weights.read_order()
            await self.weights.read_stale()
        except (PolarnodeError, OSError) as error:  # a full disk, a row of a later release: the node goes on
            self._failed = True
            if not isinstance(error, LogAway):
                logger.warning("the versions of the log cannot be followed now: %s", error)

    async def _follow_base(self) -> None:
        weights = self.weights
        rows = await weights.log.weights(model=weights.name, latest=True)
        for row in rows:  # the newest first: it may be what the current one is followed by
            if row.version == weights.engines.versions[-1]:
                if weights.incarnation not in row.holders or not row.current:
                    kind = served_of(row).source["kind"]
                    await weights.settle(row.version, has_files=kind == "disk")
                    self._failed |= not row.counted  # it may count when a node is lost, which is no news
            elif row.current or not row.counted:
                await self._take(row)
            if row.current or row.version == weights.engines.versions[-1]:
                return

    async def _take(self, row: LogWeights) -> None:
        """Have the files of a version, say so, and serve it if it counts."""
        weights, served = self.weights, served_of(row)
        if served.source["kind"] != "disk":
            if row.current:
                weights.warning = (
                    f"weights {row.version!r} came as {served.source['kind']} from a trainer to other nodes,"
                    " and no disk has them: this node takes tasks again with the next update"
                )
            return
        folder = await weights.folder_of(row.version) or await self.copies.copy_base(row, served)
        if folder is None:
            self._failed = True
            if row.current:
                weights.warning = (
                    f"weights {row.version!r} of the log are not served: {served.source['path']} is not here"
                    " as it was, and no node gave its files"
                )
            return
        await weights.log.hold_weights(row.version, weights.incarnation, model=weights.name)
        if not row.current and not await weights.make_count(row.version):
            return
        try:
            await weights.load(served, folder)
        except (Conflict, EngineError, Refused) as error:
            self._failed = True
            weights.warning = f"weights {row.version!r} of the log are not served: {error}"
            logger.warning("%s", weights.warning)
            return
        await trio.to_thread.run_sync(self.copies.keep_only, row.version)
