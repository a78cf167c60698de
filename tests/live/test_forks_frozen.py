"""Forks by freezing of a whole node, with real harnesses in real containers and CRIU: copies of one harness go on,
each its own way, with the processes that lived beside it.

Which harnesses run is chosen as in `test_forks_live.py`. Where this machine cannot freeze, they are skipped with
doctor's own words. POLARNODE_MATRIX_OUT names a file that takes a line of JSON for each.
"""

import os
import re
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
import trio
from forking_kit import forking_node, parameters, prompt, task, told, trained
from live_kit import ServingNode, keep_row
from matrix_cases import IN_CI
from podman_parts import LIMITS

from polarnode.client import ClientError
from polarnode.containers.probe import default_state_dir, probe
from polarnode.core.trajectory import ForkedFrom, Trajectory, Turn
from polarnode.harnesses import HARNESSES

pytestmark = [pytest.mark.podman, pytest.mark.harness]

TURN = 3
SAMPLES = int(os.environ.get("POLARNODE_FROZEN_FORKS", "2"))


@pytest.fixture(scope="module")
def freezing(podman_works: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingNode]:
    obstacle = trio.run(probe, default_state_dir(), LIMITS).freezing_obstacle
    if obstacle is not None:
        pytest.skip(f"this machine cannot freeze sessions: {obstacle}")
    folder = tmp_path_factory.mktemp("freezing")
    with forking_node(folder, run_limit=1, ready_limit=1, init_limit=1, warm=0) as node:
        yield node


def counted(turn: Turn) -> int:
    """How far the process that counts has come, by a tool result of a turn's request."""
    assert turn.new_messages is not None
    text = "".join(each.text for each in turn.new_messages.messages)
    return int(re.findall(r"counted=(\d+)", text)[-1])


def difference(fork: Trajectory, parent: Trajectory) -> str | None:
    """What a fork has otherwise than its parent in the state before turn TURN."""
    if fork.outcome.status != "completed":
        return str(fork.outcome)
    own, theirs = fork.turns, parent.turns
    if [list(turn.sampled) for turn in own[:TURN]] != [list(turn.sampled) for turn in theirs[:TURN]]:
        return "inherited turns"
    if own[TURN].before_key != theirs[TURN].before_key:
        return "path key"
    if prompt(own[TURN]) != prompt(theirs[TURN]):
        return "prompt"
    if told(own[TURN + 1], "before") != told(theirs[TURN], "after"):
        return "workspace"
    # its process counts on from where it was, and not from one
    return None if counted(own[TURN + 1]) > counted(theirs[TURN]) else "processes"


@pytest.mark.parametrize("harness", parameters(IN_CI))
def test_frozen_copies_continue_separately(freezing: ServingNode, harness: str) -> None:
    at = {"turns": [TURN], "freeze": True}
    [name] = freezing.submit(**task(harness, "counting-5", snapshot_at=at))
    parent = freezing.finished(name)
    assert parent.outcome.status == "completed", parent.outcome
    [snapshot] = freezing.client.snapshots(name)
    assert snapshot.frozen, snapshot.not_frozen
    fork = {"session": name, "turn": TURN, "by": "freeze"}
    forks, seconds = list[Trajectory](), list[float]()
    for _ in range(SAMPLES):
        submitted = time.time()
        [each] = freezing.submit(**task(harness, "counting-5", fork=fork))
        found = freezing.finished(each)
        forks.append(found)
        first = found.turns[TURN] if len(found.turns) > TURN else None
        seconds += [] if first is None else [first.started + (first.first_token_s or 0.0) - submitted]
    differ = [difference(found, parent) for found in forks]
    print(harness, differ, snapshot, seconds)
    keep_row(
        {
            "frozen": harness,
            "version": HARNESSES[harness].version,
            "forks": SAMPLES,
            "exact": differ.count(None),
            "held": round(snapshot.seconds, 1),
            "megabytes": snapshot.bytes >> 20,
            "seconds": round(sorted(seconds)[len(seconds) // 2], 1) if seconds else None,
        }
    )
    assert differ == [None] * SAMPLES
    for found in forks:
        assert found.outcome.exit_code == 0
        assert found.forked_from == ForkedFrom(session_id=name, turn=TURN, got=TURN, by="freeze")
        assert trained(found) == sum(len(turn.sampled) for turn in found.turns[TURN:])
    ways = [[list(turn.sampled) for turn in found.turns[TURN:]] for found in (parent, *forks)]
    assert all(one != other for one, other in pairwise(ways))


def test_uncopyable_session_is_refused(freezing: ServingNode) -> None:
    [name] = freezing.submit(**task("pi", "long-3", snapshot_at=[1]))
    assert freezing.finished(name).outcome.status == "completed"
    fork = {"session": name, "turn": 1, "by": "freeze"}
    with pytest.raises(ClientError, match=r"at turn 1: its task did not ask for snapshot_at\.freeze"):
        freezing.submit(**task("pi", "long-3", fork=fork))
    with pytest.raises(ClientError, match=r"runtime must be that of fork\.session"):
        freezing.submit(**task("pi", "long-3", fork=fork, runtime={"memory_mb": 999}))
    with pytest.raises(ClientError, match="no rule asks for one"):
        freezing.submit(**task("pi", "long-3", snapshot_at={"freeze": True}))
