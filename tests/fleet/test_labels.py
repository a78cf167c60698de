"""Labels and models of a fleet's nodes: a task runs, and is kept, only where it may."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import copytree

import pytest
import trio
from fleet_kit import HollowProcess, Reader, hollow_nodes, hollow_task
from test_front import fleet, home_of, read, rows_known, until_up

from polarnode.client.asynchronous import AsyncPolarnodeClient
from polarnode.client.values import ClientError
from polarnode.core.codec.tasks import read_task
from polarnode.core.errors import Refused
from polarnode.http.link import Link
from polarnode.node.config import TINY_MODEL


async def relabelled(node: HollowProcess, **settings: object) -> None:
    """Start a node again with other settings."""
    await node.kill()
    node.settings |= settings
    await node.start()


@asynccontextmanager
async def asked(client: AsyncPolarnodeClient) -> AsyncIterator[Link]:
    """Requests to a front that are not repeated."""
    link = Link(url=client.base_url)
    try:
        yield link
    finally:
        await link.close()  # noqa: ASYNC102 - bounded there


async def test_a_task_runs_where_its_labels_are_also_after_a_death(tmp_path: Path) -> None:
    async with hollow_nodes(tmp_path, 3) as nodes:
        for node, gpu in zip(nodes, ("h100", "h100", "b200"), strict=True):
            await relabelled(node, labels={"gpu": gpu})
        async with fleet(nodes, tmp_path) as (front, client):
            await until_up(front, 3)
            task_id = (await client.submit(hollow_task(seconds=2.0, requires={"gpu": "h100"}))).task_id
            await rows_known(front, task_id)
            home = home_of(front, task_id, nodes)
            assert home in nodes[:2]
            with pytest.raises(
                ClientError, match="no node of this fleet has that: they have b200, h100"
            ) as caught:
                await client.submit(hollow_task(requires={"gpu": "a100"}))
            assert (caught.value.status, caught.value.path) == (400, "$.requires.gpu")
            (other,) = [node for node in nodes[:2] if node is not home]
            await home.kill()
            with trio.fail_after(10):
                while home_of(front, task_id, nodes) is not other:  # noqa: ASYNC110
                    await trio.sleep(0.05)
            member = front.roster.of_journal(other.journal)
            assert member is not None
            with trio.fail_after(10):
                while task_id not in (member.rows or {}):  # noqa: ASYNC110
                    await trio.sleep(0.05)
            row = (member.rows or {})[task_id]
            assert (row.second, row.requires) == ("", {"gpu": "h100"}), "no other node could run it"
            name = home.folder.name
            async with asked(client) as link:
                value = hollow_task(requires={"gpu": "h100", "node": name})
                answer = await link.ask("POST", "/v1/tasks", value=value)
                assert (answer.status, answer.headers["retry-after"]) == (429, "5")
                assert f"no node that has gpu=h100, node={name} is up" in answer.json["error"]["message"]
                status = (await link.ask("GET", "/v1/status")).json
                assert status["run_again"] == {name: 4}, "all its places, by nobody's fault but the machine's"
                assert {each["name"]: each["run_again"] for each in status["nodes"]}[name] == 4
                metrics = (await link.ask("GET", "/metrics")).body.decode()
                assert f'polarnode_fleet_places_run_again_total{{node="{name}"}} 4' in metrics
            reader = Reader()
            await read(client, reader, {task_id: 4}, "trainer")
            reader.check({task_id: 4})
            assert {each["node"] for key, each in reader.events.items() if key.startswith("traj")} == {
                other.folder.name
            }


async def test_one_able_node_keeps_its_tasks_alone_until_another_joins(tmp_path: Path) -> None:
    async with hollow_nodes(tmp_path, 2) as nodes, fleet(nodes, tmp_path) as (front, client):
        await relabelled(nodes[0], labels={"disk": "large"})
        await until_up(front, 2)
        found = front.roster.members[nodes[0].url]
        with trio.fail_after(10):
            while found.report is None or not found.report.labels:  # noqa: ASYNC110
                await trio.sleep(0.05)
        await until_up(front, 2)
        task_id = (await client.submit(hollow_task(seconds=60.0, requires={"disk": "large"}))).task_id
        with trio.fail_after(10):
            while task_id not in (found.rows or {}):  # noqa: ASYNC110
                await trio.sleep(0.05)
        assert (found.rows or {})[task_id].second == ""
        await nodes[0].kill()
        with trio.fail_after(20):
            while found.state != "gone":  # noqa: ASYNC110
                await trio.sleep(0.05)
        async with asked(client) as link:
            again = hollow_task(seconds=60.0, requires={"disk": "large"}, task_id=task_id)
            for method, path, value in (("POST", "/v1/tasks", again), ("GET", f"/v1/tasks/{task_id}", None)):
                answer = await link.ask(method, path, value=value)
                assert answer.status == 429, "begun on another node, it would be there twice"
                assert "the task is on node-0 alone" in answer.json["error"]["message"]
        await nodes[0].start()
        with trio.fail_after(20):
            while task_id not in (found.rows or {}):  # noqa: ASYNC110
                await trio.sleep(0.05)
        await relabelled(nodes[1], labels={"disk": "large"})
        with trio.fail_after(20):
            while (found.rows or {})[task_id].second != nodes[1].journal:  # noqa: ASYNC110
                await trio.sleep(0.05)


async def test_nodes_of_two_models_are_two_pools(tmp_path: Path) -> None:
    judge = copytree(TINY_MODEL, tmp_path / "judge")
    policy, other = f"simulated:{TINY_MODEL.name}", "simulated:judge"
    async with hollow_nodes(tmp_path, 3) as nodes:
        await relabelled(nodes[2], model=str(judge))
        async with fleet(nodes, tmp_path) as (front, client):
            await until_up(front, 3)
            assert (await client.status())["model"] == {"name": "", "names": [other, policy]}
            with pytest.raises(ClientError, match=f"serves {other}, {policy}") as caught:
                await client.submit(hollow_task())
            assert (caught.value.status, caught.value.path) == (400, "$.requires.model")
            with pytest.raises(ClientError, match=r"requires\.model is missing") as caught:
                async with client.capture():
                    pass
            tasks = {
                (await client.submit(hollow_task(seconds=0.3, requires={"model": model}))).task_id: 4
                for model in (policy, other)
            }
            reader = Reader()
            await read(client, reader, tasks, "trainer")
            reader.check(tasks)
            places = [each for key, each in reader.events.items() if key.startswith("traj")]
            for each in places:
                assert (each["model"]["name"] == other) == (each["node"] == "node-2")
            assert {each["model"]["name"] for each in places} == {policy, other}
            with pytest.raises(Refused, match="requires"):
                front.node_for(read_task(hollow_task(requires={"model": "m"})))


async def test_a_node_alone_refuses_what_it_has_not(tmp_path: Path) -> None:
    with_label = hollow_nodes(tmp_path, 1, settings={"labels": {"gpu": "h100"}})
    async with with_label as nodes, fleet(nodes, tmp_path) as (front, client):
        await until_up(front, 1)
        for requires, path in (
            ({"gpu": "b200"}, "$.requires.gpu"),
            ({"site/a": "1"}, "$.requires['site/a']"),
        ):
            with pytest.raises(ClientError, match=r"this node has gpu=h100, model=.*, node=node-0") as caught:
                await client.submit(hollow_task(requires=requires))
            assert (caught.value.status, caught.value.path) == (400, path)
        assert (await client.submit(hollow_task(seconds=0.1, requires={"gpu": "h100"}))).created
