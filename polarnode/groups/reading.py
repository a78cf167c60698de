"""A group as the stream's `group` event, and back.

The rule for whoever edits it: fields are added, never renamed; a reader ignores what it does not know, and takes events of journals that did
not say yet what is usable.
"""

from collections.abc import Iterable

from attrs import asdict, frozen

from polarnode.conversation import Json
from polarnode.groups.group import Group, GroupState, Member
from polarnode.groups.judging import Facts, judged
from polarnode.records import Outcome, Trajectory
from polarnode.tasks import GroupSpec
from polarnode.wire import plain, structure


def group_json(group: Group) -> dict[str, Json]:
    """The body of the event; trajectories have events of their own."""
    return {
        "task_id": group.task_id,
        "group_id": group.group_id,
        "sessions": [plain(member) for member in group.members],
        "rewards": [member.reward for member in group.members],
        "state": group.state,
        "reason": group.reason,
        "usable": sum(member.usable for member in group.members),
    }


@frozen(kw_only=True)
class MemberShape(Member):
    """A member as journals of any version say it."""

    reward: float | None = None
    usable: bool = False


@frozen(kw_only=True)
class GroupShape:
    task_id: str
    group_id: str
    sessions: tuple[MemberShape, ...]
    state: GroupState | None = None
    reason: str | None = None


def read_group(value: Json, trajectories: Iterable[Trajectory] = ()) -> Group:
    """The group that an event's body says, with those of `trajectories` that are its members'. Refused with a path when it says none."""
    shape = structure(value, GroupShape)
    places = {each.session_id: each.sample_index for each in shape.sessions}
    ours = {each.session_id: each for each in trajectories if each.session_id in places}
    group = _of_an_old_journal(shape) if shape.state is None else _group(shape, shape.state)
    return group.holding(sorted(ours.values(), key=lambda each: places[each.session_id]))


def _group(shape: GroupShape, state: GroupState) -> Group:
    members = tuple(Member(**asdict(each)) for each in shape.sessions)
    return Group(task_id=shape.task_id, group_id=shape.group_id, state=state, members=members, reason=shape.reason)


def _of_an_old_journal(shape: GroupShape) -> Group:
    """Before journal version 4 an event said statuses and rewards alone: judged by them, and by the defaults of a task."""
    facts = (
        Facts(session_id=each.session_id, sample_index=each.sample_index, outcome=Outcome(status=each.status), reward=each.reward)
        for each in shape.sessions
    )
    return judged(GroupSpec(), facts, task_id=shape.task_id, group_id=shape.group_id)
