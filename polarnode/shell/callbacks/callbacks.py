"""Who is told when: a task for each URL to which something is owed, at work while it is and at rest while it fails.

The rule for whoever edits it: what is kept here is forgotten without harm, because the journal knows what is owed; so each table has an end.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx2
import trio
from attrs import define, field

from polarnode.errors import PolarnodeError
from polarnode.shell.callbacks.posting import Poster, shown
from polarnode.shell.callbacks.values import CallbackStatistics, Pause
from polarnode.shell.journal import Journal
from polarnode.shell.journal.outgoing import Owed
from polarnode.shell.podman.background import open_background
from polarnode.shell.recent import remember

logger = logging.getLogger(__name__)

AT_ONCE = 32  # POSTs under way to URLs that answer: each holds one session's JSON, a few megabytes
PROBES = 8  # to URLs whose last POSTs all failed: places of their own, so that those hold up no others
AT_ONE_URL = 4  # to one URL: a trainer takes its groups one after another anyway
URLS = 256  # at work at once; one that rests is none of them
HEADS = 64  # tasks looked at in a round of one URL
REMEMBERED = 20_000  # tasks and URLs whose pauses are known: 200 bytes each; one that is forgotten is only tried earlier
TROUBLES = 20  # URLs with their last trouble in the status
LOOK_S = 0.25  # between two looks at what is owed, however many events come
UNREAD_S = 5.0  # before another look where the journal could not be read
SETTLE_S = 5.0  # at the node's end, for what its last sessions owe: whoever answers is told in one
CLOSE_S = 5.0  # for closing idle connections


@define(eq=False)
class Callbacks:
    """Made by `open_callbacks`."""

    journal: Journal
    poster: Poster
    _places: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(AT_ONCE), init=False)
    _probes: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(PROBES), init=False)
    _working: set[str] = field(factory=set, init=False)  # URLs
    _lanes: dict[str, Pause] = field(factory=dict, init=False)  # of URLs that failed, or whose tasks all rest
    _tasks: dict[str, Pause] = field(factory=dict, init=False)  # of tasks whose event was not taken
    _trouble: dict[str, str] = field(factory=dict, init=False)
    _news: trio.Event = field(factory=trio.Event, init=False)
    _taken: int = field(default=0, init=False)
    _failed: int = field(default=0, init=False)
    _expired: int = field(default=0, init=False)
    _owed: int = field(default=0, init=False)

    def statistics(self) -> CallbackStatistics:
        """The counts now."""
        return CallbackStatistics(
            taken=self._taken,
            failed=self._failed,
            expired=self._expired,
            owed=self._owed,
            under_way=self._places.borrowed_tokens + self._probes.borrowed_tokens,
            urls=len(self._working),
            trouble=dict(self._trouble),
        )

    async def settled(self) -> None:
        """Return when all that is owed is owed to URLs that rest."""
        await self.journal.flushed()
        while await self.journal.owed_count():
            resting = [url for url, pause in self._lanes.items() if pause.resting]
            if not self._working and not await self.journal.owed_urls(1, resting):
                return
            await trio.sleep(LOOK_S)

    # ── who is at work ────────────────────────────────────────────────────────

    async def run(self, ready: trio.Event) -> None:
        """For ever."""
        ready.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            while True:
                try:
                    until = await self._begin(nursery)
                except PolarnodeError:
                    logger.exception("what is owed to callbacks could not be read")
                    until = trio.current_time() + UNREAD_S
                await trio.sleep(LOOK_S)
                with trio.move_on_at(until):
                    await self._news.wait()
                self._news = trio.Event()

    async def _watch(self) -> None:
        """Every event is news, and so is what an earlier life left."""
        seen = self.journal.last_seq
        while True:
            await self.journal.wait_after(seen)
            seen = self.journal.last_seq
            self._news.set()

    async def _begin(self, nursery: trio.Nursery) -> float:
        """Set to work whoever is owed something and does not rest; when the first of the others has rested enough."""
        self._owed = await self.journal.owed_count()
        await self._count_expired()
        resting = {url: pause.until for url, pause in self._lanes.items() if pause.resting}
        if self._owed and len(self._working) < URLS:
            for url in await self.journal.owed_urls(URLS, [*self._working, *resting]):
                if url not in self._working and url not in resting and len(self._working) < URLS:
                    self._working.add(url)
                    nursery.start_soon(self._lane, url)
        return min(resting.values(), default=float("inf"))

    async def _count_expired(self) -> None:
        expired = await self.journal.owed_expired()
        if expired > self._expired:
            logger.warning("%d events went with the journal's retention before their callbacks took them", expired - self._expired)
        self._expired = expired

    # ── one URL ───────────────────────────────────────────────────────────────

    async def _lane(self, url: str) -> None:
        try:
            while await self._round(url):
                await self.journal.flushed()  # what was taken is no longer owed when it is looked for again
        except PolarnodeError:
            logger.exception("what is owed to %s could not be read", shown(url))
            self._rest(url)
        finally:
            self._working.discard(url)
            self._news.set()

    async def _round(self, url: str) -> bool:
        """Tell the URL the oldest event of some of its tasks; whether there may be more for it now."""
        resting = {name: pause.until for name, pause in self._tasks.items() if pause.url == url and pause.resting}
        heads = await self.journal.owed(url, HEADS, resting)
        heads = tuple(head for head in heads if head.task_id not in resting)
        lane = self._lanes.get(url)
        if not heads:
            if resting:
                self._lanes.setdefault(url, Pause()).until = min(resting.values())
            return False
        failing = lane is not None and lane.failures > 0
        taken = await self._all_told(heads[:1] if failing else heads, self._probes if failing else self._places)
        if taken:
            self._lanes.pop(url, None)
            return True
        self._rest(url)
        return False

    def _rest(self, url: str) -> None:
        lane = self._lanes.get(url) or Pause()
        lane.longer()
        remember(self._lanes, url, lane, most=REMEMBERED)

    async def _all_told(self, heads: tuple[Owed, ...], places: trio.CapacityLimiter) -> int:
        """How many were taken. After the first failure none is begun until one was taken: a URL that is dead is asked a few times at most."""
        ours, ends = trio.CapacityLimiter(AT_ONE_URL), list[bool]()

        async def one(head: Owed) -> None:
            async with ours, places:
                if any(ends) or not ends:
                    ends.append(await self._told(head))

        async with trio.open_nursery() as nursery:
            for head in heads:
                nursery.start_soon(one, head)
        return sum(ends)

    async def _told(self, head: Owed) -> bool:
        """Whether an event is owed no more."""
        try:
            taken = await self.poster.told(head)
        except PolarnodeError as error:
            self._not_taken(head, error)
            return False
        self._taken += taken
        self._tasks.pop(head.task_id, None)
        self._trouble.pop(shown(head.url), None)
        self.journal.callback_taken(head.seq)
        return True

    def _not_taken(self, head: Owed, error: PolarnodeError) -> None:
        self._failed += 1
        pause = self._tasks.get(head.task_id) or Pause(url=head.url)
        pause.longer()
        remember(self._tasks, head.task_id, pause, most=REMEMBERED)
        remember(self._trouble, shown(head.url), str(error), most=TROUBLES)
        logger.info("the callback %s of task %s is tried again: %s", shown(head.url), head.task_id, error)


@asynccontextmanager
async def open_callbacks(journal: Journal, *, node: str) -> AsyncIterator[Callbacks]:
    """The callbacks of a node, told behind the block. What is still owed SETTLE_S after its end is told in the node's next life."""
    limits = httpx2.Limits(max_connections=AT_ONCE + PROBES, max_keepalive_connections=AT_ONCE)
    headers = {"accept-encoding": "identity", "user-agent": "polarnode"}
    # Neither proxies nor credentials of the node's environment: an event goes to the machine that its task names, and says nothing of this one.
    client = httpx2.AsyncClient(timeout=None, limits=limits, headers=headers, trust_env=False, follow_redirects=False)
    try:
        callbacks = Callbacks(journal=journal, poster=Poster(journal=journal, node=node, client=client))
        async with open_background(callbacks.run):
            yield callbacks
            with trio.move_on_after(SETTLE_S), suppress(PolarnodeError):  # a journal that can not be read is said elsewhere
                await callbacks.settled()
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S), suppress(httpx2.HTTPError, OSError, trio.BusyResourceError):
            await client.aclose()
