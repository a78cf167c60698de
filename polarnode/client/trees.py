"""Trees of sessions and their forks, each as soon as it is over.

The node samples a tree as one task, whose `group.fork` says how (docs/forks.md). This sets it in tasks, and
waits for their groups; nothing is decided here, and nothing is kept: who begins again asks for new sessions.
"""

from collections.abc import Iterable, Iterator

from attrs import evolve

from polarnode.client.blocking import PolarnodeClient
from polarnode.core.task import ForkPolicy, TaskSpec
from polarnode.groups.group import Group


def sample_trees(
    client: PolarnodeClient, specs: Iterable[TaskSpec], policy: ForkPolicy
) -> Iterator[tuple[Group, ...]]:
    """Submit tasks as trees, and yield the group of each when it is over, as the forest that `tree_rows_of`
    takes. `num_samples` of a task is the number of its sessions and forks together. Raises ClientError for a
    task that the node refuses.
    """
    after = client.status()["journal"]["last_seq"]
    names = {client.submit(evolve(spec, group=evolve(spec.group, fork=policy))).task_id for spec in specs}
    for group in client.groups(after=after, turns="full", follow=True) if names else ():
        if group.task_id in names:  # others are another trainer's
            names.discard(group.task_id)
            yield (group,)
        if not names:
            return
