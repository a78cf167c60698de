"""The port of the log, and the values that it takes and gives.

The log holds tasks and their places, events with positions, consumers, weights by version, pending
callbacks and nodes. A node alone keeps it in SQLite (`sqlite.py`), a fleet in PostgreSQL (`postgres/`), and
the same scheduler claims places from either. Turns of live sessions are not in the log: they stay on the disk
of the node that runs them.

A **place** is one of the samples of a task. An **incarnation** is one start of a node's process. A **claim**
says that an incarnation holds a place with one session. A claim ends by `finish` or by `put_back`, or is
taken away when its incarnation is silent. Every call that writes may be made again after its answer was lost.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol

from attrs import evolve, field, frozen

from polarnode.core.codec.packing import pack_trajectory, pack_turn
from polarnode.core.conversation import Json
from polarnode.core.cursors import Cursor
from polarnode.core.errors import Busy
from polarnode.core.status import Consumer, EvaluationStatus, RewardEvent, SessionRecord
from polarnode.core.task import EvaluationSpec, ForkSpec, TaskSpec
from polarnode.core.trajectory import ForkedFrom, Outcome, Trajectory, Turn
from polarnode.core.weights import PauseMode
from polarnode.groups.group import SessionFacts
from polarnode.journal.forks import EarlierAttempt, ForkParent
from polarnode.journal.pending_callbacks import EVENT_KINDS, CallbackCounts
from polarnode.journal.values import EventFilters, EventPage, RetentionLimits, TaskRecord, TrajectoryEncoder
from polarnode.merge.trajectory import Identity

# A refused caller is told to wait this long. A failover by a site's high availability takes 5 to 30 seconds.
LOG_RETRY_S: Final = 5.0


class LogUnavailable(Busy):
    """The log cannot be reached now. It is not known whether a call that was under way took effect, so the
    caller makes the same call again.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message, retry_after=LOG_RETRY_S)
        self.reason = reason or message


# ── places ────────────────────────────────────────────────────────────────────

# Why a claim is to be ended at once and not run: the trainer cancelled its task, its group has enough
# sessions, or the place was lost once more than the task's retries allow.
EndingCause = Literal["cancelled", "early stop", "retries spent"]


@frozen(kw_only=True)
class Claim:
    """A place of a task that an incarnation holds. `attempt` numbers the sessions of the place from 0.
    `retries` is how many of them were lost and count against the task's retries. `ending` says why the place
    is not to be run, and is None for one that is.
    """

    task_id: str
    sample_index: int
    session_id: str
    attempt: int
    incarnation: int
    retries: int
    spec: TaskSpec
    submitted: float
    idempotency_key: str | None = None
    ending: EndingCause | None = None


@frozen(kw_only=True)
class ClaimOffer:
    """What a node has room for. It never takes the places in `avoided`, which are given by task and number.
    `serving` maps each adapter ("" is the base) to the version that the node serves: it claims no place that
    needs a version other than this. With `begun_only` it takes only places of tasks that it already runs.
    """

    incarnation: int
    room: int
    begun_only: bool = False
    labels: Mapping[str, str] = field(factory=dict)
    images: tuple[str, ...] = ()
    serving: Mapping[str, str] = field(factory=dict)
    avoided: frozenset[tuple[str, int]] = frozenset()


# Who filled a place: this call ("now", or "last" where its task is over with it), this session in an earlier
# call ("already"), or another session ("another"). "unknown" means that the log does not have the task,
# because retention deleted it or an older state of the log was restored.
FinishAnswer = Literal["now", "last", "already", "another", "unknown"]
FILLED_ANSWERS: Final = ("now", "last", "already")


