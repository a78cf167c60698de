"""What a client is answered, as values.

The rule for whoever edits it: fields are the names of the API's page, each with a default where an older node does not say it; a node that is
newer says more, which is passed over.
"""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from polarnode.groups import Group, read_group
from polarnode.records import Trajectory
from polarnode.wire import read_trajectory


@frozen(kw_only=True)
class Submitted:
    """A task that is in the node's journal; `created` is False when it was there before."""

    task_id: str
    session_ids: tuple[str, ...]
    created: bool


@frozen(kw_only=True)
class SessionStatus:
    """A session at a glance; `status` is pending until it is over."""

    session_id: str
    status: str
    sample_index: int = 0
    reward: float | None = None
    turns: int = 0
    sampled_tokens: int = 0
    finished: float | None = None
    attempt: int = 0
    retried_as: str | None = None


@frozen(kw_only=True)
class TaskStatus:
    """A task at a glance: `counts` of its sessions by status; `finished` when none of them is pending."""

    task_id: str
    group_id: str
    finished: bool
    counts: Mapping[str, int]
    sessions: tuple[SessionStatus, ...]
    submitted: float = 0.0


@frozen(kw_only=True)
class Event:
    """One event of the stream. `kind` is trajectory, group, task, gap, or attempt where it was asked for; `key` is the same each time an event is delivered; `data` its JSON."""

    seq: int
    kind: str
    key: str
    data: Any
    size: int = field(default=0, eq=False, repr=False)  # bytes as it came

    @property
    def trajectory(self) -> Trajectory | None:
        """The trajectory (a replaced one of an attempt), read; None for other kinds, and for one that was pruned or is in a trainer's format.

        Its `turns` are there when asked for with turns="full".
        """
        if self.kind not in ("trajectory", "attempt") or self.data is None or "format" in self.data:
            return None
        return read_trajectory(self.data)

    @property
    def group(self) -> Group | None:
        """The group, read, without its trajectories, which have events of their own; None for other kinds."""
        return read_group(self.data) if self.kind == "group" else None


@frozen(kw_only=True)
class Consumer:
    """A named reader of the stream: how far it is, how far behind, and whether what it has not acknowledged is kept for it (docs/delivery.md)."""

    consumer: str
    position: int
    behind_events: int = 0
    behind_bytes: int = 0
    missed: int = 0
    moved: float = 0.0
    heard: float = 0.0
    connected: int = 0
    holds: bool = True


@frozen(kw_only=True)
class Consumers:
    consumers: tuple[Consumer, ...]
