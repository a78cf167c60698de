"""A front over real nodes in processes: tasks placed in two journals, deaths, hangs, restarts of all of them."""

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from fleet_kit import HollowProcess, Reader, free_port, hollow_nodes, hollow_task

from polarnode.client.asynchronous import AsyncPolarnodeClient
from polarnode.client.values import ClientError, Unreachable
from polarnode.fleet.config import FleetConfig
from polarnode.fleet.front import Front
from polarnode.fleet.link import Link
from polarnode.fleet.serving import serve_front
from polarnode.rollouts.office import ANSWER_S


@asynccontextmanager
async def fleet(
    nodes: list[HollowProcess], folder: Path, *, patience_s: float = 60.0
) -> AsyncIterator[tuple[Front, AsyncPolarnodeClient]]:
    config = FleetConfig(nodes=tuple(node.url for node in nodes), port=0, state_dir=str(folder / "front"))
    async with serve_front(config.check()) as (front, address):
        client = AsyncPolarnodeClient(
            f"http://127.0.0.1:{address.port}", patience_s=patience_s, ack_every_s=0.0
        )
        try:
            yield front, client
        finally:
            await client.aclose()  # noqa: ASYNC102 - bounded there


async def until_up(front: Front, count: int) -> None:
    with trio.fail_after(30):
        while len(front.roster.in_state("up")) < count:  # noqa: ASYNC110
            await trio.sleep(0.05)


async def until_joined(front: Front, count: int) -> None:
    """Wait until so many nodes have answered a front, which may not be in office."""
    with trio.fail_after(30):
        while sum(each.answers for each in front.roster.members.values()) < count:  # noqa: ASYNC110
            await trio.sleep(0.05)


async def read(client: AsyncPolarnodeClient, reader: Reader, tasks: dict[str, int], consumer: str) -> None:
    """Read until the groups of all tasks came."""
    with trio.fail_after(90):
        async for event in client.trajectories(consumer=consumer, ack=True):
            reader.add(event.kind, event.key, event.data)
            if all(f"group:{task_id}" in reader.events for task_id in tasks):
                return


def home_of(front: Front, task_id: str, nodes: list[HollowProcess]) -> HollowProcess | None:
    """The node that owns a task; None while that changes."""
    homes = [
        member.journal
        for member in front.roster.members.values()
        if (row := (member.rows or {}).get(task_id)) is not None and row.role == "home"
    ]
    return next((node for node in nodes if homes == [node.journal]), None)


async def rows_known(front: Front, task_id: str) -> None:
    with trio.fail_after(10):
        while sum(task_id in (each.rows or {}) for each in front.roster.members.values()) < 2:  # noqa: ASYNC110
            await trio.sleep(0.05)


async def test_three_nodes_are_one_to_their_trainer(tmp_path: Path) -> None:
    async with hollow_nodes(tmp_path, 3) as nodes, fleet(nodes, tmp_path) as (front, client):
        await until_up(front, 3)
        tasks: dict[str, int] = {}
        for number in range(6):
            found = await client.submit(hollow_task(seconds=0.5, task_id=f"t{number}"))
            tasks[found.task_id] = 4
        again = await client.submit(hollow_task(seconds=0.5, task_id="t0"))
        assert not again.created
        with pytest.raises(ClientError, match="was submitted before with another body") as caught:
            await client.submit(hollow_task(seconds=0.6, task_id="t0"))
        assert caught.value.status == 409
        reader = Reader()
        await read(client, reader, tasks, "trainer")
        reader.check(tasks)
        assert reader.repeated == 0
        homes = {event["task_id"]: event for key, event in reader.events.items() if key.startswith("task:")}
        assert len(homes) >= 5
        assert len({each["node"] for key, each in reader.events.items() if key.startswith("traj")}) == 3
        status = await client.task_status("t3")
        assert status.finished
        whole = await client.trajectory(status.sessions[0].session_id)
        assert whole.task_id == "t3"
        listed = await client.tasks()
        assert {each["task_id"] for each in listed} == set(tasks)
        (consumer,) = await client.consumers()
        assert consumer.behind_events < 6, "those after the last group but one"


