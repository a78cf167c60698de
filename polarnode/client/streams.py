"""The scripts of everything that is iterated: events, groups, lines, bytes.

The rule for whoever edits it: what is given is acknowledged when the next is asked for, and not before: until then it is being worked on.
"""

import logging
from collections.abc import Callable

from attrs import define

from polarnode.client.acks import Acks
from polarnode.client.collecting import Collector, Gathered
from polarnode.client.commands import Give, Open, Read, Request, Script, ask
from polarnode.client.errors import ClientError, Unreachable, read_object
from polarnode.client.events import Lines
from polarnode.client.following import Follower, Over
from polarnode.client.patience import Patience, patiently
from polarnode.client.requests import task_status, trajectory
from polarnode.client.values import Event
from polarnode.records import Trajectory
from polarnode.wire import Arrays, Turns

logger = logging.getLogger(__name__)

LOOK_AFTER_S = 60.0  # a task that holds the position for so long is looked at once: one without a record is in no group, and would hold it for ever


def events(follower: Follower, acks: Acks) -> Script[None]:
    """Every event."""
    follower.patience.renew()  # a stream begins when it is first read
    while not isinstance(heard := (yield from follower.next()), Over):
        yield from acks.tell()
        if isinstance(heard, Event):
            yield Give(heard)
            follower.patience.renew()  # however long that was worked on, it was no silence of the node
            acks.move(heard.seq)
            yield from acks.tell()
    yield from acks.tell_last()


# ── groups ────────────────────────────────────────────────────────────────────


@define(eq=False)
class Groups:
    """One reader's groups, put together as `collecting` says."""

    follower: Follower
    acks: Acks
    collector: Collector
    patience_s: float
    now: Callable[[], float]
    turns: Turns = "table"
    arrays: Arrays = "base64"
    _holder: str | None = None  # the task that held the position when it was last looked at, and since when
    _since: float = 0.0

    def script(self) -> Script[None]:
        self.follower.patience.renew()  # a stream begins when it is first read
        while not isinstance(heard := (yield from self.follower.next()), Over):
            gathered = self.collector.hear(heard) if isinstance(heard, Event) else None
            if gathered is not None:
                yield from self._give(gathered)
            yield from self._look()
            self.acks.move(self.collector.position)
            yield from self.acks.tell()
        yield from self.acks.tell_last()

    def _give(self, gathered: Gathered) -> Script[None]:
        fetched = []
        for session_id in gathered.missing:
            found = yield from self._fetch(session_id)
            fetched += [] if found is None else [found]
        group = gathered.whole(fetched)
        yield Give(group)
        self.follower.patience.renew()  # however long that was worked on, it was no silence of the node
        self.collector.done(group)

    def _fetch(self, session_id: str) -> Script[Trajectory | None]:
        """A trajectory that was not kept, or came before this reader did; None when it is nowhere any more."""
        try:
            asked = trajectory(session_id, turns=self.turns, arrays=self.arrays)
            return (yield from patiently(asked, Patience(self.patience_s, self.now)))
        except ClientError as error:
            if error.status != 404:
                raise
            logger.warning("the node has no trajectory of session %s any more: its group is given without it", session_id)
            return None

    def _look(self) -> Script[None]:
        """A task without a record (of a journal of 0.1, say) never ends: nothing waits for it."""
        if self.collector.oldest != self._holder:
            self._holder, self._since = self.collector.oldest, self.now()
        if self._holder is None or self.now() - self._since < LOOK_AFTER_S:
            return
        self._since = self.now()
        try:
            yield from ask(task_status(self._holder))
        except Unreachable:
            return
        except ClientError as error:
            if error.status == 404:
                self.collector.forget(self._holder)


# ── bodies ────────────────────────────────────────────────────────────────────


def pieces(request: Request[bytes]) -> Script[None]:
    """A body as it comes; first b"", when it is known to be there."""
    yield Open(request)
    yield Give(b"")
    while data := (yield Read()):
        yield Give(data)


def objects(request: Request[bytes]) -> Script[None]:
    """A body's lines, each an object. What stands behind the last line's end is nothing of a whole body."""
    yield Open(request)
    whole = Lines()
    while data := (yield Read()):
        for line in whole.feed(data):
            yield Give(read_object(line))
