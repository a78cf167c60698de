"""Forks by replay on a whole node: containers of Podman, a program that knows nothing of it, a parent of an
earlier life, and a kill.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recovery_kit import (
    AT_ONCE,
    Place,
    ServingNode,
    ledgers_in_logs,
    place_at,
    short_temporary,
    texts_of,
    until,
)

from polarnode.core.trajectory import ForkedFrom, Trajectory

pytestmark = pytest.mark.podman

TURNS = 6


@pytest.fixture
def place(podman_works: None, tmp_path: Path) -> Iterator[Place]:
    with short_temporary() as temporary:
        yield place_at(tmp_path, temporary, settings=AT_ONCE)


def task_of(place: Place, name: str, **more: Any) -> dict[str, Any]:
    """Six turns with the same words in every session, and half a second between them."""
    return place.task(turns=TURNS, pause=0.5, begin="the same way") | {"task_id": name} | more


def session_of(node: ServingNode, name: str) -> str:
    return str(node.client.task(name)["sessions"][0]["session_id"])


def finished(node: ServingNode, name: str) -> list[Trajectory]:
    until(lambda: node.client.task(name)["finished"], f"{name} is over")
    return [
        node.client.trajectory(each["session_id"], turns="full")
        for each in node.client.task(name)["sessions"]
    ]


def test_forks_after_restart_and_kill(place: Place) -> None:
    """Forks of sessions of an earlier life, and a fork whose node is killed."""
    with place.serving() as node:
        node.client.submit(task_of(place, "parent"))
        [parent] = finished(node, "parent")
    fork = {"session": parent.session_id, "turn": 3, "by": "replay"}
    asked = ForkedFrom(session_id=parent.session_id, turn=3, got=3, by="replay")
    with place.serving() as node:
        node.client.submit(task_of(place, "forks", num_samples=2, fork=fork))
        forks = finished(node, "forks")
        node.client.submit(task_of(place, "killed", fork=fork))
        lost = session_of(node, "killed")
        until(lambda: node.client.session(lost)["session"]["turns"] >= 4, "a turn of its own is recorded")
        node.process.kill()
    with place.serving() as node:
        [again] = finished(node, "killed")
        killed = node.client.trajectory(lost)
    for each in (*forks, again):
        assert each.outcome.status == "completed", each.outcome
        assert (each.forked_from, len(each.turns)) == (asked, TURNS)
        assert each.sampled_tokens == each.trainable_tokens
        assert [turn.sampled for turn in each.turns[:3]] == [turn.sampled for turn in parent.turns[:3]]
    assert killed.outcome.status == "interrupted"
    assert (killed.retried_as, killed.forked_from, again.attempt) == (again.session_id, asked, 1)
    given = texts_of(parent)[:3]
    heard = [ledger.texts for ledger in ledgers_in_logs(place.state_dir)]
    assert len(heard) == 5, "the parent, two forks, and both attempts of the third"
    assert all(texts[:3] == given for texts in heard)
    assert texts_of(again) in heard
