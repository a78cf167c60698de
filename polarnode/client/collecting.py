"""Groups put together from the stream: which sessions have come, which group is whole, and up to where a reader is done.

Trajectories are kept as they come, up to a number of bytes; what comes beyond that is let go, and fetched again when its group is over. Keeping
first, because a second read of everything would double what the node writes as JSON, which is the dearest thing it does; letting go, because
groups that lie between one another are without a bound. The rules for whoever edits it. Pure. The position never passes a trajectory whose group
has not been worked on to its end: a reader that dies is sent the whole group again.
"""

import logging
from collections.abc import Container, Iterable

from attrs import define, field, frozen

from polarnode.client.values import Event
from polarnode.groups import Group, read_group
from polarnode.records import Trajectory

logger = logging.getLogger(__name__)

KEPT_BYTES = 1 << 30  # as they came: some hundred sessions of 100 000 tokens each, a group or several of the largest that are trained today
REMEMBERED = 1 << 16  # groups that were given: a repeat of one comes after a break of the connection or of the node, soon after it


@frozen(kw_only=True)
class Gathered:
    """A group that is over, with what was kept of it, and the sessions that are to be fetched again."""

    group: Group
    kept: tuple[Trajectory, ...]
    missing: tuple[str, ...]

    def whole(self, fetched: Iterable[Trajectory]) -> Group:
        """The group with its trajectories, in the order of its members."""
        ours = {each.session_id: each for each in (*self.kept, *fetched)}
        return self.group.holding(ours[each.session_id] for each in self.group.members if each.session_id in ours)


@define(eq=False)
class _Open:
    """A task some of whose sessions have come."""

    first_seq: int
    kept: dict[str, Trajectory] = field(factory=dict)
    size: int = 0


@define(eq=False)
class Collector:
    """One reader's groups. `skip` are task ids whose groups it has had before."""

    skip: Container[str] = ()
    kept_bytes: int = KEPT_BYTES
    _open: dict[str, _Open] = field(factory=dict, init=False)  # by task, in the order their first session came
    _given: dict[str, None] = field(factory=dict, init=False)  # tasks, oldest first
    _heard: int = field(default=0, init=False)
    _size: int = field(default=0, init=False)

    @property
    def position(self) -> int:
        """Everything up to here is done with."""
        return min((each.first_seq - 1 for each in self._open.values()), default=self._heard)

    @property
    def oldest(self) -> str | None:
        """The task that holds the position."""
        return min(self._open, key=lambda task_id: self._open[task_id].first_seq, default=None)

    def hear(self, event: Event) -> Gathered | None:
        """One event; the group it ends, if it ends one that was not given before."""
        if event.kind == "gap":
            self._pass_gap(event)
        self._heard = event.seq
        match event.kind:
            case "trajectory":
                self._keep(event)
            case "group":
                return self._gather(event)
        return None

    def done(self, group: Group) -> None:
        """The group was worked on to its end."""
        self.forget(group.task_id)
        self._given[group.task_id] = None
        if len(self._given) > REMEMBERED:
            del self._given[next(iter(self._given))]

    def forget(self, task_id: str) -> None:
        """Wait for this task no longer."""
        if (found := self._open.pop(task_id, None)) is not None:
            self._size -= found.size

    def _knows(self, task_id: str) -> bool:
        return task_id in self._given or task_id in self.skip

    def _keep(self, event: Event) -> None:
        trajectory = event.trajectory
        if trajectory is None or self._knows(trajectory.task_id):
            return
        whose = self._open.setdefault(trajectory.task_id, _Open(first_seq=event.seq))
        if self._size + event.size <= self.kept_bytes:
            whose.kept[trajectory.session_id] = trajectory
            whose.size += event.size
            self._size += event.size

    def _gather(self, event: Event) -> Gathered | None:
        group = read_group(event.data)
        if self._knows(group.task_id):
            self.forget(group.task_id)
            return None
        whose = self._open.setdefault(group.task_id, _Open(first_seq=event.seq))  # it holds the position until it is done
        kept = tuple(whose.kept[each.session_id] for each in group.members if each.session_id in whose.kept)
        missing = tuple(each.session_id for each in group.members if each.session_id not in whose.kept)
        return Gathered(group=group, kept=kept, missing=missing)

    def _pass_gap(self, gap: Event) -> None:
        """What lies between is gone. Where numbers began anew it is another journal, whose node knows nothing of what we wait for."""
        logger.warning("the node no longer keeps all events: those of groups under way may lack sessions (%s)", gap.data)
        if gap.seq < self._heard:
            for task_id in tuple(self._open):
                self.forget(task_id)
