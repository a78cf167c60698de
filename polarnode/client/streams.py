"""Scripts of everything that is iterated (events, groups, lines, bytes), and when positions are acknowledged.

Groups are assembled from the stream. Trajectories are kept up to a number of bytes; others are dropped, and
fetched again when their group ends. Keeping them avoids reading everything twice, which would double the JSON
that the node writes, its largest cost. The limit exists because the number of groups in progress has none.

Invariant: an item is acknowledged only when the next one is requested, or when the caller says so, because
until then the caller works on it, and the position never passes a trajectory whose group is unfinished: a
reader that crashes is sent the whole group again. A lost acknowledgement loses no data, so its failure does
not end a stream; only those that the caller asked for, and the last one, are awaited.
"""

import logging
from collections.abc import Callable, Container, Iterable
from typing import Any

from attrs import define, evolve, field, frozen

from polarnode.client.requests import (
    ClientRequest,
    Close,
    Left,
    Open,
    Read,
    Script,
    SleepFor,
    YieldValue,
    acknowledge,
    adapters,
    ask,
    live_changes,
    task_status,
    trajectory,
    weights_status,
)
from polarnode.client.scripts import (
    Block,
    Decoder,
    Lines,
    RetryPatience,
    StreamEnd,
    StreamFollower,
    patiently,
    require_event_stream,
)
from polarnode.client.values import ClientError, Event, Unreachable, read_answer, read_object
from polarnode.core.codec.arrays import Arrays
from polarnode.core.codec.trajectories import Turns
from polarnode.core.cursors import Cursor
from polarnode.core.status import SessionChanges
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import Group, judged_again, read_group

# ── collecting ────────────────────────────────────────────────────────────

# as received: about a hundred sessions of 100 000 tokens each, one or several of today's largest groups
KEPT_BYTES = 1 << 30
# yielded groups to remember: a group is repeated only soon after a broken connection or a restart
REMEMBERED = 1 << 16


@frozen(kw_only=True)
class GatheredGroup:
    """A group that has ended: the trajectories that were kept, and the session ids that have to be fetched
    again.
    """

    group: Group
    kept: tuple[Trajectory, ...]
    missing: tuple[str, ...]

    def whole(self, fetched: Iterable[Trajectory]) -> Group:
        """Return the group with its trajectories, in the order of its members."""
        ours = {each.session_id: each for each in (*self.kept, *fetched)}
        return self.group.holding(
            ours[each.session_id] for each in self.group.members if each.session_id in ours
        )


@define(eq=False)
class _Open:
    """A task of which some sessions have arrived, but not its group. `first`: the number of the first event
    that it needs.
    """

    first: int
    kept: dict[str, Trajectory] = field(factory=dict)
    size: int = 0


