"""The groups that are not over: which of their places are, whether they have enough, and what they came to.

The rule for whoever edits it: it judges by the same facts and the same function as the journal, which says what a group was; here is only what
the node does about it, and counts. It is told of places, not of sessions: one that was lost and is tried again is no news.
"""

from collections.abc import Iterable

from attrs import define, field

from polarnode.groups import Facts, facts_of, judged, member_of
from polarnode.records import Trajectory
from polarnode.shell.tally import Tally
from polarnode.tasks import GroupSpec, TaskSpec


@define(eq=False)
class _Open:
    """A group that is not over. `over` by sample_index; None for a place whose end could not be written down."""

    spec: GroupSpec
    places: int
    over: dict[int, Facts | None] = field(factory=dict)
    usable: int = 0

    @property
    def enough(self) -> bool:
        return self.spec.early_stop_min is not None and self.usable >= self.spec.early_stop_min


@define(eq=False)
class GroupWatch:
    """By task, as a task's sessions are a group."""

    tally: Tally
    _open: dict[str, _Open] = field(factory=dict, init=False)

    def begin(self, task_id: str, spec: TaskSpec, over: Iterable[Facts] = ()) -> None:
        """Watch a task's group. `over`: the places that ended in an earlier life of the node, which counted them."""
        before = {each.sample_index: each for each in over}
        usable = sum(member_of(spec.group, each).usable for each in before.values())
        self._open[task_id] = _Open(spec=spec.group, places=spec.num_samples, over={**before}, usable=usable)

    def has_enough(self, task_id: str) -> bool:
        """Whether the group needs none of the sessions that are not over."""
        group = self._open.get(task_id)
        return group is not None and group.enough

    def over(self, trajectory: Trajectory) -> bool:
        """A place of its group is over. Whether it is the one that makes enough: those that are not over are to be ended now."""
        group = self._open.get(trajectory.task_id)
        if group is None or trajectory.sample_index in group.over:
            return False
        had, facts = group.enough, facts_of(trajectory)
        member = member_of(group.spec, facts)
        self.tally.place(member)
        group.usable += member.usable
        self._fill(trajectory.task_id, group, trajectory.sample_index, facts)
        return group.enough and not had

    def unwritten(self, task_id: str, sample_index: int) -> None:
        """A place's end could not be written down: the journal holds the group open, and the node's next start finds it."""
        group = self._open.get(task_id)
        if group is not None and sample_index not in group.over:
            self._fill(task_id, group, sample_index, None)

    def _fill(self, task_id: str, group: _Open, sample_index: int, facts: Facts | None) -> None:
        group.over[sample_index] = facts
        if len(group.over) < group.places:
            return
        del self._open[task_id]
        known = [each for each in group.over.values() if each is not None]
        if len(known) == group.places:
            self.tally.groups[judged(group.spec, known, task_id=task_id, group_id=task_id).state] += 1
