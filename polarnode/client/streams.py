"""The scripts of everything that is iterated: events, groups, lines, bytes; and when positions are
acknowledged.

Groups are put together from the stream. Trajectories are kept as they come, up to a number of bytes; what
comes beyond that is let go, and fetched again when its group is over. Keeping comes first, because a second
read of everything would double what the node writes as JSON, its largest cost; letting go is needed because
interleaved groups are without a bound.

Invariant: an item is acknowledged when the next one is requested, because until then it is being worked on,
and the position never passes a trajectory whose group is not done: a reader that dies is sent the whole
group again. An acknowledgement that is lost loses nothing, so while a stream is read none ends it; only the
last is awaited.
"""

import logging
from collections.abc import Callable, Container, Iterable

from attrs import define, field, frozen

from polarnode.client.requests import (
    ClientRequest,
    Give,
    Open,
    Read,
    Script,
    acknowledge,
    ask,
    task_status,
    trajectory,
)
from polarnode.client.scripts import Follower, Lines, Over, Patience, patiently
from polarnode.client.values import ClientError, Event, Unreachable, read_object
from polarnode.core.codec.arrays import Arrays
from polarnode.core.codec.trajectories import Turns
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import Group, read_group

# ── collecting ────────────────────────────────────────────────────────────

# as they came: some hundred sessions of 100 000 tokens each, a group or several of the largest that are
# trained today
KEPT_BYTES = 1 << 30
# groups that were given: a repeat of one comes after a break of the connection or of the node, soon after it
REMEMBERED = 1 << 16


@frozen(kw_only=True)
class Gathered:
    """A group that is over, with what was kept of it, and the sessions that are to be fetched again."""

    group: Group
    kept: tuple[Trajectory, ...]
    missing: tuple[str, ...]

    def whole(self, fetched: Iterable[Trajectory]) -> Group:
        """The group with its trajectories, in the order of its members."""
        ours = {each.session_id: each for each in (*self.kept, *fetched)}
        return self.group.holding(
            ours[each.session_id] for each in self.group.members if each.session_id in ours
        )


@define(eq=False)
class _Open:
    """A task some of whose sessions have come."""

    first_seq: int
    kept: dict[str, Trajectory] = field(factory=dict)
    size: int = 0


@define(eq=False)
class Collector:
    """One reader's groups. `skip` are task ids whose groups it has had before."""

    skip: Container[str] = ()
    kept_bytes: int = KEPT_BYTES
    # by task, in the order their first session came
    _open: dict[str, _Open] = field(factory=dict, init=False)
    _given: dict[str, None] = field(factory=dict, init=False)  # tasks, oldest first
    _seen: int = field(default=0, init=False)
    _size: int = field(default=0, init=False)

    @property
    def position(self) -> int:
        """Everything up to here is done with."""
        return min((each.first_seq - 1 for each in self._open.values()), default=self._seen)

    @property
    def oldest(self) -> str | None:
        """The task that holds the position."""
        return min(self._open, key=lambda task_id: self._open[task_id].first_seq, default=None)

    def add(self, event: Event) -> Gathered | None:
        """One event; the group it ends, if it ends one that was not given before."""
        if event.kind == "gap":
            self._pass_gap(event)
        self._seen = event.seq
        match event.kind:
            case "trajectory":
                self._keep(event)
            case "group":
                return self._gather(event)
        return None

    def done(self, group: Group) -> None:
        """The group was worked on to its end."""
        self.forget(group.task_id)
        self._given[group.task_id] = None
        if len(self._given) > REMEMBERED:
            del self._given[next(iter(self._given))]

    def forget(self, task_id: str) -> None:
        """Wait for this task no longer."""
        if (found := self._open.pop(task_id, None)) is not None:
            self._size -= found.size

    def _knows(self, task_id: str) -> bool:
        return task_id in self._given or task_id in self.skip

    def _keep(self, event: Event) -> None:
        trajectory = event.trajectory
        if trajectory is None or self._knows(trajectory.task_id):
            return
        whose = self._open.setdefault(trajectory.task_id, _Open(first_seq=event.seq))
        if self._size + event.size <= self.kept_bytes:
            whose.kept[trajectory.session_id] = trajectory
            whose.size += event.size
            self._size += event.size

    def _gather(self, event: Event) -> Gathered | None:
        group = read_group(event.data)
        if self._knows(group.task_id):
            self.forget(group.task_id)
            return None
        # it holds the position until it is done
        whose = self._open.setdefault(group.task_id, _Open(first_seq=event.seq))
        kept = tuple(whose.kept[each.session_id] for each in group.members if each.session_id in whose.kept)
        missing = tuple(each.session_id for each in group.members if each.session_id not in whose.kept)
        return Gathered(group=group, kept=kept, missing=missing)

    def _pass_gap(self, gap: Event) -> None:
        """What lies between is gone. Where numbers began anew it is another journal, whose node knows nothing
        of what we wait for.
        """
        logger.warning(
            "the node no longer keeps all events: those of groups under way may lack sessions (%s)", gap.data
        )
        if gap.seq < self._seen:
            for task_id in tuple(self._open):
                self.forget(task_id)