async def test_the_tasks_of_a_killed_node_end_elsewhere_once(tmp_path: Path) -> None:
    async with hollow_nodes(tmp_path, 3) as nodes, fleet(nodes, tmp_path) as (front, client):
        await until_up(front, 3)
        tasks = {(await client.submit(hollow_task(seconds=3.0))).task_id: 4 for _ in range(3)}
        task_id = next(iter(tasks))
        await rows_known(front, task_id)
        home = home_of(front, task_id, nodes)
        assert home is not None
        reader = Reader()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, client, reader, tasks, "trainer")
            await trio.sleep(0.5)
            await home.kill()
            with trio.fail_after(5):  # a killed process: adopted, and running again
                while home_of(front, task_id, nodes) in (None, home):  # noqa: ASYNC110
                    await trio.sleep(0.05)
            await home.start()
        reader.check(tasks)
        await until_up(front, 3)
        with trio.fail_after(20):  # the one that came back knows that it moved
            while home_of(front, task_id, nodes) in (None, home):  # noqa: ASYNC110
                await trio.sleep(0.1)


async def test_a_node_that_hangs_loses_its_tasks_and_publishes_nothing_of_them(tmp_path: Path) -> None:
    async with hollow_nodes(tmp_path, 3) as nodes, fleet(nodes, tmp_path) as (front, client):
        await until_up(front, 3)
        task_id = (await client.submit(hollow_task(seconds=2.0))).task_id
        await rows_known(front, task_id)
        home = home_of(front, task_id, nodes)
        assert home is not None
        home.stop()
        reader = Reader()
        await read(client, reader, {task_id: 4}, "trainer")
        home.go_on()
        await until_up(front, 3)
        second = (await client.submit(hollow_task(seconds=0.2))).task_id
        await read(client, reader, {task_id: 4, second: 4}, "trainer")
        reader.check({task_id: 4, second: 4})


async def test_a_front_that_is_started_elsewhere_goes_on(tmp_path: Path) -> None:
    async with hollow_nodes(tmp_path, 3) as nodes:
        async with fleet(nodes, tmp_path / "one") as (front, client):
            await until_up(front, 3)
            task_id = (await client.submit(hollow_task(seconds=2.0))).task_id
            term = front.term
        async with fleet(nodes, tmp_path / "two") as (front, client):
            reader = Reader()
            await read(client, reader, {task_id: 4}, "trainer")
            reader.check({task_id: 4})
            await until_up(front, 3)
            assert front.term > term
            again = await client.submit(hollow_task(seconds=2.0, task_id=task_id))
            assert not again.created


@asynccontextmanager
async def front_process(nodes: list[HollowProcess], folder: Path) -> AsyncIterator[tuple[trio.Process, str]]:
    """A front in a process of its own, and its address."""
    port = free_port()
    argv = [sys.executable, "-m", "polarnode.cli", "fleet", "--nodes", ",".join(each.url for each in nodes)]
    argv += ["--port", str(port), "--state-dir", str(folder)]
    process = await trio.lowlevel.open_process(argv, stdout=-3, stderr=-3, start_new_session=True)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


