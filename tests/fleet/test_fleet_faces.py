"""What trainers bring along works on a fleet as on a node: Polar's client, and NeMo Gym's rollouts."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from fleet_kit import hollow_nodes, hollow_task
from polar_client import PolarClient
from polar_client import Refused as PolarRefused
from polarnode.fleet.config import FleetConfig
from polarnode.fleet.front import Front
from polarnode.fleet.service import joined_admin, polar_routes
from polarnode.fleet.serving import serve_front

from polarnode.client.asynchronous import AsyncPolarnodeClient
from polarnode.client.values import Unreachable
from polarnode.core.codec.tasks import read_task
from polarnode.integrations.nemo_gym.app import Rollouts

REQUEST: dict[str, Any] = {
    "instruction": "x",
    "num_samples": 2,
    "timeout_seconds": 60,
    "agent": {"harness": "shell", "custom_shell": {"command": "hollow 0.5 2"}},
    "builder": {"strategy": "prefix_merging", "config": {}},
    "evaluator": {"strategy": "session_completed"},
    "metadata": {"group_id": 3},
}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[tuple[Front, str]]:
    async with hollow_nodes(tmp_path, 2) as nodes:
        config = FleetConfig(
            nodes=tuple(node.url for node in nodes), port=0, state_dir=str(tmp_path / "front")
        )
        async with serve_front(config) as (front, address):
            with trio.fail_after(30):
                while len(front.roster.in_state("up")) < 2:  # noqa: ASYNC110
                    await trio.sleep(0.05)
            yield front, f"http://127.0.0.1:{address.port}"


async def test_polars_client_works_on_a_fleet(fleet: tuple[Front, str]) -> None:
    front, url = fleet
    client = PolarClient(url=url)
    with trio.fail_after(60):
        for number in range(2):
            assert await client.submit({**REQUEST, "task_id": f"p{number}"}) == f"p{number}"
        for number in range(2):
            found = await client.finished(f"p{number}")
            assert found.completed_sessions == found.total_sessions == 2
        rows = (await client.ask("GET", "/tasks"))["tasks"]
        assert {row["task_id"] for row in rows} == {"p0", "p1"}
        assert len(await client.ask("GET", "/nodes")) == 2
        assert (await client.ask("GET", "/health"))["nodes"] == 2
        assert await client.submit({**REQUEST, "task_id": "p0"}) == "p0", "an id that is used again"
        assert (await client.finished("p0")).completed_sessions == 2
        assert any("p0" in (each.rows or {}) for each in front.roster.members.values())


async def test_polars_cancel_reaches_both_journals(fleet: tuple[Front, str]) -> None:
    front, url = fleet
    client, slow = PolarClient(url=url), {"command": "hollow 60 2"}
    await client.submit({**REQUEST, "task_id": "p", "agent": {"harness": "shell", "custom_shell": slow}})
    said = await client.ask("DELETE", "/rollout/task/p")
    assert (said["task_id"], said["cancelled"]) == ("p", True)
    with trio.fail_after(20):
        await client.finished("p")
    with pytest.raises(PolarRefused, match="404"):
        await client.ask("GET", "/rollout/task/unknown")
    await client.ask("DELETE", "/rollout/task/early", register_if_missing="true")
    with pytest.raises(PolarRefused, match="409"):
        await client.submit({**REQUEST, "task_id": "early"})
    assert {row[:2] for row in polar_routes(front).rows} >= {("GET", "/health"), ("GET", "/nodes")}


async def test_nemo_gyms_rollouts_work_on_a_fleet(fleet: tuple[Front, str]) -> None:
    _, url = fleet
    client = AsyncPolarnodeClient(url, patience_s=60)
    rollouts, spec = Rollouts(client), read_task(hollow_task(samples=1, seconds=0.3))
    found: list[str] = []

    async def run(key: str) -> None:
        found.append((await rollouts.run(spec, key=key)).outcome.status)

    with trio.fail_after(25):  # less than a look takes: the stream wakes them
        async with trio.open_nursery() as nursery:
            await nursery.start(rollouts.follow)
            async with trio.open_nursery() as runs:
                for number in range(4):
                    runs.start_soon(run, f"key-{number}")
            nursery.cancel_scope.cancel()
    await client.aclose()
    assert found == ["completed"] * 4


async def test_a_rollout_servers_admin_routes_answer_for_all_nodes(fleet: tuple[Front, str]) -> None:
    _, url = fleet
    client = PolarClient(url=url)
    found = await client.ask("POST", "/rollout/admin/policy_version", version="12")
    assert (found["all_updated"], found["policy_version"]) == (False, 12)
    assert sorted(each["node_id"] for each in found["nodes"]) == ["node-0", "node-1"]
    assert (await client.ask("GET", "/nodes/node-1"))["node_id"] == "node-1"
    for method, path in (("GET", "/nodes/node-9"), ("POST", "/admin/policy_version"), ("GET", "/sessions")):
        with pytest.raises(PolarRefused, match="404"):
            await client.ask(method, path)


def test_answers_of_nodes_are_one_and_an_error_of_one_is_no_success() -> None:
    row = {"node_id": "a", "status": "ok", "response": {}}
    one = {"all_paused": True, "all_drained": True, "inflight": 2, "nodes": [row]}
    both = joined_admin([("a", one), ("b", {**one, "all_drained": False})])
    assert both == {"all_paused": True, "all_drained": False, "inflight": 4, "nodes": [row, row]}
    failed = joined_admin([("a", one), ("b", Unreachable("gone"))])
    assert (failed["all_paused"], failed["inflight"]) == (False, 2)
    assert failed["nodes"] == [row, {"node_id": "b", "status": "error", "response": {"error": "gone"}}]