@define(eq=False)
class Collector:
    """Assembles one reader's groups. `skip` are task ids whose groups it has already processed."""

    skip: Container[str] = ()
    kept_bytes: int = KEPT_BYTES
    # by task, in the order their first session came
    _open: dict[str, _Open] = field(factory=dict, init=False)
    _given: dict[str, None] = field(factory=dict, init=False)  # tasks, oldest first
    # given, and not acknowledged by their reader yet: where each begins
    _unacknowledged: dict[str, int] = field(factory=dict, init=False)
    _seen: Cursor = field(factory=Cursor, init=False)
    _size: int = field(default=0, init=False)

    @property
    def position(self) -> Cursor:
        """The last event up to which everything is done."""
        # copies: a reader's other thread may acknowledge while this one reads
        held = [*(each.first for each in tuple(self._open.values())), *tuple(self._unacknowledged.values())]
        return evolve(self._seen, position=min([self._seen.position, *(first - 1 for first in held)]))

    @property
    def oldest(self) -> str | None:
        """The task that holds the position back for longest; None if there is none."""
        return next(iter(self._open), None)

    def add(self, event: Event) -> GatheredGroup | None:
        """Add one event. Return the group that it ends, unless that group was yielded before."""
        if event.kind == "gap":
            self._pass_gap(event)
        self._seen = event.cursor
        match event.kind:
            case "trajectory":
                self._keep(event)
            case "group":
                return self._gather_group(event)
            case "unreadable":
                self._pass_unreadable(event)
        return None

    def done(self, task_id: str) -> None:
        """Record that the caller has finished a group."""
        self.forget(task_id)
        self._unacknowledged.pop(task_id, None)
        self._given[task_id] = None
        if len(self._given) > REMEMBERED:
            del self._given[next(iter(self._given))]

    def mark_given(self, task_id: str) -> None:
        """Record that the caller has a group, which holds the position until it is acknowledged."""
        held = self._open.get(task_id)
        self.done(task_id)
        if held is not None:  # else it was acknowledged while the caller had it
            self._unacknowledged[task_id] = held.first

    def forget(self, task_id: str) -> None:
        """Stop waiting for a task."""
        if (found := self._open.pop(task_id, None)) is not None:
            self._size -= found.size

    def _knows(self, task_id: str) -> bool:
        return task_id in self._given or task_id in self.skip

    def _keep(self, event: Event) -> None:
        trajectory = event.trajectory
        if trajectory is None or self._knows(trajectory.task_id):
            return
        whose = self._open_task(trajectory.task_id, event)
        if trajectory.session_id not in whose.kept and self._size + event.size <= self.kept_bytes:
            whose.kept[trajectory.session_id] = trajectory
            whose.size += event.size
            self._size += event.size

    def _gather_group(self, event: Event) -> GatheredGroup | None:
        group = read_group(event.data)
        if self._knows(group.task_id):
            self.forget(group.task_id)
            return None
        # the group holds the position until it is done
        whose = self._open_task(group.task_id, event)
        kept = tuple(whose.kept[each.session_id] for each in group.members if each.session_id in whose.kept)
        missing = tuple(each.session_id for each in group.members if each.session_id not in whose.kept)
        return GatheredGroup(group=group, kept=kept, missing=missing)

    def _open_task(self, task_id: str, event: Event) -> _Open:
        """A task that needs this event."""
        return self._open.setdefault(task_id, _Open(first=event.seq))

    def _pass_unreadable(self, event: Event) -> None:
        """Log what the node could not give. Without its `group` event a group is not given."""
        found = event.unreadable
        logger.warning("the node could not give event %s: %s", event.seq, found)
        if found is not None and found.kind == "group" and found.task_id is not None:
            self.forget(found.task_id)

    def _pass_gap(self, gap: Event) -> None:
        """Log that events are missing. Smaller numbers mean that the log goes on from there, or is another
        one: what was read beyond is not in it, or comes again.
        """
        logger.warning("the log lacks events: groups in progress may lack sessions (%s)", gap.data)
        if gap.seq < self._seen.position:
            for task_id in [each for each, task in self._open.items() if task.first > gap.seq]:
                self.forget(task_id)
            # their caller works on them still, and they hold the position until he has done so
            for task_id, first in tuple(self._unacknowledged.items()):
                self._unacknowledged[task_id] = min(first, gap.seq + 1)


# ── acks ────────────────────────────────────────────────────────────

# seconds between acknowledgements: each is one request and one commit; a lost one only repeats events
ACK_INTERVAL_S = 1.0
# for the acknowledgements of a reader that leaves early: longer would look like a loop that does not end
LEAVE_TIMEOUT_S = 5.0


