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
# what a reader gets that names no kinds: attempts are no training data, later rewards replace no first one
USUAL_KINDS: Final[tuple[EventKind, ...]] = ("trajectory", "group", "task")

# The table of thresholds of a node that is too full. Those named TASK_ decide whether a task is taken
# (`rollouts.admission`); the others are the journal's last resort, for what is under way then.
TASK_BACKLOG_BYTES: Final = 64 << 20  # in memory: four commits; more is a disk that does not keep up
BACKLOG_BYTES: Final = 512 << 20  # minutes of a full disk at 64 sessions
# free on the journal's disk: the sessions of a full node write some hundred MB yet
TASK_DISK_FREE_BYTES: Final = 512 << 20
DISK_FREE_BYTES: Final = 256 << 20  # half of it, for the sessions that run when no new task is taken
# Share of `Retention.everything` that is not acknowledged: beyond it trajectories would soon be forgotten.
TASK_UNACKNOWLEDGED: Final = 0.95


@frozen(kw_only=True)
class TaskRecord:
    """A task as it was submitted, and the sessions that hold its places in order of sample_index.
    `cancelled` is when it was cancelled, if ever, in seconds since the epoch.
    """

    task_id: str
    group_id: str
    spec: TaskSpec
    idempotency_key: str | None
    submitted: float
    sessions: tuple[SessionRecord, ...]
    cancelled: float | None = None
    damaged: str | None = None  # why `spec` cannot be read, and stands for another

    @property
    def finished(self) -> bool:
        return all(session.outcome is not None for session in self.sessions)


@frozen(kw_only=True)
class TrajectoryEncoder:
    """How a reader gets trajectories. `encode` None leaves them out.

    Encoders of equal `name` give equal bytes, which are cached for the next reader. `encode` runs in a
    reader's thread, off the event loop.
    """

    name: Hashable
    encode: Callable[[Trajectory], bytes] | None = None


KEYS_ALONE: Final = TrajectoryEncoder(name="keys alone")
PRUNED: Final = b"null"  # in place of a trajectory that was pruned while its event was read


def json_encoder(arrays: Arrays = "json", turns: Turns = "table") -> TrajectoryEncoder:
    """Encodes trajectories as the API's own JSON."""
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
        return self.before(journal) + self.body + b"}"

    def before(self, journal: str) -> bytes:
        """Its `json` up to the body."""
        key = dump_json(self.key)
        return b'{"seq":%d,"journal":"%b","key":%b,"%b":' % (
            self.seq,
            journal.encode(),
            key,
            self.kind.encode(),
        )


def unreadable_event(row: Sequence[Any], reason: str) -> StoredEvent:
    """The event in place of one that cannot be given, with what is known of it. `row` begins with its seq,
    kind, key, task_id, group_id and session_id.
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
    """Some events in order. `seen` is where the reader now is: the last event's seq, or further when filters
    passed over the rest.
    """

    events: tuple[StoredEvent, ...]
    seen: int
    first_seq: int  # the oldest kept, and
    last_seq: int  # the newest, when this was read

    def follows(self, after: int) -> bool:
        """Whether nothing is missing between `after` and this page; if not, the reader must get a `gap`."""
        return self.first_seq - 1 <= after <= self.last_seq


@frozen(kw_only=True)
class Filters:
    """Which events a reader gets. `outcome` and `min_reward` apply to trajectories and attempts alone, and
    let the other kinds pass.
    """

    task_id: str | None = None
    group_id: str | None = None
    outcome: str | None = None
    min_reward: float | None = None
    kinds: tuple[EventKind, ...] = USUAL_KINDS


@frozen(kw_only=True)
class UnfinishedSession:
    """A session of an earlier run of this node that never got a trajectory. `spec` is None for one without a
    task; `cancelled`: its task was, before the node ended; `began`: it was named, and did not only wait.
    """

    identity: Identity
    spec: TaskSpec | None
    turns: tuple[Turn, ...]
    cancelled: bool = False
    began: bool = True
    damaged: tuple[Damaged, ...] = ()


@frozen(kw_only=True)
class Retention:
    """How much is kept, in bytes of stored data and in seconds.

    Events that every consumer has acknowledged are pruned, oldest first and with their turns, above
    `acknowledged` bytes or once they had all acknowledged them `acknowledged_s` ago. A consumer that was not
    seen for `silence_s` is no longer waited for. Above `everything` bytes the oldest events are pruned
    whoever still needs them, and a late reader gets a `gap`.
    """

    # about a million turns of 1 000 tokens: a day of a busy node, to read again after a trainer's mistake
    acknowledged: int = 8 << 30
    # a trainer that is away for a weekend; beyond it the node's own disk is the greater worry
    everything: int = 64 << 30
    acknowledged_s: float = 72 * 3600.0  # a mistake that is seen on Monday is read again from Friday
    # a week: longer than any pause of a run that goes on, and disks are not held for runs that do not
    silence_s: float = 168 * 3600.0


@frozen(kw_only=True)
class ConsumerPosition:
    """How far a consumer has acknowledged; when that moved and when the consumer was last seen, in seconds
    since the epoch.
    """

    seq: int
    moved: float
    last_seen: float


@frozen(kw_only=True)
class AwaitedConsumers:
    """The consumers that the journal waits for: those seen after `since` (all of them where the node itself
    started later), and those `present`, which read now.
    """

    since: float
    present: Collection[str]

    def holds(self, name: str, position: ConsumerPosition) -> bool:
        """Whether events that the consumer has not acknowledged are kept for it."""
        return name in self.present or position.last_seen > self.since


@frozen(kw_only=True)
class Progress:
    """The journal's state after a commit of the writer."""

    entries: int = 0  # written since the journal was opened
    last_seq: int = 0
    first_seq: int = 1  # the oldest event kept
    stored_bytes: int = 0
    free_bytes: int = 0  # of the file, to be written again before it grows
    disk_free: int = 0
    consumers: Mapping[str, ConsumerPosition] = field(factory=dict)
    acknowledged_seq: int = 0  # by all consumers that are waited for
    oldest_unacknowledged: float | None = None  # when it came, in seconds since the epoch

    def about_bytes(self, events: int) -> int:
        """About how many bytes so many events take: their share of all that is stored, because the size of a
        single session is not recorded.
        """
        kept = self.last_seq - self.first_seq + 1
        return self.stored_bytes * min(events, kept) // kept if kept > 0 else 0

    def behind(self, seq: int) -> int:
        """Events kept after `seq`."""
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
    """A consumer's name, or Refused."""
    if not 0 < len(name) <= 128 or not name.isprintable():
        raise Refused("consumer must be a name of 1 to 128 printable characters", path="$.consumer")
    return name
