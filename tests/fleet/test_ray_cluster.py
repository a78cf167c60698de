"""The launcher `ray` on a cluster of four raylets: whatever of Ray is killed, hangs or is gone, the nodes and
their sessions go on, and the actors that come next adopt them.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio
from attrs import define, evolve, field
from fleet_kit import KIT, Reader, hollow_task
from postgres_kit import running_cluster
from ray_cluster import ENVIRONMENT

from polarnode.client.asynchronous import AsyncPolarnodeClient
from polarnode.fleet import ray_launcher
from polarnode.fleet.ray_host import NodeRecord, process_start
from polarnode.fleet.ray_launcher import RayNodes, ray_nodes, stop_nodes
from polarnode.fleet.ray_machines import RayOrder
from polarnode.support.locks import is_locked

NAMES = ("m0", "m1", "m2")
ORPHAN_S = 3.0
THROUGH_ALL_S = 45.0  # of a task's sessions: from before the first death until after the last


@define(eq=False, kw_only=True)
class RayCluster:
    """A cluster's process, and the pids of its parts."""

    process: trio.Process
    address: str
    gcs: int
    raylets: dict[str, int]


@asynccontextmanager
async def ray_cluster(port: int = 0) -> AsyncIterator[RayCluster]:
    """A head and a raylet for each of NAMES. Everything of it ends with the block."""
    folder = tempfile.mkdtemp(prefix="ray-")  # short: Ray's sockets are below it
    argv = (sys.executable, str(KIT / "ray_cluster.py"), folder, str(port), *NAMES)
    with open(Path(folder) / "cluster.log", "wb") as log:  # noqa: ASYNC230
        process = await trio.lowlevel.open_process(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = b""
        with trio.fail_after(120):
            while not line.endswith(b"\n"):
                piece = await process.stdout.receive_some()
                assert piece, (Path(folder) / "cluster.log").read_text()
                line += piece
        yield RayCluster(process=process, **json.loads(line))
    finally:
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()
            with trio.move_on_after(20):
                await process.wait()
            await process.stdout.aclose()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            end_processes_of(folder)
            shutil.rmtree(folder, ignore_errors=True)


def end_processes_of(folder: str) -> None:
    """Kill what a killed raylet or head left behind: each of them has the cluster's folder in its arguments."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                if folder.encode() in (path / "cmdline").read_bytes():
                    os.kill(int(path.name), signal.SIGKILL)


@define(eq=False, kw_only=True)
class RayFleet:
    """The nodes of a Ray cluster on one log, and what a reader of one of them got."""

    folder: Path
    nodes: RayNodes
    client: AsyncPolarnodeClient
    reader: Reader = field(factory=Reader)
    tasks: dict[str, int] = field(factory=dict)

    def pids(self) -> dict[str, int]:
        """The nodes' processes that live."""
        found = {name: NodeRecord.read(self.folder / f"{name}.json") for name in NAMES}
        return {
            name: each.pid for name, each in found.items() if each and process_start(each.pid) == each.began
        }

    def holder(self, name: str) -> int:
        """The actor that holds a node's lifeline, 0 for none. The kernel lists its locks by inode."""
        file = self.folder / f"{name}.lock"
        if file.exists() and is_locked(file):
            for line in Path("/proc/locks").read_text().splitlines():
                parts = line.split()
                if parts[1] == "FLOCK" and parts[5].endswith(f":{file.stat().st_ino}"):
                    return int(parts[4])
        return 0

    async def submit(self, seconds: float) -> str:
        """A task of four sessions."""
        submitted = await self.client.submit(hollow_task(seconds=seconds))
        self.tasks[submitted.task_id] = 4
        return submitted.task_id

    async def ended(self, task_id: str) -> None:
        with trio.fail_after(90):
            while f"group:{task_id}" not in self.reader.events:  # noqa: ASYNC110
                await trio.sleep(0.05)

    async def read(self) -> None:
        async for event in self.client.trajectories(consumer="reader", ack=True):
            self.reader.add(event.kind, event.key, event.data)


async def until(holds: Callable[[], Any], *, patience_s: float = 60.0) -> None:
    with trio.fail_after(patience_s):
        while not holds():  # noqa: ASYNC110
            await trio.sleep(0.05)


@asynccontextmanager
async def ray_fleet(order: RayOrder, folder: Path) -> AsyncIterator[RayFleet]:
    async with AsyncExitStack() as stack:
        nodes = await stack.enter_async_context(ray_nodes(order, folder))
        await until(lambda: len(nodes.urls) == len(NAMES), patience_s=120)
        client = AsyncPolarnodeClient(nodes.urls["m0"], patience_s=60, ack_every_s=0.0)
        stack.push_async_callback(client.aclose)
        fleet = RayFleet(folder=Path(order.folder), nodes=nodes, client=client)
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(fleet.read)
        yield fleet
        nursery.cancel_scope.cancel()


def incarnations(dsn: str) -> list[tuple[str, str]]:
    """Each start of a node that the log has seen, and how it stands."""
    with psycopg.connect(dsn) as db:
        return db.execute("SELECT name, state FROM polarnode.nodes ORDER BY name").fetchall()


def end_nodes(folder: Path) -> None:
    for record in map(NodeRecord.read, folder.glob("*.json")):
        if record is not None and process_start(record.pid) == record.began:
            with suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)