@define(eq=False)
class Acknowledgements:
    """The acknowledgements of one stream; without a consumer there are none."""

    consumer: str | None
    patience_s: float
    now: Callable[[], float]
    every_s: float = ACK_INTERVAL_S
    _done: Cursor = field(factory=Cursor, init=False)
    _sent: Cursor = field(factory=Cursor, init=False)
    _sent_at: float = field(init=False)

    @_sent_at.default
    def _begins(self) -> float:
        return self.now()

    def move(self, cursor: Cursor) -> None:
        """Record that everything up to `cursor` is done. A smaller number than before is of another log, or
        of the same one after a gap.
        """
        if cursor.position < self._done.position:
            self._sent = Cursor()
        self._done = cursor

    @property
    def _news(self) -> bool:
        return self.consumer is not None and self._done.position > self._sent.position

    def report(self) -> Script[None]:
        """Acknowledge if the position has moved and `every_s` seconds have passed since the last time."""
        if self.consumer is None or not self._news or self.now() - self._sent_at < self.every_s:
            return
        self._sent_at = self.now()
        try:
            yield from ask(acknowledge(self.consumer, self._done))
            self._sent = self._done
        except Unreachable:
            return
        except ClientError as error:
            if not error.passes:
                raise

    def report_now(self) -> Script[None]:
        """Acknowledge at once, with retries. Raises ClientError and Unreachable when the patience ends."""
        if self.consumer is None or not self._news:
            return
        yield from patiently(acknowledge(self.consumer, self._done), RetryPatience(self.patience_s, self.now))
        self._sent = self._done

    def report_leaving(self) -> Script[None]:
        """Acknowledge what is not acknowledged yet, for a reader that leaves its loop. It has its own errors
        to raise, so that of an acknowledgement is only logged.
        """
        if self.consumer is None or not self._news:
            return
        request = evolve(acknowledge(self.consumer, self._done), silence_s=LEAVE_TIMEOUT_S)
        try:
            yield from patiently(request, RetryPatience(min(self.patience_s, LEAVE_TIMEOUT_S), self.now))
        except (ClientError, Unreachable) as error:
            logger.warning(
                "the last acknowledgement did not arrive, and what it covers comes again: %s", error
            )
        self._sent = self._done


# ── streams ────────────────────────────────────────────────────────────

logger = logging.getLogger(__name__)

# after so many seconds, check the task that holds the position: one without a record would hold it for ever
CHECK_AFTER_S = 60.0
ABSENT = (404, 410)  # of a trajectory: pruned, or in a row that is damaged


def events(follower: StreamFollower, acks: Acknowledgements) -> Script[None]:
    """Give every event."""
    try:
        follower.patience.renew()  # the time limit begins with the first read
        while not isinstance(event := (yield from follower.next()), StreamEnd):
            yield from acks.report()
            if isinstance(event, Event):
                yield YieldValue(event)
                follower.patience.renew()  # the time that the caller took does not count
                acks.move(event.cursor)
                yield from acks.report()
    except Left:
        yield from acks.report_leaving()
    else:
        yield from acks.report_now()


def live_sessions(*, follow: bool, patience: RetryPatience) -> Script[None]:
    """Give every change of live sessions. A new connection begins with all that are live; nodes that were
    known before are given as without sessions first.
    """
    patience.renew()  # the time limit begins with the first read
    nodes: dict[str, None] = {}
    while True:
        try:
            require_event_stream((yield Open(live_changes(follow=follow))))
            decoder = Decoder()
            while data := (yield Read()):
                for piece in decoder.feed(data):
                    patience.renew()
                    if isinstance(piece, Block):
                        changes = read_answer(piece.data, SessionChanges)
                        nodes[changes.node] = None
                        yield YieldValue(changes)
            if not follow:
                return
            raise Unreachable("the node keeps ending the stream")
        except (ClientError, Unreachable) as error:
            yield Close()
            pause = patience.pause(error)
        for node in nodes:
            yield YieldValue(SessionChanges(node=node, sessions=(), whole=True))
        nodes.clear()
        yield SleepFor(pause)


# ── groups ────────────────────────────────────────────────────────────────────


