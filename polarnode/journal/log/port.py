"""The port of the log, and the values that it takes and gives.

The log holds tasks and their places, events with positions, consumers, weights by version, pending
callbacks and nodes. A node alone keeps it in SQLite (`sqlite.py`), a fleet in PostgreSQL (`postgres/`): one
scheduler claims places from either. Turns of live sessions are not here; they stay on the disk of the node
that runs them.

A **place** is one of the samples of a task. An **incarnation** is one start of a node's process; a
**claim** says that an incarnation holds a place with one session. A claim ends by `finish` or by
`put_back`, or is taken away when its incarnation is silent. Every call that writes may be made again after
its answer was lost.
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
from polarnode.groups.group import Facts
from polarnode.journal.forks import EarlierAttempt, ForkParent
from polarnode.journal.pending_callbacks import EVENT_KINDS, CallbackCounts
from polarnode.journal.values import EventPage, Filters, Retention, TaskRecord, TrajectoryEncoder
from polarnode.merge.trajectory import Identity

RETRY_S: Final = 5.0  # what a refused caller is told to wait: a failover by a site's HA takes 5 to 30 seconds


class LogAway(Busy):
    """The log cannot be reached now. Whether a call that was under way took effect is not known; it is made
    again as it was.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message, retry_after=RETRY_S)
        self.reason = reason or message


# ── places ────────────────────────────────────────────────────────────────────

# Why a claim is to be ended at once and not run: its trainer cancelled the task, its group has enough, or
# it was lost once more than the task's retries allow.
EndingCause = Literal["cancelled", "early stop", "retries spent"]


@frozen(kw_only=True)
class Claim:
    """A place of a task that an incarnation holds. `attempt` counts the sessions of the place from 0,
    `retries` those of them that were lost and counted. `ending`: it is not to be run.
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
class Offer:
    """What a node has room for, but for the places `avoided`, by task and number. `serving` is the version of
    its weights by adapter, where "" is the base: a node whose version is not the current one claims nothing
    of it. With `begun_only` it takes only places of tasks of which it runs one already.
    """

    incarnation: int
    room: int
    begun_only: bool = False
    labels: Mapping[str, str] = field(factory=dict)
    images: tuple[str, ...] = ()
    serving: Mapping[str, str] = field(factory=dict)
    avoided: frozenset[tuple[str, int]] = frozenset()


# Who filled a place: this call (with the "last" one its task is over), this session in an earlier call, or
# another session; or the log does not have the task (retention deleted it, or an older state of the log was
# restored).
FinishAnswer = Literal["now", "last", "already", "another", "unknown"]
FILLED: Final = ("now", "last", "already")


@frozen(kw_only=True)
class Ended:
    """A session that is over, packed: part 0 is its trajectory, the parts after it are its turns. `SqliteLog`
    has the turns of sessions that ran here already, and takes part 0 alone.
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
    def facts(self) -> Facts:
        """What its group is judged by."""
        return Facts(
            session_id=self.identity.session_id,
            sample_index=self.identity.sample_index,
            outcome=self.outcome,
            reward=self.reward,
            trainable_tokens=self.trainable,
            staleness=self.staleness,
        )


