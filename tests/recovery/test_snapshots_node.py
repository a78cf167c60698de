"""Snapshots of a whole node's sessions in real containers: what the harness had written before the turn is in
them, they are listed, counted and told, and they outlive the node.
"""

import json
import os
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from recovery_kit import AT_ONCE, TOKEN, Place, place_at, short_temporary, until

from polarnode.cli.main import main

pytestmark = pytest.mark.podman


@pytest.fixture
def place(podman_works: None, tmp_path: Path) -> Iterator[Place]:
    with short_temporary() as temporary:
        yield place_at(tmp_path, temporary, settings=AT_ONCE)


def answers_in(tar: Path) -> list[str]:
    """What the harness had been told by the model when the snapshot was taken."""
    with tarfile.open(tar) as archive:
        found = archive.extractfile("work/ledger.jsonl")
        assert found is not None
        return [json.loads(line)["text"] for line in found.read().splitlines()[1:]]


def test_snapshots_before_turns_survive_restart(place: Place) -> None:
    task = place.task(num_samples=2, turns=4) | {"task_id": "t", "snapshot_at": [0, 2]}
    with place.serving() as node:
        node.client.submit(task)
        until(lambda: node.client.task("t")["finished"], "the task is over")
        sessions = [each["session_id"] for each in node.client.task("t")["sessions"]]
        for session in sessions:
            found = node.client.trajectory(session, turns="full")
            kept = node.client.snapshots(session)
            assert [(each.turn, each.resumable, each.why_not) for each in kept] == [
                (0, True, None),
                (2, True, None),
            ]
            told = found.metrics["snapshots"]
            assert isinstance(told, dict)
            assert (told["turns"], told["not_taken"]) == ([0, 2], {})
            assert told["bytes"] == sum(each.bytes for each in kept)
            assert 0 < found.timing.held_s < found.timing.run_s
            tars = [place.state_dir / "sessions" / f"{session}.snapshot-{turn}.tar" for turn in (0, 2)]
            said = [turn.answer.text for turn in found.turns if turn.answer is not None]
            assert [answers_in(tar) for tar in tars] == [[], said[:2]]
        url = f"http://127.0.0.1:{node.port}"
        counted = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).text
        assert "polarnode_snapshots_total 4.0" in counted
        shown = CliRunner().invoke(main, ["inspect", sessions[0], "--url", url, "--token", TOKEN])
        assert "snapshot before turn 2: " in shown.output, shown.output
        os.kill(node.process.pid, signal.SIGKILL)
        node.process.wait()
    with place.serving() as node:
        assert [each.turn for each in node.client.snapshots(sessions[1])] == [0, 2]