async def test_a_front_that_hangs_is_replaced_and_follows_when_it_goes_on(tmp_path: Path) -> None:
    async with hollow_nodes(tmp_path, 3) as nodes, front_process(nodes, tmp_path / "one") as (first, url):
        link = Link(url=url)

        async def until_first(in_office: bool) -> None:
            with trio.fail_after(60):
                while True:
                    with suppress(Unreachable, ClientError):
                        if (await link.call("GET", "/v1/status"))["front"]["in_office"] is in_office:
                            return
                    await trio.sleep(0.2)

        await until_first(True)
        async with fleet(nodes, tmp_path / "two") as (second, client):
            await until_joined(second, 3)
            await trio.sleep(ANSWER_S + 1)
            assert not second.in_office, "the first one answers"
            os.kill(first.pid, signal.SIGSTOP)
            with trio.fail_after(60):
                while not second.in_office:  # noqa: ASYNC110
                    await trio.sleep(0.1)
            task_id = (await client.submit(hollow_task(seconds=1.0))).task_id
            await rows_known(second, task_id)
            home = home_of(second, task_id, nodes)
            assert home is not None
            await home.kill()
            reader = Reader()
            await read(client, reader, {task_id: 4}, "trainer")
            reader.check({task_id: 4})
            os.kill(first.pid, signal.SIGCONT)
            await until_first(False)
            assert second.in_office
        await until_first(True)
        await link.close()


async def test_a_task_that_everybody_has_is_not_begun_anew_while_its_home_is_away(tmp_path: Path) -> None:
    """Its copy was dropped. Sent again to a front that never saw the home, as by a client without an answer."""
    spec = hollow_task(seconds=0.1, task_id="over")
    async with hollow_nodes(tmp_path, 3) as nodes:
        async with fleet(nodes, tmp_path / "one") as (front, client):
            await until_up(front, 3)
            before = await client.submit(spec, idempotency_key="ours")
            await rows_known(front, "over")
            home = home_of(front, "over", nodes)
            assert home is not None
            with trio.fail_after(60):
                async for event in client.trajectories(consumer="trainer"):
                    if event.kind == "task":
                        await client.acknowledge("trainer", event.id)
                        break
            with trio.fail_after(30):
                while any("over" in (each.rows or {}) for each in front.roster.members.values()):  # noqa: ASYNC110
                    await trio.sleep(0.1)
        await home.kill()
        async with fleet(nodes, tmp_path / "two", patience_s=0.0) as (front, client):
            with trio.fail_after(60):
                while not (front.in_office and front.roster.settled):  # noqa: ASYNC110
                    await trio.sleep(0.05)
            for key in ("ours", "another"):
                with pytest.raises(ClientError, match="alone, which does not answer") as caught:
                    await client.submit(spec, idempotency_key=key)
                assert caught.value.status == 429
            await home.start()
            await until_up(front, 3)
            again = await client.submit(spec, idempotency_key="ours")
            assert (again.created, again.session_ids) == (False, before.session_ids)


async def test_a_cancelled_task_stays_cancelled_when_its_node_dies(tmp_path: Path) -> None:
    async with hollow_nodes(tmp_path, 3) as nodes, fleet(nodes, tmp_path) as (front, client):
        await until_up(front, 3)
        task_id = (await client.submit(hollow_task(seconds=60.0))).task_id
        await rows_known(front, task_id)
        home = home_of(front, task_id, nodes)
        assert home is not None
        assert await client.cancel(task_id)
        await home.kill()
        reader = Reader()
        await read(client, reader, {task_id: 4}, "trainer")
        reader.check({task_id: 4})
        assert {each["status"] for each in reader.events[f"group:{task_id}"]["sessions"]} == {"cancelled"}


async def test_no_copy_of_an_accepted_task_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front decides between a home's answer and its next report, which is the first to have the task."""
    dropped: list[str] = []
    usual = Link.call

    async def call(link: Link, method: str, path: str, **more: Any) -> Any:
        if method == "DELETE":
            dropped.append(path)
        return await usual(link, method, path, **more)

    monkeypatch.setattr(Link, "call", call)
    async with hollow_nodes(tmp_path, 2) as nodes, fleet(nodes, tmp_path) as (front, client):
        await until_up(front, 2)
        for number in range(12):
            await client.submit(hollow_task(seconds=60.0, task_id=f"t{number}"))
            await trio.sleep(0.03)
        await trio.sleep(2.5)
        assert not dropped
        assert all(len(member.rows or {}) == 12 for member in front.roster.members.values())
