"""A group on a whole node whose weights move meanwhile: what was sampled too long ago is said, and
not used.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from captures_kit import Told
from recovery_kit import Place, ServingNode, place_at, short_temporary, until

from polarnode.groups import Group, read_group
from polarnode.node.config import TINY_MODEL

pytestmark = pytest.mark.podman

SETTINGS = """
engine = "simulated"
warm = 1
[simulated]
tokens_per_s = 200.0
first_token_s = 0.02
answer_tokens = 8
"""


@pytest.fixture
def place(podman_works: None, tmp_path: Path) -> Iterator[Place]:
    with short_temporary() as temporary:
        yield place_at(tmp_path, temporary, settings=f'volumes = ["{tmp_path}"]\n{SETTINGS}')


def submitted(
    place: Place,
    node: ServingNode,
    name: str,
    group: dict[str, Any],
    *,
    flags: Path | None = None,
    **harness: Any,
) -> None:
    task = place.task(num_samples=2, **harness) | {"task_id": name, "group": group}
    if flags is not None:
        task["runtime"]["volumes"] = [{"source": str(flags), "target": "/flags"}]
    node.client.submit(task)


def group_of(node: ServingNode, name: str) -> Group:
    until(lambda: node.client.task(name)["finished"], "the group is over")
    events = list(node.client.trajectories(task_id=name, after=0, follow=False))
    (body,) = (event.data for event in events if event.kind == "group")
    return read_group(body, [event.trajectory for event in events if event.trajectory is not None])


def update(node: ServingNode, folder: Path, *versions: str) -> None:
    for version in versions:
        node.client.update_weights(version, path=shutil.copytree(TINY_MODEL, folder / version))


def test_staleness_decides_session_use(place: Place, tmp_path: Path) -> None:
    """A session says how far behind it was, and is used or not."""
    flags = tmp_path / "flags"
    flags.mkdir()
    with place.serving() as node:
        submitted(
            place,
            node,
            "slow",
            {"max_staleness": 1},
            flags=flags,
            turns=None,
            until="/flags/enough",
            pause=0.2,
        )
        sessions = [one["session_id"] for one in node.client.task("slow")["sessions"]]
        until(
            lambda: all(node.client.session(one)["session"]["turns"] for one in sessions),
            "both have sampled by the first weights",
        )
        with node.client.capture() as capture:
            Told(capture.opened.env).chat()
            update(node, tmp_path, "one", "two")
        (flags / "enough").touch()
        submitted(
            place,
            node,
            "fresh",
            {"max_staleness": 1, "drop_uniform_reward": True, "early_stop_min": 2},
            turns=1,
        )
        slow, fresh = group_of(node, "slow"), group_of(node, "fresh")
        captured = node.client.trajectory(capture.session_id)
        lines = (
            'polarnode_groups_total{state="dropped"} 2.0',
            'polarnode_stale_sessions_total{action="drop"} 2.0',
        )
        until(
            lambda: all(line in node.client.metrics() for line in lines),
            "what readers have is counted",
        )
    assert [(member.staleness, member.stale, member.usable) for member in slow.members] == [
        (2, True, False)
    ] * 2
    assert (slow.state, slow.members[0].why, slow.usable) == (
        "dropped",
        "stale: 2 weight updates behind, 1 are allowed",
        (),
    )
    assert [each.staleness for each in slow.trajectories] == [2, 2]
    assert captured.staleness == 2, "a capture's session is told of as any"
    assert [(member.staleness, member.stale, member.usable) for member in fresh.members] == [
        (0, False, True)
    ] * 2
    assert (fresh.state, str(fresh.reason)) == (
        "dropped",
        "uniform reward: 2 of 2 sessions are usable, each with 1",
    )
