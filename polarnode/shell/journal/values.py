"""What the journal answers: frozen values. The rule for whoever edits it: nothing here knows SQL."""

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

from polarnode.merge.trajectory import Identity
from polarnode.records import Outcome, Turn
from polarnode.tasks import TaskSpec
from polarnode.wire import dump_json

EventKind = Literal["trajectory", "group", "task"]


@frozen(kw_only=True)
class SessionRecord:
    """A session at a glance. `outcome` is None until its trajectory is published; times are seconds since the epoch."""

    session_id: str
    task_id: str
    sample_index: int
    outcome: Outcome | None
    reward: float | None
    turns: int
    sampled_tokens: int
    finished: float | None


@frozen(kw_only=True)
class TaskRecord:
    """A task, as it was submitted, and its sessions in order of sample_index."""

    task_id: str
    group_id: str
    spec: TaskSpec
    idempotency_key: str | None
    submitted: float
    sessions: tuple[SessionRecord, ...]

    @property
    def finished(self) -> bool:
        return all(session.outcome is not None for session in self.sessions)


@frozen(kw_only=True)
class StoredEvent:
    """One event: `key` is the same however often it is delivered; `body` is the trajectory, group or task as JSON."""

    seq: int
    kind: EventKind
    key: str
    body: bytes

    @property
    def json(self) -> bytes:
        """What a stream sends: `{"seq", "key", kind: body}`."""
        return b'{"seq":%d,"key":%b,"%b":%b}' % (self.seq, dump_json(self.key), self.kind.encode(), self.body)


@frozen(kw_only=True)
class EventPage:
    """Some events in order. `seen` is how far the reader now is: the last event's seq, or further when filters passed over the rest."""

    events: tuple[StoredEvent, ...]
    seen: int
    first_seq: int  # the oldest kept, and
    last_seq: int  # the newest, when this was read

    def follows(self, after: int) -> bool:
        """Whether `after` is a place in this journal from which nothing is missing; if not, the reader must hear of a gap."""
        return self.first_seq - 1 <= after <= self.last_seq


@frozen(kw_only=True)
class Filters:
    """Which events a reader wants; `outcome` and `min_reward` only speak of trajectories, and let groups and tasks pass."""

    task_id: str | None = None
    group_id: str | None = None
    outcome: str | None = None
    min_reward: float | None = None
    kinds: tuple[EventKind, ...] = ("trajectory", "group", "task")


@frozen(kw_only=True)
class UnfinishedSession:
    """A session of an earlier life of this node that never got a trajectory; `spec` is None when no task was journaled (a capture)."""

    identity: Identity
    spec: TaskSpec | None
    turns: tuple[Turn, ...]


@frozen(kw_only=True)
class Retention:
    """How much is kept, in bytes of stored data.

    Over `acknowledged` the oldest events that every consumer has acknowledged go, with their turns. Over `everything` the oldest go
    whoever still wants them, and a reader that comes late is told so by a `gap`.
    """

    acknowledged: int = 8 << 30  # about a million turns of 1 000 tokens: a day of a busy node, to read again after a trainer's mistake
    everything: int = 64 << 30  # a trainer that is away for a weekend; beyond it the node's own disk is the greater worry


@frozen(kw_only=True)
class Progress:
    """What the writer knows after a commit."""

    entries: int = 0  # written since the journal was opened
    last_seq: int = 0
    first_seq: int = 1  # the oldest event kept
    stored_bytes: int = 0
    disk_free: int = 0
    positions: Mapping[str, int] = field(factory=dict)


@frozen(kw_only=True)
class JournalStatistics:
    """The journal now. `warning` is a sentence while something is wrong, `refuses_tasks` says that no new task should be taken."""

    first_seq: int
    last_seq: int
    positions: Mapping[str, int]
    stored_bytes: int
    disk_free: int
    entries: int
    backlog_entries: int
    backlog_bytes: int
    dropped: int
    warning: str | None
    refuses_tasks: bool
