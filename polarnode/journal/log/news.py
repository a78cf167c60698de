"""A count of what was written to the log, and a wait for more."""

import trio
from attrs import define, field

from polarnode.journal.log.port import EventsPort


@define(eq=False)
class NewsCounter:
    """A count that rises with each write, which is a piece of news. A reader takes the count, looks at the
    log, and then waits for more than that count, so it misses nothing that came meanwhile.
    """

    count: int = 0
    _more: trio.Event = field(factory=trio.Event, init=False)

    def announce(self) -> None:
        """Announce that something was written."""
        self.count += 1
        more, self._more = self._more, trio.Event()
        more.set()

    async def wait(self, seen: int, seconds: float) -> None:
        """Return when the count is no longer `seen`, or after so many seconds."""
        with trio.move_on_after(seconds):
            while self.count == seen:
                await self._more.wait()
        await trio.lowlevel.checkpoint()


async def wait_events(log: EventsPort, seen: int, seconds: float) -> None:
    """Return when the log's count of event news is no longer `seen`, or after so many seconds."""
    with trio.move_on_after(seconds):
        while True:
            news = log.news
            if log.event_news != seen:
                break
            await log.wait_news(news, seconds)
    await trio.lowlevel.checkpoint()
