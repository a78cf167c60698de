"""Values of tasks, sessions and consumers: the journal and the API write them, and clients read them.

Invariant: a field here is a field of the API (docs/api.md). Fields that a node of an earlier release does not
write have defaults. Times are seconds since the epoch.
"""

from collections.abc import Mapping

from attrs import field, frozen

from polarnode.core.conversation import json_key
from polarnode.core.trajectory import Outcome


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
    one's place, if any.
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


@frozen(kw_only=True)
class SessionStatus(SessionRecord):
    """A session without its tokens; `status` is that of its outcome, or "pending" until it has ended."""

    status: str


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
class Consumer:
    """A named reader of the stream. `behind_events` counts the events of all kinds after its position,
    whatever it filters; `behind_bytes` is about their size.

    * `missed`: events after its position that were pruned, which a `gap` event reports to it.
    * `moved`: when its position last moved. `last_seen`: when it last acknowledged, or opened or closed a
      stream.
    * `holds`: whether the node keeps what it has not acknowledged (docs/delivery.md).
    """

    consumer: str
    position: int
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