@frozen(kw_only=True)
class EndedSession:
    """A session that is over, packed: part 0 is its trajectory, and the parts after it are its turns. Part 0
    is enough for `SqliteLog`, which has the turns of sessions that ran here already.
    """

    identity: Identity
    outcome: Outcome
    reward: float | None
    trainable: int
    staleness: int | None
    turns: int
    sampled: int
    finished: float  # seconds since the epoch
    parts: tuple[bytes, ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    @property
    def facts(self) -> SessionFacts:
        """The facts by which its group is judged."""
        return SessionFacts(
            session_id=self.identity.session_id,
            sample_index=self.identity.sample_index,
            outcome=self.outcome,
            reward=self.reward,
            trainable_tokens=self.trainable,
            staleness=self.staleness,
        )


def pack_ended(trajectory: Trajectory, *, finished: float) -> EndedSession:
    """Pack a trajectory without its turns, which are in the journal of the node that ran it. A value that
    cannot be packed fails here, at its source.
    """
    return EndedSession(
        identity=Identity(
            session_id=trajectory.session_id,
            task_id=trajectory.task_id,
            group_id=trajectory.group_id,
            sample_index=trajectory.sample_index,
            harness=trajectory.harness,
            harness_version=trajectory.harness_version,
            model=trajectory.model,
            node=trajectory.node,
            attempt=trajectory.attempt,
            forked_from=trajectory.forked_from,
            continued_from=trajectory.continued_from,
        ),
        outcome=trajectory.outcome,
        reward=trajectory.reward,
        trainable=trajectory.trainable_tokens,
        staleness=trajectory.staleness,
        turns=len(trajectory.turns),
        sampled=trajectory.sampled_tokens,
        finished=finished,
        parts=(pack_trajectory(trajectory),),
    )


def pack_whole_session(trajectory: Trajectory, *, finished: float) -> EndedSession:
    """Pack a trajectory with its turns."""
    found = pack_ended(trajectory, finished=finished)
    return evolve(found, parts=(*found.parts, *map(pack_turn, trajectory.turns)))


# ── events ────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class LogGap:
    """What a reader misses, or has read of another log. The reader goes on after `position` of `log`."""

    asked: Cursor
    log: str
    position: int
    reason: str


@frozen(kw_only=True)
class LogPage:
    """Some events of the log, in order. The next page begins at `Cursor(position=page.seen, log=log)`."""

    log: str
    page: EventPage
    gap: LogGap | None = None


@frozen(kw_only=True)
class LogStatus:
    """The state of the log at most five seconds ago, with its bytes at most a minute ago. It is kept in
    memory, for callers that must not wait for the log.

    `log` is "" before it was first read. `acknowledged` is the position up to which all consumers that are
    waited for have read. `oldest_unacknowledged` is when the event after it came, in seconds since the epoch.
    """

    log: str = ""
    position: int = 0
    pruned: int = 0
    acknowledged: int = 0
    consumers: Mapping[str, int] = field(factory=dict)  # the position of each
    unacknowledged_bytes: int = 0
    oldest_unacknowledged: float | None = None


# ── nodes ─────────────────────────────────────────────────────────────────────

NodeState = Literal["alive", "lost", "left", "replaced"]


@frozen(kw_only=True)
class NodeFacts:
    """What a node says of itself when it joins. `certificate` is the SHA-256 of a self-signed one."""

    name: str
    url: str = ""
    certificate: str = ""
    version: str = ""
    labels: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class NodeRow:
    """An incarnation as the log has it. `sign` is raised each second while it lives."""

    incarnation: int
    facts: NodeFacts
    state: NodeState
    sign: int
    running: int = 0  # the number of places that it holds
    serving: Mapping[str, str] = field(factory=dict)
    report: Mapping[str, Json] = field(factory=dict)


@frozen(kw_only=True)
class JoinedNode:
    """An incarnation that begins. `inherited` are the claims of earlier incarnations of its name, which are
    its own now: it publishes their sessions as far as they got, or puts the places back.
    """

    incarnation: int
    inherited: tuple[Claim, ...] = ()


# ── weights and callbacks ─────────────────────────────────────────────────────


TransferKind = Literal["update", "group"]  # an update is named by its id, a group by its name


@frozen(kw_only=True)
class LogWeights:
    """A version of the weights; `adapter` is "" for the base. It may become the current version when enough
    nodes hold its files (`holders`), or when they are `shared`: in a storage that outlives the nodes.
    `counted` says that it is the current version or was.
    """

    version: str
    adapter: str
    at: float
    body: Json
    shared: bool = False
    current: bool = False
    counted: bool = False
    holders: tuple[int, ...] = ()  # those incarnations that are alive


@frozen(kw_only=True)
class LeasedCallback:
    """An event that its receiver has not accepted yet. The node that leased it sends it. `lease` counts how
    often the event was leased, so that an older lease is recognised.
    """

    position: int
    key: str
    task_id: str
    url: str
    lease: int


NO_URL_LIMITS: Final[Mapping[str, int]] = {}


# ── the port ──────────────────────────────────────────────────────────────────


class PlacesPort(Protocol):
    """Tasks and who runs them."""

    @property
    def open_places(self) -> int:
        """The number of places that are not over, as of some seconds ago."""

    @property
    def place_news(self) -> int:
        """A count of the news that concern queued places and sessions to stop. It is apart from `news`, so
        that a node which waits for places does not ask the log about every event.
        """

    async def submit(
        self,
        spec: TaskSpec,
        *,
        task_id: str,
        session_ids: tuple[str, ...],
        idempotency_key: str | None = None,
        callback_kinds: tuple[str, ...] = EVENT_KINDS,
        submitted: float,
        model: str = "",
    ) -> TaskRecord:
        """Accept a task, all of it or nothing. Where its key is known the task with that key is returned.
        Raises Conflict where another task has its id. `model` is the label that its places require besides
        those of the task, whose spec stays as it was sent; a node alone has one model.
        """

    async def claim(self, offer: ClaimOffer) -> tuple[Claim, ...]:
        """Take up to `room` queued places, which nobody else gets then. They are ordered by priority, then
        whether their task runs here, then whether its image is here, then age.
        """

    async def claim_endings(self, incarnation: int, limit: int) -> tuple[Claim, ...]:
        """Take queued places that nobody should run, whatever they require. The caller finishes each at
        once.
        """

    async def take_place(self, task_id: str, sample_index: int, incarnation: int) -> Claim | None:
        """Take one queued place by its task and number, as a capture does: `claim` leaves out tasks whose
        harness is the caller's own. None where the place is not queued.
        """

    async def claims(self, incarnation: int) -> tuple[Claim, ...]:
        """All claims of an incarnation. A node asks for them after the answer to a claim was lost."""

    async def record_session(self, identity: Identity) -> None:
        """Record the identity of a session that runs."""

    async def finish_claim(self, claim: Claim, ended: EndedSession) -> FinishAnswer:
        """Fill a place and write its event. The last place of a task also writes the group's and the
        task's.
        """

    async def put_back(
        self, claim: Claim, ended: EndedSession | None = None, *, counts: bool = True, keep: bool = False
    ) -> Claim | None:
        """Give a place back for another attempt. `ended`, if given, is published as an `attempt`. With
        `counts` this takes one of the task's retries. With `keep` this node claims the next attempt at once
        and gets that claim, unless the place must be ended.
        """

    async def publish_session(self, ended: EndedSession, incarnation: int) -> FinishAnswer:
        """Publish a session without a place: a capture, or an attempt whose place another session has."""

    async def cancel(self, task_id: str, at: float) -> bool:
        """Cancel a task for good. Returns False for an unknown or finished task."""

    async def sessions_to_stop(self, incarnation: int) -> Mapping[str, EndingCause]:
        """Map each session that this incarnation runs and must end now to the cause."""


class MembershipPort(Protocol):
    """Nodes and their signs of life. The server's clock does not judge silence; nodes do (`watching.py`)."""

    @property
    def lost(self) -> bool:
        """Whether the incarnation that joined last was declared lost, or replaced by another of its name."""

    @property
    def least_load(self) -> float | None:
        """The lowest load that another node of the same model gave with its last sign. None where no such
        node begins sessions.
        """

    def set_load(self, load: float | None) -> None:
        """Say with the next sign how full this node is, from 0 to 1. None means that it begins no sessions
        now.
        """

    async def join(self, facts: NodeFacts) -> JoinedNode:
        """Begin an incarnation. Earlier ones of its name are replaced and hold nothing any more."""

    async def renew_certificate(self, incarnation: int, certificate: str) -> None:
        """Say that a node shows another certificate from now on. Its incarnation stays the same."""

    async def give_sign(self, incarnation: int, report: Mapping[str, Json] | None = None) -> bool:
        """Give a sign of life. Returns False where the incarnation was declared lost or replaced."""

    async def read_signs(self) -> Mapping[int, int]:
        """The sign of each incarnation that counts as alive."""

    async def declare_lost(self, incarnation: int, sign: int) -> bool:
        """Declare an incarnation lost, if `sign` is still its last one."""

    async def put_back_lost(self) -> int:
        """Queue the places of incarnations that are not alive. Each counts as a retry. Returns their
        number.
        """

    async def leave(self, incarnation: int) -> None:
        """End an incarnation in order. The places that it still holds are queued for others."""

    async def nodes(self, *, every: bool = False) -> tuple[NodeRow, ...]:
        """The nodes that are alive, or with `every` all rows that are kept."""


class EventsPort(Protocol):
    """Events by position, and the consumers that read them."""

    async def log_name(self) -> str:
        """The name of the log now. Another name means another log, or another history of this one."""

    async def mark_restored(self) -> str:
        """Say that the log was restored to an earlier state, which no timeline shows. Returns its new
        name.
        """

    async def events(
        self,
        after: Cursor,
        *,
        filters: EventFilters | None = None,
        encoder: TrajectoryEncoder | None = None,
        limit: int = 64,
    ) -> LogPage:
        """The events after a cursor, bounded in number and bytes."""

    @property
    def log_status(self) -> LogStatus:
        """The state of the log as it is known here. The log is not asked."""

    async def last_cursor(self) -> Cursor:
        """The cursor of the last event."""

    async def consumer_cursor(self, consumer: str) -> Cursor:
        """The cursor of the last event that a consumer acknowledged."""

    async def ensure_consumer(self, consumer: str, begin: Cursor, *, now: float) -> Cursor:
        """A consumer's position. A new consumer is created at `begin`, so that nothing it has not read is
        pruned as acknowledged by all. Raises Refused where there are too many.
        """

    async def acknowledge(self, consumer: str, cursor: Cursor, *, now: float) -> Cursor:
        """Move a consumer's position forward, never back and never beyond the last event. Raises Refused
        where there are too many consumers.
        """

    def track_stream(self, consumer: str, change: int) -> None:
        """Count a stream of a consumer that is opened here (`change` 1) or closed (-1). The log knows this
        within a second, and forgets the streams of a node that is gone.
        """

    async def forget_consumer(self, consumer: str) -> bool:
        """Delete a consumer. Returns False where there is none of this name."""

    async def consumers(self) -> tuple[Consumer, ...]:
        """Describe every consumer, and how far it is behind."""

    async def prune(self, retention: RetentionLimits, *, now: float, limit: int = 256) -> int:
        """Delete some of the oldest events that may go, and bodies that nobody finished. Returns the number
        of events.
        """

    @property
    def news(self) -> int:
        """A count of what any node wrote to the log. A caller reads it before it looks at the log, and passes
        it to `wait_news` afterwards.
        """

    async def wait_news(self, seen: int, seconds: float) -> None:
        """Return when any node has written something since the count was `seen`, or after so many seconds."""

    @property
    def event_news(self) -> int:
        """A count of the news that concern events. It is apart from `news`, so that a reader of events does
        not ask the log whenever a place is queued.
        """


class WeightsPort(Protocol):
    """Versions of the weights and of adapters. Nodes of several models may share a log, and each model has
    its own versions: `model` is the label `model` of the nodes that serve a version.
    """

    async def add_weights(
        self, version: str, body: Json, *, model: str = "", shared: bool = False, at: float
    ) -> None:
        """Record a version of the adapter that its body names, or of the base. Only the first row of a
        version is kept.
        """

    async def add_weight_holder(self, version: str, incarnation: int, *, model: str = "") -> None:
        """Say that a node has the files of a version."""

    async def make_current(self, version: str, *, model: str = "", holders: int = 2) -> bool:
        """Make a version the current one. This needs `holders` nodes that are alive and have its files, or a
        shared storage that has them; and no version that was added later may be current. Returns whether it
        was done.
        """

    async def change_weights(self, version: str, body: Json, *, model: str = "") -> None:
        """Replace the body of a version. One whose body says that its adapter was deleted is not current any
        more.
        """

    async def report_serving(self, incarnation: int, versions: Mapping[str, str]) -> None:
        """Say which version of each adapter, and of the base, a node serves."""

    async def add_transfer(self, kind: TransferKind, name: str, body: Json, *, model: str = "") -> None:
        """Record the nodes that take part in a transfer, for which a trainer sends several requests to any
        node.
        """

    async def read_transfer(self, kind: TransferKind, name: str, *, model: str = "") -> Json:
        """The recorded transfer. None where it ended, or was never begun on several nodes."""

    async def end_transfer(self, kind: TransferKind, name: str, *, model: str = "") -> None:
        """Forget a transfer."""

    async def hold_generation(self, mode: PauseMode | None, *, model: str = "") -> None:
        """Say that a trainer holds generation on the nodes of a model, or on all. None means that it goes
        on.
        """

    async def generation_hold(self, *, model: str = "", follows: bool = False) -> PauseMode | None:
        """How generation is held on the nodes of a model. A hold counts for a node that `follows` it already,
        and for others as long as some node is alive that was there when it began. A node alone records no
        hold here.
        """

    async def stale_nodes(self) -> tuple[NodeRow, ...]:
        """Nodes that are alive and serve a version other than the current one of their model's base."""

    async def weights_of(self, version: str, *, model: str = "") -> LogWeights | None:
        """A version of the base or of an adapter."""

    async def weights(
        self, *, model: str = "", adapters: bool = False, latest: bool = False, limit: int | None = None
    ) -> tuple[LogWeights, ...]:
        """Versions of the base, or with `adapters` those of adapters, newest first. `latest` leaves only the
        newest and the current version of the base, or of each adapter.
        """

    @property
    def weight_news(self) -> int:
        """A count of the news that concern weights. It is apart from `news`, so that a node which waits for a
        new version does not ask the log about every event.
        """


class CallbacksPort(Protocol):
    """Events that receivers have not accepted yet, each leased to one node at a time."""

    @property
    def callbacks_pending(self) -> bool:
        """Whether some event may be pending, as of at most a second ago. The log is not asked."""

    async def lease_callbacks(
        self, limit: int, *, seconds: float, each: int | None = None, rooms: Mapping[str, int] = NO_URL_LIMITS
    ) -> tuple[LeasedCallback, ...]:
        """Lease the oldest pending event of each task, oldest first. `rooms` limits the events of each URL
        that it names, and `each` those of any other.
        """

    async def accept_callback(self, callback: LeasedCallback) -> bool:
        """Note that the receiver accepted an event. Returns False where another node has leased it since and
        may send it again.
        """

    async def retry_callback(self, callback: LeasedCallback, *, after_s: float) -> None:
        """Note that the receiver did not accept an event, which is sent again after so many seconds."""

    async def count_callbacks(self) -> CallbackCounts:
        """Count the events that are pending, and those that retention pruned while they were."""


class QueriesPort(Protocol):
    """The reads of the API."""

    async def task(self, task_id: str) -> TaskRecord | None: ...

    async def task_of_key(self, idempotency_key: str) -> TaskRecord | None: ...

    async def latest_run(self, name: str) -> TaskRecord | None:
        """The last task that was submitted under a name that may be used again."""

    async def tasks(self, *, limit: int = 100, before: str | None = None) -> tuple[TaskRecord, ...]:
        """Tasks, newest first. `before` is the last task of the previous page."""

    async def session(self, session_id: str) -> SessionRecord | None: ...

    async def trajectory(self, session_id: str) -> Trajectory | None:
        """A session's trajectory with all its turns. None when the session is unknown, pruned or not over."""

    async def turns(self, session_id: str) -> tuple[Turn, ...]:
        """The turns of a session that is over."""

    async def forks(self, session_id: str, limit: int) -> tuple[SessionRecord, ...]:
        """The first forks of a session, in the order in which they began."""

    async def fork_parent(self, fork: ForkSpec) -> ForkParent | None:
        """The session that forks go on from. A shared log has no turns of a session that still runs."""

    async def earlier_attempts(self, place: Identity) -> tuple[EarlierAttempt, ...]:
        """The earlier sessions of a session's place, the last one first."""

    async def finished_places(self, task_id: str) -> tuple[SessionFacts, ...]:
        """What is needed of the task's finished sessions to judge its group."""

    async def node_of(self, session_id: str) -> NodeRow | None:
        """The node that runs a session."""

    async def finished_groups(
        self, limit: int, *, until: float | None = None, state: str | None = None, task_id: str | None = None
    ) -> tuple[Mapping[str, Json], ...]:
        """Bodies of `group` events with facts of their tasks, newest first (`journal.finished_groups`)."""


class EvaluationsPort(Protocol):
    """Scores that are given to finished sessions."""

    async def placed_sessions(self, task_id: str | None, group_id: str | None) -> tuple[str, ...]:
        """The ids of the sessions that hold the places of a task, or of all tasks of a group."""

    async def session_ends(self, session_ids: Sequence[str]) -> Mapping[str, bool]:
        """Map each session to whether it is over. Sessions that the log does not have are left out."""

    async def submit_evaluation(
        self,
        spec: EvaluationSpec,
        sessions: Mapping[str, str | None],
        *,
        evaluation_id: str,
        idempotency_key: str | None,
        incarnation: int,
        now: float,
    ) -> EvaluationStatus:
        """Record an evaluation. `sessions` maps the id of each session to why it is refused, or to None."""

    async def write_reward(self, given: RewardEvent) -> bool:
        """Write the `reward` event of a session, once for each evaluation. Returns whether this call wrote
        it.
        """

    async def refuse_evaluation(self, evaluation_id: str, session_id: str, why: str) -> None:
        """Record why a session of an evaluation gets no event."""

    async def evaluation(
        self, evaluation_id: str | None, idempotency_key: str | None = None
    ) -> EvaluationStatus | None: ...

    async def pending_evaluations(self, incarnation: int) -> tuple[EvaluationStatus, ...]:
        """The pending evaluations of this incarnation, and those of incarnations that are not alive, which
        belong to this one from now on.
        """


class Log(
    PlacesPort, MembershipPort, EventsPort, WeightsPort, CallbacksPort, QueriesPort, EvaluationsPort, Protocol
):
    """The whole port. A caller should ask for the part that it uses."""

    @property
    def shared(self) -> bool:
        """Whether other nodes use this log too. Its cursors name it then, and a place that a node gives back
        may run elsewhere.
        """

    async def unavailable_reason(self) -> str | None:
        """Why the log is away, or None while it answers."""


def fork_parent_id(fork: ForkedFrom | None) -> str | None:
    """The id of the session that a fork goes on from."""
    return None if fork is None else fork.session_id
