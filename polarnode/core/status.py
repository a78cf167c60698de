"""Values of tasks, sessions, consumers and scores: the journal and the API write them, and clients read them.

Invariant: a field here is a field of the API (docs/api.md). Fields that a node of an earlier release does not
write have defaults. Times are seconds since the epoch.
"""

from collections.abc import Mapping
from typing import Final, Literal

from attrs import field, frozen

from polarnode.core.arrays import Float32Array, Int32Array
from polarnode.core.conversation import Json, json_key
from polarnode.core.task import EvaluationSpec
from polarnode.core.trajectory import ForkedFrom, Outcome

STARTING: Final = "starting"  # the error type with which a node answers until it serves


@frozen(kw_only=True)
class Submitted:
    """A task that is in the node's journal. `created` is False when it existed before and the same answer is
    returned again.
    """

    task_id: str
    session_ids: tuple[str, ...]
    created: bool = True


@frozen(kw_only=True)
class SessionRecord:
    """A session without its tokens. `outcome` is None until its trajectory is published.

    `attempt` counts the sessions of one place in the group from 0; `retried_as` is the session that took this
    one's place, if any. `forked_from`: of a fork, what it may inherit; what it did is in its trajectory.
    """

    session_id: str
    task_id: str = ""
    sample_index: int = 0
    outcome: Outcome | None = None
    reward: float | None = None
    turns: int = 0
    sampled_tokens: int = 0
    finished: float | None = None
    attempt: int = 0
    retried_as: str | None = None
    forked_from: ForkedFrom | None = None


@frozen(kw_only=True)
class SessionStatus(SessionRecord):
    """A session without its tokens; `status` is that of its outcome, or "pending" until it has ended."""

    status: str


@frozen(kw_only=True)
class ForkList:
    """The forks of a session, in the order they began; of those that were tried again the last."""

    session_id: str
    forks: tuple[SessionStatus, ...]


@frozen(kw_only=True)
class TaskStatus:
    """A task and the sessions that hold its places. `counts` is the number of sessions by status; `finished`
    is True when none is pending; `damaged` is why its spec cannot be read.
    """

    task_id: str
    group_id: str
    idempotency_key: str | None = None
    submitted: float = 0.0
    finished: bool
    counts: Mapping[str, int]
    sessions: tuple[SessionStatus, ...]
    damaged: str | None = None


@frozen(kw_only=True)
class UnreadableEvent:
    """In place of an event that cannot be given: its row in the journal is damaged, or it cannot be written.
    `kind` is the event's own. What is not known is None. `reason` is a sentence.
    """

    kind: str | None = None
    session_id: str | None = None
    task_id: str | None = None
    group_id: str | None = None
    reason: str


@frozen(kw_only=True)
class RewardEvent:
    """A reward that a finished session was given by a later evaluation. It replaces no other; `n` counts them
    from 1. `first_reward` is that of the session's trajectory.

    * `reward` is None if the evaluation failed: then `error` is a sentence, and `boundary` the part at fault.
    * `lineage_rewards`, `turn_rewards`: by number, as a string, because JSON keys are strings.
    * `evaluator`, `evaluator_digest`: its name, and a digest of all that the task or the request says of it.
    """

    session_id: str
    task_id: str
    group_id: str
    sample_index: int = 0
    n: int = 0
    reward: float | None
    first_reward: float | None = None
    lineage_rewards: Mapping[str, float] = field(factory=dict)
    turn_rewards: Mapping[str, float] = field(factory=dict)
    metrics: Mapping[str, Json] = field(factory=dict)
    evaluator: str = ""
    evaluator_digest: str = ""
    evaluation_id: str = ""
    reason: str | None = None
    error: str | None = None
    boundary: str | None = None
    given: float = 0.0


@frozen(kw_only=True)
class EvaluatedSession:
    """A session of an evaluation. `evaluated` and `failed` sessions have a `reward` event, number `n` of the
    session; `refused` ones have none, because there is nothing to evaluate: `error` says why.
    """

    session_id: str
    state: Literal["pending", "evaluated", "failed", "refused"]
    n: int | None = None
    first_reward: float | None = None
    reward: float | None = None
    error: str | None = None


@frozen(kw_only=True)
class EvaluationStatus:
    """An evaluation of finished sessions. `spec` is what was requested, None where its row in the journal is
    damaged; `counts` is the number of sessions by state. `created` is False where an earlier answer is
    repeated.
    """

    evaluation_id: str
    submitted: float = 0.0
    spec: EvaluationSpec | None = None
    finished: bool = False
    counts: Mapping[str, int] = field(factory=dict)
    sessions: tuple[EvaluatedSession, ...] = ()
    created: bool = True


