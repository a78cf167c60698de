"""Finished sessions of a whole node, evaluated again in real containers: a node killed meanwhile goes on with
it, and nothing that was published changes by a byte.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from recovery_kit import AT_ONCE, TOKEN, Place, ServingNode, place_at, short_temporary, until

from polarnode.cli.main import main
from polarnode.core.task import EvaluatorSpec
from polarnode.groups import read_group, with_rewards
from polarnode.journal.check import check_journal

pytestmark = pytest.mark.podman

WRONG = {"name": "command", "config": {"script": "grep -q never ledger.jsonl"}}
# slow enough to be killed in its middle; what the harness left is not there before it is restored
SLOW = EvaluatorSpec(name="command", config={"script": "sleep 3; grep -q text ledger.jsonl"})
MENDED = """
[evaluator]
name = "command"
fresh_runtime = true
config.script = "grep -q text ledger.jsonl"
"""


@pytest.fixture
def place(podman_works: None, tmp_path: Path) -> Iterator[Place]:
    with short_temporary() as temporary:
        yield place_at(tmp_path, temporary, settings=AT_ONCE)


def published(node: ServingNode) -> tuple[bytes, list[tuple[int, str]]]:
    """Every trajectory as the node exports it, and every event that a usual reader gets."""
    events = [(each.seq, each.key) for each in node.client.trajectories(after=0, follow=False)]
    return b"".join(node.client.export_bytes(turns="full", arrays="base64")), events


def test_evaluation_is_fixed_and_survives_kill(place: Place, tmp_path: Path) -> None:
    """A wrong test is mended, and a node that is killed meanwhile goes on."""
    task = place.task(num_samples=2, turns=1) | {"task_id": "t", "evaluator": WRONG}
    task["runtime"]["keep_workspace"] = True
    with place.serving() as node:
        node.client.submit(task)
        until(lambda: node.client.task("t")["finished"], "the task is over")
        before = published(node)
        begun = node.client.evaluate(task_id="t", evaluator=SLOW, reason="the test was wrong")
        assert (begun.counts, begun.finished) == ({"pending": 2}, False)
        until(lambda: len(node.containers()) == 2, "both are evaluated now")
        os.kill(node.process.pid, signal.SIGKILL)
        node.process.wait()
    with place.serving() as node:
        found = node.client.evaluation(begun.evaluation_id, wait=True)
        assert [(each.state, each.n, each.first_reward, each.reward) for each in found.sessions] == [
            ("evaluated", 1, 0.0, 1.0)
        ] * 2
        mended = tmp_path / "mended.toml"
        mended.write_text(MENDED)
        url = f"http://127.0.0.1:{node.port}"
        arguments = ["evaluate", "--task", "t", "--evaluator", str(mended), "--url", url, "--token", TOKEN]
        said = CliRunner().invoke(main, arguments)
        assert said.exit_code == 0, said.output
        for each in begun.sessions:
            assert f"{each.session_id} 0 1" in " ".join(said.output.split())
        assert published(node) == before
        rewards = [each.reward for each in node.client.trajectories(kinds=("reward",), follow=False)]
        given = sorted((each.session_id, each.n, each.reason) for each in rewards if each is not None)
        ids = sorted(each.session_id for each in begun.sessions)
        assert given == [(one, n, ("the test was wrong", None)[n - 1]) for one in ids for n in (1, 2)]
        lines = b"".join(node.client.export_bytes(kind="rewards")).splitlines()
        assert len(lines) == 4
        events = list(node.client.trajectories(task_id="t", after=0, follow=False))
        (body,) = (each.data for each in events if each.kind == "group")
        group = read_group(body, [each.trajectory for each in events if each.trajectory is not None])
        later = with_rewards(group, [each for each in rewards if each is not None])
        assert [each.reward for each in group.members] == [0.0, 0.0]
        assert [each.reward for each in later.members] == [1.0, 1.0]
        assert {trace.reward for each in later.trajectories for trace in each.traces} == {1.0}
        assert node.client.status()["evaluations"] == {"open": 0, "sessions": 0}
        until(lambda: not node.containers(), "no container is left")
        assert len(list((place.state_dir / "sessions").glob("*.workspace.tar"))) == 2
        assert not list((place.state_dir / "sessions").glob(".restoring-*"))
    assert check_journal(place.state_dir / "journal.sqlite").faults == ()
