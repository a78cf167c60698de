"""Groups of sessions and forks: k sessions, and forks of them, in place of n sessions.

A composition of what a node has: the sessions are a task, and the forks of each state are another. Nothing is
decided here that `groups/fork_policy.py` does not decide, and nothing is kept: who begins again asks for new
sessions.
"""

import logging
from collections.abc import Iterable, Iterator
from secrets import token_hex

from attrs import define, evolve, field

from polarnode.client.blocking import PolarnodeClient
from polarnode.client.values import ClientError
from polarnode.core.task import ForkSpec, GroupSpec, TaskSpec
from polarnode.groups.fork_policy import ForkPolicy
from polarnode.groups.group import Group

logger = logging.getLogger(__name__)

# a fork that this node cannot make, as where its session was pruned; anything else is the caller's to know
REFUSED = frozenset({400, 404, 409, 410})


@define(eq=False)
class _Tree:
    """A problem's sessions and forks. `open`: tasks that are not over."""

    spec: TaskSpec
    open: set[str]
    groups: list[Group] = field(factory=list)


def sample_trees(
    client: PolarnodeClient, specs: Iterable[TaskSpec], policy: ForkPolicy
) -> Iterator[tuple[Group, ...]]:
    """Yield each task's groups when all are over: that of its sessions first, then those of their forks, a
    group for each state. `tree_rows_of` takes them.

    `num_samples` of a task is the number of its sessions and forks together; how many begin without a fork is
    `policy.sessions`. They fork by replay, once all sessions of their task have ended, and only where they
    are usable. A fork that the node refuses is logged and left out. Raises Refused for a task whose samples
    the policy cannot divide, before anything is submitted.
    """
    whole = [evolve(spec, task_id=spec.task_id or f"tree-{token_hex(8)}") for spec in specs]
    begun = [
        evolve(spec, num_samples=policy.sessions(spec.num_samples), group=_requirements(spec))
        for spec in whole
    ]
    after = client.status()["journal"]["last_seq"]
    trees: dict[str, _Tree] = {}  # by task
    for spec in begun:
        submitted = client.submit(spec)
        trees[submitted.task_id] = _Tree(spec=spec, open={submitted.task_id})
    groups = client.groups(after=after, turns="full", follow=True)
    while trees:
        group = next(groups)
        tree = trees.pop(group.task_id, None)
        if tree is None:
            continue  # another trainer's
        tree.open.discard(group.task_id)
        tree.groups.append(group)
        if len(tree.groups) == 1:
            for task_id in _forked(client, tree, group, policy):
                tree.open.add(task_id)
                trees[task_id] = tree
        if not tree.open:
            yield tuple(tree.groups)


def _requirements(spec: TaskSpec) -> GroupSpec:
    """What is required of each group of a tree. Forks of one state may all end alike, and say much about the
    turn before it; a number of usable sessions is one of the whole group.
    """
    return evolve(spec.group, drop_uniform_reward=False, early_stop_min=None, min_usable=1)


def _forked(client: PolarnodeClient, tree: _Tree, group: Group, policy: ForkPolicy) -> Iterator[str]:
    """Submit the forks of a group's usable sessions; the ids of their tasks."""
    for trajectory in group.usable:
        turns = policy.turns(trajectory)
        for turn in sorted(set(turns)):
            fork = ForkSpec(session=trajectory.session_id, turn=turn, by="replay")
            spec = evolve(
                tree.spec,
                task_id=f"{tree.spec.task_id}.{trajectory.sample_index}.{turn}",
                num_samples=turns.count(turn),
                fork=fork,
            )
            try:
                yield client.submit(spec).task_id
            except ClientError as error:
                if error.status not in REFUSED:
                    raise
                logger.warning("%s is not forked before turn %d: %s", trajectory.session_id, turn, error)
