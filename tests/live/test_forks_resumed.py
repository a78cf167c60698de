"""Forks by resume of a whole node, with real harnesses in real containers: several go on from one state, each its
own way, and what was sampled is trained once.

Which harnesses run is chosen as in `test_forks_live.py`.
"""

import json
from collections.abc import Iterator
from itertools import pairwise

import pytest
from forking_kit import RESUMING, forking_node, parameters, prompt, task, told, trained
from live_kit import ServingNode

from polarnode.client import ClientError
from polarnode.core.trajectory import ForkedFrom
from polarnode.groups import forests_of, tree_rows_of
from polarnode.providers.volatile import RESUME_MARKER

pytestmark = [pytest.mark.podman, pytest.mark.harness]

TURN = 3


@pytest.fixture(scope="module")
def forking(podman_works: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingNode]:
    folder = tmp_path_factory.mktemp("forking")
    with forking_node(folder, run_limit=2, ready_limit=1, init_limit=2, warm=0) as node:
        yield node


@pytest.mark.parametrize("harness", parameters(RESUMING))
def test_forks_continue_one_state_separately(forking: ServingNode, harness: str) -> None:
    [name] = forking.submit(**task(harness, "long-5", snapshot_at=[0, TURN]))
    parent = forking.finished(name)
    assert parent.outcome.status == "completed", parent.outcome
    fork = {"session": name, "turn": TURN}
    forks = [
        forking.finished(each) for each in forking.submit(**task(harness, "long-5", fork=fork, num_samples=2))
    ]
    for found in forks:
        assert found.outcome.status == "completed", found.outcome
        assert found.forked_from == ForkedFrom(session_id=name, turn=TURN, got=TURN, by="resume")
        own, theirs = found.turns, parent.turns
        assert [turn.sampled for turn in own[:TURN]] == [turn.sampled for turn in theirs[:TURN]]
        # the same prompt, token for token, and the same workdir
        assert prompt(own[TURN]) == prompt(theirs[TURN])
        assert told(own[TURN + 1], "before") == told(theirs[TURN], "after")
        assert {turn.kind for turn in own[1:]} == {"extend"}
        assert trained(found) == sum(len(turn.sampled) for turn in own[TURN:])
        assert RESUME_MARKER not in json.dumps([str(turn.new_messages) for turn in own])
    ways = [[list(turn.sampled) for turn in found.turns[TURN:]] for found in (parent, *forks)]
    assert all(one != other for one, other in pairwise([*ways, ways[0]]))
    # before the first answer there is nothing to go on with but the instruction
    [first] = forking.submit(**task(harness, "long-5", fork={"session": name, "turn": 0}))
    assert forking.finished(first).forked_from == ForkedFrom(session_id=name, turn=0, got=0, by="resume")
    assert forking.finished(first).turns[0].before_key == parent.turns[0].before_key


def test_tree_forks_resume_from_snapshots(forking: ServingNode) -> None:
    fork = {"at": "even", "per_session": 2}
    names = forking.submit(
        **task("pi", "long-4", num_samples=3, group={"fork": fork}, snapshot_at={"every": 1})
    )
    root, *forks = [forking.finished(each) for each in names]
    # a snapshot before each turn but the first, and the states in the middle of those
    assert [each.forked_from for each in forks] == [
        ForkedFrom(session_id=root.session_id, turn=turn, got=turn, by="resume") for turn in (2, 3)
    ]
    for found in forks:
        assert found.outcome.status == "completed", found.outcome
        turn = found.inherited
        assert found.turns[turn].before_key == root.turns[turn].before_key
        assert told(found.turns[turn + 1], "before") == told(root.turns[turn], "after")
    group = next(forking.client.groups(task_id=root.task_id))
    assert (group.state, group.tree, len(group.usable)) == ("complete", True, 3)
    rows = tree_rows_of(forests_of([group]))
    assert sum(row.tokens for row in rows) == sum(trained(each) for each in (root, *forks))
    assert [each.session_id for each in forking.client.forks(root.session_id)] == names[1:]


def test_state_without_snapshot_is_refused(forking: ServingNode) -> None:
    """A state with living processes, or without a snapshot, is refused."""
    [name] = forking.submit(**task("pi", "living-3", snapshot_at=[1, 3]))
    assert forking.finished(name).outcome.status == "completed"
    with pytest.raises(ClientError, match=r"processes lived that were not there at the first call.*sleep"):
        forking.submit(**task("pi", "living-3", fork={"session": name, "turn": 3}))
    with pytest.raises(
        ClientError, match=r"there is no snapshot of session .* at turn 2 .there are some at 1, 3"
    ):
        forking.submit(**task("pi", "living-3", fork={"session": name, "turn": 2}))
    # before the process there was none
    [fork] = forking.submit(**task("pi", "living-3", fork={"session": name, "turn": 1}))
    assert forking.finished(fork).outcome.status == "completed"
