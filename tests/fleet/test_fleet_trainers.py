"""Trainers' plug-ins at the URL of any node of a log, unchanged: rollouts of every plug-in, TRL's two ways, and NeMo Gym's agent
server as a program. With real engines: tests/live/test_grpo_fleet_live.py.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import merge_toys
import pytest
from client_kit import free_port, here
from fleet_kit import hollow_task, open_fleet_in_thread
from gym_models import AggregateMetrics, VerifyResponse, message_log

from polarnode.client import PolarnodeClient
from polarnode.integrations import trl as plugin
from polarnode.integrations.rollout_tasks import NodeRollouts, PluginSettings, rollout_groups, task_of
from polarnode.integrations.trl import NodeWorker, PolarnodeRollout, node_reward

TOKEN = "secret"
START_S = 120.0  # the agent server imports for a second on a quiet machine
TEMPLATE = """
instruction = "{{input}}"

[harness]
name = "shell"
command = ["hollow", "{{row.seconds}}", "2"]

[evaluator]
import_path = "session_kit:READS"
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One of two hollow nodes on one log, for every test of this file."""
    with here() as thread:
        yield open_fleet_in_thread(thread, tmp_path_factory.mktemp("fleet"), nodes=2, token=TOKEN)


@pytest.fixture
def client(url: str) -> PolarnodeClient:
    return PolarnodeClient(url, token=TOKEN, patience_s=60.0)


def template(seconds: float = 0.2) -> dict[str, Any]:
    """What every task of a plug-in has in common."""
    return {name: each for name, each in hollow_task(seconds=seconds).items() if name != "num_samples"}


def settings_of(url: str, run: str, **more: Any) -> PluginSettings:
    return PluginSettings(url=url, token=TOKEN, run=run, template=template(**more), patience_s=60.0)


def nodes_of(client: PolarnodeClient, run: str) -> set[str]:
    """The nodes that ran the sessions of a run."""
    events = client.trajectories(follow=False, kinds=("trajectory",))
    return {event.data["node"] for event in events if event.data["task_id"].startswith(run)}


# ── rollouts ──────────────────────────────────────────────────────────────────


def test_plug_in_groups_from_both_nodes(url: str, client: PolarnodeClient) -> None:
    settings = settings_of(url, "groups")
    specs = [task_of(settings, {"prompt": f"do {number}"}, samples=3) for number in range(6)]
    groups = rollout_groups(settings, specs)
    assert [group.task_id for group in groups] == [spec.task_id for spec in specs]
    assert [len(group.usable) for group in groups] == [3] * 6
    assert len(nodes_of(client, "groups")) == 2


def test_leaving_trainer_cancels_its_task(url: str, client: PolarnodeClient) -> None:
    settings = settings_of(url, "leaver", seconds=600.0)

    async def leave() -> None:
        async with NodeRollouts(settings) as rollouts, anyio.create_task_group() as tasks:
            tasks.start_soon(rollouts.group, task_of(settings, {"prompt": "x"}, task_id="leaver-1"))
            with anyio.fail_after(30):
                while "leaver-1" not in [each["task_id"] for each in await rollouts.client.tasks()]:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()

    anyio.run(leave)
    next(group for group in client.groups() if group.task_id == "leaver-1")
    assert client.cancel("leaver-1") is False, "it is over, ten minutes before its sessions would be"


# ── TRL ───────────────────────────────────────────────────────────────────────


class Rows:
    """A dataset as `datasets` has them."""

    column_names = ("prompt", "polarnode")

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __getitem__(self, at: Any) -> Any:
        return [row[at] for row in self.rows] if isinstance(at, str) else self.rows[at]


def test_trl_rollout_function_gets_rows(url: str, client: PolarnodeClient) -> None:
    """What GRPOTrainer calls, with its prompts and with what it reads of the answer."""
    rows = [{"prompt": f"task {number}", "polarnode": json.dumps(template())} for number in range(3)]
    trainer = SimpleNamespace(
        train_dataset=Rows(rows),
        eval_dataset=None,
        num_generations=4,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        args=SimpleNamespace(temperature=1.0, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0),
        eos_token_ids=(merge_toys.END,),
        processing_class=SimpleNamespace(pad_token_id=0),
        state=SimpleNamespace(global_step=0),
    )
    rollout = PolarnodeRollout(url=url, token=TOKEN, run="trl", weights="none")
    found = rollout([row["prompt"] for row in rows for _ in range(4)], trainer)
    assert {len(each) for each in found.values()} == {12}
    assert node_reward([""] * 12, **{name: found[name] for name in ("reward", "unusable", "rows_left_out")})
    for name, ids, logprobs in zip(
        found["session_id"], found["completion_ids"], found["logprobs"], strict=True
    ):
        [trace] = client.trajectory(name).traces
        assert list(trace.token_ids)[-len(ids) :] == list(ids)
        assert len(logprobs) == len(ids)
    assert len(nodes_of(client, "trl")) == 2


def test_trl_async_worker_reads_groups(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TRL's own type of a row, which its own tests have."""
    monkeypatch.setattr(plugin, "samples_of", lambda group, number, *_, **__: [(number, group)])
    dataset = [{"prompt": f"task {number}"} for number in range(3)]
    worker = NodeWorker(dataset, samples=2, groups=3, url=url, token=TOKEN, task=template(), run="worker")
    worker.start()
    try:
        found = dict(worker.rollout_buffer.get(timeout=60) for _ in range(6))
        worker.check_health(60)
    finally:
        worker.stop()
    assert len({group.task_id for group in found.values()}) == 6
    assert all(len(group.usable) == 2 for group in found.values())
    assert worker.metrics_queue.get(timeout=1) == {"node/unusable": 0.0}


