"""The values that the journal answers with: frozen, and without any SQL."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

from attrs import field, frozen

from polarnode.core.codec.arrays import Arrays
from polarnode.core.codec.json import dump_json, plain
from polarnode.core.codec.trajectories import Turns, trajectory_json
from polarnode.core.errors import Refused
from polarnode.core.status import SessionRecord, UnreadableEvent
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Damaged, Trajectory, Turn
from polarnode.journal.damage import Damage
from polarnode.merge.trajectory import Identity

EventKind = Literal["trajectory", "group", "task", "attempt", "reward"]
# The kinds that a reader gets by default. Attempts are not training data, and a later reward does not replace
# the first one.
DEFAULT_KINDS: Final[tuple[EventKind, ...]] = ("trajectory", "group", "task")

# The thresholds of a node that is too full. Those named TASK_ decide whether a task is accepted
# (`rollouts.admission`). The others are the journal's last resort, for the sessions that run then.
TASK_BACKLOG_BYTES: Final = 64 << 20  # in memory: four commits; with more the disk does not keep up
BACKLOG_BYTES: Final = 512 << 20  # minutes of a full disk at 64 sessions
# free on the journal's disk: the sessions of a full node still write some hundred MB
TASK_DISK_FREE_BYTES: Final = 512 << 20
DISK_FREE_BYTES: Final = 256 << 20  # half of it, for the sessions that run when no new task is taken
# The share of `RetentionLimits.everything` that may be unacknowledged: beyond it trajectories would soon be
# pruned.
TASK_UNACKNOWLEDGED_SHARE: Final = 0.95


@frozen(kw_only=True)
class TaskRecord:
    """A task as it was submitted, and the sessions that hold its places, in order of sample_index.
    `cancelled` is when the task was cancelled, if ever, in seconds since the epoch.
    """

    task_id: str
    group_id: str
    spec: TaskSpec
    idempotency_key: str | None
    submitted: float
    sessions: tuple[SessionRecord, ...]
    cancelled: float | None = None
    damaged: str | None = None  # why `spec` cannot be read and is only a stand-in

    @property
    def finished(self) -> bool:
        return all(session.outcome is not None for session in self.sessions)


@frozen(kw_only=True)
class TrajectoryEncoder:
    """How trajectories are encoded for a reader. Where `encode` is None they are left out.

    Encoders of equal `name` give equal bytes, which are cached for the next reader. `encode` runs in a
    reader's thread, off the event loop.
    """

    name: Hashable
    encode: Callable[[Trajectory], bytes] | None = None


KEYS_ONLY: Final = TrajectoryEncoder(name="keys alone")
PRUNED_BODY: Final = b"null"  # the body in place of a trajectory that was pruned while its event was read


def json_encoder(arrays: Arrays = "json", turns: Turns = "table") -> TrajectoryEncoder:
    """An encoder that writes trajectories as the API's own JSON."""
    return TrajectoryEncoder(
        name=("json", arrays, turns),
        encode=lambda whole: dump_json(trajectory_json(whole, arrays=arrays, turns=turns)),
    )


@frozen(kw_only=True)
class StoredEvent:
    """One event. `key` is the same however often it is delivered.

    `body` is the group, task or reward as JSON, or the trajectory (for `attempt` that of a replaced session)
    as the reader's encoder writes it; for `unreadable` an `UnreadableEvent` as JSON.
    """

    seq: int
    kind: EventKind | Literal["unreadable"]
    key: str
    body: bytes

    def json(self, journal: str) -> bytes:
        """What a stream of the journal sends: `{"seq", "journal", "key", kind: body}`."""
        return self.json_prefix(journal) + self.body + b"}"

    def json_prefix(self, journal: str) -> bytes:
        """Its `json` up to the body."""
        key = dump_json(self.key)
        return b'{"seq":%d,"journal":"%b","key":%b,"%b":' % (
            self.seq,
            journal.encode(),
            key,
            self.kind.encode(),
        )


def unreadable_event(row: Sequence[Any], reason: str) -> StoredEvent:
    """The event that takes the place of an unreadable one, with what is known of that. `row` begins with its
    seq, kind, key, task_id, group_id and session_id.
    """
    seq, *texts = row[:6]
    kind, key, task_id, group_id, session_id = (part if isinstance(part, str) else None for part in texts)
    known = kind if kind in get_args(EventKind) else None
    body = UnreadableEvent(
        kind=known, session_id=session_id, task_id=task_id, group_id=group_id, reason=reason
    )
    return StoredEvent(seq=seq, kind="unreadable", key=key or f"event:{seq}", body=dump_json(plain(body)))


@frozen(kw_only=True)
class EventPage:
    """Some events in order. `seen` is where the reader is now: the seq of the last event, or further where
    filters left out the rest.
    """

    events: tuple[StoredEvent, ...]
    seen: int
    first_seq: int  # the oldest event that was kept when this was read
    last_seq: int  # the newest event then

    def follows(self, after: int) -> bool:
        """Whether nothing is missing between `after` and this page. If not, the reader must get a `gap`."""
        return self.first_seq - 1 <= after <= self.last_seq


