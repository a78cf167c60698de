"""Trees from a trainer's side: what is submitted, and what is yielded."""

from collections.abc import Iterator
from typing import Any

from attrs import define, evolve, field
from trainers_kit import group_of, make_turn, publish

from polarnode.client import PolarnodeClient
from polarnode.client.trees import sample_trees
from polarnode.core.status import Submitted
from polarnode.core.task import ForkPolicy, GroupSpec, HarnessSpec, TaskSpec
from polarnode.groups import Group

SPEC = TaskSpec(
    instruction="do it",
    harness=HarnessSpec(name="pi"),
    num_samples=6,
    task_id="t",
    group=GroupSpec(drop_uniform_reward=True, early_stop_min=4, min_usable=3),
)
POLICY = ForkPolicy(at=(1, 2), per_session=2)


@define(eq=False)
class Node:
    """Groups end in the other order than their tasks were submitted, after one of somebody else."""

    taken: list[TaskSpec] = field(factory=list)

    def status(self) -> dict[str, Any]:
        return {"journal": {"last_seq": 17}}

    def submit(self, spec: TaskSpec) -> Submitted:
        self.taken.append(spec)
        return Submitted(task_id=str(spec.task_id), session_ids=())

    def groups(self, *, after: int, turns: str, follow: bool) -> Iterator[Group]:
        assert (after, turns, follow) == (17, "full", True)
        for name in ("somebody-elses", *reversed([str(spec.task_id) for spec in self.taken])):
            yield evolve(group_of(publish([make_turn(0, None, [1], [2])])), task_id=name)
        raise AssertionError("waits for a group that nobody asked for")


def sampled(node: Node, *specs: TaskSpec) -> list[list[str]]:
    client: PolarnodeClient = node  # type: ignore[assignment]
    return [[group.task_id for group in forest] for forest in sample_trees(client, specs, POLICY)]


def test_each_tree_is_one_task() -> None:
    node = Node()
    assert sampled(node, SPEC, evolve(SPEC, task_id="u")) == [["u"], ["t"]]
    assert [each.num_samples for each in node.taken] == [6, 6]
    assert [each.group for each in node.taken] == [evolve(SPEC.group, fork=POLICY)] * 2


def test_without_trees_none_is_awaited() -> None:
    assert sampled(Node()) == []