@define(eq=False)
class GroupStream:
    """Gives one reader's groups, assembled by `collector`.

    `on_request`: a group is finished when the next one is requested; else only when its `ack` is called,
    which runs a script by `run`.
    """

    follower: StreamFollower
    acks: Acknowledgements
    collector: Collector
    patience_s: float
    now: Callable[[], float]
    run: Callable[[Script[None]], Any]
    on_request: bool = True
    turns: Turns = "table"
    arrays: Arrays = "base64"
    _holder: str | None = None  # the task that held the position at the last check, and since when
    _held_since: float = 0.0

    def script(self) -> Script[None]:
        try:
            self.follower.patience.renew()  # the time limit begins with the first read
            while not isinstance(event := (yield from self.follower.next()), StreamEnd):
                gathered = self.collector.add(event) if isinstance(event, Event) else None
                if gathered is not None:
                    yield from self._give_group(gathered)
                yield from self._look()
                if self.on_request:
                    self.acks.move(self.collector.position)
                yield from self.acks.report()
        except Left:
            yield from self.acks.report_leaving()
        else:
            yield from self.acks.report_now()

    def acknowledge(self, task_id: str) -> Any:
        """Record that the caller has finished a group, and send it. What is not sent here, because an
        asynchronous caller does not wait for it, is sent by the stream.
        """
        self.collector.done(task_id)
        self.acks.move(self.collector.position)
        return self.run(self.acks.report_now())

    def _give_group(self, gathered: GatheredGroup) -> Script[None]:
        fetched = []
        for session_id in gathered.missing:
            found = yield from self._fetch(session_id)
            fetched += [] if found is None else [found]
        group = yield from self._judge_again(gathered.whole(fetched))
        task_id = group.task_id
        yield YieldValue(evolve(group, acknowledge=GroupAck(self, task_id) if self.acks.consumer else None))
        self.follower.patience.renew()  # the time that the caller took does not count
        if self.on_request or self.acks.consumer is None:
            self.collector.done(task_id)
        else:
            self.collector.mark_given(task_id)

    def _judge_again(self, group: Group) -> Script[Group]:
        """The group as its task judges it now: weights may have been updated since it ended. A node that
        cannot say what it serves leaves it as it was.
        """
        if group.requires is None or group.requires.max_staleness is None:
            return group
        try:
            weights = yield from patiently(weights_status(), RetryPatience(self.patience_s, self.now))
            histories = [weights.versions]
            sampled = {
                span.version
                for each in group.trajectories
                for trace in each.traces
                for span in trace.version_spans
            }
            if not sampled.issubset(weights.versions):  # by an adapter, whose versions are its own
                found = yield from patiently(adapters(), RetryPatience(self.patience_s, self.now))
                histories += [each.versions for each in found.adapters]
        except ClientError as error:
            logger.warning("the staleness of group %s is that of its end: %s", group.group_id, error)
            return group
        return judged_again(group, histories)

    def _fetch(self, session_id: str) -> Script[Trajectory | None]:
        """Fetch a trajectory that was not kept, or that came before this reader began; None when the node no
        longer has it, or cannot read it.
        """
        try:
            request = trajectory(session_id, turns=self.turns, arrays=self.arrays)
            return (yield from patiently(request, RetryPatience(self.patience_s, self.now)))
        except ClientError as error:
            if error.status not in ABSENT:
                raise
            logger.warning(
                "the node cannot give the trajectory of session %s, and its group comes without it: %s",
                session_id,
                error,
            )
            return None

    def _look(self) -> Script[None]:
        """Stop waiting for a task that the node has no record of (one of a journal of 0.1, for example): its
        group never ends.
        """
        if self.collector.oldest != self._holder:
            self._holder, self._held_since = self.collector.oldest, self.now()
        if self._holder is None or self.now() - self._held_since < CHECK_AFTER_S:
            return
        self._held_since = self.now()
        try:
            yield from ask(task_status(self._holder))
        except Unreachable:
            return
        except ClientError as error:
            if error.status == 404:
                self.collector.forget(self._holder)


@frozen
class GroupAck:
    """Acknowledges one group that a stream gave. A copy that is sent to another process has none, because the
    stream and its connection stay here.
    """

    groups: GroupStream
    task_id: str

    def __call__(self) -> Any:
        return self.groups.acknowledge(self.task_id)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return (type(None), ())


# ── bodies ────────────────────────────────────────────────────────────────────


def pieces(request: ClientRequest[bytes]) -> Script[None]:
    """Give a body in pieces as they arrive. The first is b"", once the node has accepted the request."""
    yield Open(request)
    yield YieldValue(b"")
    while data := (yield Read()):
        yield YieldValue(data)


def objects(request: ClientRequest[bytes]) -> Script[None]:
    """Give each line of a body as an object. Bytes after the last line end are not part of a complete
    body.
    """
    yield Open(request)
    whole = Lines()
    while data := (yield Read()):
        for line in whole.feed(data):
            yield YieldValue(read_object(line))
