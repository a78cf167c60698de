"""NeMo Gym's agent server as a program, before a real node: rows of a dataset in, rollouts with their tokens
out.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gym_models import AggregateMetrics, GymResponse, VerifyResponse, message_log
from recovery_kit import (
    AT_ONCE,
    HARNESS,
    TOKEN,
    Place,
    ServingNode,
    free_port,
    place_at,
    short_temporary,
    until,
)

from polarnode.cli import main, serve

pytestmark = pytest.mark.podman

TEMPLATE = """
instruction = "{{input}}"

[harness]
name = "shell"
command = ["python3", "/work/ledger.py", '{"turns": {{row.turns}}, "stream": false}']

[evaluator]
name = "command"
[evaluator.config]
script = 'test "$(wc -l < ledger.jsonl)" -eq {{row.lines}}'

[[runtime.files]]
path = "ledger.py"
source = "ledger.py"
"""


@pytest.fixture
def place(podman_works: None, tmp_path: Path) -> Iterator[Place]:
    with short_temporary() as temporary:
        yield place_at(tmp_path, temporary, settings=AT_ONCE)


@contextmanager
def agent(node: ServingNode, template: Path) -> Iterator[str]:
    """The address of an agent server, which ends when it is asked to."""
    port = free_port()
    program = (
        sys.executable,
        "-m",
        "polarnode.cli",
        "gym-agent",
        "--task-template",
        str(template),
        "--port",
        str(port),
    )
    process = subprocess.Popen(
        [*program, "--url", f"http://127.0.0.1:{node.port}", "--token", TOKEN], stdin=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _answers(url, process), "the agent server answers")
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()


def _answers(url: str, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, "the agent server ended"
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def rollout(url: str, row: "dict[str, Any]") -> VerifyResponse:
    answer = httpx.post(
        f"{url}/run", json={"responses_create_params": {"input": "Keep a ledger."}} | row, timeout=600
    )
    assert answer.status_code == 200, answer.text
    return VerifyResponse.model_validate(answer.json())


def test_rollout_tokens_match_trajectories(place: Place, tmp_path: Path) -> None:
    (tmp_path / "ledger.py").write_text(HARNESS.read_text())
    template = tmp_path / "template.toml"
    template.write_text(TEMPLATE)
    rows = [{"turns": 2, "lines": 3, "_ng_rollout_id": "0-0"}, {"turns": 1, "lines": 9, "_ng_task_index": 1}]
    with place.serving() as node, agent(node, template) as url:
        with ThreadPoolExecutor() as pool:
            good, bad = pool.map(lambda row: rollout(url, row), rows)
        assert [each.reward for each in (good, bad)] == [1.0, 0.0]
        assert not good.mask_sample
        for answer, turns in ((good, 2), (bad, 1)):
            log = message_log(answer.response)
            assert [role for role, _ in log] == ["user", "assistant"] * turns
            told: Any = (answer.model_extra or {})["polarnode"]
            (trace,) = node.client.trajectory(told["session_id"]).traces
            assert [token for _, ids in log for token in ids] == list(trace.token_ids)
            assert told["delivered_tokens"] == told["trainable_tokens"] == trace.loss_mask.count(1)
        again = rollout(url, rows[0])
        assert (again.model_extra or {})["polarnode"] == (good.model_extra or {})["polarnode"], (
            "a rollout with a name is one session"
        )
        called = httpx.post(f"{url}/v1/responses", json={"input": "x"}, timeout=600)
        assert (called.status_code, "only /run has" in called.json()["detail"]) == (422, True)
        metrics = httpx.post(
            f"{url}/aggregate_metrics",
            json={
                "verify_responses": [json.loads(good.model_dump_json()), json.loads(bad.model_dump_json())]
            },
        )
        assert AggregateMetrics.model_validate(metrics.json()).key_metrics == {"mean/reward": 0.5}


def test_call_alone_and_client_that_leaves(place: Place, tmp_path: Path) -> None:
    """An instruction alone is an answer, and a client that leaves takes its session along."""
    (tmp_path / "ledger.py").write_text(HARNESS.read_text())
    template = tmp_path / "template.toml"
    template.write_text(
        TEMPLATE.replace("{{row.turns}}", "null")
        .replace("{{row.lines}}", "1")
        .replace("[evaluator]", "[budgets]\nmax_turns = 1\n[evaluator]")
    )
    endless = tmp_path / "endless.toml"
    endless.write_text(
        template.read_text()
        .replace("[budgets]\nmax_turns = 1\n", "")
        .replace('"stream": false', '"stream": false, "pause": 0.5')
    )
    with place.serving() as node:
        with agent(node, template) as url:
            called = httpx.post(f"{url}/v1/responses", json={"input": "Go.", "temperature": 0.5}, timeout=600)
            answer = GymResponse.model_validate(called.json())
            assert [role for role, _ in message_log(answer)] == ["user", "assistant"]
            assert answer.temperature == 0.5
        with agent(node, endless) as url:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/run", json={"responses_create_params": {"input": "Go on."}}, timeout=5)
            until(
                lambda: next(task["counts"] for task in node.client.tasks()) == {"cancelled": 1},
                "the session nobody waits for is cancelled",
            )


def test_invalid_template_ends_with_sentence(tmp_path: Path) -> None:
    template = tmp_path / "template.toml"
    template.write_text('instruction = "{{inptu}}"\n')
    ended = subprocess.run(
        [sys.executable, "-m", "polarnode.cli", "gym-agent", "--task-template", str(template)],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert "is no placeholder of a task template" in ended.stderr
    assert "gym-agent" in main.commands
    assert serve.serve_agent