@frozen(kw_only=True)
class Consumer:
    """A named reader of the stream. `behind_events` counts the events of all kinds after its position,
    whatever it filters; `behind_bytes` is about their size. In a log that nodes share a position is text.

    * `missed`: events after its position that were pruned, which a `gap` event reports to it.
    * `moved`: when its position last moved. `last_seen`: when it last acknowledged, or opened or closed a
      stream.
    * `holds`: whether the node keeps what it has not acknowledged (docs/delivery.md).
    """

    consumer: str
    position: int | str
    behind_events: int = 0
    behind_bytes: int = 0
    missed: int = 0
    moved: float = 0.0
    last_seen: float = field(default=0.0, metadata=json_key("heard"))
    connected: int = 0  # streams open under its name
    holds: bool = True

    @property
    def heard(self) -> float:
        """The older name of `last_seen`."""
        return self.last_seen


@frozen(kw_only=True)
class Consumers:
    """All consumers that the node keeps a position for."""

    consumers: tuple[Consumer, ...]


@frozen(kw_only=True)
class ScoreRow:
    """A row to score: its ids, int32[T]. Tokens from `start` on get a logprob; with a mask, uint8[T], those
    of them where it is 1.
    """

    token_ids: Int32Array
    loss_mask: bytes | None = None
    start: int = 0


@frozen(kw_only=True)
class ScoreRequest:
    """The body of POST /v1/score. `engine` is one of the node's teachers, or `policy`; `adapter` one of the
    policy's.
    """

    rows: tuple[ScoreRow, ...]
    engine: str = "policy"
    adapter: str = ""


@frozen(kw_only=True)
class ScoredRow:
    """float32[T] in nats: 0 where no logprob was asked for, and for the first token, which has none.
    `version` names the weights; null where nothing was to be scored.
    """

    logprobs: Float32Array
    version: str | None


@frozen(kw_only=True)
class ScoreAnswer:
    """The rows in the order of the request."""

    engine: str
    arrays: str
    rows: tuple[ScoredRow, ...]


# ── logs ──────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class TimeSeries:
    """What a node did in the last hours: a sample every `every_s` seconds, taken at `at`, and of each the
    value of every name; None where there is none.
    """

    every_s: float
    at: tuple[float, ...]
    values: Mapping[str, tuple[float | None, ...]]


@frozen(kw_only=True)
class LogPiece:
    """A piece of a log: `text`, which begins at byte `offset` of its file. The next piece begins at
    `next_offset`; there is none yet where that is `size`.

    * `ended`: nothing more will be written.
    * `wrapped`: a running session wrote more than its log holds, and its second half is written over until
      the session is over.
    """

    name: str
    text: str = ""
    offset: int = 0
    next_offset: int = 0
    size: int = 0
    ended: bool = False
    wrapped: bool = False


@frozen(kw_only=True)
class LogFile:
    """A log of the node: its name, and its bytes."""

    name: str
    size: int


@frozen(kw_only=True)
class Logs:
    """The logs of a node, its own first."""

    logs: tuple[LogFile, ...]


# ── live sessions ─────────────────────────────────────────────────────────────────


Phase = Literal["init", "ready", "run", "post", "ended"]


@frozen(kw_only=True)
class LiveSessionStatus:
    """The progress of one session. A sample of a group (`task_id`, `sample_index`) is over when one of its
    attempts has an `outcome`. Seconds until now: `age_s` since it began, `phase_s` since its phase began,
    `last_turn_s` since its last turn ended, None before the first.
    """

    session_id: str
    task_id: str
    harness: str
    phase: Phase
    turns: int
    sampled_tokens: int
    outcome: str | None = None
    reward: float | None = None
    traces: int | None = None
    sample_index: int = 0
    attempt: int = 0
    age_s: float | None = None
    phase_s: float | None = None
    last_turn_s: float | None = None


@frozen(kw_only=True)
class SessionChanges:
    """Sessions of one node that began, went on or ended since the event before; a capture's harness is
    `capture`. `whole`: they begin a list of all that are live there, and what was known of that node before
    counts no more. One whose phase is `ended` is live no longer; without an `outcome` it is tried again, or
    it was a capture.
    """

    node: str
    sessions: tuple[LiveSessionStatus, ...]
    whole: bool = False


@frozen(kw_only=True)
class OpenedCapture:
    """An open capture: where its harness finds the model, and until when. `created` is False when this answer
    repeats an earlier one.
    """

    session_id: str
    task_id: str
    group_id: str
    sample_index: int
    key: str = field(repr=False)
    base_urls: Mapping[str, str] = field(repr=False)
    env: Mapping[str, str] = field(repr=False)
    expires_s: float
    created: bool = True


@frozen(kw_only=True)
class CaptureStatus:
    """The progress of an open capture."""

    session_id: str
    task_id: str
    group_id: str
    sample_index: int
    turns: int
    sampled_tokens: int
    in_flight: int
    expires_s: float
