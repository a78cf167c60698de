"""The bodies of a task's last two events, from its places alone. Every implementation of the log writes
these."""

from collections.abc import Iterable

from polarnode.core.conversation import Json
from polarnode.core.task import TaskSpec
from polarnode.groups.group import SessionFacts, group_json, judged


def ending_bodies(
    spec: TaskSpec,
    facts: Iterable[SessionFacts],
    *,
    task_id: str,
    submitted: float,
    finished: float,
) -> dict[str, dict[str, Json]]:
    """The bodies of the `group` and `task` events of a task whose places are over. `finished` is when the
    last of them ended.
    """
    group_id = spec.group_id or task_id
    group = judged(spec.group, facts, task_id=task_id, group_id=group_id)
    statuses = [member.status for member in group.members]
    counts: dict[str, Json] = {status: statuses.count(status) for status in dict.fromkeys(statuses)}
    return {
        "group": group_json(group),
        "task": {
            "task_id": task_id,
            "group_id": group_id,
            "counts": counts,
            "submitted": submitted,
            "finished": finished,
        },
    }
