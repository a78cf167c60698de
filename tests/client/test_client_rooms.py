"""Weights and captures through every client: the same contract as test_client_contract.py, over their own
rooms of the node.
"""

import pickle
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from captures_kit import open_capture_node
from client_kit import KINDS, here, open_client
from fakes_engine import ScriptedEngine
from plane_kit import CONTEXT, answers
from weights_kit import open_weights_plane, simulated_tiny

from polarnode.client import ClientError
from polarnode.node.config import TINY_MODEL


@pytest.fixture(params=KINDS)
def kind(request: Any) -> str:
    return str(request.param)


# ── weights ───────────────────────────────────────────────────────────────────


def test_weights_update_and_generation_pause(kind: str, tmp_path: Path) -> None:
    with here() as node, ExitStack() as stack:
        plane = node.open(open_weights_plane(simulated_tiny(tmp_path), tmp_path / "weights.sqlite"))
        client = stack.enter_context(open_client(kind, plane.node.url, token="secret", patience_s=5.0))
        assert (client.weights().version, client.weights().history) == ("0", ())
        report = client.update_weights("1", path=TINY_MODEL)
        assert (report.version, report.mode, report.created, [host.ok for host in report.hosts]) == (
            "1",
            "in_place",
            True,
            [True],
        )
        assert client.update_weights("1", path=TINY_MODEL).created is False
        with pytest.raises(ClientError) as other:
            client.update_weights("1", path=tmp_path)
        assert other.value.status == 409
        assert client.pause("retract").paused == "retract"
        # which a simulated engine says, where a real one gives it
        with pytest.raises(ClientError, match="no memory to give back"):
            client.release_memory(["kv_cache"])
        assert client.resume().paused is None
        assert [(each.version, each.source["kind"]) for each in client.weights().history] == [("1", "disk")]


def test_bucketed_weights_are_one_version(kind: str, tmp_path: Path) -> None:
    bucket = {"payloads": [b64encode(pickle.dumps([])).decode()]}

    def breaking() -> "Iterator[dict[str, Any]]":
        yield bucket
        raise ZeroDivisionError("of the trainer")

    with here() as node, ExitStack() as stack:
        plane = node.open(open_weights_plane(simulated_tiny(tmp_path), tmp_path / "weights.sqlite"))
        client = stack.enter_context(open_client(kind, plane.node.url, token="secret", patience_s=5.0))
        report = client.push_weights("1", iter([bucket, bucket]), mode="retract")
        assert (report.version, report.source, report.created) == (
            "1",
            {"kind": "tensor", "buckets": "2"},
            True,
        )
        with pytest.raises(ZeroDivisionError, match="of the trainer"):
            client.push_weights("2", breaking())
        assert (client.weights().version, client.weights().updating) == ("1", None)
        with pytest.raises(ClientError, match="payload"):
            client.push_weights("2", [{"payloads": ["no base64!"]}])
        with pytest.raises(ClientError, match="group"):
            client.push_weights("2", [], kind="distributed", group="nobodys")
        with pytest.raises(ClientError, match="group"):
            client.leave_weights_group()
        assert client.push_weights("2", [bucket]).version == "2", (
            "what failed is given up, and in nobody's way"
        )


# ── captures ──────────────────────────────────────────────────────────────────


def scripted() -> ScriptedEngine:
    return ScriptedEngine(reply=answers("Bread.", "Loaf."), vocab_size=4096, context_length=CONTEXT)


def test_own_agent_is_captured(kind: str, tmp_path: Path) -> None:
    with here() as node, ExitStack() as stack:
        desk = node.open(open_capture_node(tmp_path, scripted()))
        client = stack.enter_context(open_client(kind, desk.caller.url, token="secret"))
        with client.capture(task_id="mine", metadata={"row": 7}) as session:
            with openai.OpenAI(base_url=session.openai_base_url, api_key=session.key, max_retries=0) as agent:
                agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
            session.reward, session.metrics["tests"], session.turn_rewards[0] = 0.5, 3, 0.25
        assert session.key not in repr(session)
        assert (session.result.reward, session.result.turns, session.result.outcome.status) == (
            0.5,
            1,
            "completed",
        )
        found = client.trajectory(session.session_id)
        assert (found.task_id, found.reward, found.metadata, found.metrics["evaluation"]) == (
            "mine",
            0.5,
            {"row": 7},
            {"tests": 3},
        )
        [group] = client.groups(task_id="mine")
        assert [one.session_id for one in group.usable] == [session.session_id]
        with pytest.raises(ZeroDivisionError), client.capture() as broken:
            raise ZeroDivisionError("of the agent")
        assert (broken.result.outcome.status, broken.result.outcome.reason) == (
            "failed",
            "ZeroDivisionError: of the agent",
        )
        with pytest.raises(KeyboardInterrupt), client.capture() as left:
            raise KeyboardInterrupt
        assert left.result.outcome.status == "cancelled"
        assert node.do(desk.events)[-1].startswith("task:")


def test_missing_node_hides_no_error(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with here() as node, ExitStack() as stack:
        desk = node.open(open_capture_node(tmp_path, scripted()))
        client = stack.enter_context(open_client(kind, desk.caller.url, token="secret", patience_s=0.2))
        with pytest.raises(ZeroDivisionError), client.capture():
            _ = (node.stack.close(), 1 / 0)
    assert "was not told" in caplog.text
