"""Trees of sessions and forks on a whole node, from the tasks to the rows: each sampled token once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve
from recovery_kit import AT_ONCE, Place, place_at, short_temporary

from polarnode.client.trees import sample_trees
from polarnode.core.codec import read_task
from polarnode.groups import ForkPolicy, forests_of, rows_of, tree_rows_of

pytestmark = pytest.mark.podman

TURNS = 6
# a reward of 0 or 1, whatever the session did
COIN = {"name": "command", "config": {"script": "test $(( $(od -An -N1 -tu1 /dev/urandom) % 2 )) = 0"}}


@pytest.fixture
def place(podman_works: None, tmp_path: Path) -> Iterator[Place]:
    with short_temporary() as temporary:
        yield place_at(tmp_path, temporary, settings=AT_ONCE)


def test_tree_trains_each_token_once(place: Place) -> None:
    task = place.task(turns=TURNS, begin="the same way") | {"num_samples": 6, "evaluator": COIN}
    with place.serving() as node:
        [forest] = sample_trees(node.client, [read_task(task)], ForkPolicy(at=(2, 4), per_session=2))
    [group] = forest
    assert (group.state, len(group.usable)) == ("complete", 6)
    sessions = group.usable
    roots, forks = sessions[:2], [each.forked_from for each in sessions[2:]]
    assert [(fork.turn, fork.got) for fork in forks if fork] == [(2, 2), (4, 4), (2, 2), (4, 4)]
    assert [fork.session_id for fork in forks if fork] == [roots[0].session_id] * 2 + [
        roots[1].session_id
    ] * 2
    assert forests_of(forest) == (forest,)
    rows = tree_rows_of([forest], loss="session_mean")
    sampled = sum(each.sampled_tokens for each in sessions)
    assert sum(row.tokens for row in rows) == sampled == sum(each.trainable_tokens for each in sessions)
    assert sum(sum(row.weights) for row in rows) == pytest.approx(1.0, abs=1e-4)
    flat = evolve(group, members=group.members[:2], trajectories=roots)
    assert tree_rows_of([[flat]]) == rows_of([flat]), "without their forks"