# ── acks ────────────────────────────────────────────────────────────

# between acknowledgements: each is one request and one commit; what is lost of them is only read again
ACK_EVERY_S = 1.0


@define(eq=False)
class Acks:
    """Of one stream. Without a consumer nothing is acknowledged."""

    consumer: str | None
    patience_s: float
    now: Callable[[], float]
    every_s: float = ACK_EVERY_S
    _done: int = field(default=0, init=False)
    _said: int = field(default=0, init=False)
    _said_at: float = field(init=False)

    @_said_at.default
    def _begins(self) -> float:
        return self.now()

    def move(self, seq: int) -> None:
        """Everything up to `seq` is done with. A number smaller than before is of another journal, whose
        numbers began anew.
        """
        self._said = self._said if seq >= self._done else min(self._said, seq - 1)
        self._done = seq

    def report(self) -> Script[None]:
        """Acknowledge, if the position moved and the last time is long enough ago."""
        if self.consumer is None or self._done <= self._said or self.now() - self._said_at < self.every_s:
            return
        self._said_at = self.now()
        try:
            yield from ask(acknowledge(self.consumer, self._done))
            self._said = self._done
        except Unreachable:
            return
        except ClientError as error:
            if not error.passes:
                raise

    def report_last(self) -> Script[None]:
        """Acknowledge what was not acknowledged yet."""
        if self.consumer is not None and self._done > self._said:
            yield from patiently(acknowledge(self.consumer, self._done), Patience(self.patience_s, self.now))
            self._said = self._done


# ── streams ────────────────────────────────────────────────────────────

logger = logging.getLogger(__name__)

# a task that holds the position for so long is looked at once: one without a record is in no group, and would
# hold it for ever
LOOK_AFTER_S = 60.0


def events(follower: Follower, acks: Acks) -> Script[None]:
    """Every event."""
    follower.patience.renew()  # a stream begins when it is first read
    while not isinstance(event := (yield from follower.next()), Over):
        yield from acks.report()
        if isinstance(event, Event):
            yield Give(event)
            follower.patience.renew()  # however long that was worked on, it was no silence of the node
            acks.move(event.seq)
            yield from acks.report()
    yield from acks.report_last()


# ── groups ────────────────────────────────────────────────────────────────────


@define(eq=False)
class Groups:
    """One reader's groups, put together by `collector`."""

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
        while not isinstance(event := (yield from self.follower.next()), Over):
            gathered = self.collector.add(event) if isinstance(event, Event) else None
            if gathered is not None:
                yield from self._give(gathered)
            yield from self._look()
            self.acks.move(self.collector.position)
            yield from self.acks.report()
        yield from self.acks.report_last()

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
        """A trajectory that was not kept, or came before this reader did; None when it is nowhere any
        more.
        """
        try:
            asked = trajectory(session_id, turns=self.turns, arrays=self.arrays)
            return (yield from patiently(asked, Patience(self.patience_s, self.now)))
        except ClientError as error:
            if error.status != 404:
                raise
            logger.warning(
                "the node has no trajectory of session %s any more: its group is given without it", session_id
            )
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


def pieces(request: ClientRequest[bytes]) -> Script[None]:
    """A body as it comes; first b"", when it is known to be there."""
    yield Open(request)
    yield Give(b"")
    while data := (yield Read()):
        yield Give(data)


def objects(request: ClientRequest[bytes]) -> Script[None]:
    """A body's lines, each an object. What stands behind the last line's end is nothing of a whole body."""
    yield Open(request)
    whole = Lines()
    while data := (yield Read()):
        for line in whole.feed(data):
            yield Give(read_object(line))