# ── NeMo Gym ──────────────────────────────────────────────────────────────────


@contextmanager
def agent(url: str, file: Path) -> Iterator[str]:
    """The address of an agent server before a fleet, which ends when it is asked to."""
    port = free_port()
    argv = [sys.executable, "-m", "polarnode.cli", "gym-agent", "--task-template", str(file)]
    argv += ["--port", str(port), "--url", url, "--token", TOKEN]
    process, address = subprocess.Popen(argv, stdin=subprocess.DEVNULL), f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not answers(address):
            assert process.poll() is None, "the agent server ended"
            assert time.monotonic() < deadline, "the agent server does not answer"
            time.sleep(0.1)
        yield address
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()


def answers(address: str) -> bool:
    try:
        return httpx.get(address).status_code == 200
    except httpx.TransportError:
        return False


def rollout(address: str, row: dict[str, Any]) -> VerifyResponse:
    body = {"responses_create_params": {"input": "Go on."}} | row
    answer = httpx.post(f"{address}/run", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return VerifyResponse.model_validate(answer.json())


def test_gym_rows_become_rollouts(url: str, client: PolarnodeClient, tmp_path: Path) -> None:
    file = tmp_path / "template.toml"
    file.write_text(TEMPLATE)
    rows: list[dict[str, Any]] = [{"seconds": "0.2", "_ng_rollout_id": f"{number}-0"} for number in range(6)]
    with agent(url, file) as address:
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(lambda row: rollout(address, row), rows))
        ours = [(each.model_extra or {})["polarnode"] for each in found]
        assert len({each["session_id"] for each in ours}) == 6
        for answer, own in zip(found, ours, strict=True):
            trajectory = client.trajectory(own["session_id"])
            [trace] = trajectory.traces
            delivered = [token for _, ids in message_log(answer.response) for token in ids]
            assert delivered == list(trace.token_ids)
            assert (answer.reward, answer.mask_sample) == (trajectory.reward, False)
        again = rollout(address, rows[0])
        assert (again.model_extra or {})["polarnode"] == ours[0], "a rollout with a name is one session"
        body = {"verify_responses": [json.loads(each.model_dump_json()) for each in found]}
        metrics = AggregateMetrics.model_validate(
            httpx.post(f"{address}/aggregate_metrics", json=body).json()
        )
        assert metrics.key_metrics["mean/reward"] == pytest.approx(found[0].reward)
