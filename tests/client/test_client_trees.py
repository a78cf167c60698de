"""Sessions and their forks in place of a group: what is submitted, and when, and what is yielded."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from attrs import define, evolve, field
from trainers_kit import make_turn, publish

from polarnode.client import ClientError, PolarnodeClient
from polarnode.client.trees import sample_trees
from polarnode.core.errors import Refused
from polarnode.core.status import Submitted
from polarnode.core.task import GroupSpec, HarnessSpec, TaskSpec
from polarnode.core.trajectory import Trajectory
from polarnode.groups import Group, Member
from polarnode.groups.fork_policy import ForkPolicy

SPEC = TaskSpec(
    instruction="do it",
    harness=HarnessSpec(name="pi"),
    num_samples=6,
    task_id="t",
    group=GroupSpec(drop_uniform_reward=True, early_stop_min=4, min_usable=3),
)


@define(eq=False)
class Node:
    """Groups end in the order in which their tasks were submitted, after one of somebody else."""

    refuses: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()
    taken: list[TaskSpec] = field(factory=list)

    def status(self) -> dict[str, Any]:
        return {"journal": {"last_seq": 17}}

    def submit(self, spec: TaskSpec) -> Submitted:
        if spec.task_id in self.refuses:
            raise ClientError("the session was pruned", status=410, type="gone")
        self.taken.append(spec)
        return Submitted(task_id=str(spec.task_id), session_ids=())

    def groups(self, *, after: int, turns: str, follow: bool) -> Iterator[Group]:
        assert (after, turns, follow) == (17, "full", True)
        yield self.group("somebody-elses", 1)
        for spec in self.taken:  # which grows meanwhile
            yield self.group(str(spec.task_id), spec.num_samples)

    def group(self, task_id: str, count: int) -> Group:
        sessions: Sequence[Trajectory] = [
            evolve(self.session(), session_id=f"{task_id}/{index}", sample_index=index)
            for index in range(count)
        ]
        members = tuple(
            Member(
                session_id=each.session_id,
                sample_index=each.sample_index,
                status="completed",
                reward=1.0,
                usable=each.session_id not in self.unusable,
            )
            for each in sessions
        )
        return Group(
            task_id=task_id, group_id=task_id, state="complete", members=members, trajectories=tuple(sessions)
        )

    def session(self) -> Trajectory:
        turns = [make_turn(0, None, [1], [2])]
        for index in range(1, 4):
            turns.append(make_turn(index, turns[-1], [1], [2]))
        return publish(turns)


def sampled(node: Node, *specs: TaskSpec, policy: ForkPolicy) -> list[list[str]]:
    client: PolarnodeClient = node  # type: ignore[assignment]
    return [[group.task_id for group in tree] for tree in sample_trees(client, specs, policy)]


def test_sessions_are_forked_when_their_group_is_over() -> None:
    node = Node()
    found = sampled(node, SPEC, evolve(SPEC, task_id="u"), policy=ForkPolicy(at=(1, 2), per_session=2))
    assert found == [["t", "t.0.1", "t.0.2", "t.1.1", "t.1.2"], ["u", "u.0.1", "u.0.2", "u.1.1", "u.1.2"]]
    assert [each.num_samples for each in node.taken] == [2, 2, *[1] * 8]
    roots, fork = node.taken[0], node.taken[3]
    assert roots.fork is None
    assert fork.fork is not None
    assert (fork.fork.session, fork.fork.turn, fork.fork.by) == ("t/0", 2, "replay")
    assert all(each.group == GroupSpec() for each in node.taken)
    assert (fork.instruction, fork.harness) == (SPEC.instruction, SPEC.harness)


def test_forks_of_one_state_are_one_group() -> None:
    node = Node()
    found = sampled(node, SPEC, policy=ForkPolicy(at=(3,), per_session=5))
    assert found == [["t", "t.0.3"]]
    assert node.taken[1].num_samples == 5


def test_a_session_that_is_not_usable_and_a_fork_that_is_refused_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = Node(refuses=("t.1.1",), unusable=("t/0",))
    with caplog.at_level(logging.WARNING):
        found = sampled(node, SPEC, policy=ForkPolicy(at=(1, 2), per_session=2))
    assert found == [["t", "t.1.2"]]
    assert "t/1 is not forked before turn 1: the session was pruned" in caplog.text


def test_samples_that_cannot_be_divided_are_refused_before_anything_is_submitted() -> None:
    node = Node()
    with pytest.raises(Refused, match="6 samples are no sessions with 3 forks each"):
        sampled(node, evolve(SPEC, num_samples=8), SPEC, policy=ForkPolicy(per_session=3))
    assert node.taken == []
