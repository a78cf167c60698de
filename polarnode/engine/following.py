"""A node of a log that others write to takes the weights and adapters that the others were sent.

A version is a row of the log. The node that a trainer sent it to has its files. The others find the row and
either use the trainer's folder, which counts as the same if its fingerprint is, or copy the files from a node
that holds them. Then they say that they hold it. With two holders the version counts, and then each node
loads it and says that it serves it. A node that cannot do so is stale: it claims no tasks, is named in the
status, and tries again.

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
from polarnode.engine.weights import Weights, read_served
from polarnode.journal.log.port import LogUnavailable, LogWeights

logger = logging.getLogger(__name__)

# Seconds between looks. Each look is some queries, and news of several nodes come together.
PAUSE_S: Final = 0.25
AGAIN_S: Final = 5.0  # seconds until what failed is tried again
# Seconds until a look without news, so that a lost notification costs no more than that.
MISSED_S: Final = 30.0
WAIT_S: Final = 1.0  # seconds between looks at the count of news


@define(eq=False)
class Following:
    """Takes the versions of a log for the node that has `weights` and `adapters`."""

    weights: Weights
    adapters: AdapterStore
    copies: Copies
    incarnation: Callable[[], int]  # that of the node, which may join the log again
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
        """Look at everything once. What fails is tried again later."""
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
        # The node goes on after errors such as a full disk, or a row of a later release.
        except (PolarnodeError, OSError) as error:
            self._failed = True
            if not isinstance(error, LogUnavailable):
                logger.warning("the versions of the log cannot be followed now: %s", error)

    async def _follow_base(self) -> None:
        weights = self.weights
        rows = await weights.log.weights(model=weights.name, latest=True)
        for row in rows:  # newest first, because it may follow the current one
            if row.version == weights.engines.versions[-1]:
                if weights.incarnation not in row.holders or not row.current:
                    kind = read_served(row).source["kind"]
                    await weights.settle(row.version, has_files=kind == "disk")
                    # It may come to count when a node is lost, which makes no news.
                    self._failed |= not row.counted
            elif row.current or not row.counted:
                await self._take(row)
            if row.current or row.version == weights.engines.versions[-1]:
                return

    async def _take(self, row: LogWeights) -> None:
        """Get the files of a version, say that this node has them, and serve the version if it counts."""
        weights, served = self.weights, read_served(row)
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
        await weights.log.add_weight_holder(row.version, weights.incarnation, model=weights.name)
        if not row.current and not await weights.count_version(row.version):
            return
        try:
            await weights.load(served, folder)
        except (Conflict, EngineError, Refused) as error:
            self._failed = True
            weights.warning = f"weights {row.version!r} of the log are not served: {error}"
            logger.warning("%s", weights.warning)
            return
        await trio.to_thread.run_sync(self.copies.keep_only, row.version)
