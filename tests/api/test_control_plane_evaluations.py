"""Evaluations over HTTP, by the asynchronous client: of a captured session, which never had a container."""

from pathlib import Path

import pytest
from captures_kit import open_capture_node
from fakes_engine import ScriptedEngine
from plane_kit import CONTEXT

from polarnode.client import AsyncPolarnodeClient, ClientError
from polarnode.core.task import EvaluatorSpec

COMPLETED = EvaluatorSpec(name="session_completed")


async def test_captured_session_is_scored_by_turns(tmp_path: Path) -> None:
    async with (
        open_capture_node(tmp_path, ScriptedEngine(context_length=CONTEXT)) as desk,
        AsyncPolarnodeClient(desk.caller.url, token="secret", patience_s=5.0) as client,
    ):
        async with client.capture(task_id="t", group_id="g") as session:
            running = session.session_id
            with pytest.raises(
                ClientError, match=r"no session can be evaluated; .*: it is not over"
            ) as refused:
                await client.evaluate(running)
            assert (refused.value.status, refused.value.path) == (400, "$.sessions")
        found = await client.evaluate(group_id="g", evaluator=COMPLETED, reason="r", wait=True)
        (one,) = found.sessions
        assert (one.session_id, one.state, one.first_reward, one.reward) == (running, "evaluated", None, 0.0)
        assert found.spec is not None
        assert (found.spec.reason, found.counts, found.finished) == ("r", {"evaluated": 1}, True)
        async with client.trajectories(kinds=("reward",), task_id="t", follow=False) as events:
            given = [(event.key, event.data["reward"]) async for event in events]
        assert given == [(f"reward:{running}:1", 0.0)]
        async with client.trajectories(task_id="t", follow=False) as events:
            assert [event.kind async for event in events] == ["trajectory", "group", "task"]
        # an evaluator that works in a workspace says what there is none of
        command = EvaluatorSpec(name="command", config={"argv": ["true"]})
        (two,) = (await client.evaluate(running, evaluator=command, wait=True)).sessions
        assert (two.state, two.n, two.reward) == ("failed", 2, None)
        assert "set runtime.keep_workspace" in (two.error or "")


async def test_invalid_request_is_one_sentence(tmp_path: Path) -> None:
    async with (
        open_capture_node(tmp_path, ScriptedEngine(context_length=CONTEXT)) as desk,
        AsyncPolarnodeClient(desk.caller.url, token="secret", patience_s=5.0) as client,
    ):
        for body, path, sentence in (
            ({}, "$", "needs exactly one of sessions, task_id and group_id"),
            ({"task_id": "t", "group_id": "g"}, "$", "needs exactly one of"),
            ({"sessions": ["x"], "session": 1}, "$.session", "session is not a known field"),
            ({"sessions": ["x"] * 10_001}, "$.sessions", "must be at most 10000, not 10001"),
            ({"task_id": "t", "reason": "x" * 8001}, "$.reason", "must be at most 8000 characters long"),
            ({"task_id": "t"}, "$.task_id", "t has 0 sessions in the log"),
            (
                {"task_id": "t", "evaluator": {"name": "nobody"}},
                "$.evaluator.name",
                "no evaluator is called nobody",
            ),
        ):
            refused = await desk.caller.post("/v1/evaluations", body)
            assert refused.status == 400, refused.text
            assert refused.json()["error"]["path"] == path
            assert sentence in refused.json()["error"]["message"]
        with pytest.raises(ClientError, match="no evaluation 'e' is in this node's journal") as missing:
            await client.evaluation("e")
        assert missing.value.status == 404