@frozen(kw_only=True)
class EventFilters:
    """Which events a reader gets. `outcome` and `min_reward` apply to trajectories and attempts alone; the
    other kinds pass.
    """

    task_id: str | None = None
    group_id: str | None = None
    outcome: str | None = None
    min_reward: float | None = None
    kinds: tuple[EventKind, ...] = DEFAULT_KINDS


@frozen(kw_only=True)
class UnfinishedSession:
    """A session of an earlier run of this node that never got a trajectory. `spec` is None for a session
    without a task. `cancelled` says that its task was cancelled before the node ended, and `began` that the
    session had begun and did not only wait.
    """

    identity: Identity
    spec: TaskSpec | None
    turns: tuple[Turn, ...]
    cancelled: bool = False
    began: bool = True
    damaged: tuple[Damaged, ...] = ()


@frozen(kw_only=True)
class RetentionLimits:
    """How much is kept, in bytes of stored data and in seconds.

    Events that every consumer has acknowledged are pruned, oldest first and with their turns, above
    `acknowledged` bytes, or when all consumers had acknowledged them `acknowledged_s` ago. The journal no
    longer waits for a consumer that was not seen for `silence_s`. Above `everything` bytes the oldest events
    are pruned even if somebody still needs them, and a late reader gets a `gap`.
    """

    # About a million turns of 1 000 tokens: a day of a busy node, which a trainer reads again after a
    # mistake.
    acknowledged: int = 8 << 30
    # A trainer may be away for a weekend. Beyond this the node's own disk is the greater worry.
    everything: int = 64 << 30
    acknowledged_s: float = 72 * 3600.0  # a mistake that is seen on Monday is read again from Friday
    # A week is longer than any pause of a run that goes on, and no disk is kept full for a run that has
    # ended.
    silence_s: float = 168 * 3600.0


@frozen(kw_only=True)
class ConsumerPosition:
    """How far a consumer has acknowledged events, when that position moved, and when the consumer was last
    seen. The times are in seconds since the epoch.
    """

    seq: int
    moved: float
    last_seen: float


@frozen(kw_only=True)
class AwaitedConsumers:
    """The consumers that the journal waits for: those that were seen after `since` (all of them where the
    node itself started later), and those in `present`, which have a stream open now.
    """

    since: float
    connected: Collection[str]

    def awaits(self, name: str, position: ConsumerPosition) -> bool:
        """Whether the journal keeps the events that this consumer has not acknowledged."""
        return name in self.connected or position.last_seen > self.since


@frozen(kw_only=True)
class JournalProgress:
    """The journal's state after a commit of the writer."""

    entries: int = 0  # those written since the journal was opened
    last_seq: int = 0
    first_seq: int = 1  # the oldest event kept
    stored_bytes: int = 0
    free_bytes: int = 0  # free pages of the file, which are reused before it grows
    disk_free: int = 0
    consumers: Mapping[str, ConsumerPosition] = field(factory=dict)
    acknowledged_seq: int = 0  # the last event that all consumers which are waited for have acknowledged
    oldest_unacknowledged: float | None = None  # when the event after it came, in seconds since the epoch

    def estimate_bytes(self, events: int) -> int:
        """Estimate how many bytes so many events take, as their share of all that is stored, because the size
        of a single session is not recorded.
        """
        kept = self.last_seq - self.first_seq + 1
        return self.stored_bytes * min(events, kept) // kept if kept > 0 else 0

    def events_after(self, seq: int) -> int:
        """The number of events that are kept after `seq`."""
        return self.last_seq - max(seq, self.first_seq - 1)


@frozen(kw_only=True)
class JournalStatistics:
    """The journal now. `warning` is a sentence while something is wrong; with `refuses_tasks` no new task
    should be taken.

    `unacknowledged_…` is what some consumer that is waited for has not acknowledged (all, where there is
    none), in events and about as many bytes of `most_bytes`, beyond which the oldest are pruned all the same.
    The oldest of it came `oldest_unacknowledged_s` seconds ago. `damaged_rows` were met since the journal was
    opened; `damaged` names the first of them. `damage` says that the file itself is damaged or that entries
    (`dropped`) could not be written: from then on nothing new is taken.
    """

    first_seq: int
    last_seq: int
    positions: Mapping[str, int]
    stored_bytes: int
    most_bytes: int
    free_bytes: int
    disk_free: int
    acknowledged_seq: int
    unacknowledged_events: int
    unacknowledged_bytes: int
    oldest_unacknowledged_s: float | None
    entries: int
    backlog_entries: int
    backlog_bytes: int
    most_backlog_bytes: int
    dropped: int
    damage: str | None
    damaged_rows: int
    damaged: tuple[Damage, ...]
    warning: str | None
    refuses_tasks: bool


def check_consumer(name: str) -> str:
    """Return a consumer's name if it is valid. Raises Refused otherwise."""
    if not 0 < len(name) <= 128 or not name.isprintable():
        raise Refused("consumer must be a name of 1 to 128 printable characters", path="$.consumer")
    return name
