"""The shapes of answers that no type of ours writes: what `routes` puts together.

The rule for whoever edits it: a schema that the program's real answers are checked against in tests, not a second truth.
"""

from typing import Any

from attrs import frozen

from polarnode.conversation import Json
from polarnode.records import Outcome
from polarnode.shell.journal import ConsumerRecord, JournalStatistics
from polarnode.shell.journal.values import SessionRecord
from polarnode.tasks import TaskSpec
from polarnode.wire.trajectories import TrajectoryShape


@frozen(kw_only=True)
class Session(SessionRecord):
    """A session at a glance; `status` is pending until it is over."""

    status: str


@frozen(kw_only=True)
class Task:
    """A task and the sessions that hold its places."""

    task_id: str
    group_id: str
    idempotency_key: str | None
    submitted: float
    finished: bool
    counts: dict[str, int]
    sessions: tuple[Session, ...]


@frozen(kw_only=True)
class WholeTask(Task):
    """A task with its spec, every default written out."""

    spec: TaskSpec


@frozen(kw_only=True)
class Tasks:
    """A page of tasks."""

    tasks: tuple[Task, ...]


@frozen(kw_only=True)
class Cancelled:
    """Whether sessions of the task were under way."""

    task_id: str
    cancelled: bool


@frozen(kw_only=True)
class Position:
    """Where a consumer is."""

    consumer: str
    position: int


@frozen(kw_only=True)
class Consumers:
    """All that are known."""

    consumers: tuple[ConsumerRecord, ...]


@frozen(kw_only=True)
class Forgotten:
    """A consumer for which nothing is kept any more."""

    consumer: str
    forgotten: bool


@frozen(kw_only=True)
class Formatted:
    """A trajectory in a trainer's format, and whose it is; `refused` says why it is not, on streams and in exports."""

    format: str
    session_id: str
    task_id: str
    group_id: str
    sample_index: int
    outcome: Outcome
    reward: float | None
    metadata: dict[str, Json]
    value: Any
    refused: str | None = None


@frozen(kw_only=True)
class WholeSession:
    """A session with its turns in full, and its trajectory without them."""

    session: Session
    turns: tuple[dict[str, Json], ...]
    trajectory: TrajectoryShape | None


@frozen(kw_only=True)
class Status:
    """The node at a glance; what else is in it is told on the API's page."""

    node: str
    journal: JournalStatistics


@frozen(kw_only=True)
class Health:
    """200 says it."""

    ok: bool


@frozen(kw_only=True)
class Ready:
    """503 says that it is not."""

    ready: bool


@frozen(kw_only=True)
class Fault:
    """What went wrong, and what to do."""

    type: str
    message: str
    path: str | None = None


@frozen(kw_only=True)
class Refusal:
    """Every refusal."""

    error: Fault
