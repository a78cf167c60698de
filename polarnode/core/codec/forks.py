"""A request for forks of a session, and the task that it means: the parent's own, where it says nothing
else.
"""

from attrs import evolve, frozen

from polarnode.core.codec.json import structure
from polarnode.core.codec.tasks import read_task, task_json
from polarnode.core.conversation import Json, Sampling
from polarnode.core.task import Budgets, EvaluatorSpec, ForkSpec, ForkWay, GroupSpec, TaskSpec


@frozen(kw_only=True)
class ForkOrder:
    """`num_samples` forks of a session before its turn `turn`, as one task. What is not given is the parent's
    task's: sampling, budgets, evaluator, metadata, priority. `group` is the defaults, with the parent's
    staleness: the other values are of a number of sessions that need not be this one's.
    """

    turn: int
    num_samples: int = 1
    by: ForkWay = "resume"
    task_id: str | None = None
    sampling: Sampling | None = None
    budgets: Budgets | None = None
    group: GroupSpec | None = None
    evaluator: EvaluatorSpec | None = None
    metadata: dict[str, Json] | None = None


def read_fork(value: Json) -> ForkOrder:
    """Read the body of POST /v1/sessions/{id}/fork. Raises Refused with the path of the first invalid
    field.
    """
    return structure(value, ForkOrder, forbid_extra=True)


def fork_task(parent: TaskSpec, session_id: str, order: ForkOrder) -> TaskSpec:
    """The task of forks of a session of the task `parent`. Raises Refused as `read_task`."""
    spec = evolve(
        parent,
        task_id=order.task_id,
        group_id=None,
        num_samples=order.num_samples,
        fork=ForkSpec(session=session_id, turn=order.turn, by=order.by),
        sampling=order.sampling or parent.sampling,
        budgets=order.budgets or parent.budgets,
        group=order.group or GroupSpec(max_staleness=parent.group.max_staleness, stale=parent.group.stale),
        evaluator=order.evaluator or parent.evaluator,
        metadata=parent.metadata if order.metadata is None else order.metadata,
    )
    return read_task(task_json(spec))
