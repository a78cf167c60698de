"""That something was written to the log: a count, and a wait for more."""

import trio
from attrs import define, field

from polarnode.journal.log.port import Events


@define(eq=False)
class News:
    """`count` rises with each piece of news. Who read it before a look misses nothing that came meanwhile."""

    count: int = 0
    _more: trio.Event = field(factory=trio.Event, init=False)

    def tell(self) -> None:
        """Something was written."""
        self.count += 1
        more, self._more = self._more, trio.Event()
        more.set()

    async def wait(self, seen: int, seconds: float) -> None:
        """Return when there is more than was seen, or after so many seconds."""
        with trio.move_on_after(seconds):
            while self.count == seen:
                await self._more.wait()
        await trio.lowlevel.checkpoint()


async def wait_events(log: Events, seen: int, seconds: float) -> None:
    """Return when there is more news of events than were seen, or after so many seconds."""
    with trio.move_on_after(seconds):
        while True:
            news = log.news
            if log.event_news != seen:
                break
            await log.wait_news(news, seconds)
    await trio.lowlevel.checkpoint()