# ── what is killed ────────────────────────────────────────────────────────────


async def actor_killed(fleet: RayFleet) -> None:
    """Ray runs the actor again, and it adopts the node."""
    await until(lambda: all(map(fleet.holder, NAMES)))
    actor = fleet.holder("m0")
    os.kill(actor, signal.SIGKILL)
    await until(lambda: fleet.holder("m0") not in (0, actor))


async def driver_killed(fleet: RayFleet) -> None:
    """The launcher starts another one, which finds the same actors."""
    actors, starts = [*map(fleet.holder, NAMES)], fleet.nodes.driver_starts
    assert fleet.nodes.driver is not None
    fleet.nodes.driver.kill()
    fleet.nodes.first_answer = trio.Event()
    await until(lambda: fleet.nodes.driver_starts > starts)
    with trio.fail_after(60):
        await fleet.nodes.first_answer.wait()
    assert [*map(fleet.holder, NAMES)] == actors


async def raylets_hang_and_die(fleet: RayFleet, cluster: RayCluster) -> None:
    """One stands still while a task runs, and goes on; another is killed, and its actor ends with it."""
    os.kill(cluster.raylets["m1"], signal.SIGSTOP)
    await fleet.ended(await fleet.submit(1.0))
    os.kill(cluster.raylets["m1"], signal.SIGCONT)
    actor = fleet.holder("m2")
    os.kill(cluster.raylets["m2"], signal.SIGKILL)
    await until(lambda: fleet.holder("m2") != actor)
    await fleet.ended(await fleet.submit(1.0))


async def head_killed(fleet: RayFleet, cluster: RayCluster) -> None:
    """Ray ends the driver and the actors; the nodes have work and a reader, so that they are no orphans."""
    driver = fleet.nodes.driver
    os.kill(cluster.gcs, signal.SIGKILL)
    await until(lambda: not any(map(fleet.holder, NAMES)))
    await until(lambda: fleet.nodes.driver is not driver)
    await fleet.ended(await fleet.submit(2 * ORPHAN_S))


async def another_head(fleet: RayFleet) -> None:
    """Actors of a cluster that knows nothing of the first one adopt its nodes."""
    await until(lambda: all(map(fleet.holder, NAMES)), patience_s=120)
    await fleet.ended(await fleet.submit(1.0))


async def test_nodes_run_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ray_launcher, "PAUSES", evolve(ray_launcher.PAUSES, longest_s=2.0))
    folder = tmp_path / "n"
    command = (str(KIT / "hollow_node.py"), "--folder", "{state}", "--ports", "{port}")
    async with AsyncExitStack() as stack:
        dsn = stack.enter_context(running_cluster()).database()
        order = RayOrder(
            address="auto",
            gpus_per_node=0,
            folder=str(folder),
            command=command,
            orphan_s=ORPHAN_S,
            log=dsn,
        )
        stack.callback(end_nodes, folder)
        first = await stack.enter_async_context(AsyncExitStack())
        cluster = await first.enter_async_context(ray_cluster())
        order = evolve(order, address=cluster.address)
        async with ray_fleet(order, tmp_path) as fleet:
            pids = fleet.pids()
            assert set(pids) == set(NAMES)
            through_all = await fleet.submit(THROUGH_ALL_S)
            await actor_killed(fleet)
            await driver_killed(fleet)
            await raylets_hang_and_die(fleet, cluster)
            await head_killed(fleet, cluster)
            await first.aclose()
            await stack.enter_async_context(ray_cluster(int(cluster.address.rpartition(":")[2])))
            await another_head(fleet)
            await fleet.ended(through_all)
            assert fleet.pids() == pids, "no node noticed anything"
            assert incarnations(dsn) == [(name, "alive") for name in NAMES]
            fleet.reader.check(fleet.tasks)
        assert fleet.pids() == pids, "nodes outlive their launcher"
        assert await stop_nodes(order, tmp_path) == len(NAMES)
        await until(lambda: not fleet.pids())