def ended_session(trajectory: Trajectory, *, finished: float) -> Ended:
    """Pack a trajectory without its turns, which the journal of the node that ran it has. It fails here, at
    its source, where a value cannot be packed.
    """
    return Ended(
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


def whole_session(trajectory: Trajectory, *, finished: float) -> Ended:
    """Pack a trajectory with its turns."""
    found = ended_session(trajectory, finished=finished)
    return evolve(found, parts=(*found.parts, *map(pack_turn, trajectory.turns)))


# ── events ────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class LogGap:
    """What a reader misses, or has of another log. It goes on after `position` of `log`."""

    asked: Cursor
    log: str
    position: int
    reason: str


@frozen(kw_only=True)
class LogPage:
    """Some events of the log, in order. Continue from `Cursor(position=page.seen, log=log)`."""

    log: str
    page: EventPage
    gap: LogGap | None = None


@frozen(kw_only=True)
class LogStanding:
    """How the log stands, as of at most five seconds ago; its bytes of at most a minute ago. It is kept in
    memory, for whoever may not wait for the log.

    `log` is "" before it was read. `acknowledged`: up to where all consumers that are waited for have read.
    `oldest_unacknowledged` is when the event after it came, in seconds since the epoch.
    """

    log: str = ""
    position: int = 0
    pruned: int = 0
    acknowledged: int = 0
    consumers: Mapping[str, int] = field(factory=dict)  # positions
    unacknowledged_bytes: int = 0
    oldest_unacknowledged: float | None = None


# ── nodes ─────────────────────────────────────────────────────────────────────

NodeState = Literal["alive", "lost", "left", "replaced"]


@frozen(kw_only=True)
class NodeFacts:
    """What a node says of itself when it joins. `certificate`: the SHA-256 of a self-signed one."""

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
    running: int = 0  # places that it holds
    serving: Mapping[str, str] = field(factory=dict)
    report: Mapping[str, Json] = field(factory=dict)


@frozen(kw_only=True)
class Joined:
    """An incarnation that begins. `inherited`: what earlier incarnations of its name held, which is its own
    now: it delivers them as far as they got, or puts them back.
    """

    incarnation: int
    inherited: tuple[Claim, ...] = ()


# ── weights and callbacks ─────────────────────────────────────────────────────


TransferKind = Literal["update", "group"]  # by its id, or by its name


@frozen(kw_only=True)
class LogWeights:
    """A version of the weights; `adapter` is "" for the base. It counts when `holders` are enough, or when it
    is in a storage that outlives the nodes. `counted`: it is the current version, or it was.
    """

    version: str
    adapter: str
    at: float
    body: Json
    shared: bool = False
    current: bool = False
    counted: bool = False
    holders: tuple[int, ...] = ()  # incarnations that are alive


@frozen(kw_only=True)
class LeasedCallback:
    """An event that its receiver has not accepted, and whoever leased it sends. `lease` is its fence: it
    counts how often the event was leased.
    """

    position: int
    key: str
    task_id: str
    url: str
    lease: int


NO_ROOMS: Final[Mapping[str, int]] = {}


# ── the port ──────────────────────────────────────────────────────────────────


class Places(Protocol):
    """Tasks and who runs them."""

    @property
    def open_places(self) -> int:
        """The places that are not over, as of some seconds ago."""

    @property
    def place_news(self) -> int:
        """Counts the news of queued places and of sessions to stop among those that `news` counts, so that
        who claims does not ask the log about every event.
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
        """Accept a task; all of it or nothing. Where its key is known the task of that key is given, and
        where its id is taken by another task Conflict is raised. `model`: what its places require besides
        what the task says, which stays as it was sent; a node alone has one.
        """

    async def claim(self, offer: Offer) -> tuple[Claim, ...]:
        """Take up to `room` queued places: by priority, then of tasks that run here, then with images that
        are here, then by age. Nobody else gets them.
        """

    async def claim_endings(self, incarnation: int, limit: int) -> tuple[Claim, ...]:
        """Take places that nobody runs and nobody should, whatever they require: each is finished at once."""

    async def take_place(self, task_id: str, sample_index: int, incarnation: int) -> Claim | None:
        """Take one queued place by its name, as a capture does: nobody claims those of a task whose harness
        is the caller's own. None where it is not queued.
        """

    async def claims(self, incarnation: int) -> tuple[Claim, ...]:
        """All that an incarnation holds: what it asks after the answer to a claim was lost."""

    async def session_started(self, identity: Identity) -> None:
        """Record the identity of a session that runs."""

    async def finish(self, claim: Claim, ended: Ended) -> FinishAnswer:
        """Fill a place, and write its event; with the last of a task also the group's and the task's."""

    async def put_back(
        self, claim: Claim, ended: Ended | None = None, *, counts: bool = True, keep: bool = False
    ) -> Claim | None:
        """Give a place back, for another attempt; `ended` is published as an `attempt`. With `keep` this node
        holds the next attempt, which is returned unless the place must be ended.
        """

    async def publish(self, ended: Ended, incarnation: int) -> FinishAnswer:
        """Publish a session without a place: a capture, or an attempt whose place is another session's."""

    async def cancel(self, task_id: str, at: float) -> bool:
        """Cancel a task, for good. False for an unknown or finished one."""

    async def to_stop(self, incarnation: int) -> Mapping[str, EndingCause]:
        """By session id, why sessions that this incarnation runs must be ended now."""


class Membership(Protocol):
    """Nodes and their signs of life. No clock of a server judges silence (`watching.py`)."""

    @property
    def lost(self) -> bool:
        """Whether the incarnation that joined last was declared lost, or replaced by another of its name."""

    @property
    def least_load(self) -> float | None:
        """The load of the other node that told the least with its last sign; None where no other node of this
        one's model begins sessions.
        """

    def tell_load(self, load: float | None) -> None:
        """Say with the next sign how full this node is, from 0 to 1; None: it begins no sessions now."""

    async def join(self, facts: NodeFacts) -> Joined:
        """Begin an incarnation. Earlier ones of its name are replaced: they hold nothing any more."""

    async def renew_certificate(self, incarnation: int, certificate: str) -> None:
        """Say that a node shows another certificate from now on; it goes on under its incarnation."""

    async def sign(self, incarnation: int, report: Mapping[str, Json] | None = None) -> bool:
        """Give a sign of life. False where the incarnation was declared lost, or replaced."""

    async def signs(self) -> Mapping[int, int]:
        """The sign of each incarnation that counts as alive."""

    async def expire(self, incarnation: int, sign: int) -> bool:
        """Declare an incarnation lost, if `sign` is still its last one."""

    async def put_back_lost(self) -> int:
        """Queue what incarnations hold that are not alive. Each counts as a retry."""

    async def leave(self, incarnation: int) -> None:
        """End an incarnation in order. What it still holds is for others."""

    async def nodes(self, *, every: bool = False) -> tuple[NodeRow, ...]:
        """The nodes that are alive; or every row that is kept."""


class Events(Protocol):
    """Events by position, and the consumers that read them."""

    async def identity(self) -> str:
        """What the log is called now. Another name means another log, or another history of this one."""

    async def mark_restored(self) -> str:
        """Say that the log was put back to an earlier state, which no timeline shows. Gives its new name."""

    async def events(
        self,
        after: Cursor,
        *,
        filters: Filters | None = None,
        encoder: TrajectoryEncoder | None = None,
        limit: int = 64,
    ) -> LogPage:
        """The events after a cursor, bounded in number and bytes."""

    @property
    def standing(self) -> LogStanding:
        """How the log stands, without a question to it."""

    async def end(self) -> Cursor:
        """The last event."""

    async def position(self, consumer: str) -> Cursor:
        """The last event that a consumer acknowledged."""

    async def meet(self, consumer: str, begin: Cursor, *, now: float) -> Cursor:
        """A consumer's position; one that is new is created after `begin`, so that nothing it has not read is
        pruned as acknowledged by all. Raises Refused where there are too many.
        """

    async def acknowledge(self, consumer: str, cursor: Cursor, *, now: float) -> Cursor:
        """Move a consumer forward, never back and never beyond the last event. Raises Refused where there are
        too many.
        """

    def attend(self, consumer: str, change: int) -> None:
        """Count a stream of a consumer that is opened here (1) or closed (-1). The log knows it within a
        second, and forgets those of a node that is gone.
        """

    async def forget(self, consumer: str) -> bool:
        """Delete a consumer."""

    async def consumers(self) -> tuple[Consumer, ...]:
        """Every consumer, and how far it is behind."""

    async def prune(self, retention: Retention, *, now: float, limit: int = 256) -> int:
        """Delete some of the oldest events that may go, and bodies that nobody finished. How many events."""

    @property
    def news(self) -> int:
        """Counts what was written to the log, by whomever. Read before a look, for `wait_news` after it."""

    async def wait_news(self, seen: int, seconds: float) -> None:
        """Return when another node or this one wrote something, or after so many seconds."""

    @property
    def event_news(self) -> int:
        """Counts the news of events among those that `news` counts, so that who reads them does not ask the
        log whenever a place is queued.
        """


class WeightVersions(Protocol):
    """Versions of the weights and of adapters. Nodes of several models may share a log: `model` is the label
    of that name of the nodes that serve a version, and each model has its own versions.
    """

    async def add_weights(
        self, version: str, body: Json, *, model: str = "", shared: bool = False, at: float
    ) -> None:
        """Record a version, of the adapter that its body names or of the base. Only the first row of a
        version is kept.
        """

    async def hold_weights(self, version: str, incarnation: int, *, model: str = "") -> None:
        """Say that a node has the files of a version."""

    async def serve_weights(self, version: str, *, model: str = "", holders: int = 2) -> bool:
        """Make a version the current one, if enough nodes that are alive have it or it is shared, and none
        that was brought later is current.
        """

    async def change_weights(self, version: str, body: Json, *, model: str = "") -> None:
        """Record what else became of a version. One of an adapter that was deleted is not current any
        more.
        """

    async def serving(self, incarnation: int, versions: Mapping[str, str]) -> None:
        """Say what a node serves, by adapter."""

    async def add_transfer(self, kind: TransferKind, name: str, body: Json, *, model: str = "") -> None:
        """Record who takes part in what a trainer does by several requests, which may come to any node."""

    async def transfer(self, kind: TransferKind, name: str, *, model: str = "") -> Json:
        """What was recorded; None where it ended, or was never begun on several nodes."""

    async def end_transfer(self, kind: TransferKind, name: str, *, model: str = "") -> None:
        """Forget it."""

    async def hold(self, mode: PauseMode | None, *, model: str = "") -> None:
        """Say that a trainer holds generation on the nodes of a model, or of all; None: it goes on."""

    async def held(self, *, model: str = "", follows: bool = False) -> PauseMode | None:
        """How generation is held on the nodes of a model. It counts for a node that `follows` it already, and
        for others while a node is alive that was there then. A node alone has nobody to tell.
        """

    async def stale_nodes(self) -> tuple[NodeRow, ...]:
        """Nodes that are alive and do not serve the current version of their model's base, but another."""

    async def weights_of(self, version: str, *, model: str = "") -> LogWeights | None:
        """A version of the base or of an adapter."""

    async def weights(
        self, *, model: str = "", adapters: bool = False, latest: bool = False, limit: int | None = None
    ) -> tuple[LogWeights, ...]:
        """Versions of the base, or of adapters, newest first. With `latest` only the newest and the current
        one of the base, or of each adapter.
        """

    @property
    def weight_news(self) -> int:
        """Counts the news of weights among those that `news` counts, so that who waits for a new version
        does not ask the log about every event.
        """


class Callbacks(Protocol):
    """Events that receivers have not accepted yet, each leased to one node at a time."""

    @property
    def callbacks_pending(self) -> bool:
        """Whether some event may be pending, as of at most a second ago. The log is not asked for it."""

    async def lease_callbacks(
        self, limit: int, *, seconds: float, each: int | None = None, rooms: Mapping[str, int] = NO_ROOMS
    ) -> tuple[LeasedCallback, ...]:
        """Lease the oldest pending event of each task, oldest first: of one URL at most as many as `rooms`
        says, or `each` where it does not name it.
        """

    async def callback_taken(self, callback: LeasedCallback) -> bool:
        """Its receiver accepted it. False where another node has leased it since: it may be sent again."""

    async def callback_failed(self, callback: LeasedCallback, *, after_s: float) -> None:
        """Its receiver did not accept it: it is sent again after so many seconds."""

    async def callback_counts(self) -> CallbackCounts:
        """How many events are pending, and how many no longer are because retention pruned them."""


class Queries(Protocol):
    """What the API asks."""

    async def task(self, task_id: str) -> TaskRecord | None: ...

    async def task_of_key(self, idempotency_key: str) -> TaskRecord | None: ...

    async def latest_run(self, name: str) -> TaskRecord | None:
        """The last task that was submitted under a name that may be used again."""

    async def tasks(self, *, limit: int = 100, before: str | None = None) -> tuple[TaskRecord, ...]:
        """Newest first; `before` is the last task of the page before."""

    async def session(self, session_id: str) -> SessionRecord | None: ...

    async def trajectory(self, session_id: str) -> Trajectory | None:
        """With all its turns; None when it is not over, unknown or pruned."""

    async def turns(self, session_id: str) -> tuple[Turn, ...]:
        """Of a session that is over."""

    async def forks(self, session_id: str, limit: int) -> tuple[SessionRecord, ...]:
        """The first forks of a session, in the order they began."""

    async def fork_parent(self, fork: ForkSpec) -> ForkParent | None:
        """The session that forks go on from. Of one that runs a log that is shared has no turns yet."""

    async def earlier_attempts(self, place: Identity) -> tuple[EarlierAttempt, ...]:
        """The sessions that had a session's place before it, the last one first."""

    async def places_over(self, task_id: str) -> tuple[Facts, ...]:
        """What a group's judge needs of the task's sessions that are over."""

    async def node_of(self, session_id: str) -> NodeRow | None:
        """The node that runs a session."""

    async def finished_groups(
        self, limit: int, *, until: float | None = None, state: str | None = None, task_id: str | None = None
    ) -> tuple[Mapping[str, Json], ...]:
        """Bodies of `group` events with what their tasks say, newest first (`journal.finished_groups`)."""


class Evaluations(Protocol):
    """Scores that are given to sessions that were over."""

    async def places_of(self, task_id: str | None, group_id: str | None) -> tuple[str, ...]:
        """The sessions that hold the places of a task, or of a group's tasks."""

    async def session_ends(self, session_ids: Sequence[str]) -> Mapping[str, bool]:
        """Whether each of these sessions is over; without those that the log does not have."""

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
        """An evaluation of `sessions`; by each one's id, why it is refused, or None."""

    async def reward(self, given: RewardEvent) -> bool:
        """Write the `reward` event of a session, once for each evaluation."""

    async def refuse_evaluation(self, evaluation_id: str, session_id: str, why: str) -> None:
        """A session of an evaluation that gets no event."""

    async def evaluation(
        self, evaluation_id: str | None, idempotency_key: str | None = None
    ) -> EvaluationStatus | None: ...

    async def pending_evaluations(self, incarnation: int) -> tuple[EvaluationStatus, ...]:
        """Those of this incarnation, and those of incarnations that are not alive, which are its own from now
        on.
        """


class Log(Places, Membership, Events, WeightVersions, Callbacks, Queries, Evaluations, Protocol):
    """The whole port. A room asks for the part that it uses."""

    @property
    def shared(self) -> bool:
        """Whether other nodes have it too: cursors name it, and what a node gives back runs elsewhere."""

    async def reachable(self) -> str | None:
        """Why the log is away; None while it answers."""


def fork_parent_id(fork: ForkedFrom | None) -> str | None:
    """The session that a fork goes on from."""
    return None if fork is None else fork.session_id
