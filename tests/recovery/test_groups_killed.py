"""Groups that stop early on a node that is killed again and again: each is told of once, has enough, and
begins nothing once it has.

The moments come from a seed that is printed; POLARNODE_KILL_SEED gives it again.
"""

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from recovery_kit import Account, Place, account, place_at, short_temporary, until

from polarnode.client import PolarnodeClient
from polarnode.core.task import GroupSpec
from polarnode.groups import Group, facts_of, make_member, read_group, stopped_early

pytestmark = pytest.mark.podman

KILLS = 3
SEED = int(os.environ.get("POLARNODE_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
SPEC = GroupSpec(early_stop_min=2, min_usable=2)
SAMPLES = 5
SETTINGS = """
engine = "simulated"
warm = 1
init_limit = 2
run_limit = 3
[simulated]
tokens_per_s = 200.0
first_token_s = 0.02
answer_tokens = 24
chunk_tokens = 8
"""


@pytest.fixture
def place(podman_works: None, tmp_path: Path) -> Iterator[Place]:
    with short_temporary() as temporary:
        yield place_at(tmp_path, temporary, settings=SETTINGS)


def submitted(place: Place, client: PolarnodeClient, count: int) -> None:
    for number in range(count):
        task = place.task(retries=10, num_samples=SAMPLES, turns=2 + number % 3)
        client.submit(
            task
            | {
                "task_id": f"task-{number}",
                "group": {"early_stop_min": SPEC.early_stop_min, "min_usable": SPEC.min_usable},
            }
        )


def unfinished(client: PolarnodeClient) -> int:
    return sum(not task["finished"] for task in client.tasks(limit=100))


def test_early_stop_survives_node_kills(place: Place) -> None:
    chance = random.Random(SEED)
    print(f"POLARNODE_KILL_SEED={SEED}")
    with place.serving() as node:
        submitted(place, node.client, 6)
        groups_over(node.client, 1)
        node.process.kill()
        node.process.wait()
    for number in range(1, KILLS):
        with place.serving() as node:
            groups_over(node.client, number)
            time.sleep(chance.uniform(0.0, 0.5))  # not to wait for anything: to be killed at any moment
            node.process.kill()
            node.process.wait()
    with place.serving() as node:
        until(lambda: unfinished(node.client) == 0, "all groups are over")
        groups = {
            event.data["task_id"]: read_group(event.data)
            for event in node.client.trajectories(after=0, follow=False)
            if event.kind == "group"
        }
    found = account(place.state_dir)
    assert len(groups) == 6
    for task_id, group in groups.items():
        check_group(group, found, task_id)


def groups_over(client: PolarnodeClient, count: int) -> None:
    until(lambda: unfinished(client) <= 6 - count, f"{count} groups are over")


def check_group(group: Group, found: Account, task_id: str) -> None:
    sessions = found.tasks[task_id]
    assert [member.session_id for member in group.members] == [each.session_id for each in sessions]
    assert [make_member(SPEC, facts_of(each)) for each in sessions] == list(group.members), (
        "what is told is what the trajectories say"
    )
    usable = {member.session_id for member in group.members if member.usable}
    assert len(usable) >= 2
    assert group.state == ("complete" if len(usable) == SAMPLES else "early")
    assert all(
        member.usable or stopped_early(each.outcome)
        for member, each in zip(group.members, sessions, strict=True)
    )
    numbers = {key.partition(":")[2]: seq for seq, key in found.events}
    enough = sorted(numbers[each] for each in usable)[1]
    retried = [
        each.session_id
        for each in found.trajectories.values()
        if each.task_id == task_id and each.retried_as is not None
    ]
    assert all(numbers[each] < enough for each in retried), (
        "nothing is begun again in a group that has enough"
    )
