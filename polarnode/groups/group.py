"""What a group is when it is over: its places, and what a trainer may use of them.

The rule for whoever edits it: these are the fields of the stream's `group` event, by their names; they are added to, never renamed.
"""

from collections.abc import Iterable
from typing import Literal

from attrs import evolve, frozen

from polarnode.records import Status, Trajectory

# complete: every place is usable. partial: enough are. early: it was stopped when enough were in. dropped: of no use, and `reason` says why.
GroupState = Literal["complete", "partial", "early", "dropped"]


@frozen(kw_only=True)
class Member:
    """One place of a group: the session that held it in the end. `why` says why it is not usable, None when it is.

    `stale`: it is further behind than the task's `max_staleness`, whether that makes it unusable or not.
    """

    session_id: str
    sample_index: int
    status: Status
    reward: float | None
    usable: bool
    staleness: int | None = None
    stale: bool = False
    why: str | None = None


@frozen(kw_only=True)
class Group:
    """A group that is over. `trajectories` are those of its members that the reader has, in order of sample_index."""

    task_id: str
    group_id: str
    state: GroupState
    members: tuple[Member, ...]
    trajectories: tuple[Trajectory, ...] = ()
    reason: str | None = None

    @property
    def usable(self) -> tuple[Trajectory, ...]:
        """The trajectories to train on; none of a dropped group."""
        if self.state == "dropped":
            return ()
        wanted = {member.session_id for member in self.members if member.usable}
        return tuple(each for each in self.trajectories if each.session_id in wanted)

    def holding(self, trajectories: Iterable[Trajectory]) -> "Group":
        """The same group with these trajectories."""
        return evolve(self, trajectories=tuple(trajectories))
